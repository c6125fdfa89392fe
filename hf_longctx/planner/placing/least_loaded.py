"""Groups of the ranks that are free first: the thorough way to place long documents on few ranks.

A document takes the least loaded ranks, however they lie: the fewest that finish before the target, or, where none
do, those that finish first. Its group starts when the last of them is free; the others wait, which leaves holes for
short documents.

    time ->  0          1          2
    rank 0   | AAAAAAAA | c   d    |        A and B are too long for one rank,
    rank 1   | AAAAAAAA | BBBBBBBB |        c and d are not; e and f fill the
    rank 2   | e     f  | BBBBBBBB |        hole in which rank 2 waits for B.

The work grows with ranks times documents, so many ranks are left to rank_blocks.py.
Interpreted or compiled (planner/compiled.py). Integers decide, but for a sum of times in float64, as in rank_blocks.py. Nothing
is sent.
"""

from __future__ import annotations

import numpy as np

from hf_longctx.planner.compiled import compiled, listed
from hf_longctx.planner.cost.cost_model import work_of
from hf_longctx.planner.cost.group_times import PlacementContext, equal_time, time_of_kinds, unequal_time
from hf_longctx.planner.placing.rank_blocks import ROUNDED, summed_speed

MOST_ROOM = 2**62
"""Nanoseconds on a rank of speed 1000: more than all documents take."""


@compiled
def place_on_least_loaded(
    lengths: np.ndarray,
    footprints: np.ndarray,
    work_from: np.ndarray,
    wide: int,
    target: int,
    limit: int,
    context: PlacementContext,
    first_member: np.ndarray,
    member: np.ndarray,
    loads: np.ndarray,
    holes: np.ndarray,
) -> int:  # pragma: no cover - compiled
    """Places all documents, longest first.

    Args:
        lengths, footprints: int64 [documents]: tokens; tokens that the group must have room for.
        work_from: float64 [documents + 1], of rank_blocks.py's `least_work_from`.
        wide: how many of the first documents go over all ranks, one after another.
        target: nanoseconds.
        limit: nanoseconds: a placement that ends then, or later, is of no use.
        first_member: int64 [documents + 1], filled; the ranks of document i are member[first_member[i]:first_member[i + 1]],
            ascending. member has room for documents * world_size.
        loads: int64 [world_size], filled: when each rank has done its documents.
        holes: int64 [documents * world_size, 3], filled: duration, rank, document that ends it.

    Returns:
        The number of holes; -1 if it ends at `limit` or later.
    """
    world_size = len(loads)
    loads[:] = 0
    busy, capacities, speeds = listed(loads), listed(context.capacities), listed(context.speeds)
    lengths, footprints = listed(lengths), listed(footprints)
    ranks = listed(np.arange(world_size))  # by ascending load
    counts = context.counts  # ranks of each kind in the group that is looked at
    count = members = 0
    first_member[0] = 0
    room_left = float(limit) * summed_speed(0, world_size, context)
    lost = room_left * ROUNDED
    for i in range(len(lengths)):
        if work_from[i] > room_left + lost:
            return -1
        fewest, room = 0, 0
        while room < footprints[i]:
            room += capacities[ranks[fewest]]
            fewest += 1
        most = min(world_size, max(lengths[i], fewest))
        if i < wide:
            fewest = most
        size, finish, speed, summed = 0, 2**62, 0, 0
        counts[:] = 0
        for candidate in range(fewest, most + 1):
            if context.uniform and busy[ranks[candidate - 1]] >= finish:
                break
            rounded = candidate
            if candidate > 1 and -(-candidate // context.multiple) * context.multiple <= most:
                rounded = -(-candidate // context.multiple) * context.multiple
            if context.uniform:
                time = equal_time(lengths[i], rounded, context)
            else:
                while summed < rounded:
                    speed += speeds[ranks[summed]]
                    if len(counts) > 0:
                        counts[context.kind[ranks[summed]]] += 1
                    summed += 1
                # No shares of these ranks take less than this.
                least = busy[ranks[rounded - 1]] + work_of(lengths[i], rounded, context.coefficients) * 1000 // speed
                if least > target and least >= finish:
                    continue
                time = time_of_kinds(lengths[i], rounded, context.kinds_before[0], counts, context)
                if time < 0:
                    time = unequal_time(lengths[i], ranks[:rounded], context)
            end = busy[ranks[rounded - 1]] + time
            if end < finish:
                size, finish = rounded, end
            if end <= target:
                break
        if finish >= limit:
            return -1
        begin = busy[ranks[size - 1]]
        for j in range(size):
            rank = ranks[j]
            room_left -= float(finish - busy[rank]) * speeds[rank] / 1000.0
            if busy[rank] < begin:
                holes[count, 0], holes[count, 1], holes[count, 2] = begin - busy[rank], rank, i
                count += 1
            busy[rank] = finish
        group = ranks[:size].copy()
        if size == 1:
            member[members] = group[0]
        else:
            member[members : members + size] = group
            member[members : members + size].sort()
        members += size
        first_member[i + 1] = members
        end = size  # the group moves behind all that are no busier
        while end < world_size and busy[ranks[end]] <= finish:
            ranks[end - size] = ranks[end]
            end += 1
        ranks[end - size : end] = group
    loads[:] = busy
    return count


@compiled
def place_in_holes(
    holes: np.ndarray, times: np.ndarray, tokens: np.ndarray, context: PlacementContext
) -> tuple[np.ndarray, np.ndarray]:  # pragma: no cover - compiled
    """Fill holes with whole documents: each, one after the other, with the longest that fits, again and again.

    Args:
        holes: int64 [holes, 3], of `place_on_least_loaded`.
        times, tokens: int64 [documents], longest first: nanoseconds on a rank of speed 1000, and tokens.

    Returns:
        int64 [documents] twice: the rank of each, -1 without a hole, and the document that ends the hole.
    """
    count = len(times)
    rank, ends_it = np.full(count, -1), np.full(count, -1)
    waits = listed(np.arange(count + 1))  # from each document on, the first that has no hole, or one before it
    times, tokens = listed(times), listed(tokens)
    for hole in range(len(holes)):
        room, in_rank = holes[hole, 0], holes[hole, 1]
        speed, capacity = context.speeds[in_rank], context.capacities[in_rank]
        # Nanoseconds of a rank of speed 1000; room * speed may exceed 64 bits.
        room = min(room, MOST_ROOM // max(speed, 1000) * 1000)
        left = room // 1000 * speed + room % 1000 * speed // 1000
        while True:
            low, high = 0, count
            while low < high:
                middle = (low + high) // 2
                if times[middle] <= left and tokens[middle] <= capacity:
                    high = middle
                else:
                    low = middle + 1
            first = low
            while waits[first] != first:
                waits[first] = waits[waits[first]]
                first = waits[first]
            if first == count:
                break
            left -= times[first]
            rank[first], ends_it[first] = in_rank, holes[hole, 2]
            waits[first] = first + 1
    return rank, ends_it
