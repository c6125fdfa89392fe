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

Interpreted or compiled (planner/compiled.py); integers only. Nothing is sent.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

import numpy as np

from hf_longctx.planner.compiled import borrowing, compiled, listed
from hf_longctx.planner.cost.cost_model import work_of
from hf_longctx.planner.cost.group_times import PlacementContext, ends_within, equal_time, group_time

NEARLY_BUSY = 1.02
"""Times what unequal ranks must compute for a document that is all of their time: more ranks are not tried then."""
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
    if in_one_node and equal_time(length, fewest, context) <= limit:
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


@compiled
def place_in_blocks(
    lengths: np.ndarray,
    footprints: np.ndarray,
    best: np.ndarray,
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
        next_document: the first to be placed; those before it stand on shelves.
        even: whether blocks are divided evenly.
        first_rank, sizes: int64 [documents], filled: each group is first_rank to first_rank + sizes - 1.
        loads: int64 [world_size], changed: when each rank has done its documents.
    """
    world_size = len(loads)
    lengths, footprints, best, before = listed(lengths), listed(footprints), listed(best), listed(context.before)
    # At most one for each rank, as many again where they are cut at borders of nodes, and the rest that each document leaves.
    blocks = 2 * world_size + len(lengths) + 1
    start, width = listed(np.zeros(blocks, np.int64)), listed(np.zeros(blocks, np.int64))
    height = listed(np.zeros(blocks, np.int64))
    busy = listed(loads)
    count = 0
    rank = 0
    while rank < world_size:  # ranks that end together are one block
        end = rank + 1
        while end < world_size and busy[end] == busy[rank]:
            end += 1
        start[count], width[count], height[count] = rank, end - rank, busy[rank]
        count += 1
        rank = end
    open_blocks: Any = [(height[block], start[block], block) for block in range(count)]
    open_blocks.sort()  # a sorted list is a heap: the lowest block first
    # The widest first. Not empty for a moment: numba takes the type of a list from what is in it.
    narrow: Any = [(np.int64(0), np.int64(0))]  # (-tokens of room, block)
    narrow.pop()
    fit_from = len(lengths)  # from this document on, all fit into a node
    while fit_from > next_document and footprints[fit_from - 1] <= context.node * context.capacity:
        fit_from -= 1
    for i in range(next_document, len(lengths)):
        if i == fit_from and context.node < world_size:
            # Cut at the borders of nodes: ranks 3 to 12, of nodes of 4, become 3, 4 to 7, 8 to 11 and 12. Blocks that waited are
            # open again, too; those that are too narrow wait anew.
            before_cut = count
            for block in range(before_cut):
                first, end = start[block], start[block] + width[block]
                border = (first // context.node + 1) * context.node
                width[block] = min(end, border) - first
                while border < end:
                    start[count], height[count] = border, height[block]
                    width[count] = min(end, border + context.node) - border
                    border += context.node
                    count += 1
            open_blocks = [(height[block], start[block], np.int64(block)) for block in range(count)]
            open_blocks.sort()
            narrow.clear()
        while len(narrow) and -narrow[0][0] >= footprints[i]:
            block = heappop(narrow)[1]
            heappush(open_blocks, (height[block], start[block], block))
        placed = False
        while len(open_blocks) and not placed:
            block = heappop(open_blocks)[2]
            first, most, load = start[block], width[block], height[block]
            room = before[first + most] - before[first]
            if room < footprints[i]:
                heappush(narrow, (-room, block))
                continue
            size = smallest_group(lengths[i], footprints[i], best[i], first, most, target - load, 0, context)
            if size == 0:
                return False
            if even:
                # As many such documents as the block holds share all of it: of 8 ranks, two on 3 take 4 each.
                share = -(-most // (most // size))
                if share > context.node:
                    share = -(-share // context.node) * context.node
                if share <= min(most, best[i]):
                    size = share
            if size < most:  # what is left keeps its height, as a block of its own
                start[count], width[count], height[count] = first + size, most - size, load
                heappush(open_blocks, (load, first + size, np.int64(count)))
                count += 1
            width[block] = size
            height[block] = load + group_time(lengths[i], first, size, context)
            heappush(open_blocks, (height[block], first, block))
            first_rank[i], sizes[i] = first, size
            placed = True
        if not placed:
            return False
    for block in range(count):
        loads[start[block] : start[block] + width[block]] = height[block]
    return True
