"""Groups of ranks as blocks that are only ever split: the fast way to place long documents on very many ranks.

A block is a run of adjacent ranks that are all busy until the same time, its height. A document takes the front of the
lowest block that is wide enough: as few ranks as finish before the target. The rest of the block keeps its height. So
a group never waits for one of its ranks, and no rank is idle before its last group ends.

    height  |          A takes 5 ranks, B 3, C 2 of those of B, D the third and needs no one else
       ^    | C C D
       |    | B B B A A A A A
            +-----------------> ranks

Documents come longest first, so what is too narrow for one is, later, wide enough for another: narrow blocks wait aside.
Where nothing so short comes later, they would wait for ever: of 8 ranks, documents on 3 leave 2 idle. Even blocks leave none:
as many documents of this size as a block holds share all of it (4 and 4), which sends a little more.
Once documents fit into a node, blocks are cut at the borders of nodes; groups of several nodes are rounded up to whole
ones, and all groups to multiples of the Ulysses degree, where there are as many ranks.

Blocks may stand on shelves (shelves.py).

Interpreted or compiled (planner/compiled.py). Integers decide, but for sums of times in float64, in a fixed order, which only say
that a placement must fail. Nothing is sent.
"""

from __future__ import annotations

import numpy as np

from hf_longctx.planner.compiled import borrowing, compiled, inlined, listed
from hf_longctx.planner.cost.cost_model import work_of
from hf_longctx.planner.cost.group_times import PlacementContext, ends_within, group_time
from hf_longctx.planner.placing.free_runs import heapify, put, sink, take_first

NEARLY_BUSY = 1.02
"""Times what unequal ranks must compute for a document that is all of their time: more ranks are not tried then."""
ROUNDED = 1e-9
"""A share of what ranks can do that is more than float64 loses in a sum of it."""
STEPS = 8
"""More ranks are tried by an eighth each time."""


