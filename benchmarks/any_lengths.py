"""Plans of any lengths: rows that once went wrong, a random search over lengths and clusters, groups of other kinds, meetings.

    python benchmarks/any_lengths.py --json FILE --check any-lengths       # all of it, 2,000 draws
    python benchmarks/any_lengths.py --processes 2 --kept FILE    # the same; if it is stopped, it goes on where it was
    python benchmarks/any_lengths.py --seed 1234                  # plan one draw of the search again, and say all about it
    python benchmarks/any_lengths.py --rows agents --draws 0      # a quick look

`planner.py` runs the same with fewer draws. The search draws steps by drawn_steps.py and holds their plans to plan_limits.py;
each draw depends on its seed alone, and every limit that a plan breaks is printed with seed and figures. Planners that may
take more than a second are compared with on every 20th draw.

CPU times are of compiled code on one core, the least of up to three calls.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from drawn_steps import MESSAGE_SECONDS, DrawnStep, cost_of, drawn
from plan_limits import Judged, judge
from planner_search import searched as searched_for
from report import conclude, parser

import hf_longctx
from hf_longctx.planner import StepPlan, Topology, plan_step, planners_for
from hf_longctx.simulator.lengths import draw

RANKS_PER_NODE = 8
SLOW_EVERY = 20
"""Draws of which one is compared with slow planners too."""
EVERY = 200
"""Plans after which a line says how far the search is."""
WORST = 10
STEPS = 100
"""Whose meetings are counted."""
SEARCH_SECONDS = 60.0
"""That a plan of one draw, asked for by --seed, is searched for where it breaks a limit."""
WARM_UP = 2
"""A seed: of few documents, in every mode."""
TABLE = "any lengths"
CELLS = ("mode", "makespan / bound", "/ limit", "planning CPU ms", "members", "best other plan / bound")
"""Of a row of it."""
CONTEXT = 131_072
"""Tokens of the longest trajectory in the recipe that groups are compared on."""
GROUPS = {
    "static_cp_unpacked": "static groups of 16, unpacked",
    "static_cp": "static groups of 16, packed",
    "dynamic_cp": "powers of two for each micro-batch",
}
"""Planner -> what it is there."""


@dataclass(frozen=True)
class Row:
    """A global batch of the table."""

    name: str
    lengths: Callable[[], np.ndarray]
    ranks: int
    capacity: int

    def step(self, message_seconds: float) -> DrawnStep:
        """The row as a step of nodes of 8."""
        name = f"{self.name} on {self.ranks} x {self.capacity // 1024}K, {message_seconds:g} s a message"
        topology = Topology(self.ranks, self.capacity, ranks_per_node=RANKS_PER_NODE)
        return DrawnStep(name, self.lengths(), topology, cost_of(message_seconds, RANKS_PER_NODE))


def trajectories(documents: int, seed: int = 0) -> Callable[[], np.ndarray]:
    """Lengths of agent trajectories."""
    return lambda: draw("agent_trajectories", documents, seed)


def few_long_many_short(documents: int) -> Callable[[], np.ndarray]:
    """0.2 % of 0.5M to 2M tokens, the others of 20 to 600, both uniform."""

    def lengths() -> np.ndarray:
        rng = np.random.default_rng(0)
        long = rng.random(documents) < 0.002
        return np.where(long, rng.integers(500_000, 2_000_001, documents), rng.integers(20, 601, documents))

    return lengths


def wide_lognormal(documents: int) -> Callable[[], np.ndarray]:
    """Median 2,500, sigma 1.6, up to 4.1M tokens."""
    return lambda: np.clip(np.random.default_rng(0).lognormal(np.log(2500), 1.6, documents), 1, 4_100_000).astype(
        np.int64
    )


K = 1024
ROWS = (
    *(Row(f"agents 5000, draw {seed}", trajectories(5000, seed), 256, 16 * K) for seed in range(4)),
    *(Row("agents 5000", trajectories(5000), 256, capacity * K) for capacity in (8, 32, 64)),
    Row("agents 10000", trajectories(10_000), 1024, 8 * K),
    Row("agents 100000", trajectories(100_000), 16_384, 8 * K),
    Row("agents 1000", trajectories(1000), 64, 16 * K),
    Row("agents 2000", trajectories(2000), 64, 16 * K),
    Row("few long 10000", few_long_many_short(10_000), 1024, 8 * K),
    Row("few long 100000", few_long_many_short(100_000), 16_384, 8 * K),
    Row("all 32768 100000", lambda: np.full(100_000, 32_768), 16_384, 8 * K),
    Row("wide 10000", wide_lognormal(10_000), 1024, 8 * K),
)


class Report:
    """Rows of the tables, and figures by name."""

    def __init__(self) -> None:
        self.rows: list[dict[str, str]] = []
        self.figures: dict[str, float] = {}

    def measure_rows(self, rows: Iterable[Row]) -> None:
        """Plan each row in both modes with both latencies. One that cannot be planned is a row too, and the others follow."""
        refused = 0
        for row in rows:
            for message_seconds in MESSAGE_SECONDS:
                step = row.step(message_seconds)
                print(f"{step} ...", file=sys.stderr)
                try:
                    for mode, judged in judge(step, slow_too=len(step.lengths) < 50_000).items():
                        self._add_row(step.name, mode, judged)
                except ValueError as error:
                    refused += 1
                    print(f"refused: {error}; {step}", file=sys.stderr)
                    self.rows.append(
                        {"batch": TABLE, "step": step.name} | dict.fromkeys(CELLS, "") | {"mode": "refused"}
                    )
        self.figures["any lengths/rows that cannot be planned"] = refused

    def _add_row(self, name: str, mode: str, judged: Judged) -> None:
        other, nanoseconds = judged.best_other or ("", 0)
        cells = {
            "mode": mode,
            "makespan / bound": f"{judged.over_bound:.3f}",
            "/ limit": f"{judged.over_limit:.3f}",
            "planning CPU ms": f"{judged.seconds * 1e3:.1f}",
            "members": f"{judged.members:,}",
            "best other plan / bound": f"{other} {nanoseconds / judged.bound:.3f}" if other else "",
        }
        self.rows.append({"batch": TABLE, "step": name} | cells)
        prefix = f"any lengths/{name}/{mode}"
        self.figures[f"{prefix}/makespan over the lower bound"] = judged.over_bound
        self.figures[f"{prefix}/makespan over its limit"] = judged.over_limit
        self.figures[f"{prefix}/planning CPU ms"] = judged.seconds * 1e3
        self.figures[f"{prefix}/planning CPU over its limit"] = judged.time_over_limit
        self.figures[f"{prefix}/members"] = judged.members

    def search(self, draws: int, processes: int = 1, kept: Path | None = None) -> None:
        """Plan so many draws, and list the limits that they break."""
        results, begin = [], time.perf_counter()
        for result in searched(range(draws), processes, kept):
            results.append(result)
            if len(results) % EVERY == 0:
                seconds = time.perf_counter() - begin
                print(f"{len(results):,} plans of {draws:,} draws after {seconds:.0f} s ...", file=sys.stderr)
        for mode in ("async", "lockstep"):
            of_mode = [result for result in results if result.mode == mode]
            over = [result for result in of_mode if result.over_limit > 1]
            slow = [result for result in of_mode if result.time_over_limit > 1]
            prefix = f"any lengths/search/{mode}"
            self.figures |= {
                f"{prefix}/draws": len(of_mode),
                f"{prefix}/median makespan over the lower bound": statistics.median(r.over_bound for r in of_mode),
                f"{prefix}/makespan over its limit, draws": len(over),
                f"{prefix}/makespan over its limit, worst": max(r.over_limit for r in of_mode),
                f"{prefix}/planning CPU over its limit, draws": len(slow),
                f"{prefix}/planning CPU over its limit, worst": max(r.time_over_limit for r in of_mode),
            }
        refused = [result for result in results if result.mode == "refused"]
        self.figures["any lengths/search/draws that cannot be planned"] = len(refused)
        for result in results:
            for violation in result.violations:
                print(f"{result.mode}: {violation}; {result.step}", file=sys.stderr)
        worst = sorted(results, key=lambda result: -result.over_limit)[:WORST]
        slowest = sorted(results, key=lambda result: -result.time_over_limit)[:WORST]
        self.rows += [_cells(f"search: the {WORST} worst makespans of {draws} draws", result) for result in worst]
        self.rows += [_cells(f"search: the {WORST} slowest of {draws} draws", result) for result in slowest]

    def compare_groups(self, documents: int = 512) -> None:
        """Plan trajectories for 128 GPUs of 8,192 tokens, as a published recipe for a 32B model at 128K has them, with our
        groups, with its groups of 16, which run one document after the other, and with powers of two for each micro-batch."""
        topology = Topology(CONTEXT // K, 8 * K, ranks_per_node=RANKS_PER_NODE)
        planners = planners_for(context=CONTEXT)
        lengths = draw("agent_trajectories", documents, 0, longest=CONTEXT)
        for message_seconds in MESSAGE_SECONDS:
            cost = cost_of(message_seconds, RANKS_PER_NODE)
            for mode in ("async", "lockstep"):
                makespans = {}
                for name in ("hdp", *GROUPS):
                    plan = planners[name](lengths, topology, cost, mode)
                    plan.check(lengths)
                    makespans[name] = plan.timeline().makespan
                over = {name: makespans[name] / makespans["hdp"] for name in GROUPS}
                title = f"makespan over ours: {documents} trajectories of up to 128K on 128 ranks of 8,192 tokens"
                row = {"batch": title, "message": f"{message_seconds:g} s", "mode": mode}
                self.rows.append(row | {GROUPS[name]: f"{ratio:.3f}" for name, ratio in over.items()})
                self.figures |= {
                    f"any lengths/groups/{message_seconds:g} s each/{mode}/{GROUPS[name]}, makespan over ours": ratio
                    for name, ratio in over.items()
                }

    def count_meetings(self, steps: int = STEPS) -> None:
        """Count with how many others each rank exchanges anything in so many steps of trajectories, on 256 ranks."""
        topology = Topology(256, 16 * K, ranks_per_node=RANKS_PER_NODE)
        cost = cost_of(MESSAGE_SECONDS[0], RANKS_PER_NODE)
        for mode in ("async", "lockstep"):
            plans = (plan_step(draw("agent_trajectories", 5000, seed), topology, cost, mode) for seed in range(steps))
            met = meetings(plans, topology.world_size).sum(axis=1)
            prefix = f"any lengths/peers met/{mode}"
            self.figures |= {f"{prefix}/mean": float(met.mean()), f"{prefix}/most": float(met.max())}
            title = f"other ranks that a rank exchanges with in {steps} steps of 5,000 trajectories on 256 ranks"
            self.rows.append({"batch": title, "mode": mode, "mean": f"{met.mean():.1f}", "most": f"{met.max()}"})


@dataclass(frozen=True)
class Searched:
    """What is kept of a plan of the search."""

    step: str
    mode: str
    over_bound: float = 0.0
    over_limit: float = 0.0
    time_over_limit: float = 0.0
    kind: str = ""
    violations: tuple[str, ...] = ()


def searched(seeds: Iterable[int], processes: int = 1, kept: Path | None = None) -> Iterator[Searched]:
    """Both plans of each draw, in the order of their seeds.

    Args:
        kept: a file that keeps the results, one draw a line, while these sources stay as they are.
    """
    seeds, known = list(seeds), _results_of(kept) if kept else {}
    missing = [seed for seed in seeds if seed not in known]
    with contextlib.ExitStack() as stack:
        if processes == 1 or not missing:
            if missing:
                warm_up()
            computed: Iterator[list[Searched]] = map(search_one, missing)
        else:
            pool = stack.enter_context(ProcessPoolExecutor(processes, get_context("spawn"), initializer=warm_up))
            computed = pool.map(search_one, missing)
        file = stack.enter_context(kept.open("a")) if kept else None
        for seed in seeds:
            results = known.get(seed)
            if results is None:
                results = next(computed)
                if file:
                    print(json.dumps({"seed": seed, "results": list(map(asdict, results))}), file=file, flush=True)
            yield from results


def _results_of(kept: Path) -> dict[int, list[Searched]]:
    """Results that the file keeps, by seed; none, and the file is begun anew, where they are of other sources."""
    folders = (Path(__file__).parent, Path(hf_longctx.__file__).parent)
    sources = sorted(path for folder in folders for path in folder.rglob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    lines = kept.read_text().splitlines() if kept.exists() else []
    if lines and not re.fullmatch("[0-9a-f]{64}", lines[0]):
        raise ValueError(f"{kept} keeps something else: give another --kept, or remove it")
    rows = []
    for line in lines[1:] if lines[:1] == [digest] else ():
        with contextlib.suppress(json.JSONDecodeError):  # the last line may have been cut short
            rows.append(json.loads(line))
    kept.write_text("".join(f"{line}\n" for line in (digest, *map(json.dumps, rows))))
    return {
        row["seed"]: [Searched(**{**result, "violations": tuple(result["violations"])}) for result in row["results"]]
        for row in rows
    }


def search_one(seed: int) -> list[Searched]:
    """Judge the plans of one draw. What cannot be planned is a result of its own."""
    step = drawn(seed)
    try:
        judged = judge(step, slow_too=seed % SLOW_EVERY == 0)
    except (ValueError, AssertionError) as error:
        return [Searched(str(step), "refused", violations=(f"{type(error).__name__}: {error}",))]
    return [
        Searched(str(step), mode, j.over_bound, j.over_limit, j.time_over_limit, j.kind, tuple(j.violations))
        for mode, j in judged.items()
    ]


def warm_up() -> None:
    """Compile, or read from disk, what plans need, so that no draw is timed with it."""
    judge(drawn(WARM_UP))


def meetings(plans: Iterable[StepPlan], world_size: int) -> np.ndarray:
    """bool [world_size, world_size]: whether two different ranks share a document in any of the plans."""
    met = np.zeros((world_size, world_size), bool)
    for plan in plans:
        for i in np.flatnonzero(plan.members > 1).tolist():
            ranks = plan.rank[plan.first_member[i] : plan.first_member[i + 1]]
            met[np.ix_(ranks, ranks)] = True
    np.fill_diagonal(met, False)
    return met


def _cells(title: str, result: Searched) -> dict[str, str]:
    return {
        "batch": title,
        "mode": result.mode,
        "makespan / bound": f"{result.over_bound:.3f}",
        "/ limit": f"{result.over_limit:.3f}",
        "by": result.kind,
        "CPU / limit": f"{result.time_over_limit:.2f}",
        "step": result.step,
    }


def measured(draws: int, rows: Iterable[Row] = ROWS, processes: int = 1, kept: Path | None = None) -> Report:
    """All of it: the table, the search, groups of other kinds, and meetings."""
    report = Report()
    warm_up()
    report.measure_rows(rows)
    if draws:
        report.search(draws, processes, kept)
    report.compare_groups()
    report.count_meetings()
    return report


def explain(seed: int) -> int:
    """Plan one draw again and print what is to be known; returns the exit status."""
    warm_up()
    step = drawn(seed)
    print(step)
    broken = False
    for mode, judged in judge(step).items():
        other, nanoseconds = judged.best_other or ("not compared", 0)
        print(
            f"{mode}: {judged.over_bound:.4f} of the lower bound, {judged.over_limit:.4f} of the limit ({judged.kind}), "
            f"{judged.seconds * 1e3:.1f} ms of CPU, {judged.members:,} members; {other} {nanoseconds / judged.bound:.4f}"
        )
        for violation in judged.violations:
            print(f"  {violation}")
            broken = True
        if judged.violations and mode == "async" and step.topology.uniform and step.offload is None:
            ratio = searched_for(step, judged.plan, SEARCH_SECONDS) / judged.bound
            print(
                f"  a search of {SEARCH_SECONDS:g} s that may place ranks anywhere ends at {ratio:.4f} of the lower bound"
            )
    return int(broken)


def main() -> int:
    arguments = _arguments()
    if arguments.seed is not None:
        return explain(arguments.seed)
    load = os.getloadavg()[0]
    rows = [row for row in ROWS if arguments.rows in row.name]
    report = measured(arguments.draws, rows, arguments.processes, arguments.kept)
    return conclude(arguments, report.rows, report.figures, load, section="batch")


def _arguments() -> Any:
    options: argparse.ArgumentParser = parser(__doc__)
    options.add_argument("--rows", default="", metavar="TEXT", help="only rows whose name holds this")
    options.add_argument("--draws", type=int, default=2000, help="of the search (default: %(default)s)")
    options.add_argument("--seed", type=int, help="plan this draw alone, and compare it with every other planner")
    options.add_argument("--processes", type=int, default=1, help="that search side by side (default: %(default)s)")
    options.add_argument("--kept", type=Path, metavar="FILE", help="keep results of draws there, and go on from them")
    arguments = options.parse_args()
    if arguments.draws < 0 or arguments.processes < 1 or (arguments.seed or 0) < 0:
        options.error("--draws and --seed must be at least 0, --processes at least 1")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
