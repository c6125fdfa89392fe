"""Attention of one rank's shard over whole documents, whatever ranks hold them.

Shapes: T tokens of this rank's shard, Hq query heads, Hkv key/value heads, D dimension of query and key heads, Dv of value
heads.

A layout of degree 1 is run by the direct exchange alone (direct.py). With Ulysses, an all-to-all gives each rank of an
inner group the group's tokens of split documents and its share of the heads (ulysses.py), the direct exchange runs
between the groups, and the output goes back; this rank's whole documents are computed while the first all-to-all
travels, and communicate nothing. "Ring" is degree 1, "Ulysses" a single group, "hybrid" anything between.

What is kept for backward is q, k, v, out and lse, of this rank's rows or of its share of the merged ones, and with
`keep_last_slice` the keys and values received last. Activation checkpointing drops all of it and recomputes the layer;
with `keep` it keeps what attention computed and received, and only projections are recomputed.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from hf_longctx.attention.chunked_attention import in_chunks, rows_in_chunks
from hf_longctx.attention.direct import Call, attend, gradients
from hf_longctx.attention.exchange import Exchange, own_rank
from hf_longctx.attention.kept import KeptAttention, Tensors
from hf_longctx.attention.kernels import AttentionCall, select_kernel
from hf_longctx.attention.kernels.accumulate import accumulation_dtype
from hf_longctx.attention.kernels.repeated_heads import RepeatedHeads
from hf_longctx.attention.on_device import on_device
from hf_longctx.attention.sinks import sink_gradient
from hf_longctx.attention.ulysses import (
    HeadSplit,
    InnerGroup,
    inner_group,
    split_heads,
    start_to_heads,
    start_to_sequence,
)
from hf_longctx.layouts.exchange_schedule import Schedule, schedule
from hf_longctx.layouts.layout import Layout, LayoutError

Rebuild = Callable[[], tuple[torch.Tensor, torch.Tensor]]
"""Returns keys [T + C, Hkv, D] and values [T + C, Hkv, Dv]."""


def layout_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    exchange: Exchange | None = None,
    *,
    scale: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    kernel: str = "auto",
    keep_last_slice: bool = False,
    keep: KeptAttention | None = None,
    again: Rebuild | None = None,
) -> torch.Tensor:
    """Causal attention within each document of a layout. Every rank of the layout calls this, in the same order of
    layouts.

    Args:
        q: [T, Hq, D], this rank's shard in memory order.
        k: [T + C, Hkv, D]: after the shard's, the C rows of this rank's context, by position; C is 0 but for a
            pipeline's chunk of a document.
        v: [T + C, Hkv, Dv]; Dv may differ from D (multi-head latent attention), and travels at its own width.
        layout: which rank holds which tokens.
        exchange: None where the layout lies on one rank.
        scale: of the scores; default D ** -0.5.
        window: a query at position i attends to keys at positions j with i - window < j <= i (transformers'
            sliding_window); default: to all before it.
        chunk: a query at position i attends to keys at positions j <= i with j // chunk == i // chunk (transformers'
            attention_chunk_size, Llama 4), and with a window to those of them inside it; default: to all before it.
        softcap: scores are softcap * tanh(scale * q . k / softcap) (Gemma 2); default: scale * q . k.
        sinks: [Hq]; the score of a key without a value that every query of a head also attends to (gpt-oss). Learned: on each
            rank they get the gradient that its rows and heads give, and the sum over ranks is the whole.
        alibi_slopes: [Hq]; slope * (i - j) is taken from each score (ALiBi).
        kernel: a name of `KERNELS`, or "auto" for the fastest that can run these tensors.
        keep_last_slice: also keep the slice of keys and values received last, which then does not travel again in
            backward: one exchange less, for up to as much memory as this rank's keys and values take.
        keep: where the first call puts its results, and the second (a recomputation with the same tensors) finds them.
        again: returns k and v once more, bit for bit. Backward then asks for them, and they are not kept until it does; with
            Ulysses, heads of them are.

    Returns:
        [T, Hq, Dv] in q's dtype: exactly (up to rounding) what one process computes over each whole document.

    Raises:
        LayoutError: this rank takes no part, q has another number of tokens than its shard, the layout spans several
            ranks and no exchange is given, or the window or the chunk is not positive.
        ValueError: Hq is no multiple of Hkv, shapes, dtypes or devices do not match (sinks and slopes are one number for each
            of Hq heads), the slopes require a gradient or come with a soft cap, the soft cap is not positive and finite, or the
            layout's degree of Ulysses does not divide Hq.
        KernelError: no kernel can run these tensors.
        RuntimeError: in backward, if second derivatives are asked for (create_graph=True).
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))  # kernels take it for granted
    rank = own_rank(layout, exchange)
    _check_shard(q, k, v, layout, exchange, rank)
    _check_scores(q, softcap, sinks, alibi_slopes)
    if chunk is not None:
        cut = functools.partial(rows_in_chunks, layout=layout, rank=rank, chunk=chunk)
        k, v, again = cut(k), cut(v), _rebuilt(again, cut)
        layout = in_chunks(layout, chunk)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    slopes = None if alibi_slopes is None else on_device(alibi_slopes.to(accumulation_dtype(q.dtype)), q.device)
    scores = (scale, window, slopes, softcap)
    chosen = select_kernel(AttentionCall(q, k, v, (), *scores), kernel)
    call = Call(chosen, scores, exchange, keep_last_slice)
    if sinks is not None:
        sinks = sinks.to(q.device, accumulation_dtype(q.dtype))
    tile = None if slopes is None else chosen.alibi_tile
    ranks_per_node = None if exchange is None else exchange.ranks_per_node

    def scheduled(part: Layout) -> Schedule:
        return schedule(part, rank, window=window, tile=tile, ranks_per_node=ranks_per_node)

    heads = split_heads(q.shape[1], k.shape[1], layout.ulysses)
    group = inner_group(layout, rank) if layout.ulysses > 1 else None
    if group is None or group.outer is None:  # no token of this group takes part in an all-to-all
        direct = scheduled(layout)
        return _in_order(
            layout,
            ("sorted", rank),
            direct.order,
            (q, k, v),
            lambda *qkv, again: _Direct.apply(*qkv, sinks, direct, call, keep, again),
            again,
        )
    outer = scheduled(group.outer)
    whole = scheduled(group.whole) if group.whole else None
    return _in_order(
        layout,
        ("split first", rank),
        group.order,
        (q, k, v),
        lambda *qkv, **_: _Ulysses.apply(*qkv, sinks, group, heads, outer, whole, call, keep),
    )


