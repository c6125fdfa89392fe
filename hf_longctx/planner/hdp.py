"""Hybrid Data Parallelism: every document gets its own group of ranks, and all ranks finish together.

`plan_step` plans one optimizer step in `async` mode: ranks meet where they share a document and at the end of the
step, nowhere else. A document of s tokens on d ranks keeps them busy for T(s, d) (cost.py). d is at least ceil(s / C),
and may be more, because a long document on the fewest ranks that hold it is often what everybody waits for.

1. Large documents, longest first, go to the least loaded ranks: the fewest that finish in time for a target makespan. A
   group starts when its last member is free. It holds its document in zigzag, alone in a micro-batch.
2. Small documents stay whole on one rank and communicate nothing. They first fill the holes in which a rank would wait
   for its group (the longest that fits, hole by hole); the others, longest first, go to the least loaded rank.
3. If that misses the target: the longest few documents go over all ranks, one after another. If that does not help
   either, the target is loosened.
4. The whole documents that a rank runs between two meetings are packed into micro-batches of at most C tokens.

    time ->  0          1          2
    rank 0   | AAAAAAAA | c   d    |        A and B are too long for one rank,
    rank 1   | AAAAAAAA | BBBBBBBB |        c and d are not; e and f fill the
    rank 2   | e     f  | BBBBBBBB |        hole in which rank 2 waits for B.

Groups are placed in one order and every rank meets its groups in that order: no deadlock. Costs are integers and ties
are broken the same way everywhere, so every rank computes the same plan from the lengths alone. Nothing is sent.

Source: ByteScale (arXiv 2502.21231) for the fewest ranks that fit and longest-first balance. Larger groups and holes
are ours.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from hf_longctx.layout import zigzag
from hf_longctx.planner.bound import lower_bound
from hf_longctx.planner.cost import CostModel
from hf_longctx.planner.plan import PlanError, StepPlan

TARGETS = (1000, 1003, 1010, 1030, 1070, 1150, 1300, 1600, 2500, 5000, 16000)
"""Makespans aimed at, in thousandths of the lower bound, until one is met."""
WIDE = (0, 1, 2, 3, 4, 6, 8)
"""How many of the longest documents go over all ranks, tried for each target. With 0 alone, 1000 documents of 32 to 2M
tokens on 64 ranks end at up to 1.32 times the lower bound; with these, at 1.003."""
GOOD_ENOUGH = 1002
"""Thousandths of the lower bound at which the search ends: far below the error of any cost model."""
LARGE_SHARE = 20
"""A document that takes more than 1/20 of the lower bound on one rank may be split even if it fits there. For 6 documents
on 4 ranks, 1/10 ends 0.4 % later on average; 1/40 gains 0.3 % and splits 10 % more documents."""


@dataclass(frozen=True, slots=True)
class _Placement:
    """Which ranks hold which document. Documents are counted longest first: large ones, then small ones."""

    groups: list[np.ndarray]
    """The ranks of each large document, ascending."""
    small_rank: np.ndarray
    small_before: np.ndarray
    """The large document that a small one runs before on its rank; the number of large ones if it runs after all."""
    makespan: int


def plan_step(
    lengths: np.ndarray, world_size: int, capacity: int, cost: CostModel, ulysses_degree: int = 1
) -> StepPlan:
    """Plan one optimizer step of all ranks.

    Args:
        lengths: integers [documents], tokens of each document of the global batch.
        world_size: ranks.
        capacity: most tokens that a rank holds in one micro-batch.
        cost: predicts what a document costs; it decides balance, never correctness.
        ulysses_degree: most ranks among which heads are split.

    Raises:
        PlanError: nothing to plan, a size below 1, or a document that all ranks together cannot hold.
    """
    lengths = _validated(lengths, world_size, capacity, ulysses_degree)
    order = np.argsort(-lengths, kind="stable")
    longest_first = lengths[order]
    bound = lower_bound(longest_first, world_size, capacity, cost)
    times = cost.time(longest_first, 1)
    large = int(((longest_first > capacity) | (times > bound // LARGE_SHARE)).sum())

    best: _Placement | None = None
    for thousandths, wide in product(TARGETS, [count for count in WIDE if count <= large]):
        target = bound * thousandths // 1000
        fewest = -(-longest_first[:large] // capacity)
        fewest[:wide] = np.minimum(world_size, longest_first[:wide])
        work = int(cost.work(longest_first[:large], fewest).sum() + times[large:].sum())
        if best is not None and work > world_size * min(target, best.makespan):
            continue
        groups, loads, holes = _place_large(longest_first[:large], fewest, world_size, cost, target)
        placement = _place_small(times[large:], groups, loads, holes)
        if best is None or placement.makespan < best.makespan:
            best = placement
        if best.makespan <= max(target, bound * GOOD_ENOUGH // 1000):
            break
    assert best is not None
    return replace(_build(best, order, longest_first, world_size, capacity, cost, bound), ulysses_degree=ulysses_degree)


def _validated(lengths: np.ndarray, world_size: int, capacity: int, ulysses_degree: int) -> np.ndarray:
    for name, value in (("world_size", world_size), ("capacity", capacity), ("ulysses_degree", ulysses_degree)):
        if value < 1:
            raise PlanError(f"{name} is {value}; it must be >= 1")
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or len(lengths) == 0 or not np.issubdtype(lengths.dtype, np.integer):
        raise PlanError(
            f"lengths has dtype {lengths.dtype} and shape {lengths.shape}; "
            "it must be integers, one per document, at least one"
        )
    lengths = lengths.astype(np.int64)
    shortest, longest = int(lengths.argmin()), int(lengths.argmax())
    if lengths[shortest] < 1:
        raise PlanError(f"document {shortest} has {lengths[shortest]} tokens; every document needs >= 1")
    if (tokens := int(lengths[longest])) > world_size * capacity:
        raise PlanError(
            f"document {longest} has {tokens} tokens; {world_size} ranks x {capacity} tokens of capacity hold "
            f"{world_size * capacity}. "
            f"It needs a capacity >= {-(-tokens // world_size)}, or >= {-(-tokens // capacity)} ranks"
        )
    return lengths


def _place_large(
    lengths: np.ndarray, fewest: np.ndarray, world_size: int, cost: CostModel, target: int
) -> tuple[list[np.ndarray], list[tuple[int, int]], list[tuple[int, int, int]]]:
    """Step 1: the group of each document; (load, rank) of all ranks; holes as (duration, rank, document that ends it)."""
    load = np.zeros(world_size, np.int64)
    rank = np.arange(world_size)  # by ascending load
    sizes = np.arange(1, world_size + 1)
    groups: list[np.ndarray] = []
    holes: list[tuple[int, int, int]] = []
    for i, (length, size) in enumerate(zip(lengths.tolist(), fewest.tolist())):
        finish = load[size - 1] + cost.time(length, size)
        if finish > target:
            candidates = slice(size - 1, min(world_size, length))
            finishes = load[candidates] + cost.time(length, sizes[candidates])
            in_time = finishes <= target
            more = int(in_time.argmax() if in_time.any() else finishes.argmin())
            size, finish = size + more, finishes[more]
        waits = load[size - 1] - load[:size]
        waiting = np.count_nonzero(waits)
        holes.extend(zip(waits[:waiting].tolist(), rank[:waiting].tolist(), [i] * waiting))
        group = rank[:size].copy()
        groups.append(np.sort(group))
        end = int(np.searchsorted(load, finish, side="right"))  # the group moves behind all that are no busier
        load[: end - size], load[end - size : end] = load[size:end].copy(), finish
        rank[: end - size], rank[end - size : end] = rank[size:end].copy(), group
    return groups, list(zip(load.tolist(), rank.tolist())), holes


def _place_small(
    times: np.ndarray, groups: list[np.ndarray], loads: list[tuple[int, int]], holes: list[tuple[int, int, int]]
) -> _Placement:
    """Step 2. `times` descend."""
    ranks = np.empty(len(times), np.int64)
    before = np.full(len(times), len(groups))
    left = times[::-1].tolist()
    left_doc = list(range(len(times) - 1, -1, -1))
    for room, rank, large in sorted(holes, reverse=True):
        while fitting := bisect_right(left, room):
            room -= left.pop(fitting - 1)
            doc = left_doc.pop(fitting - 1)
            ranks[doc], before[doc] = rank, large
    heapq.heapify(loads)
    for time, doc in zip(reversed(left), reversed(left_doc)):
        load, rank = loads[0]
        heapq.heapreplace(loads, (load + time, rank))
        ranks[doc] = rank
    return _Placement(groups, ranks, before, makespan=max(loads)[0])


def _build(
    placement: _Placement,
    order: np.ndarray,
    lengths: np.ndarray,
    world_size: int,
    capacity: int,
    cost: CostModel,
    bound: int,
) -> StepPlan:
    """Step 4, and the plan's columns. `order` holds the index in the batch of each document counted longest first."""
    groups = placement.groups
    split = np.array([i for i, group in enumerate(groups) if len(group) > 1], np.int64)
    rank, before = _whole_documents(placement, world_size)
    whole = np.flatnonzero(rank >= 0)
    whole = whole[np.lexsort([-lengths[whole], rank[whole], before[whole]])]
    pack, pack_before = _pack(lengths[whole], rank[whole], before[whole], capacity)

    # One global order: a pack runs before the split document named in pack_before, both ascend.
    split_id = np.arange(len(split)) + np.searchsorted(pack_before, split, side="right")
    pack_id = np.arange(len(pack_before)) + np.searchsorted(split, pack_before, side="left")

    costs = np.zeros(len(split) + len(pack_before), np.int64)
    costs[split_id] = cost.time(lengths[split], np.array([len(groups[i]) for i in split], np.int64))
    np.add.at(costs, pack_id[pack], cost.time(lengths[whole], 1))

    split_rows = [
        (micro_batch, holder, segment.doc, segment.start, segment.stop)
        for micro_batch, i in zip(split_id.tolist(), split.tolist())
        for holder, shard in zigzag(int(order[i]), int(lengths[i]), groups[i].tolist()).items()
        for segment in shard
    ]
    whole_rows = np.stack([pack_id[pack], rank[whole], order[whole], np.zeros_like(whole), lengths[whole]])
    rows = np.concatenate([np.array(split_rows, np.int64).reshape(-1, 5).T, whole_rows], axis=1)
    # Documents ascend in memory, which spares the attention engine a permutation.
    micro_batch, holder, doc, start, stop = rows[:, np.lexsort([rows[3], rows[2], rows[1], rows[0]])]
    return StepPlan(world_size, capacity, micro_batch, holder, doc, start, stop, costs, bound)


