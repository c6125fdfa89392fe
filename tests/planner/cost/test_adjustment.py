"""What ranks learn from measured times: the right factors, whatever steps or ranks were disturbed, and nothing from noise.

Times are made by a cost model that planning does not know: the planner's own, times factors, times how slow a rank is.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.planner import CPU_CORE, CostModel, StepPlan, Topology, plan_step
from hf_longctx.planner.cost.adjustment import (
    AT_ONCE,
    DEAD_BAND,
    FARTHEST,
    LEAST_SAMPLES,
    Adjustment,
    Adjustments,
    Sample,
    agreed,
    agreed_ratio,
    own_ratio,
    own_slowness,
    split_sample,
    whole_parts,
)
from tests.builders.plans.random_plans import lognormal_pareto
from tests.builders.tiny_models import tiny_llama

COST = CostModel.from_config(
    tiny_llama(hidden_size=256, intermediate_size=688, num_hidden_layers=4).config,
    replace(CPU_CORE, micro_batch_seconds=2e-3),
)
SLOW_LINK = replace(COST, inside_ps=500 * COST.inside_ps)
"""Exchanges take longer than the compute that would hide them."""
STEPS = 30
"""In 20, noise of 3 % looks like a slower attention once in 200 draws of ranks and documents."""
SEEDS = st.integers(0, 9)


@cache
def plans(ranks: int, seed: int, cost: CostModel = COST, steps: int = STEPS, documents: int = 12) -> list[StepPlan]:
    topology = Topology(ranks, 4096)
    return [plan_step(lognormal_pareto(documents, seed + step, 4096 * ranks), topology, cost) for step in range(steps)]


def seconds(true: CostModel, lengths: np.ndarray, ranks: int, slow: float) -> float:
    """Nanoseconds of a micro-batch whose ranks compute so many times as long; their links are as fast as ever."""
    slower = true.scaled(slow, slow)
    return slower.micro_batch_ns + int(slower.time(lengths, ranks).sum())


def members(plan: StepPlan, micro_batch: int) -> list[int]:
    return plan.rank[plan.first_member[micro_batch] : plan.first_member[micro_batch + 1]].tolist()


def learned(
    plans: list[StepPlan],
    true: CostModel,
    slow: list[float],
    *,
    cost: CostModel = COST,
    before: Adjustment | None = None,
    noise: float = 0.0,
    disturbed: dict[int, float] | None = None,
    seed: int = 0,
) -> Adjustment:
    """Return what all ranks agree on after these steps took as long as `true` says; disturbed: {step: times as long}."""
    rng, before, disturbed = np.random.default_rng(seed), before or Adjustment(), disturbed or {}
    samples: list[list[Sample]] = [[] for _ in slow]
    splits = []
    for step, plan in enumerate(plans):
        chosen = split_sample(plan, step, cost)
        for micro_batch in range(len(plan.cost)):
            ranks = members(plan, micro_batch)
            documents = slice(*plan.first_document[micro_batch : micro_batch + 2])
            lengths = plan.length[documents]
            took = seconds(true, lengths, len(ranks), max(slow[rank] for rank in ranks))
            took *= disturbed.get(step, 1.0) * (1 + rng.uniform(-noise, noise))
            parts = whole_parts(plan, micro_batch, cost)
            if parts is not None:
                samples[ranks[0]].append(Sample(*parts, took))
            if chosen is not None and chosen[0] == micro_batch:
                splits.append((chosen[1], round(took)))
    ratio = agreed_ratio([own_ratio(sample, before) for sample in samples])
    return agreed(ratio, [own_slowness(sample, ratio) for sample in samples], splits, before)


@given(st.floats(0.3, 3.5), st.floats(0.3, 3.5), st.sampled_from([1, 2, 4, 5]), SEEDS)
def test_factors_are_found(attention, linear, ranks, seed):
    adjustment = learned(plans(ranks, seed), COST.scaled(attention, linear), [1.0] * ranks)
    assert adjustment.speed is None
    for factor, true in ((adjustment.attention, attention), (adjustment.linear, linear)):
        assert factor == (1000 if abs(true - 1) < 0.045 else pytest.approx(1000 * true, rel=0.06, abs=5))


@given(
    disturbed=st.dictionaries(st.integers(0, STEPS - 1), st.floats(2, 50), max_size=3),
    ranks=st.sampled_from([2, 4, 5]),
    seed=SEEDS,
)
def test_slow_steps_and_noise_change_nothing(disturbed, ranks, seed):
    assert learned(plans(ranks, seed), COST, [1.0] * ranks, disturbed=disturbed, noise=0.02) == Adjustment()


@given(ranks=st.sampled_from([2, 3, 4, 7]), factor=st.floats(1.3, 3.9), seed=SEEDS, data=st.data())
def test_a_slow_rank_changes_its_own_speed_and_nothing_else(ranks, factor, seed, data):
    slow = [1.0] * ranks
    rank = data.draw(st.integers(0, ranks - 1))
    slow[rank] = factor
    steps = plans(ranks, seed)
    adjustment = learned(steps, COST, slow, noise=0.03, disturbed={7: 50.0})
    if sum(members(plan, i) == [rank] for plan in steps for i in range(len(plan.cost))) < LEAST_SAMPLES:
        assert adjustment == Adjustment()  # too little is known of it, and nothing else is blamed
        return
    assert (adjustment.attention, adjustment.linear) == (1000, 1000)
    assert adjustment.speed is not None
    assert adjustment.speed[rank] == pytest.approx(1000 / factor, rel=0.04)
    assert [speed for other, speed in enumerate(adjustment.speed) if other != rank] == [1000] * (ranks - 1)


@pytest.mark.parametrize("cost", [COST, SLOW_LINK], ids=["hidden", "shown"])
def test_a_slow_rank_is_no_slow_exchange(cost):
    adjustment = learned(plans(4, 0, cost), cost, [1.0, 1.0, 3.0, 1.0], cost=cost)
    assert adjustment == Adjustment(speed=(1000, 1000, 333, 1000))


@given(st.floats(0.3, 3.5), SEEDS)
def test_exchanges_that_show_are_measured(factor, seed):
    adjustment = learned(plans(4, seed, SLOW_LINK), SLOW_LINK.scaled(exchange=factor), [1.0] * 4, cost=SLOW_LINK)
    assert adjustment.exchange == (1000 if abs(factor - 1) < 0.04 else pytest.approx(1000 * factor, rel=0.12))
    assert (adjustment.attention, adjustment.linear, adjustment.speed) == (1000, 1000, None)


def test_exchanges_that_compute_hides_leave_their_factor():
    quick = replace(COST, inside_ps=1, message_ns=0)
    assert learned(plans(4, 0, quick), quick, [1.0] * 4, cost=quick) == Adjustment()


def test_an_exchange_thought_slow_that_is_hidden_is_no_longer_thought_so():
    """Nobody sees how quick it is, but that it is no longer than the compute that hides it."""
    adjustment = learned(plans(4, 0, SLOW_LINK), COST, [1.0] * 4, cost=SLOW_LINK)
    assert adjustment.exchange < 1000
    again = learned(plans(4, 1, SLOW_LINK), COST, [1.0] * 4, cost=SLOW_LINK, before=adjustment)
    assert again.exchange <= adjustment.exchange


@given(SEEDS, *[st.sampled_from([0.5, 0.7, 1.0, 1.4, 2.0])] * 2)
def test_what_was_learned_holds_until_it_changes(seed, attention, linear):
    true, slow = COST.scaled(attention, linear), [1.0, 1.0, 2.0, 1.0]
    first = learned(plans(4, seed), true, slow)
    again = learned(plans(4, seed + 500), true, slow, before=first, noise=0.01)
    assert again == first


def test_a_rank_that_ran_too_little_alone_keeps_its_speed():
    before = Adjustment(speed=(1000, 400))
    alone = [Sample(1e6, 1e6, 2e6)] * LEAST_SAMPLES
    assert own_slowness(alone[:-1], 10**6) == 0
    assert own_slowness(alone, 10**6) == 10**6
    assert agreed(10**6, [10**6, 0], [], before) == before
    assert agreed(own_ratio([], before)[0], [0, 0], [], before) == before


@pytest.mark.parametrize("factor", [100.0, 0.01])
def test_a_factor_changes_at_most_so_much_at_once_and_in_all(factor):
    true, adjustment, seen = COST.scaled(factor, factor), Adjustment(), []
    for _ in range(6):
        adjustment = learned(plans(2, 0, steps=5), true, [1.0, 1.0], before=adjustment)
        seen.append(adjustment.attention)
    limit = AT_ONCE if factor > 1 else 1 / AT_ONCE
    assert seen[0] == 1000 * limit
    assert seen[1] == pytest.approx(1000 * limit**2, rel=0.01)
    assert 1000 // FARTHEST <= seen[-1] <= 1000 * FARTHEST
    assert seen[-1] == pytest.approx(1000 * factor, rel=0.06)


def test_a_rank_that_stands_still_keeps_a_quarter_of_its_speed():
    adjustment = learned(plans(4, 0), COST, [1.0, 1.0, 1000.0, 1.0])
    assert adjustment == Adjustment(speed=(1000, 1000, 1000 // AT_ONCE, 1000))


@given(st.lists(st.tuples(*[st.integers(1, 10**9)] * 3), min_size=1, max_size=30))
def test_any_times_give_valid_factors(times):
    """Whatever clocks say: no error, and factors that the planner takes."""
    samples = [Sample(*map(float, numbers)) for numbers in times]
    ratio, weight = own_ratio(samples, Adjustment(linear=1700))
    assert ratio > 0
    assert weight >= 0
    adjustment = agreed(ratio, [own_slowness(samples, ratio), 10**6], [], Adjustment())
    assert adjustment.cost(COST).linear_ps >= 1
    assert adjustment.topology(Topology(2, 100)).speeds.min() >= 1000 // AT_ONCE


@settings(max_examples=10)
@given(SEEDS)
def test_plans_with_what_was_learned_are_valid_and_finish_sooner(seed):
    """One of four ranks is three times as slow: plans that know give it less."""
    slow = [1.0, 1.0, 1.0, 3.0]
    adjustment = learned(plans(4, seed), COST, slow)
    topology = Topology(4, 4096)
    gained = []
    for step in range(5):
        lengths = lognormal_pareto(64, seed + step, 16384)
        blind, knowing = (
            plan_step(lengths, in_use.topology(topology), in_use.cost(COST)) for in_use in (Adjustment(), adjustment)
        )
        knowing.check(lengths)
        gained.append(real_makespan(knowing, slow) / real_makespan(blind, slow))
    assert np.median(gained) < 0.85


def real_makespan(plan: StepPlan, slow: list[float]) -> float:
    """Nanoseconds on ranks of these slownesses, of which each computes the tokens that it holds."""
    free = np.zeros(len(slow))
    for micro_batch in range(len(plan.cost)):
        ranks = members(plan, micro_batch)
        tokens = plan.member_tokens[plan.first_member[micro_batch] : plan.first_member[micro_batch + 1]]
        lengths = plan.length[slice(*plan.first_document[micro_batch : micro_batch + 2])]
        even = COST.micro_batch_ns + int(COST.time(lengths, len(ranks)).sum())
        took = max(even * h * len(ranks) / tokens.sum() * slow[rank] for h, rank in zip(tokens, ranks))
        free[ranks] = free[ranks].max() + took
    return float(free.max())


ONE, TWO = Adjustment(attention=1200), Adjustment(linear=800, speed=(1000, 500))


def test_an_adjustment_holds_from_its_position_on():
    adjustments = Adjustments()
    assert adjustments.latest == adjustments.at(3, 4) == Adjustment()
    adjustments.add(0, 5, ONE)
    adjustments.add(1, 2, TWO)
    in_use = [adjustments.at(*position) for position in ((0, 4), (0, 5), (0, 99), (1, 1), (1, 2), (7, 0))]
    assert in_use == [Adjustment(), ONE, ONE, ONE, TWO, TWO]
    assert adjustments.latest == TWO


@pytest.mark.parametrize("position", [(0, 0), (0, 5), (1, 1), (1, 2), (4, 0)])
def test_a_checkpoint_keeps_what_holds_and_what_will_hold(position):
    adjustments = Adjustments([(0, 5, ONE), (1, 2, TWO)])
    state = adjustments.state(*position)
    again = Adjustments.restored(state, 2)
    for later in ((1, 1), (1, 2), (2, 0)):
        if later >= position:
            assert again.at(*later) == adjustments.at(*later)
    assert len(state) == (1 if position >= (1, 2) else 2)


def test_on_another_number_of_ranks_coefficients_stay_and_speeds_go():
    adjustments = Adjustments.restored(Adjustments([(0, 5, ONE), (1, 2, TWO)]).state(0, 0), 3)
    assert adjustments.at(1, 2) == replace(TWO, speed=None)
    assert adjustments.at(0, 7) == ONE


def test_the_dead_band_is_of_the_value_in_use():
    before = Adjustment(linear=2000)
    for factor, expected in ((2000 + 2 * DEAD_BAND - 2, 2000), (2000 + 2 * DEAD_BAND + 2, 2000 + 2 * DEAD_BAND + 2)):
        adjustment = agreed(10**6, [1000 * factor], [], before)
        assert adjustment.linear == expected
