"""The direct exchange: attention of one rank's rows over keys and values of any rank, round by round.

Shapes: T tokens of this rank's shard, S tokens of a received slice, Hq query heads, Hkv key/value heads, D dimension of
query and key heads, Dv of value heads. Rows are in the order of the schedule. A slice is one flat tensor of S * Hkv * (D +
Dv) numbers: its keys [S, Hkv, D], then its values [S, Hkv, Dv]. It travels as one message, and so do its gradients; messages lie
in buffers that the exchange keeps (buffers.py).

Forward. While one slice is computed, the next is in flight:

    start round 0 | local blocks | wait 0, start 1 | blocks of slice 0 | wait 1, start 2 | blocks of slice 1 | ...

Partial results are merged by log-sum-exp in float32. The local causal blocks come first and cover every row, so lse is
finite from then on. Sinks come last, once all keys have been seen (sinks.py).

Backward. Keys and values travel again in the same order; a flash backward with the *global* out and lse gives the
exact partial gradients of each block; gradients of received keys and values go back the way the slice came, in
float32, while the next slice is computed. What is kept between the two: q, k, v, out, lse. With `keep_last_slice` also
the slices of the last round: backward begins with them, and that round's keys and values do not travel again.

Sent, forward: each needed row of keys and values once to each rank (across nodes: once to each node) that needs it;
backward: the same again, and the float32 gradients of those rows in return. A document on one rank sends nothing.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from hf_longctx.attention.buffers import Buffer
from hf_longctx.attention.exchange import Exchange, Pending
from hf_longctx.attention.kernels import Kernel
from hf_longctx.attention.kernels.accumulate import Partial, RowSum, accumulation_dtype, merge_
from hf_longctx.attention.sinks import add_sinks_
from hf_longctx.layouts.blocks import Block
from hf_longctx.layouts.exchange_schedule import Runs, Schedule, Send


@dataclass(frozen=True)
class Call:
    """What stays the same from block to block."""

    kernel: Kernel
    scale: float
    slopes: torch.Tensor | None
    """[Hq] in the accumulation dtype: ALiBi's, of the heads computed here."""
    exchange: Exchange | None
    softcap: float | None = None
    keep_last_slice: bool = False

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Sequence[Block]) -> Iterable[Partial]:
        """The kernel's partial results."""
        return self.kernel.forward(q, k, v, blocks, self.scale, self.slopes, self.softcap)


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Dtypes are chosen here: a kernel's matrix products must not follow the caller's autocast."""

    @functools.wraps(function)
    def run(x: torch.Tensor, *args: Any) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            return function(x, *args)

    return run


@_without_autocast
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    schedule: Schedule,
    call: Call,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], sinks [Hq] -> out [T, Hq, Dv] in q's dtype, lse [Hq, T] in the
    accumulation dtype, and the slices kept for backward."""
    slices = _Slices(schedule, call.exchange, k, v, keep_last=call.keep_last_slice)
    out, lse = _local(q, k, v, schedule, call)
    if schedule.near:
        for partial in call.forward(q, k, v, schedule.near):
            merge_(out, lse, partial)
    received: list[Slice] = []
    for index, received in slices.walk(range(len(schedule.rounds))):
        for receive, slice in zip(schedule.rounds[index].receives, received):
            if receive.blocks:
                keys, values = _halves(slice, k, v)
                for partial in call.forward(q, keys, values, receive.blocks):
                    merge_(out, lse, partial)
    if sinks is not None:
        add_sinks_(out, lse, sinks)
    kept = [slice for slice in received if isinstance(slice, torch.Tensor)] if call.keep_last_slice else []
    # A kernel's output lies in memory as q does, which a model may have head by head; the projection that comes next would copy
    # it then, and both would be kept until backward.
    out = out.to(q.dtype, memory_format=torch.contiguous_format).contiguous()
    return out, lse, kept


