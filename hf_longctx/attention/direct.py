"""The direct exchange: attention of one rank's rows over keys and values of any rank, round by round.

Shapes: T tokens of this rank's shard, S tokens of a received slice, Hq query heads, Hkv key/value heads, D dimension of
query and key heads, Dv of value heads. Rows are in the order of the schedule. A slice is one flat tensor of S * Hkv * (D +
Dv) numbers: its keys [S, Hkv, D], then its values [S, Hkv, Dv]. It travels as one message, and so do its gradients; messages lie
in buffers that the exchange keeps (buffers.py), and what is the same in every layer is prepared once (prepared_rounds.py).

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from hf_longctx.attention.exchange import Exchange, Pending
from hf_longctx.attention.kernels import AttentionCall, Kernel
from hf_longctx.attention.kernels.accumulate import RowSum, accumulation_dtype, merge_
from hf_longctx.attention.prepared_rounds import (
    Fetch,
    Pair,
    Return,
    Rows,
    Sums,
    backward_rounds,
    forward_rounds,
    halves,
)
from hf_longctx.attention.sinks import add_sinks_
from hf_longctx.layouts.exchange_schedule import Runs, Schedule

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Call:
    """Arguments that stay the same from block to block."""

    kernel: Kernel
    scores: tuple[float, int | None, torch.Tensor | None, float | None]
    """Scale, window, slopes (of the heads computed here) and soft cap: the last fields of each `AttentionCall`."""
    exchange: Exchange | None
    keep_last_slice: bool = False


def _pass(function: Callable[..., Any]) -> Callable[..., Any]:
    """Run a pass over a layout. Dtypes are chosen here: a kernel's matrix products must not follow the caller's autocast. A pass
    that fails leaves messages under way, and their buffers are not used again."""

    @functools.wraps(function)
    def run(x: torch.Tensor, *args: Any) -> Any:
        try:
            with torch.autocast(x.device.type, enabled=False):
                return function(x, *args)
        except BaseException:
            for exchange in (argument.exchange for argument in args if isinstance(argument, Call)):
                if exchange is not None:
                    exchange.buffers.forget()
            raise

    return run


@_pass
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
    fetches = forward_rounds(schedule, call.exchange, k, v, call.keep_last_slice)
    travelling = _Travelling(fetches, call.exchange, k, v)
    out, lse = _local(q, k, v, schedule, call)
    if schedule.near:
        for partial in call.kernel.forward(AttentionCall(q, k, v, schedule.near, *call.scores)):
            merge_(out, lse, partial)
    parts: dict[Rows, Triple] = {(): (q, out, lse)}

    def cut(rows: Rows) -> Triple:
        """Cut queries out, and their results so far."""
        of_rows = slice(*rows)
        parts[rows] = (q[of_rows], out[of_rows], lse[:, of_rows])
        return parts[rows]

    for fetch in fetches:
        slices = travelling.arrived()
        for number, rows, blocks in fetch.computed:
            queries, out_part, lse_part = parts[rows] if rows in parts else cut(rows)
            keys, values = slices[number]
            for partial in call.kernel.forward(AttentionCall(queries, keys, values, blocks, *call.scores)):
                merge_(out_part, lse_part, partial)
    if sinks is not None:
        add_sinks_(out, lse, sinks)
    # A kernel's output lies in memory as q does, which a model may have head by head; the projection that comes next would copy
    # it then, and both would be kept until backward.
    out = out.to(q.dtype, memory_format=torch.contiguous_format).contiguous()
    return out, lse, travelling.kept


def _local(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, schedule: Schedule, call: Call
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, Hq, Dv] and lse [Hq, T] of the local causal blocks, in the accumulation dtype if more is to be merged."""
    accumulate = accumulation_dtype(q.dtype)
    dtype = accumulate if schedule.near or schedule.rounds else q.dtype
    partials = call.kernel.forward(AttentionCall(q, k, v, schedule.local, *call.scores))
    first = next(partials)
    if first.stop == len(q):
        return first.out.to(dtype), first.lse
    out = torch.empty((*q.shape[:2], v.shape[2]), dtype=dtype, device=q.device)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=accumulate, device=q.device)
    for partial in chain((first,), partials):
        out[partial.start : partial.stop] = partial.out
        lse[:, partial.start : partial.stop] = partial.lse
    return out, lse


