"""torch's flash attention for CPUs: one call a block, memory linear in tokens, float16, bfloat16, float32 and float64.

Facts this relies on (torch 2.11 to 2.13): causal blocks are aligned at the top left; the log-sum-exp is natural,
float32 or float64; grouped key/value heads are read in place and their gradients come back summed; a bias [1, Hq, 1,
Tk] is added to the scores in the accumulation dtype, also together with causal; an empty operand kills the process,
so blocks are never empty; heads of queries, keys and values have one dimension. The backward sums gradients of keys
and values in the dtype of its inputs, over every 768 queries: half precision is computed in float32 (error of dk at
767 tokens: 7e-4 and not 5e-3; bfloat16 takes up to 1.4 times as long, float16 a tenth). An anticausal block is a
causal one whose rows are all reversed.
"""

from collections.abc import Iterator

import torch

from hf_longctx.attention.kernels.accumulate import Partial, accumulation_dtype
from hf_longctx.attention.kernels.alibi_keys import key_bias, lse_shift
from hf_longctx.attention.kernels.interface import AttentionCall, Gradients
from hf_longctx.hardware import kernel_bytes
from hf_longctx.layouts.blocks import Block, Mask

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class CpuFlash:
    """See the module's docstring; the interface is `Kernel`."""

    name = "cpu_flash"
    alibi_tile = 256
    value_dims = False
    workspace = staticmethod(kernel_bytes.float32_operands)

    def unsupported(self, call: AttentionCall) -> str | None:
        if call.q.device.type != "cpu":
            return f"needs tensors on cpu, these are on {call.q.device}"
        if call.softcap is not None:
            return "has no soft-capping"
        return None

    def forward(self, call: AttentionCall) -> Iterator[Partial]:
        q, k, v, slopes = call.q, call.k, call.v, call.slopes
        assert call.softcap is None
        for b in call.blocks:
            out, lse = _forward(
                _heads_first(q[b.q_start : b.q_stop], b),
                _heads_first(k[b.k_start : b.k_stop], b),
                _heads_first(v[b.k_start : b.k_stop], b),
                0.0,
                b.mask is not Mask.FULL,
                attn_mask=_bias(b, slopes),
                scale=call.scale,
            )
            lse = _in_order(lse[0], 1, b)
            if slopes is not None:
                lse = lse + lse_shift(b, slopes)
            yield Partial(b.q_start, b.q_stop, _tokens_first(out, b), lse)

    def backward(
        self, call: AttentionCall, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, gradients: Gradients
    ) -> None:
        slopes, (grad_q, grad_k, grad_v) = call.slopes, gradients
        assert call.softcap is None
        for b in call.blocks:
            rows, keys = slice(b.q_start, b.q_stop), slice(b.k_start, b.k_stop)
            tensors = ((grad_out, rows), (call.q, rows), (call.k, keys), (call.v, keys), (out, rows))
            block_lse = lse[:, rows] if slopes is None else lse[:, rows] - lse_shift(b, slopes)
            dq, dk, dv = _backward(
                *(_heads_first(x[of_block], b).to(accumulation_dtype(x.dtype)) for x, of_block in tensors),
                _in_order(block_lse, 1, b).unsqueeze(0).contiguous(),
                0.0,
                b.mask is not Mask.FULL,
                attn_mask=_bias(b, slopes),
                scale=call.scale,
            )
            grad_q.add(b.q_start, b.q_stop, _tokens_first(dq, b))
            grad_k.add(b.k_start, b.k_stop, _tokens_first(dk, b))
            grad_v.add(b.k_start, b.k_stop, _tokens_first(dv, b))
            del dq, dk, dv  # or they would be there while the next block's are computed


def _bias(block: Block, slopes: torch.Tensor | None) -> torch.Tensor | None:
    """[1, Hq, 1, Tk] in the order in which the keys are passed."""
    return None if slopes is None else _in_order(key_bias(block, slopes), 1, block)[None, :, None]


def _heads_first(x: torch.Tensor, block: Block) -> torch.Tensor:
    """[T, H, D] -> [1, H, T, D], a view unless rows are reversed."""
    return _in_order(x, 0, block).transpose(0, 1).unsqueeze(0)


def _tokens_first(x: torch.Tensor, block: Block) -> torch.Tensor:
    """[1, H, T, D] -> [T, H, D], a view unless rows are reversed."""
    return _in_order(x[0].transpose(0, 1), 0, block)


def _in_order(x: torch.Tensor, dimension: int, block: Block) -> torch.Tensor:
    """Reversed along a dimension where the block is anticausal."""
    return x.flip(dimension) if block.mask is Mask.ANTICAUSAL else x
