"""Layouts: which rank holds which tokens of which documents, and everything that follows from it.

A micro-batch is a layout. A layout says, for each rank that takes part, which document segments it holds. Positions,
the document mask, who sends what to whom, and balance are derived here; none of them is ever stored or negotiated.

    two ranks, documents A (8 tokens), B (3), C (2):      rank 0: A[0:2) A[6:8) B[0:3)
                                                          rank 1: A[2:6) C[0:2)

                     keys   A0 A1 | A2 A3 A4 A5 | A6 A7      # computed by the rank that holds the query row
        queries  A0-A1      \\                                # rank 0, causal
                 A2-A5      ====    \\\\                      # rank 1: full over A[0:2) (received), causal over its own
                 A6-A7      ====    =========    \\           # rank 0: full over A[2:6) (received), causal over its own

Segments of one document are disjoint, so a query segment and a key segment of the same document are one of three
cases: the same segment (causal), keys wholly before queries (full), keys wholly after (nothing). No mask is needed,
ever.

Rows. A rank's tensors hold its segments in memory order. The engine works in *sorted* order (by document, then
position): there, the keys that a query segment attends to in any slice of one document are always one contiguous run,
and a document's own segments, laid end to end, need a single causal block. `Schedule.order` maps sorted rows to
memory rows where the two differ.

Nothing is sent between ranks here, and nothing here needs torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """Tokens [start, stop) of one document."""

    doc: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


Shard = tuple[Segment, ...]
"""What one rank holds, in memory order."""


class LayoutError(ValueError):
    """A layout breaks one of its invariants."""


@dataclass(frozen=True, slots=True)
class Block:
    """Attention of query rows [q_start, q_stop) over key rows [k_start, k_stop).

    Query rows count the rank's sorted rows; key rows count the sorted rows of the local shard, or of the slice
    received. A causal block is square: query row i attends to key rows up to its own. Any other block is full.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool

    @property
    def area(self) -> int:
        """(query, key) pairs, the unit of attention work."""
        q, k = self.q_stop - self.q_start, self.k_stop - self.k_start
        return q * (q + 1) // 2 if self.causal else q * k


@dataclass(frozen=True, slots=True)
class Step:
    """One exchange offset: send a slice of keys and values to one rank, receive one from another, attend to it."""

    send_to: int
    send_runs: tuple[tuple[int, int], ...]
    """Runs [start, stop) of this rank's sorted rows that `send_to` needs; empty: nothing is sent."""
    receive_from: int
    receive_tokens: int
    """Tokens in the slice received; 0: nothing is received."""
    blocks: tuple[Block, ...]

    @property
    def send_tokens(self) -> int:
        return sum(stop - start for start, stop in self.send_runs)


@dataclass(frozen=True, slots=True)
class Schedule:
    """What one rank does to attend over its shard of a layout."""

    order: np.ndarray | None
    """int64 [tokens]: memory row of each sorted row; None where the shard is sorted already."""
    local: tuple[Block, ...]
    """Causal blocks, one a document; together they cover every row of the shard exactly once."""
    steps: tuple[Step, ...]
    """One for each exchange offset 1, 2, ..., ranks - 1. A step at which this rank does nothing is kept: every rank counts
    the same steps, so that what two ranks have in flight between them comes in the same order on both."""

    @property
    def area(self) -> int:
        """(query, key) pairs that this rank computes."""
        return sum(block.area for step in self.steps for block in step.blocks) + sum(b.area for b in self.local)


