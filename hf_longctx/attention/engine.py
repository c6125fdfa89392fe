"""Attention of one rank's shard over whole documents, whatever ranks hold them.

Shapes: T tokens of this rank's shard, S tokens of a received slice, Hq query heads, Hkv key/value heads, D head
    dimension.

Forward. For each exchange offset, send to one rank the keys and values that it needs, and receive from another those
that this rank needs. While one slice is computed, the next is in flight:

    start step 1 | local causal blocks | wait 1, start 2 | blocks of slice 1 | wait 2, start 3 | blocks of slice 2 | ...

Partial results are merged by log-sum-exp in float32. The local blocks come first and cover every row, so lse is
finite from then on.

Backward. Keys and values travel again in the same order; a flash backward with the *global* out and lse gives the
exact partial gradients of each block; gradients of received keys and values go straight back to their owner, in
float32, while the next slice is computed. What is kept between the two: local q, k, v, out, lse. Sent, forward: each
needed key and value row once to each rank that needs it; backward: the same again, and the float32 gradients of those
rows in return. A document on one rank sends nothing.
"""

from collections.abc import Iterator

import torch

from hf_longctx.attention.exchange import Exchange, Pending
from hf_longctx.attention.kernels import Kernel, select_kernel
from hf_longctx.attention.kernels.partial import accumulation_dtype, merge_
from hf_longctx.layout import Layout, LayoutError, Schedule, Step


def layout_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    exchange: Exchange | None = None,
    *,
    scale: float | None = None,
    kernel: str = "auto",
) -> torch.Tensor:
    """Causal attention within each document of a layout. Every rank of the layout calls this, in the same order of
    layouts.

    Args:
        q: [T, Hq, D], this rank's shard in memory order.
        k: [T, Hkv, D]
        v: [T, Hkv, D]
        layout: which rank holds which tokens.
        exchange: None where the layout lies on one rank.
        scale: of the scores; default D ** -0.5.
        kernel: a name of `KERNELS`, or "auto" for the fastest that can run these tensors.

    Returns:
        [T, Hq, D] in q's dtype: exactly (up to rounding) what one process computes over each whole document.

    Raises:
        LayoutError: this rank takes no part, q has another number of tokens than its shard, or the layout spans several
            ranks and no exchange is given.
        ValueError: Hq is no multiple of Hkv, or shapes of k and v do not match.
        KernelError: no kernel can run these tensors.
    """
    rank = exchange.rank if exchange is not None else layout.ranks[0]
    if exchange is None and len(layout.ranks) > 1:
        raise LayoutError(
            f"this layout spans ranks {list(layout.ranks)}: running it needs an Exchange, and none was given"
        )
    if exchange is not None and layout.ranks[-1] >= exchange.world_size:
        raise LayoutError(
            f"this layout was planned for rank {layout.ranks[-1]} too, but there are {exchange.world_size} ranks "
            f"(0 to {exchange.world_size - 1}): plan the step again for {exchange.world_size} ranks"
        )
    if q.shape[0] != layout.tokens(rank):
        raise LayoutError(
            f"rank {rank} holds {layout.tokens(rank)} tokens of this layout, but q has {q.shape[0]} (its shape is "
            f"{tuple(q.shape)}; the first dimension counts tokens)"
        )
    if k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} must be [T, Hq, D], [T, Hkv, D], [T, Hkv, D]"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{q.shape[1]} query heads are no multiple of {k.shape[1]} key/value heads "
            f"({q.shape[1]} = {q.shape[1] // k.shape[1]} * {k.shape[1]} + {q.shape[1] % k.shape[1]})"
        )
    schedule = layout.schedule(rank)
    chosen = select_kernel(q, k, kernel)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if schedule.order is None:
        return _LayoutAttention.apply(q, k, v, schedule, exchange, chosen, scale)
    order = torch.from_numpy(schedule.order).to(q.device)
    out = _LayoutAttention.apply(q[order], k[order], v[order], schedule, exchange, chosen, scale)
    return out[torch.argsort(order)]


