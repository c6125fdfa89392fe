"""Memory that messages leave from and arrive in, made once and used again.

On a GPU an operation of NCCL between two ranks notes with torch's allocator that its tensors are used on a stream of the
communicator's own (record_stream), and then their memory is free again only once the *device* has come there. The host prepares
whole layers ahead of the device, so that fresh tensors for each round would pile up: an exchange keeps its buffers instead.

Used again at once, as the host sees it: a batch of messages begins after all that the compute stream was given before it, and
whoever computes with what came, or writes to what was sent, waits for the batch first. So a buffer may be given back as soon as
its last use has been *issued*. One that is not given back, because of an error, is freed like any tensor.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, eq=False)
class Buffer:
    """A flat tensor of so many elements, the first ones of a piece of memory."""

    flat: torch.Tensor
    """[elements]"""
    memory: torch.Tensor
    """[at least as many]"""


@dataclass(eq=False)
class Buffers:
    """Buffers of one exchange, those that are not in use."""

    made: int = 0
    """Pieces of memory made so far."""
    _free: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = field(default_factory=dict)

    def take(self, elements: int, dtype: torch.dtype, device: torch.device, room: int) -> Buffer:
        """Give a buffer, whose values are any. One that must be made gets `room` elements at least, and takes the place of the
        smallest that is free, so that there are never more than were in use at once."""
        free = self._free.setdefault((dtype, device), [])
        fitting = [memory for memory in free if memory.numel() >= elements]
        leaves = min(fitting or free, key=torch.Tensor.numel, default=None)
        free[:] = [memory for memory in free if memory is not leaves]
        if not fitting or leaves is None:
            with torch.inference_mode(False):  # what is made in inference mode could not be written outside of it
                self.made += 1
                leaves = torch.empty(max(elements, room), dtype=dtype, device=device)
        return Buffer(leaves[:elements], leaves)

    def give_back(self, buffers: Iterable[Buffer]) -> None:
        """Take buffers back whose last use has been issued."""
        for buffer in buffers:
            self._free[buffer.memory.dtype, buffer.memory.device].append(buffer.memory)
