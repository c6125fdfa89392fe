"""The cost model: FLOPs counted by hand, times against exact fractions, monotone work, integers that agree however they are
computed."""

import math
import os
import subprocess
import sys
from dataclasses import fields, replace
from fractions import Fraction
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.planner import CPU_CORE, GPU, CostModel, RankSpeed
from hf_longctx.planner.cost.cost_model import LONGEST_TIME
from tests.builders.plans.random_plans import MISTRAL_7B, SMOLLM2_135M, TIMES, costs

many_examples = settings(max_examples=8 * settings().max_examples)
"""Of a profile: an example takes microseconds here."""
LENGTHS, RANKS = st.integers(1, 10**6), st.integers(1, 4096)


@many_examples
@given(costs(), LENGTHS, RANKS, st.integers(1, 10**5), st.integers(1, 100))
def test_work_never_falls_and_arrays_agree_with_python_integers(cost, length, ranks, longer, more):
    work = cost.work(length, ranks)
    assert type(work) is int
    assert cost.work(length + longer, ranks) >= work
    assert cost.work(length, ranks + more) >= work >= 1
    array = cost.work(np.array([[length], [length + longer]]), np.array([ranks, ranks + more]))
    assert (array.dtype, array.shape, array[0, 0]) == (np.int64, (2, 2), work)
    assert array[1, 1] == cost.work(length + longer, ranks + more)
    assert cost.time(length, ranks) == -(-work // ranks)


def exact_work(cost: CostModel, s: int, d: int) -> tuple[Fraction, int]:
    """d * T(s, d) of the module's docstring in exact nanoseconds, and what may be lost by rounding term by term."""
    reach = min(s, cost.window or s)
    # Of s^2 / 2 pairs, a window w leaves w*s - w^2 / 2.
    attention = Fraction(cost.attention_ps, 1000) * (s * s + cost.attention_half_tokens * s * d)
    attention += Fraction(cost.windowed_ps, 1000) * (2 * s * reach - reach**2 + cost.attention_half_tokens * s * d)
    exchange = (Fraction(cost.inside_ps * s, 1000 * d) + cost.message_ns) * (d - 1) * d
    g = cost.ranks_per_node
    if g is not None and d > g:
        exchange += Fraction(cost.between_ps * s * (d - g), 1000 * d * g) * d
    linear = Fraction(cost.linear_ps * s, 1000) + cost.state_ns * d * (d - 1)
    return cost.document_ns * d + linear + max(attention, exchange), max((4 + d) * s, 2 * d + 1)


@many_examples
@given(costs(), LENGTHS, RANKS)
def test_work_is_the_formula_of_the_docstring(cost, length, ranks):
    exact, lost = exact_work(cost, length, ranks)
    assert exact - lost <= cost.work(length, ranks) < exact + 1


@many_examples
@given(costs(), LENGTHS, RANKS)
def test_whole_nanoseconds_are_exact(cost, length, ranks):
    """Coefficients that are whole nanoseconds, and nodes of a number of ranks that divides what crosses."""
    rates = {name: getattr(cost, name) // 1000 * 1000 for name in ("attention_ps", "inside_ps", "between_ps")}
    rates["windowed_ps"] = -(-cost.windowed_ps // 1000) * 1000
    node = None if cost.ranks_per_node is None else 1
    whole = replace(cost, **rates, linear_ps=cost.linear_ps // 1000 * 1000 + 1000, ranks_per_node=node)
    assert whole.work(length, ranks) == exact_work(whole, length, ranks)[0]


def test_times_by_hand():
    cost = CostModel(
        attention_ps=2000,
        linear_ps=5000,
        inside_ps=3000,
        between_ps=4000,
        message_ns=7,
        document_ns=11,
        attention_half_tokens=10,
        ranks_per_node=2,
    )
    assert cost.time(12, 1) == 11 + 5 * 12 + 2 * (12 * 12 + 10 * 12)
    # On 3 ranks: attention 2 * (144 / 3 + 10 * 12) = 336; exchange (3 * 4 + 7) * 2 + 4 * 12 * 1 / (3 * 2) = 46.
    assert cost.time(12, 3) == 11 + 5 * 12 // 3 + 336
    slow_links = replace(cost, inside_ps=300_000, between_ps=400_000)
    assert slow_links.time(12, 2) == 11 + 30 + (300 * 6 + 7)
    assert slow_links.time(12, 3) == 11 + 20 + (300 * 4 + 7) * 2 + 400 * 12 * 1 // (3 * 2)
    assert slow_links.time(12, 4) == 11 + 15 + (300 * 3 + 7) * 3 + 400 * 12 * 2 // (4 * 2)
    windowed = replace(cost, attention_ps=0, windowed_ps=2000, window=5)
    assert windowed.time(12, 1) == 11 + 60 + 2 * (2 * 12 * 5 - 25 + 120)
    mixed = replace(cost, windowed_ps=3000, window=5)
    assert mixed.time(12, 1) == 11 + 60 + 2 * (12 * 12 + 120) + 3 * (2 * 12 * 5 - 25 + 120)
    # A state is handed on by each rank but the last, and nothing hides that.
    assert replace(cost, state_ns=13).time(12, 3) == 11 + 5 * 12 // 3 + 336 + 2 * 13


def test_a_window_counts_the_pairs_within_it():
    """The pairs that are left out lie in a triangle of side s - w."""
    cost = CostModel(attention_ps=0, linear_ps=1, inside_ps=0, windowed_ps=1000, window=100)
    full = replace(cost, attention_ps=1000, windowed_ps=0, window=None)
    for length in (1, 99, 100, 101, 1000):
        assert full.work(length, 1) - cost.work(length, 1) == max(0, length - 100) ** 2


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
    speed = RankSpeed(
        attention_flops=1e12,
        linear_flops=1e12,
        inside_bytes=1e12,
        between_bytes=1e11,
        message_seconds=2e-9,
        document_seconds=3e-9,
        micro_batch_seconds=4e-9,
        attention_half_tokens=99.6,
        reduce_bytes=1e12,
        optimizer_parameters=1e10,
        activation_bytes=2,
    )
    cost = CostModel.from_config(config, speed, ranks_per_node=8, world_size=4)
    assert cost.attention_ps == 6 * layers * hidden
    assert cost.linear_ps / cost.attention_ps == pytest.approx(2 * 24576, rel=1e-3)  # causal: half the pairs
    assert cost.inside_ps == layers * 2 * hidden * (2 + 2 + 4)
    assert cost.between_ps == 10 * cost.inside_ps
    assert (cost.message_ns, cost.document_ns, cost.micro_batch_ns) == (2 * layers, 3 * layers, 4 * layers)
    assert (cost.attention_half_tokens, cost.ranks_per_node, cost.window) == (100, 8, None)
    # Of gradients in float32, 3/4 are sent twice by each of 4 ranks.
    parameters = layers * (4 * hidden**2 + 3 * hidden * (hidden * 8 // 3)) + 2 * hidden
    assert cost.step_ns == round(parameters * (4 * 2 * 3 / 4 / 1e3 + 1e-1))
    alone = CostModel.from_config(config, speed)
    assert alone.step_ns == round(parameters * 1e-1)
    assert replace(alone, step_ns=cost.step_ns, ranks_per_node=8) == cost


def test_from_config_counts_only_active_experts_and_reads_head_dim():
    moe = SimpleNamespace(**vars(MISTRAL_7B), num_experts_per_tok=2, num_local_experts=8)
    dense = CostModel.from_config(MISTRAL_7B)
    mlp, router = 32 * 3 * 4096 * 14336, 32 * 8 * 4096
    assert CostModel.from_config(moe).linear_ps - dense.linear_ps == pytest.approx(
        6 * (mlp + router) / GPU.linear_flops * 1e12, rel=1e-6
    )
    # Idle experts are updated too.
    updated = (CostModel.from_config(moe).step_ns - dense.step_ns) * GPU.optimizer_parameters / 1e9
    assert updated == pytest.approx(7 * mlp + router, rel=1e-6)
    wide_heads = SimpleNamespace(**vars(MISTRAL_7B), head_dim=256)
    assert CostModel.from_config(wide_heads).attention_ps == pytest.approx(2 * dense.attention_ps, rel=1e-3)


@pytest.mark.parametrize(
    ("family", "window"), [("mistral", 4096), ("mixtral", 4096), ("llama", None), (None, None), ("qwen3", None)]
)
def test_only_families_that_always_use_their_window_have_one(family, window):
    config = SimpleNamespace(**vars(MISTRAL_7B), model_type=family, sliding_window=4096)
    cost = CostModel.from_config(config)
    assert (cost.window, cost.windowed_ps > 0, cost.attention_ps > 0) == (window, window is not None, window is None)


def test_layers_with_a_window_are_counted_apart():
    """Gemma 3 has five of them to one without."""
    mixed = SimpleNamespace(
        **vars(MISTRAL_7B), sliding_window=1024, layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 8
    )
    full, windowed = CostModel.from_config(MISTRAL_7B), CostModel.from_config(mixed)
    assert windowed.window == 1024
    assert windowed.windowed_ps == pytest.approx(3 * windowed.attention_ps, abs=2)
    assert windowed.windowed_ps + windowed.attention_ps == pytest.approx(full.attention_ps, abs=1)
    short, long = 1000, 10**6
    assert windowed.time(short, 1) == pytest.approx(full.time(short, 1), rel=1e-6)
    assert windowed.time(long, 1) < full.time(long, 1) / 3
    assert windowed.linear_tokens > full.linear_tokens


def test_what_a_label_costs_is_the_head():
    cost = CostModel.from_config(MISTRAL_7B)
    head = 6 * MISTRAL_7B.hidden_size * MISTRAL_7B.vocab_size
    assert cost.label_ps == pytest.approx(head / GPU.linear_flops * 1e12, rel=1e-6)


def test_tied_embeddings_are_updated_once_and_plain_mlps_have_two_matrices():
    tied = SimpleNamespace(**vars(SMOLLM2_135M), tie_word_embeddings=True)
    apart = SimpleNamespace(**vars(SMOLLM2_135M), tie_word_embeddings=False)
    embeddings = 576 * 49152 / CPU_CORE.optimizer_parameters * 1e9
    times = [CostModel.from_config(config, CPU_CORE).step_ns for config in (apart, tied)]
    assert times[0] - times[1] == pytest.approx(embeddings, abs=1)
    bloom = SimpleNamespace(
        model_type="bloom", hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=1000
    )
    wide = CostModel.from_config(bloom, CPU_CORE).linear_ps
    assert wide == round(6 * (2 * (4 + 2 * 4) * 64**2 + 64 * 1000) / CPU_CORE.linear_flops * 1e12)


@many_examples
@given(st.lists(st.integers(1, 10**5), min_size=1, max_size=8), st.integers(1, 64), st.sampled_from([None, 1, 8]))
def test_a_ring_moves_everything_once_around(lengths, ranks, node):
    cost = CostModel.from_config(MISTRAL_7B, GPU, ranks_per_node=node)
    tokens = sum(lengths)
    attention = Fraction(cost.attention_ps, 1000) * (Fraction(sum(s * s for s in lengths), ranks) + 256 * tokens)
    link = cost.between_ps if node is not None and ranks > node else cost.inside_ps
    ring = (Fraction(link * tokens, 1000 * ranks) + cost.message_ns) * (ranks - 1)
    exact = cost.micro_batch_ns + len(lengths) * cost.document_ns + Fraction(cost.linear_ps * tokens, 1000 * ranks)
    exact += max(attention, ring)
    time = cost.ring_time(np.array(lengths), ranks)
    # Each token loses up to 2 ns of its attention and 256 of short blocks; nothing is added but by linear.
    assert exact - (2 * tokens / ranks + 256 * tokens + 2 * ranks) <= time <= exact + 1


@given(costs())
def test_scaled_changes_the_parts_it_names(cost):
    assert cost.scaled() == cost
    doubled = cost.scaled(attention=2, linear=3, exchange=5)
    expected = {
        "attention_ps": 2,
        "linear_ps": 3,
        "document_ns": 3,
        "micro_batch_ns": 3,
        "inside_ps": 5,
        "between_ps": 5,
        "message_ns": 5,
        "windowed_ps": 2,
        "label_ps": 3,
        "state_ns": 5,
    }
    for field in fields(CostModel):
        value = getattr(cost, field.name)
        factor = expected.get(field.name)
        assert getattr(doubled, field.name) == (value if factor is None else value * factor)
    assert cost.scaled(linear=0.0).linear_ps == 1


def test_cost_errors():
    with pytest.raises(ValueError, match=r"SimpleNamespace\.vocab_size is None"):
        CostModel.from_config(SimpleNamespace(hidden_size=8, num_hidden_layers=1, num_attention_heads=2))
    with pytest.raises(ValueError, match=r"SimpleNamespace\.intermediate_size is None"):
        CostModel.from_config(SimpleNamespace(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9))
    with pytest.raises(ValueError, match=r"CostModel\.attention_ps is 0\.5; it must be an integer >= 0"):
        CostModel(attention_ps=cast(int, 0.5), linear_ps=1, inside_ps=0)
    for name in ("inside_ps", "between_ps", "message_ns", "document_ns", "micro_batch_ns", "attention_half_tokens"):
        with pytest.raises(ValueError, match=rf"CostModel\.{name} is -1; it must be an integer >= 0"):
            CostModel(**{"attention_ps": 1, "linear_ps": 1, "inside_ps": 0} | {name: -1})
    for name in ("window", "ranks_per_node"):
        for value in (0, 1.5):
            with pytest.raises(ValueError, match=rf"CostModel\.{name} is {value}; it must be an integer >= 1"):
                CostModel(attention_ps=1, linear_ps=1, inside_ps=0, **{name: value})
    with pytest.raises(ValueError, match=r"message_ns is 9223372036854775808; it must be an integer >= 0 and < 2\^63"):
        CostModel(attention_ps=1, linear_ps=1, inside_ps=0, message_ns=2**63)
    with pytest.raises(ValueError, match="linear_ps is 0"):
        CostModel(attention_ps=1, linear_ps=0, inside_ps=0)
    with pytest.raises(ValueError, match="windowed_ps is 0 and window 7: layers with a window need both"):
        CostModel(attention_ps=1, linear_ps=1, inside_ps=0, window=7)
    with pytest.raises(ValueError, match="label_ps is 5, and linear_ps, of which it is a part, 5; valid: up to 4"):
        CostModel(attention_ps=1, linear_ps=5, inside_ps=0, label_ps=5)


@st.composite
def huge_costs(draw: st.DrawFn) -> CostModel:
    """Coefficients whose products need up to 120 bits."""
    cost, factor = draw(costs()), 2 ** draw(st.integers(0, 25))
    return replace(cost, **{name: getattr(cost, name) * factor for name in TIMES})


@many_examples
@given(huge_costs(), st.integers(1, 2**34), RANKS, st.integers(1, 10**5), st.integers(1, 100), st.integers(0, 20))
def test_work_in_units_is_precise_to_a_unit_and_never_falls(cost, length, ranks, longer, more, coarser):
    """Four terms are rounded to units, and floats to 1 in 2^52."""
    most = cost.most_work(length + longer, ranks + more, length + longer)
    bits = max(0, math.frexp(most / 2**51)[1]) + 1 + coarser
    model = cost.in_units(bits)
    exact = exact_work(replace(cost, document_ns=0), length, ranks)[0] / 2**bits + model.document_ns * ranks
    work = model.work(length, ranks)
    assert abs(work - exact) <= 2 + exact / 2**49
    assert 0 <= model.document_ns * 2**bits - cost.document_ns < 2**bits
    assert 0 <= model.micro_batch_ns * 2**bits - cost.micro_batch_ns < 2**bits
    assert 1 <= work <= model.work(length, ranks + more)
    assert work <= model.work(length + longer, ranks)
    assert model.time(length, ranks) == -(-work // ranks)


@many_examples
@given(huge_costs(), st.integers(1, 2**34), RANKS)
def test_times_beyond_64_bits_are_nanoseconds_all_the_same(cost, length, ranks):
    # As long as they last 146 years at most.
    exact, lost = exact_work(cost, length, ranks)
    unit = 2 ** cost._work(length, ranks)[1]
    for counted, expected in ((cost.work(length, ranks), exact), (cost.time(length, ranks), exact / ranks)):
        slack = 3 * unit + ranks * unit + expected / 2**45
        assert min(expected - lost - slack, LONGEST_TIME - unit) <= counted <= min(expected + slack, LONGEST_TIME)


@many_examples
@given(huge_costs(), st.lists(st.integers(1, 10**6), min_size=1, max_size=8), st.integers(1, 64))
def test_a_ring_in_units_takes_the_same_time(cost, lengths, ranks):
    cost = replace(cost, attention_half_tokens=0, document_ns=0, micro_batch_ns=0)
    tokens = sum(lengths)
    bits = max(1, math.frexp(cost.most_work(tokens, ranks, tokens) / 2**51)[1])
    reach = [min(length, cost.window or length) for length in lengths]
    windowed = cost.windowed_ps * sum(r * (2 * length - r) for r, length in zip(reach, lengths))
    pairs_ps = cost.attention_ps * sum(length**2 for length in lengths) + windowed
    link = cost.inside_ps
    if cost.ranks_per_node is not None and ranks > cost.ranks_per_node:
        link = max(link, cost.between_ps)
    ring = (Fraction(link * tokens, 1000 * ranks) + cost.message_ns) * (ranks - 1)
    exact = Fraction(cost.linear_ps * tokens, 1000 * ranks) + max(Fraction(pairs_ps, 1000 * ranks), ring)
    exact += len(lengths) * cost.state_ns * (ranks - 1)
    assert (
        abs(cost.in_units(bits).ring_time(np.array(lengths), ranks) - exact / 2**bits) <= 2 * len(lengths) + 2 + ranks
    )


@many_examples
@given(costs(), st.lists(st.tuples(LENGTHS, st.floats(0, 1)), min_size=1, max_size=8))
def test_a_document_without_some_labels_counts_as_a_shorter_one_that_costs_as_much(cost, documents):
    # As dear on one rank, to what a token more costs, and to what is rounded term by term.
    lengths = np.array([length for length, _ in documents])
    labels = np.array([int(length * share) for length, share in documents])
    alone = replace(cost, inside_ps=0, between_ps=0, message_ns=0)
    equivalent = cost.equivalent_lengths(lengths, labels)
    assert ((equivalent >= 1) & (equivalent <= lengths)).all()
    np.testing.assert_array_equal(cost.equivalent_lengths(lengths, lengths), lengths)
    for length, labelled, counted in zip(lengths.tolist(), labels.tolist(), equivalent.tolist()):
        saved = Fraction(cost.label_ps * (length - labelled), 1000)
        exact = exact_work(alone, length, 1)[0] - saved
        above = exact_work(alone, counted, 1)[0]
        below = exact_work(alone, counted - 1, 1)[0] if counted > 1 else 0
        rounding = exact / 2**40
        assert below - rounding <= exact <= above + rounding


@pytest.mark.processes
def test_without_compilation_the_same_integers():
    code = """
import numpy as np
from hf_longctx.planner import CostModel
cost = CostModel(4033, 185488535, 3276800, 23831273, 960000, 320000, 9600000, 256, 8, 3000, 70000)
print(cost.work(np.arange(1, 2**21, 99991)[:, None], np.arange(1, 64)).sum())
"""
    sums = {
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=os.environ | changes).stdout
        for changes in ({}, {"NUMBA_DISABLE_JIT": "1"})
    }
    assert len(sums) == 1
