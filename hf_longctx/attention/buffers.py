"""Memory that messages leave from and arrive in, made once and used again.

On a GPU an operation of NCCL between two ranks notes with torch's allocator that its tensors are used on a stream of the
communicator's own (record_stream), and then their memory is free again only once the *device* has come there. The host prepares
whole layers ahead of the device, so that fresh tensors for each round would pile up: an exchange keeps its buffers instead.

Used again at once, as the host sees it: a batch of messages begins after all that the compute stream was given before it, and
whoever computes with what came, or writes to what was sent, waits for the batch first. So a buffer may be given back as soon as
its last use has been *issued*. One that is not given back, because of an error, is freed like any tensor.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, eq=False, slots=True)
class Buffer:
    """A flat tensor of so many elements, the first ones of a piece of memory. The same memory and size give the same object each
    time, in every layer: what is derived from it (views, operations that send it) is made once."""

    flat: torch.Tensor
    """[elements]"""
    memory: "_Memory"
    derived: dict[Hashable, Any]


@dataclass(eq=False, slots=True)
class _Memory:
    tensor: torch.Tensor
    elements: int
    given: dict[int, Buffer]
    """elements -> the buffer of so many"""

    def buffer(self, elements: int) -> Buffer:
        if elements not in self.given:
            derived: dict[Hashable, Any] = {}
            with torch.inference_mode(False):
                flat = self.tensor[:elements]
            flat.operations = derived  # type: ignore[attr-defined]  # of the exchange, by what they do
            self.given[elements] = Buffer(flat, self, derived)
        return self.given[elements]

    def forget(self) -> None:
        """Drop what was derived: buffers, views and operations hold each other, and would keep the memory until garbage is
        collected."""
        for buffer in self.given.values():
            buffer.derived.clear()
        self.given.clear()


@dataclass(eq=False)
class Buffers:
    """Buffers of one exchange, those that are not in use."""

    made: int = 0
    """Pieces of memory made so far."""
    _free: dict[tuple[torch.dtype, torch.device], list[_Memory]] = field(default_factory=dict)

    def take(self, elements: int, dtype: torch.dtype, device: torch.device, room: int) -> Buffer:
        """Give a buffer, whose values are any. One that must be made gets `room` elements at least, and takes the place of the
        smallest that is free, so that there are never more than were in use at once."""
        free = self._free.get((dtype, device))
        if free is None:
            free = self._free[dtype, device] = []
        if free and free[-1].elements == room and elements <= room:  # as it is within a layer
            memory = free.pop()
            return memory.given.get(elements) or memory.buffer(elements)
        best = smallest = None
        for memory in free:
            if memory.elements >= elements and (best is None or memory.elements < best.elements):
                best = memory
            if smallest is None or memory.elements < smallest.elements:
                smallest = memory
        leaves = best or smallest
        if leaves is not None:
            free.remove(leaves)
            del memory
        if best is None:
            with torch.inference_mode(False):  # what is made in inference mode could not be written outside of it
                self.made += 1
                if smallest is not None:
                    smallest.forget()
                smallest = leaves = None  # its memory is free before the larger one is made
                size = max(elements, room)
                best = _Memory(torch.empty(size, dtype=dtype, device=device), size, {})
        return best.given.get(elements) or best.buffer(elements)

    def __del__(self) -> None:
        for memory in (memory for free in self._free.values() for memory in free):
            memory.forget()

    def give_back(self, buffers: Iterable[Buffer]) -> None:
        """Take buffers back whose last use has been issued."""
        for buffer in buffers:
            self._free[buffer.flat.dtype, buffer.flat.device].append(buffer.memory)
