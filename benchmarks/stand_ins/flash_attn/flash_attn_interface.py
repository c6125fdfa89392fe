"""The low-level functions of flash-attn 2.8 that ring-flash-attn and yunchang call, on torch's CPU flash attention.

Shapes: B rows of a batch, T tokens, H heads, D head dimension. Fixed-length functions take [B, T, H, D] and an lse of
    [B, H, T]; varlen ones take [T, H, D], boundaries cu_seqlens [documents + 1], and an lse of [H, T].

torch's causal mask is aligned to the top left, flash-attn's to the bottom right. With more keys than queries, a call
is therefore split: the surplus of keys comes first and is a full block, the rest is a square causal block.

    4 keys, 2 queries:   q0  x x x .        full: keys 0-1    causal: keys 2-3
                         q1  x x x x

Only what the peers use is here: no dropout, window, soft cap or ALiBi; each is refused.
"""

from collections.abc import Iterator
from typing import Any

import torch

_forward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward_op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

Tensor = torch.Tensor


def _refuse(dropout_p: float, window: tuple[int, int], softcap: float, alibi_slopes: Any) -> None:
    if dropout_p or window not in ((-1, -1), (-1, 0)) or softcap or alibi_slopes is not None:
        raise NotImplementedError(
            f"the CPU stand-in for flash-attn has no dropout ({dropout_p}), window {window}, softcap ({softcap}) or "
            "ALiBi: benchmark cases must not use them"
        )


def _blocks(q_tokens: int, k_tokens: int, causal: bool) -> list[tuple[slice, bool]]:
    """Runs of keys, each attended to by all queries in one call: (keys, causal)."""
    if not causal or q_tokens == k_tokens:
        return [(slice(0, k_tokens), causal)]
    if k_tokens < q_tokens:
        raise NotImplementedError(f"a causal call with {q_tokens} queries and {k_tokens} keys has queries without keys")
    surplus = k_tokens - q_tokens
    return [(slice(0, surplus), False), (slice(surplus, k_tokens), True)]


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool) -> tuple[Tensor, Tensor]:
    """q, k, v [B, H, T, D] -> out [B, H, T, D], lse [B, H, T]."""
    parts = [
        _forward_op(q, k[:, :, keys], v[:, :, keys], 0.0, block_causal, scale=scale)
        for keys, block_causal in _blocks(q.shape[2], k.shape[2], causal)
    ]
    if len(parts) == 1:
        return parts[0]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    out = sum(part * (part_lse - lse).exp()[..., None] for part, part_lse in parts)
    return out.to(q.dtype), lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """All [B, H, T, D] but lse [B, H, T] -> dq, dk, dv."""
    parts = [
        _backward_op(dout, q, k[:, :, keys], v[:, :, keys], out, lse, 0.0, block_causal, scale=scale)
        for keys, block_causal in _blocks(q.shape[2], k.shape[2], causal)
    ]
    if len(parts) == 1:
        return parts[0]
    dq, dk, dv = zip(*parts)
    return sum(dq[1:], dq[0]), torch.cat(dk, 2), torch.cat(dv, 2)


def _heads_first(x: Tensor) -> Tensor:
    """[B, T, H, D] <-> [B, H, T, D], a view."""
    return x.transpose(1, 2)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Differentiable attention of [B, T, H, D]."""
    _refuse(dropout_p, window_size, softcap, alibi_slopes)
    out, lse = _forward(_heads_first(q), _heads_first(k), _heads_first(v), softmax_scale, causal)
    return (out.transpose(1, 2), lse, None) if return_attn_probs else out.transpose(1, 2)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, None]:
    _refuse(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
    out, lse = _forward(_heads_first(q), _heads_first(k), _heads_first(v), softmax_scale, causal)
    return out.transpose(1, 2), lse.contiguous(), None, None


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> None:
    """Writes into the first rows of dq, dk and dv, which may be longer than q and k."""
    _refuse(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
    dout, q, k, v, out = map(_heads_first, (dout, q, k, v, out))
    grads = _backward(dout, q, k, v, out, softmax_lse.contiguous(), softmax_scale, causal)
    for target, grad in zip((dq, dk, dv), map(_heads_first, grads)):
        target[:, : grad.shape[1]].copy_(grad)


def _documents(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Iterator[tuple[slice, slice]]:
    """Rows of queries and of keys of each document that has queries."""
    q, k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for q_start, q_stop, k_start, k_stop in zip(q, q[1:], k, k[1:]):
        if q_start < q_stop:
            yield slice(q_start, q_stop), slice(k_start, k_stop)


def _rows(x: Tensor, rows: slice) -> Tensor:
    """[T, H, D] -> [1, H, rows, D]."""
    return x[rows].transpose(0, 1)[None]


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, None]:
    _refuse(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
    out, lse = torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    for rows, keys in _documents(cu_seqlens_q, cu_seqlens_k):
        part, part_lse = _forward(_rows(q, rows), _rows(k, keys), _rows(v, keys), softmax_scale, causal)
        out[rows], lse[:, rows] = part[0].transpose(0, 1), part_lse[0]
    return out, lse, None, None


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> None:
    """Writes into dq, dk and dv."""
    _refuse(dropout_p, (window_size_left, window_size_right), softcap, alibi_slopes)
    for rows, keys in _documents(cu_seqlens_q, cu_seqlens_k):
        grads = _backward(
            _rows(dout, rows),
            _rows(q, rows),
            _rows(k, keys),
            _rows(v, keys),
            _rows(out, rows),
            softmax_lse[None, :, rows].contiguous(),
            softmax_scale,
            causal,
        )
        for target, target_rows, grad in zip((dq, dk, dv), (rows, keys, keys), grads):
            target[target_rows] = grad[0].transpose(0, 1)
