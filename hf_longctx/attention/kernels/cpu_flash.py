"""torch's flash attention for CPUs: one call a block, memory linear in tokens, float16, bfloat16, float32 and float64.

Facts this relies on (torch 2.11 to 2.13): causal blocks are aligned at the top left; the log-sum-exp is natural,
float32 or float64; grouped key/value heads are read in place and their gradients come back summed; an empty operand
kills the process, so blocks are never empty.
"""

from collections.abc import Iterator, Sequence

import torch

from hf_longctx.attention.kernels.partial import Partial
from hf_longctx.layout import Block

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuFlash:
    """See the module's docstring; the interface is `Kernel`."""

    name = "cpu_flash"

    def unsupported(self, q: torch.Tensor, k: torch.Tensor) -> str | None:
        if q.device.type != "cpu":
            return f"needs tensors on cpu, these are on {q.device}"
        return None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Sequence[Block], scale: float
    ) -> Iterator[Partial]:
        for b in blocks:
            out, lse = _forward(
                _heads_first(q[b.q_start : b.q_stop]),
                _heads_first(k[b.k_start : b.k_stop]),
                _heads_first(v[b.k_start : b.k_stop]),
                0.0,
                b.causal,
                scale=scale,
            )
            yield Partial(b.q_start, b.q_stop, _tokens_first(out), lse[0])

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
        grad_q: torch.Tensor,
        grad_k: torch.Tensor,
        grad_v: torch.Tensor,
    ) -> None:
        for b in blocks:
            rows, keys = slice(b.q_start, b.q_stop), slice(b.k_start, b.k_stop)
            dq, dk, dv = _backward(
                _heads_first(grad_out[rows]),
                _heads_first(q[rows]),
                _heads_first(k[keys]),
                _heads_first(v[keys]),
                _heads_first(out[rows]),
                lse[:, rows].unsqueeze(0).contiguous(),
                0.0,
                b.causal,
                scale=scale,
            )
            grad_q[rows] += _tokens_first(dq)
            grad_k[keys] += _tokens_first(dk)
            grad_v[keys] += _tokens_first(dv)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[T, H, D] -> [1, H, T, D], a view."""
    return x.transpose(0, 1).unsqueeze(0)


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    """[1, H, T, D] -> [T, H, D], a view."""
    return x[0].transpose(0, 1)
