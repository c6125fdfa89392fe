"""How many of the ranks that are free together a document takes, and for how long: questions of niches.py.

Ranks are taken as units, each of as many. Those that are free are a list: `head` is the first rank of the first unit, and
`following` leads from one unit to the next.

Interpreted or compiled (planner/compiled.py); integers only. Nothing is sent.
"""

from __future__ import annotations

import numpy as np

from hf_longctx.planner.compiled import borrowing, compiled, inlined
from hf_longctx.planner.cost.cost_model import work_of
from hf_longctx.planner.cost.group_times import PlacementContext, ends_within, equal_time, time_of_kinds, time_on
from hf_longctx.planner.placing.bisection import Large
from hf_longctx.planner.placing.rank_blocks import NEARLY_BUSY, STEPS, smallest_group


@compiled
def least_works(large: Large, context: PlacementContext) -> np.ndarray:  # pragma: no cover - compiled
    """int64 [documents]: nanoseconds of equal ranks together that no group of each takes less than."""
    works = np.empty(len(large.lengths), np.int64)
    for i in range(len(works)):
        fewest = max(-(-large.footprints[i] // context.capacity), 1)
        works[i] = work_of(large.lengths[i], fewest, context.coefficients)
        if fewest > 1:
            works[i] += context.micro_batch * fewest
    return works


@borrowing
@compiled
def units_for(
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
    if ends_within(length, 0, fewest * unit, left, context):
        return fewest
    if not ends_within(length, 0, most * unit, left, context):
        return 0
    low, high = fewest + 1, most
    while low < high:
        middle = (low + high) // 2
        if ends_within(length, 0, middle * unit, left, context):
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
    """Whether `units_for` finds enough units. For that, equal ranks need not be counted: a document ends soonest on as many as
    it may take. Only where groups are rounded up to whole nodes it may end on fewer and not on more."""
    rounded_up = unit == 1 and free > context.node and context.node * context.multiple > 1
    if not context.uniform or rounded_up:
        return units_for(i, free, left, unit, head, following, large, context) > 0
    fewest, most = _fewest_and_most(i, free, unit, large, context)
    if fewest > most:
        return False
    if unit == 1 and fewest == 1 and large.alone[i] <= left:
        return True
    length = large.lengths[i]
    return ends_within(length, 0, most * unit, left, context) or ends_within(length, 0, fewest * unit, left, context)


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
    """`units_for` on unequal ranks: of the first ones, as many as are needed, or as keep all of them busiest.

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
        if kinds > 0:
            for rank in range(first, first + unit):
                counts[context.kind[rank]] += 1
        first = following[first]
        size += 1
        ranks = size * unit
        if room < footprint or size < following_size or (ranks > 1 and ranks % multiple != 0):
            continue
        if ranks > length or (chosen and ranks > most):
            break
        work = large.alone[i] if ranks == 1 else work_of(length, ranks, context.coefficients)
        if work * 1000 // speed <= left:
            time = time_of_kinds(length, ranks, context.kinds_before[0], counts, context) if ranks > 1 else -1
            if time < 0:
                time = time_of(i, size, unit, head, following, large, context)
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


@borrowing
@compiled
def time_of(
    i: int, size: int, unit: int, head: int, following: np.ndarray, large: Large, context: PlacementContext
) -> int:  # pragma: no cover - compiled
    """Nanoseconds that a document counts on so many units of the list that begins with `head`."""
    ranks = size * unit
    if ranks == 1:
        return large.alone[i] * 1000 // context.speeds[head]
    if context.uniform:
        return equal_time(large.lengths[i], ranks, context)
    return _unequal_time_of(large.lengths[i], size, unit, head, following, context)


@borrowing
@compiled
def _count_kinds(
    size: int, unit: int, head: int, following: np.ndarray, context: PlacementContext
) -> None:  # pragma: no cover - compiled
    """Counts the ranks of each kind in so many units of the list that begins with `head`, in `context.counts`."""
    counts, first = context.counts, head
    for kind in range(len(counts)):
        counts[kind] = 0
    for _ in range(size):
        for rank in range(first, first + unit):
            counts[context.kind[rank]] += 1
        first = following[first]


@compiled
def _unequal_time_of(
    length: int, size: int, unit: int, head: int, following: np.ndarray, context: PlacementContext
) -> int:  # pragma: no cover - compiled
    """`time_of` on unequal ranks."""
    ranks = size * unit
    if len(context.counts) > 0:
        _count_kinds(size, unit, head, following, context)
        time = time_of_kinds(length, ranks, context.kinds_before[0], context.counts, context)
        if time >= 0:
            return time
    speeds, capacities = np.empty(ranks, np.int64), np.empty(ranks, np.int64)
    first, end = head, 0
    for _ in range(size):
        for rank in range(first, first + unit):
            speeds[end], capacities[end] = context.speeds[rank], context.capacities[rank]
            end += 1
        first = following[first]
    return time_on(length, speeds, capacities, context)


@borrowing
@compiled
def first_in_time(
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
