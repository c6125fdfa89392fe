"""The cost model: FLOPs counted by hand, monotone work, integers that agree however they are computed."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.planner import CPU_CORE, GPU, CostModel, RankSpeed, plan_step

MISTRAL_7B = SimpleNamespace(
    hidden_size=4096,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=14336,
    vocab_size=32000,
)
costs = st.sampled_from(
    [
        CostModel.from_config(MISTRAL_7B, GPU),
        CostModel.from_config(MISTRAL_7B, CPU_CORE),
        CostModel(attention_ps=0, linear_ps=1, exchange_ps=0, launch_ns=0),
        CostModel(attention_ps=1, linear_ps=1, exchange_ps=10**9, launch_ns=10**6),
    ]
)


@settings(max_examples=100, deadline=None)
@given(costs, st.integers(1, 10**7), st.integers(1, 4096))
def test_work_never_falls_and_arrays_agree_with_python_integers(cost, length, ranks):
    work = int(cost.work(length, ranks))
    assert cost.work(length + 1, ranks) >= work
    assert cost.work(length, ranks + 1) >= work >= 1
    assert cost.work(np.array([length]), np.array([ranks])).dtype == np.int64
    assert cost.work(np.array([length]), np.array([ranks]))[0] == work
    assert cost.time(length, ranks) == -(-work // ranks)


def test_from_config_agrees_with_a_count_by_hand():
    """12 * 4096^2 weights a layer, no GQA, hardly a head: linear cost equals that of attending to 24576 tokens (verl's 7B)."""
    layers, hidden = 1000, 4096
    config = SimpleNamespace(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=32,
        intermediate_size=hidden * 8 // 3,
        vocab_size=1,
    )
    speed = RankSpeed(1e12, 1e12, 1e12, 0.0, 2)
    cost = CostModel.from_config(config, speed)
    assert cost.attention_ps == 6 * layers * hidden
    assert cost.linear_ps / cost.attention_ps == pytest.approx(2 * 24576, rel=1e-3)  # causal: half the pairs
    assert cost.exchange_ps == layers * 2 * hidden * (2 + 2 + 4)


def test_from_config_counts_only_active_experts_and_reads_head_dim():
    moe = SimpleNamespace(**vars(MISTRAL_7B), num_experts_per_tok=2, num_local_experts=8)
    dense = CostModel.from_config(MISTRAL_7B)
    assert CostModel.from_config(moe).linear_ps - dense.linear_ps == pytest.approx(
        6 * 32 * 3 * 4096 * 14336 / GPU.linear_flops * 1e12, rel=1e-6
    )
    wide_heads = SimpleNamespace(**vars(MISTRAL_7B), head_dim=256)
    assert CostModel.from_config(wide_heads).attention_ps == pytest.approx(2 * dense.attention_ps, rel=1e-3)


def test_cost_errors():
    with pytest.raises(ValueError, match=r"SimpleNamespace\.intermediate_size is None"):
        CostModel.from_config(SimpleNamespace(hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(ValueError, match=r"CostModel\.attention_ps is 0\.5; it must be an integer >= 0"):
        CostModel(attention_ps=cast(int, 0.5), linear_ps=1, exchange_ps=0, launch_ns=0)
    with pytest.raises(ValueError, match="linear_ps is 0"):
        CostModel(attention_ps=1, linear_ps=0, exchange_ps=0, launch_ns=0)
    huge = CostModel(attention_ps=10**15, linear_ps=1, exchange_ps=0, launch_ns=0)
    with pytest.raises(
        ValueError, match=r"predicted work of 2 documents, the longest of 2000000 tokens, exceeds 2\^62"
    ):
        plan_step(np.array([5, 2_000_000]), 4, 10**6, huge)
