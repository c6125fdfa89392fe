"""Lockstep: every rank runs the same number of rounds, and each round costs its slowest rank.

ZeRO-2, ZeRO-3 and expert parallelism need this: their collectives make all ranks meet in every micro-batch.

A round is a shelf. For a height y, documents come longest first; each takes the fewest ranks on which it ends within y,
or, where one rank is enough, joins the documents of the rank that is being filled, up to its capacity and to y. The
round ends when no rank is left; what did not fit waits for the next one.

    y  +-----------------------------+        A, B and C end at about y; the
       | AAAAAAAAA BBBB CC  d    g   |        whole documents d, e, f, g, h fill
       | AAAAAAAAA BBBB CC  e f  h   |        one rank each as far as y and its
       +-----------------------------+        capacity allow
        ranks 0 .............. 8

The height is the one at which the round does the most work in the time that it takes: never below the least time of the
longest document left, never above its time on the fewest ranks. So the round that must wait for a very long document is
also the one that holds as many other long ones as it can. Ranks that a round leaves empty get no micro-batch in it.

Interpreted or compiled (compiled.py); integers decide, and one ratio of them in float64, the same on every machine (a division
and a comparison, correctly rounded). Nothing is sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import pairwise
from typing import Any

import numpy as np

from hf_longctx.planner.blocks import Ground, group_time, group_times, smallest_group
from hf_longctx.planner.bound import best_sizes, lower_bound
from hf_longctx.planner.compiled import compiled, listed
from hf_longctx.planner.cost import CostModel
from hf_longctx.planner.packing import sums
from hf_longctx.planner.plan import SPLIT, StepPlan
from hf_longctx.planner.shares import proportional_shares
from hf_longctx.planner.topology import FULL, Topology

RESERVED_BELOW = (2**40, 8, 2)
"""Documents shorter than these shares of the capacity wait until all others have their rounds, then fill the gaps; the
best of these plans is taken. Without that, 1000 documents of the GitHub distribution on 64 ranks end 5 % later."""
Documents = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Of the documents without a round, longest first, int64 each: tokens, nanoseconds of work alone and on the fewest ranks, and
the group size beyond which each gets slower."""
HALVINGS = 5
"""How often the ratio of neighbouring heights is halved: 33 heights are tried for a round. With 9, rounds of mixed lengths
end up to 4 % later."""


