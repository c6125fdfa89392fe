"""Memory work of a schedule's rounds, laid out once and run in every layer: which piece of the exchange's buffers
each message lies in, views of it, what is copied where, and the operations that send it.

Shapes and rows as in direct.py. A slice is one flat tensor of S * Hkv * (D + Dv) numbers: its keys [S, Hkv, D], then its values
[S, Hkv, Dv]; so are its gradients.

A pass takes pieces in the order in which it comes to them, and gives each back where its last use has been issued. Nothing of
that depends on values, so it is played here, and what remains of a round is its copies and the start of its batch:

    forward   start 0 | local blocks | wait 0, start 1 | blocks of slice 0 | wait 1, start 2 | blocks of slice 1 | ...
    pieces    0 arrives              | 1 arrives       |                   | 0 again         |

Gradients. A round's go back one round late, while the next slice is computed. Held are those of two rounds; of a slice that was
passed on, until the others' gradients have come back. With `keep_last_slice` the last round is computed first and every other one
a round later, and so are their gradients.

What is prepared refers to pieces, groups and blocks, and to no tensor of a layer. Nothing is sent here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

import torch

from hf_longctx.attention.exchange import Batch, Exchange, Messages
from hf_longctx.attention.kernels.accumulate import RowSum, accumulation_dtype
from hf_longctx.layouts.blocks import Blocks
from hf_longctx.layouts.exchange_schedule import Runs, Schedule

Pair = tuple[torch.Tensor, torch.Tensor]
"""Keys [S, Hkv, D] and values [S, Hkv, Dv]."""
Sums = tuple[RowSum, RowSum]
"""Sums of the gradients of keys and values."""
Rows = tuple[int, ...]
"""First query row and the one behind the last, of those that blocks count theirs among; empty: all."""
Rounds = TypeVar("Rounds")


@dataclass(eq=False, slots=True)
class Fetch:
    """One round of keys and values."""

    own: list[tuple[Runs, Pair]] = field(default_factory=list)
    """rows of this rank's keys and values, and where they are gathered"""
    passed_on: list[tuple[torch.Tensor, list[torch.Tensor]]] = field(default_factory=list)
    """where rows of a slice of the round before are gathered, and the rows"""
    sends: Messages = field(default_factory=list)
    batch: Batch | None = None
    """None where nothing travels, and where what arrives is kept"""
    slices: Sequence[Pair] = ()
    """what arrives, by number of the receive"""
    computed: Sequence[tuple[int, Rows, Blocks]] = ()
    """number of the receive, and what is computed with it"""
    kept: list[tuple[int, int]] | None = None
    """(elements, rank) of what arrives, where that is kept until backward: in new tensors each time"""


@dataclass(eq=False, slots=True)
class Return:
    """One round of gradients."""

    batch: Batch
    leaving: list[RowSum]
    """go back, and are complete then"""
    begins: list[RowSum] = field(default_factory=list)
    """begin anew when it has come"""
    own: list[tuple[int, int, int, torch.Tensor]] = field(default_factory=list)
    """0 for keys and 1 for values, first and last row of this rank's, and the gradients that come for them"""
    passed_on: list[tuple[RowSum, int, int, torch.Tensor]] = field(default_factory=list)
    """and for slices that this rank has passed on"""


@dataclass(eq=False, slots=True)
class Computed:
    """One round of backward."""

    begins: list[RowSum]
    """sums that begin anew"""
    receives: list[tuple[int, Rows, Blocks, Sums]]
    """number of the receive, what is computed with it, and its gradients"""
    back: Return | None
    """starts when it has been computed"""


@dataclass(eq=False, slots=True)
class Backward:
    """Rounds of backward, in order."""

    fetches: list[Fetch]
    rounds: list[Computed]
    later: list[Return | None]
    """rounds that only bring gradients back"""


@dataclass(eq=False, slots=True)
class _Slice:
    """A message in a piece."""

    flat: torch.Tensor
    pair: Pair
    number: int


class _Room:
    """Pieces that one pass has taken and given back so far."""

    def __init__(self, schedule: Schedule, exchange: Exchange, k: torch.Tensor, v: torch.Tensor) -> None:
        self._buffers, self._heads, self._device = exchange.buffers, (k.shape[1:], v.shape[1:]), k.device
        self.of_token = k.shape[1] * (k.shape[2] + v.shape[2])
        self._elements = schedule.largest_message * self.of_token
        self._free: dict[torch.dtype, list[int]] = {}
        self._taken: dict[torch.dtype, int] = {}

    def take(self, tokens: int, dtype: torch.dtype) -> _Slice:
        free, taken = self._free.setdefault(dtype, []), self._taken.get(dtype, 0)
        number = free.pop() if free else taken
        self._taken[dtype] = max(taken, number + 1)
        flat = self._buffers.piece(number, self._elements, dtype, self._device)[: tokens * self.of_token]
        return _Slice(flat, halves(flat, *self._heads), number)

    def give_back(self, slices: list[_Slice]) -> None:
        for one in slices:
            self._free[one.flat.dtype].append(one.number)


