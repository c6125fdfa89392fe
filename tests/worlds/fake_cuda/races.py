"""Looks for two faults of programs with several streams, in steps of which nothing runs (clocks.py).

    race          two streams access the same memory, one of them writes, and neither is known to come first
    early free    a tensor is dropped while another stream may still use it: torch's allocator gives its memory to the next
                  request of the stream that made it, at once

Batches of messages are accesses on a stream of their communicator, which begins after what the current stream was given. That
NCCL notes its tensors with the allocator (record_stream) is left out: nothing may need it.
"""

import itertools
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.worlds.fake_cuda.clocks import CURRENT, Clock, Stream, join
from tests.worlds.fake_cuda.places import asking_line

MAKES_MEMORY = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
"""Operations that write nothing."""


@dataclass(frozen=True)
class _Access:
    stream: int
    number: int
    place: str
    span: range
    """bytes of the storage; all of it where rows are apart"""

    def meets(self, other: "_Access") -> bool:
        """Tell whether both reach the same bytes."""
        return self.span.start < other.span.stop and other.span.start < self.span.stop

    def covers(self, other: "_Access") -> bool:
        """Tell whether it reaches all that the other does."""
        return self.span.start <= other.span.start and other.span.stop <= self.span.stop

    def before(self, stream: Stream) -> bool:
        """Tell whether it is known to come before what the stream does next."""
        return stream.clock.get(self.stream, 0) >= self.number


@dataclass
class _Memory:
    """What is known of a storage."""

    home: Stream
    """for which the allocator made it"""
    place: str
    written: list[_Access] = field(default_factory=list)
    """the last of each byte"""
    read: list[_Access] = field(default_factory=list)
    """since it was written"""
    recorded: set[int] = field(default_factory=set)
    """streams that the allocator knows of"""


def _span(tensor: torch.Tensor) -> range:
    if not tensor.is_contiguous():
        return range(tensor.untyped_storage().nbytes())
    first = tensor.storage_offset() * tensor.element_size()
    return range(first, first + tensor.nbytes)


class Work:
    """A batch of messages."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def wait(self) -> bool:
        join(CURRENT[-1].clock, self._clock)
        return True


class Raced(TorchDispatchMode):
    """Within it, accesses to memory of the device are followed."""

    def __init__(self) -> None:
        super().__init__()
        self.faults = Counter[str]()
        self.accesses = 0
        self._memory: dict[int, _Memory] = {}
        self._communicators: dict[Any, Stream] = {}
        self._patches = (
            patch.object(dist, "batch_isend_irecv", self._batch),
            patch.object(torch.Tensor, "record_stream", self._record),
        )

    @property
    def communicators(self) -> int:
        """How many streams messages have travelled on."""
        return len(self._communicators)

    def __enter__(self) -> "Raced":
        for patched in self._patches:
            patched.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for patched in self._patches:
            patched.stop()
        self._memory.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name.startswith("prim"):
            return result
        aliases = [argument.alias_info for argument in func._schema.arguments]
        for alias, value in itertools.zip_longest(aliases, args[: len(aliases)]):
            for tensor in value if isinstance(value, list | tuple) else (value,):
                if alias is None or alias.is_write:
                    self._look(tensor, CURRENT[-1], name, writes=alias is not None)
        if not any(aliases):
            for tensor in result if isinstance(result, list | tuple) else (result,):
                if name in MAKES_MEMORY:
                    self._known(tensor)
                else:
                    self._look(tensor, CURRENT[-1], name, writes=True)
        return result

    def _known(self, tensor: Any) -> _Memory | None:
        """Return what is known of a tensor's storage; None of what takes no memory of the device."""
        if not isinstance(tensor, FakeTensor) or tensor.device.type != "cuda" or tensor.numel() == 0:
            return None
        storage = tensor.untyped_storage()
        if id(storage) not in self._memory:
            self._memory[id(storage)] = _Memory(CURRENT[-1], asking_line())
            weakref.finalize(storage, self._freed, id(storage))
        return self._memory[id(storage)]

    def _freed(self, key: int) -> None:
        memory = self._memory.pop(key, None)
        if memory is None:
            return
        for access in (*memory.read, *memory.written):
            if not access.before(memory.home) and access.stream not in memory.recorded:
                self.faults[f"early free of what {memory.place} made: {access.place}"] += 1

    def _look(self, tensor: Any, stream: Stream, what: str, writes: bool) -> None:
        memory = self._known(tensor)
        if memory is None:
            return
        self.accesses += 1
        access = _Access(stream.stream_id, stream.access(), f"{what} at {asking_line()}", _span(tensor))
        for other in (*memory.written, *(memory.read if writes else ())):
            if other.stream != access.stream and other.meets(access) and not other.before(stream):
                self.faults[f"race of {other.place} and {access.place}"] += 1
        if writes:
            memory.written = [*(other for other in memory.written if not access.covers(other)), access]
            memory.read = [other for other in memory.read if not access.covers(other)]
        else:
            memory.read.append(access)

    def _record(self, tensor: torch.Tensor, stream: Stream) -> None:
        memory = self._known(tensor)
        if memory is not None:
            memory.recorded.add(stream.stream_id)

    def _batch(self, operations: Sequence[dist.P2POp]) -> list[Work]:
        stream = self._communicators.setdefault(operations[0].group, Stream())
        stream.wait_stream(CURRENT[-1])
        for operation in operations:
            receives = operation.op is dist.irecv
            self._look(operation.tensor, stream, "receive" if receives else "send", writes=receives)
        return [Work(dict(stream.clock))]
