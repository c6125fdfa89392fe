"""Groups for the ranks that are free first, rather than ranks for the next document.

Other ways take documents one after the other, longest first, and look for ranks. Where most documents need a large part of the
ranks, those that lie side by side rarely fill them. Here the ranks that are free first, and as many as are free together,
are a niche, and the longest document that fits into it is placed there:

    free at  ^  B B B . . . .                 the lowest niche: four ranks
             |  B B B . . . .                 A, the next in order, needs five: it waits
             |  B B B C C C D                 C is the longest that needs four or fewer and ends by the target, D of those
             +------------------> ranks       that need one

A niche into which no document fits is raised to the height of the next one, and both are one from then on; its ranks wait. So
long documents are placed as soon as there is a niche wide enough, and all ranks are busy for about as long. Documents that
need several nodes are placed first, with whole nodes for ranks; then each node has niches of its own.

Unequal ranks of a niche are taken in turn until they hold the document and are fast enough together.

Where documents wait that no niche is left for, the makespan aimed at moves up, by what they need or in growing steps, and the
search goes on from there. So one try says how soon this way can end, about.

Interpreted or compiled (planner/compiled.py). Integers decide, but for sums of times in float64, in a fixed order, the same on
every machine. Nothing is sent.

Source: the best-fit heuristic for strips of Burke, Kendall and Whitwell, "A new placement heuristic for the orthogonal
stock-cutting problem", Operations Research 52 (2004). That ranks need not be adjacent, and widths that follow from the target,
are ours.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hf_longctx.planner.compiled import borrowing, compiled, inlined, listed
from hf_longctx.planner.cost.group_times import PlacementContext
from hf_longctx.planner.placing.bisection import Large
from hf_longctx.planner.placing.free_runs import heapify, is_free_with_next, join_next, remove_first, sift_up, sink
from hf_longctx.planner.placing.niche_sizes import first_in_time, time_of, units_for
from hf_longctx.planner.placing.rank_blocks import ROUNDED

FIRST_DELAY = 2000
"""Divisor of the target: by so much it moves at first where no niche is left; then by half as much again each time."""
FEW_UNITS = 16
"""Units of a group up to which its ranks are sorted as they come. Calling a sort for each group took a quarter of all time."""


class Niches(NamedTuple):
    """Ranks that are free together, in heaps of flat arrays, int64 each, of free_runs.py; a domain has as many places for runs as
    units."""

    height: Any
    """[domains * units]: nanoseconds from which each run is free."""
    width: Any
    """[domains * units]: its units."""
    head: Any
    """[domains * units]: the first rank of its first unit."""
    tail: Any
    """[domains * units]: the same of its last one."""
    following: Any
    """[world_size]: the first rank of the unit after each, -1 after the last."""
    runs: Any
    """[domains]: how many runs each has."""
    queue: Any
    """[domains that have units]: a heap of their indices."""
    free_at: Any
    """[domains]: the height of each one's first run."""


