"""torch's memory-efficient attention: everything around its two operations, which are plain mathematics here
(stand_in_kernels.py). Nothing of it has run on a GPU."""

import pytest
import torch
from hypothesis import given, settings

from hf_longctx.attention.kernels import cuda_efficient
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


def test_calls_whose_keys_lie_farther_than_32_bits_count_are_of_some_heads(monkeypatch: pytest.MonkeyPatch):
    """131,072 keys of 32 heads of 512 are 2^31 elements."""
    assert cuda_efficient.most_heads(131_072, 512, 32) == 31
    assert cuda_efficient.most_heads(131_071, 512, 32) == 32
    with pytest.raises(ValueError, match=r"4194304 keys of dimension 512 are 2147483648 elements, .*on more ranks"):
        cuda_efficient.most_heads(2**22, 512, 8)
    blocks = [Block(0, 40, 0, 40, Mask.CAUSAL), Block(40, 60, 40, 60, Mask.ANTICAUSAL)]
    for heads in (1, 2, 3, 4):
        monkeypatch.setattr(cuda_efficient, "LARGEST_OFFSET", 40 * HEAD_DIM * heads + 1)
        with EfficientAttention():
            assert_equals_reference(CudaEfficient(), (60, 60, blocks), None)


def test_torch_2_11_has_no_kernels_for_blackwell(monkeypatch: pytest.MonkeyPatch):
    for version, refused in (("2.11.0+cu130", True), ("2.12.0", False), ("2.13.0+cpu", False)):
        monkeypatch.setattr(torch, "__version__", version)
        assert (CudaEfficient().unavailable((10, 0)) is not None) == refused
        assert CudaEfficient().unavailable((9, 0)) is None


def test_efficient_attention_pads_at_most_twice_the_rows():
    """One document of 1,000 tokens among a hundred of 10: padded to the longest they would be 101,000 rows."""
    lengths = [10] * 50 + [1000] + [10] * 50
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    blocks = [Block(a, a + n, a, a + n, Mask.CAUSAL) for a, n in zip(starts, lengths)]
    called = list(CudaEfficient().calls(blocks, 2000, 2000))
    assert [block for call in called for block in call] == blocks
    assert len(called) == 3
    assert all(len(call) * max(b.q_stop - b.q_start for b in call) <= 4000 for call in called)