def _local(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, schedule: Schedule, call: Call
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, Hq, Dv] and lse [Hq, T] of the local causal blocks, in the accumulation dtype if more is to be merged."""
    accumulate = accumulation_dtype(q.dtype)
    dtype = accumulate if schedule.near or schedule.rounds else q.dtype
    partials = iter(call.forward(q, k, v, schedule.local))
    first = next(partials)
    if first.stop == len(q):
        return first.out.to(dtype), first.lse
    out = torch.empty((*q.shape[:2], v.shape[2]), dtype=dtype, device=q.device)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=accumulate, device=q.device)
    for partial in chain((first,), partials):
        out[partial.start : partial.stop] = partial.out
        lse[:, partial.start : partial.stop] = partial.lse
    return out, lse


@_without_autocast
def gradients(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    kept: list[torch.Tensor],
    schedule: Schedule,
    call: Call,
) -> list[torch.Tensor]:
    """Gradients of q [T, Hq, D], k [T, Hkv, D] and v [T, Hkv, Dv], in the accumulation dtype."""
    grad_q = RowSum(q)
    own = RowSum(k), RowSum(v)
    returns = _Returns(schedule, call, own, k, v)

    def add(k: torch.Tensor, v: torch.Tensor, blocks: tuple[Block, ...], sums: tuple[RowSum, RowSum]) -> None:
        if blocks:
            rows = (grad_out, q, k, v, out, lse)
            call.kernel.backward(*rows, blocks, call.scale, grad_q, *sums, call.slopes, call.softcap)

    last = len(schedule.rounds) - 1
    order = [*range(last + 1)] if not call.keep_last_slice else [last, *range(last)][: last + 1]
    slices = _Slices(schedule, call.exchange, k, v)
    travels = slices.walk(order[1:] if call.keep_last_slice else order)
    add(k, v, schedule.local, own)
    add(k, v, schedule.near, own)
    for position, index in enumerate(order):
        received: Sequence[Slice] = kept if call.keep_last_slice and position == 0 else next(travels)[1]
        for number, (receive, slice) in enumerate(zip(schedule.rounds[index].receives, received)):
            add(*_halves(slice, k, v), receive.blocks, returns.of_slice(index, number))
        returns.exchange_round(position)
    next(travels, None)  # which has no more, and gives its buffers back
    returns.finish(len(order))
    return [grad_q.total(), *(row_sum.total() for row_sum in own)]


Slice = torch.Tensor | Buffer
"""Keys and values of some tokens, flat; those that are kept until backward are tensors of their own."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A round of keys and values under way."""

    received: list[Slice]
    """a slice for each receive of the round"""
    arriving: list[Buffer]
    """what they arrive in, but for those that are kept until backward"""
    leaving: list[Buffer]
    """what this rank's rows were gathered in"""
    pending: Pending


class _Slices:
    """Fetches keys and values round by round, with the next round in flight. `keep_last`: the slices of the last round are
    kept beyond it."""

    def __init__(
        self,
        schedule: Schedule,
        exchange: Exchange | None,
        k: torch.Tensor,
        v: torch.Tensor,
        keep_last: bool = False,
    ) -> None:
        self._rounds, self._exchange, self._k, self._v = schedule.rounds, exchange, k, v
        self._kept = len(self._rounds) - 1 if keep_last else None
        self._of_token = _slice_elements(1, k, v)
        self._room = schedule.largest_message * self._of_token

    def walk(self, order: Sequence[int]) -> Iterator[tuple[int, list[Slice]]]:
        """(round, slices received in it). The first round is started at once, so that it travels while the
        local blocks are computed. What a round received is gone when the next one is asked for."""
        return self._walk(order, self._start(order[0], []) if order else None)

    def _walk(self, order: Sequence[int], in_flight: _InFlight | None) -> Iterator[tuple[int, list[Slice]]]:
        computed: list[Buffer] = []
        for position, index in enumerate(order):
            assert in_flight is not None
            assert self._exchange is not None
            arrived = in_flight
            arrived.pending.wait()
            # Slices of the round before have been computed with, and what this one passed on of them has left.
            self._exchange.buffers.give_back(arrived.leaving + computed)
            computed = arrived.arriving
            if position + 1 < len(order):
                in_flight = self._start(order[position + 1], arrived.received)
            yield index, arrived.received
        if self._exchange is not None:
            self._exchange.buffers.give_back(computed)

    def _start(self, index: int, before: list[Slice]) -> _InFlight:
        """Starts a round; `before`: the slices of the round before it, from which it passes on."""
        assert self._exchange is not None, "a schedule with rounds was run without an exchange"
        k, v, round = self._k, self._v, self._rounds[index]
        arriving: list[Buffer] = []
        received: list[Slice] = []
        if index == self._kept:
            received += [k.new_empty(receive.tokens * self._of_token) for receive in round.receives]
        else:
            arriving = [self._take(receive.tokens) for receive in round.receives]
            received += arriving
        leaving: list[Buffer] = []
        sends = []
        for send in round.sends:
            if send.source is None:
                rows = (k, v)
            elif send.runs == ((0, self._rounds[index - 1].receives[send.source].tokens),):
                sends.append((_flat(before[send.source]), send.rank))
                continue
            else:
                rows = _halves(before[send.source], k, v)
            leaving.append(self._take(send.tokens))
            for source, half in zip(rows, _halves(leaving[-1], k, v)):
                _gather(source, send.runs, half)
            sends.append((leaving[-1].flat, send.rank))
        receives = [(_flat(slice), receive.rank) for slice, receive in zip(received, round.receives)]
        return _InFlight(received, arriving, leaving, self._exchange.start(sends, receives))

    def _take(self, tokens: int) -> Buffer:
        assert self._exchange is not None
        return self._exchange.buffers.take(tokens * self._of_token, self._k.dtype, self._k.device, self._room)


def _slice_elements(tokens: int, k: torch.Tensor, v: torch.Tensor) -> int:
    """Count the elements of keys and values of so many tokens, with the heads of k [*, Hkv, D] and v [*, Hkv, Dv]."""
    return tokens * k.shape[1] * (k.shape[2] + v.shape[2])


