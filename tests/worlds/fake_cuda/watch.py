"""Looks at every operation for copies between host and device, and writes down those that make the host wait.

CUDA's rule for a copy that was asked for without waiting: from host to device the host goes on if its memory is pinned, or if
so little is copied that the driver takes it over at once (SMALL); from device to host only into pinned memory.
"""

from collections import Counter
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.worlds.fake_cuda import clocks
from tests.worlds.fake_cuda.places import asking_line
from tests.worlds.fake_cuda.torch_cuda import PINNED

SMALL = 64 * 1024
"""Bytes from pageable memory that CUDA's driver takes over before it returns (CUDA's "API synchronization behavior")."""


class Watched(TorchDispatchMode):
    """Within it, waits and copies of this process are counted by kind and by the line that asked."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.copies, self.operations = Counter[str](), Counter[str](), Counter[str]()

    def __enter__(self) -> "Watched":
        clocks.notice = lambda what: self._wait(what)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        clocks.notice = lambda what: None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        self.operations[name] += 1
        result = func(*args, **kwargs)
        if kwargs.get("pin_memory") and isinstance(result, torch.Tensor):
            PINNED.add(StorageWeakRef(result.untyped_storage()))
        if name in ("_to_copy", "copy_"):
            target, source = (args[0], args[1]) if name == "copy_" else (result, args[0])
            self._look(source, target, bool(kwargs.get("non_blocking") or (name == "copy_" and args[2:3] == (True,))))
        return result

    def _look(self, source: torch.Tensor, target: torch.Tensor, asynchronous: bool) -> None:
        if source.device.type == target.device.type:
            return
        up = target.device.type == "cuda"
        host = source if up else target
        pinned = StorageWeakRef(host.untyped_storage()) in PINNED
        kind = "host to device" if up else "device to host"
        if asynchronous and (pinned or (up and host.nbytes <= SMALL)):
            self.copies[kind] += 1
        else:
            self._wait(f"{kind}, {'not pinned' if asynchronous else 'blocking'}")

    def _wait(self, what: str) -> None:
        self.waits[f"{what}: {asking_line()}"] += 1
