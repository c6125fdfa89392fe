"""What benchmarks/planner.py compares: schedules of other packages replayed on equal terms, clocks that stop them, and every
figure that the targets name.
"""

import re
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings

from hf_longctx.planner import PLANNERS, CostModel, PlanError, Topology, lower_bound
from tests.builders.plans.random_plans import GPU_COST, lognormal_pareto, steps
from tests.worlds.fake_clock import FakeClock
from tests.worlds.patience import PATIENCE

LENGTHS = lognormal_pareto(300, 5, 60_000)
TOPOLOGY = Topology(16, 8192, ranks_per_node=8)


@pytest.fixture(autouse=True)
def benchmark_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Benchmarks are scripts: their folder is on the path while they run."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))


def compute_for_ever(*_: object) -> None:
    while True:
        sum(range(1000))


def tasks_of(plan):
    from planner_peers import Task

    members = np.split(plan.rank, plan.first_member[1:-1])
    documents = np.split(plan.doc, plan.first_document[1:-1])
    return [Task(docs.tolist(), ranks.tolist()) for docs, ranks in zip(documents, members)]


@pytest.mark.parametrize("planner", ["hdp", "bytescale_naive", "bytescale_balanced", "static_cp"])
def test_a_replayed_plan_takes_as_long_as_it_says(planner):
    """Groups of 8 at most: on one node, a ring of a document alone costs what the direct exchange costs."""
    from planner_peers import replay

    plan = PLANNERS[planner](LENGTHS, TOPOLOGY, GPU_COST, "async")
    if planner == "static_cp":
        assert (plan.members == 8).all()
    replayed = replay([tasks_of(plan)], LENGTHS, TOPOLOGY, GPU_COST)
    assert replayed.makespan == plan.timeline().makespan
    assert replayed.idle_share == plan.summary().idle_share


