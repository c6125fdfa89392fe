"""A varlen flash kernel as plain mathematics: the contract that flash-attention states, on any device and dtype.

Sequences lie end to end, cut by cu_seqlens. Query x of a sequence sees the keys from x - left to x + right, rows
aligned at the bottom right, -1 for unlimited. A score is softcap * tanh(score / softcap) unless softcap is 0. With
slopes, slope * |x - y| is taken from the score. Query heads that share a key/value head are neighbours, and all heads
have one dimension unless `value_dims`. Arithmetic is float32, or float64 for float64. Backward takes any out and lse.
"""

import math
from collections.abc import Iterator

import torch


def forward(
    q, k, v, cu_q, cu_k, window, scale, slopes=None, softcap=0.0, value_dims=False
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [Tq, Hq, D], k and v [Tk, Hkv, D] -> out [Tq, Hq, D] in the dtype of q, lse [Hq, Tq]."""
    assert value_dims or q.shape[-1] == k.shape[-1] == v.shape[-1]
    dtype = q.dtype
    q, k, v = (_wide(x) for x in (q, k, v))
    outs, lses = [], []
    for rows, keys in _sequences(cu_q, cu_k):
        scores = _scores(q[rows], k[keys], window, scale, slopes, softcap)
        lses.append(scores.logsumexp(-1))
        outs.append(torch.einsum("hxy,yhd->xhd", scores.softmax(-1), _expanded(v[keys], q)))
    return torch.cat(outs).to(dtype), torch.cat(lses, 1)


def backward(
    grad_out, q, k, v, out, lse, cu_q, cu_k, window, scale, slopes=None, softcap=0.0, value_dims=False
) -> tuple[torch.Tensor, ...]:
    """Gradients of q, k and v, in the dtype of q."""
    assert value_dims or grad_out.shape[-1] == out.shape[-1] == q.shape[-1] == k.shape[-1] == v.shape[-1]
    dtype = q.dtype
    grad_out, q, k, v, out = (_wide(x) for x in (grad_out, q, k, v, out))
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, keys in _sequences(cu_q, cu_k):
        scores = _scores(q[rows], k[keys], window, scale, slopes, softcap)
        p = (scores - lse[:, rows].unsqueeze(-1)).exp()
        dp = torch.einsum("xhd,yhd->hxy", grad_out[rows], _expanded(v[keys], q))
        ds = scale * p * (dp - (grad_out[rows] * out[rows]).sum(-1).t().unsqueeze(-1))
        if softcap:
            ds = ds * torch.where(p > 0, 1 - (scores / softcap) ** 2, 0)
        dq[rows] = torch.einsum("hxy,yhd->xhd", ds, _expanded(k[keys], q))
        dk[keys] = _summed(torch.einsum("hxy,xhd->yhd", ds, q[rows]), k)
        dv[keys] = _summed(torch.einsum("hxy,xhd->yhd", p, grad_out[rows]), v)
    return tuple(x.to(dtype) for x in (dq, dk, dv))


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _sequences(cu_q: torch.Tensor, cu_k: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    assert cu_q.dtype == cu_k.dtype == torch.int32
    bounds = zip(cu_q.tolist(), cu_q.tolist()[1:], cu_k.tolist(), cu_k.tolist()[1:])
    return ((slice(a, b), slice(c, d)) for a, b, c, d in bounds)


def _scores(q, k, window, scale, slopes, softcap) -> torch.Tensor:
    """[Hq, x, y], -inf where the window hides the key."""
    scores = scale * torch.einsum("xhd,yhd->hxy", q, _expanded(k, q))
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    apart = torch.arange(len(q)).unsqueeze(1) + len(k) - len(q) - torch.arange(len(k))
    if slopes is not None:
        scores = scores - slopes[:, None, None] * apart.abs()
    left, right = (math.inf if limit == -1 else limit for limit in window)
    return scores.masked_fill((apart > left) | (-apart > right), float("-inf"))


def _expanded(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _summed(x: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    return x.unflatten(1, (kv.shape[1], -1)).sum(2)
