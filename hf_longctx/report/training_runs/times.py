"""When the micro-batches of a plan run: as its cost model predicts, as a simulator played it, or as it was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from hf_longctx.planner.plan import StepPlan


class Run(Protocol):
    """A run of a plan, simulated or measured: seconds since the step began, one number per micro-batch of the plan, in its
    order."""

    @property
    def start(self) -> Any: ...

    @property
    def stop(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Times:
    """Nanoseconds, float64."""

    start: np.ndarray
    """[micro-batches]"""
    stop: np.ndarray
    """[micro-batches]"""
    makespan: float
    """When the last micro-batch stops; of a pipeline as it is predicted, in its last stage."""

    @classmethod
    def of(cls, plan: StepPlan, run: Run | None = None) -> Times:
        """Take the times of a run, or without one those that the plan predicts. Raises ValueError if the run is not of this
        plan."""
        if run is None:
            timeline = plan.timeline()
            return cls(timeline.start.astype(np.float64), timeline.stop.astype(np.float64), float(timeline.makespan))
        start, stop = 1e9 * np.asarray(run.start, np.float64), 1e9 * np.asarray(run.stop, np.float64)
        if start.shape != plan.cost.shape or stop.shape != plan.cost.shape:
            raise ValueError(
                f"a run has {start.shape} starts and {stop.shape} stops; this plan has {len(plan.cost)} micro-batches, so each "
                f"must have the shape ({len(plan.cost)},)"
            )
        if not (np.isfinite(start).all() and np.isfinite(stop).all() and (start >= 0).all() and (stop >= start).all()):
            raise ValueError("a run needs finite times with 0 <= start <= stop for every micro-batch")
        return cls(start, stop, max(float(stop.max()), 1.0))
