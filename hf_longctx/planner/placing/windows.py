"""Groups of whole nodes that are free at about the same time, wherever they lie: for documents that need several nodes.

Blocks of adjacent ranks (rank_blocks.py) are only ever split: once nodes that are free together lie apart, no document can have
them. Between nodes it does not matter which ones a group has, so here a document takes those of a window of nodes, sorted by
when they are free:

    free at     0  0  3  3  3  7  8  8          a document on three nodes that ends by the target may begin
    nodes       4  6  0  1  2  7  3  5              at 3 on 0, 1, 2        nobody waits
                                                    at 8 on 7, 3, 5        node 7 waits for 1

A window costs what its nodes wait, and what the document takes more on so many nodes than on the fewest. Documents come longest
first; each takes the cheapest window, the earliest of those that cost the same. Nodes that are free at the same time are one
run, and runs are what is looked at, MOST_WINDOWS of them.

Equal ranks; interpreted or compiled (planner/compiled.py); integers only. Nothing is sent.
"""

from __future__ import annotations

import numpy as np

from hf_longctx.planner.compiled import borrowing, compiled, listed
from hf_longctx.planner.cost.group_times import PlacementContext, equal_time

MOST_WINDOWS = 512
"""Windows that are looked at for a document."""
DEAREST = 2**62
"""Nanoseconds that no window costs."""


@compiled
def place_in_windows(
    lengths: np.ndarray,
    footprints: np.ndarray,
    best: np.ndarray,
    begin: int,
    target: int,
    unit: int,
    context: PlacementContext,
    sizes: np.ndarray,
    starts: np.ndarray,
    loads: np.ndarray,
    member: np.ndarray,
    first_member: np.ndarray,
) -> int:  # pragma: no cover - compiled
    """Places documents, longest first, so that all end by `target`.

    Args:
        lengths, footprints, best: int64 [documents]: tokens; tokens that the group must have room for; best group size.
        begin: the first to be placed; those before it lie on all ranks.
        unit: ranks that are taken together; ranks that are left over at the end are not used.
        sizes, starts: int64 [documents], filled: ranks of each document, and when it begins.
        loads: int64 [world_size], changed: when each rank has done its documents; the same for all before.
        member: int64, filled from the documents before `begin` on: ranks of each document, ascending.
        first_member: int64 [documents], filled: where the ranks of each document begin in `member`.

    Returns:
        The end of what is filled of `member`; -1 if a document finds no window, or `member` is too short.
    """
    units = len(loads) // unit
    lengths, footprints, best = listed(lengths), listed(footprints), listed(best)
    # Runs of units that are free at the same time, the earliest first, from `front` to `back`, each a list through `following`.
    # Every document brings one at most.
    most_runs = len(lengths) - begin + 1
    height, width = listed(np.zeros(most_runs, np.int64)), listed(np.zeros(most_runs, np.int64))
    head, following = listed(np.zeros(most_runs, np.int64)), listed(np.arange(1, units + 1))
    following[units - 1] = -1
    width[0], height[0], front, back = units, loads[0], 0, 1
    members = begin * len(loads)
    for i in range(begin, len(lengths)):
        run, size = _cheapest(
            lengths[i],
            -(-footprints[i] // (unit * context.capacity)),
            best[i],
            target,
            unit,
            front,
            back,
            height,
            width,
            context,
        )
        if size == 0 or members + size * unit > len(member):
            return -1
        starts[i], sizes[i], first_member[i] = height[run], size * unit, members
        end = height[run] + equal_time(lengths[i], size * unit, context)
        # Take units from this run and those before it, and close up the runs that have none left.
        new_head, left = -1, size
        last = run
        while left > 0:
            while left > 0 and width[run] > 0:
                free = head[run]
                head[run] = following[free]
                width[run] -= 1
                following[free] = new_head
                new_head = free
                for rank in range(free * unit, (free + 1) * unit):
                    member[members] = rank
                    members += 1
                left -= 1
            run -= 1
        run += 1
        member[first_member[i] : members].sort()
        # Close up, and make room again, on the side where fewer runs move.
        keep = run + 1 if width[run] > 0 else run
        gone = last + 1 - keep
        if keep - front < back - last - 1:
            for earlier in range(keep - 1, front - 1, -1):
                to = earlier + gone
                height[to], width[to], head[to] = height[earlier], width[earlier], head[earlier]
            front += gone
        else:
            for later in range(last + 1, back):
                to = later - gone
                height[to], width[to], head[to] = height[later], width[later], head[later]
            back -= gone
        # The document's units are a run of their own, or join one that ends with them.
        place, high = front, back
        while place < high:
            middle = (place + high) // 2
            if height[middle] >= end:
                high = middle
            else:
                place = middle + 1
        if place < back and height[place] == end:
            free = new_head
            while following[free] >= 0:
                free = following[free]
            following[free] = head[place]
            head[place] = new_head
            width[place] += size
            continue
        if place - front < back - place and front > 0:
            for earlier in range(front, place):
                to = earlier - 1
                height[to], width[to], head[to] = height[earlier], width[earlier], head[earlier]
            front -= 1
            place -= 1
        else:
            for later in range(back, place, -1):
                height[later], width[later], head[later] = height[later - 1], width[later - 1], head[later - 1]
            back += 1
        height[place], width[place], head[place] = end, size, new_head
    for run in range(front, back):
        free = head[run]
        while free >= 0:
            loads[free * unit : (free + 1) * unit] = height[run]
            free = following[free]
    return members


@borrowing
@compiled
def _cheapest(
    length: int,
    fewest: int,
    best: int,
    target: int,
    unit: int,
    front: int,
    back: int,
    height: np.ndarray,
    width: np.ndarray,
    context: PlacementContext,
) -> tuple[int, int]:  # pragma: no cover - compiled
    """The last run of the cheapest window for a document, and how many units it takes; zeros if none ends by `target`.

    `fewest`: units that hold the document. `best`: ranks beyond which it gets slower. The window of the last run holds as many
    of its units as are needed, then those of the runs before it.
    """
    size, most = max(fewest, 1), max(-(-best // unit), fewest)
    most = min(most, length // unit)
    chosen, chosen_size, least = 0, 0, DEAREST
    if size > most:
        return 0, 0
    time = equal_time(length, size * unit, context)
    work = time * size
    looks = 0
    units = 0  # of all runs up to this one
    for run in range(front, back):
        units += width[run]
        if units < size:
            continue
        while height[run] + time > target and size < most:
            size += 1
            time = equal_time(length, size * unit, context)
        if height[run] + time > target:
            break
        if units < size:
            continue
        left, first, cost = size - width[run], run, time * size - work
        while left > 0 and cost < least:
            first -= 1
            some = min(left, width[first])
            cost += (height[run] - height[first]) * some
            left -= some
        if cost < least:
            chosen, chosen_size, least = run, size, cost
        looks += 1
        if least == 0 or looks == MOST_WINDOWS:
            break
    return chosen, chosen_size
