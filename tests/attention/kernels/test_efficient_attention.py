"""torch's memory-efficient attention: everything around its two operations, which are plain mathematics here
(plain_varlen.py). Nothing of it has run on a GPU."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from torch.utils._python_dispatch import TorchDispatchMode

from hf_longctx.attention.kernels.cuda_efficient import CudaEfficient
from hf_longctx.layouts.blocks import Block, Mask
from tests.attention.kernels import plain_varlen
from tests.attention.kernels.any_blocks import HEAD_DIM, SLOPES, Call, assert_equals_reference, calls


class EfficientAttention(TorchDispatchMode):
    """torch's two operations as plain mathematics, called through torch's own schemas."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.name().startswith("aten::_efficient_attention"):
            return func(*args, **(kwargs or {}))
        names = [argument.name for argument in func._schema.arguments]
        call = SimpleNamespace(**dict(zip(names, args)), **(kwargs or {}))
        assert call.query.shape[2] == call.key.shape[2] == call.value.shape[2], "heads are not shared"
        assert all(x.is_contiguous() for x in (call.query, call.key, call.value))
        q, k, v, cu_q, cu_k = call.query[0], call.key[0], call.value[0], call.cu_seqlens_q, call.cu_seqlens_k
        lengths = cu_q.diff().tolist()
        assert call.max_seqlen_q == max(lengths)
        assert call.max_seqlen_k == max(cu_k.diff().tolist())
        assert call.dropout_p == 0
        assert call.bias is None
        assert call.custom_mask_type == 0 or lengths == cu_k.diff().tolist(), "causal blocks are square"
        window = (-1, -1) if call.custom_mask_type == 0 else (-1, 0)
        if func.name() == "aten::_efficient_attention_forward":
            assert call.compute_log_sumexp
            out, lse = plain_varlen.forward(q, k, v, cu_q, cu_k, window, call.scale, value_dims=True)
            padded = lse.new_full((len(lengths), q.shape[1], (max(lengths) + 31) // 32 * 32), torch.inf)
            for row, of_sequence in zip(padded, lse.split(lengths, 1)):
                row[:, : of_sequence.shape[1]] = of_sequence
            return out[None], padded, torch.empty(()), torch.empty(()), max(lengths), 0
        assert call.logsumexp.shape == (len(lengths), q.shape[1], (max(lengths) + 31) // 32 * 32)
        assert all((row[:, n:] == torch.inf).all() for row, n in zip(call.logsumexp, lengths))
        lse = torch.cat([row[:, :n] for row, n in zip(call.logsumexp, lengths)], 1)
        rows = (call.grad_out_[0], q, k, v, call.out[0], lse, cu_q, cu_k)
        gradients = plain_varlen.backward(*rows, window, call.scale, value_dims=True)
        return *(x[None] for x in gradients), torch.empty(())


@pytest.mark.parametrize("slopes", [None, SLOPES], ids=["plain", "alibi"])
@pytest.mark.parametrize("value_dim", [HEAD_DIM, HEAD_DIM - 8])
def test_efficient_attention_equals_the_reference(slopes: torch.Tensor | None, value_dim: int):
    @given(calls())
    @settings(max_examples=40, deadline=None)
    def equal(call: Call) -> None:
        with EfficientAttention():
            assert_equals_reference(CudaEfficient(), call, slopes, value_dim=value_dim)

    equal()
    causal = Block(0, 100, 0, 100, Mask.CAUSAL)
    edge = Block(10, 90, 100, 180, Mask.ANTICAUSAL, distance=120)
    with EfficientAttention():
        assert_equals_reference(
            CudaEfficient(), (100, 180, [causal, edge]), slopes, torch.bfloat16, value_dim=value_dim
        )


def test_efficient_attention_pads_at_most_twice_the_rows():
    """One document of 1,000 tokens among a hundred of 10: padded to the longest they would be 101,000 rows."""
    lengths = [10] * 50 + [1000] + [10] * 50
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    blocks = [Block(a, a + n, a, a + n, Mask.CAUSAL) for a, n in zip(starts, lengths)]
    called = list(CudaEfficient().calls(blocks, 2000, 2000))
    assert [block for call in called for block in call] == blocks
    assert len(called) == 3
    assert all(len(call) * max(b.q_stop - b.q_start for b in call) <= 4000 for call in called)
