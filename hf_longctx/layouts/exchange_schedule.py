"""Schedules: what one rank of a layout computes, sends and receives. Derived from the layout alone, so both sides of
every message know it without a word.

Rows. A rank's tensors hold its segments in memory order. Schedules work in *sorted* order (by document, then
position): there, the keys that a query segment attends to in any slice of one document are one contiguous run, and a
document's own segments, laid end to end, need a single causal block. `Schedule.order` maps sorted rows to memory rows
where the two differ.

    two ranks, documents A (8 tokens), B (3), C (2):      rank 0: A[0:2) A[6:8) B[0:3)
                                                          rank 1: A[2:6) C[0:2)

                     keys   A0 A1 | A2 A3 A4 A5 | A6 A7      # computed by the rank that holds the query row
        queries  A0-A1      \\                                # rank 0, causal
                 A2-A5      ====    \\\\                      # rank 1: full over A[0:2) (received), causal over its own
                 A6-A7      ====    =========    \\           # rank 0: full over A[2:6) (received), causal over its own

Context. Of a chunk's context only keys take part: their rows follow those of the shard, by document and position.

Rounds. In round t (0, 1, ...) a rank sends to the rank t+1 places on what that one needs, and receives from the rank
t+1 places back. Where nodes are known, keys that several ranks of a node need cross to it once: one of them receives
the union and passes the others' parts on in the next round.

    2 nodes of 2 ranks; rank 0's keys are needed by 1, 2 and 3:    round 0: 0 -> 1
                                                                   round 1: 0 -> 2 (all that 2 and 3 need)
                                                                   round 2: 2 -> 3 (what 3 needs of it)

Gradients of keys and values take the same messages backwards; a rank that passed keys on adds up the gradients that
come back before it returns them, two rounds later. Nothing is sent here, and nothing here needs torch.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hf_longctx.layouts.blocks import Block, Blocks, Placed, blocks_between, local_blocks
from hf_longctx.layouts.layout import Layout, LayoutError, Segment

Runs = tuple[tuple[int, int], ...]
"""Runs [start, stop) of rows, ascending and apart."""


@dataclass(frozen=True, slots=True)
class Send:
    """Keys and values on their way to a rank."""

    rank: int
    source: int | None
    """None: this rank's own rows. Otherwise passed on: index among the receives of the round before."""
    runs: Runs
    """Rows of the source."""
    gradient_round: int
    """The round of backward in which their gradients come back."""

    @property
    def tokens(self) -> int:
        if len(self.runs) == 1:
            return self.runs[0][1] - self.runs[0][0]
        return sum(stop - start for start, stop in self.runs)


@dataclass(frozen=True, slots=True)
class Receive:
    """A slice of keys and values from a rank, and what is computed with it."""

    rank: int
    tokens: int
    blocks: Blocks
    gradient_round: int
    """The round of backward in which its gradients go back."""


@dataclass(frozen=True, slots=True)
class Round:
    """Messages that travel together. Between two ranks, messages of a round have the same order on both."""

    sends: tuple[Send, ...]
    receives: tuple[Receive, ...]


Returns = tuple[list[tuple[int, Send]], list[tuple[int, int, Receive]]]
"""Messages that a round of backward returns: (round, send) whose gradients come back, (round, number in it, receive) whose
gradients go back."""


