"""Ulysses (DeepSpeed-Ulysses, arXiv 2309.14509) inside the inner groups of a layout: an all-to-all trades tokens for
heads.

Before it a rank of a group of u holds its own tokens with all heads; after it, the group's tokens of split documents
with 1/u of the heads. Between groups, the ranks that compute the same heads exchange directly (direct.py). Whole
documents stay where they are, with all their heads.

    group of 2, 4 heads, document A split:     rank 0: A[0:2) A[6:8)  heads 0-3        rank 0: A[0:8)  heads 0-1
                                               rank 1: A[2:6)         heads 0-3   ->   rank 1: A[0:8)  heads 2-3

Key/value heads fewer than u go to each rank whose query heads read them, and to no other; their gradients are summed
where the tokens came from.

Sent, forward: each rank's rows of q, k, v, less its own share, and of out in return; backward: grad_out, and the
gradients of q, k, v in return. Messages are runs of rows, so that they arrive where they belong.
"""

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from hf_longctx.attention.exchange import Exchange, Pending
from hf_longctx.layouts.exchange_schedule import Runs
from hf_longctx.layouts.layout import Layout, Segment

Range = tuple[int, int]
"""Heads [first, last)."""


@dataclass(frozen=True)
class HeadSplit:
    """Heads that each rank of an inner group computes, by position in the group."""

    heads: tuple[Range, ...]
    kv_heads: tuple[Range, ...]
    repeats: tuple[tuple[int, ...] | None, ...]
    """How often a kernel must be given each of the rank's key/value heads, so that its query heads share them evenly; None
    where they do."""

    @property
    def replicated(self) -> bool:
        """Whether several ranks read one key/value head."""
        return any(before[1] > after[0] for before, after in zip(self.kv_heads, self.kv_heads[1:]))


