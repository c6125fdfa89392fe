"""Today's plans beside an earlier commit's: what benchmarks/planner_before.py hands over, noise, and steps that train them."""

import sys
from dataclasses import fields
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings

from hf_longctx.planner import CostModel, Topology, plan_step
from tests.builders.plans.random_plans import GPU_COST, lognormal_pareto, steps

ROOT = Path(__file__).parents[2]
LENGTHS = lognormal_pareto(60, 5, 60_000)
TOPOLOGY = Topology(16, 8192, ranks_per_node=8)


@pytest.fixture(autouse=True, scope="module")
def benchmark_modules():
    """Benchmarks are scripts: their folder is on the path while they run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield


def targets_of(benchmark: str) -> list[str]:
    from report import load_targets

    patterns = [target.figure for target in load_targets()[0] if target.benchmark == benchmark]
    assert patterns
    return patterns


@settings(max_examples=max(10, settings().max_examples // 2))
@given(steps(equal=True))
def test_without_noise_plans_take_what_they_say(step):
    from planner_before import with_times

    for mode in ("async", "lockstep"):
        plan = plan_step(*step, mode)
        counted = with_times(plan, step[2], np.ones(len(plan.doc)))
        # Floating point adds up what documents take, to 53 bits.
        np.testing.assert_allclose(counted.cost, plan.cost, rtol=1e-12, atol=0.5)
        assert counted.digest() == plan.digest()


def test_noise_is_of_documents_and_a_round_waits_for_its_slowest():
    from planner_before import with_times
    from planner_noise import factors_of, noisy_makespans

    plan = plan_step(LENGTHS, TOPOLOGY, GPU_COST, "lockstep")
    factors = factors_of(len(LENGTHS), 3)
    assert 0.03 < np.log(factors).std() < 0.07
    np.testing.assert_array_equal(factors, factors_of(len(LENGTHS), 3))
    slowest: dict[int, float] = {}
    for i, round in enumerate(plan.round.tolist()):
        here = range(plan.first_document[i], plan.first_document[i + 1])
        took = dict.fromkeys(plan.rank[plan.first_member[i] : plan.first_member[i + 1]].tolist(), 0.0)
        for j in here:
            for rank in took if plan.holder[j] < 0 else [int(plan.holder[j])]:
                spread = len(took) if plan.holder[j] < 0 else 1
                took[rank] += GPU_COST.time(int(plan.length[j]), spread) * factors[plan.doc[j]]
        slowest[round] = max(slowest.get(round, 0), GPU_COST.micro_batch_ns + max(took.values()))
    noisy = with_times(plan, GPU_COST, factors).timeline().makespan
    assert noisy == pytest.approx(sum(slowest.values()), rel=1e-9)
    assert noisy_makespans(plan, GPU_COST, 4)[3] == noisy


@pytest.mark.processes
def test_another_package_plans_in_its_own_process(monkeypatch):
    """With today's package, in place of an earlier one: the same plans come back."""
    import planner_before

    monkeypatch.setattr(planner_before, "package_of", lambda commit: ROOT)
    modes = ("async", "lockstep")
    plans = planner_before.plans_before([planner_before.Wanted(LENGTHS, TOPOLOGY, GPU_COST, mode) for mode in modes])
    for mode, plan in zip(modes, plans, strict=True):
        expected = plan_step(LENGTHS, TOPOLOGY, GPU_COST, mode)
        assert plan is not None
        assert plan.digest() == expected.digest()
        np.testing.assert_allclose(plan.cost, expected.cost, atol=1)


@pytest.mark.processes
def test_a_commit_that_is_not_there_is_named(monkeypatch, tmp_path):
    import planner_before

    monkeypatch.setattr(planner_before, "PLANNERS", tmp_path)
    with pytest.raises(FileNotFoundError):
        planner_before.package_of("no-such-commit")
    (tmp_path / "there" / "hf_longctx").mkdir(parents=True)
    assert planner_before.package_of("there") == tmp_path / "there"


def test_figures_of_noise_are_those_of_the_target(monkeypatch):
    import planner_noise
    from planner_cases import MIXTURES, cases
    from report import sections

    def same(wanted, commit):
        return [plan_step(step.lengths, step.topology, step.cost, step.mode) for step in wanted]

    monkeypatch.setattr(planner_noise, "plans_before", same)
    rows, figures = planner_noise.measured(cases(["40x8"], MIXTURES), draws=2)
    assert len(rows) == len(MIXTURES) * 2 * 2
    assert "40 documents on 8 ranks" in sections(rows, "batch")
    assert set(figures.values()) == {1.0}
    for pattern in targets_of("planner_noise"):
        assert sum(fnmatch(figure, pattern) for figure in figures) == len(MIXTURES) * 2


def test_figures_of_labels_are_those_of_the_target():
    import planner_labels

    rows, figures = planner_labels.measured(60, draws=1)
    for pattern in targets_of("planner_labels"):
        assert len(rows) == sum(fnmatch(figure, pattern) for figure in figures) == 8
    assert all(0.95 < ratio < 1.3 for ratio in figures.values())


# trajectory_steps.py


def plans_for(trained, ranks: int, mode: str, cost: CostModel = GPU_COST):
    topology = Topology(ranks, trained.capacity(ranks))
    return tuple(plan_step(trained.lengths(batch), topology, cost, mode) for batch in trained.batch)