def halves(flat: torch.Tensor, key_heads: Sequence[int], value_heads: Sequence[int]) -> Pair:
    """Views of a slice: its keys [S, Hkv, D] and its values [S, Hkv, Dv]; given Hkv, D and Hkv, Dv."""
    keys = flat.numel() // (key_heads[1] + value_heads[1]) * key_heads[1]
    return flat[:keys].view(-1, *key_heads), flat[keys:].view(-1, *value_heads)


def _within(blocks: Blocks) -> tuple[Rows, Blocks]:
    """Give the one run of query rows that blocks lie in end to end, and the blocks with rows counted from its first: what lies
    there is cut out once for all rounds. Blocks that are no one run stay as they are."""
    if "within" not in blocks.derived:
        rows: Rows = (blocks[0].q_start, blocks[-1].q_stop)
        if any(one.q_stop != following.q_start for one, following in pairwise(blocks)):
            rows, counted = (), blocks
        else:
            first = blocks[0].q_start
            counted = Blocks(replace(b, q_start=b.q_start - first, q_stop=b.q_stop - first) for b in blocks)
            counted.in_flight = blocks.in_flight
        blocks.derived["within"] = rows, counted
    return blocks.derived["within"]


def forward_rounds(
    schedule: Schedule, exchange: Exchange | None, k: torch.Tensor, v: torch.Tensor, keep_last: bool
) -> list[Fetch]:
    """Give the rounds of a forward pass over keys and values like k [T, Hkv, D] and v [T, Hkv, Dv]. `keep_last`: what the last
    one brings is kept."""

    def make(exchange: Exchange) -> list[Fetch]:
        order = range(len(schedule.rounds))
        rounds = _Fetching(schedule, exchange, _Room(schedule, exchange, k, v), k.dtype, order, keep_last)
        for _ in order:
            rounds.pass_one()
        return rounds.fetches

    return _prepared("forward", make, [], schedule, exchange, k, v, keep_last)


def backward_rounds(
    schedule: Schedule, exchange: Exchange | None, k: torch.Tensor, v: torch.Tensor, keep_last: bool
) -> Backward:
    """Give the rounds of a backward pass. `keep_last`: the last one is computed first, with what was kept."""

    def make(exchange: Exchange) -> Backward:
        room = _Room(schedule, exchange, k, v)
        last = len(schedule.rounds) - 1
        order = [last, *range(last)] if keep_last else [*range(last + 1)]
        fetching = _Fetching(schedule, exchange, room, k.dtype, order[int(keep_last) :])
        returning = _Returning(schedule, exchange, room, k, v, keep_last)
        rounds = []
        for position, index in enumerate(order):
            if not (keep_last and position == 0):
                fetching.pass_one()
            rounds.append(returning.computed(position, index))
        fetching.end()
        later = [returning.start(position) for position in range(len(order), returning.count)]
        returning.settle()
        return Backward(fetching.fetches, rounds, later)

    return _prepared("backward", make, Backward([], [], []), schedule, exchange, k, v, keep_last)


def _prepared(
    name: str,
    make: Callable[[Exchange], Rounds],
    none: Rounds,
    schedule: Schedule,
    exchange: Exchange | None,
    k: torch.Tensor,
    v: torch.Tensor,
    keep_last: bool,
) -> Rounds:
    if not schedule.rounds:
        return none
    assert exchange is not None, "a schedule with rounds was run without an exchange"

    def made() -> Rounds:
        with torch.inference_mode(False):
            return make(exchange)

    key = (name, keep_last, k.shape[1:], v.shape[1:], k.dtype, k.device)
    return exchange.buffers.prepared(schedule, key, made)