def plan_lockstep(
    lengths: np.ndarray, order: np.ndarray, topology: Topology, cost: CostModel, ground: Ground
) -> StepPlan:
    """A plan in rounds. `lengths`: int64 [documents], tokens, longest first; `order`: their indices in the global batch."""
    capacity = int(topology.capacities.min())
    stops = [int(np.searchsorted(-lengths, -(capacity // share))) for share in RESERVED_BELOW]
    plans = [_rounds(lengths, stop, topology, cost, ground) for stop in dict.fromkeys(stops)]
    return _build(lengths, order, min(plans, key=lambda plan: plan.makespan), topology, cost, ground)


@dataclass(frozen=True, slots=True)
class _Rounds:
    """Where each document lies, int64 [documents]; counted longest first."""

    round: np.ndarray
    first_rank: np.ndarray
    """Of its micro-batch."""
    size: np.ndarray
    """Ranks that it is spread over."""
    holder: np.ndarray
    """The rank that holds it, where that is one."""
    makespan: int


def _rounds(lengths: np.ndarray, reserved: int, topology: Topology, cost: CostModel, ground: Ground) -> _Rounds:
    """Rounds of the first documents, up to `reserved`; the others fill their gaps, and what is left over follows in rounds of its
    own."""
    count, world_size = len(lengths), topology.world_size
    fewest = topology.fewest_ranks(lengths)
    best = best_sizes(lengths, fewest, world_size, cost.coefficients)
    least = -(-cost.work(lengths, best) // best) + cost.micro_batch_ns
    most = -(-cost.work(lengths, fewest) // fewest) + cost.micro_batch_ns
    full = cost.micro_batch_ns + _whole_round(lengths, topology, cost)
    slowest = int(topology.speeds.min())
    # Work on one rank, which a whole document takes, and on the fewest that hold a document, if all were as rank 0.
    alone = cost.work(lengths, 1)
    shared = cost.work(lengths, -(-lengths // ground.capacity))
    round_of = np.full(count, -1)
    first_rank, size = np.empty(count, np.int64), np.empty(count, np.int64)
    rounds = makespan = 0
    for stop in (reserved, count):
        while len(undone := np.flatnonzero(round_of[:stop] < 0)):
            first = undone[0]
            low, high = int(least[first]), max(int(most[first]), full) * FULL // slowest
            # From rank 0 on, more ranks than the fewest may be needed, and more exchange may take longer.
            fewest_first = int(np.searchsorted(ground.before, lengths[first]))
            high = max(low, high, int(group_time(lengths[first], 0, fewest_first, ground)))
            documents = (lengths[undone], alone[undone], shared[undone], best[undone])
            height = _best_height(low, high, documents, ground)
            placed = np.zeros(len(undone), np.bool_)
            ranks, sizes = np.empty(len(undone), np.int64), np.empty(len(undone), np.int64)
            makespan += _fill_round(height, documents, ground, placed, ranks, sizes)
            done = undone[placed]
            round_of[done], first_rank[done], size[done] = rounds, ranks[placed], sizes[placed]
            rounds += 1
        if stop < count:
            _fill_gaps(stop, lengths, alone, round_of, rounds, ground, first_rank, size)
    holder = first_rank.copy()
    in_gap = size < 1  # written down as the distance of its rank from the first of the micro-batch
    holder[in_gap] -= size[in_gap]
    return _Rounds(round_of, first_rank, np.maximum(size, 1), holder, makespan)


def _whole_round(lengths: np.ndarray, topology: Topology, cost: CostModel) -> int:
    """Nanoseconds of the costliest documents that one rank holds whole."""
    capacity = int(topology.capacities.max())
    longest = lengths[lengths <= capacity][:1]
    return int(cost.time(int(longest[0]), 1)) * -(-capacity // int(longest[0])) if len(longest) else 0


def _best_height(low: int, high: int, documents: Documents, ground: Ground) -> int:
    """The height at which a round does most work per time, lowered as far as it still holds as much."""
    heights = [low, high]
    for _ in range(HALVINGS):  # geometric means in integers; powers of floats differ between machines
        means = [math.isqrt(a * b) for a, b in pairwise(heights)]
        heights = sorted(heights + means)
    done = _work_at(np.array(heights), documents, ground)
    chosen, chosen_work, most_work_per_time = -1, 0, -1.0
    for height, (work, reached, held) in zip(heights, done.tolist()):
        work_per_time = work / max(reached, 1)
        if held and work_per_time >= most_work_per_time:  # of two that are as good, the fuller one
            chosen, chosen_work, most_work_per_time = height, work, work_per_time
    assert chosen > 0, "the fewest ranks that hold the longest document are within the heights"
    return _lowest_height(chosen, chosen_work, documents, ground)


@compiled
def _work_at(heights: np.ndarray, documents: Documents, ground: Ground) -> np.ndarray:  # pragma: no cover - compiled
    """int64 [heights, 3]: what `_fill` returns for each of these heights, which ascend."""
    columns = _columns(documents, ground)
    nowhere = (np.empty(0, np.bool_), np.empty(0, np.int64), np.empty(0, np.int64))
    found = np.empty((len(heights), 3), np.int64)
    each = listed(heights)
    for i in range(len(each)):
        if i > 0 and each[i] == each[i - 1]:
            found[i] = found[i - 1]
        else:
            found[i, 0], found[i, 1], found[i, 2] = _fill(each[i], False, documents, columns, ground, nowhere)
    return found


@compiled
def _lowest_height(height: int, work: int, documents: Documents, ground: Ground) -> int:  # pragma: no cover - compiled
    """A height at which a round still does so much work, as it does at `height`; to a 500th."""
    columns = _columns(documents, ground)
    nowhere = (np.empty(0, np.bool_), np.empty(0, np.int64), np.empty(0, np.int64))
    below = 0
    while height - below > height // 500 + 1:
        middle = (below + height) // 2
        if _fill(middle, False, documents, columns, ground, nowhere)[0] >= work:
            height = middle
        else:
            below = middle
    return height


@compiled
def _fill_round(
    height: int,
    documents: Documents,
    ground: Ground,
    placed: np.ndarray,
    first_rank: np.ndarray,
    size: np.ndarray,
) -> int:  # pragma: no cover - compiled
    """Fills one round of a height, and writes down which documents it holds; returns when it ends."""
    return _fill(height, True, documents, _columns(documents, ground), ground, (placed, first_rank, size))[1]


@compiled
def _columns(documents: Documents, ground: Ground) -> Any:  # pragma: no cover - compiled
    """What `_fill` reads entry by entry."""
    lengths, alone, shared, best = documents
    return (
        listed(lengths),
        listed(alone),
        listed(shared),
        listed(best),
        listed(ground.speeds),
        listed(ground.capacities),
        listed(ground.before),
        listed(np.zeros(len(ground.speeds), np.int64)),
    )


@compiled
def _fill(
    height: int,
    keep: bool,
    documents: Documents,
    columns: Any,
    ground: Ground,
    kept: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> tuple[int, int, int]:  # pragma: no cover - compiled
    """Fills one round of a height; if `keep`, writes down whether it holds each document, its first rank, and its size.

    Returns the work done (nanoseconds of one rank), when the round ends, and how many documents it holds; zeros if the
    first document does not fit.
    """
    # spare: ranks left over where a group began at the next node
    lengths, alone, shared, best, speeds, capacities, before, spare = columns
    placed, first_rank, size = kept
    world_size, node = len(speeds), ground.node
    spares = next_rank = 0
    open_rank, room, end = -1, 0, 0  # the rank that is being filled with whole documents
    work = reached = held = 0
    i, count = 0, len(lengths)
    while i < count:
        length = lengths[i]
        if open_rank >= 0:
            longer = end + alone[i] * 1000 // speeds[open_rank]
            if length <= room and longer <= height:
                room, end = room - length, longer
                reached = max(reached, end)
                work += alone[i]
                held += 1
                if keep:
                    placed[i], first_rank[i], size[i] = True, open_rank, 1
                i += 1
                continue
        if spares == 0 and next_rank == world_size:
            if length > room:  # on to those that are short enough
                i = count - int(np.searchsorted(documents[0][::-1], room, side="right"))
                continue
            break  # the rest is not longer, but would end too late
        # Whole on a rank of its own? Spare ranks first.
        rank = spare[spares - 1] if spares else next_rank
        end_alone = (alone[i] + ground.micro_batch) * 1000 // speeds[rank]
        if length <= capacities[rank] and end_alone <= height:
            if spares:
                spares -= 1
            else:
                next_rank += 1
            open_rank, room, end = rank, capacities[rank] - length, end_alone
            reached = max(reached, end)
            work += alone[i]
            held += 1
            if keep:
                placed[i], first_rank[i], size[i] = True, rank, 1
            i += 1
            continue
        rest = before[world_size] - before[next_rank]
        if length > rest:  # too long for the ranks that are left; on to what they, or any of the others, could hold
            most = max(rest, capacities[rank], room)
            i = count - int(np.searchsorted(documents[0][::-1], most, side="right")) if length > most else i + 1
            continue
        start = next_rank
        group = smallest_group(length, length, best[i], start, world_size - start, height, ground)
        if 0 < group <= node and start % node + group > node:
            border = (start // node + 1) * node
            beyond = 0
            if border < world_size:
                beyond = smallest_group(length, length, best[i], border, world_size - border, height, ground)
            if beyond:
                group, start = beyond, border
        if group == 0:
            if i == 0:
                return 0, 0, 0
            i += 1
            continue
        for rank in range(next_rank, start):
            spare[spares] = rank
            spares += 1
        next_rank = start + group
        reached = max(reached, group_time(length, start, group, ground))
        work += shared[i]
        held += 1
        if keep:
            placed[i], first_rank[i], size[i] = True, start, group
        i += 1
    return work, reached, held


@compiled
def _fill_gaps(
    begin: int,
    lengths: np.ndarray,
    alone: np.ndarray,
    round_of: np.ndarray,
    rounds: int,
    ground: Ground,
    first_rank: np.ndarray,
    size: np.ndarray,
) -> None:  # pragma: no cover - compiled
    """Puts documents from `begin` on, longest first, where a rank has most time left before its round ends.

    Such a document's size is minus the distance of its rank from the first of its micro-batch. Ranks without a
    micro-batch in a round are left out: a round of its own would need them too.
    """
    world_size = len(ground.speeds)
    ends = np.zeros(rounds * world_size, np.int64)
    room = np.zeros(rounds * world_size, np.int64)
    starts = np.full(rounds * world_size, -1)
    heights = np.zeros(rounds, np.int64)
    for i in range(begin):
        first = round_of[i] * world_size + first_rank[i]
        ranks = slice(first_rank[i], first_rank[i] + size[i])
        if size[i] == 1:
            if starts[first] < 0:
                ends[first] = ground.micro_batch * 1000 // ground.speeds[first_rank[i]] + 1
                room[first] = ground.capacities[first_rank[i]]
            ends[first] += alone[i] * 1000 // ground.speeds[first_rank[i]] + 1
            room[first] -= lengths[i]
        else:
            time = group_time(lengths[i], first_rank[i], size[i], ground)
            ends[first : first + size[i]] = time
            if ground.uniform:
                room[first : first + size[i]] = ground.capacities[0] - -(-lengths[i] // size[i])
            else:
                held = proportional_shares(lengths[i], ground.speeds[ranks], ground.capacities[ranks])
                room[first : first + size[i]] = ground.capacities[ranks] - held
        starts[first : first + size[i]] = first_rank[i]
        heights[round_of[i]] = max(heights[round_of[i]], ends[first])
    ends, heights, room, starts = listed(ends), listed(heights), listed(room), listed(starts)
    lengths, alone, speeds = listed(lengths), listed(alone), listed(ground.speeds)
    gaps = [
        (ends[slot] - heights[slot // world_size], np.int64(slot))
        for slot in range(len(ends))
        if starts[slot] >= 0 and room[slot] > 0 and ends[slot] < heights[slot // world_size]
    ]
    heapify(gaps)
    for i in range(begin, len(lengths)):
        while len(gaps):
            left, slot = gaps[0]
            rank = slot % world_size
            time = alone[i] * 1000 // speeds[rank] + 1
            if lengths[i] > room[slot]:
                heappop(gaps)  # shorter documents may find other gaps
                continue
            if time <= -left:
                room[slot] -= lengths[i]
                heapreplace(gaps, (left + time, slot))
                round_of[i], first_rank[i] = slot // world_size, starts[slot]
                size[i] = starts[slot] - rank
            break


def _build(
    lengths: np.ndarray, order: np.ndarray, found: _Rounds, topology: Topology, cost: CostModel, ground: Ground
) -> StepPlan:
    """Documents whose micro-batch begins on the same rank in the same round share it."""
    places, micro_batch = np.unique(found.round * topology.world_size + found.first_rank, return_inverse=True)
    split = found.size > 1
    members = np.ones(len(places), np.int64)
    members[micro_batch[split]] = found.size[split]
    first_member = np.concatenate([[0], np.cumsum(members)])
    begins = places % topology.world_size
    rank = np.repeat(begins - first_member[:-1], members) + np.arange(first_member[-1])

    # A member is as long busy as its share of a split document and its whole documents take; the slowest counts.
    member = first_member[micro_batch] + found.holder - begins[micro_batch]
    whole_times = sums(member[~split], cost.time(lengths[~split], 1), len(rank))
    shared = np.full(len(places), cost.micro_batch_ns)
    shared[micro_batch[split]] = group_times(lengths[split], found.first_rank[split], found.size[split], ground)
    alone = np.repeat(members == 1, members)
    times = np.repeat(shared, members) + whole_times
    own = -(-whole_times * FULL // topology.speeds[rank])
    times = np.where(alone, -(-times * FULL // topology.speeds[rank]), np.repeat(shared, members) + own)
    document = np.lexsort([order, micro_batch])
    return StepPlan(
        topology=topology,
        first_member=first_member,
        rank=rank,
        first_document=np.searchsorted(micro_batch[document], np.arange(len(places) + 1)),
        doc=order[document],
        length=lengths[document],
        holder=np.where(split, SPLIT, found.holder)[document],
        cost=np.maximum.reduceat(times, first_member[:-1]),
        lower_bound=lower_bound(lengths, topology, cost, "lockstep"),
        offload=np.zeros(len(places), np.int64),
        round=places // topology.world_size,
        mode="lockstep",
    )
