"""Plans of steps whose work 64-bit integers do not count in nanoseconds: units of a power of two, which nobody outside sees."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from hf_longctx.planner import GPU, PLANNERS, CostModel, PlanError, Topology, bound, compiled, lower_bound, plan_step
from hf_longctx.planner.bound import unit_bits
from hf_longctx.planner.compiled import planning
from hf_longctx.planner.cost.selective_offload import Offload
from hf_longctx.planner.plan import MODES
from tests.builders.plans.random_plans import MISTRAL_7B, TIMES, steps

COST = CostModel(4033, 185_488_535, 3_276_800, 23_831_273, 16_000_000, 320_000, 9_600_000, 256, ranks_per_node=8)
LENGTHS = np.random.default_rng(0).lognormal(9, 1.6, 120).astype(np.int64).clip(1, 400_000)
BEFORE = {
    "static_cp": (6127617986832903655, 74953651956, 66714953611),
    "static_cp_unpacked": (2745594600651668513, 78885009778, 66714953611),
    "dynamic_cp": (-5228154990076824691, 72303020671, 66714953611),
    "bytescale_naive": (-6731137009594249926, 97988941019, 66714953611),
    "bytescale_balanced": (-8173548773661515047, 73320366559, 66714953611),
}
"""Digest, makespan and lower bound of plans of COST and LENGTHS when there were nanoseconds only."""


@pytest.fixture(autouse=True)
def no_compiling(monkeypatch, request):
    """Run interpreted: machine code for units is made anew, which takes a minute of a core."""
    if request.node.get_closest_marker("nightly") is None:
        monkeypatch.setattr(compiled, "PATIENCE", 1e9)
        monkeypatch.setattr(compiled, "PATIENCE_ON_DISK", 1e9)
        monkeypatch.setattr(compiled, "LONGEST_INTERPRETED", 1e9)


def times(cost: CostModel, factor: float) -> CostModel:
    """The model with all times of documents so many times as long."""
    return replace(cost, **{name: int(getattr(cost, name) * factor) for name in TIMES})


@pytest.mark.parametrize("name", BEFORE)
def test_what_fits_nanoseconds_is_planned_in_nanoseconds(name):
    topology = Topology(24, 32_768, ranks_per_node=8)
    assert unit_bits(LENGTHS, topology, COST) == 0
    plan = PLANNERS[name](LENGTHS, topology, COST, "async")
    assert (plan.digest(), plan.timeline().makespan, plan.lower_bound) == BEFORE[name]


def columns(plan) -> list[list[int]]:
    """All that a plan decides."""
    names = ("first_member", "rank", "first_document", "doc", "holder", "offload", "round", "chunks")
    return [getattr(plan, name).tolist() for name in names]


@pytest.fixture
def coarse(monkeypatch):
    """Have steps planned in units that need none."""
    monkeypatch.setattr(bound, "LARGEST_DOCUMENT", 0)
    monkeypatch.setattr(bound, "DOCUMENT_IN_UNITS", 2.0**25)


@pytest.mark.usefixtures("coarse")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PLANNERS)
@settings(max_examples=max(10, settings().max_examples // 2), suppress_health_check=list(HealthCheck))
@given(steps(), st.integers(1, 8))
def test_powers_of_two_change_no_plan(name, mode, step, more):
    """All times are as many times as long."""
    lengths, topology, cost = step
    if name != "hdp":
        topology = replace(topology, speed=None, memory=None)
        lengths = np.minimum(lengths, topology.capacity if name == "dp_packing" else topology.tokens)
    cost = times(cost, topology.stages * 2**14)  # a stage's share of it is a whole number too
    assume(unit_bits(lengths, topology, cost.scaled(*[1 / topology.stages] * 3)) > 0)
    plans = [PLANNERS[name](lengths, topology, costs, mode) for costs in (cost, times(cost, 2**more))]
    assert columns(plans[0]) == columns(plans[1])
    assert (plans[1].cost == plans[0].cost << more).all()
    assert plans[1].lower_bound == plans[0].lower_bound << more
    plans[0].check(lengths)


@pytest.mark.parametrize("documents", [30, pytest.param(len(LENGTHS), marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("ranks", "mode"),
    [(ranks, mode) for ranks in ("equal", "unequal") for mode in MODES]
    + [("offload", "async"), ("offload", "pipeline")],
)
def test_units_are_too_small_to_matter(ranks, mode, documents):
    """Plans of times 2^20 times as long are as good, and their times are predicted alike."""
    lengths = LENGTHS[:documents]
    more = {"speed": (1000, 600) * 12, "memory": (1000, 800, 1000) * 8} if ranks == "unequal" else {}
    topology = Topology(24, 32_768, ranks_per_node=8, stages=3 if mode == "pipeline" else 1, **more)
    offload = [Offload(900, transfer_ps, 2**18) for transfer_ps in (10**7, 10**7 * 2**20)]
    options = [(share,) if ranks == "offload" else () for share in offload]
    long = times(COST, 2**20)
    assert unit_bits(lengths, topology, COST) == 0 < unit_bits(lengths, topology, long)
    plans = [
        plan_step(lengths, topology, *arguments) for arguments in ((COST, mode, *options[0]), (long, mode, *options[1]))
    ]
    plans[1].check(lengths)
    assert plans[1].timeline().makespan / 2**20 == pytest.approx(plans[0].timeline().makespan, rel=2e-3)
    # Nanoseconds lose one for each token of a document, and coefficients of a stage less than a half.
    assert plans[1].lower_bound / 2**20 == pytest.approx(plans[0].lower_bound, rel=1e-3 if mode == "pipeline" else 1e-5)
    ordered = np.sort(lengths)[::-1]
    if not options[0] and mode != "pipeline":  # of one stage, there
        assert lower_bound(ordered, topology, long, mode) == plans[1].lower_bound
    assert plans[1].summary().idle_share == pytest.approx(plans[0].summary().idle_share, abs=2e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_ps": 10**9},
        {"attention_ps": 10**7, "attention_half_tokens": 10**6},
        {"linear_ps": 10**15},
        {"inside_ps": 10**15},
        {"between_ps": 10**15},
        {"message_ns": 10**15},
        {"document_ns": 10**16},
        {"micro_batch_ns": 10**16},
    ],
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("speed", [None, (1000, 250, 500, 1000)])
def test_no_coefficient_is_too_large(changes, mode, speed):
    huge = CostModel(**{"attention_ps": 1, "linear_ps": 1, "inside_ps": 0, "ranks_per_node": 2} | changes)
    lengths, topology = np.array([5, 2_000_000, 77]), Topology(4, 10**6, speed=speed)
    assert unit_bits(lengths, topology, huge) > 0
    plan = plan_step(lengths, topology, huge, mode)
    plan.check(lengths)
    assert 0 <= plan.summary().idle_share < 1


def test_a_step_of_centuries_is_refused():
    cost = CostModel(attention_ps=10**15, linear_ps=1, inside_ps=0)
    for mode in MODES:
        with pytest.raises(
            PlanError, match=r"the step would take 3.17e\+07 years, and times are counted up to 146; it needs"
        ):
            plan_step(np.array([2_000_000]), Topology(4, 10**6), cost, mode)


def test_all_ranks_together_may_work_for_longer_than_64_bits_count():
    """A step of 12 days on 16,384 ranks."""
    cost = CostModel(attention_ps=10**6, linear_ps=10**9, inside_ps=10**3, message_ns=10**6, ranks_per_node=8)
    lengths, topology = np.full(16_384, 10**6), Topology(16_384, 10**6, ranks_per_node=8)
    for name in ("static_cp", "dp_packing"):
        plan = PLANNERS[name](lengths, topology, cost, "async")
        assert float(plan.cost.sum(dtype=float)) > 2**63
        assert plan.summary().idle_share == 0
        assert plan.timeline().makespan == pytest.approx(1.001e15, rel=1e-9)


@pytest.mark.nightly
def test_few_long_documents_on_very_many_ranks_where_links_take_long_to_answer(monkeypatch):
    """0.2 % of 100,000 have 0.5M to 2M tokens, as in benchmarks/any_lengths.py. That units are coarser than nanoseconds, in which
    these times just fit, changes the step by less than a thousandth."""
    cost = CostModel.from_config(MISTRAL_7B, replace(GPU, message_seconds=5e-4), ranks_per_node=8)
    rng = np.random.default_rng(0)
    long = rng.random(100_000) < 0.002
    lengths = np.where(long, rng.integers(500_000, 2_000_001, 100_000), rng.integers(20, 601, 100_000))
    topology = Topology(16_384, 8192, ranks_per_node=8)
    with planning(math.inf):  # interpreted, it takes minutes
        assert unit_bits(lengths, topology, cost) > 0
        plan = plan_step(lengths, topology, cost)
        plan.check(lengths)
        monkeypatch.setattr(bound, "LARGEST_DOCUMENT", 2**53)
        assert unit_bits(lengths, topology, cost) == 0
        finer = plan_step(lengths, topology, cost)
    assert plan.summary().balance < 1.08
    assert plan.timeline().makespan == pytest.approx(finer.timeline().makespan, rel=1e-3)