def test_each_batch_is_trained_by_both_plans():
    from trajectory_steps import OLDER, TODAY, trajectory_steps

    trained = trajectory_steps(3, 8)
    assert trained.batch == (0, 0, 0, 1, 1, 2, 2)
    assert trained.planner[1:] == (TODAY, OLDER, OLDER, TODAY, TODAY, OLDER)
    assert trained.of(OLDER, 1) == 2
    assert trained.of(TODAY, 1) == 3
    assert 100 < np.median(trained.case.lengths) < 1200
    assert 4 * trained.capacity(4) >= max(trained.case.lengths) > 4 * (trained.capacity(4) - 1)
    assert trained.case.steps[0] == trained.case.steps[1] != trained.case.steps[3]
    splits = [plan.summary().split_documents for plan in plans_for(trained, 4, "async")]
    assert min(splits) >= 4


def test_seconds_of_both_plans_are_compared_with_one_process():
    from training_ranks import Run
    from trajectory_steps import Way, summarise, trajectory_steps

    trained = trajectory_steps(2, 4)
    ranks = {2: "async", 4: "lockstep"}

    def of(seconds: list[float], loss: float = 4.0) -> Run:
        return Run(seconds, 1.0, [loss] * 5, [1.0] * 5, 1, None)

    figures = {}
    for count, mode in ranks.items():
        way = Way(count, mode, plans_for(trained, count, mode))
        # Steps: today's and older of batch 0, older and today's of batch 1; the slowest rank counts, and medians of rounds.
        rounds = [[of([1.0, 2.0, 3.0, 1.0]), of([2.0, 1.0, 1.0, 1.0])], [of([2.0, 2.0, 3.0, 1.0])] * 2] * 2
        summary = summarise(trained, way, rounds, [of([5.0, 7.0, 8.0, 4.0], 4.0 * (1 + 1e-6))], 2e-7)
        assert summary["speed over one process's"] == pytest.approx((6 + 6) / 3)
        assert summary["older planner's speed over one process's"] == pytest.approx((6 + 6) / 5)
        assert summary["older over today's seconds, measured"] == pytest.approx(5 / 3)
        assert summary["older over today's seconds, predicted"] == 1
        assert summary["difference of loss"] == pytest.approx(1e-6, rel=1e-3)
        assert summary["difference of gradient"] == 2e-7
        assert summary["CPU of all ranks over one process's"] == 2
        figures |= {f"{way}/{name}": value for name, value in summary.items()}
    for pattern in targets_of("trajectory_steps"):
        assert any(fnmatch(figure, pattern) for figure in figures), pattern


def test_gradients_are_compared_step_by_step(tmp_path):
    from trajectory_steps import difference_of_gradients

    trained, exact = tmp_path / "found", tmp_path / "exact"
    for folder, gradient in ((trained, [1.0, -4.1]), (exact, [1.0, -4.0])):
        folder.mkdir()
        np.save(folder / "0.npy", np.array([3.0, 2.0]))
        np.save(folder / "1.npy", np.array(gradient))
    assert difference_of_gradients(trained, exact) == pytest.approx(0.1 / 4)
    (trained / "1.npy").unlink()
    with pytest.raises(ValueError, match="gradients of steps"):
        difference_of_gradients(trained, exact)


def test_given_plans_are_trained_and_their_gradients_written(tmp_path, monkeypatch):
    """One rank that holds a document after the other, or all of them at once: the gradient is plain Trainer's."""
    import training_ranks
    from training_cases import Case
    from training_peers import Settings
    from trajectory_steps import difference_of_gradients

    case = Case("few", (9, 30, 5, 17), ((0, 1), (0, 1), (2, 3)), 64)
    monkeypatch.setattr(training_ranks, "logging", SimpleNamespace(disable=lambda level: None, WARNING=0))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    cost = CostModel(attention_ps=1, linear_ps=1000, inside_ps=1)
    plans = tuple(
        plan_step(np.array([case.lengths[document] for document in step]), Topology(1, capacity), cost)
        for step, capacity in zip(case.steps, (30, 64, 17))
    )
    assert [len(plan.cost) for plan in plans] == [2, 1, 2]
    losses = []
    for way, given_plans in (("ours", plans), (training_ranks.ONE_PROCESS, ())):
        folder = tmp_path / way
        folder.mkdir()
        chosen = Settings(64, plans=given_plans, learning_rate=0.0, gradients=str(folder))
        losses.append(training_ranks._train(way, case, chosen).losses)
    assert len(losses[0]) == 3
    np.testing.assert_allclose(*losses, rtol=1e-5)  # float32
    assert difference_of_gradients(tmp_path / "ours", tmp_path / training_ranks.ONE_PROCESS) < 1e-5


def test_settings_of_older_packages_are_left_out():
    from planner_before import _known

    kept = _known(Topology, {"world_size": 2, "capacity": 3, "of_tomorrow": 1})
    assert Topology(**kept) == Topology(2, 3)
    assert {field.name for field in fields(CostModel)} == set(_known(CostModel, vars_of(GPU_COST)))


def vars_of(cost: CostModel) -> dict[str, object]:
    return {field.name: getattr(cost, field.name) for field in fields(cost)}


def test_each_script_offers_its_options(monkeypatch, capsys):
    import planner_labels
    import planner_noise
    import trajectory_steps

    wrong_options = {planner_noise: "--draws", trajectory_steps: "--rounds", planner_labels: "--documents"}
    for script, option in wrong_options.items():
        wrong = [option, "0"]
        monkeypatch.setattr(sys, "argv", [f"{script.__name__}.py", *wrong])
        with pytest.raises(SystemExit):
            script._arguments()
        assert "must be at least 1" in capsys.readouterr().err
