"""Document servers: actors that open the data set and read what ranks ask for.

A rank always asks the same server, which asks the planner for the step's plan and reads the slices that the plan gives
the rank; of a stored data set, which is memory-mapped, no other token is touched. A server keeps references to the last
few plans, for all of its ranks, and no tokens. Killed, it opens the data set again and is asked again.

Sent to it: (epoch, step, adjustment, rank), by each of its ranks once per step. Sent by it: a Part.
"""

import os
import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ObjectLostError

from hf_longctx.data.remote.wire import PackedStep, Part, narrowed
from hf_longctx.data.step_plans import StepPlans
from hf_longctx.planner import StepPlan
from hf_longctx.planner.cost.adjustment import Adjustment

REQUESTS_AT_ONCE = 4
"""Threads of a server: while some wait for the planner or a slow disk, the others serve."""


@dataclass(frozen=True)
class ServerReport:
    """Counts of what a server has done since it started."""

    process: int
    """its id in the operating system of its machine"""
    parts: int
    """parts sent"""
    part_bytes: int
    """tokens and labels sent"""


@dataclass(frozen=True)
class _Known:
    """A plan that has come."""

    plan: StepPlan
    packed: PackedStep
    """for ranks"""


class DocumentServer:
    """The actor.

    Args:
        dataset: what is read.
        plans: which documents make each step.
        planner: handle of the planner.
        keep: steps whose plans are kept for further requests.
    """

    def __init__(self, dataset: Any, plans: StepPlans, planner: Any, keep: int) -> None:
        self._dataset, self._plans, self._planner, self._keep = dataset, plans, planner, keep
        self._steps: OrderedDict[tuple[int, int, Adjustment], Future[_Known]] = OrderedDict()
        self._lock = threading.Lock()
        self._parts = self._part_bytes = 0

    def part(self, epoch: int, step: int, adjustment: Adjustment, rank: int) -> Part:
        known = self._known(epoch, step, adjustment)
        layouts = [layout for _, layout in known.plan.layouts(rank)]
        tokens, labels = (narrowed(column) for column in self._plans.read(self._dataset, epoch, step, layouts, rank))
        with self._lock:
            self._parts += 1
            self._part_bytes += tokens.nbytes + labels.nbytes
        return Part(known.packed, tokens, labels)

    def report(self) -> ServerReport:
        return ServerReport(os.getpid(), self._parts, self._part_bytes)

    def _known(self, *order: Any) -> _Known:
        """Asks the planner once, and lets all ranks wait for the answer."""
        with self._lock:
            first = order not in self._steps
            asked = self._steps.setdefault(order, Future())
            while len(self._steps) > self._keep:
                self._steps.popitem(last=False)
        if first:
            try:
                asked.set_result(self._planned(*order))
            except Exception as error:
                asked.set_exception(error)
                self._steps.pop(order, None)  # the next request asks anew
        return asked.result()

    def _planned(self, *order: Any) -> _Known:
        while True:
            [reference] = ray.get(self._planner.plan.remote(*order))
            try:
                packed = ray.get(reference)
            except ObjectLostError:
                continue  # the planner has died since it answered; the next one plans the same
            return _Known(packed.unpack().plan, packed)
