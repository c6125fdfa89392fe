"""How much work planning is, which decides whether it runs interpreted or compiled (compiled.py). Nothing is sent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from hf_longctx.planner.bound import largest_work
from hf_longctx.planner.compiled import planning
from hf_longctx.planner.cost import CostModel
from hf_longctx.planner.topology import FULL, Topology

COMPILING = {"async": 15.0, "lockstep": 12.0, "pipeline": 20.0}
"""Seconds of a core that compiling takes for a plan of each mode."""


def as_work_decides(planner: Callable[..., Any]) -> Any:
    """Let a planner run interpreted where that takes less than compiling it would."""

    @functools.wraps(planner)
    def plan(lengths: np.ndarray, topology: Topology, cost: CostModel, mode: Any = "async", *rest: Any) -> Any:
        documents = np.asarray(lengths)
        if documents.ndim != 1 or len(documents) == 0 or not np.issubdtype(documents.dtype, np.integer):
            return planner(lengths, topology, cost, mode, *rest)  # which says what is wrong with them
        seconds = interpreted_seconds(documents, topology, mode)
        with planning(seconds, COMPILING.get(mode, 0.0), largest_number(documents, topology, cost)):
            return planner(lengths, topology, cost, mode, *rest)

    return plan


def interpreted_seconds(lengths: np.ndarray, topology: Topology, mode: str) -> float:
    """An estimate."""
    return len(lengths) * 1e-3


def largest_number(lengths: np.ndarray, topology: Topology, cost: CostModel) -> float:
    """What no number exceeds that a plan is made with, before it is multiplied by a thousand at most."""
    longest = float(lengths.max())
    # Unequal shares of a document: tokens times the tokens of the slowest rank, times a thousand over its speed.
    shares = longest * longest * FULL / float(topology.speeds.min())
    return max(*largest_work(lengths, topology, cost), shares)