@_pass
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
    backward, scores = call.kernel.backward, call.scores
    passed = backward_rounds(schedule, call.exchange, k, v, call.keep_last_slice)
    travelling = _Travelling(passed.fetches, call.exchange, k, v)
    for blocks in filter(None, (schedule.local, schedule.near)):
        backward(AttentionCall(q, k, v, blocks, *scores), grad_out, out, lse, (grad_q, *own))
    parts: dict[Rows, tuple[Any, ...]] = {(): (grad_out, q, out, lse, grad_q)}

    def cut(rows: Rows) -> tuple[Any, ...]:
        """Cut queries out, and what belongs to them; local blocks have reached all rows of their gradient."""
        of_rows = slice(*rows)
        cut_out = (grad_out[of_rows], q[of_rows], out[of_rows], lse[:, of_rows].contiguous())
        parts[rows] = (*cut_out, grad_q.part(*rows))
        return parts[rows]

    returning = _Returning(call.exchange, own)
    for position, computed in enumerate(passed.rounds):
        if call.keep_last_slice and position == 0:
            slices: Sequence[Pair] = [halves(flat, k.shape[1:], v.shape[1:]) for flat in kept]
        else:
            slices = travelling.arrived()
        for total in computed.begins:
            total.begin()
        for number, rows, blocks, sums in computed.receives:
            d_out, queries, o, row_lse, d_queries = parts[rows] if rows in parts else cut(rows)
            keys, values = slices[number]
            kernel_call = AttentionCall(queries, keys, values, blocks, *scores)
            backward(kernel_call, d_out, o, row_lse, (d_queries, *sums))
        returning.turn(computed.back)
    for back in (*passed.later, None):
        returning.turn(back)
    return [grad_q.total(), *(row_sum.total() for row_sum in own)]


class _Travelling:
    """Keys and values on their way, round by round, with the next round in flight. The first one starts at once, so that it
    travels while the local blocks are computed."""

    def __init__(self, fetches: Sequence[Fetch], exchange: Exchange | None, k: torch.Tensor, v: torch.Tensor) -> None:
        self._fetches, self._exchange, self._k, self._v = fetches, exchange, k, v
        self.kept: list[torch.Tensor] = []
        """slices of the last round, where they are kept until backward"""
        self._arrived = 0
        self._pending = self._start(fetches[0]) if fetches else None

    def arrived(self) -> Sequence[Pair]:
        """Wait for the round in flight, start the next one, and give the slices that came. They are gone when this is called
        again."""
        if self._pending is not None:
            self._pending.wait()
        fetch = self._fetches[self._arrived]
        self._arrived += 1
        if self._arrived < len(self._fetches):
            self._pending = self._start(self._fetches[self._arrived])
        if fetch.kept is not None:
            return [halves(flat, self._k.shape[1:], self._v.shape[1:]) for flat in self.kept]
        return fetch.slices

    def _start(self, fetch: Fetch) -> Pending | None:
        if fetch.kept is None and fetch.batch is None:
            return None
        assert self._exchange is not None
        for runs, (keys, values) in fetch.own:
            _gather(self._k, runs, keys)
            _gather(self._v, runs, values)
        for target, rows in fetch.passed_on:
            if len(rows) == 1:
                target.copy_(rows[0])
            else:
                torch.cat(rows, out=target)
        if fetch.kept is not None:
            self.kept = [self._k.new_empty(elements) for elements, _ in fetch.kept]
            receives = [(flat, rank) for flat, (_, rank) in zip(self.kept, fetch.kept)]
            return self._exchange.start(fetch.sends, receives)
        assert fetch.batch is not None
        return self._exchange.begin(fetch.batch)


def _gather(x: torch.Tensor, runs: Runs, target: torch.Tensor) -> None:
    """Copies rows of x, run after run."""
    if len(runs) == 1:
        start, stop = runs[0]
        target.copy_(x if (start, stop) == (0, x.shape[0]) else x[start:stop])
    else:
        torch.cat([x[start:stop] for start, stop in runs], out=target)


class _Returning:
    """Takes the gradients of received slices back, and adds up those that come back, one round late."""

    def __init__(self, exchange: Exchange | None, own: Sums) -> None:
        self._exchange, self._own = exchange, own
        self._in_flight: tuple[Return, Pending] | None = None

    def turn(self, back: Return | None) -> None:
        """Add what the round before brought back, and start this one."""
        if self._in_flight is not None:
            before, pending = self._in_flight
            pending.wait()
            for total in before.begins:
                total.begin()
            for which, start, stop, rows in before.own:
                self._own[which].add(start, stop, rows, lent=True)
            for total, start, stop, rows in before.passed_on:
                total.add(start, stop, rows, lent=True)
            self._in_flight = None
        if back is not None:
            assert self._exchange is not None
            for total in back.leaving:
                total.total()  # zero where nothing was added
            self._in_flight = back, self._exchange.begin(back.batch)
