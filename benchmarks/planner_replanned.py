"""What a search finds for a drawn step: it is planned again and again for costs that are a little off, and counted as they are.

    python benchmarks/planner_replanned.py --seconds 60 --processes 2        # all draws that are over their limit: hours
    python benchmarks/planner_replanned.py --seconds 60 --seeds 282 1830     # these alone

Each plan of a search is a valid one, made for the same documents and ranks by a cost model whose parts are off by 2 to 40 % at
random, and, where ranks are equal, as if some tokens of each document, up to a fifth, had no labels. That moves all that decides
where documents go: how many ranks each takes, in which order they are placed, which target is met, and whose placement is taken.
The shortest makespan of them all, as the true costs have it, is a limit for plans where no bound is close (plan_limits.py). It
begins with the plan's own, so it says how much the planner leaves to chance, not what no planner could do; planner_search.py
looks for sizes and orders with another method, of schedules that need not be plans. Results are kept in results/replanned.json;
they hold for a step as long as its lower bound is the same.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from drawn_steps import DrawnStep, drawn

from hf_longctx.planner import CostModel, Mode, PlanError, StepPlan, plan_step
from hf_longctx.planner.compiled import planning
from hf_longctx.planner.placing import other_placements, rank_order
from hf_longctx.planner.topology import SPLIT

KEPT = Path(__file__).parent / "results" / "replanned.json"
OFF_BY = (0.02, 0.1, 0.4)
"""Standard deviations of the logarithm of a factor of attention, of linear work, and of exchange."""
WITHOUT_LABELS = (0.01, 0.05, 0.2)
"""Of a document's tokens, at most."""
LABELS_TOO = 0.7
"""Share of the plans for which some tokens have no labels too."""
FEWEST = 5
"""Plans that are made however long they take."""


def replanned(step: DrawnStep, mode: Mode, seconds: float, fewest: int = FEWEST) -> tuple[int, int]:
    """Search for so long; return the shortest makespan (nanoseconds), the plan's own at most, and how many plans were made."""
    offload = step.offload if mode == "async" else None
    with planning(math.inf):
        best = plan_step(step.lengths, step.topology, step.cost, mode, offload).timeline().makespan
        rng, begin, plans = np.random.default_rng(0), time.perf_counter(), 0
        while plans < fewest or time.perf_counter() - begin < seconds:
            cost, labels = _off(step, rng)
            plans += 1
            try:
                plan = plan_step(step.lengths, step.topology, cost, mode, offload, labels)
            except PlanError:
                continue
            best = min(best, counted(plan, step).timeline().makespan)
    return best, plans


def _off(step: DrawnStep, rng: np.random.Generator) -> tuple[CostModel, np.ndarray | None]:
    """Draw a cost model, and how many tokens of each document have labels."""
    cost = step.cost.scaled(*np.exp(rng.choice(OFF_BY) * rng.standard_normal(3)).tolist())
    if not step.topology.uniform or rng.random() > LABELS_TOO:
        return cost, None
    without = rng.choice(WITHOUT_LABELS) * rng.random(len(step.lengths))
    return cost, np.floor(step.lengths * (1 - without)).astype(np.int64)


def counted(plan: StepPlan, step: DrawnStep) -> StepPlan:
    """Return the plan with what its micro-batches cost by the step's own cost model."""
    split = plan.micro_batch_of_document[plan.holder == SPLIT]
    if (np.diff(split) == 0).any():  # several that travel together
        costs = other_placements._costs(plan, step.cost)
    else:
        costs = rank_order._costs(plan, step.lengths[plan.doc], step.cost)
    return replace(plan, cost=costs)


@cache
def _kept() -> dict[str, dict[str, dict[str, float]]]:
    kept: dict[str, dict[str, dict[str, float]]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    return kept


def found(name: str, mode: Mode, bound: int) -> float | None:
    """Nanoseconds of the shortest plan that is known of a drawn step; None if it was not searched for, or for another bound."""
    entry = _kept().get(name, {}).get(mode)
    return entry["makespan"] if entry and entry["bound"] == bound else None


def search_one(task: tuple[int, Mode], seconds: float) -> tuple[str, Mode, dict[str, float]] | None:
    """Search for a plan of one draw; None where its own is within all limits already."""
    from plan_limits import judge  # which asks for what is found here

    seed, mode = task
    step = drawn(seed)
    judged = judge(step, slow_too=False, found_too=False)[mode]
    if judged.makespan <= judged.limit:
        return None
    best, plans = replanned(step, mode, seconds)
    entry = {"makespan": best, "bound": judged.bound, "seconds": seconds, "plans": plans, "ours": judged.makespan}
    return step.name, mode, entry


def search(tasks: Iterable[tuple[int, Mode]], seconds: float, processes: int) -> None:
    """Search for plans of these draws, and keep what is found."""
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for result in pool.map(partial(search_one, seconds=seconds), tasks):
            if result is None:
                continue
            name, mode, entry = result
            kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
            kept.setdefault(name, {})[mode] = entry
            KEPT.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
            print(
                f"{name}, {mode}: {entry['ours'] / entry['bound']:.4f} of the lower bound, "
                f"{entry['makespan'] / entry['bound']:.4f} found in {entry['plans']:,} plans",
                flush=True,
            )


def main() -> int:
    arguments = _arguments()
    tasks: list[tuple[int, Mode]] = [(seed, mode) for seed in arguments.seeds for mode in arguments.modes]
    search(tasks, arguments.seconds, arguments.processes)
    return 0


def _arguments() -> argparse.Namespace:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=60.0, help="for each plan (default: %(default)s)")
    options.add_argument("--seeds", type=int, nargs="+", default=range(2000), help="draws (default: 0 to 1999)")
    options.add_argument("--modes", nargs="+", default=["async", "lockstep"], choices=["async", "lockstep"])
    options.add_argument("--processes", type=int, default=1, help="side by side (default: %(default)s)")
    return options.parse_args()


if __name__ == "__main__":
    sys.exit(main())
