"""The CPU's tiled kernel against the `reference` kernel, and how much it holds."""

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from hf_longctx.attention.engine import layout_attention
from hf_longctx.attention.kernels import tiled
from hf_longctx.attention.kernels.tiled import Tiled
from hf_longctx.layouts.layout import Layout, Segment
from tests.attention.kernels.any_blocks import HEAD_DIM, Call, assert_equals_reference, calls


@pytest.mark.parametrize("tile", [4, 512])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_tiles_equal_the_reference(tile: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    """With and without a soft cap, values of the same or another dimension."""
    monkeypatch.setattr(tiled, "TILE", tile)

    @given(calls(), st.sampled_from([None, 0.5, 30.0]), st.sampled_from([HEAD_DIM, 5]))
    @settings(max_examples=30, deadline=None)
    def equal(call: Call, softcap: float | None, value_dim: int) -> None:
        assert_equals_reference(Tiled(), call, None, dtype, value_dim=value_dim, softcap=softcap)

    equal()


def peak_bytes(run: Callable[[], object]) -> int:
    """The most that is allocated at a time while something runs, beyond what was there before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


def test_soft_capping_holds_a_few_tiles_of_scores():
    """Forward and backward over 1,024 tokens, 8 heads of 16 in float32: the output, the gradients and their copies by rows
    and by heads (10 times what q holds), and four tiles of scores. All scores would be 32 MiB."""
    q, k, v = (torch.ones(1024, heads, 16, requires_grad=True) for heads in (8, 2, 2))
    layout = Layout({0: (Segment(0, 0, 1024),)})
    grad = torch.ones(1024, 8, 16)

    def run() -> None:
        layout_attention(q, k, v, layout, softcap=2.0).backward(grad)

    tile = 8 * tiled.TILE**2 * 4
    assert 2 * tile < peak_bytes(run) < 4.5 * tile + 10 * grad.nbytes < 8 * 1024**2 * 4 // 2
