"""Looks at every operation for copies between host and device, and writes down those that make the host wait.

CUDA's rule for a copy that was asked for without waiting: from host to device the host goes on if its memory is pinned, or if
so little is copied that the driver takes it over at once (SMALL); from device to host only into pinned memory.
"""

import sys
from collections import Counter
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fake_cuda import torch_cuda

SMALL = 64 * 1024
"""Bytes from pageable memory that CUDA's driver takes over before it returns (CUDA's "API synchronization behavior")."""


class Watched(TorchDispatchMode):
    """Within it, waits and copies of this process are counted by kind and by the line that asked."""

    def __init__(self) -> None:
        super().__init__()
        self.waits, self.copies, self.operations = Counter[str](), Counter[str](), Counter[str]()
        self._pinned: set[StorageWeakRef] = set()
        self._patch = patch.object(torch.Tensor, "pin_memory", self._pin(torch.Tensor.pin_memory))

    def __enter__(self) -> "Watched":
        torch_cuda.notice = lambda what: self._wait(what)
        self._patch.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()
        torch_cuda.notice = lambda what: None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        self.operations[name] += 1
        result = func(*args, **kwargs)
        if kwargs.get("pin_memory") and isinstance(result, torch.Tensor):
            self._pinned.add(StorageWeakRef(result.untyped_storage()))
        if name in ("_to_copy", "copy_"):
            target, source = (args[0], args[1]) if name == "copy_" else (result, args[0])
            self._look(source, target, bool(kwargs.get("non_blocking") or (name == "copy_" and args[2:3] == (True,))))
        return result

    def _pin(self, pin_memory: Any) -> Any:
        def pinned(tensor: torch.Tensor, *args: Any) -> torch.Tensor:
            result = tensor.clone()
            self._pinned.add(StorageWeakRef(result.untyped_storage()))
            return result

        return pinned

    def _look(self, source: torch.Tensor, target: torch.Tensor, asynchronous: bool) -> None:
        if source.device.type == target.device.type:
            return
        up = target.device.type == "cuda"
        host = source if up else target
        pinned = StorageWeakRef(host.untyped_storage()) in self._pinned
        kind = "host to device" if up else "device to host"
        if asynchronous and (pinned or (up and host.nbytes <= SMALL)):
            self.copies[kind] += 1
        else:
            self._wait(f"{kind}, {'not pinned' if asynchronous else 'blocking'}")

    def _wait(self, what: str) -> None:
        self.waits[f"{what}: {_asking_line()}"] += 1


def _asking_line() -> str:
    """The innermost line of this package or of transformers that is being run, such as hf_longctx/models/head.py:12."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        for package in ("hf_longctx/", "transformers/", "fsdp/"):
            _before, found, rest = file.rpartition(package)
            if found and "fake_cuda" not in file:
                return f"{package}{rest}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"