@dataclass(frozen=True, eq=False)
class Schedule:
    """The exchanges and blocks with which one rank attends over its shard of a layout."""

    order: np.ndarray | None
    """int64 [tokens]: memory row of each sorted row; None where the shard is sorted already."""
    local: Blocks
    """Causal blocks over its own keys; together they cover every query row exactly once."""
    near: Blocks
    """Further blocks over its own keys."""
    rounds: tuple[Round, ...]
    """A round in which this rank does nothing is kept: all ranks of the layout count the same rounds, so that what two
    ranks have in flight between them comes in the same order on both."""

    @cached_property
    def largest_message(self) -> int:
        """Tokens of the largest message, either way."""
        sent = [send.tokens for round in self.rounds for send in round.sends]
        return max(sent + [receive.tokens for round in self.rounds for receive in round.receives], default=0)

    @cached_property
    def returns(self) -> tuple[list[Returns], list[Returns]]:
        """Give what returns in each round of backward; then the same where the last round comes first, and every other one a
        round later."""
        return self._returns(False), self._returns(True)

    def _returns(self, keep_last: bool) -> list[Returns]:
        back: dict[int, Returns] = defaultdict(lambda: ([], []))
        last = len(self.rounds) - 1
        for index, round in enumerate(self.rounds):
            for send in round.sends:
                back[0 if keep_last and index == last else send.gradient_round + keep_last][0].append((index, send))
            for number, receive in enumerate(round.receives):
                at = 0 if keep_last and index == last else receive.gradient_round + keep_last
                back[at][1].append((index, number, receive))
        return [back[at] for at in range(max(back, default=-1) + 1)]

    @property
    def area(self) -> int:
        """(query, key) pairs that this rank computes."""
        received = [block for round in self.rounds for receive in round.receives for block in receive.blocks]
        return sum(block.area for block in (*self.local, *self.near, *received))


def schedule(
    layout: Layout,
    rank: int,
    *,
    window: int | None = None,
    tile: int | None = None,
    ranks_per_node: int | None = None,
) -> Schedule:
    """Return what `rank` computes, sends and receives; derived once for each layout and kept with it. `layout.ulysses` plays no
    part here (attention/ulysses.py).

    Args:
        window: a query attends to keys fewer than so many positions before it; None for all.
        tile: most rows of a causal block. With a tile or a window, the rows of each block are consecutive positions.
        ranks_per_node: rank // ranks_per_node is a rank's node; None where all ranks are equally near.

    Raises:
        LayoutError: the rank takes no part in the layout, or the window is not positive.
    """
    if window is not None and window < 1:
        raise LayoutError(f"window={window}: a query attends at least to itself, so a window has 1 token or more")
    key = ("schedule", rank, window, tile, ranks_per_node)
    if key not in layout.derived:
        layout.derived[key] = _Derivation(layout, window, tile, ranks_per_node).of(rank)
    return layout.derived[key]


def _noted(schedule: Schedule) -> Schedule:
    """Note beside which blocks messages are in flight: keys and values of the next round, and in backward gradients of those
    before."""
    busy = [bool(round.sends or round.receives) for round in schedule.rounds]
    for blocks in (schedule.local, schedule.near):
        blocks.in_flight = (any(busy), any(busy))
    for index, round in enumerate(schedule.rounds):
        # A slice, not an index: no round follows the last.
        later, before = any(busy[index + 1 : index + 2]), any(busy[:index])
        for receive in round.receives:
            receive.blocks.in_flight = (later, later or before)
    return schedule


_Documents = Mapping[int, Sequence[Placed]]
"""Document -> its segments on a rank by position, with their sorted rows; segments that touch are one."""