def split_heads(heads: int, kv_heads: int, degree: int) -> HeadSplit:
    """Even shares of the query heads, and the key/value heads that these read.

    Raises:
        ValueError: the degree does not divide the heads.
    """
    if degree < 1 or heads % degree:
        valid = [number for number in range(1, heads + 1) if heads % number == 0]
        raise ValueError(
            f"ulysses={degree} must divide the {heads} query heads of a rank ({heads} = {heads // max(degree, 1)} * {degree} "
            f"+ {heads % max(degree, 1)}; with tensor parallelism these are num_attention_heads / tp); valid degrees: {valid}"
        )
    share, group = heads // degree, heads // kv_heads
    q_ranges, kv_ranges, repeats = [], [], []
    for first in range(0, heads, share):
        read = Counter(head // group for head in range(first, first + share))
        q_ranges.append((first, first + share))
        kv_ranges.append((min(read), max(read) + 1))
        common = math.gcd(*read.values())
        times = tuple(readers // common for readers in read.values())
        repeats.append(times if max(times) > 1 else None)
    return HeadSplit(tuple(q_ranges), tuple(kv_ranges), tuple(repeats))


@dataclass(frozen=True)
class InnerGroup:
    """One rank's view of its inner group; what it holds is ordered with split documents first."""

    ranks: tuple[int, ...]
    position: int
    """Index of this rank in `ranks`."""
    order: np.ndarray | None
    """int64 [tokens]: memory row of each row, the split documents' first, each part by document and position; None where
    that is memory order."""
    split_tokens: int
    """Rows of split documents."""
    runs: tuple[Runs, ...]
    """By position: rows of the merged shard in which that rank's split rows lie, in its order."""
    outer: Layout | None
    """The merged shards of all groups, on the ranks that compute the same heads; None if this group's is empty."""
    whole: Layout | None
    """This rank's whole documents."""

    @property
    def merged_tokens(self) -> int:
        return sum(stop - start for runs in self.runs for start, stop in runs)


def inner_group(layout: Layout, rank: int) -> InnerGroup:
    """Return the inner group of a rank, which is derived once for each layout and kept with it."""
    key = ("inner group", rank)
    if key not in layout.derived:
        layout.derived[key] = _derive(layout, rank)
    return layout.derived[key]


def _derive(layout: Layout, rank: int) -> InnerGroup:
    u, index = layout.ulysses, layout.ranks.index(rank)
    groups = [layout.ranks[first : first + u] for first in range(0, len(layout.ranks), u)]
    members, position = groups[index // u], index % u

    def split(of: int) -> list[Segment]:
        return sorted(segment for segment in layout.shard(of) if segment.doc in layout.split_documents)

    merged = {group[position]: sorted(s for member in group for s in split(member)) for group in groups}
    first_row, row = {}, 0
    for segment in merged[rank]:
        first_row[segment] = row
        row += len(segment)
    runs = tuple(
        tuple((first_row[segment], first_row[segment] + len(segment)) for segment in split(member))
        for member in members
    )
    shard = layout.shard(rank)
    memory_row = dict(zip(shard, np.cumsum([0, *map(len, shard)]).tolist()))
    whole = sorted(set(shard) - set(split(rank)))
    order = np.concatenate([np.arange(memory_row[s], memory_row[s] + len(s)) for s in (*split(rank), *whole)])
    return InnerGroup(
        ranks=members,
        position=position,
        order=None if (order == np.arange(len(order))).all() else order,
        split_tokens=sum(map(len, split(rank))),
        runs=runs,
        outer=Layout({of: tuple(shard) for of, shard in merged.items()}) if row else None,
        whole=Layout({rank: tuple(whole)}) if whole else None,
    )


def start_to_heads(
    x: torch.Tensor, ranges: tuple[Range, ...], group: InnerGroup, exchange: Exchange
) -> tuple[torch.Tensor, Pending]:
    """Starts x [split tokens, H, D] on its way -> [merged tokens, this rank's heads, D], complete after `wait`."""
    first, last = ranges[group.position]
    merged = torch.empty((group.merged_tokens, last - first, x.shape[2]), dtype=x.dtype, device=x.device)
    sends, receives = [], []
    own = [stop - start for start, stop in group.runs[group.position]]
    for position, rank in enumerate(group.ranks):
        pieces = x[:, slice(*ranges[position])].split(own)
        for (start, stop), piece in zip(group.runs[group.position], pieces):
            if rank == group.ranks[group.position]:
                merged[start:stop] = piece
            else:
                sends.append((piece.contiguous(), rank))
        if rank != group.ranks[group.position]:
            receives += [(merged[start:stop], rank) for start, stop in group.runs[position]]
    return merged, exchange.start(sends, receives)


@dataclass(frozen=True)
class Returning:
    """Parts of a shard on their way back."""

    parts: list[torch.Tensor]
    """By position: [split tokens, heads of that rank, D]."""
    ranges: tuple[Range, ...]
    pending: Pending

    def wait(self, shard: torch.Tensor) -> None:
        """Writes them into shard [split tokens, H, D]. Heads that several ranks return are summed, in the order of the
        ranks and in the dtype of the parts."""
        self.pending.wait()
        if sum(last - first for first, last in self.ranges) == shard.shape[1]:
            for (first, last), part in zip(self.ranges, self.parts):
                shard[:, first:last] = part
            return
        total = self.parts[0].new_zeros(shard.shape)
        for (first, last), part in zip(self.ranges, self.parts):
            total[:, first:last] += part
        shard.copy_(total)


def start_to_sequence(
    merged: torch.Tensor, ranges: tuple[Range, ...], group: InnerGroup, exchange: Exchange
) -> Returning:
    """Starts merged [merged tokens, this rank's heads, D] on its way back to the ranks that hold the tokens."""
    merged = merged.contiguous()
    parts, sends, receives = [], [], []
    own = [stop - start for start, stop in group.runs[group.position]]
    for position, (rank, (first, last)) in enumerate(zip(group.ranks, ranges)):
        part = merged.new_empty((group.split_tokens, last - first, merged.shape[2]))
        parts.append(part)
        if position == group.position:
            for rows, (start, stop) in zip(part.split(own), group.runs[position]):
                rows.copy_(merged[start:stop])
            continue
        sends += [(merged[start:stop], rank) for start, stop in group.runs[position]]
        receives += [(rows, rank) for rows in part.split(own)]
    return Returning(parts, ranges, exchange.start(sends, receives))
