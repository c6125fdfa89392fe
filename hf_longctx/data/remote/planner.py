"""The planner: the one actor that plans, for all ranks.

It is created with the lengths of all documents and plans a step when it is first asked for it, which ranks do some steps
ahead; all further requests for the step get the same plan. With each plan it computes the plan's certificate: its
predicted makespan over the lower bound. Killed, it starts anew from what it was created with, and plans the same again.

Sent to it: (epoch, step, adjustment), by each server once per step. Sent by it: where the PackedStep lies, of which there
is one for all servers.
"""

import os
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import ray

from hf_longctx.data.remote.wire import PackedStep
from hf_longctx.data.step_plans import StepPlans
from hf_longctx.planner import PlanSummary
from hf_longctx.planner.cost.adjustment import Adjustment


@dataclass(frozen=True)
class PlannerReport:
    """Counts of what the planner has done since it started."""

    process: int
    """its id in the operating system of its machine"""
    planned: int
    """steps that it has planned"""
    seconds: float
    """that planning them took, certificates included"""
    certificates: dict[tuple[int, int], PlanSummary]
    """(epoch, step) -> certificate of the plan, of the steps planned last"""


class Planner:
    """The actor.

    Args:
        plans: lengths of all documents, global batches, and what plans are made with.
        keep: steps whose plans are kept for further requests.
    """

    def __init__(self, plans: StepPlans, keep: int) -> None:
        self._plans, self._keep = plans, keep
        self._steps: OrderedDict[tuple[int, int, Adjustment], tuple[Any, PlanSummary]] = OrderedDict()
        self._planned, self._seconds = 0, 0.0

    def plan(self, epoch: int, step: int, adjustment: Adjustment) -> list[Any]:
        """Return a reference to the PackedStep, in a list: a bare one would be fetched. It is lost if this actor dies."""
        order = epoch, step, adjustment
        if order not in self._steps:
            started = time.perf_counter()
            planned = self._plans.planned(*order)
            self._steps[order] = ray.put(PackedStep.pack(planned)), planned.plan.summary()
            self._seconds += time.perf_counter() - started
            self._planned += 1
            while len(self._steps) > self._keep:
                self._steps.popitem(last=False)
        return [self._steps[order][0]]

    def fingerprint(self) -> int:
        """Return the fingerprint of what it plans, to be compared with what a rank would plan."""
        return self._plans.fingerprint()

    def report(self) -> PlannerReport:
        certificates = {(epoch, step): summary for (epoch, step, _), (_, summary) in self._steps.items()}
        return PlannerReport(os.getpid(), self._planned, self._seconds, certificates)
