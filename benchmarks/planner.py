"""How good plans are, how long planning takes, and how much memory: ours, baselines, Megatron-Core's and verl's.

    python benchmarks/planner.py --json benchmarks/results/planner.json --check                      # 10 minutes on two cores
    python benchmarks/planner.py --sizes 1000x64 --repeats 3 --no-peers --any-lengths 0 --before ''  # a quick look

Three distributions of lengths (simulator/lengths.py) in three sizes of documents x ranks, ranks in nodes of 8, and two
cost models of a 7B model: `rich`, with all coefficients of planner.GPU, and `plain`, T(s) = a*s^2 + b*s + g
with one kind of link, in the ratios that verl (b = 24576 a) and ByteScale (exchange = 4388 a per token) report.

- makespan / lower bound: of the predicted step, planner/bound.py's bound of each mode; 1.00 is perfect. Lockstep ends every round
  with its slowest rank, and has a bound of its own; the pipeline has 4 stages.
- / reachable bound: the same over planner_bound.py's bound, which knows that long documents cannot stay on few ranks.
- worst of draws: the worst makespan / lower bound of --draws batches of the same distribution.
- idle: share of all ranks' time spent waiting.
- exchanged, redundant: keys and values that travel, per token of the batch, and what of it fewer ranks would have saved.
- planning: milliseconds from lengths to plan, medians after a warm-up, on one core: CPU time, which a busy
  machine disturbs little, and wall-clock time. All planners and schedulers take turns, starting with another one in each
  round; what computes longer than --seconds is stopped, and what has taken 3 s in total is not repeated.
- any lengths: rows of agent trajectories and others, a random search, and ranks met (any_lengths.py).
- noise: documents that take longer or shorter than predicted, beside an earlier commit's planner (planner_noise.py).
- memory: the largest resident set of a fresh process while it plans, beyond what it held after its imports and a small
  plan.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from multiprocessing import get_context
from multiprocessing.queues import Queue
from typing import Any

import any_lengths
import numpy as np
import planner_noise
from peak_memory import peak_bytes_of
from planner_before import BEFORE_ANY_LENGTHS
from planner_bound import reachable_bound
from planner_cases import MIXTURES, RANKS_PER_NODE, SIZES, Case, cases, cost_models
from planner_peers import Peer, installed_peers, replay, within
from report import conclude, parser

from hf_longctx.planner import PLANNERS, CostModel, Mode, PlanError, StepPlan, Topology, lower_bound, plan_step
from hf_longctx.simulator.lengths import DISTRIBUTIONS, distribution_name

ENOUGH = 3.0
"""CPU seconds of all timed calls of a contender, after which it is not called again."""
CONTENDERS: list[tuple[str, Mode]] = [
    ("hdp", "async"),
    ("hdp", "lockstep"),
    ("hdp", "pipeline"),
    *((name, "async") for name in PLANNERS if name != "hdp"),
]

BALANCE, REACHABLE = "makespan over the lower bound", "makespan over the reachable bound"
PLANNING = "planning CPU ms"
LAYOUT = "layout of 1000 documents on 64 ranks/CPU ms"
COLUMNS = {
    "makespan / bound": (BALANCE, ".3f"),
    "/ reachable bound": (REACHABLE, ".3f"),
    "worst of draws": ("worst of draws", ".3f"),
    "idle": ("idle share", ".1%"),
    "exchanged": ("exchanged per token", ".2f"),
    "redundant": ("redundant per token", ".2f"),
    "planning CPU ms": (PLANNING, ".1f"),
    "wall ms": ("planning wall ms", ".1f"),
    "makespan / ours": ("makespan over ours", ".2f"),
    "planning / ours": ("planning CPU over ours", ".1f"),
    "memory MB": ("memory MB", ".1f"),
}
"""Column -> figure, and how it is written."""


@dataclass
class Contender:
    """Something that plans a case, and what was measured of it."""

    name: str
    kind: str | None
    """Of costs. None: it has none, and its schedule is replayed with each."""
    plan: Callable[[], Any]
    quality: Callable[[Any, CostModel], dict[str, float]]
    """Figures of what `plan` returned."""
    result: Any = None
    """Of the last call that ended."""
    failure: str | None = None
    cpu: list[float] = field(default_factory=list)
    """Seconds of each timed call."""
    wall: list[float] = field(default_factory=list)

    def run(self, seconds: float, timed: bool) -> None:
        """Plans once, for at most so many CPU seconds. A warm-up is not timed, but where it takes long enough to say it all."""
        if self.failure or sum(self.cpu) > ENOUGH:
            return
        # The clock of the process ticks only every 4 ms while `within` has a timer on it; that of the thread does not.
        cpu, wall = time.thread_time(), time.perf_counter()
        try:
            with within(seconds):
                self.result = self.plan()
        except (PlanError, TimeoutError, MemoryError, AssertionError) as error:
            self.failure = f"{type(error).__name__}: {error}"
            timed = isinstance(error, TimeoutError)
        spent = time.thread_time() - cpu
        if timed or spent > ENOUGH:
            self.cpu.append(spent)
            self.wall.append(time.perf_counter() - wall)


def measure(
    case: Case, costs: dict[str, CostModel], peers: list[Peer], repeats: int, seconds: float, draws: int
) -> Measured:
    """Everything about a case."""
    contenders = [
        Contender(
            name=f"{planner} {mode}",
            kind=kind,
            plan=partial(PLANNERS[planner], case.lengths, case.topology(mode), cost, mode),
            quality=partial(_of_plan, case, draws),
        )
        for kind, cost in costs.items()
        for planner, mode in CONTENDERS
    ]
    contenders += [
        Contender(
            name=peer.name,
            kind=None,
            plan=partial(peer.schedule, case.lengths.tolist(), case.topology()),
            quality=partial(_of_peer, case, peer),
        )
        for peer in peers
    ]
    for repeat in range(repeats + 1):
        for index in range(len(contenders)):
            contenders[(index + repeat) % len(contenders)].run(seconds, timed=repeat > 0)
    measured = Measured(case)
    for kind, cost in costs.items():
        for contender in contenders:
            if contender.kind in (kind, None):
                measured.add(kind, contender, cost)
    return measured


def _of_plan(case: Case, draws: int, plan: StepPlan, cost: CostModel) -> dict[str, float]:
    plan.check(case.lengths)
    summary = plan.summary()
    figures = {
        BALANCE: summary.balance,
        "idle share": summary.idle_share,
        "exchanged per token": summary.exchanged_tokens / summary.tokens,
        "redundant per token": summary.redundant_tokens / summary.tokens,
    }
    if plan.planner == "hdp" and plan.mode != "pipeline":
        others = (replace(case, seed=seed) for seed in range(1, draws))
        balances = [
            PLANNERS["hdp"](other.lengths, plan.topology, cost, plan.mode).summary().balance for other in others
        ]
        figures["worst of draws"] = max([summary.balance, *balances])
    if plan.mode == "async":
        figures[REACHABLE] = summary.makespan / reachable_bound(np.sort(case.lengths)[::-1], plan.topology, cost)
    if (plan.planner, plan.mode) == ("hdp", "async"):
        with ProcessPoolExecutor(1, get_context("spawn")) as fresh:
            figures["memory MB"] = fresh.submit(peak_bytes_of_planning, case, cost).result() / 1e6
    return figures


def _of_peer(case: Case, peer: Peer, returned: Any, cost: CostModel) -> dict[str, float]:
    lengths, topology = case.lengths, case.topology()
    replayed = replay(peer.phases(returned, lengths, topology), lengths, topology, cost)
    ordered = np.sort(lengths)[::-1]
    return {
        BALANCE: replayed.makespan / lower_bound(ordered, topology, cost),
        REACHABLE: replayed.makespan / reachable_bound(ordered, topology, cost),
        "idle share": replayed.idle_share,
    }


def peak_bytes_of_planning(case: Case, cost: CostModel) -> int:
    """Beyond what this process held after a small plan."""
    plan_step = PLANNERS["hdp"]
    lengths, topology = case.lengths, case.topology()
    plan_step(lengths[:100], Topology(256, case.capacity, ranks_per_node=RANKS_PER_NODE), cost, "async")
    return peak_bytes_of(lambda: plan_step(lengths, topology, cost, "async"))[0]


class Measured:
    """Rows of the table, figures, and what could not be done, of one case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rows: list[dict[str, str]] = []
        self.figures: dict[str, float] = {}
        self.cannot: list[str] = []

    def add(self, kind: str, contender: Contender, cost: CostModel) -> None:
        ours = f"{self.case}/{kind}/hdp async/"
        figures: dict[str, float] = {}
        remark = ""
        if contender.failure is not None:
            self.cannot.append(f"{self.case}/{kind}/{contender.name}: {contender.failure}")
            remark = "cannot: " + contender.failure.partition(";")[0]
            if contender.cpu and ours + PLANNING in self.figures:
                figures["planning CPU over ours, at least"] = contender.cpu[0] * 1e3 / self.figures[ours + PLANNING]
                remark += f", {figures['planning CPU over ours, at least']:.0f} times ours"
        else:
            figures = contender.quality(contender.result, cost)
            figures[PLANNING] = statistics.median(contender.cpu) * 1e3
            figures["planning wall ms"] = statistics.median(contender.wall) * 1e3
            if not contender.name.startswith("hdp") and ours + BALANCE in self.figures:
                figures["makespan over ours"] = figures[BALANCE] / self.figures[ours + BALANCE]
                figures["planning CPU over ours"] = figures[PLANNING] / self.figures[ours + PLANNING]
        cells = {
            column: format(figures[figure], form) if figure in figures else ""
            for column, (figure, form) in COLUMNS.items()
        }
        row = {"batch": str(self.case), "costs": kind, "planner": contender.name}
        self.rows.append(row | cells | {"remark": remark})
        self.figures |= {f"{self.case}/{kind}/{contender.name}/{figure}": value for figure, value in figures.items()}


