"""The longest documents side by side over all ranks, for what rank_blocks.py cannot place at once.

When the longest documents together take longer than the target on the ranks that hold them, they first go side by side over
all ranks, each with ranks in proportion to its work, so that all of them end at about the same time. That is a shelf; on it
may stand another, and then blocks:

    height  | D D F          blocks
       ^    | B B B C C C    second shelf
       |    | A A A A A A    first shelf
            +-------------> ranks

Integers only. Nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hf_longctx.planner.compiled import borrowing, compiled, listed
from hf_longctx.planner.cost.cost_model import work_of
from hf_longctx.planner.cost.group_times import PlacementContext, group_time
from hf_longctx.planner.placing.rank_blocks import least_work_from, place_in_blocks, smallest_group

MOST = 12
"""Shelves tried for a target; where documents need more than half of all ranks, also more, up to one for each of these."""
HIGHEST = 2**61
"""Nanoseconds: no shelf is higher."""


class _Built(NamedTuple):
    """Shelves, one on the other, that have been built so far; int64."""

    first_rank: np.ndarray
    """[documents]; of those that stand on shelves, as the next."""
    sizes: np.ndarray
    number: np.ndarray
    """[1]: how many there are."""
    begins: np.ndarray
    """[shelves + 1]: the first document that stands on none of the first so many; less than 0 if there can be no more."""
    ends: np.ndarray
    """[shelves + 1]: when the last group on the first so many ends, nanoseconds."""
    loads: np.ndarray
    """[shelves + 1, world_size]: when each rank has done what stands on the first so many, nanoseconds."""


class Shelves:
    """Shelves of the same documents, which do not depend on a target: each is built once, when it is first asked for."""

    def __init__(
        self, lengths: np.ndarray, footprints: np.ndarray, best: np.ndarray, context: PlacementContext, most: int
    ) -> None:
        """Take documents as `place_in_blocks` does; `most`: how many shelves there may be."""
        alone = int(np.count_nonzero(2 * footprints > context.before[-1]))
        counts = np.array(list(_counts(min(most, MOST + alone))), np.int64)
        rows, world_size = int(counts[-1]) + 1, len(context.speeds)
        self._counts, self._documents, self._context = counts, (lengths, footprints, best), context
        places = (np.empty(len(lengths), np.int64) for _ in range(2))
        self._built = _Built(*places, *(np.zeros(size, np.int64) for size in (1, rows, rows, (rows, world_size))))

    @cached_property
    def work_from(self) -> np.ndarray:
        """float64 [documents + 1], as `place_in_blocks` takes it."""
        lengths, footprints, _ = self._documents
        return np.asarray(least_work_from(lengths, footprints, self._context))

    def first_that_fits(
        self, target: int, even: bool, first_rank: np.ndarray, sizes: np.ndarray, loads: np.ndarray
    ) -> bool:
        """Places the first documents on as few shelves as will do, and the others in blocks, `even` or not, so that all end by
        `target`; fills `first_rank`, `sizes` and `loads`. Returns whether that could be."""
        columns = *self._documents, self.work_from, self._counts
        return bool(_place(*columns, target, even, self._built, self._context, first_rank, sizes, loads))


def _counts(most: int) -> Iterator[int]:
    """Numbers of shelves to try: 0 to MOST, then each a quarter more than the one before, up to `most`."""
    count = 0
    while count < most:
        yield count
        count = count + 1 if count < MOST else count * 5 // 4
    yield most


@compiled
def _place(
    lengths: np.ndarray,
    footprints: np.ndarray,
    best: np.ndarray,
    work_from: np.ndarray,
    counts: np.ndarray,
    target: int,
    even: bool,
    built: _Built,
    context: PlacementContext,
    first_rank: np.ndarray,
    sizes: np.ndarray,
    loads: np.ndarray,
) -> bool:  # pragma: no cover - compiled
    """Places documents as `Shelves.first_that_fits`. `counts`: int64, ascending, numbers of shelves to try."""
    for shelves in counts:
        while built.number[0] < shelves and 0 <= built.begins[built.number[0]] < len(lengths):
            last = built.number[0]
            built.loads[last + 1] = built.loads[last]
            columns = built.first_rank, built.sizes, built.loads[last + 1]
            begin, end = _add_shelf(lengths, footprints, best, built.begins[last], HIGHEST, context, *columns)
            built.begins[last + 1], built.ends[last + 1] = begin, max(built.ends[last], end)
            built.number[0] = last + 1
        count = min(shelves, built.number[0])
        begin = built.begins[count]
        if begin < 0 or built.ends[count] > target:
            return False  # more do not help
        first_rank[:begin], sizes[:begin], loads[:] = built.first_rank[:begin], built.sizes[:begin], built.loads[count]
        if place_in_blocks(
            lengths, footprints, best, work_from, begin, target, even, context, first_rank, sizes, loads
        ):
            return True
    return False


@compiled
def _add_shelf(
    lengths: np.ndarray,
    footprints: np.ndarray,
    best: np.ndarray,
    begin: int,
    high: int,
    context: PlacementContext,
    first_rank: np.ndarray,
    sizes: np.ndarray,
    loads: np.ndarray,
) -> tuple[int, int]:  # pragma: no cover - compiled
    """Puts documents from `begin` on side by side over all ranks; returns the first that is not on the shelf, -1 if there can
    be no shelf, and when the last of its groups ends. `high`: more nanoseconds than any shelf takes."""
    world_size = len(loads)
    lengths, footprints, best = listed(lengths), listed(footprints), listed(best)
    speed = listed(context.speed_before)[world_size]
    # As many as fit, while the last, on the fewest ranks that hold it, would not end before the others.
    room, work, end = context.before[world_size], 0, begin
    while end < len(lengths) and footprints[end] <= room:
        alone = work_of(lengths[end], 1, context.coefficients)
        fewest = max(1, -(-footprints[end] * world_size // context.before[world_size]))
        if end > begin and (work + alone) // speed * 1000 > alone // fewest:
            break
        work += alone
        room -= footprints[end]
        end += 1
    if end == begin:
        return -1, 0
    low = work // speed * 1000
    if not _fill_shelf(lengths, footprints, best, begin, end, high, context, first_rank, sizes):
        return -1, 0
    while high - low > low // 2000 + 1:  # to 1/2000 of the shelf's height
        middle = low + (min(high, 16 * low + 1024) - low) // 2
        if _fill_shelf(lengths, footprints, best, begin, end, middle, context, first_rank, sizes):
            high = middle
        else:
            low = middle
    _fill_shelf(lengths, footprints, best, begin, end, high, context, first_rank, sizes)
    last = 0
    for i in range(begin, end):
        ranks = slice(first_rank[i], first_rank[i] + sizes[i])
        loads[ranks] = loads[ranks].max() + group_time(lengths[i], first_rank[i], sizes[i], context)
        last = max(last, loads[first_rank[i]])
    return end, last


@borrowing
@compiled
def _fill_shelf(
    lengths: np.ndarray,
    footprints: np.ndarray,
    best: np.ndarray,
    begin: int,
    end: int,
    height: int,
    context: PlacementContext,
    first_rank: np.ndarray,
    sizes: np.ndarray,
) -> bool:  # pragma: no cover - compiled
    rank, world_size = 0 * begin, len(context.speeds)  # numba compiles what is called with a constant, 0, once more
    for i in range(begin, end):
        size = smallest_group(lengths[i], footprints[i], best[i], rank, world_size - rank, height, 0, context)
        if size == 0 or rank + size > world_size:
            return False
        first_rank[i], sizes[i] = rank, size
        rank += size
    return True
