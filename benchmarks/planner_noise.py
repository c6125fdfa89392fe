"""Plans whose documents take longer or shorter than predicted: today's beside those of the planner before it knew any lengths.

    python benchmarks/planner_noise.py --json FILE --check noise         # 2 minutes
    python benchmarks/planner_noise.py --sizes 1000x64 --draws 1      # a quick look

On the global batches and costs of planner_cases.py, which both planners have always been measured on. What a document
takes is what is predicted of it times a factor, lognormal with a deviation of 5 %; a document has the same factor in both
plans. The plan is not made again: in mode `async` groups meet in the plan's order, in `lockstep` each round takes as long
as its slowest rank. `planner.py` runs this too.

- noise costs: makespan with noise over without, of today's plan; median of all draws and batches.
- over the older's: makespan with noise, today's plan over the older planner's, of the same draw: the median of a batch's draws,
  of its worst batch; and the worst draw, which luck decides: two plans of equal makespan differ by up to 3 % in a draw.
"""

import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from planner_before import BEFORE_ANY_LENGTHS, Wanted, plans_before, with_times
from planner_cases import MIXTURES, SIZES, Case, cases, cost_models
from report import conclude, parser

from hf_longctx.planner import CostModel, Mode, StepPlan, plan_step

NOISE = 0.05
"""Standard deviation of the logarithm of a document's factor."""
DRAWS = 20
"""Of all factors, for each plan."""
BATCHES = {"1000x64": 5, "10000x1024": 5}
"""Global batches of a distribution, by size; 1 of all others."""
MODES: tuple[Mode, ...] = ("async", "lockstep")


def factors_of(documents: int, draw: int) -> np.ndarray:
    """float64 [documents]: what each takes over what is predicted."""
    return np.exp(NOISE * np.random.default_rng(draw).standard_normal(documents))


def noisy_makespans(plan: StepPlan, cost: CostModel, draws: int) -> np.ndarray:
    """float64 [draws]: nanoseconds that the plan takes with the factors of each draw."""
    noisy = (with_times(plan, cost, factors_of(len(plan.doc), draw)) for draw in range(draws))
    return np.array([noisy_plan.timeline().makespan for noisy_plan in noisy], float)


def measured(
    measured_cases: Sequence[Case], draws: int = DRAWS, commit: str = BEFORE_ANY_LENGTHS
) -> tuple[list[dict[str, str]], dict[str, float]]:
    """Rows and figures of plans under noise."""
    costs = cost_models()
    chosen = [
        (replace(case, seed=seed), kind, mode)
        for case in measured_cases
        for seed in range(BATCHES.get(f"{case.documents}x{case.ranks}", 1))
        for kind in costs
        for mode in MODES
    ]
    steps = [Wanted(case.lengths, case.topology(), costs[kind], mode) for case, kind, mode in chosen]
    older = plans_before(steps, commit)
    compared: dict[tuple[str, str, Mode], list[Compared]] = {}
    for (case, kind, mode), step, before in zip(chosen, steps, older):
        if before is None:
            continue
        today = plan_step(step.lengths, step.topology, step.cost, mode)
        compared.setdefault((str(case), kind, mode), []).append(Compared.of(today, before, step.cost, draws))
    rows = [_cells(name, kind, mode, batches) for (name, kind, mode), batches in compared.items()]
    ratios: dict[str, list[list[float]]] = {}
    for (step_name, _, mode), batches in compared.items():
        name = f"noise/{step_name.partition('/')[0]}/{mode}/makespan over the older planner's"
        ratios.setdefault(name, []).extend(batch.over_older for batch in batches)
    figures = {f"{name}, worst batch": max(map(statistics.median, values)) for name, values in ratios.items()}
    return rows, figures | {f"{name}, worst draw": max(map(max, values)) for name, values in ratios.items()}


@dataclass(frozen=True)
class Compared:
    """Two plans of one batch, today's and the older planner's, under the same noise."""

    noise_costs: list[float]
    """of each draw: makespan of today's plan over the same without noise"""
    over_older: list[float]
    """of each draw: makespan of today's plan over the older one's"""
    quiet_over_older: float
    """the same without noise"""

    @classmethod
    def of(cls, today: StepPlan, before: StepPlan, cost: CostModel, draws: int) -> "Compared":
        took, would_take = (noisy_makespans(plan, cost, draws) for plan in (today, before))
        quiet = today.timeline().makespan
        return cls((took / quiet).tolist(), (took / would_take).tolist(), quiet / before.timeline().makespan)


def _cells(case: str, kind: str, mode: Mode, batches: Sequence[Compared]) -> dict[str, str]:
    over_older = [statistics.median(batch.over_older) for batch in batches]
    noise_costs = [ratio for batch in batches for ratio in batch.noise_costs]
    return {
        "batch": f"{NOISE:.0%} noise in true times",
        "step": case,
        "batches": str(len(batches)),
        "costs": kind,
        "mode": mode,
        "noise costs": f"{statistics.median(noise_costs):.3f}",
        "without noise, worst over the older's": f"{max(batch.quiet_over_older for batch in batches):.3f}",
        "over the older's": f"{statistics.median(over_older):.3f}",
        "worst batch": f"{max(over_older):.3f}",
        "worst draw": f"{max(ratio for batch in batches for ratio in batch.over_older):.3f}",
    }


def main() -> int:
    arguments = _arguments()
    load = os.getloadavg()[0]
    rows, figures = measured(cases(arguments.sizes, arguments.distributions), arguments.draws, arguments.before)
    return conclude(arguments, rows, figures, load, section="batch")


def _arguments() -> Any:
    options = parser(__doc__)
    options.add_argument("--distributions", nargs="+", choices=MIXTURES, default=MIXTURES)
    options.add_argument("--sizes", nargs="+", default=SIZES, metavar="DOCUMENTSxRANKS", help="default: %(default)s")
    options.add_argument("--draws", type=int, default=DRAWS, help="of factors (default: %(default)s)")
    options.add_argument(
        "--before",
        default=BEFORE_ANY_LENGTHS,
        metavar="COMMIT",
        help="whose planner is compared (default: %(default)s)",
    )
    arguments = options.parse_args()
    if arguments.draws < 1:
        options.error(f"--draws {arguments.draws} must be at least 1")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
