"""Documents that wait for a round, and searches among them: which are the next that a height has room for.

Documents come longest first, so what a search looks for is found by halving: of one run, whole documents, or groups of ranks.

Interpreted or compiled (planner/compiled.py); integers only. Nothing is sent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hf_longctx.planner.compiled import borrowing, compiled, inlined
from hf_longctx.planner.cost.group_times import PlacementContext, group_time
from hf_longctx.planner.placing.rank_blocks import smallest_group
from hf_longctx.planner.placing.rounds.gaps import Free, next_rank


class Waiting(NamedTuple):
    """Documents without a round, longest first, int64 each."""

    lengths: Any
    """Tokens that each counts as."""
    footprints: Any
    """Tokens that a group must have room for."""
    alone: Any
    """Nanoseconds of work on one rank."""
    shared: Any
    """The same on the fewest that hold the document."""
    best: Any
    """Ranks beyond which each gets slower."""
    tokens_before: Any
    """A sum that rises from each document to the next, and past the last, by its tokens; where it begins means nothing."""
    alone_before: Any
    """Their `alone`."""
    shared_before: Any
    """Their `shared`."""


@compiled
def waiting(
    lengths: np.ndarray,
    footprints: np.ndarray,
    tokens: np.ndarray,
    alone: np.ndarray,
    shared: np.ndarray,
    best: np.ndarray,
) -> Waiting:  # pragma: no cover - compiled
    """Put columns together with their sums. `tokens`: what each has itself; `footprints` must not rise, and may be more."""
    return Waiting(
        lengths, footprints, alone, shared, best, _sums_before(tokens), _sums_before(alone), _sums_before(shared)
    )


@compiled
def waiting_from(begin: int, documents: Waiting) -> Waiting:  # pragma: no cover - compiled
    """Return the documents from `begin` on: parts of the same columns."""
    return Waiting(
        documents.lengths[begin:],
        documents.footprints[begin:],
        documents.alone[begin:],
        documents.shared[begin:],
        documents.best[begin:],
        documents.tokens_before[begin:],
        documents.alone_before[begin:],
        documents.shared_before[begin:],
    )


@compiled
def close_up(
    begin: int, end: int, placed: np.ndarray, undone: np.ndarray, documents: Waiting
) -> int:  # pragma: no cover - compiled
    """Move those from `begin` to `end` that are not placed to just before `end`, in all columns; return where they begin. A round
    takes mostly long documents, which come first: so this takes as long as the round holds documents, not as long as they wait.

    Args:
        placed: bool [documents], changed: all False afterwards.
        undone: int64 [documents], changed: one more column.
    """
    stay = begin + np.flatnonzero(~placed[begin:end])
    first = end - len(stay)
    for sums in (documents.tokens_before, documents.alone_before, documents.shared_before):
        own = sums[stay + 1] - sums[stay]
        sums[first:end] = sums[end] - np.cumsum(own[::-1])[::-1]
    for column in (documents.lengths, documents.footprints, documents.alone, documents.shared, documents.best, undone):
        column[first:end] = column[stay]
    placed[begin:end] = False
    return first


@compiled
def _sums_before(column: np.ndarray) -> np.ndarray:  # pragma: no cover - compiled
    """int64 [entries + 1]: the sum of what comes before each entry, and of all."""
    sums = np.zeros(len(column) + 1, np.int64)
    sums[1:] = np.cumsum(column)
    return sums


@borrowing
@compiled
def end_of_joining(i: int, end: int, room: int, left: int, documents: Waiting) -> int:  # pragma: no cover - compiled
    """The end of those from document `i` on, before `end`, that have at most so many tokens and so much work together."""
    tokens, work = documents.tokens_before[i] + room, documents.alone_before[i] + left
    low, step = i + 1, 1
    while low < end:
        high = min(low + step, end)
        if documents.tokens_before[high] > tokens or documents.alone_before[high] > work:
            end = high - 1
            break
        low = high
        step *= 2
    while low < end:
        middle = (low + end + 1) // 2
        if documents.tokens_before[middle] > tokens or documents.alone_before[middle] > work:
            end = middle - 1
        else:
            low = middle
    return low


@borrowing
@compiled
def end_of_run(
    i: int, end: int, group: int, least: int, height: int, documents: Waiting, free: Free, context: PlacementContext
) -> int:  # pragma: no cover - compiled
    """The end of those from document `i` on, before `end`, that take `group` ranks, for `least` nanoseconds or longer."""
    low, step = i + 1, 1
    while low < end:
        high = min(low + step, end)
        if _is_alike(high - 1, group, least, height, documents, free, context):
            low = high
            step *= 2
        else:
            end = high - 1
            break
    while low < end:
        middle = (low + end + 1) // 2
        if _is_alike(middle - 1, group, least, height, documents, free, context):
            low = middle
        else:
            end = middle - 1
    return low


@inlined
@borrowing
@compiled
def _is_alike(
    i: int, group: int, least: int, height: int, documents: Waiting, free: Free, context: PlacementContext
) -> bool:  # pragma: no cover - compiled
    """Whether the document takes `group` ranks too, for `least` nanoseconds or longer."""
    if least > 0 and group_time(documents.lengths[i], 0, group, context) < least:
        return False
    return group_for(i, height, group, documents, free, context)[1] == group


@borrowing
@compiled
def first_on_fewer(
    i: int, group: int, height: int, documents: Waiting, free: Free, context: PlacementContext
) -> int:  # pragma: no cover - compiled
    """The first document after `i` that needs fewer than `group` ranks."""
    low, high = i + 1, len(documents.lengths)
    while low < high:
        middle = (low + high) // 2
        if group_for(middle, height, group, documents, free, context)[1] < group:
            high = middle
        else:
            low = middle + 1
    return low


@inlined
@borrowing
@compiled
def next_that_fits(
    i: int, room: int, left: int, height: int, likely: int, documents: Waiting, free: Free, context: PlacementContext
) -> int:  # pragma: no cover - compiled
    """The first document after `i` that is short enough for the rank that is being filled, another one, or a group."""
    low, high = i + 1, len(documents.alone)
    while low < high:
        middle = (low + high) // 2
        if (
            (documents.footprints[middle] <= room and documents.alone[middle] <= left)
            or fits_alone(middle, height, documents, free, context)
            or group_for(middle, height, likely, documents, free, context)[1] > 0
        ):
            high = middle
        else:
            low = middle + 1
    return low


@inlined
@borrowing
@compiled
def group_for(
    i: int, height: int, likely: int, documents: Waiting, free: Free, context: PlacementContext
) -> tuple[int, int]:  # pragma: no cover - compiled
    """First rank and fewest ranks on which a document ends in time; (-1, 0) if it does not. The first rank matters where ranks
    are unequal."""
    length, footprint, best = documents.lengths[i], documents.footprints[i], documents.best[i]
    tail, widest, node = free.tail[0], free.widest[0], context.node
    most = len(free.speeds) - tail
    if context.uniform:
        group = smallest_group(length, footprint, best, 0, max(most, widest), height, likely, context)
        return (0, group) if group else (-1, 0)
    if widest > 0:
        group = smallest_group(length, footprint, best, free.heads[widest], widest, height, likely, context)
        if group > 0:
            return free.heads[widest], group
    group = smallest_group(length, footprint, best, tail, most, height, likely, context) if most > 0 else 0
    rest = node - tail % node
    if rest < group <= node and node < len(free.speeds):  # it would lie in the next node, on other ranks
        tail = min(tail + rest, len(free.speeds))
        most = min(node, len(free.speeds) - tail)
        group = smallest_group(length, footprint, best, tail, most, height, likely, context) if most > 0 else 0
    return (tail, group) if group else (-1, 0)


@inlined
@borrowing
@compiled
def fits_alone(
    i: int, height: int, documents: Waiting, free: Free, context: PlacementContext
) -> bool:  # pragma: no cover - compiled
    """Whether the rank that `take` gives next has room for the whole document, and ends in time."""
    rank = next_rank(free)
    if rank >= len(free.speeds) or documents.footprints[i] > free.capacities[rank]:
        return False
    return documents.alone[i] <= work_within(height, rank, free, context)


@inlined
@borrowing
@compiled
def time_for(work: int, speed: int) -> int:  # pragma: no cover - compiled
    """Nanoseconds that a rank takes for work of so many nanoseconds at speed 1000, rounded down."""
    return work // speed * 1000 + work % speed * 1000 // speed  # work * 1000 may exceed 64 bits


@inlined
@borrowing
@compiled
def work_within(height: int, rank: int, free: Free, context: PlacementContext) -> int:  # pragma: no cover - compiled
    """Return how much work (nanoseconds at speed 1000) a rank can do within `height`, besides its micro-batch."""
    return work_in(height, free.speeds[rank]) - context.micro_batch


@inlined
@borrowing
@compiled
def work_in(time: int, speed: int) -> int:  # pragma: no cover - compiled
    """Nanoseconds of work at speed 1000 that a rank does in so many nanoseconds, rounded down; of arrays too."""
    return time // 1000 * speed + time % 1000 * speed // 1000
