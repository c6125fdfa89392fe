"""Blocks: which pairs of queries and keys a rank computes.

Segments of one document are disjoint, so a query segment and a key segment are the same (causal), or keys lie
wholly before queries (full), or wholly after (nothing). A sliding window of w tokens cuts off the far corner: a query
run of at most w tokens then sees a causal block of itself, full blocks, and at the far edge of its window a square in
which query row x sees key rows y >= x. Nothing outside a window is computed or sent. Three masks, and never a tensor:

        CAUSAL  y <= x   \\           FULL  ====         ANTICAUSAL  y >= x   \\===
                         =\\                ====                                \\==
                         ==\\               ====                                 \\=

Rows. The rows of one document's segments lie end to end, by position. Segments that touch are one.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any

from hf_longctx.layouts.layout import Segment

Placed = tuple[int, Segment]
"""The row at which a segment begins, and the segment."""


class Mask(Enum):
    """Pairs of a block that count; x and y are rows inside the block."""

    FULL = auto()
    """All."""
    CAUSAL = auto()
    """y <= x; the block is square."""
    ANTICAUSAL = auto()
    """y >= x; the block is square."""


@dataclass(frozen=True, slots=True)
class Block:
    """Attention of query rows [q_start, q_stop) over key rows [k_start, k_stop).

    Query rows count the rank's sorted rows; key rows count the sorted rows of the local shard, or of the slice
    received.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    mask: Mask
    distance: int = 0
    """Position of the first query row minus that of the first key row. In schedules with a tile or a window, query
    row x and key row y of the block are distance + x - y tokens apart; in others, rows may skip positions."""

    @property
    def area(self) -> int:
        """(query, key) pairs, the unit of attention work."""
        q, k = self.q_stop - self.q_start, self.k_stop - self.k_start
        return q * k if self.mask is Mask.FULL else q * (q + 1) // 2


class Blocks(tuple[Block, ...]):
    """Blocks of a schedule, which every layer computes."""

    in_flight: tuple[bool, bool] = (False, False)
    """Whether messages of this rank travel while they are computed, forward and backward."""

    @cached_property
    def derived(self) -> dict[Hashable, Any]:
        """Hold what kernels derive from these blocks, by name, as long as the blocks live."""
        return {}


def local_blocks(placed: Sequence[Placed], window: int | None, tile: int | None) -> tuple[list[Block], list[Block]]:
    """Blocks of one document's queries over keys on the same rank: causal ones that cover every row once, and the rest.

    Args:
        placed: the rank's segments of the document, by position.
        window: a query attends to keys fewer than so many positions before it; None for all.
        tile: most rows of a causal block; None: one block for all, whose rows may skip positions.
    """
    if tile is None:
        (start, _), (last, segment) = placed[0], placed[-1]
        return [_causal(start, last + len(segment))], []
    local: list[Block] = []
    near = list(blocks_between(placed, placed, window, tile))
    for row, segment in placed:
        for start in range(segment.start, segment.stop, tile):
            queries = Segment(segment.doc, start, min(start + tile, segment.stop))
            q_row = row + start - segment.start
            local.append(_causal(q_row, q_row + len(queries)))
            if start > segment.start:
                near.extend(_pairs((q_row, queries), (row, Segment(segment.doc, segment.start, start)), window))
    return local, near


def blocks_between(
    queries: Sequence[Placed], keys: Sequence[Placed], window: int | None, tile: int | None
) -> Iterator[Block]:
    """Blocks of one document's query segments over its key segments that lie before them; arguments as above."""
    if tile is None:
        yield from _joined(queries, keys)
        return
    for query in queries:
        for key in keys:
            if key[1].stop <= query[1].start:
                yield from _pairs(query, key, window)


def _joined(queries: Sequence[Placed], keys: Sequence[Placed]) -> Iterator[Block]:
    """Full blocks, as few as possible: adjacent query segments that see the same keys share one.

    Worked example: queries A[2:4) A[6:8) (rows 0-1, 2-3), keys A[0:2) A[4:6) (rows 0-1, 2-3). A[2:4) sees 2 key rows and
    A[6:8) sees 4: Block(0, 2, 0, 2), Block(2, 4, 0, 4). Were the keys only A[0:2), both would see the same 2 rows: one
    Block(0, 4, 0, 2). On a zigzag layout every slice needs a single block.
    """
    (k_row, _), (start, _), visible = keys[0], queries[0], 0
    end = (queries[-1][0] + len(queries[-1][1]), None)
    for q_row, query in (*queries, end):
        sees = -1 if query is None else sum(len(key) for _, key in keys if key.stop <= query.start)
        if sees != visible:
            if visible:
                yield Block(start, q_row, k_row, k_row + visible, Mask.FULL)
            start, visible = q_row, sees


def _pairs(query: Placed, key: Placed, window: int | None) -> Iterator[Block]:
    """Blocks of a query segment over a key segment before it, within the window."""
    (_, queries), (_, keys) = query, key
    if window is None:
        yield _block(query, queries.start, queries.stop, key, keys.start, keys.stop, Mask.FULL)
        return
    for start in range(queries.start, queries.stop, window):
        stop = min(start + window, queries.stop)
        # Every query of [start, stop) sees keys from stop - window on; the first sees them from start + 1 - window.
        seen_by_all = max(keys.start, stop - window)
        if seen_by_all < keys.stop:
            yield _block(query, start, stop, key, seen_by_all, keys.stop, Mask.FULL)
        first, last = max(keys.start, start + 1 - window), min(keys.stop, stop - window)
        if first < last:
            # Key j is seen by queries up to j + window - 1: those before first + window - 1 see all of the run.
            corner = first + window - 1
            if start < corner:
                yield _block(query, start, corner, key, first, last, Mask.FULL)
            yield _block(query, corner, corner + last - first, key, first, last, Mask.ANTICAUSAL)


def _block(query: Placed, q_start: int, q_stop: int, key: Placed, k_start: int, k_stop: int, mask: Mask) -> Block:
    """A block whose bounds are positions, in rows."""
    q, k = query[0] - query[1].start, key[0] - key[1].start
    return Block(q + q_start, q + q_stop, k + k_start, k + k_stop, mask, q_start - k_start)


def _causal(start: int, stop: int) -> Block:
    return Block(start, stop, start, stop, Mask.CAUSAL)
