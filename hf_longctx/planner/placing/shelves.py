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

import numpy as np

from hf_longctx.planner.compiled import borrowing, compiled, listed
from hf_longctx.planner.cost.cost_model import work_of
from hf_longctx.planner.cost.group_times import PlacementContext, group_time
from hf_longctx.planner.placing.rank_blocks import least_work_from, place_in_blocks, smallest_group

MOST = 12
"""Shelves tried for a target; where documents need more than half of all ranks, also more, up to one for each of these."""
HIGHEST = 2**61
"""Nanoseconds: no shelf is higher."""


class Shelves:
    """Shelves of the same documents, which do not depend on a target: each is built once, when it is first asked for."""

    def __init__(
        self, lengths: np.ndarray, footprints: np.ndarray, best: np.ndarray, context: PlacementContext, most: int
    ) -> None:
        """Take documents as `place_in_blocks` does; `most`: how many shelves there may be."""
        alone = int(np.count_nonzero(2 * footprints > context.before[-1]))
        self._most = min(most, MOST + alone)
        self._documents, self._context = (lengths, footprints, best), context
        self._first_rank, self._sizes = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64)
        self._begins, self._ends = [0], [0]
        self._loads = [np.zeros(len(context.speeds), np.int64)]

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
        for shelves in _counts(self._most):
            placed = self._place(shelves, target, even, first_rank, sizes, loads)
            if placed is None:
                break
            if placed:
                return True
        return False

    def _place(
        self, shelves: int, target: int, even: bool, first_rank: np.ndarray, sizes: np.ndarray, loads: np.ndarray
    ) -> bool | None:
        """Place documents as `first_that_fits`, on so many shelves; None if more do not help."""
        while len(self._begins) <= shelves and 0 <= self._begins[-1] < len(first_rank):
            self._add()
        count = min(shelves, len(self._begins) - 1)
        begin = self._begins[count]
        if begin < 0 or self._ends[count] > target:
            return None
        first_rank[:begin], sizes[:begin], loads[:] = self._first_rank[:begin], self._sizes[:begin], self._loads[count]
        columns = *self._documents, self.work_from
        return bool(place_in_blocks(*columns, begin, target, even, self._context, first_rank, sizes, loads))

    def _add(self) -> None:
        loads = self._loads[-1].copy()
        begin, end = _add_shelf(
            *self._documents, self._begins[-1], HIGHEST, self._context, self._first_rank, self._sizes, loads
        )
        self._begins.append(begin)
        self._ends.append(max(self._ends[-1], end))
        self._loads.append(loads)


def _counts(most: int) -> Iterator[int]:
    """Numbers of shelves to try: 0 to MOST, then each a quarter more than the one before, up to `most`."""
    count = 0
    while count < most:
        yield count
        count = count + 1 if count < MOST else count * 5 // 4
    yield most


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
