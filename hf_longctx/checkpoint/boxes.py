"""The part of a whole tensor that this rank holds, as boxes.

A box is a range of indices in each dimension. A tensor that is not in parts is one box. Of a DTensor, each dimension is split
on its own, whatever the mesh: so the indices of one dimension that a rank holds are what the same placements leave of
0, 1, 2 ... along it, and they come in runs. FSDP2 and most tensor parallelism leave one run; a projection that packs gate
and up, split over 2 ranks, leaves two on each:

    rank 0   gate 0..47, up 0..47    rows [0, 48) and [96, 144) of 192
    rank 1   gate 48..95, up 48..95  rows [48, 96) and [144, 192)

Nothing is sent.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard


@dataclass(frozen=True, order=True)
class Box:
    """Indices [offset, offset + shape) in each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + length) for start, length in zip(self.offset, self.shape))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def common(self, other: "Box") -> "Box | None":
        """Return what lies in both; None: nothing does."""
        first = [max(mine, its) for mine, its in zip(self.offset, other.offset)]
        ends = zip(self.offset, self.shape, other.offset, other.shape)
        last = [min(mine + length, its + its_length) for mine, length, its, its_length in ends]
        if any(stop <= start for start, stop in zip(first, last)):
            return None
        return Box(tuple(first), tuple(stop - start for start, stop in zip(first, last)))

    def within(self, other: "Box") -> "Box":
        """The same indices, counted from where `other` begins."""
        return Box(tuple(mine - its for mine, its in zip(self.offset, other.offset)), self.shape)


def whole_box(tensor: torch.Tensor) -> Box:
    """The box of a whole tensor."""
    return Box((0,) * tensor.ndim, tuple(tensor.shape))


Cut = tuple[Box, tuple[slice, ...]]
"""A box that this rank holds, and where it lies in what this rank holds."""


def cuts(tensor: torch.Tensor) -> list[Cut]:
    """The boxes that this rank holds of a tensor; none where it holds nothing, as of those without memory that stand for
    other stages' weights."""
    if tensor.is_meta:
        return []
    if not isinstance(tensor, DTensor):
        return [(whole_box(tensor), (slice(None),) * tensor.ndim)]
    runs = [_runs(tensor, dimension) for dimension in range(tensor.ndim)]
    return [
        (
            Box(tuple(start for start, _, _ in chosen), tuple(length for _, length, _ in chosen)),
            tuple(slice(at, at + length) for _, length, at in chosen),
        )
        for chosen in itertools.product(*runs)
    ]


def views(tensor: torch.Tensor, of: list[Cut]) -> list[tuple[Box, torch.Tensor]]:
    """Return what this rank holds in each of its boxes, to be read or written."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return [(box, local.detach()[at]) for box, at in of]


def _runs(tensor: DTensor, dimension: int) -> list[tuple[int, int, int]]:
    """Runs of indices of one dimension that this rank holds: (first, how many, where they begin in its part)."""
    along: list[Placement] = []
    for placement in tensor.placements:
        if isinstance(placement, _StridedShard) and placement.dim == dimension:
            along.append(_StridedShard(0, split_factor=placement.split_factor))
        elif isinstance(placement, Shard) and placement.dim == dimension:
            along.append(Shard(0))
        elif isinstance(placement, (Shard, _StridedShard, Replicate)):
            along.append(Replicate())
        else:
            raise ValueError(f"a tensor placed as {tensor.placements} has no part of its own on each rank")
    if not tensor.shape[dimension] or all(isinstance(placement, Replicate) for placement in along):
        return [(0, tensor.shape[dimension], 0)]
    indices = torch.arange(tensor.shape[dimension], device=tensor.device_mesh.device_type)
    own_indices = distribute_tensor(indices, tensor.device_mesh, along, src_data_rank=None).to_local().tolist()
    starts = [at for at, index in enumerate(own_indices) if at == 0 or index != own_indices[at - 1] + 1]
    return [(own_indices[at], stop - at, at) for at, stop in zip(starts, [*starts[1:], len(own_indices)])]
