"""The search of benchmarks/planner_replanned.py: plans count as they cost, and what is kept is a limit for its step alone."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from hf_longctx.planner import lower_bound, plan_step
from hf_longctx.planner.compiled import planning

FEW_RANKS = 24


@pytest.fixture(autouse=True, scope="module")
def benchmark_modules():
    """Benchmarks are scripts: their folder is on the path while they run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield


@pytest.mark.parametrize("seed", [1, 3, 7, 14, 25, 35])
@pytest.mark.parametrize("mode", ["async", "lockstep"])
def test_a_plan_for_the_true_costs_is_counted_as_it_says_itself(seed, mode):
    from drawn_steps import drawn
    from planner_replanned import counted

    step = drawn(seed, FEW_RANKS)
    plan = plan_step(step.lengths, step.topology, step.cost, mode, step.offload if mode == "async" else None)
    np.testing.assert_allclose(counted(plan, step).cost, plan.cost, rtol=1e-6)


@pytest.mark.parametrize("seed", [5, 14, 22])
@pytest.mark.parametrize("mode", ["async", "lockstep"])
def test_a_search_finds_nothing_below_the_bound_and_nothing_worse_than_the_plan(seed, mode):
    from drawn_steps import drawn
    from planner_replanned import replanned

    step = drawn(seed, FEW_RANKS)
    offload = step.offload if mode == "async" else None
    with planning(math.inf):
        plan = plan_step(step.lengths, step.topology, step.cost, mode, offload)
    best, plans = replanned(step, mode, seconds=0, fewest=4)
    bound = plan.lower_bound if offload else lower_bound(step.ordered, step.topology, step.cost, mode)
    assert plans == 4
    assert bound <= best <= plan.timeline().makespan


def test_a_search_finds_shorter_plans_where_the_planner_left_some():
    from drawn_steps import drawn
    from planner_replanned import replanned

    step = drawn(57, FEW_RANKS)
    own = plan_step(step.lengths, step.topology, step.cost, "async").timeline().makespan
    assert replanned(step, "async", seconds=0, fewest=25)[0] < 0.98 * own


def test_what_was_found_holds_for_its_step_and_its_bound(tmp_path, monkeypatch):
    import planner_replanned

    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps({"seed 3": {"async": {"makespan": 120, "bound": 100}}}))
    monkeypatch.setattr(planner_replanned, "KEPT", kept)
    planner_replanned._kept.cache_clear()
    try:
        assert planner_replanned.found("seed 3", "async", 100) == 120
        assert planner_replanned.found("seed 3", "async", 101) is None
        assert planner_replanned.found("seed 3", "lockstep", 100) is None
        assert planner_replanned.found("seed 4", "async", 100) is None
    finally:
        planner_replanned._kept.cache_clear()