def test_phases_follow_each_other():
    from planner_peers import replay

    tasks = tasks_of(PLANNERS["hdp"](LENGTHS, TOPOLOGY, GPU_COST, "async"))
    one, other = tasks[: len(tasks) // 2], tasks[len(tasks) // 2 :]
    both = replay([one, other], LENGTHS, TOPOLOGY, GPU_COST)
    parts = []
    for phase in (one, other):
        kept = np.sort([document for task in phase for document in task.documents])
        renamed = [type(task)(np.searchsorted(kept, task.documents).tolist(), task.ranks) for task in phase]
        parts.append(replay([renamed], LENGTHS[kept], TOPOLOGY, GPU_COST))
    assert both.makespan == sum(part.makespan for part in parts)
    idle = sum(part.makespan * part.idle_share for part in parts) / both.makespan
    assert both.idle_share == pytest.approx(idle)
    assert both.idle_share > 0.1


@settings(max_examples=4 * settings().max_examples)
@given(steps(max_ranks=4, equal=True).filter(lambda step: len(step[0]) <= 12))
def test_no_plan_beats_the_reachable_bound(step):
    # Which is no lower than the planner's own.
    from planner_bound import reachable_bound

    lengths, topology, cost = step
    bound = reachable_bound(np.sort(lengths)[::-1], topology, cost)
    assert bound >= lower_bound(np.sort(lengths)[::-1], topology, cost)
    for planner in ("hdp", "bytescale_balanced"):
        assert PLANNERS[planner](lengths, topology, cost, "async").timeline().makespan >= bound


def test_the_bound_of_spreading_counts_the_ranks_that_a_document_needs():
    """One of half of all work on 16 ranks: two hold it, but more must share it, and each loses as much to short blocks. In time
    it needs 9, the others 2 each: 17 parts, each of more than half of the step, so one of them is spread further."""
    from planner_bound import reachable_bound, spread_bound

    cost = CostModel(attention_ps=1000, linear_ps=1, inside_ps=0, attention_half_tokens=500)
    lengths = np.array([10_000] + [5_000] * 4)
    topology = Topology(16, 5_000)
    loose, reachable = lower_bound(lengths, topology, cost), spread_bound(lengths, topology, cost)
    assert loose == (10_000 * (10_000 + 2 * 500) + 4 * 5_000 * (5_000 + 500)) // 16 + 1
    assert loose * 1.1 < reachable
    for end in (reachable - reachable // 500, reachable + reachable // 500):
        ranks = [-(-length * length // (end - 500 * length)) for length in lengths]
        work = sum(int(cost.work(length, size)) for length, size in zip(lengths, ranks))
        assert sum(ranks) == 17
        more = [cost.work(length, size + 1) - cost.work(length, size) for length, size in zip(lengths, ranks)]
        work += min(added / size for added, size in zip(more, ranks))
        assert (work <= 16 * end) == (end > reachable)
    assert reachable_bound(lengths, topology, cost) >= reachable


def test_a_schedule_that_loses_or_overfills_is_refused():
    from planner_peers import Task, replay

    lengths, topology = np.array([5, 3, 4]), Topology(2, 8)
    with pytest.raises(ValueError, match="document 1 is scheduled 0 times; every document"):
        replay([[Task([0, 2], [0, 1])]], lengths, topology, GPU_COST)
    with pytest.raises(ValueError, match="document 2 is scheduled 2 times"):
        replay([[Task([0, 2], [0, 1])], [Task([1, 2], [0])]], lengths, topology, GPU_COST)
    with pytest.raises(PlanError, match="holds 9 tokens: a rank holds at most 8"):
        replay([[Task([0, 2], [0]), Task([1], [1])]], lengths, topology, GPU_COST)


def test_megatrons_ranks_share_the_documents_that_they_both_list():
    from planner_peers import Task, megatron_phases

    returned = [[[3], [3], [0, 1, 4], [2]], [[], [5], [5], []]]
    phases = megatron_phases(returned, np.array([4, 8, 7, 16, 3, 9]), Topology(4, 8))
    assert phases == [[Task([3], [0, 1]), Task([1], [2]), Task([0, 4], [2]), Task([2], [3])], [Task([5], [1, 2])]]


def test_verls_ranks_are_ulysses_groups_that_pack():
    from planner_peers import Task, ulysses_degree, verl_phases

    topology = Topology(6, 8)
    assert [ulysses_degree(longest, topology) for longest in (8, 9, 16, 17, 25, 48)] == [1, 2, 2, 3, 6, 6]
    lengths = np.array([17, 9, 8, 7, 2])
    assert verl_phases([[0, 3, 4], [1, 2]], lengths, topology) == [
        [Task([0, 3], range(3)), Task([4], range(2)), Task([1, 2], range(3, 6))]
    ]


def test_a_clock_stops_what_computes_too_long():
    from planner_peers import within

    before = signal.getsignal(signal.SIGPROF)
    with pytest.raises(TimeoutError, match=r"more than 0\.1 s"), within(0.1):
        compute_for_ever()
    with within(0.1):
        assert 0 < signal.getitimer(signal.ITIMER_PROF)[0] <= 0.11  # it ticks every 4 ms or 10
        time.sleep(0.2)  # does not compute
    assert signal.getsignal(signal.SIGPROF) == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)


def test_peers_that_are_not_installed_are_asked_for(monkeypatch, tmp_path):
    import planner_peers

    monkeypatch.setattr(planner_peers, "INSTALLED", tmp_path)
    with pytest.raises(
        ImportError, match=r"megatron-core and verl are not in .*; run scripts/setup_bench.sh, or --no-peers"
    ):
        planner_peers.installed_peers()


@pytest.mark.processes
def test_a_case_is_measured_with_all_that_plan_it(monkeypatch):
    """With a peer that deals documents to ranks in turn, and one that is stopped; by a clock on which that takes 100 seconds and
    all others take one."""
    from fnmatch import fnmatch

    import planner
    from planner_peers import Peer, Task
    from report import load_targets, table

    case, costs = planner.Case("byted", 150, 16), {"rich": planner.cost_models()["rich"]}
    whole = np.where(case.lengths <= case.capacity, 1, 16)

    def in_turn(lengths: list[int], topology: Topology) -> list[Task]:
        ranks = [range(16) if size > 1 else [index % 16] for index, size in enumerate(whole)]
        return [Task([index], group) for index, group in enumerate(ranks)]

    clock = FakeClock()

    def look() -> float:
        clock.sleep(1.0)
        return clock.now()

    def never(*_: object) -> None:
        clock.sleep(99.0)
        raise TimeoutError("more than 100 s")

    monkeypatch.setattr(planner, "time", SimpleNamespace(**vars(time) | {"thread_time": look}))
    peers = [Peer("in turn", in_turn, lambda tasks, *_: [tasks]), Peer("never", never, lambda *_: [])]
    measured = planner.measure(case, costs, peers, repeats=2, seconds=PATIENCE, draws=2)
    names = [f"{planner_name} {mode}" for planner_name, mode in planner.CONTENDERS] + ["in turn", "never"]
    assert [(row["costs"], row["planner"]) for row in measured.rows] == [
        (kind, name) for kind in costs for name in names
    ]
    assert len(table(measured.rows).splitlines()) == 2 + len(measured.rows)
    assert len(measured.cannot) == 2  # packing and the second peer
    of = f"{case}/rich/"
    assert measured.figures[of + "in turn/makespan over ours"] > 1.2
    assert measured.figures[of + "never/planning CPU over ours, at least"] == 100
    for figure, value in measured.figures.items():
        assert value >= 1 or "over the lower bound" not in figure
    figures = [*measured.figures, planner.LAYOUT]
    assert planner.layout_milliseconds(repeats=1) > 0
    for target in load_targets()[0]:
        if target.benchmark == "planner" and not target.figure.startswith("any lengths/"):
            anywhere = re.sub(r"/\d+ documents on \d+ ranks/", "/*/", target.figure)
            for distribution in ("byted", "github", "lognormal_pareto"):
                anywhere = anywhere.replace(distribution, "byted")
            assert any(fnmatch(figure, anywhere) for figure in figures), target


def test_sizes_are_documents_times_ranks(monkeypatch, capsys):
    import planner

    monkeypatch.setattr(sys, "argv", ["planner.py", "--sizes", "20x4", "7x2", "--distributions", "github"])
    _, cases = planner._arguments()
    assert [str(case) for case in cases] == ["github/20 documents on 4 ranks", "github/7 documents on 2 ranks"]
    assert cases[0].lengths.max() <= 4 * 8192
    monkeypatch.setattr(sys, "argv", ["planner.py", "--sizes", "20"])
    with pytest.raises(SystemExit):
        planner._arguments()
    assert "--sizes 20 must be documents x ranks" in capsys.readouterr().err