def _flat(slice: Slice) -> torch.Tensor:
    return slice.flat if isinstance(slice, Buffer) else slice


def _halves(slice: Slice, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a slice: its keys [S, Hkv, D] and its values [S, Hkv, Dv], with the heads of k and v. A buffer keeps them."""
    if not isinstance(slice, Buffer):
        keys = slice.numel() // (k.shape[2] + v.shape[2]) * k.shape[2]
        return slice[:keys].view(-1, *k.shape[1:]), slice[keys:].view(-1, *v.shape[1:])
    heads = (k.shape[1], k.shape[2], v.shape[2])
    if heads not in slice.derived:
        with torch.inference_mode(False):
            slice.derived[heads] = _halves(slice.flat, k, v)
    return slice.derived[heads]


def _gather(x: torch.Tensor, runs: Runs, target: torch.Tensor) -> None:
    """Copies rows of x, run after run."""
    if len(runs) == 1:
        start, stop = runs[0]
        target.copy_(x if (start, stop) == (0, x.shape[0]) else x[start:stop])
    else:
        torch.cat([x[start:stop] for start, stop in runs], out=target)


@dataclass(frozen=True)
class _SliceGradients:
    """Gradients of a slice so far."""

    buffer: Buffer
    sums: tuple[RowSum, RowSum]
    """of its keys [S, Hkv, D] and its values [S, Hkv, Dv], in the buffer"""

    def message(self) -> torch.Tensor:
        """The gradients as they travel, zero where nothing was added."""
        for total in self.sums:
            total.total()
        return self.buffer.flat


class _Returns:
    """Takes the gradients of received slices back, and adds up those that come back, one round late: they travel while
    the next slice is computed. Held are those of two rounds; of a slice that was passed on, until the others' gradients
    have come back.

    With `keep_last_slice` the last round is computed first and every other one a round later, and so are their
    gradients.
    """

    def __init__(
        self, schedule: Schedule, call: Call, own: tuple[RowSum, RowSum], k: torch.Tensor, v: torch.Tensor
    ) -> None:
        self._schedule, self._exchange, self._own, self._k, self._v = schedule, call.exchange, own, k, v
        self._of_token, self._dtype = _slice_elements(1, k, v), accumulation_dtype(k.dtype)
        self._room = schedule.largest_message * self._of_token
        self._slices: dict[tuple[int, int], _SliceGradients] = {}
        """Gradients of slices, by round and index of the receive."""
        self._returns = schedule.returns[call.keep_last_slice]
        self._in_flight: tuple[Sequence[tuple[int, Send]], list[Buffer], list[Buffer], Pending] | None = None

    def of_slice(self, index: int, number: int) -> tuple[RowSum, RowSum]:
        """The gradients of the keys [S, Hkv, D] and values [S, Hkv, Dv] of a slice."""
        if (index, number) not in self._slices:
            tokens = self._schedule.rounds[index].receives[number].tokens
            buffer = self._take(tokens)
            keys, values = _halves(buffer, self._k, self._v)
            sums = RowSum(self._k, tokens, keys), RowSum(self._v, tokens, values)
            self._slices[index, number] = _SliceGradients(buffer, sums)
        return self._slices[index, number].sums

    def exchange_round(self, position: int) -> None:
        """Adds what the round before brought back, and starts this one."""
        self._settle()
        assert self._exchange is not None
        if position >= len(self._returns):
            return
        sends, receives = self._returns[position]
        if not sends and not receives:
            return
        back = [self._take(send.tokens) for _, send in sends]
        arriving = [(buffer.flat, send.rank) for buffer, (_, send) in zip(back, sends)]
        finished = [(self._slices.pop((index, number)), receive.rank) for index, number, receive in receives]
        leaving = [(gradients.message(), rank) for gradients, rank in finished]
        pending = self._exchange.start(leaving, arriving, gradients=True)
        self._in_flight = (sends, back, [gradients.buffer for gradients, _ in finished], pending)

    def finish(self, position: int) -> None:
        """The rounds that only bring gradients back."""
        for later in range(position, len(self._returns)):
            self.exchange_round(later)
        self._settle()

    def _take(self, tokens: int) -> Buffer:
        assert self._exchange is not None
        return self._exchange.buffers.take(tokens * self._of_token, self._dtype, self._k.device, self._room)

    def _settle(self) -> None:
        if self._in_flight is None:
            return
        assert self._exchange is not None
        sends, back, left, pending = self._in_flight
        pending.wait()
        for (index, send), buffer in zip(sends, back):
            sums = self._own if send.source is None else self.of_slice(index - 1, send.source)
            for total, gradient in zip(sums, _halves(buffer, self._k, self._v)):
                if len(send.runs) == 1:
                    total.add(*send.runs[0], gradient, lent=True)
                    continue
                row = 0
                for start, stop in send.runs:
                    total.add(start, stop, gradient[row : row + stop - start], lent=True)
                    row += stop - start
        self._exchange.buffers.give_back(back + left)
        self._in_flight = None