def _check_shard(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, exchange: Exchange | None, rank: int
) -> None:
    """Raises LayoutError or ValueError unless q, k and v are this rank's rows of the layout, and its other ranks are there."""
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
    key_rows = len(q) + layout.context_tokens(rank)
    if k.shape[:2] != v.shape[:2] or k.shape[0] != key_rows or k.shape[2] != q.shape[2]:
        raise ValueError(
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} must be [{len(q)}, Hq, D], [{key_rows}, Hkv, D], "
            f"[{key_rows}, Hkv, Dv]: {len(q)} tokens of the shard, then {key_rows - len(q)} of the context"
        )
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise ValueError(
            f"q is {q.dtype} on {q.device}, k {k.dtype} on {k.device}, v {v.dtype} on {v.device}: they must agree"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"{q.shape[1]} query heads are no multiple of {k.shape[1]} key/value heads "
            f"({q.shape[1]} = {q.shape[1] // k.shape[1]} * {k.shape[1]} + {q.shape[1] % k.shape[1]})"
        )


def _check_scores(
    q: torch.Tensor, softcap: float | None, sinks: torch.Tensor | None, alibi_slopes: torch.Tensor | None
) -> None:
    """Raises ValueError for options of the scores that mean nothing for q [T, Hq, D]."""
    for name, numbers in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if numbers is not None and numbers.shape != q.shape[1:2]:
            raise ValueError(
                f"{name} has shape {tuple(numbers.shape)}: one number for each of {q.shape[1]} query heads, ({q.shape[1]},)"
            )
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise ValueError("alibi_slopes require a gradient, which is not computed: pass alibi_slopes.detach()")
    if alibi_slopes is not None and softcap is not None:
        raise ValueError(
            "alibi_slopes came with a softcap: flash-attention 2 adds the bias after the cap, a bias folded into "
            "queries and keys would come before it, and no kernel here has both. Valid: one of them"
        )
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap={softcap}: a soft cap is positive and finite; for scores without one, pass None")