class _Derivation:
    def __init__(self, layout: Layout, window: int | None, tile: int | None, ranks_per_node: int | None) -> None:
        self._layout, self._window, self._tile = layout, window, min(filter(None, (window, tile)), default=None)
        self._ranks = layout.ranks
        self._index = {rank: index for index, rank in enumerate(layout.ranks)}
        self._node = {rank: rank // ranks_per_node if ranks_per_node else 0 for rank in layout.ranks}
        self._members: dict[int, list[int]] = {}
        for rank in layout.ranks:
            self._members.setdefault(self._node[rank], []).append(rank)
        self._documents: dict[int, _Documents] = {}
        self._kept: dict[int, _Documents] = {}
        self._found_blocks: dict[tuple[int, int], tuple[Block, ...]] = {}
        self._found_runs: dict[tuple[int, int], Runs] = {}
        self._found_needers: dict[tuple[int, int], list[int]] = {}

    def of(self, rank: int) -> Schedule:
        parts = [local_blocks(placed, self._window, self._tile) for placed in self._sorted(rank).values()]
        local, near = (tuple(block for part in parts for block in part[which]) for which in (0, 1))
        near += tuple(self._over(self._context(rank), rank))
        order = _sorted_order(self._layout.shard(rank))
        return _noted(Schedule(order, Blocks(local), Blocks(near), tuple(self._rounds(rank))))

    def _rounds(self, rank: int) -> Iterator[Round]:
        n, me = len(self._ranks), self._index[rank]
        # What arrives in the last of the direct rounds may still have to be passed on.
        extra = any(self._passed_on_to(self._ranks[(i + 1) % n], leader) for i, leader in enumerate(self._ranks))
        before: list[tuple[int, Runs]] = []
        """(origin, rows of the origin) of the slices that came directly in the round before."""
        for index in range(n - 1 + extra):
            sends: list[Send] = []
            receives: list[Receive] = []
            arrived: list[tuple[int, Runs]] = []
            if index < n - 1:
                # All look equally far, so that no rank gets two direct messages in a round.
                to, origin = self._ranks[(me + index + 1) % n], self._ranks[(me - index - 1) % n]
                if runs := self._direct(rank, to):
                    sends.append(Send(to, None, runs, self._gradient_round(rank, to, index)))
                if runs := self._direct(origin, rank):
                    blocks = Blocks(_in_slice(block, runs) for block in self._blocks(rank, origin))
                    gradient_round = self._gradient_round(origin, rank, index)
                    receives.append(Receive(origin, _rows(runs), blocks, gradient_round))
                    arrived.append((origin, runs))
            # `source` is an index among all receives of the round before: what came directly was put there first.
            for source, (origin, runs) in enumerate(before):
                for to in self._passed_on_to(origin, rank):
                    sends.append(Send(to, source, _runs_in_slice(self._runs(origin, to), runs), index))
            for leader, origin in self._passed_on_in(rank, index):
                runs = self._runs(origin, rank)
                blocks = Blocks(_in_slice(block, runs) for block in self._blocks(rank, origin))
                receives.append(Receive(leader, _rows(runs), blocks, index))
            before = arrived
            yield Round(tuple(sends), tuple(receives))

    def _needers(self, origin: int, node: int) -> list[int]:
        """Ranks of another node that need rows of `origin`."""
        if (origin, node) not in self._found_needers:
            needers = [rank for rank in self._members[node] if self._runs(origin, rank)]
            self._found_needers[origin, node] = needers
        return self._found_needers[origin, node]

    def _leader(self, origin: int, node: int) -> int | None:
        """Return which rank of another node receives for all of it; they take turns over the origins."""
        needers = self._needers(origin, node)
        return needers[self._index[origin] % len(needers)] if needers else None

    def _direct(self, origin: int, to: int) -> Runs:
        """Rows of `origin` that it sends to a rank itself."""
        if self._node[origin] == self._node[to]:
            return self._runs(origin, to)
        if self._leader(origin, self._node[to]) != to:
            return ()
        return _union(run for rank in self._needers(origin, self._node[to]) for run in self._runs(origin, rank))

    def _passed_on_to(self, origin: int, leader: int) -> list[int]:
        """Ranks to which `leader` passes on what came from `origin`."""
        node = self._node[leader]
        if self._node[origin] == node or self._leader(origin, node) != leader:
            return []
        return [rank for rank in self._needers(origin, node) if rank != leader]

    def _passed_on_in(self, rank: int, index: int) -> Iterator[tuple[int, int]]:
        """(leader, origin) of the slices that are passed on to `rank` in a round: those that came the round before."""
        for leader in self._members[self._node[rank]]:
            # In the round before, index - 1, it received from the rank (index - 1) + 1 places back.
            origin = self._ranks[(self._index[leader] - index) % len(self._ranks)]
            if leader not in (rank, origin) and rank in self._passed_on_to(origin, leader):
                yield leader, origin

    def _gradient_round(self, origin: int, to: int, index: int) -> int:
        """A rank that passes keys on waits for the gradients of the others: one round to pass on, one to come back."""
        return index + 2 if self._passed_on_to(origin, to) else index

    def _runs(self, origin: int, rank: int) -> Runs:
        """Rows of `origin` that `rank` needs."""
        if (origin, rank) not in self._found_runs:
            runs = _union((block.k_start, block.k_stop) for block in self._blocks(rank, origin))
            self._found_runs[origin, rank] = runs
        return self._found_runs[origin, rank]

    def _blocks(self, rank: int, origin: int) -> tuple[Block, ...]:
        """Return what `rank` computes with rows of `origin`; key rows count the sorted rows of `origin`."""
        if (rank, origin) not in self._found_blocks:
            blocks = (*self._over(self._sorted(origin), rank), *self._over(self._context(origin), rank))
            self._found_blocks[rank, origin] = blocks
        return self._found_blocks[rank, origin]

    def _over(self, keys: _Documents, rank: int) -> Iterator[Block]:
        """Yield what the queries of `rank` see of keys that lie before them."""
        queries = self._sorted(rank)
        for doc in keys:
            if doc in queries:
                yield from blocks_between(queries[doc], keys[doc], self._window, self._tile)

    def _sorted(self, rank: int) -> _Documents:
        if rank not in self._documents:
            self._documents[rank] = _placed(self._layout.shard(rank))
        return self._documents[rank]

    def _context(self, rank: int) -> _Documents:
        if rank not in self._kept:
            self._kept[rank] = _placed(self._layout.context.get(rank, ()), self._layout.tokens(rank))
        return self._kept[rank]


def _placed(segments: Iterable[Segment], row: int = 0) -> _Documents:
    """Segments in sorted order, with their rows, counted from `row`."""
    documents: dict[int, list[Placed]] = {}
    for segment in sorted(segments):
        placed = documents.setdefault(segment.doc, [])
        if placed and placed[-1][1].stop == segment.start:
            placed[-1] = (placed[-1][0], replace(placed[-1][1], stop=segment.stop))
        else:
            placed.append((row, segment))
        row += len(segment)
    return documents


def _sorted_order(shard: Sequence[Segment]) -> np.ndarray | None:
    by_position = sorted(range(len(shard)), key=shard.__getitem__)
    if by_position == list(range(len(shard))):
        return None
    # In memory B (3 rows), A (2): sorted, A's rows come first, and lie in memory rows 3, 4, then 0, 1, 2.
    first_row = np.cumsum([0, *map(len, shard)])
    return np.concatenate([np.arange(first_row[i], first_row[i + 1]) for i in by_position])


def _union(runs: Iterable[tuple[int, int]]) -> Runs:
    """Runs of all rows in any of the runs."""
    union: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(stop, union[-1][1]))
        else:
            union.append((start, stop))
    return tuple(union)


def _rows(runs: Runs) -> int:
    return sum(stop - start for start, stop in runs)


def _row_in_slice(row: int, runs: Runs) -> int:
    """Return where a row lies in a slice that holds these runs end to end."""
    before = 0
    for start, stop in runs:
        if start <= row < stop:
            return before + row - start
        before += stop - start
    raise AssertionError(f"row {row} is not in {runs}")


def _in_slice(block: Block, runs: Runs) -> Block:
    start = _row_in_slice(block.k_start, runs)
    return replace(block, k_start=start, k_stop=start + block.k_stop - block.k_start)


def _runs_in_slice(rows: Runs, runs: Runs) -> Runs:
    # By the last row: `stop` itself need not lie in the slice.
    return _union((_row_in_slice(start, runs), _row_in_slice(stop - 1, runs) + 1) for start, stop in rows)
