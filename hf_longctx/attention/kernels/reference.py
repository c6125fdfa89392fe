"""Attention as plain mathematics, in any dtype on any device. Slow, and quadratic in memory: what the other kernels
are tested against.

S = scale * q k^T - slope * distance     P = exp(S - lse)     out = P v
dv = P^T dout         dS = P * (dout v^T - rowsum(dout * out))         dq = scale * dS k         dk = scale * dS^T q

With a soft cap S = softcap * tanh(scale * q k^T / softcap), and dS is multiplied by the tanh's derivative, 1 - (S / softcap)^2.
"""

from collections.abc import Iterator

import torch

from hf_longctx.attention.kernels.accumulate import Partial, accumulation_dtype
from hf_longctx.attention.kernels.interface import ALIBI_OR_SOFT_CAP, AttentionCall, Gradients
from hf_longctx.hardware import kernel_bytes
from hf_longctx.layouts.blocks import Block, Mask


class Reference:
    """See the module's docstring; the interface is `Kernel`."""

    name = "reference"
    alibi_tile = 1 << 40  # distances are subtracted as they are
    value_dims = True
    workspace = staticmethod(kernel_bytes.float32_operands)

    def unsupported(self, call: AttentionCall) -> str | None:
        return ALIBI_OR_SOFT_CAP if call.slopes is not None and call.softcap is not None else None

    def forward(self, call: AttentionCall) -> Iterator[Partial]:
        for b in call.blocks:
            scores = _hidden(_scores(call, b), b)
            lse = scores.logsumexp(-1)
            out = (scores - lse.unsqueeze(-1)).exp() @ _per_query_head(call.v[b.k_start : b.k_stop], call.q)
            yield Partial(b.q_start, b.q_stop, out.transpose(0, 1), lse)

    def backward(
        self, call: AttentionCall, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, gradients: Gradients
    ) -> None:
        q, k, v, scale, softcap = call.q, call.k, call.v, call.scale, call.softcap
        grad_q, grad_k, grad_v = gradients
        for b in call.blocks:
            rows, keys = slice(b.q_start, b.q_stop), slice(b.k_start, b.k_stop)
            dout, o = (x[rows].to(lse.dtype).transpose(0, 1) for x in (grad_out, out))
            scores = _scores(call, b)
            probabilities = (_hidden(scores, b) - lse[:, rows].unsqueeze(-1)).exp()
            delta = (dout * o).sum(-1, keepdim=True)
            dscores = probabilities * (dout @ _per_query_head(v[keys], q).transpose(1, 2) - delta)
            if softcap is not None:
                dscores = dscores * (1 - (scores / softcap) ** 2)
            grad_q.add(b.q_start, b.q_stop, (scale * (dscores @ _per_query_head(k[keys], q))).transpose(0, 1))
            dk = _per_kv_head(scale * (dscores.transpose(1, 2) @ _per_query_head(q[rows], q)), k)
            grad_k.add(b.k_start, b.k_stop, dk)
            grad_v.add(b.k_start, b.k_stop, _per_kv_head(probabilities.transpose(1, 2) @ dout, v))


def _scores(call: AttentionCall, block: Block) -> torch.Tensor:
    """Scores of a block, [Hq, Tq, Tk]."""
    q, k = call.q[block.q_start : block.q_stop], call.k[block.k_start : block.k_stop]
    scores = _per_query_head(q, q) @ _per_query_head(k, q).transpose(1, 2) * call.scale
    if call.softcap is not None:
        scores = call.softcap * (scores / call.softcap).tanh()
    if call.slopes is not None:
        x, y = _rows(scores)
        scores = scores - call.slopes.to(scores.dtype)[:, None, None] * (block.distance + x - y)
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