@dataclass(frozen=True)
class Layout:
    """One micro-batch: {rank: segments it holds, in memory order}. Ranks with an empty shard are dropped.

    Every document of a layout is held whole: its segments tile [0, length) exactly once.

    Raises:
        LayoutError: a segment is empty or negative, two segments overlap, a gap is left, or no token is held at all.
    """

    shards: Mapping[int, Shard]

    def __post_init__(self) -> None:
        shards = {rank: tuple(self.shards[rank]) for rank in sorted(self.shards) if len(self.shards[rank]) > 0}
        object.__setattr__(self, "shards", shards)
        if not shards:
            raise LayoutError("a layout holds at least one token on at least one rank; this one holds none")
        for doc, segments in self._segments_of.items():
            reached = 0
            for segment, rank in segments:
                if not segment.start < segment.stop:
                    raise LayoutError(f"rank {rank} holds {segment}: a segment needs start < stop")
                if segment.start != reached:
                    problem = "overlaps what" if segment.start < reached else "leaves a gap after what"
                    raise LayoutError(
                        f"document {doc}: [{segment.start}, {segment.stop}) on rank {rank} {problem} comes before it, "
                        f"which ends at {reached}; the segments of a document must tile [0, length) exactly once"
                    )
                reached = segment.stop

    @cached_property
    def _segments_of(self) -> dict[int, list[tuple[Segment, int]]]:
        """Document -> its (segment, rank) pairs by position."""
        pairs = sorted((segment, rank) for rank, shard in self.shards.items() for segment in shard)
        found: dict[int, list[tuple[Segment, int]]] = {}
        for segment, rank in pairs:
            found.setdefault(segment.doc, []).append((segment, rank))
        return found

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part, ascending."""
        return tuple(self.shards)

    @cached_property
    def doc_lengths(self) -> dict[int, int]:
        """Document -> tokens."""
        return {doc: segments[-1][0].stop for doc, segments in self._segments_of.items()}

    @cached_property
    def split_documents(self) -> dict[int, tuple[int, ...]]:
        """Documents held by several ranks -> those ranks, ascending."""
        holders = {doc: tuple(sorted({rank for _, rank in pairs})) for doc, pairs in self._segments_of.items()}
        return {doc: ranks for doc, ranks in holders.items() if len(ranks) > 1}

    def shard(self, rank: int) -> Shard:
        """The segments of a rank, in memory order. Raises LayoutError if the rank takes no part."""
        if rank not in self.shards:
            raise LayoutError(f"rank {rank} takes no part in this layout; its ranks are {list(self.ranks)}")
        return self.shards[rank]

    def tokens(self, rank: int) -> int:
        """Tokens that a rank holds."""
        return sum(len(segment) for segment in self.shard(rank))

    def positions(self, rank: int) -> np.ndarray:
        """int64 [tokens]: each token's offset in its document, in memory order."""
        return np.concatenate([np.arange(s.start, s.stop, dtype=np.int64) for s in self.shard(rank)])

    def documents(self, rank: int) -> np.ndarray:
        """int64 [tokens]: each token's document, in memory order."""
        shard = self.shard(rank)
        return np.repeat(np.array([s.doc for s in shard], np.int64), [len(s) for s in shard])

    def schedule(self, rank: int) -> Schedule:
        """What `rank` computes, sends and receives; derived once and kept. Raises LayoutError if it takes no part."""
        if rank not in self._schedules:
            self._schedules[rank] = self._derive_schedule(rank)
        return self._schedules[rank]

    @cached_property
    def _schedules(self) -> dict[int, Schedule]:
        return {}

    def _derive_schedule(self, rank: int) -> Schedule:
        mine = self._sorted_documents(rank)
        n = len(self.ranks)
        me = self.ranks.index(rank)
        steps = []
        for offset in range(1, n):
            send_to, receive_from = self.ranks[(me + offset) % n], self.ranks[(me - offset) % n]
            send_runs = _needed_runs(mine, self._sorted_documents(send_to))
            receive_tokens, blocks = _needed_blocks(mine, self._sorted_documents(receive_from))
            steps.append(Step(send_to, send_runs, receive_from, receive_tokens, blocks))
        local = []
        for row, segments in mine.values():
            stop = row + sum(map(len, segments))
            local.append(Block(row, stop, row, stop, causal=True))
        return Schedule(self._sorted_order(rank), tuple(local), tuple(steps))

    def _sorted_documents(self, rank: int) -> dict[int, tuple[int, list[Segment]]]:
        """Document -> (first sorted row, segments by position) of a rank's shard."""
        if rank not in self._documents_cache:
            found: dict[int, tuple[int, list[Segment]]] = {}
            row = 0
            for segment in sorted(self.shard(rank)):
                found.setdefault(segment.doc, (row, []))[1].append(segment)
                row += len(segment)
            self._documents_cache[rank] = found
        return self._documents_cache[rank]

    @cached_property
    def _documents_cache(self) -> dict[int, dict[int, tuple[int, list[Segment]]]]:
        return {}

    def _sorted_order(self, rank: int) -> np.ndarray | None:
        shard = self.shard(rank)
        by_position = sorted(range(len(shard)), key=shard.__getitem__)
        if by_position == list(range(len(shard))):
            return None
        first_row = np.cumsum([0, *map(len, shard)])
        return np.concatenate([np.arange(first_row[i], first_row[i + 1]) for i in by_position])


