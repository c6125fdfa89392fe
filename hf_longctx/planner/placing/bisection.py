"""Groups of ranks by bisection: documents that fit into a node, so that its ranks end together.

A block of ranks (rank_blocks.py) and its documents are halved, and the halves again:

    height  | C C D D e e h i          A takes all 8 ranks: no half could hold it.
       ^    | B B B B F F F F          B takes the first half, F the other; C and D halves of the first ...
       |    | A A A A A A A A
            +-----------------> ranks

- A document that needs more than half of the ranks goes over all of them, before they are divided; or the block is
  divided unevenly (5 and 3), if the documents that are too wide for the narrow part fit into the wide one in time, or if
  all ranks would not serve it.
- The other documents, longest first, go to the part that has time left for more work.
- One that fits into neither in time goes over all ranks instead: 9 equal documents on 2 ranks are 4 for each, and one for both.

So a group never waits for one of its ranks, and widths suit the block: of 8 ranks, documents that need 3 take 4.

Interpreted or compiled (planner/compiled.py); integers only. Nothing is sent.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, NamedTuple

import numpy as np

from hf_longctx.planner.compiled import borrowing, compiled, listed
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.cost.group_times import PlacementContext, ends_within, group_time
from hf_longctx.planner.placing.rank_blocks import smallest_group
from hf_longctx.planner.topology import Topology

LARGEST_BLOCK = 32
"""Ranks: wider blocks are divided before documents are dealt out, so that few ranks have the same documents to choose from."""
MOST_TILES = 8
"""Groups of the longest document's size side by side up to which a block is divided unevenly for the ranks beside them."""
IN_VAIN = 10**6
"""A document that takes a part beyond the target by less than a millionth of it stays there."""


class Large(NamedTuple):
    """Documents that may be split, int64 [documents] each, longest first."""

    lengths: Any
    """Tokens that each counts as."""
    footprints: Any
    """Tokens that a group must have room for."""
    best: Any
    """Ranks beyond which each gets slower."""
    work: Any
    """Nanoseconds of all its ranks together at speed 1000, where they are as many as suit a node."""
    alone: Any
    """Nanoseconds on one rank, with its share of a micro-batch."""


class Roots(NamedTuple):
    """Blocks of ranks, and the documents of each; int64 each."""

    order: Any
    """Documents, block after block, longest first in each."""
    first: Any
    """Lowest rank of each block."""
    width: Any
    """Ranks of each block."""
    begin: Any
    """Index in `order` of a block's first document."""
    end: Any
    """Index in `order` after its last one."""
    height: Any
    """Nanoseconds until which its ranks are busy."""