class _LayoutAttention(torch.autograd.Function):
    """q [T, Hq, D], k and v [T, Hkv, D] in sorted rows -> out [T, Hq, D]."""

    @staticmethod
    def forward(ctx, q, k, v, schedule: Schedule, exchange: Exchange | None, kernel: Kernel, scale: float):
        out, lse = _forward(q, k, v, schedule, exchange, kernel, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.run = (schedule, exchange, kernel, scale)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        return *_backward(grad_out, *ctx.saved_tensors, *ctx.run), None, None, None, None


def _forward(
    q, k, v, schedule: Schedule, exchange: Exchange | None, kernel: Kernel, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """out [T, Hq, D] in q's dtype, lse [Hq, T] in the accumulation dtype."""
    slices = _Slices(schedule, exchange, k, v)
    accumulate = accumulation_dtype(q.dtype)
    out = torch.empty(q.shape, dtype=accumulate if schedule.steps else q.dtype, device=q.device)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=accumulate, device=q.device)
    for partial in kernel.forward(q, k, v, schedule.local, scale):
        out[partial.start : partial.stop] = partial.out
        lse[:, partial.start : partial.stop] = partial.lse
    for step, received in slices:
        if step.blocks:
            for partial in kernel.forward(q, received[0], received[1], step.blocks, scale):
                merge_(out, lse, partial)
    return out.to(q.dtype), lse


def _backward(grad_out, q, k, v, out, lse, schedule, exchange, kernel, scale):
    """Gradients of q [T, Hq, D], k and v [T, Hkv, D]."""
    slices = _Slices(schedule, exchange, k, v)
    dtype = accumulation_dtype(q.dtype) if schedule.steps else q.dtype
    grad_q = torch.zeros(q.shape, dtype=dtype, device=q.device)
    grad_kv = torch.zeros((2, *k.shape), dtype=dtype, device=q.device)
    kernel.backward(grad_out, q, k, v, out, lse, schedule.local, scale, grad_q, grad_kv[0], grad_kv[1])
    returning: tuple[Step, torch.Tensor, Pending] | None = None
    for step, received in slices:
        grad_slice = torch.zeros(received.shape, dtype=dtype, device=q.device)
        if step.blocks:
            kernel.backward(
                grad_out,
                q,
                received[0],
                received[1],
                out,
                lse,
                step.blocks,
                scale,
                grad_q,
                grad_slice[0],
                grad_slice[1],
            )
        returned = torch.empty((2, step.send_tokens, *k.shape[1:]), dtype=dtype, device=q.device)
        pending = exchange.start(
            [(grad_slice, step.receive_from)] if step.receive_tokens else [],
            [(returned, step.send_to)] if step.send_tokens else [],
        )
        if (
            returning is not None
        ):  # one step late: gradients travel while the next slice is computed, and two at most are held
            _add_returned(grad_kv, *returning)
        returning = (step, returned, pending)
    if returning is not None:
        _add_returned(grad_kv, *returning)
    return grad_q.to(q.dtype), grad_kv[0].to(k.dtype), grad_kv[1].to(v.dtype)


def _add_returned(grad_kv: torch.Tensor, step: Step, returned: torch.Tensor, pending: Pending) -> None:
    """Adds the gradients that came back for the rows sent in a step, [2, rows sent, Hkv, D], to grad_kv [2, T, Hkv, D]."""
    pending.wait()
    row = 0
    for start, stop in step.send_runs:
        grad_kv[:, start:stop] += returned[:, row : row + stop - start]
        row += stop - start


class _Slices:
    """Iterates over (step, keys and values received [2, S, Hkv, D]), with the next step's slice in flight.

    The first step is started at once, so that it travels while the local blocks are computed.
    """

    def __init__(self, schedule: Schedule, exchange: Exchange | None, k: torch.Tensor, v: torch.Tensor) -> None:
        self._steps, self._exchange, self._k, self._v = schedule.steps, exchange, k, v
        self._in_flight = self._start(0) if self._steps else None

    def __iter__(self) -> Iterator[tuple[Step, torch.Tensor]]:
        for index, step in enumerate(self._steps):
            assert self._in_flight is not None
            received, pending = self._in_flight
            pending.wait()
            self._in_flight = self._start(index + 1) if index + 1 < len(self._steps) else None
            yield step, received

    def _start(self, index: int) -> tuple[torch.Tensor, Pending]:
        assert self._exchange is not None
        step, k, v = self._steps[index], self._k, self._v
        received = torch.empty((2, step.receive_tokens, *k.shape[1:]), dtype=k.dtype, device=k.device)
        sends = []
        if step.send_runs:
            pieces = [torch.stack((k[start:stop], v[start:stop])) for start, stop in step.send_runs]
            sends.append((pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1), step.send_to))
        receives = [(received, step.receive_from)] if step.receive_tokens else []
        return received, self._exchange.start(sends, receives)
