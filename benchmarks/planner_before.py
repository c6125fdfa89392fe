"""Plans that this project's planner made at an earlier commit, to compare today's with.

    plans = plans_before([Wanted(lengths, topology, cost, "async")])
    python benchmarks/planner_before.py                       # in that commit's package: reads steps, writes plans

The package of that commit lies in .cache/planners, from `git archive`, and plans in a process of its own. Topology and
cost model are handed over by those of their fields that it knows, plans come back as columns, and what they take is counted
again with today's costs: a difference of makespans is one of plans alone.
"""

import io
import os
import pickle
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from hf_longctx.planner import CostModel, StepPlan, Topology

ROOT = Path(__file__).resolve().parents[1]
BEFORE_ANY_LENGTHS = "928eff4"
"""The commit before planner/placing/bisection.py, the first one made for steps of any lengths."""
PLANNERS = ROOT / ".cache" / "planners"
"""Packages of earlier commits, with their compiled code."""


@dataclass(frozen=True)
class Wanted:
    """A step to plan."""

    lengths: np.ndarray
    """int64 [documents], tokens"""
    topology: Topology
    cost: CostModel
    mode: str


def plans_before(steps: Sequence[Wanted], commit: str = BEFORE_ANY_LENGTHS) -> list[StepPlan | None]:
    """Plan steps with the planner of a commit, equal ranks. None stands for a step that it refuses: before it had units of time,
    it counted to 2^62 ns of work.

    Raises:
        FileNotFoundError: this is no clone that has the commit.
    """
    asked = [
        {"lengths": s.lengths, "topology": asdict(s.topology), "cost": asdict(s.cost), "mode": s.mode} for s in steps
    ]
    environment = os.environ | {"PYTHONPATH": str(package_of(commit))}
    worker = [sys.executable, __file__]
    answer = subprocess.run(worker, input=pickle.dumps(asked), stdout=subprocess.PIPE, env=environment, check=True)
    plans: list[StepPlan | None] = []
    for step, columns in zip(steps, pickle.loads(answer.stdout), strict=True):
        if columns is None:
            plans.append(None)
            continue
        # Not the bound that was counted with: it may have been another one.
        plan = StepPlan(topology=step.topology, **(_known(StepPlan, columns) | {"lower_bound": 1}))
        plan = with_times(plan, step.cost, np.ones(len(step.lengths)))
        plan.check(step.lengths)
        plans.append(plan)
    return plans


def package_of(commit: str) -> Path:
    """Return the folder with the package of a commit, unpacked if it is not there yet. Raises FileNotFoundError."""
    folder = PLANNERS / commit
    if not (folder / "hf_longctx").is_dir():
        archive = subprocess.run(
            ["git", "-C", str(ROOT), "archive", commit, "hf_longctx"], capture_output=True, check=False
        )
        if archive.returncode:
            reason = archive.stderr.decode().strip()
            raise FileNotFoundError(f"the planner of commit {commit} needs a clone with its history: {reason}")
        part = folder.with_name(f"{folder.name}.{os.getpid()}.part")  # what is interrupted is no package
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(part, filter="data")
        part.rename(folder)
    return folder


def with_times(plan: StepPlan, cost: CostModel, factors: np.ndarray) -> StepPlan:
    """Return the plan with the times that its documents take: what `cost` predicts, each times its factor (float64 [documents],
    in the order of the global batch). Equal ranks, documents split without a ring; the lower bound no longer holds."""
    times = cost.time(plan.length, plan.ranks_of_document) * factors[plan.doc]
    whole, micro_batches = plan.holder >= 0, len(plan.cost)
    shared = np.bincount(plan.micro_batch_of_document[~whole], times[~whole], micro_batches)
    # A member's key is unique and ascends: its micro-batch and rank.
    keys = np.repeat(np.arange(micro_batches), plan.members) * plan.world_size + plan.rank
    member = np.searchsorted(keys, plan.micro_batch_of_document[whole] * plan.world_size + plan.holder[whole])
    alone = np.bincount(member, times[whole], len(keys))
    slowest = shared + np.maximum.reduceat(alone, plan.first_member[:-1])
    columns = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return StepPlan(**(columns | {"cost": cost.micro_batch_ns + np.rint(slowest).astype(np.int64), "lower_bound": 1}))


def _known(kind: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Return those values that a dataclass has fields for."""
    return {field.name: values[field.name] for field in fields(kind) if field.name in values}


def _plan_all() -> None:
    """Plan the steps on standard input, and write the plans' columns to standard output."""
    from hf_longctx.planner import plan_step
    from hf_longctx.planner.compiled import planning
    from hf_longctx.planner.plan import COLUMNS, SCALARS

    answers: list[dict[str, Any] | None] = []
    for step in pickle.load(sys.stdin.buffer):
        topology, cost = (
            kind(**_known(kind, step[name])) for kind, name in ((Topology, "topology"), (CostModel, "cost"))
        )
        try:
            with planning(float("inf")):  # compiled, as in a long run
                plan = plan_step(step["lengths"], topology, cost, step["mode"])
        except ValueError as error:
            print(f"the older planner refuses: {error}", file=sys.stderr)
            answers.append(None)
            continue
        answers.append({name: getattr(plan, name) for name in COLUMNS + SCALARS})
    sys.stdout.buffer.write(pickle.dumps(answers))


if __name__ == "__main__":
    _plan_all()