@compiled
def place_in_niches(
    large: Large,
    least_work: np.ndarray,
    begin: int,
    end: int,
    domain: int,
    unit: int,
    target: int,
    latest: int,
    even: bool,
    context: PlacementContext,
    sizes: np.ndarray,
    starts: np.ndarray,
    loads: np.ndarray,
    member: np.ndarray,
    first_member: np.ndarray,
    members: int,
) -> int:  # pragma: no cover - compiled
    """Places documents `begin` to `end` so that all end by `target`, or, in growing steps, by `latest`.

    Args:
        least_work: int64 [documents]: nanoseconds that each takes of equal ranks together, at least (`least_works`).
        domain: ranks of a domain, a multiple of `unit`: no document lies in two of them.
        unit: ranks that are taken together. Those that are left over at the end of a domain are not used.
        latest: where documents that wait find no niche, `target` moves up, at most to there; never where this is no later.
        even: whether as many documents as a niche holds of one size share all of it.
        sizes, starts: int64 [documents], filled: ranks of each document, and when it begins.
        loads: int64 [world_size], changed: when each rank has done its documents.
        member: int64, filled from `members` on: ranks of each document, ascending.
        first_member: int64 [documents], filled: where the ranks of each document begin in `member`.

    Returns:
        The end of what is filled of `member`; -1 if a document finds no niche, or `member` is too short.
    """
    world_size = len(loads)
    # Work that waits, and what equal ranks can still do until the target: with less, one will find no niche.
    work_left, room_left = 0.0, 0.0
    if context.uniform:
        for i in range(begin, end):
            work_left += least_work[i]
        for rank in range(world_size):
            room_left += max(target - loads[rank], 0)
        if work_left > room_left + room_left * ROUNDED + float(max(latest - target, 0)) * world_size:
            return -1
    domains = -(-world_size // domain)
    stride = min(domain, world_size) // unit
    # Of each domain, a heap of runs of units that are free at the same time, the earliest first: when, how many, and the first
    # ranks of the first and the last unit; `following` leads from one to the other.
    height, width = np.empty(domains * stride, np.int64), np.empty(domains * stride, np.int64)
    head, tail = np.empty(domains * stride, np.int64), np.empty(domains * stride, np.int64)
    following = np.full(world_size, -1)
    runs = np.zeros(domains, np.int64)  # [domains]: of those that it has
    # A heap of domains, the one that is free first in front, and when that is. Behind it lie those with no niche for what waits.
    queue, free_at = np.empty(domains, np.int64), np.zeros(domains, np.int64)
    usable = 0
    for index in range(domains):
        first, run = index * domain, index * stride
        units = (min(first + domain, world_size) - first) // unit
        if units == 0:
            continue
        busy = loads[first : first + units * unit : unit]
        order = np.argsort(-busy, kind="mergesort")[::-1]  # of those that are free together, the last comes first
        for j in order:  # what ascends is a heap
            newest = run + runs[index] - 1
            if runs[index] == 0 or height[newest] != busy[j]:
                newest += 1
                height[newest], width[newest], head[newest], tail[newest] = busy[j], 0, -1, first + j * unit
                runs[index] += 1
            following[first + j * unit] = head[newest]
            head[newest] = first + j * unit
            width[newest] += 1
        queue[usable], free_at[index] = index, height[run]
        usable += 1
    large = Large(
        listed(large.lengths), listed(large.footprints), listed(large.best), listed(large.work), listed(large.alone)
    )
    footprints = large.footprints
    height, width, head = listed(height), listed(width), listed(head)
    tail, following = listed(tail), listed(following)
    # By width of a niche, the first document that it holds.
    fits_from = listed(np.full(domain // unit + 1, end))
    i, capacity = end - 1, context.capacities.max()
    for units in range(len(fits_from)):
        while i >= begin and footprints[i] <= units * unit * capacity:
            i -= 1
        fits_from[units] = i + 1
    members = _fill_niches(
        large,
        begin,
        end,
        unit,
        target,
        latest,
        even,
        context,
        Niches(height, width, head, tail, following, listed(runs), listed(queue[:usable]), listed(free_at)),
        fits_from,
        listed(np.full(domain // unit + 1, begin)),
        listed(np.arange(end + 1)),
        listed(least_work),
        work_left,
        room_left,
        loads,
        sizes,
        starts,
        member,
        first_member,
        members,
    )
    if members < 0:
        return -1
    for i in range(begin, end):
        if sizes[i] > FEW_UNITS * unit:
            member[first_member[i] : first_member[i] + sizes[i]].sort()
    return members


@borrowing
@compiled
def _fill_niches(
    large: Large,
    begin: int,
    end: int,
    unit: int,
    target: int,
    latest: int,
    even: bool,
    context: PlacementContext,
    niches: Niches,
    fits_from: np.ndarray,
    likely_first: np.ndarray,
    following_document: np.ndarray,
    least_work: np.ndarray,
    work_left: float,
    room_left: float,
    loads: np.ndarray,
    sizes: np.ndarray,
    starts: np.ndarray,
    member: np.ndarray,
    first_member: np.ndarray,
    members: int,
) -> int:  # pragma: no cover - compiled
    """Gives one niche after another to a document; arguments and result as for `place_in_niches`, and these, all int64:

    Args:
        fits_from, likely_first: by width of a niche, the first document that it holds, and the first that ended in time in the
            last one as wide.
        following_document: [documents + 1]: see `_next`.
        work_left, room_left: of equal ranks, nanoseconds: what the documents take at least, and what ranks have until `target`.
    """
    height, width, head, tail, following, runs, queue, free_at = niches
    world_size, stride, best = len(loads), len(height) // len(runs), large.best
    waiting, usable = end - begin, len(queue)
    lost = room_left * ROUNDED
    delay = max(target // FIRST_DELAY, 1)
    opened = usable
    heapify(queue, free_at, opened)
    while waiting > 0:
        if opened == 0 or (context.uniform and work_left > room_left + lost):
            more = delay
            if opened > 0:
                more = max(int((work_left - room_left) / world_size), more)
            delay = delay * 3 // 2 + 1
            if target + more > latest:
                return -1
            for place in range(usable - 1, opened - 1, -1):
                index = queue[place]
                room_left += float(max(target - free_at[index], 0)) * width[index * stride] * unit
            opened = usable
            heapify(queue, free_at, opened)
            target += more
            room_left += float(more) * world_size
            continue
        index = queue[0]
        run = index * stride
        now, free = height[run], width[run]
        i = _next(following_document, fits_from[free])
        size = 0
        if i < end:
            size = units_for(i, free, target - now, unit, head[run], following, large, context)
            if size == 0:
                likely = likely_first[free]
                i = first_in_time(i + 1, end, likely, free, target - now, unit, head[run], following, large, context)
                likely_first[free] = i
                i = _next(following_document, i)
                if i < end:
                    size = units_for(i, free, target - now, unit, head[run], following, large, context)
        if size == 0:  # the niche is raised to the next one
            if runs[index] == 1:
                room_left -= float(max(target - now, 0)) * free * unit
                opened -= 1
                queue[0], queue[opened] = queue[opened], index
                sink(queue, free_at, 0, opened)
                continue
            join_next(run, runs[index], height, width, head, tail, following)
            runs[index] -= 1
            room_left -= float(max(min(height[run], target) - now, 0)) * free * unit
        else:
            if even and size > 1:
                share = -(-free // (free // size))
                if share * unit <= best[i] and share * unit % context.multiple == size * unit % context.multiple:
                    size = share
            following_document[i] = i + 1
            waiting -= 1
            if members + size * unit > len(member):
                return -1
            starts[i], sizes[i], first_member[i] = now, size * unit, members
            stop = now + time_of(i, size, unit, head[run], following, large, context)
            work_left -= least_work[i]
            room_left -= float(stop - now) * size * unit
            group, newest = head[run], -1
            for _ in range(size):
                newest = group
                place = members
                while (
                    size <= FEW_UNITS and place > first_member[i] and member[place - 1] > group
                ):  # sorted as they come
                    for rank in range(place - unit, place):
                        member[rank + unit] = member[rank]
                    place -= unit
                for rank in range(unit):
                    member[place + rank] = group + rank
                members += unit
                group = following[group]
            # The units of the group leave their run for one that is free at `stop`.
            group_head = head[run]
            head[run] = group
            following[newest] = -1
            width[run] -= size
            if width[run] == 0:
                runs[index] -= 1
                remove_first(run, runs[index], height, width, head, tail)
            place = run + runs[index]
            height[place], width[place], head[place], tail[place] = stop, size, group_head, newest
            sift_up(run, runs[index], height, width, head, tail)
            runs[index] += 1
        while is_free_with_next(run, runs[index], height):
            join_next(run, runs[index], height, width, head, tail, following)
            runs[index] -= 1
        free_at[index] = height[run]
        sink(queue, free_at, 0, opened)
    for index in range(len(runs)):
        for run in range(index * stride, index * stride + runs[index]):
            group = head[run]
            while group >= 0:
                for rank in range(group, group + unit):
                    loads[rank] = height[run]
                group = following[group]
    return members


@inlined
@borrowing
@compiled
def _next(following_document: np.ndarray, i: int) -> int:  # pragma: no cover - compiled
    """The first document from `i` on that has no group yet; shortens the way to it."""
    first = i
    while following_document[first] != first:
        first = following_document[first]
    while following_document[i] != first:
        further = following_document[i]
        following_document[i] = first
        i = further
    return first