class _Fetching:
    """Plays how keys and values travel, with the next round in flight while one is computed."""

    def __init__(
        self,
        schedule: Schedule,
        exchange: Exchange,
        room: _Room,
        dtype: torch.dtype,
        order: Sequence[int],
        keep_last: bool = False,
    ) -> None:
        self._rounds, self._exchange, self._room, self._dtype = schedule.rounds, exchange, room, dtype
        self._kept = len(self._rounds) - 1 if keep_last else None
        self._left = list(order)
        self.fetches: list[Fetch] = []
        self._computed: list[_Slice] = []
        """received, and computed with last"""
        self._arriving: list[_Slice] = []
        self._leaving: list[_Slice] = []
        """what this rank's rows were gathered in"""
        if self._left:
            self._start([])

    def pass_one(self) -> None:
        """Start the next round after one has arrived, and hand out the slices that arrived."""
        # Slices of the round before have been computed with, and what this one passed on of them has left.
        self._room.give_back(self._leaving + self._computed)
        self._computed, self._arriving, self._leaving = self._arriving, [], []
        if self._left:
            self._start(self._computed)

    def end(self) -> None:
        """Give back the slices of the last round, after they have been computed with."""
        self._room.give_back(self._computed)
        self._computed = []

    def _start(self, before: list[_Slice]) -> None:
        """Prepare the next round; it passes on slices that arrived in the round `before`."""
        index = self._left.pop(0)
        round, fetch = self._rounds[index], Fetch()
        receives = enumerate(round.receives)
        fetch.computed = [(number, *_within(receive.blocks)) for number, receive in receives if receive.blocks]
        if index == self._kept:
            fetch.kept = [(receive.tokens * self._room.of_token, receive.rank) for receive in round.receives]
        else:
            self._arriving = [self._room.take(receive.tokens, self._dtype) for receive in round.receives]
            fetch.slices = [one.pair for one in self._arriving]
        for send in round.sends:
            if send.source is not None and send.runs == ((0, self._rounds[index - 1].receives[send.source].tokens),):
                fetch.sends.append((before[send.source].flat, send.rank))
                continue
            leaving = self._room.take(send.tokens, self._dtype)
            self._leaving.append(leaving)
            if send.source is None:
                fetch.own.append((send.runs, leaving.pair))
            else:
                for source, target in zip(before[send.source].pair, leaving.pair):
                    fetch.passed_on.append((target, [source[start:stop] for start, stop in send.runs]))
            fetch.sends.append((leaving.flat, send.rank))
        if fetch.kept is None and (round.sends or round.receives):
            arriving = [(one.flat, receive.rank) for one, receive in zip(self._arriving, round.receives)]
            fetch.batch = self._exchange.prepare(fetch.sends, arriving)
        self.fetches.append(fetch)


class _Returning:
    """Plays how the gradients of slices are summed and go back."""

    def __init__(
        self, schedule: Schedule, exchange: Exchange, room: _Room, k: torch.Tensor, v: torch.Tensor, keep_last: bool
    ) -> None:
        self._schedule, self._exchange, self._room, self._like = schedule, exchange, room, (k, v)
        self._dtype = accumulation_dtype(k.dtype)
        self._returns = schedule.returns[keep_last]
        self.count = len(self._returns)
        """rounds in which gradients go back"""
        self._slices: dict[tuple[int, int], tuple[_Slice, Sums]] = {}
        """by round and number of the receive"""
        self._in_flight: tuple[int, Return, list[_Slice], list[_Slice]] | None = None
        """the position, and what arrives and leaves"""

    def computed(self, position: int, index: int) -> Computed:
        """Return the sums that a round of slices is computed into, and start to return the gradients that are complete then."""
        begins: list[RowSum] = []
        receives = []
        for number, receive in enumerate(self._schedule.rounds[index].receives):
            sums = self._of_slice(index, number, begins)
            if receive.blocks:
                receives.append((number, *_within(receive.blocks), sums))
        return Computed(begins, receives, self.start(position))

    def _of_slice(self, index: int, number: int, begins: list[RowSum]) -> Sums:
        if (index, number) not in self._slices:
            tokens = self._schedule.rounds[index].receives[number].tokens
            taken = self._room.take(tokens, self._dtype)
            keys, values = (RowSum(like, tokens, into) for like, into in zip(self._like, taken.pair))
            self._slices[index, number] = taken, (keys, values)
            begins += [keys, values]
        return self._slices[index, number][1]

    def start(self, position: int) -> Return | None:
        """Start a round of gradients, after the one before it has arrived."""
        self.settle()
        sends, receives = self._returns[position] if position < self.count else ([], [])
        if not sends and not receives:
            return None
        arriving = [self._room.take(send.tokens, self._dtype) for _, send in sends]
        finished = [self._slices.pop((index, number)) for index, number, _ in receives]
        batch = self._exchange.prepare(
            [(taken.flat, receive.rank) for (taken, _), (_, _, receive) in zip(finished, receives)],
            [(one.flat, send.rank) for one, (_, send) in zip(arriving, sends)],
            gradients=True,
        )
        back = Return(batch, [total for _, sums in finished for total in sums])
        self._in_flight = position, back, arriving, [taken for taken, _ in finished]
        return back

    def settle(self) -> None:
        """Add up what is in flight: it has come."""
        if self._in_flight is None:
            return
        position, back, arriving, leaving = self._in_flight
        for (index, send), arrived in zip(self._returns[position][0], arriving):
            sums = None if send.source is None else self._of_slice(index - 1, send.source, back.begins)
            for which, gradient in enumerate(arrived.pair):
                row = 0
                for start, stop in send.runs:
                    rows = gradient if len(send.runs) == 1 else gradient[row : row + stop - start]
                    if sums is None:
                        back.own.append((which, start, stop, rows))
                    else:
                        back.passed_on.append((sums[which], start, stop, rows))
                    row += stop - start
        self._room.give_back(arriving + leaving)
        self._in_flight = None