def _in_order(
    layout: Layout,
    key: tuple[str, int],
    order: np.ndarray | None,
    tensors: tuple[torch.Tensor, ...],
    attention: Callable[..., torch.Tensor],
    again: Rebuild | None = None,
) -> torch.Tensor:
    """Runs `attention` on rows in the given order (memory rows; None: as they are), and returns its rows to memory order.

    The order is brought to the device once for each layout; it is kept there by this name.
    """
    if order is None:
        return attention(*tensors, again=again)
    place = (*key, tensors[0].device)
    if place not in layout.derived:
        layout.derived[place] = tuple(on_device(rows, tensors[0].device) for rows in (order, np.argsort(order)))
    rows, back = layout.derived[place]
    ordered = (_Permuted.apply(x, rows, back) for x in tensors)
    return _Permuted.apply(attention(*ordered, again=_rebuilt(again, lambda x: x[rows])), back, rows)


def _rebuilt(again: Rebuild | None, change: Callable[[torch.Tensor], torch.Tensor]) -> Rebuild | None:
    """Return what rebuilds keys and values that were changed so; None where nothing does."""
    if again is None:
        return None
    unchanged = again

    def rebuild() -> tuple[torch.Tensor, torch.Tensor]:
        k, v = unchanged()
        return change(k), change(v)

    return rebuild