def _whole_documents(placement: _Placement, world_size: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 [documents] each: the rank of a whole document, -1 if it is split; the split document it runs before."""
    large = len(placement.groups)
    next_split = np.full(world_size, large)
    rank, before = np.full(large, -1), np.full(large, large)
    for i in range(large - 1, -1, -1):
        group = placement.groups[i]
        if len(group) > 1:
            next_split[group] = i
        else:
            rank[i], before[i] = group[0], next_split[group[0]]
    # A hole lies before a large document that meets there, hence before a split one.
    return np.concatenate([rank, placement.small_rank]), np.concatenate([before, placement.small_before])


def _pack(lengths: np.ndarray, rank: np.ndarray, before: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Best fit, longest first, within each (before, rank), by which the documents are sorted.

    Returns the pack of each document, and the `before` of each pack, ascending.
    """
    pack = np.empty(len(lengths), np.int64)
    pack_before: list[int] = []
    room: list[tuple[int, int]] = []  # (tokens, pack), ascending
    current: tuple[int, int] | None = None
    for i, (length, place) in enumerate(zip(lengths.tolist(), zip(before.tolist(), rank.tolist()))):
        if place != current:
            current = place
            room.clear()
        fitting = bisect_left(room, (length, 0))
        if fitting < len(room):
            tokens, number = room.pop(fitting)
        else:
            tokens, number = capacity, len(pack_before)
            pack_before.append(place[0])
        insort(room, (tokens - length, number))
        pack[i] = number
    return pack, np.array(pack_before, np.int64)
