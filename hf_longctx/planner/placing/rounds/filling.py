"""One round of lockstep: which of the documents that wait it holds, if it may be of a given height.

For a height, documents come longest first; each takes the fewest ranks on which it ends in time, or, where one rank is enough,
joins the documents of the rank that is being filled, up to its capacity and to the height:

    height  +-----------------------------+        A, B and C end in time; the
            | AAAAAAAAA BBBB CC  d    g   |        whole documents d, e, f, g, h fill
            | AAAAAAAAA BBBB CC  e f  h   |        one rank each as far as the height
            +-----------------------------+        and its capacity allow
             ranks 0 .............. 8

Neighbours in length mostly take groups of one size, so they are placed as a run, and whole documents are joined by their
sums: what a round costs to fill grows with the runs and ranks in it, hardly with its documents.

The documents of one run end the further before the height, the more their lengths differ. A window is a least time: documents
that take less on their group wait until all others have been looked at. So a round holds several short runs, of 8, 5 and 3
ranks for instance, each of documents that end at nearly the same time.

A group of at most a node's ranks lies inside a node, in the smallest gap that holds it.

Interpreted or compiled (planner/compiled.py); integers only. Nothing is sent.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hf_longctx.planner.compiled import borrowing, compiled, inlined, listed
from hf_longctx.planner.cost.group_times import PlacementContext, group_time
from hf_longctx.planner.placing.rank_blocks import ROUNDED
from hf_longctx.planner.placing.rounds.gaps import Free, give_all_back, nothing_taken, take
from hf_longctx.planner.placing.rounds.waiting_documents import (
    Waiting,
    end_of_joining,
    end_of_run,
    first_on_fewer,
    fits_alone,
    group_for,
    next_that_fits,
    time_for,
    work_within,
)

MOST_RUNS, LOWERED = 64, 500
"""Runs of documents inside a window; a height is lowered to a 500th."""


Kept = tuple[np.ndarray, np.ndarray, np.ndarray]
"""[documents] each, filled for every document: whether the round holds it, the first of its ranks, and how many."""


@compiled
def fill_best_round(
    heights: np.ndarray, windows: np.ndarray, beside: int, documents: Waiting, context: PlacementContext, kept: Kept
) -> tuple[int, int]:  # pragma: no cover - compiled
    """Fills a round of the height at which it does most work per time, lowered as far as it still holds as much.

    Args:
        heights: int64, nanoseconds, ascending: all of them are tried without a window.
        windows: int64, per mille of the height that groups must take at first; tried with the best of these heights and with
            `beside` more on either side.

    Returns:
        When the round ends, nanoseconds, and how many documents it holds; zeros if no height is enough for the longest one.
    """
    columns, free, scratch = _columns(documents, context)
    height_of, shares = listed(heights), listed(windows)
    begin, end = 0, len(height_of)
    chosen, below, least_time, most_work, most_work_per_time = 0, 0, 0, 0, -1.0
    for turn in range(len(shares) + 1):
        best = -1
        for i in range(begin, end):
            least = height_of[i] // 1000 * shares[turn - 1] if turn else 0
            work, reached, count = _fill(
                height_of[i], least, 0, most_work_per_time, False, columns, free, scratch, context, kept
            )
            work_per_time = work / max(reached, 1)
            if count and work_per_time >= most_work_per_time:  # of two that are as good, the fuller one
                best, least_time, most_work, most_work_per_time = i, least, work, work_per_time
        if best >= 0:
            chosen = height_of[best]
            # Without a window, the next lower height does less work; through one, it may hold other documents.
            below = height_of[max(best - 1, 0)] if turn == 0 else chosen // 10 * 9
        if chosen == 0:
            return 0, 0
        if turn == 0:
            begin, end = max(0, best - beside), min(end, best + beside + 1)
    below = min(below, chosen - 1)
    while chosen - below > chosen // LOWERED + 1:
        middle = (below + chosen) // 2
        if _fill(middle, least_time, most_work, 0.0, False, columns, free, scratch, context, kept)[0] >= most_work:
            chosen = middle
        else:
            below = middle
    _, reached, count = _fill(chosen, least_time, 0, 0.0, True, columns, free, scratch, context, kept)
    return reached, count


@compiled
def lowest_that_holds_all(
    low: int, high: int, documents: Waiting, context: PlacementContext
) -> tuple[int, int]:  # pragma: no cover - compiled
    """The lowest height of a round of all documents, to a 1000th, and when it ends; zeros if `high` does not suffice."""
    columns, free, scratch = _columns(documents, context)
    nowhere = (np.empty(0, np.bool_), np.empty(0, np.int64), np.empty(0, np.int64))
    count = len(documents.lengths)
    all_work = columns.shared_before[count] - columns.shared_before[0]
    _, end, placed = _fill(high, 0, all_work, 0.0, False, columns, free, scratch, context, nowhere)
    if placed < count:
        return 0, 0
    while high - low > low // 1000 + 1:
        middle = (low + high) // 2
        _, reached, placed = _fill(middle, 0, all_work, 0.0, False, columns, free, scratch, context, nowhere)
        if placed == count:
            high, end = middle, reached
        else:
            low = middle
    return high, end


@compiled
def _columns(documents: Waiting, context: PlacementContext) -> tuple[Any, Any, Any]:  # pragma: no cover - compiled
    """Return the documents' columns as lists, and all ranks free, for `_fill`."""
    columns = Waiting(
        listed(documents.lengths),
        listed(documents.footprints),
        listed(documents.alone),
        listed(documents.shared),
        listed(documents.best),
        listed(documents.tokens_before),
        listed(documents.alone_before),
        listed(documents.shared_before),
    )
    return columns, nothing_taken(context), (np.empty(MOST_RUNS, np.int64), np.empty(MOST_RUNS, np.int64))