class _Permuted(torch.autograd.Function):
    """x [T, ...], a permutation of its rows, and the one that undoes it -> x[rows]. The gradient is gathered too: autograd's
    own adds up rows that may repeat, for which CUDA sorts them."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, rows: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.back = back
        return x[rows]

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        return gradient[ctx.back], None, None


class _Direct(torch.autograd.Function):
    """q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv] in the order of the schedule, sinks [Hq] or None -> out [T, Hq, Dv]."""

    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        sinks: torch.Tensor | None,
        schedule: Schedule,
        call: Call,
        keep: KeptAttention | None,
        again: Rebuild | None,
    ):
        def compute() -> Tensors:
            out, lse, kept = attend(q, k, v, schedule, call, sinks)
            return out, lse, *kept

        out, *saved = compute() if keep is None else keep.once(compute)
        ctx.save_for_backward(q, *((k, v) if again is None else (None, None)), sinks, out, *saved)
        ctx.run, ctx.again = (schedule, call), again
        return out

    @staticmethod
    def backward(ctx, grad_out):
        _refuse_second_derivatives()
        q, k, v, sinks, out, lse, *kept = ctx.saved_tensors
        if ctx.again is not None:
            k, v = ctx.again()
        grad_out = grad_out.contiguous()  # kernels read it once a block; a sum's gradient is one number, expanded
        grads = gradients(grad_out, q, k, v, out, lse, kept, *ctx.run)
        grad_sinks = sink_gradient(grad_out, out, lse, sinks) if ctx.needs_input_grad[3] else None
        return *(gradient.to(grad_out.dtype) for gradient in grads), grad_sinks, None, None, None, None


class _Ulysses(torch.autograd.Function):
    """`_Direct` over inner groups. Rows in the order of the group: first those of split documents, then of whole ones."""

    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        sinks: torch.Tensor | None,
        group: InnerGroup,
        heads: HeadSplit,
        outer: Schedule,
        whole: Schedule | None,
        call: Call,
        keep: KeptAttention | None,
    ):
        def compute() -> Tensors:
            return _over_inner_groups(q, k, v, sinks, group, heads, outer, whole, call)

        out, *saved = compute() if keep is None else keep.once(compute)
        ctx.save_for_backward(sinks, *saved)
        ctx.run = (group, heads, outer, whole, call)
        ctx.shapes = (q.shape, k.shape, v.shape)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        _refuse_second_derivatives()
        group, heads, outer, whole, call = ctx.run
        split, dtype, grad_out = group.split_tokens, grad_out.dtype, grad_out.contiguous()
        sinks, *saved = ctx.saved_tensors
        grad_sinks = torch.zeros_like(sinks) if ctx.needs_input_grad[3] else None
        grad_merged, pending = start_to_heads(grad_out[:split], heads.heads, group, call.exchange)
        grads = [grad_out.new_empty(shape) for shape in ctx.shapes]
        if whole is not None:
            q_whole, k_whole, v_whole, out_whole, lse_whole, *saved = saved
            whole_grads = gradients(grad_out[split:], q_whole, k_whole, v_whole, out_whole, lse_whole, [], whole, call)
            for target, gradient in zip(grads, whole_grads):
                target[split:] = gradient
            if grad_sinks is not None:
                grad_sinks += sink_gradient(grad_out[split:], out_whole, lse_whole, sinks)
        pending.wait()
        q_merged, k_merged, v_merged, out_merged, lse, *kept = saved
        grad_q, *grad_kv = gradients(
            grad_merged, q_merged, k_merged, v_merged, out_merged, lse, kept, outer, _of_heads(call, heads, group)
        )
        if grad_sinks is not None:
            own = slice(*heads.heads[group.position])
            grad_sinks[own] += sink_gradient(grad_merged, out_merged, lse, sinks[own])
        returning = [start_to_sequence(grad_q.to(dtype), heads.heads, group, call.exchange)]
        for gradient in grad_kv:
            if not heads.replicated:  # otherwise parts of one head's gradient are still to be summed
                gradient = gradient.to(dtype)
            returning.append(start_to_sequence(gradient, heads.kv_heads, group, call.exchange))
        for target, part in zip(grads, returning):
            part.wait(target[:split])
        return *grads, grad_sinks, None, None, None, None, None, None


def _over_inner_groups(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    group: InnerGroup,
    heads: HeadSplit,
    outer: Schedule,
    whole: Schedule | None,
    call: Call,
) -> Tensors:
    """out [T, Hq, Dv], and what backward needs: of whole documents, then of the merged shard."""
    assert call.exchange is not None
    split = group.split_tokens
    ranges = (heads.heads, heads.kv_heads, heads.kv_heads)
    merged = [start_to_heads(x[:split], r, group, call.exchange) for x, r in zip((q, k, v), ranges)]
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    saved: list[torch.Tensor] = []
    if whole is not None:
        # Views would keep all rows until backward.
        q_whole, k_whole, v_whole = (x[split:].clone() if split else x for x in (q, k, v))
        out_whole, lse_whole, _ = attend(q_whole, k_whole, v_whole, whole, call, sinks)
        out[split:] = out_whole
        saved += [q_whole, k_whole, v_whole, out_whole, lse_whole]
    for _, pending in merged:
        pending.wait()
    q_merged, k_merged, v_merged = (x for x, _ in merged)
    own_sinks = None if sinks is None else sinks[slice(*heads.heads[group.position])]
    out_merged, lse, kept = attend(q_merged, k_merged, v_merged, outer, _of_heads(call, heads, group), own_sinks)
    start_to_sequence(out_merged, heads.heads, group, call.exchange).wait(out[:split])
    return out, *saved, q_merged, k_merged, v_merged, out_merged, lse, *kept


def _refuse_second_derivatives() -> None:
    """Gradients are computed with gradients on only if they shall be differentiated again (create_graph=True)."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: second derivatives of attention over a layout are not computed, and would be silently wrong"
        )


def _of_heads(call: Call, heads: HeadSplit, group: InnerGroup) -> Call:
    """The call for this rank's share of the heads."""
    repeats = heads.repeats[group.position]
    kernel = call.kernel if repeats is None else RepeatedHeads(call.kernel, repeats)
    scale, window, slopes, softcap = call.scores
    slopes = None if slopes is None else slopes[slice(*heads.heads[group.position])]
    return replace(call, kernel=kernel, scores=(scale, window, slopes, softcap))