def main() -> int:
    arguments, cases = _arguments()
    if not arguments.no_peers:
        installed_peers()  # or say at once what is missing
    load = os.getloadavg()[0]
    report = any_lengths.Report()
    if arguments.any_lengths:
        print("any lengths ...", file=sys.stderr)
        report = any_lengths.measured(arguments.any_lengths, processes=os.cpu_count() or 1)
    rows: list[dict[str, str]] = []
    figures: dict[str, float] = {}
    cannot: list[str] = []
    largest_first = sorted(cases, key=lambda case: -case.documents)  # so that no process is left alone with one of them
    spawn = get_context("spawn")
    cores: Queue[int] = spawn.Queue()
    for core in islice(cycle(sorted(usable_cores())), arguments.processes + 1):
        cores.put(core)
    with ProcessPoolExecutor(arguments.processes, spawn, stay_on, (cores,)) as pool:
        measured_cases = dict(zip(map(str, largest_first), pool.map(partial(measured_apart, arguments), largest_first)))
    for case in cases:
        measured = measured_cases[str(case)]
        rows += measured.rows
        figures |= measured.figures
        cannot += measured.cannot
    stay_on(cores)
    rows += report.rows
    figures |= report.figures
    figures[LAYOUT] = layout_milliseconds(arguments.repeats)
    also = ["any_lengths"] if arguments.any_lengths else []
    if arguments.before:
        print("noise ...", file=sys.stderr)
        noisy = planner_noise.measured(cases, commit=arguments.before)
        rows, figures, also = rows + noisy[0], figures | noisy[1], [*also, "planner_noise"]
    return conclude(arguments, rows, figures, load, section="batch", also=also, cannot=cannot)


