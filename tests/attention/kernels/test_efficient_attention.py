"""torch's memory-efficient attention: everything around its two operations, which are plain mathematics here
(stand_in_kernels.py). Nothing of it has run on a GPU."""

import pytest
import torch
from hypothesis import given, settings

from hf_longctx.attention.kernels.cuda_efficient import CudaEfficient
from hf_longctx.layouts.blocks import Block, Mask
from tests.attention.kernels.any_blocks import HEAD_DIM, SLOPES, Call, assert_equals_reference, calls
from tests.attention.kernels.stand_in_kernels import EfficientAttention


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