_Documents = Mapping[int, tuple[int, Sequence[Segment]]]


def _needed_tokens(keys: Sequence[Segment], queries: Sequence[Segment]) -> int:
    """How many of one document's key tokens, counted from its first segment, lie before the last query segment."""
    return sum(len(key) for key in keys if key.stop <= queries[-1].start)


def _needed_runs(source: _Documents, queries: _Documents) -> tuple[tuple[int, int], ...]:
    """Runs of the source's sorted rows that a rank with these queries needs; runs that touch are joined."""
    runs: list[tuple[int, int]] = []
    for doc, (row, keys) in source.items():
        count = _needed_tokens(keys, queries[doc][1]) if doc in queries else 0
        if count and runs and runs[-1][1] == row:
            runs[-1] = (runs[-1][0], row + count)
        elif count:
            runs.append((row, row + count))
    return tuple(runs)


def _needed_blocks(mine: _Documents, source: _Documents) -> tuple[int, tuple[Block, ...]]:
    """Tokens in the slice received from `source`, and the blocks of my queries over its rows.

    Adjacent query segments that see the same keys share one block: on a zigzag layout every step is a single block.

    Worked example: I hold A[2:4) A[6:8) (sorted rows 0-1, 2-3), the slice holds A[0:2) A[4:6) (rows 0-1, 2-3).
    A[2:4) sees 2 tokens of the slice and A[6:8) sees 4: Block(0, 2, 0, 2), Block(2, 4, 0, 4).
    Were the slice only A[0:2), both would see the same 2 tokens: one Block(0, 4, 0, 2).
    """
    blocks: list[Block] = []
    slice_row = 0
    for doc, (_, keys) in source.items():
        if doc not in mine:
            continue
        q_row, queries = mine[doc]
        for query in queries:
            visible = sum(len(key) for key in keys if key.stop <= query.start)
            if visible:
                last = blocks[-1] if blocks else None
                if last and last.q_stop == q_row and (last.k_start, last.k_stop) == (slice_row, slice_row + visible):
                    blocks[-1] = Block(last.q_start, q_row + len(query), last.k_start, last.k_stop, causal=False)
                else:
                    blocks.append(Block(q_row, q_row + len(query), slice_row, slice_row + visible, causal=False))
            q_row += len(query)
        slice_row += _needed_tokens(keys, queries)
    return slice_row, tuple(blocks)


def zigzag(doc: int, length: int, ranks: Sequence[int]) -> dict[int, Shard]:
    """Splits one document over P ranks so that causal attention balances: rank i holds chunks i and 2P-1-i of 2P.

    Tokens per rank differ by at most one, whatever the length; with fewer tokens than ranks the last ranks hold none.
    The two chunks of the last rank touch and are one segment.

        length 10, ranks (0, 1):   rank 0: [0:2) [7:10)    rank 1: [2:7)
    """
    held = [length // len(ranks) + (i < length % len(ranks)) for i in range(len(ranks))]
    shards: dict[int, Shard] = {}
    low, high = 0, length
    for i, rank in enumerate(ranks):
        first, second = held[i] // 2, held[i] - held[i] // 2
        chunks = [(low, low + first), (high - second, high)]
        low, high = low + first, high - second
        if chunks[0][1] == chunks[1][0]:
            chunks = [(chunks[0][0], chunks[1][1])]
        shards[rank] = tuple(Segment(doc, start, stop) for start, stop in chunks if start < stop)
    return shards
