"""Messages between actors and ranks.

Integers travel in 32 bits where they fit: the columns of a plan, tokens and labels. Whoever receives them copies them, so
that neither the object store nor Ray itself has to live as long as a step does.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from hf_longctx.data.step_plans import PlannedStep
from hf_longctx.planner import StepPlan
from hf_longctx.planner.plan import COLUMNS

TOKEN_BYTES = 8
"""Bytes of a token and its label on the way, 4 each; twice that where ids do not fit into 32 bits."""


@dataclass(frozen=True)
class PackedStep:
    """A PlannedStep on its way."""

    columns: dict[str, np.ndarray]
    """those of the plan"""
    others: dict[str, Any]
    """all else of the plan"""
    num_items: int
    num_tokens: int
    fingerprint: int

    @classmethod
    def pack(cls, planned: PlannedStep) -> "PackedStep":
        plan = planned.plan
        others = {field.name: getattr(plan, field.name) for field in fields(plan) if field.name not in COLUMNS}
        others["topology"] = replace(plan.topology)  # without the arrays that it has derived
        columns = {name: narrowed(getattr(plan, name)) for name in COLUMNS}
        return cls(columns, others, planned.num_items, planned.num_tokens, planned.fingerprint)

    def unpack(self) -> PlannedStep:
        columns: dict[str, Any] = {name: column.astype(np.int64) for name, column in self.columns.items()}
        plan = StepPlan(**columns, **self.others)
        return PlannedStep(plan, self.num_items, self.num_tokens, self.fingerprint)


@dataclass(frozen=True)
class Part:
    """The part of a step that one rank holds, T tokens."""

    step: PackedStep
    """of all ranks"""
    tokens: np.ndarray
    """int32 or int64 [T]"""
    labels: np.ndarray
    """int32 or int64 [T], shifted"""


def narrowed(column: np.ndarray) -> np.ndarray:
    """int64 [n] as int32 where all values fit."""
    limits = np.iinfo(np.int32)
    if column.size and not limits.min <= column.min() <= column.max() <= limits.max:
        return column
    return column.astype(np.int32)


def store_bytes(step_tokens: int, ahead: int, plan_bytes: int, servers: int, ranks: int) -> int:
    """Most bytes of the object store that steps take at any time, with all ranks in the same step or one apart.

    A rank asks for at most 1 + `ahead` steps that it has not copied yet. The planner keeps the plans of 2 + `ahead`, of which
    each server may have a copy on another node. Steps that follow each other faster than Ray frees memory (cluster.py) take
    more.

    Args:
        step_tokens: tokens of the largest global batch.
        ahead: steps that ranks ask for in advance.
        plan_bytes: of the largest plan.
        servers: document servers.
        ranks: all of them.
    """
    of_ranks = step_tokens * TOKEN_BYTES + ranks * plan_bytes
    return (1 + ahead) * of_ranks + (2 + ahead) * plan_bytes * (1 + servers)
