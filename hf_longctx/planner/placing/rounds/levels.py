"""How high rounds of about one height must be that hold many documents, and how long they all take: an estimate, before
dealing.py deals the documents to them. Equal ranks only.

Documents that take longer than the height on one rank, or have too many tokens for it, are split over as few ranks as end in
time. Neighbours in length that take as many ranks are a run; a few of its documents stand for all. Whole documents then fill all
ranks up to one level, as water does:

    height  | A A A
            | A A A B B B B C C . . . . .        A to C take longer than the level, so that the first rounds are higher;
    level   | A A A B B B B C C w w w w w        whole documents fill the rest
            | A A A B B B B C C w w D D D
            +----------------------------> ranks of all rounds

Interpreted or compiled (planner/compiled.py). Floats only say which rounds are tried: of the same numbers, the same on every
machine. Nothing is sent.
"""

from __future__ import annotations

import numpy as np

from hf_longctx.planner.compiled import borrowing, compiled, inlined
from hf_longctx.planner.cost.group_times import PlacementContext, equal_time
from hf_longctx.planner.placing.rank_blocks import smallest_group
from hf_longctx.planner.placing.rounds.waiting_documents import Waiting

MOST_PARTS = 512
"""Parts of runs that are looked at; the last one stands for all that follow."""
PARTS = 4
"""Equal parts of a run that are looked at."""
SAMPLES = 32
"""Heights between the level and the highest round at which ranks are counted."""
HALVINGS = 20
"""Bisections of the interval that holds the level."""
PRECISION = 500
"""A height is found to a 500th."""
COUNTS = 3
"""Numbers of rounds to which the same documents may be dealt: the fewest that hold them, and those above."""
FEW_ROUNDS = 4
"""Up to so many, more heights are looked at."""
STEPS = 32
"""Share of rounds by which more are looked at next, a 32nd, where 64 or more are too few."""
SHARES = (2, 3, 4, 6, 8)
"""Parts of a rank's tokens, as divisors: beside a document that leaves less than one, none of so many tokens fits."""


@borrowing
@compiled
def group_size(
    i: int, height: int, even: bool, likely: int, documents: Waiting, context: PlacementContext
) -> int:  # pragma: no cover - compiled
    """Fewest equal ranks on which a document ends within the height; 0 if there are none.

    `even`: as many as share a node: of 8 ranks, two groups of 3 take 4 each. `likely`: where the search begins.
    """
    best = documents.best[i]
    size = smallest_group(
        documents.lengths[i], documents.footprints[i], best, 0, len(context.speeds), height, likely, context
    )
    if even and 1 < size < context.node:
        share = context.node // (context.node // size)
        if share <= best and share % context.multiple == size % context.multiple:
            size = share
    return size


@compiled
def first_whole(height: int, documents: Waiting, context: PlacementContext) -> int:  # pragma: no cover - compiled
    """The first document that stays whole, as all after it do: one rank holds it, and ends within the height."""
    return max(
        _first_up_to(height - context.micro_batch, 0, documents.alone),
        _first_up_to(context.capacity, 0, documents.footprints),
    )


