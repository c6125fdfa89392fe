"""A plan's micro-batches, or in a pipeline the chunks in which they run, as columns that can be counted one by one.

A unit is a micro-batch, or a chunk of one. It has the micro-batch's ranks and its part of the tokens; `context` says how many
tokens came in the chunks before it, whose keys its queries attend to as well. Nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_longctx.planner.plan import StepPlan
from hf_longctx.planner.stages.stage_order import units_of


@dataclass(frozen=True, eq=False, slots=True)
class UnitColumns:
    """u units with k members and n documents or parts of one, as in StepPlan."""

    micro_batch: np.ndarray
    """int64 [u]"""
    first_unit: np.ndarray
    """int64 [m + 1]: micro-batch i has the units first_unit[i] to first_unit[i + 1]."""
    first_member: np.ndarray
    """int64 [u + 1]"""
    rank: np.ndarray
    """int64 [k]"""
    member_tokens: np.ndarray
    """[k]: of a chunk, an equal share of its tokens."""
    first_document: np.ndarray
    """int64 [u + 1]"""
    document: np.ndarray
    """int64 [n]: index into the plan's documents."""
    length: np.ndarray
    """int64 [n]"""
    holder: np.ndarray
    """int64 [n]"""
    context: np.ndarray
    """int64 [u]: tokens of the document in earlier chunks."""


def unit_columns(plan: StepPlan) -> UnitColumns:
    first_unit, micro_batch = units_of(plan)
    context = np.zeros(len(micro_batch), np.int64)
    if (plan.chunks == 1).all():
        columns = (plan.first_member, plan.rank, plan.member_tokens.astype(np.float64), plan.first_document)
        return UnitColumns(
            micro_batch, first_unit, *columns, np.arange(len(plan.doc)), plan.length, plan.holder, context
        )
    first_member, member = _repeated(plan.first_member, micro_batch)
    first_document, document = _repeated(plan.first_document, micro_batch)
    length, tokens = plan.length[document], plan.member_tokens[member].astype(np.float64)
    for i in np.flatnonzero(plan.chunks > 1).tolist():
        units = slice(first_unit[i], first_unit[i + 1])
        stops = np.array(plan.chunk_stops(i))
        context[units] = np.append(0, stops[:-1])
        # A micro-batch in chunks has one document: its rows follow each other.
        sizes = stops - context[units]
        length[first_document[units]] = sizes
        members = int(plan.members[i])
        start = first_member[first_unit[i]]
        tokens[start : start + members * len(sizes)] = np.repeat(sizes / members, members)
    return UnitColumns(
        micro_batch,
        first_unit,
        first_member,
        plan.rank[member],
        tokens,
        first_document,
        document,
        length,
        plan.holder[document],
        context,
    )


def _repeated(first: np.ndarray, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The groups `which` (int64 [u]) of rows that begin at `first`: where each begins anew, and its rows."""
    sizes = np.diff(first)[which]
    begins = np.concatenate([[0], np.cumsum(sizes)])
    return begins, np.repeat(first[which] - begins[:-1], sizes) + np.arange(begins[-1])
