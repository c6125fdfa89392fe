"""Pinned host memory for copies that are kept from save to save.

torch takes pinned memory in powers of two: the embeddings of Qwen 2.5 7B, 2.03 GiB in float32, would take 4. So it is taken in
slabs, a power of two each, and copies lie end to end in them, each in the first that has room:

    slab of 4 GiB     | embeddings 2.03 GiB | layer 0 | layer 1 | ... | free |
    slab of 1 GiB     | gate of layer 2, 259 MiB | up of layer 2 | ...

A slab is made for a copy that fits nowhere: as large as it would have taken alone, and a quarter of what there is at least, so
that copies of a little more than a power of two share one, and the last is not much. All of Qwen 2.5 7B in float32, 28.4 GiB,
takes 34 so, and one by one 54.
"""

from collections.abc import Callable

import torch

GROWTH = 4
"""Bytes of all slabs so far over the least bytes of the next one."""
ALIGNED = 512
"""Bytes that a copy's place is a multiple of, as the device's own allocator has it."""


def pinned(count: int) -> torch.Tensor:
    """Take so many bytes of pinned memory, uint8 [count]."""
    return torch.empty(count, dtype=torch.uint8, pin_memory=True)


class PinnedSlabs:
    """Places in pinned memory, which stay taken as long as this lives.

    Args:
        make: takes so many bytes of memory, uint8 [count].
    """

    def __init__(self, make: Callable[[int], torch.Tensor] = pinned) -> None:
        self._make = make
        self._slabs: list[tuple[torch.Tensor, int]] = []
        """memory, and how many of its bytes are taken"""

    @property
    def nbytes(self) -> int:
        """Count the bytes of all slabs."""
        return sum(memory.nbytes for memory, _ in self._slabs)

    def like(self, source: torch.Tensor) -> torch.Tensor:
        """Give a place for a copy of a tensor, contiguous, of its shape and dtype."""
        wanted = -(-source.nbytes // ALIGNED) * ALIGNED
        with_room = (at for at, (memory, taken) in enumerate(self._slabs) if memory.nbytes - taken >= wanted)
        at = next(with_room, len(self._slabs))
        if at == len(self._slabs):
            size = 1 << (max(wanted, self.nbytes // GROWTH, 1) - 1).bit_length()
            self._slabs.append((self._make(size), 0))
        memory, taken = self._slabs[at]
        self._slabs[at] = memory, taken + wanted
        return memory[taken : taken + source.nbytes].view(source.dtype).view(source.shape)
