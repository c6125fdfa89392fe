"""Attention as plain mathematics, in any dtype on any device. Slow, and quadratic in memory: what the other kernels
are tested against.

S = scale * q k^T - slope * distance     P = exp(S - lse)     out = P v
dv = P^T dout         dS = P * (dout v^T - rowsum(dout * out))         dq = scale * dS k         dk = scale * dS^T q

With a soft cap S = softcap * tanh(scale * q k^T / softcap), and dS is multiplied by the tanh's derivative, 1 - (S / softcap)^2.
"""

from collections.abc import Iterator, Sequence

import torch

from hf_longctx.attention.kernels.accumulate import Partial, RowSum, accumulation_dtype
from hf_longctx.attention.kernels.interface import Needs
from hf_longctx.layouts.blocks import Block, Mask


class Reference:
    """See the module's docstring; the interface is `Kernel`."""

    name = "reference"
    alibi_tile = 1 << 40  # distances are subtracted as they are
    value_dims = True

    def unsupported(self, q: torch.Tensor, k: torch.Tensor, needs: Needs) -> str | None:
        return None

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        blocks: Sequence[Block],
        scale: float,
        slopes: torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> Iterator[Partial]:
        for b in blocks:
            keys = slice(b.k_start, b.k_stop)
            scores = _hidden(_scores(q[b.q_start : b.q_stop], k[keys], b, scale, slopes, softcap), b)
            lse = scores.logsumexp(-1)
            out = (scores - lse.unsqueeze(-1)).exp() @ _per_query_head(v[keys], q)
            yield Partial(b.q_start, b.q_stop, out.transpose(0, 1), lse)

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        blocks: Sequence[Block],
        scale: float,
        grad_q: RowSum,
        grad_k: RowSum,
        grad_v: RowSum,
        slopes: torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> None:
        for b in blocks:
            rows, keys = slice(b.q_start, b.q_stop), slice(b.k_start, b.k_stop)
            dout, o = (x[rows].to(lse.dtype).transpose(0, 1) for x in (grad_out, out))
            scores = _scores(q[rows], k[keys], b, scale, slopes, softcap)
            probabilities = (_hidden(scores, b) - lse[:, rows].unsqueeze(-1)).exp()
            delta = (dout * o).sum(-1, keepdim=True)
            dscores = probabilities * (dout @ _per_query_head(v[keys], q).transpose(1, 2) - delta)
            if softcap is not None:
                dscores = dscores * (1 - (scores / softcap) ** 2)
            grad_q.add(b.q_start, b.q_stop, (scale * (dscores @ _per_query_head(k[keys], q))).transpose(0, 1))
            dk = _per_kv_head(scale * (dscores.transpose(1, 2) @ _per_query_head(q[rows], q)), k)
            grad_k.add(b.k_start, b.k_stop, dk)
            grad_v.add(b.k_start, b.k_stop, _per_kv_head(probabilities.transpose(1, 2) @ dout, v))


def _scores(
    q: torch.Tensor, k: torch.Tensor, block: Block, scale: float, slopes: torch.Tensor | None, softcap: float | None
) -> torch.Tensor:
    """q [Tq, Hq, D], k [Tk, Hkv, D] -> [Hq, Tq, Tk]"""
    scores = _per_query_head(q, q) @ _per_query_head(k, q).transpose(1, 2) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    if slopes is not None:
        x, y = _rows(scores)
        scores = scores - slopes.to(scores.dtype)[:, None, None] * (block.distance + x - y)
    return scores


def _rows(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Query rows [Tq, 1] and key rows [Tk] of scores [Hq, Tq, Tk]."""
    _, queries, keys = scores.shape
    return torch.arange(queries, device=scores.device).unsqueeze(1), torch.arange(keys, device=scores.device)


def _hidden(scores: torch.Tensor, block: Block) -> torch.Tensor:
    """Scores [Hq, Tq, Tk] with -inf for keys that the block's mask hides."""
    if block.mask is Mask.FULL:
        return scores
    x, y = _rows(scores)
    return scores.masked_fill(y > x if block.mask is Mask.CAUSAL else y < x, float("-inf"))


def _per_query_head(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """[T, H, D] -> [Hq, T, D] in the accumulation dtype, each head repeated for the query heads that share it."""
    return x.to(accumulation_dtype(x.dtype)).transpose(0, 1).repeat_interleave(q.shape[1] // x.shape[1], 0)


def _per_kv_head(x: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """[Hq, T, D] -> [T, Hkv, D], summed over the query heads that share a key/value head."""
    return x.unflatten(0, (kv.shape[1], -1)).sum(1).transpose(0, 1)
