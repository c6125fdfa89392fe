"""Training steps of agent trajectories on two and four gloo ranks of this machine, beside one process.

    python benchmarks/trajectory_steps.py --json benchmarks/results/trajectory_steps.json --check trajectories        # 10 minutes
    python benchmarks/trajectory_steps.py --batches 1 --rounds 1 --profile-seconds 10 --ranks 2              # a quick look

Trajectories of 1/64 of their published lengths, a few hundred tokens; the longest of a batch just fits on all ranks, so
that most documents are split where there are four. Each batch is planned twice for speeds measured on this machine: by
today's planner, and by that of an earlier commit (planner_before.py). One run takes both plans of a batch in turn on the
same ranks; runs are interleaved with those of one process, which computes one document at a time (training_ranks.py).

    async       every rank holds all of the model, and ranks meet where they share a document (sharding ddp)
    lockstep    gradients are summed in every round, for which all ranks meet (sharding zero2)

- speed over one process's: seconds of one process's step over those of the ranks'; medians of all rounds, summed over batches.
- older over today's: seconds of the older plans' steps over today's, and the same of what the plans predict.
- CPU: seconds of CPU of all ranks over one process's, of all steps by both plans; a busy machine disturbs these little.
- differences: of the loss, and of the gradient (the largest entry's over the largest of the gradient), from one process's, of
  all steps; float32. The learning rate is 0, so that every step begins with the same weights.

Each rank has one computing thread. Four ranks on two cores can be no faster than two.
"""

import os
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from planner_before import BEFORE_ANY_LENGTHS, Wanted, plans_before
from report import conclude, parser
from training_cases import Case
from training_peers import Settings
from training_ranks import ONE_PROCESS, Clock, Run, model_of, profile, run

from hf_longctx.hardware.profile import Profile
from hf_longctx.planner import CostModel, Mode, StepPlan, Topology, plan_step
from hf_longctx.simulator.lengths import draw

SHORTER = 64
"""What trajectories are divided by."""
CLOCKS: dict[int, Clock] = {2: "wall", 4: "cpu"}
"""Ranks -> the clock of their profile: where there are more ranks than cores, wall-clock time says nothing about a rank."""
SHARDING: dict[Mode, str] = {"async": "ddp", "lockstep": "zero2"}
TODAY, OLDER = "today's", "older"


