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

from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

import numpy as np

from hf_longctx.planner.compiled import borrowing, compiled, inlined, listed
from hf_longctx.planner.cost.cost_model import work_of
from hf_longctx.planner.cost.group_times import PlacementContext, equal_time, time_of_kinds, time_on
from hf_longctx.planner.placing.bisection import Large
from hf_longctx.planner.placing.rank_blocks import NEARLY_BUSY, STEPS, smallest_group

FIRST_DELAY = 2000
"""Divisor of the target: by so much it moves at first where no niche is left; then by half as much again each time."""
FEW_UNITS = 16
"""Units of a group up to which its ranks are sorted as they come. Calling a sort for each group took a quarter of all time."""
ROUNDED = 1e-9
"""A share of what ranks can do that is more than float64 loses in a sum of it."""


@compiled
def place_in_niches(
    large: Large,
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
    domains = -(-world_size // domain)
    stride = min(domain, world_size) // unit
    # Of each domain, a heap of runs of units that are free at the same time, the earliest first: when, how many, and the first
    # ranks of the first and the last unit; `following` leads from one to the other.
    height, width = np.empty(domains * stride, np.int64), np.empty(domains * stride, np.int64)
    head, tail = np.empty(domains * stride, np.int64), np.empty(domains * stride, np.int64)
    following = np.full(world_size, -1)
    runs = np.zeros(domains, np.int64)  # [domains]: of those that it has
    open_domains: Any = [(np.int64(0), np.int64(0))]
    open_domains.pop()
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
        open_domains.append((height[run], np.int64(index)))
    heapify(open_domains)
    large = Large(
        listed(large.lengths), listed(large.footprints), listed(large.best), listed(large.work), listed(large.alone)
    )
    footprints, best = large.footprints, large.best
    height, width, head = listed(height), listed(width), listed(head)
    tail, following = listed(tail), listed(following)
    # By width of a niche, the first document that it holds.
    fits_from = listed(np.full(domain // unit + 1, end))
    i, capacity = end - 1, context.capacities.max()
    for units in range(len(fits_from)):
        while i >= begin and footprints[i] <= units * unit * capacity:
            i -= 1
        fits_from[units] = i + 1
    # By width of a niche, the first document that ended in time in the last one as wide.
    likely_first = listed(np.full(domain // unit + 1, begin))
    following_document = listed(np.arange(end + 1))
    waiting = end - begin
    # Work that waits, and what equal ranks can still do until the target: with less, one will find no niche.
    work_left, room_left = 0.0, 0.0
    least_work = listed(np.zeros(end - begin, np.int64))
    if context.uniform:
        for i in range(begin, end):
            least_work[i - begin] = _least_work(i, large, context)
            work_left += least_work[i - begin]
        for rank in range(world_size):
            room_left += max(target - loads[rank], 0)
    lost = room_left * ROUNDED
    # Domains with no niche for what waits: (height of the last run, domain).
    full: Any = [(np.int64(0), np.int64(0))]
    full.pop()
    delay = max(target // FIRST_DELAY, 1)
    while waiting > 0:
        if len(open_domains) == 0 or (context.uniform and work_left > room_left + lost):
            more = delay
            if len(open_domains) > 0:
                more = max(int((work_left - room_left) / world_size), more)
            delay = delay * 3 // 2 + 1
            if target + more > latest:
                return -1
            for now, index in full:
                room_left += float(max(target - now, 0)) * width[index * stride] * unit
                heappush(open_domains, (now, index))
            full.clear()
            target += more
            room_left += float(more) * world_size
            continue
        index = open_domains[0][1]
        run = index * stride
        now, free = height[run], width[run]
        i = _next(following_document, fits_from[free])
        size = 0
        if i < end:
            size = _units_for(i, free, target - now, unit, head[run], following, large, context)
            if size == 0:
                likely = likely_first[free]
                i = _first_in_time(i + 1, end, likely, free, target - now, unit, head[run], following, large, context)
                likely_first[free] = i
                i = _next(following_document, i)
                if i < end:
                    size = _units_for(i, free, target - now, unit, head[run], following, large, context)
        if size == 0:  # the niche is raised to the next one
            if runs[index] == 1:
                room_left -= float(max(target - now, 0)) * free * unit
                full.append(heappop(open_domains))
                continue
            _join_next(run, runs[index], height, width, head, tail, following)
            runs[index] -= 1
            room_left -= float(max(min(height[run], target) - now, 0)) * free * unit
            while _is_free_with_next(run, runs[index], height):
                _join_next(run, runs[index], height, width, head, tail, following)
                runs[index] -= 1
            heapreplace(open_domains, (height[run], index))
            continue
        if even and size > 1:
            share = -(-free // (free // size))
            if share * unit <= best[i] and share * unit % context.multiple == size * unit % context.multiple:
                size = share
        following_document[i] = i + 1
        waiting -= 1
        if members + size * unit > len(member):
            return -1
        starts[i], sizes[i], first_member[i] = now, size * unit, members
        stop = now + _time_of(i, size, unit, head[run], following, large, context)
        work_left -= least_work[i - begin]
        room_left -= float(stop - now) * size * unit
        group, newest = head[run], -1
        for _ in range(size):
            newest = group
            place = members
            while size <= FEW_UNITS and place > first_member[i] and member[place - 1] > group:  # sorted as they come
                for rank in range(place - unit, place):
                    member[rank + unit] = member[rank]
                place -= unit
            for rank in range(unit):
                member[place + rank] = group + rank
            members += unit
            group = following[group]
        if size > FEW_UNITS:
            member[first_member[i] : members].sort()
        # The units of the group leave their run for one that is free at `stop`.
        group_head = head[run]
        head[run] = group
        following[newest] = -1
        width[run] -= size
        if width[run] == 0:
            runs[index] -= 1
            _remove_first(run, runs[index], height, width, head, tail)
        place = run + runs[index]
        height[place], width[place], head[place], tail[place] = stop, size, group_head, newest
        _sift_up(run, runs[index], height, width, head, tail)
        runs[index] += 1
        while _is_free_with_next(run, runs[index], height):
            _join_next(run, runs[index], height, width, head, tail, following)
            runs[index] -= 1
        heapreplace(open_domains, (height[run], index))
    for index in range(domains):
        for run in range(index * stride, index * stride + runs[index]):
            group = head[run]
            while group >= 0:
                loads[group : group + unit] = height[run]
                group = following[group]
    return members


@borrowing
@compiled
def _is_free_with_next(root: int, runs: int, height: np.ndarray) -> bool:  # pragma: no cover - compiled
    """Whether the first of so many runs of a heap is free at the same time as another."""
    return (runs > 1 and height[root + 1] == height[root]) or (runs > 2 and height[root + 2] == height[root])


@borrowing
@compiled
def _join_next(
    root: int,
    runs: int,
    height: np.ndarray,
    width: np.ndarray,
    head: np.ndarray,
    tail: np.ndarray,
    following: np.ndarray,
) -> None:  # pragma: no cover - compiled
    """Let the first of so many runs of a heap wait for the next one: both are one from then on, its own units first."""
    first, last, units = head[root], tail[root], width[root]
    _remove_first(root, runs - 1, height, width, head, tail)
    following[last] = head[root]
    head[root] = first
    width[root] += units


@borrowing
@compiled
def _remove_first(
    root: int, others: int, height: np.ndarray, width: np.ndarray, head: np.ndarray, tail: np.ndarray
) -> None:  # pragma: no cover - compiled
    """Take the first run, at `root`, out of a heap, which has so many others."""
    last = root + others
    free_at, units, first, newest = height[last], width[last], head[last], tail[last]
    place = 0
    while 2 * place + 1 < others:
        child = 2 * place + 1
        if child + 1 < others and height[root + child + 1] < height[root + child]:
            child += 1
        if height[root + child] >= free_at:
            break
        height[root + place], width[root + place] = height[root + child], width[root + child]
        head[root + place], tail[root + place] = head[root + child], tail[root + child]
        place = child
    height[root + place], width[root + place], head[root + place], tail[root + place] = free_at, units, first, newest


@borrowing
@compiled
def _sift_up(
    root: int, others: int, height: np.ndarray, width: np.ndarray, head: np.ndarray, tail: np.ndarray
) -> None:  # pragma: no cover - compiled
    """Let the last run of a heap at `root`, behind so many others, find its place."""
    place = others
    while place > 0 and height[root + place] < height[root + (place - 1) // 2]:
        child, parent = root + place, root + (place - 1) // 2
        height[child], height[parent] = height[parent], height[child]
        width[child], width[parent] = width[parent], width[child]
        head[child], head[parent] = head[parent], head[child]
        tail[child], tail[parent] = tail[parent], tail[child]
        place = (place - 1) // 2


@inlined
@borrowing
@compiled
def _least_work(i: int, large: Large, context: PlacementContext) -> int:  # pragma: no cover - compiled
    """Nanoseconds of equal ranks together that no group of the document takes less than."""
    fewest = max(-(-large.footprints[i] // context.capacity), 1)
    work = work_of(large.lengths[i], fewest, context.coefficients)
    return work + context.micro_batch * fewest if fewest > 1 else work


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


@borrowing
@compiled
def _units_for(
    i: int,
    free: int,
    left: int,
    unit: int,
    head: int,
    following: np.ndarray,
    large: Large,
    context: PlacementContext,
) -> int:  # pragma: no cover - compiled
    """Fewest of so many free units on which a document ends within `left` nanoseconds; 0 if it does not. `head`: the first rank
    of the first of them."""
    length, footprint, best = large.lengths[i], large.footprints[i], large.best[i]
    if not context.uniform:
        return _unequal_units_for(i, free, left, unit, head, following, large, context)
    if unit == 1:
        if footprint <= context.capacity and large.alone[i] <= left:
            return 1
        return smallest_group(length, footprint, best, 0, free, left, 0, context)
    fewest, most = _fewest_and_most(i, free, unit, large, context)
    if fewest > most:
        return 0
    if equal_time(length, fewest * unit, context) <= left:
        return fewest
    if equal_time(length, most * unit, context) > left:
        return 0
    low, high = fewest + 1, most
    while low < high:
        middle = (low + high) // 2
        if equal_time(length, middle * unit, context) <= left:
            high = middle
        else:
            low = middle + 1
    return low


@borrowing
@compiled
def _ends_in_time(
    i: int,
    free: int,
    left: int,
    unit: int,
    head: int,
    following: np.ndarray,
    large: Large,
    context: PlacementContext,
) -> bool:  # pragma: no cover - compiled
    """Whether `_units_for` finds enough units. For that, equal ranks need not be counted: a document ends soonest on as many as
    it may take. Only where groups are rounded up to whole nodes it may end on fewer and not on more."""
    rounded_up = unit == 1 and free > context.node and context.node * context.multiple > 1
    if not context.uniform or rounded_up:
        return _units_for(i, free, left, unit, head, following, large, context) > 0
    fewest, most = _fewest_and_most(i, free, unit, large, context)
    if fewest > most:
        return False
    if unit == 1 and fewest == 1 and large.alone[i] <= left:
        return True
    length = large.lengths[i]
    return equal_time(length, most * unit, context) <= left or equal_time(length, fewest * unit, context) <= left


@inlined
@borrowing
@compiled
def _fewest_and_most(
    i: int, free: int, unit: int, large: Large, context: PlacementContext
) -> tuple[int, int]:  # pragma: no cover - compiled
    """Fewest units of equal ranks that hold a document, and most of those that are free that it may take."""
    fewest = max(-(-large.footprints[i] // (unit * context.capacity)), 1)
    return fewest, min(free, max(-(-large.best[i] // unit), fewest), large.lengths[i] // unit)


@borrowing
@compiled
def _unequal_units_for(
    i: int,
    free: int,
    left: int,
    unit: int,
    head: int,
    following: np.ndarray,
    large: Large,
    context: PlacementContext,
) -> int:  # pragma: no cover - compiled
    """`_units_for` on unequal ranks: of the first ones, as many as are needed, or as keep all of them busiest.

    On the fewest ranks that hold a document each is full, and the fast ones wait for the slow ones. So more of them may take
    less of all ranks' time, which is speed times time.
    """
    length, footprint = large.lengths[i], large.footprints[i]
    most = min(max(large.best[i], unit), length)
    room, speed, size, first = 0, 0, 0, head
    multiple = context.multiple if free * unit >= context.multiple else 1
    chosen, least, following_size = 0, 2.0**62, 0
    kinds, counts = len(context.counts), context.counts
    for kind in range(kinds):
        counts[kind] = 0
    while size < free:
        room += context.before[first + unit] - context.before[first]
        speed += context.speed_before[first + unit] - context.speed_before[first]
        for kind in range(kinds):
            counts[kind] += context.kinds_before[first + unit, kind] - context.kinds_before[first, kind]
        first = following[first]
        size += 1
        ranks = size * unit
        if room < footprint or size < following_size or (ranks > 1 and ranks % multiple != 0):
            continue
        if chosen and ranks > most:
            break
        work = large.alone[i] if ranks == 1 else work_of(length, ranks, context.coefficients)
        if work * 1000 // speed <= left:
            time = time_of_kinds(length, ranks, context.kinds_before[0], counts, context) if ranks > 1 else -1
            if time < 0:
                time = _time_of(i, size, unit, head, following, large, context)
            if time <= left:
                area = float(time) * speed
                if chosen and area >= least:
                    break
                chosen, least = size, area
                if area <= work * 1000.0 * NEARLY_BUSY:
                    break
                following_size = size + max(size // STEPS, 1)
        if ranks >= most:
            break
    return chosen


@compiled
def _time_of(
    i: int, size: int, unit: int, head: int, following: np.ndarray, large: Large, context: PlacementContext
) -> int:  # pragma: no cover - compiled
    """Nanoseconds that a document counts on so many units of the list that begins with `head`."""
    ranks = size * unit
    if ranks == 1:
        return large.alone[i] * 1000 // context.speeds[head]
    if context.uniform:
        return equal_time(large.lengths[i], ranks, context)
    speeds, capacities = np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    first, end = head, 0
    for _ in range(size):
        for rank in range(first, first + unit):
            speeds[end], capacities[end] = context.speeds[rank], context.capacities[rank]
            end += 1
        first = following[first]
    return time_on(large.lengths[i], speeds, capacities, context)


@borrowing
@compiled
def _first_in_time(
    begin: int,
    end: int,
    likely: int,
    free: int,
    left: int,
    unit: int,
    head: int,
    following: np.ndarray,
    large: Large,
    context: PlacementContext,
) -> int:  # pragma: no cover - compiled
    """The first document from `begin` on that ends within `left` nanoseconds on so many free units: shorter ones do too.

    `likely`: where the search begins; it is short where that is near.
    """
    # As niches rise, ever shorter documents are the first. So the search gallops away from the last one in steps that double,
    # and bisects between the last two.
    low, high, step = begin, end, 1
    if likely > begin and _ends_in_time(min(likely, end) - 1, free, left, unit, head, following, large, context):
        high = min(likely, end) - 1
        while low < high:
            middle = max(high - step, low)
            if not _ends_in_time(middle, free, left, unit, head, following, large, context):
                low = middle + 1
                break
            high = middle
            step *= 2
    else:
        low = max(low, min(likely, end))
        while low < high:
            middle = min(low + step, high) - 1
            if _ends_in_time(middle, free, left, unit, head, following, large, context):
                high = middle
                break
            low = middle + 1
            step *= 2
    while low < high:
        middle = (low + high) // 2
        if _ends_in_time(middle, free, left, unit, head, following, large, context):
            high = middle
        else:
            low = middle + 1
    return low
