"""torch's own variable-length flash attention for CUDA (a copy of flash-attention 2 inside torch).

The aten operations are called: `torch.nn.attention.varlen.varlen_attn` keeps the log-sum-exp's gradient out. Their backward
is deterministic where torch's global switch for deterministic algorithms is on. Their forward takes ALiBi slopes and their
backward none, so ALiBi is folded (varlen.py).

Read in torch's sources: a window (left, right) means what it does in flash-attention 2, -1 for unlimited; the
log-sum-exp of a varlen call is [Hq, T]; gradients of grouped heads come back summed, in the dtype of the inputs.
Run where a GPU is at hand: tests/attention/kernels/test_kernels.py and tests/attention/kernels/test_varlen_kernels.py.
"""

import torch

from hf_longctx.attention.kernels.varlen import Triple, VarlenCall, VarlenKernel
from hf_longctx.hardware import kernel_bytes
from hf_longctx.layouts.blocks import Mask


class CudaVarlen(VarlenKernel):
    """See the module's docstring; the interface is `Kernel`."""

    name = "cuda_varlen"
    sums_parts = True
    workspace = staticmethod(kernel_bytes.flash_2)

    def unavailable(self, capability: tuple[int, int]) -> str | None:
        if capability < (8, 0):
            return f"needs compute capability 8.0 or later, this GPU has {capability[0]}.{capability[1]}"
        return None

    def max_head_dim(self, capability: tuple[int, int], head_dim: int) -> int:
        return 256

    def run_forward(self, call: VarlenCall) -> tuple[torch.Tensor, torch.Tensor]:
        sequences, (left, right) = call.sequences, call.sequences.window
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            *call[:3],
            sequences.queries.cu_seqlens,
            sequences.keys.cu_seqlens,
            sequences.queries.longest,
            sequences.keys.longest,
            0.0,
            sequences.mask is Mask.CAUSAL,
            False,
            scale=call.scale,
            window_size_left=left,
            window_size_right=right,
        )
        return out, lse

    def run_backward(self, call: VarlenCall, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Triple:
        sequences, (left, right) = call.sequences, call.sequences.window
        rng_state = torch.zeros(2, dtype=torch.uint64, device=call.q.device)  # of dropout, which is off
        return torch.ops.aten._flash_attention_backward(
            grad_out,
            *call[:3],
            out,
            lse,
            sequences.queries.cu_seqlens,
            sequences.keys.cu_seqlens,
            sequences.queries.longest,
            sequences.keys.longest,
            0.0,
            sequences.mask is Mask.CAUSAL,
            rng_state,
            torch.empty(0, device=call.q.device),
            scale=call.scale,
            window_size_left=left,
            window_size_right=right,
        )