@compiled
def levels(
    fewest: int, heights: np.ndarray, whole: int, documents: Waiting, context: PlacementContext
) -> np.ndarray:  # pragma: no cover - compiled
    """Look for rounds of about one height that may hold all documents.

    Args:
        fewest: rounds that hold all tokens.
        heights: int64, nanoseconds, ascending: what the height may be.
        whole: nanoseconds of the longest document that one rank holds, in a micro-batch; 0 if there is none.

    Returns:
        int64 [levels, 4]: nanoseconds that all rounds take, about; how many they are; their height; whether groups share nodes
        evenly.
    """
    rows, count = np.empty((2 * COUNTS * (len(heights) + 2), 4), np.int64), 0
    for even in (False, True):
        if even and context.node >= len(context.speeds):
            continue
        enough = 0
        for rounds in range(fewest, 2 * fewest + FEW_ROUNDS, max(1, fewest // STEPS)):
            lowest = lowest_height(rounds, heights[0], heights[-1], even, documents, context)
            if lowest == 0:
                continue
            higher = np.append(whole, heights if rounds <= FEW_ROUNDS else heights[:0])
            for height in np.append(lowest, higher[higher > lowest]):
                end = estimated(rounds, height, even, True, documents, context)[1]
                if end < np.inf:
                    rows[count, 0], rows[count, 1], rows[count, 2], rows[count, 3] = int(end), rounds, height, even
                    count += 1
            enough += 1
            if enough == COUNTS:
                break
    return rows[:count]


@compiled
def lowest_height(
    rounds: int, low: int, high: int, even: bool, documents: Waiting, context: PlacementContext
) -> int:  # pragma: no cover - compiled
    """The lowest height, `low` to `high`, at which so many rounds have about enough time for all documents; 0 if there is
    none."""
    ranks = float(rounds) * len(context.speeds)
    if estimated(rounds, high, even, False, documents, context)[0] > ranks * high:
        return 0
    while high - low > low // PRECISION + 1:
        middle = (low + high) // 2
        if estimated(rounds, middle, even, False, documents, context)[0] <= ranks * middle:
            high = middle
        else:
            low = middle
    return high


@compiled
def estimated(
    rounds: int, height: int, even: bool, ends: bool, documents: Waiting, context: PlacementContext
) -> tuple[float, float]:  # pragma: no cover - compiled
    """Nanoseconds that all ranks together are busy, and, if `ends`, that all rounds take; infinite where ranks or tokens do not
    suffice."""
    first, last, ranks = np.empty(MOST_PARTS), np.empty(MOST_PARTS), np.empty(MOST_PARTS)
    world_size, launch, count = len(context.speeds), float(context.micro_batch), len(documents.lengths)
    whole = first_whole(height, documents, context)
    parts, wasted = _parts_of_runs(whole, height, even, documents, context, first, last, ranks)
    if parts < 0:
        return np.inf, np.inf
    taken, busy = 0.0, 0.0
    for part in range(parts):
        taken += ranks[part]
        busy += ranks[part] * (first[part] + last[part]) / 2
    # Gaps that groups leave in nodes are of use as far as there are ranks of whole documents to lie there.
    left = float(rounds) * world_size - taken
    left -= max(wasted - left, 0.0)
    if left < 0 or fewest_ranks_of_whole(whole, documents, context) > left:
        return np.inf, np.inf
    before = documents.alone_before
    busy += left * launch + (before[count] - before[whole])
    if not ends:
        return busy, 0.0
    low, high = launch, float(height)
    for _ in range(HALVINGS):
        level = (low + high) / 2
        longer = _first_up_to(level - launch, whole, documents.alone)
        room = (left - (longer - whole)) * (level - launch)
        for part in range(parts):
            room += ranks[part] * _room_below(level, first[part], last[part])
        if room >= before[count] - before[longer]:
            high = level
        else:
            low = level
    level, top = high, high
    for part in range(parts):
        top = max(top, first[part])
    if whole < count:
        top = max(top, documents.alone[whole] + launch)
    total, step = level * rounds, (top - level) / SAMPLES
    for sample in range(SAMPLES):
        time = level + step * (sample + 0.5)
        higher = float(_first_up_to(time - launch, whole, documents.alone) - whole)
        for part in range(parts):
            higher += ranks[part] * _share_above(time, first[part], last[part])
        total += step * np.ceil(higher / world_size)
    return busy, total


@compiled
def _parts_of_runs(
    whole: int,
    height: int,
    even: bool,
    documents: Waiting,
    context: PlacementContext,
    first: np.ndarray,
    last: np.ndarray,
    ranks: np.ndarray,
) -> tuple[int, float]:  # pragma: no cover - compiled
    """Look at the runs of documents before `whole`.

    Args:
        first, last, ranks: float64 [MOST_PARTS], filled: nanoseconds of the first and the last document of each part of a run,
            and ranks of all of its groups.

    Returns:
        How many parts there are, -1 if a document does not end in time; and the ranks of nodes that groups leave free.
    """
    i, likely, count, wasted, node = 0, 0, 0, 0.0, context.node
    while i < whole:
        size = group_size(i, height, even, likely, documents, context)
        if size == 0:
            return -1, 0.0
        end, high, step = i + 1, whole, 1  # of those that take as many
        while end < high:
            probe = min(end + step, high) - 1
            if group_size(probe, height, even, size, documents, context) == size:
                end = probe + 1
                step *= 2
            else:
                high = probe
                break
        while end < high:
            middle = (end + high) // 2
            if group_size(middle, height, even, size, documents, context) == size:
                end = middle + 1
            else:
                high = middle
        if size < node < len(context.speeds):
            wasted += (end - i) * (float(node) / (node // size) - size)
        parts = PARTS if end - i >= 2 * PARTS else 1
        for part in range(parts):
            begin, stop = i + (end - i) * part // parts, i + (end - i) * (part + 1) // parts
            if count == MOST_PARTS:
                count -= 1
                ranks[count] += size * (stop - begin)
            else:
                ranks[count] = size * (stop - begin)
                first[count] = equal_time(documents.lengths[begin], size, context)
            last[count] = equal_time(documents.lengths[stop - 1], size, context)
            count += 1
        i, likely = end, size
    return count, wasted


@compiled
def fewest_ranks_of_whole(
    begin: int, documents: Waiting, context: PlacementContext
) -> int:  # pragma: no cover - compiled
    """Ranks that the documents from `begin` on need at least, one for each micro-batch, if none is split.

    No two of more than half of a rank's tokens share one, and beside those of more than 1 - x of them none of x or more does.
    (The bound L2 of Martello and Toth, "Lower bounds and reduction procedures for the bin packing problem", Discrete Applied
    Mathematics 28, 1990.)
    """
    capacity, before, count = context.capacity, documents.tokens_before, len(documents.lengths)
    half = _first_up_to(capacity // 2, begin, documents.footprints)
    fewest = -(-(before[count] - before[begin]) // capacity)
    for share in SHARES:
        least = capacity // share
        alone = min(_first_up_to(capacity - least, begin, documents.footprints), half)
        end = max(_first_up_to(least - 1, begin, documents.footprints), half)
        room = (half - alone) * capacity - (before[half] - before[alone])
        fewest = max(fewest, half - begin + max(0, -(-(before[end] - before[half] - room) // capacity)))
    return fewest


@borrowing
@compiled
def _first_up_to(most: float, begin: int, falling: np.ndarray) -> int:  # pragma: no cover - compiled
    """The first entry from `begin` on of a column that falls, such as tokens or nanoseconds, that is at most `most`."""
    low, high = begin, len(falling)
    while low < high:
        middle = (low + high) // 2
        if falling[middle] <= most:
            high = middle
        else:
            low = middle + 1
    return low


@inlined
@borrowing
@compiled
def _share_above(time: float, first: float, last: float) -> float:  # pragma: no cover - compiled
    """Share of times, evenly from `last` up to `first`, that exceed one."""
    if time >= first:
        return 0.0
    return 1.0 if time <= last else (first - time) / (first - last)


@inlined
@borrowing
@compiled
def _room_below(level: float, first: float, last: float) -> float:  # pragma: no cover - compiled
    """Mean room that times, evenly from `last` up to `first`, leave below a level, where they do not exceed it."""
    if level >= first:
        return level - (first + last) / 2
    return 0.0 if level <= last else (level - last) / 2 * (level - last) / (first - last)
