"""How much work planning is, which decides whether it runs interpreted or compiled (compiled.py). Nothing is sent."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from hf_longctx.planner.bound import largest_work
from hf_longctx.planner.compiled import planned
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.topology import FULL, Topology

PER_DOCUMENT = {"async": 1e-4, "lockstep": 8e-4, "pipeline": 4e-4}
"""Seconds of a core that each document takes, interpreted: 1,000 lognormal ones with a Pareto tail on 64 ranks of 8,192 tokens
took 0.05 s in mode "async" and 0.27 in mode "pipeline" (4 stages), with all that a step asks of its plan (measured by
benchmarks/cold_plan.py on two cores of a Xeon). What else takes long, such as unequal ranks, is noticed when it does."""
PER_RANK = 2e-5
"""The same for each rank, in any mode."""
PER_ROUND = 5e-7
"""Mode "lockstep": the same for each document and full round. 1,000 documents took 0.2 to 1.4 s on 4 to 64 ranks; 4,000 took
1.7 s on 64 ranks (on an EPYC). Too high an estimate costs half a minute of compiling, too low a one LONGEST_INTERPRETED."""
COMPILING = 40.0
"""Seconds of a core that compiling takes for a plan of mode "async". An EPYC of the first generation, of 2017, takes 98 s, and
took 120 for what took a newer one 50. The other modes share about half of it."""


def as_work_decides(planner: Callable[..., Any]) -> Any:
    """Let a planner run interpreted where that takes less than compiling it would."""

    @functools.wraps(planner)
    def plan(
        lengths: np.ndarray, topology: Topology, cost: CostModel, mode: Any = "async", *rest: Any, **options: Any
    ) -> Any:
        documents = np.asarray(lengths)
        if documents.ndim != 1 or len(documents) == 0 or not np.issubdtype(documents.dtype, np.integer):
            return planner(lengths, topology, cost, mode, *rest, **options)  # which says what is wrong with them
        return planned(
            lambda: planner(lengths, topology, cost, mode, *rest, **options),
            seconds=interpreted_seconds(documents, topology, mode),
            compiling=COMPILING,
            largest=largest_number(documents, topology, cost),
        )

    return plan


def interpreted_seconds(lengths: np.ndarray, topology: Topology, mode: str) -> float:
    """An estimate of the seconds of a core that a plan takes interpreted."""
    per_document = PER_DOCUMENT.get(mode, 0.0)
    if mode == "lockstep":
        per_document += PER_ROUND * -(-int(lengths.sum()) // topology.tokens)
    return per_document * len(lengths) + PER_RANK * topology.world_size


def largest_number(lengths: np.ndarray, topology: Topology, cost: CostModel) -> float:
    """Return what no number exceeds that a plan is made with, before it is multiplied by a thousand at most."""
    longest = float(lengths.max())
    # Unequal shares of a document: tokens times the tokens of the slowest rank, times a thousand over its speed.
    shares = longest * longest * FULL / float(topology.speeds.min())
    return max(*largest_work(lengths, topology, cost), shares)
