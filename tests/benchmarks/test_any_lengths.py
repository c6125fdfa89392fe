"""Plans of any lengths: the random search of benchmarks/any_lengths.py, its bounds and limits, and its figures.

The search itself runs here on few ranks, with the limits that today's planner keeps; the benchmark has those that it is held
to.
"""

import math
import sys
from dataclasses import replace
from fnmatch import fnmatch
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_longctx.planner import PLANNERS, CostModel, Topology, lower_bound, plan_step
from hf_longctx.planner.bound import unit_bits

MOST_RANKS = 24
KEPT = {"async": 1.25, "lockstep": 1.6}
"""Most makespan over its limit on so few ranks, by mode: to be tightened as the planner gets better."""


@pytest.fixture(autouse=True, scope="module")
def benchmark_modules():
    """Benchmarks are scripts: their folder is on the path while they run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield


@pytest.mark.parametrize(("seed", "most"), [(1200, 1.01), (1320, 1.02)])
def test_few_documents_lie_as_a_simpler_planner_places_them_where_that_ends_sooner(seed, most):
    """Groups of their own for all split documents end at 1.14 and 1.04 of the bound."""
    from drawn_steps import drawn

    step = drawn(seed)
    plan = plan_step(step.lengths, step.topology, step.cost, "lockstep")
    plan.check(step.lengths)
    assert (plan.planner, plan.exchange) == ("hdp", "direct")
    assert plan.timeline().makespan < most * plan.lower_bound


def test_rounds_of_few_documents_end_sooner_where_they_are_also_filled_as_if_exchange_were_dearer(monkeypatch):
    from drawn_steps import drawn

    from hf_longctx.planner.placing.rounds import lockstep

    step = drawn(1228)
    makespan = plan_step(step.lengths, step.topology, step.cost, "lockstep").timeline().makespan
    monkeypatch.setattr(lockstep, "DEARER_DOCUMENTS", 0)
    assert makespan < 0.98 * plan_step(step.lengths, step.topology, step.cost, "lockstep").timeline().makespan


def test_rounds_end_sooner_where_the_one_before_an_idle_one_is_made_higher(monkeypatch):
    from drawn_steps import drawn

    from hf_longctx.planner.placing.rounds import builder

    step = drawn(1914)
    makespan = plan_step(step.lengths, step.topology, step.cost, "lockstep").timeline().makespan
    monkeypatch.setattr(builder, "RAISED_BEFORE", ())
    assert makespan < 0.98 * plan_step(step.lengths, step.topology, step.cost, "lockstep").timeline().makespan


@settings(max_examples=max(10, settings().max_examples // 2))
@given(st.integers(0, 10_000))
@example(3)
@example(7)
@example(25)
def test_plans_of_any_lengths_keep_their_limits(seed):
    from drawn_steps import drawn
    from plan_limits import judge

    step = drawn(seed, MOST_RANKS)
    step = replace(step, lengths=step.lengths[:200])
    for mode, judged in judge(step).items():
        judged.plan.check(step.lengths)
        assert judged.makespan >= judged.bound
        assert judged.over_limit <= KEPT[mode], (str(step), judged.violations)


def test_a_draw_is_that_of_its_seed_and_within_its_limits():
    from drawn_steps import LONGEST, MOST_MEMBERS, drawn

    steps = [drawn(seed) for seed in range(120)]
    for seed in (0, 7, 15, 119):
        again = drawn(seed)
        np.testing.assert_array_equal(again.lengths, steps[seed].lengths)
        assert (again.topology, again.cost, again.offload) == (
            steps[seed].topology,
            steps[seed].cost,
            steps[seed].offload,
        )
    for step in steps:
        assert 1 <= step.lengths.min() <= step.lengths.max() <= min(LONGEST, step.topology.tokens)
        assert len(step.lengths) == 1 or step.topology.fewest_ranks(step.lengths).sum() <= MOST_MEMBERS
        assert lower_bound(step.ordered, step.topology, step.cost) > 0
    ranks = [step.topology.world_size for step in steps]
    assert min(ranks) < 4
    assert max(ranks) > 10_000
    assert sum(not step.topology.uniform for step in steps) > 10
    assert sum(step.offload is not None for step in steps) > 5
    assert {step.topology.ranks_per_node for step in steps} >= {None, 1, 8, 72}
    assert len({step.cost.message_ns for step in steps}) == 2
    assert sum(unit_bits(step.lengths, step.topology, step.cost) > 0 for step in steps) >= 2


def test_primes():
    from drawn_steps import prime_below

    assert [prime_below(n) for n in (1, 2, 3, 4, 10, 16_384)] == [1, 2, 3, 3, 7, 16_381]


@pytest.mark.parametrize(("documents", "ranks"), [(9, 8), (17, 8), (5, 4), (25, 8)])
def test_documents_that_do_not_divide_by_the_ranks_must_be_spread(documents, ranks):
    """Equal documents, whole ones on each rank, and what is left over split: no plan is better than the bound, and where
    splitting is dear, the bound says that it must be paid."""
    from planner_bound import reachable_bound

    lengths = np.full(documents, 1000)
    topology = Topology(ranks, 1000)
    dear = CostModel(attention_ps=1000, linear_ps=10**6, inside_ps=10**6, message_ns=200_000)
    free = CostModel(attention_ps=1000, linear_ps=10**6, inside_ps=0)
    for cost in (dear, free):
        bound = reachable_bound(lengths, topology, cost)
        for planner in ("hdp", "static_cp", "dynamic_cp", "bytescale_balanced", "dp_packing"):
            assert PLANNERS[planner](lengths, topology, cost, "async").timeline().makespan >= bound
    assert reachable_bound(lengths, topology, free) <= 1.001 * lower_bound(lengths, topology, free)
    bound = reachable_bound(lengths, topology, dear)
    extra = dear.work(1000, 2) - dear.work(1000, 1)
    assert (
        bound >= (documents * dear.work(1000, 1) + min(extra, dear.work(1000, 1)) * (documents % ranks)) / ranks * 0.99
    )


@pytest.mark.parametrize("speed", [None, (1000, 500, 1000, 500)])
def test_documents_that_need_more_than_half_of_all_ranks_run_one_after_another(speed):
    """Three of four ranks hold each: the fourth has nothing to do, and on unequal ranks a slow one is always waited for."""
    from planner_bound import reachable_bound

    cost = CostModel(attention_ps=1, linear_ps=10**6, inside_ps=0, message_ns=300_000)
    lengths, topology = np.full(5, 2500), Topology(4, 1000, speed=speed)
    bound = reachable_bound(lengths, topology, cost)
    plan = PLANNERS["hdp"](lengths, topology, cost, "async")
    assert bound <= plan.timeline().makespan <= 1.02 * bound
    loose = lower_bound(lengths, topology, cost)
    assert loose * 1.19 < bound


def test_no_plan_that_keeps_to_nodes_beats_their_bound():
    """Documents on 14 ranks take two nodes of 8, and of those on 5 no node holds two."""
    from drawn_steps import drawn
    from planner_bound import reachable_bound

    cost = CostModel(attention_ps=1000, linear_ps=10**6, inside_ps=0, message_ns=800_000)
    topology = Topology(56, 1000, ranks_per_node=8)
    for length in (13_500, 4_900):
        lengths = np.full(2100, length)  # so many lie as no other planner places them
        free, kept = (reachable_bound(lengths, topology, cost, in_nodes=nodes) for nodes in (False, True))
        assert free * 1.03 < kept <= plan_step(lengths, topology, cost).timeline().makespan
        enough = (free + kept) // 2
        assert reachable_bound(lengths, topology, cost, in_nodes=True, enough=enough) == enough
    keep = 0
    for seed in range(1, 60, 4):
        step = drawn(seed, most_ranks=64)
        step = replace(step, lengths=step.lengths[:150])
        topology = step.topology
        if not topology.uniform or topology.node_size == topology.world_size or step.offload is not None:
            continue
        plan = plan_step(step.lengths, topology, step.cost)
        nodes = np.add.reduceat(plan.rank % topology.node_size == 0, plan.first_member[:-1])
        last = np.maximum.reduceat(plan.rank, plan.first_member[:-1])
        ends = (last == topology.world_size - 1) | (last % topology.node_size == topology.node_size - 1)
        first = np.minimum.reduceat(plan.rank, plan.first_member[:-1])
        inside = first // topology.node_size == last // topology.node_size
        whole = (first % topology.node_size == 0) & ends & (nodes == -(-plan.members // topology.node_size))
        if (inside | whole).all():
            keep += 1
            bound = reachable_bound(step.ordered, topology, step.cost, in_nodes=True)
            assert plan.timeline().makespan >= bound, step
    assert keep > 2


def test_scales_never_sum_to_more_than_one():
    # Of any shares that sum to 1, also where they end on a step.
    from planner_boxes import SCALES, Mirror

    rng = np.random.default_rng(0)
    scales = (*SCALES, *map(Mirror, (1 / 2, 5 / 12, 0.43, 1 / 3, 0.3, 1 / 4, 0.21, 1 / 6)))
    for count in (1, 2, 3, 4, 6, 12, 30):
        drawn = rng.dirichlet(np.full(count, 0.5), 200)
        parts = rng.multinomial(12, np.full(count, 1 / count), 200) / 12
        for scale in scales:
            for shares in (drawn, parts):
                for whole in (1.0, 0.75, 5 / 16, 0.1):  # nor of what a last node has of one
                    most = scale(np.array([whole]))
                    assert (scale(whole * shares).sum(axis=1) <= most + 1e-9).all(), (scale, whole)


def test_boxes_that_are_left_out_change_no_least_area():
    from planner_boxes import SCALES, _useful

    rng = np.random.default_rng(0)
    sizes, node = np.arange(1, 31), 8
    for _ in range(20):
        time = rng.permuted(np.linspace(0.05, 1.5, 30))[None, :] * rng.choice([1, math.inf], (4, 30), p=[0.7, 0.3])
        time[0] = math.inf
        to_last = (sizes > node) & (rng.random(30) < 0.2)
        useful = _useful(time, to_last)
        assert useful.any(axis=1).all()
        assert useful.sum() < 60
        part = np.where(time <= 1, time, math.inf)
        for f in SCALES:
            for more in (0, 3):
                width = sizes // node + f(sizes % node / node) + more * to_last
                for g in SCALES:
                    finite = np.isfinite(part)
                    area = np.where(finite, width * g(np.where(finite, part, 0.0)), math.inf)
                    np.testing.assert_array_equal(np.where(useful, area, math.inf).min(axis=1), area.min(axis=1))


@pytest.mark.parametrize("seed", range(0, 42, 7))
def test_no_plan_of_unequal_ranks_beats_the_reachable_bound(seed):
    from drawn_steps import drawn
    from planner_bound import reachable_bound

    step = drawn(seed, most_ranks=64)
    assert not step.topology.uniform
    bound = reachable_bound(step.ordered, step.topology, step.cost)
    assert lower_bound(step.ordered, step.topology, step.cost) <= bound
    assert bound <= PLANNERS["hdp"](step.lengths, step.topology, step.cost, "async").timeline().makespan


def test_an_easy_step_has_many_documents_that_cost_little_to_split():
    from drawn_steps import DrawnStep
    from plan_limits import is_easy

    def easy(documents: int, bound: int, message_ns: int = 1000) -> bool:
        cost = CostModel(attention_ps=0, linear_ps=10**6, inside_ps=0, message_ns=message_ns)
        return is_easy(DrawnStep("", np.full(documents, 1000), Topology(4, 2000), cost), bound)

    # A second rank costs a document of 1,000 tokens two messages of 1,000 ns: 0.5 % of 400,000.
    assert easy(32, 400_001)
    assert not easy(31, 400_001)
    assert not easy(32, 400_000)
    assert not easy(32, 400_001, message_ns=1001)


def test_time_is_limited_by_the_size_of_the_step():
    from drawn_steps import DrawnStep
    from plan_limits import Judged, seconds_allowed

    def allowed(ranks: int, documents: int, mode: str = "async") -> float:
        step = DrawnStep("", np.full(documents, 2), Topology(ranks, 2), CostModel(1, 1, 1))
        return seconds_allowed(Judged(step, mode, plan_step(np.array([2]), Topology(1, 2), step.cost), 1, 0.0))

    assert allowed(256, 5000) == 0.010
    assert allowed(256, 5000, "lockstep") == 0.100
    assert allowed(257, 5000) == allowed(256, 5001) == allowed(16_384, 100_000) == 0.050
    assert allowed(16_384, 5, "lockstep") == 0.500
    assert allowed(16_385, 5) == allowed(2, 100_001) == np.inf


def test_ranks_meet_in_the_groups_of_a_document():
    from any_lengths import meetings

    topology, cost = Topology(6, 2), CostModel(attention_ps=1000, linear_ps=1, inside_ps=0)
    plans = [PLANNERS[name](np.array([5, 3, 2, 1]), topology, cost, "async") for name in ("hdp", "bytescale_naive")]
    expected = np.zeros((6, 6), bool)
    for plan in plans:
        for ranks in np.split(plan.rank, plan.first_member[1:-1]):
            for one, other in permutations(ranks.tolist(), 2):
                expected[one, other] = True
    np.testing.assert_array_equal(meetings(iter(plans), 6), expected)
    assert 0 < expected.sum() < 30


def test_figures_of_rows_search_and_meetings_are_those_of_the_targets(monkeypatch):
    import any_lengths
    from report import load_targets, sections

    row = any_lengths.Row("agents 40", any_lengths.trajectories(40), 8, 16_384)
    monkeypatch.setattr(any_lengths, "drawn", lambda seed: row.step(3e-5))
    report = any_lengths.Report()
    report.measure_rows([row])
    report.search(2)
    report.compare_groups(40)
    monkeypatch.setattr(any_lengths, "judge", lambda *_, **__: (_ for _ in ()).throw(ValueError("too long")))
    (refused,) = any_lengths.search_one(5)
    assert (refused.mode, refused.violations) == ("refused", ("ValueError: too long",))
    assert sections(report.rows, "batch").count("agents 40 on 8 x 16K, 3e-05 s a message") >= 4
    assert report.figures["any lengths/rows that cannot be planned"] == 0
    report.measure_rows([row])
    assert report.figures["any lengths/rows that cannot be planned"] == 2
    assert "refused" in sections(report.rows, "batch")
    targets = [target for target in load_targets()[0] if target.benchmark == "any_lengths"]
    assert len(targets) >= 8
    for target in targets:
        assert any(fnmatch(figure, target.figure) for figure in report.figures), target


def test_results_that_are_kept_are_not_computed_again(tmp_path, monkeypatch):
    import any_lengths

    kept = tmp_path / "draws.jsonl"
    monkeypatch.setattr(any_lengths, "warm_up", lambda: None)
    monkeypatch.setattr(
        any_lengths, "search_one", lambda seed: [any_lengths.Searched(f"seed {seed}", "async", 1.5, 1.1)]
    )
    first = list(any_lengths.searched(range(3), kept=kept))
    assert [result.step for result in first] == ["seed 0", "seed 1", "seed 2"]
    monkeypatch.setattr(any_lengths, "search_one", lambda seed: [any_lengths.Searched(f"again {seed}", "async")])
    assert list(any_lengths.searched(range(3), kept=kept)) == first
    assert [result.step for result in any_lengths.searched(range(4), kept=kept)][2:] == ["seed 2", "again 3"]
    kept.write_text(kept.read_text() + '{"seed": 4, "resu')  # killed while it wrote
    assert [result.step for result in any_lengths.searched(range(5), kept=kept)][3:] == ["again 3", "again 4"]
    kept.write_text("0" * 64 + kept.read_text()[64:])  # of other sources
    assert [result.step for result in any_lengths.searched(range(1), kept=kept)] == ["again 0"]
    kept.write_text("something else")
    with pytest.raises(ValueError, match="give another --kept"):
        next(any_lengths.searched(range(1), kept=kept))


def test_a_draw_is_explained(monkeypatch, capsys):
    import any_lengths
    import plan_limits

    no_time = {"async": 1e-9, "lockstep": 1e-9}  # so that it breaks a limit on any machine
    monkeypatch.setattr(plan_limits, "SIZES", [(*sizes[:3], no_time) for sizes in plan_limits.SIZES])
    monkeypatch.setattr(sys, "argv", ["any_lengths.py", "--seed", "2"])
    monkeypatch.setattr(any_lengths, "SEARCH_SECONDS", 2.0)
    assert any_lengths.main() in (0, 1)
    shown = capsys.readouterr().out
    assert shown.startswith("seed 2: ")
    assert "async: " in shown
    assert "lockstep: " in shown
    assert "a search of 2 s that may place ranks anywhere ends at" in shown