@dataclass(frozen=True)
class Steps:
    """What is trained: a step that warms up, then each batch in both plans."""

    case: Case
    batch: tuple[int, ...]
    """of each step"""
    planner: tuple[str, ...]
    """of each step: TODAY or OLDER"""

    def capacity(self, ranks: int) -> int:
        """Tokens of a rank with which all of them just hold the longest document."""
        return -(-max(self.case.lengths) // ranks)

    def lengths(self, batch: int) -> np.ndarray:
        """int64: tokens of a batch's documents."""
        return np.array([self.case.lengths[document] for document in self.case.steps[self.batch.index(batch)]])

    def of(self, planner: str, batch: int) -> int:
        """Return which timed step trains a batch so planned, counted from the one after the warm-up."""
        return next(i for i, pair in enumerate(zip(self.planner[1:], self.batch[1:])) if pair == (planner, batch))


def trajectory_steps(batches: int, documents: int, vocabulary: int = 1024) -> Steps:
    """Draw batches of shortened trajectories. Which plan comes first changes from batch to batch."""
    drawn = [np.maximum(draw("agent_trajectories", documents, seed) // SHORTER, 2) for seed in range(batches)]
    numbers = np.arange(batches * documents).reshape(batches, documents).tolist()
    batch, planner = [0], [TODAY]
    for number in range(batches):
        batch += [number, number]
        planner += [TODAY, OLDER] if number % 2 == 0 else [OLDER, TODAY]
    lengths = tuple(int(length) for length in np.concatenate(drawn))
    case = Case("trajectories", lengths, tuple(tuple(numbers[number]) for number in batch), vocabulary)
    return Steps(case, tuple(batch), tuple(planner))


def planned(steps: Steps, ranks: int, mode: Mode, speeds: str, commit: str) -> tuple[StepPlan, ...]:
    """Plan every step, checked."""
    config = model_of(steps.case, "sdpa").config
    cost = CostModel.from_config(config, Profile.load(speeds).speed, ranks_per_node=ranks, world_size=ranks)
    topology = Topology(ranks, steps.capacity(ranks), ranks_per_node=ranks)
    batches = sorted(set(steps.batch))
    plans = plans_before([Wanted(steps.lengths(batch), topology, cost, mode) for batch in batches], commit)
    older = [plan for plan in plans if plan is not None]
    assert len(older) == len(plans), "the older planner counts far further than a step of so few tokens takes"
    today = [plan_step(steps.lengths(batch), topology, cost, mode) for batch in batches]
    for batch, plan in enumerate(today):
        plan.check(steps.lengths(batch))
    return tuple((today if who == TODAY else older)[batch] for who, batch in zip(steps.planner, steps.batch))


@dataclass(frozen=True)
class Way:
    """Ranks that train in a mode, by plans of both planners."""

    ranks: int
    mode: Mode
    plans: tuple[StepPlan, ...]

    def __str__(self) -> str:
        return f"{self.ranks} ranks, {self.mode}"


def train(steps: Steps, way: Way | None, gradients: str | None) -> list[Run]:
    """Train all steps once, on one process where there is no way. Raises RuntimeError where that cannot be."""
    settings = Settings(max(steps.case.lengths), learning_rate=0.0, gradients=gradients)
    if way is not None:
        settings = Settings(
            steps.capacity(way.ranks),
            plans=way.plans,
            sharding=SHARDING[way.mode],
            learning_rate=0.0,
            gradients=gradients,
        )
    runs = run(ONE_PROCESS if way is None else "ours", steps.case, settings, 1 if way is None else way.ranks)
    if isinstance(runs, str):
        raise RuntimeError(runs)
    return runs


def summarise(
    steps: Steps, way: Way, rounds: list[list[Run]], alone: list[Run], gradient_difference: float
) -> dict[str, float]:
    """Figures of a way. `rounds`: of the ranks' runs; `alone`: one process's."""

    def median(runs: list[list[float]], planner: str, batch: int) -> float:
        return statistics.median(seconds[steps.of(planner, batch)] for seconds in runs)

    slowest = [[max(seconds) for seconds in zip(*(rank.seconds for rank in ranks))] for ranks in rounds]
    batches = sorted(set(steps.batch))
    taken = {who: sum(median(slowest, who, batch) for batch in batches) for who in (TODAY, OLDER)}
    one = sum(statistics.fmean(median([r.seconds for r in alone], w, b) for w in (TODAY, OLDER)) for b in batches)
    predicted = {
        who: sum(way.plans[1 + steps.of(who, batch)].timeline().makespan for batch in batches) / 1e9
        for who in (TODAY, OLDER)
    }
    summaries = [plan.summary() for plan in way.plans[1:]]
    losses = np.abs(np.array(rounds[0][0].losses) / np.array(alone[0].losses) - 1)
    return {
        "speed over one process's": one / taken[TODAY],
        "older planner's speed over one process's": one / taken[OLDER],
        "older over today's seconds, measured": taken[OLDER] / taken[TODAY],
        "older over today's seconds, predicted": predicted[OLDER] / predicted[TODAY],
        "CPU of all ranks over one process's": statistics.median(
            sum(rank.cpu_seconds for rank in ranks) for ranks in rounds
        )
        / statistics.median(run.cpu_seconds for run in alone),
        "seconds of a step": taken[TODAY] / len(batches),
        "predicted over measured": predicted[TODAY] / taken[TODAY],
        "share of documents split": sum(s.split_documents for s in summaries) / sum(s.documents for s in summaries),
        "difference of loss": float(losses.max()),
        "difference of gradient": gradient_difference,
    }


COLUMNS = {
    "speed / one process's": ("speed over one process's", "{:.2f}"),
    "older planner's": ("older planner's speed over one process's", "{:.2f}"),
    "older / today's, measured": ("older over today's seconds, measured", "{:.3f}"),
    "predicted": ("older over today's seconds, predicted", "{:.3f}"),
    "CPU": ("CPU of all ranks over one process's", "{:.2f}"),
    "predicted / measured": ("predicted over measured", "{:.2f}"),
    "split": ("share of documents split", "{:.0%}"),
    "s a step": ("seconds of a step", "{:.1f}"),
    "loss / exact - 1": ("difference of loss", "{:.0e}"),
    "gradient - exact": ("difference of gradient", "{:.0e}"),
}


def difference_of_gradients(trained: Path, exact: Path) -> float:
    """Return the largest difference of an entry over the largest entry, of all steps. Raises ValueError if
    a step's gradient is missing."""
    names = sorted(file.name for file in exact.iterdir())
    if not names or names != sorted(file.name for file in trained.iterdir()):
        raise ValueError(f"gradients of steps {names} were written by one process, and others by the ranks")
    differences = []
    for name in names:
        expected = np.load(exact / name)
        differences.append(np.abs(np.load(trained / name) - expected).max() / np.abs(expected).max())
    return float(max(differences))


def measured(given: Any, folder: Path) -> tuple[list[dict[str, str]], dict[str, float]]:
    """Rows and figures; `folder` is for profiles and gradients."""
    steps = trajectory_steps(given.batches, given.documents)
    ways = []
    for ranks in given.ranks:
        speeds = str(folder / f"{ranks} ranks.json")
        profile(steps.case, given.profile_seconds, speeds, ranks, CLOCKS[ranks])
        ways += [Way(ranks, mode, planned(steps, ranks, mode, speeds, given.before)) for mode in SHARDING]
    alone: list[Run] = []
    runs: dict[Way, list[list[Run]]] = {way: [] for way in ways}
    for number in range(given.rounds):
        for way in (None, *ways):
            print(f"round {number + 1}: {way or ONE_PROCESS} ...", file=sys.stderr)
            gradients = folder / str(way or ONE_PROCESS)
            gradients.mkdir(exist_ok=True)
            run_of_each_rank = train(steps, way, str(gradients) if number == 0 else None)
            if way is None:
                alone += run_of_each_rank
            else:
                runs[way].append(run_of_each_rank)
    rows: list[dict[str, str]] = []
    figures: dict[str, float] = {}
    for way, rounds in runs.items():
        difference = difference_of_gradients(folder / str(way), folder / ONE_PROCESS)
        summary = summarise(steps, way, rounds, alone, difference)
        figures |= {f"{way}/{name}": value for name, value in summary.items()}
        rows.append({"way": str(way)} | {name: form.format(summary[what]) for name, (what, form) in COLUMNS.items()})
    return rows, figures


def main() -> int:
    given = _arguments()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rows, figures = measured(given, Path(folder))
    if any(ranks > (os.cpu_count() or 1) for ranks in given.ranks):
        print(
            f"More ranks than the {os.cpu_count()} cores of this machine can be no faster than as many as there are cores.\n"
        )
    return conclude(given, rows, figures, load)


def _arguments() -> Any:
    options = parser(__doc__)
    options.add_argument("--ranks", type=int, nargs="+", choices=list(CLOCKS), default=list(CLOCKS))
    options.add_argument(
        "--batches", type=int, default=3, help="draw so many batches of documents (default: %(default)s)"
    )
    options.add_argument(
        "--documents", type=int, default=12, help="put so many documents into a step (default: %(default)s)"
    )
    options.add_argument(
        "--rounds", type=int, default=3, help="take the median of so many rounds (default: %(default)s)"
    )
    options.add_argument(
        "--profile-seconds",
        type=float,
        default=45.0,
        help="measure each profile for so many seconds (default: %(default)s)",
    )
    options.add_argument(
        "--before",
        default=BEFORE_ANY_LENGTHS,
        metavar="COMMIT",
        help="compare with the planner of this commit (default: %(default)s)",
    )
    given = options.parse_args()
    if min(given.batches, given.documents, given.rounds) < 1:
        options.error("--batches, --documents and --rounds must be at least 1")
    return given


if __name__ == "__main__":
    sys.exit(main())