@borrowing
@compiled
def _fill(
    height: int,
    least_time: int,
    least_work: int,
    least_per_time: float,
    keep: bool,
    documents: Waiting,
    free: Free,
    scratch: tuple[np.ndarray, np.ndarray],
    context: PlacementContext,
    kept: Kept,
) -> tuple[int, int, int]:  # pragma: no cover - compiled
    """Fills one round of a height.

    Args:
        least_time: nanoseconds that a group must take at first, 0 for any.
        least_work, least_per_time: work, and work for each nanosecond of the round, with less of which it is of no use.
        keep: whether to write down what it holds.

    Returns:
        The work done (nanoseconds of one rank), when the round ends, and how many documents it holds; zeros if the first
        document does not fit, or as soon as all other ranks, busy to the end, would leave the round of no use.
    """
    placed, first_rank, size = kept
    footprints, alone = documents.footprints, documents.alone
    world_size = len(free.speeds)
    give_all_back(free)
    work = reached = count = 0
    last = len(alone)
    runs = 0
    run_begin, run_end = scratch
    likely, alike = world_size, True  # ranks of the last group; whether its neighbours took as many
    # Nanoseconds at speed 1000 that ranks which may still take documents do in each nanosecond.
    speed_left = context.speed_before[world_size] / 1000
    enough_work, enough_per_time = least_work * (1 - ROUNDED), least_per_time * (1 - ROUNDED)
    for in_window in (True, False):
        if in_window and least_time == 0:
            continue
        i = run = 0
        open_rank, room, left = -1, 0, 0  # of the rank that is being filled with whole documents: tokens, nanoseconds
        while i < last and (not in_window or runs < MOST_RUNS):
            if work + speed_left * height < enough_work or work + speed_left * reached < enough_per_time * reached:
                return 0, 0, 0
            limit = last
            if not in_window:  # past what is placed already
                while run < runs and i >= run_begin[run]:
                    i = max(i, run_end[run])
                    run += 1
                if run < runs:
                    limit = run_begin[run]
                if i == last:
                    break
            if footprints[i] <= room and alone[i] <= left:
                end = end_of_joining(i, limit, room, left, documents)
                done = documents.alone_before[end] - documents.alone_before[i]
                room -= documents.tokens_before[end] - documents.tokens_before[i]
                left -= done
                reached = max(reached, height - time_for(left, free.speeds[open_rank]))
                work += done
                count += end - i
                if keep:
                    placed[i:end] = True
                    first_rank[i:end] = open_rank
                    size[i:end] = 1
                i = end
                continue
            if fits_alone(i, height, documents, free, context):
                if in_window:
                    break  # whole documents fill what all others leave
                if open_rank >= 0:
                    speed_left -= free.speeds[open_rank] / 1000
                open_rank = take(1, -1, free, context)
                room = free.capacities[open_rank]
                left = work_within(height, open_rank, free, context)
                continue
            at, group = group_for(i, height, likely, documents, free, context)
            if group == 0:
                if i == 0:
                    return 0, 0, 0
                i = next_that_fits(i, room, left, height, likely, documents, free, context)
                continue
            time = group_time(documents.lengths[i], at, group, context)
            if in_window and i > 0 and time < least_time:
                i = first_on_fewer(i, group, height, documents, free, context)
                continue
            end = i + 1
            if context.uniform and (alike or group == likely):
                least = least_time if in_window else 0
                end = end_of_run(i, min(limit, i + world_size // group), group, least, height, documents, free, context)
                alike = end > i + 1
            likely, begin = group, i
            i = _place_run(begin, end, group, at, keep, free, context, kept)
            if i == begin:  # enough ranks, but in two nodes
                i += 1
                continue
            reached = max(reached, time)
            work += documents.shared_before[i] - documents.shared_before[begin]
            speed_left -= (context.speed_before[at + group] - context.speed_before[at]) / 1000 * (i - begin)
            count += i - begin
            if in_window and runs > 0 and run_end[runs - 1] == begin:
                run_end[runs - 1] = i
            elif in_window:
                run_begin[runs], run_end[runs] = begin, i
                runs += 1
    return work, reached, count


@inlined
@borrowing
@compiled
def _place_run(
    begin: int, end: int, group: int, at: int, keep: bool, free: Free, context: PlacementContext, kept: Kept
) -> int:  # pragma: no cover - compiled
    """Gives documents from `begin` to `end` groups of one size, as long as there are ranks for them; returns the first without.
    If `keep`, writes them down."""
    placed, first_rank, size = kept
    world_size, node, i, first = len(free.speeds), context.node, begin, free.tail[0]
    together = 0  # groups that are placed side by side, with no gap between them
    if group > node or node == world_size:
        together = 1
    elif free.widest[0] < group and node % group == 0 and first % node == 0:
        together = node // group
    if together:
        i += min(end - i, (world_size - first) // group) // together * together
        free.tail[0] = first + (i - begin) * group
        if keep:
            placed[begin:i] = True
            size[begin:i] = group
            for document in range(begin, i):
                first_rank[document] = first + group * (document - begin)
    while i < end and group <= node < world_size:
        start = take(group, at, free, context)
        if start < 0:
            break
        if keep:
            placed[i], first_rank[i], size[i] = True, start, group
        i += 1
    return i