def measured_apart(arguments: argparse.Namespace, case: Case) -> Measured:
    """Measure a case in a process that may have others beside it."""
    print(f"{case} ...", file=sys.stderr)
    costs = {name: cost for name, cost in cost_models().items() if name in arguments.costs}
    peers = [] if arguments.no_peers else installed_peers()
    return measure(case, costs, peers, arguments.repeats, arguments.seconds, arguments.draws)


def usable_cores() -> Iterable[int]:
    """Cores that this process may be on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def stay_on(cores: Queue[int]) -> None:
    """Keep this process on the next of these cores."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {cores.get()})


def layout_milliseconds(repeats: int) -> float:
    """CPU milliseconds of the layouts that one rank of inference makes of so many documents, and of their plan; median."""
    lengths = np.maximum(np.random.default_rng(0).lognormal(7.6, 1.6, 1000), 1).astype(int)
    topology, cost = Topology(64, int(lengths.sum())), cost_models()["rich"]
    taken = []
    for _ in range(repeats):
        begin = time.process_time()
        plan_step(lengths, topology, cost).layouts(0)
        taken.append(time.process_time() - begin)
    return statistics.median(taken) * 1e3


def _arguments() -> tuple[argparse.Namespace, list[Case]]:
    options = parser(__doc__)
    options.add_argument(
        "--distributions", nargs="+", type=distribution_name, choices=list(DISTRIBUTIONS), default=MIXTURES
    )
    options.add_argument("--sizes", nargs="+", default=SIZES, metavar="DOCUMENTSxRANKS", help="default: %(default)s")
    options.add_argument("--costs", nargs="+", choices=["rich", "plain"], default=["rich", "plain"])
    options.add_argument(
        "--processes", type=int, default=os.cpu_count() or 1, help="cases at a time (default: %(default)s)"
    )
    options.add_argument("--repeats", type=int, default=15, help="medians of so many (default: %(default)s)")
    options.add_argument(
        "--seconds", type=float, default=20, help="CPU seconds that one call may take (default: %(default)s)"
    )
    options.add_argument("--draws", type=int, default=5, help="batches of each distribution (default: %(default)s)")
    options.add_argument("--no-peers", action="store_true", help="without Megatron-Core and verl")
    options.add_argument(
        "--any-lengths",
        type=int,
        default=100,
        metavar="DRAWS",
        help="of the random search of any_lengths.py; 0: nothing of that module (default: %(default)s)",
    )
    options.add_argument(
        "--before",
        default=BEFORE_ANY_LENGTHS,
        metavar="COMMIT",
        help="whose planner ours is compared with under noise; '': nothing of planner_noise.py (default: %(default)s)",
    )
    arguments = options.parse_args()
    if min(arguments.repeats, arguments.draws, arguments.processes) < 1 or arguments.seconds <= 0:
        options.error("--repeats, --draws and --processes must be at least 1, --seconds positive")
    if arguments.any_lengths < 0:
        options.error("--any-lengths must be at least 0")
    try:
        return arguments, cases(arguments.sizes, arguments.distributions)
    except ValueError as error:
        options.error(f"--sizes {error}")


if __name__ == "__main__":
    sys.exit(main())