@borrowing
@compiled
def _fewest_from(first: int, most: int, tokens: int, context: PlacementContext) -> int:  # pragma: no cover - compiled
    """Ranks, counted from `first`, that hold so many tokens; more than `most` where they do not suffice."""
    if context.uniform:
        return -(-tokens // context.capacity)
    # `before` ascends, so that bisection finds how many ranks have so much room; most + 1 where `most` have not.
    target = context.before[first] + tokens
    low, high = 0 * most, most + 1
    while low < high:
        middle = (low + high) // 2
        if context.before[first + middle] < target:
            low = middle + 1
        else:
            high = middle
    return low


@borrowing
@compiled
def smallest_group(
    length: int, footprint: int, best: int, first: int, most: int, limit: int, likely: int, context: PlacementContext
) -> int:  # pragma: no cover - compiled
    """Fewest ranks from `first` on, at most `most`, on which the document ends within `limit`; 0 if there are none.

    `footprint`: tokens that the group must have room for. `best`: group size beyond which a document gets slower. `likely`:
    where the search begins; it is short where that is near; 0: with the fewest that hold the document.
    """
    fewest = max(_fewest_from(first, most, footprint, context), 1)
    # Mostly these suffice, and each further call passes all of the context.
    in_one_node = context.uniform and context.multiple == 1 and fewest <= min(context.node, most, length)
    if in_one_node and ends_within(length, first, fewest, limit, context):
        return fewest
    size = _fewest_in_time(length, fewest, best, first, most, limit, likely, context)
    if 2 * size > len(context.speeds) and not context.uniform:  # nothing else will find as much room beside it
        busiest = _busiest(length, size, min(most, max(best, fewest), length), first, context)
        rounded = _in_whole_nodes(length, busiest, fewest, best, first, most, limit, context)
        if rounded > 0:
            return rounded
    return _in_whole_nodes(length, size, fewest, best, first, most, limit, context)


@borrowing
@compiled
def _fewest_in_time(
    length: int, fewest: int, best: int, first: int, most: int, limit: int, likely: int, context: PlacementContext
) -> int:  # pragma: no cover - compiled
    """Fewest ranks from `first` on, `fewest` to `most`, on which the document ends within `limit`; 0 if there are none."""
    # More ranks than `best` are slower, and each needs a token.
    high = min(most, max(best, fewest), length)
    if fewest > high:
        return 0
    if ends_within(length, first, fewest, limit, context):
        return fewest
    # A document takes about as many ranks as the one before it, which was hardly longer. So the search gallops away from there in
    # steps that double, and bisects between the last two: few sizes are tried, each perhaps a division among unequal ranks.
    likely = min(max(likely, fewest), high)
    if likely > fewest and ends_within(length, first, likely, limit, context):
        low, high, step = fewest + 1, likely, 1  # enough, and fewer may do: downwards
        while low < high:
            middle = max(high - step, low)
            if not ends_within(length, first, middle, limit, context):
                low = middle + 1
                break
            high = middle
            step *= 2
    else:
        low, step = likely + 1, 1  # too few: upwards
        if low > high:
            return 0
        end = high
        while True:
            high = min(likely + step, end)
            if ends_within(length, first, high, limit, context):
                break
            if high == end:
                return 0
            low = high + 1
            step *= 2
    while low < high:
        middle = (low + high) // 2
        if ends_within(length, first, middle, limit, context):
            high = middle
        else:
            low = middle + 1
    return low


@borrowing
@compiled
def _busiest(
    length: int, size: int, most: int, first: int, context: PlacementContext
) -> int:  # pragma: no cover - compiled
    """Ranks from `first` on, `size` to `most` unequal ones, that are busiest: of all their time, which is speed times time, a
    document takes the least.

    Where each of the fewest that hold it is full, fast ones wait for slow ones, and more ranks may take less of it.
    """
    chosen, least = size, 2.0**62
    while True:
        speed = context.speed_before[first + size] - context.speed_before[first]
        area = float(group_time(length, first, size, context)) * speed
        if area >= least:
            return chosen
        chosen, least = size, area
        work = work_of(length, size, context.coefficients)
        if size >= most or area <= work * 1000.0 * NEARLY_BUSY:
            return chosen
        size = min(size + max(size // STEPS, 1), most)


@borrowing
@compiled
def _in_whole_nodes(
    length: int, size: int, fewest: int, best: int, first: int, most: int, limit: int, context: PlacementContext
) -> int:  # pragma: no cover - compiled
    """A group of so many ranks rounded up to a multiple of the Ulysses degree, and of a node if it is larger; 0 if it must not
    stay as it is, and cannot be rounded up. `fewest`: ranks that hold the document."""
    if size <= 1:
        return size
    multiple = context.multiple
    if size > context.node:
        multiple = context.node * multiple // _gcd(context.node, multiple)  # the least common one
    rounded = -(-size // multiple) * multiple
    if size > context.node and rounded > most:
        rounded = most  # to the last rank, whose node may have fewer
    if rounded == size:
        return size
    if rounded <= min(most, length):
        if rounded <= best or ends_within(length, first, rounded, limit, context):
            return rounded
        if size > max(fewest, context.node):
            # Not on whole nodes in time: better a later target than a rank that is alone on its node, where it
            # brings in by itself what a whole node shares. (Simulated: such groups took 2 to 2.6 times as long.)
            return 0
    return size


@borrowing
@compiled
def _gcd(a: int, b: int) -> int:  # pragma: no cover - compiled
    while b:
        a, b = b, a % b
    return a


@inlined
@borrowing
@compiled
def summed_speed(first: int, size: int, context: PlacementContext) -> float:  # pragma: no cover - compiled
    """Speed of ranks `first` to `first + size - 1` together, in ranks of speed 1000."""
    return (context.speed_before[first + size] - context.speed_before[first]) / 1000.0


@compiled
def least_work_from(
    lengths: np.ndarray, footprints: np.ndarray, context: PlacementContext
) -> np.ndarray:  # pragma: no cover - compiled
    """float64 [documents + 1]: nanoseconds of ranks of speed 1000 together that the documents from each on take at least; minus
    infinity for stages of a pipeline: then that is not known."""
    if context.stages > 1:
        return np.full(len(lengths) + 1, -np.inf)
    work, most, micro_batch = np.zeros(len(lengths) + 1), context.capacities.max(), context.micro_batch
    if not context.uniform:
        micro_batch = 0  # which is rounded down on each rank
    lengths, footprints, total = listed(lengths), listed(footprints), 0.0
    for i in range(len(lengths) - 1, -1, -1):
        fewest = max(-(-footprints[i] // most), 1)
        total += work_of(lengths[i], fewest, context.coefficients) + micro_batch * fewest
        work[i] = total
    return work


@compiled
def place_in_blocks(
    lengths: np.ndarray,
    footprints: np.ndarray,
    best: np.ndarray,
    work_from: np.ndarray,
    next_document: int,
    target: int,
    even: bool,
    context: PlacementContext,
    first_rank: np.ndarray,
    sizes: np.ndarray,
    loads: np.ndarray,
) -> bool:  # pragma: no cover - compiled
    """Places documents, longest first, so that all end by `target`; False if one cannot.

    Args:
        lengths, footprints, best: int64 [documents]: tokens; tokens that the group must have room for; best group size.
        work_from: float64 [documents + 1], of `least_work_from`.
        next_document: the first to be placed; those before it stand on shelves.
        even: whether blocks are divided evenly.
        first_rank, sizes: int64 [documents], filled: each group is first_rank to first_rank + sizes - 1.
        loads: int64 [world_size], changed: when each rank has done its documents.
    """
    world_size = len(loads)
    # A block is known by its first rank, [world_size] each: its ranks, and when they are done.
    width, height = listed(np.zeros(world_size, np.int64)), listed(loads.copy())
    rank = 0
    while rank < world_size:  # ranks that end together are one block
        end = rank + 1
        while end < world_size and height[end] == height[rank]:
            end += 1
        width[rank] = end - rank
        rank = end
    placed = _fill_blocks(
        listed(lengths),
        listed(footprints),
        listed(best),
        listed(work_from),
        next_document,
        target,
        even,
        context,
        width,
        height,
        listed(np.empty(world_size, np.int64)),
        listed(np.empty(world_size, np.int64)),
        listed(np.empty(world_size, np.int64)),
        first_rank,
        sizes,
    )
    rank = 0
    while placed and rank < world_size:
        loads[rank : rank + width[rank]] = height[rank]
        rank += width[rank]
    return placed


@borrowing
@compiled
def _fill_blocks(
    lengths: np.ndarray,
    footprints: np.ndarray,
    best: np.ndarray,
    work_from: np.ndarray,
    next_document: int,
    target: int,
    even: bool,
    context: PlacementContext,
    width: np.ndarray,
    height: np.ndarray,
    lowest: np.ndarray,
    narrow: np.ndarray,
    lacking: np.ndarray,
    first_rank: np.ndarray,
    sizes: np.ndarray,
) -> bool:  # pragma: no cover - compiled
    """Takes blocks for one document after the other; arguments as for `place_in_blocks`, and these, int64 [world_size]:

    Args:
        width, height: by first rank of each block, changed: its ranks, and nanoseconds.
        lowest: a heap of blocks that may be wide enough, the lowest first.
        narrow: a heap of those that are not, the widest first, which have `lacking` tokens.
    """
    world_size, node = len(width), context.node
    room_left, rank, count, waiting = 0.0, 0 * target, 0 * target, 0 * target
    while rank < world_size:
        lowest[count] = rank
        count += 1
        room_left += float(max(target - height[rank], 0)) * summed_speed(rank, width[rank], context)
        rank += width[rank]
    heapify(lowest, height, count)
    lost = room_left * ROUNDED
    fit_from = len(lengths)  # from this document on, all fit into a node
    while fit_from > next_document and footprints[fit_from - 1] <= node * context.capacity:
        fit_from -= 1
    for i in range(next_document, len(lengths)):
        if work_from[i] > room_left + lost:
            return False
        if i == fit_from and node < world_size:
            # Cut at the borders of nodes: ranks 3 to 12, of nodes of 4, become 3, 4 to 7, 8 to 11 and 12. Blocks that waited are
            # open again, too; those that are too narrow wait anew.
            rank, count, waiting = 0 * target, 0 * target, 0 * target
            while rank < world_size:
                end = rank + width[rank]
                border = min((rank // node + 1) * node, end)
                width[rank] = border - rank
                if border < end:
                    width[border], height[border] = end - border, height[rank]
                lowest[count] = rank
                count += 1
                rank = border
            heapify(lowest, height, count)
        while waiting > 0 and -lacking[narrow[0]] >= footprints[i]:
            block = narrow[0]
            waiting = take_first(narrow, lacking, waiting)
            count = put(block, lowest, height, count)
        placed = False
        while count > 0 and not placed:
            block = lowest[0]
            most, load = width[block], height[block]
            room = context.before[block + most] - context.before[block]
            if room < footprints[i]:
                count = take_first(lowest, height, count)
                lacking[block] = -room
                waiting = put(block, narrow, lacking, waiting)
                continue
            size = smallest_group(lengths[i], footprints[i], best[i], block, most, target - load, 0, context)
            if size == 0:
                return False
            if even:
                # As many such documents as the block holds share all of it: of 8 ranks, two on 3 take 4 each.
                share = -(-most // (most // size))
                if share > node:
                    share = -(-share // node) * node
                if share <= min(most, best[i]):
                    size = share
            time = group_time(lengths[i], block, size, context)
            width[block], height[block] = size, load + time
            room_left -= float(time) * summed_speed(block, size, context)
            sink(lowest, height, 0, count)
            if size < most:  # what is left keeps its height, as a block of its own
                rest = block + size
                width[rest], height[rest] = most - size, load
                count = put(rest, lowest, height, count)
            first_rank[i], sizes[i] = block, size
            placed = True
        if not placed:
            return False
    return True
