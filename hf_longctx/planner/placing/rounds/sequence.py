"""Rounds that are filled one after the other, each from the longest document on that has none yet.

Interpreted or compiled (planner/compiled.py); integers decide, and square roots in float64, correctly rounded and so the same on
every machine. Nothing is sent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hf_longctx.planner.compiled import compiled
from hf_longctx.planner.cost.group_times import PlacementContext, group_time
from hf_longctx.planner.placing.rounds.filling import fill_best_round, lowest_that_holds_all
from hf_longctx.planner.placing.rounds.waiting_documents import Waiting, close_up, time_for, waiting, waiting_from


class Documents(NamedTuple):
    """Documents, longest first, int64 [documents] each: columns as of `Waiting`, and others."""

    lengths: np.ndarray
    footprints: np.ndarray
    tokens: np.ndarray
    """Those that each has itself; `footprints` may be more."""
    alone: np.ndarray
    shared: np.ndarray
    best: np.ndarray
    least: np.ndarray
    """Nanoseconds that each takes on the ranks of speed 1000 that suit it best."""
    most: np.ndarray
    """Nanoseconds on the slowest of the fewest ranks, or of a rank full of whole documents, if that is more."""


@compiled
def waiting_of(documents: Documents, undone: np.ndarray) -> Waiting:  # pragma: no cover - compiled
    """Documents of these indices (int64, ascending) as they wait for a round."""
    return waiting(
        documents.lengths[undone],
        documents.footprints[undone],
        documents.tokens[undone],
        documents.alone[undone],
        documents.shared[undone],
        documents.best[undone],
    )


@compiled
def heights_of(
    longest: int, halvings: int, documents: Documents, context: PlacementContext
) -> np.ndarray:  # pragma: no cover - compiled
    """int64, ascending: heights that a round of this longest document may have. Between the least and the most, the ratio of
    neighbours is halved so many times."""
    # From rank 0 on, more ranks than the fewest may be needed, and more exchange may take longer.
    fewest = int(np.searchsorted(context.before, documents.footprints[longest]))
    low = documents.least[longest]
    high = max(low, documents.most[longest], group_time(documents.lengths[longest], 0, fewest, context))
    count = 2**halvings
    heights = np.empty(count + 1, np.int64)
    heights[0], heights[count] = low, high
    step = count
    while step > 1:
        for i in range(0, count, step):
            mean = int(np.sqrt(float(heights[i])) * np.sqrt(float(heights[i + step])))
            heights[i + step // 2] = min(max(mean, heights[i]), heights[i + step])
        step //= 2
    return heights


@compiled
def fill_rounds(
    stop: int,
    first_round: int,
    halvings: int,
    windows: np.ndarray,
    beside: int,
    latest: int,
    documents: Documents,
    context: PlacementContext,
    round_of: np.ndarray,
    first_rank: np.ndarray,
    size: np.ndarray,
) -> np.ndarray:  # pragma: no cover - compiled
    """Fill rounds with the documents before `stop` that have none, until they must end late.

    Args:
        latest: nanoseconds; no more are filled once these rounds and the work that is left, evenly on all ranks, take longer.
        first_round: the number of the first of these rounds.
        halvings: as of `heights_of`. windows, beside: as of `fill_best_round`.
        round_of, first_rank, size: int64 [documents], changed: the round of each, -1 without one; the first of its ranks, and how
            many.

    Returns:
        int64 [rounds]: when each ends, nanoseconds.
    """
    ends: Any = [np.int64(0)]
    ends.pop()
    undone, begin, total, speed = np.flatnonzero(round_of[:stop] < 0), 0, 0, context.speeds.sum()
    rest, left = waiting_of(documents, undone), documents.shared[undone].sum()
    placed = np.zeros(len(undone), np.bool_)
    ranks, sizes = np.empty(len(undone), np.int64), np.empty(len(undone), np.int64)
    while begin < len(undone) and total + left // speed * 1000 <= latest:
        heights = heights_of(undone[begin], halvings, documents, context)
        kept = placed[begin:], ranks[begin:], sizes[begin:]
        end, count = fill_best_round(heights, windows, beside, waiting_from(begin, rest), context, kept)
        assert count > 0, "the fewest ranks that hold the longest document are within the heights"
        last = begin
        while count > 0:
            if placed[last]:
                i = undone[last]
                left -= documents.shared[i]
                round_of[i], first_rank[i], size[i] = first_round + len(ends), ranks[last], sizes[last]
                count -= 1
            last += 1
        ends.append(end)
        total += end
        begin = close_up(begin, last, placed, undone, rest)
    result = np.empty(len(ends), np.int64)
    for round in range(len(ends)):
        result[round] = ends[round]
    return result


@compiled
def fill_one_or_two(
    undone: np.ndarray,
    one: bool,
    two: bool,
    limit: int,
    halvings: int,
    documents: Documents,
    context: PlacementContext,
) -> tuple[int, int, int]:  # pragma: no cover - compiled
    """Look for one round, or two, of all these documents.

    Args:
        undone: int64, ascending: their indices.
        one, two: whether one round is tried, and whether two are.
        limit: nanoseconds; what ends later is of no use.
        halvings: as of `heights_of`, for the first of two rounds.

    Returns:
        When they end, nanoseconds, and the height of each; 0 where there is none.
    """
    speed, rest = context.speeds.sum(), waiting_of(documents, undone)
    best, best_height, best_second = limit, 0, 0
    if one:
        height, end = lowest_that_holds_all(documents.least[undone[0]], limit, rest, context)
        if height and end < best:
            best, best_height = end, height
    if two:
        no_windows, count = np.empty(0, np.int64), len(undone)
        kept = np.empty(count, np.bool_), np.empty(count, np.int64), np.empty(count, np.int64)
        for first in heights_of(undone[0], halvings, documents, context):
            kept[0][:] = False
            first_end, placed = fill_best_round(np.full(1, first), no_windows, 0, rest, context, kept)
            # Where the others, spread evenly over all ranks, would take too long, no second round is searched for.
            left = undone[~kept[0]]
            if placed == 0 or placed == count or first_end + time_for(documents.shared[left].sum(), speed) >= limit:
                continue
            height, end = lowest_that_holds_all(
                documents.least[left[0]], limit - first_end, waiting_of(documents, left), context
            )
            if height and first_end + end < best:
                best, best_height, best_second = first_end + end, first, height
    return best, best_height, best_second