def block_width(node: int) -> int:
    """Ranks of the blocks that a node is divided into: all of them, or at most LARGEST_BLOCK."""
    return -(-node // -(-node // LARGEST_BLOCK))


def largest_room(block_ranks: int, context: PlacementContext) -> int:
    """Tokens that the block of most memory holds, before any rank is busy."""
    rank = np.arange(len(context.speeds))
    cuts = np.flatnonzero(rank % context.node % block_ranks == 0)
    return int(np.diff(context.before[np.append(cuts, len(rank))]).max())


def at_least_later(tokens: np.ndarray) -> np.ndarray:
    """int64 [documents]: tokens of each document, or of a later one that has more, so that they never rise. Documents come by
    cost: one with more tokens follows where fewer of them have labels, or where offload makes room."""
    # A reversed view would have all that is compiled for arrays compiled once more, for views.
    return np.ascontiguousarray(np.maximum.accumulate(tokens[::-1])[::-1])


def large_documents(
    split: np.ndarray,
    footprints: np.ndarray,
    best: np.ndarray,
    alone: np.ndarray,
    topology: Topology,
    cost: CostModel,
    context: PlacementContext,
) -> Large:
    """Say what documents cost where all ranks of a node are taken by groups of one size, or where they take whole nodes.

    Args:
        split, footprints, best, alone: the columns of `Large`; `footprints` may rise where offload makes room for a
            longer document.
    """
    footprints = at_least_later(footprints)
    node, fewest = context.node, topology.fewest_ranks(footprints)
    tiles = np.maximum(node // np.minimum(fewest, node), 1)
    widths = np.where(fewest > node, -(-fewest // node) * node, node // tiles)
    widths = np.minimum(widths, np.maximum(best, fewest))
    work = np.where(fewest == 1, alone, cost.work(split, widths) + cost.micro_batch_ns * widths)
    return Large(split, footprints, best, work, alone)


@compiled
def deal_out(
    begin: int, block_ranks: int, large: Large, loads: np.ndarray, context: PlacementContext
) -> tuple[bool, Roots]:  # pragma: no cover - compiled
    """Deals documents from `begin` on out to blocks: the longest ones first, each to the least busy block that holds it.

    Args:
        block_ranks: what a node is cut into: a block ends where the node does, at a multiple of so many of its ranks, and where
            the next rank is busy for longer or less long.
        loads: int64 [world_size]: when each rank has done the documents before `begin`.

    Returns:
        Whether each document found a block, and the blocks.
    """
    world_size, count = len(loads), len(large.footprints)
    busy, before, speed_before = listed(loads), listed(context.before), listed(context.speed_before)
    footprints, work = listed(large.footprints), listed(large.work)
    first, width, height = (
        np.empty(world_size, np.int64),
        np.empty(world_size, np.int64),
        np.empty(world_size, np.int64),
    )
    blocks = rank = 0
    while rank < world_size:
        end = rank + 1
        while end < world_size and end % context.node % block_ranks != 0 and busy[end] == busy[rank]:
            end += 1
        first[blocks], width[blocks], height[blocks] = rank, end - rank, busy[rank]
        blocks += 1
        rank = end
    room, speed = np.empty(blocks, np.int64), np.empty(blocks, np.int64)
    for block in range(blocks):
        room[block] = before[first[block] + width[block]] - before[first[block]]
        speed[block] = speed_before[first[block] + width[block]] - speed_before[first[block]]
    rooms, speeds, level = listed(room), listed(speed), listed(height.copy())
    open_blocks: Any = [(level[block], np.int64(block)) for block in range(blocks)]
    heapify(open_blocks)
    narrow: Any = [(np.int64(0), np.int64(0))]  # (-tokens of room, block)
    narrow.pop()
    chosen = np.empty(count, np.int64)
    ends = np.zeros(blocks + 1, np.int64)
    for i in range(begin, count):
        while len(narrow) and -narrow[0][0] >= footprints[i]:
            block = heappop(narrow)[1]
            heappush(open_blocks, (level[block], block))
        while len(open_blocks) and rooms[open_blocks[0][1]] < footprints[i]:
            block = heappop(open_blocks)[1]
            heappush(narrow, (-rooms[block], block))
        if not len(open_blocks):
            return False, Roots(first, first, first, first, first, first)
        block = open_blocks[0][1]
        level[block] += work[i] * 1000 // speeds[block]
        heapreplace(open_blocks, (level[block], block))
        chosen[i] = block
        ends[block + 1] += 1
    for block in range(blocks):
        ends[block + 1] += ends[block]
    order, free = np.empty(ends[blocks], np.int64), ends.copy()
    for i in range(begin, count):
        order[free[chosen[i]]] = i
        free[chosen[i]] += 1
    return True, Roots(order, first[:blocks], width[:blocks], ends[:blocks], ends[1:], height[:blocks])


@compiled
def place_by_bisection(
    large: Large,
    roots: Roots,
    target: int,
    context: PlacementContext,
    first_rank: np.ndarray,
    sizes: np.ndarray,
    starts: np.ndarray,
    loads: np.ndarray,
) -> None:  # pragma: no cover - compiled
    """Places the documents of all blocks, so that they end by `target` (nanoseconds) where that can be.

    Args:
        first_rank, sizes, starts: int64 [documents], filled for these documents: each takes ranks first_rank to
            first_rank + sizes - 1 from `starts` on, nanoseconds.
        loads: int64 [world_size], filled: when each rank has done its documents.
    """
    world_size = len(loads)
    large = Large(
        listed(large.lengths), listed(large.footprints), listed(large.best), listed(large.work), listed(large.alone)
    )
    order, speed_before, speeds = roots.order.copy(), listed(context.speed_before), listed(context.speeds)
    aside = np.empty(len(order), np.int64)
    # first rank, ranks, first document, end of documents, height
    parts = np.empty((len(roots.first) + world_size, 5), np.int64)
    count = len(roots.first)
    parts[:count, 0], parts[:count, 1], parts[:count, 2] = roots.first, roots.width, roots.begin
    parts[:count, 3], parts[:count, 4] = roots.end, roots.height
    while count > 0:
        count -= 1
        first, width, begin, end, height = (
            parts[count, 0],
            parts[count, 1],
            parts[count, 2],
            parts[count, 3],
            parts[count, 4],
        )
        if width == 1:
            for j in range(begin, end):
                i = order[j]
                first_rank[i], sizes[i], starts[i] = first, 1, height
                height += large.alone[i] * 1000 // speeds[first]
            loads[first] = height
            continue
        summed = np.empty(end - begin + 1, np.int64)  # work of the documents before each
        summed[0] = 0
        for j in range(begin, end):
            summed[j - begin + 1] = summed[j - begin] + large.work[order[j]]
        documents, one, wide = order[begin:end], 0, 0
        while begin < end and one == 0:
            i = order[begin]
            one, wide = _division(documents, summed, first, width, target - height, large, context)
            if one == 0:
                first_rank[i], sizes[i], starts[i] = first, min(width, large.lengths[i]), height
                height += group_time(large.lengths[i], first, sizes[i], context)
                begin += 1
                documents, summed = documents[1:], summed[1:]
        if one == 0:
            loads[first : first + width] = height
            continue
        middle = first + one
        speed, speed_one = speed_before[first + width] - speed_before[first], speed_before[middle] - speed_before[first]
        speed_two = speed - speed_one
        left_one, left_two = _room(speed_one, target - height), _room(speed_two, target - height)
        kept, moved = begin, 0
        wide += begin
        for j in range(begin, end):
            i = order[j]
            work = large.work[i]
            in_one = j < wide or left_one >= left_two
            late = (work - max(left_one, left_two)) * 1000 // (speed_one if in_one else speed_two)
            if j >= wide and late > target // IN_VAIN and width <= large.best[i]:
                time = group_time(large.lengths[i], first, width, context)
                if time - work * 1000 // speed < late:
                    first_rank[i], sizes[i], starts[i] = first, width, height
                    height += time
                    left_one -= _room(speed_one, time)
                    left_two -= _room(speed_two, time)
                    continue
            if in_one:
                left_one -= work
                order[kept] = i
                kept += 1
            else:
                left_two -= work
                aside[moved] = i
                moved += 1
        order[kept : kept + moved] = aside[:moved]
        parts[count, 0], parts[count, 1], parts[count, 2], parts[count, 3] = first, one, begin, kept
        parts[count + 1, 0], parts[count + 1, 1], parts[count + 1, 2] = middle, width - one, kept
        parts[count + 1, 3] = kept + moved
        parts[count : count + 2, 4] = height
        count += 2


@borrowing
@compiled
def _division(
    documents: np.ndarray,
    summed: np.ndarray,
    first: int,
    width: int,
    left: int,
    large: Large,
    context: PlacementContext,
) -> tuple[int, int]:  # pragma: no cover - compiled
    """Return where to divide a block that has so many nanoseconds left: ranks of its first part, 0 if the longest document takes
    all; and how many of the documents the other part cannot hold in time. `summed`: work of documents before each, and of all."""
    i = documents[0]
    need = smallest_group(large.lengths[i], large.footprints[i], large.best[i], first, width, left, 0, context)
    if need == 0:  # it ends too late anyway
        need = min(width, large.best[i])
        if context.before[first + need] - context.before[first] < large.footprints[i]:
            need = width
    unit = context.multiple if width > context.multiple else 1
    units, needed = -(-width // unit), -(-need // unit)
    if needed >= units:
        return 0, 0
    tiles = units // needed
    speed = context.speed_before[first + width] - context.speed_before[first]
    for attempt in range(3):
        if attempt == 0:  # beside groups of just this size
            one = unit * tiles * needed if tiles <= MOST_TILES else width
        elif attempt == 1:  # between two groups of this size or more
            one = unit * (units * ((tiles + 1) // 2) // tiles) if tiles > 1 else width
        else:  # some documents end too late then: does it cost less to take all ranks for this one?
            one = unit * needed
            speed_one = context.speed_before[first + one] - context.speed_before[first]
            if width <= large.lengths[i]:
                more = _room(speed, group_time(large.lengths[i], first, width, context)) - large.work[i]
                if 2 * more * 1000 // (speed - speed_one) < large.work[i] * 1000 // speed_one:
                    continue
        if one >= width:
            continue
        room = context.before[first + width] - context.before[first + one]
        most = _room(context.speed_before[first + one] - context.speed_before[first], left) + summed[0]
        wide, end = 0, len(documents)
        while wide < end:  # shorter ones are held too
            middle = (wide + end) // 2
            if large.footprints[documents[middle]] <= room:
                end = middle
            else:
                wide = middle + 1
        end = len(documents)
        if attempt < 2 and summed[wide] > most:
            continue
        while wide < end:
            middle = (wide + end) // 2
            if _holds(documents[middle], first + one, width - one, left, large, context):
                end = middle
            else:
                wide = middle + 1
        if attempt == 2 or summed[wide] <= most:
            return one, wide
    return 0, 0


@borrowing
@compiled
def _room(speed: int, time: int) -> int:  # pragma: no cover - compiled
    """Nanoseconds of work that ranks of this speed together (per mille) do in so many nanoseconds. The product of both may exceed
    64 bits."""
    return time // 1000 * speed + time % 1000 * speed // 1000


@borrowing
@compiled
def _holds(
    i: int, first: int, width: int, left: int, large: Large, context: PlacementContext
) -> bool:  # pragma: no cover - compiled
    """Whether the document ends on so many ranks from `first` on, or on some of them, within `left` nanoseconds."""
    length, footprint, best = large.lengths[i], large.footprints[i], large.best[i]
    if context.before[first + width] - context.before[first] < footprint:
        return False
    if width <= best:
        return ends_within(length, first, width, left, context)
    return smallest_group(length, footprint, best, first, width, left, 0, context) > 0
