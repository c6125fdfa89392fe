"""Micro-batches, in the order in which a planner lists them -> StepPlan.

The planners that ours is compared with decide three things: which documents lie in which micro-batch, which ranks run
it, and in which order. What follows from that is the same for all of them, and is here: a micro-batch of several ranks
splits its documents over all of them, one of a single rank holds them whole; and in mode "lockstep" each micro-batch
runs in the first round in which all of its ranks are free, none of them having overtaken another micro-batch of theirs:

    listed:   A on 0-1, B on 2, C on 2, D on 0-2        round 0: A, B      round 1: C      round 2: D

Nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from hf_longctx.planner.batch_lengths import longest_first, validated
from hf_longctx.planner.bound import lower_bound, unit_bits
from hf_longctx.planner.compiled import compiled
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.placing.packing import grouped
from hf_longctx.planner.plan import MODES, Mode, StepPlan
from hf_longctx.planner.topology import SPLIT, Documents, PlanError, Topology


@dataclass(frozen=True, slots=True)
class Step:
    """The step to be planned."""

    lengths: np.ndarray
    """int64 [documents], tokens, in the order of the global batch."""
    by_length: np.ndarray
    """int64 [documents]: their indices, longest first."""
    topology: Topology
    cost: CostModel
    """Cost of one stage, in a pipeline; in units of 2^bits nanoseconds, as are all times but those of the plan."""
    bits: int
    mode: Mode
    lower_bound: int

    @classmethod
    def checked(cls, lengths: np.ndarray, topology: Topology, cost: CostModel, mode: Mode) -> Step:
        """Raises PlanError: nothing to plan, a document longer than `Topology.longest_document`, or an unknown mode."""
        lengths = validated(lengths, topology)
        if mode not in MODES:
            raise PlanError(f"mode is {mode!r}; valid: {', '.join(MODES)}")
        if mode == "pipeline":
            cost = cost.scaled(*[1 / topology.stages] * 3)
        by_length = longest_first(lengths)
        bits = unit_bits(lengths, topology, cost)
        cost = cost.in_units(bits)
        return cls(
            lengths, by_length, topology, cost, bits, mode, lower_bound(lengths[by_length], topology, cost, mode)
        )

    def refuse_unequal_ranks(self, planner: str) -> None:
        """Raise PlanError, where the ranks differ: the planner knows equal shares only."""
        if self.topology.uniform:
            return
        name = "memory" if self.topology.speed is None else "speed"
        factors = getattr(self.topology, name)
        raise PlanError(
            f"{name} is {min(factors)} to {max(factors)} per mille; {planner} gives each rank of a group an equal share. "
            "Valid: equal ranks (no speed, no memory), or planner 'hdp'"
        )

    def refuse_kept_whole(self, planner: str, does: str, *, kinds: tuple[Documents, ...] = ("whole", "alone")) -> None:
        """Raise PlanError where documents must lie on ranks as the planner does not place them.

        Args:
            planner: its name.
            does: what it does with documents, in words.
            kinds: of `Topology.documents`, those that this breaks.
        """
        kind = self.topology.documents
        if kind in kinds:
            raise PlanError(
                f"documents is {kind!r}: the model needs every document whole on one rank"
                f"{', alone in its micro-batch' if kind == 'alone' else ''}; {planner} {does}. Valid: planner 'hdp'"
                f"{', or dp_packing' if self.topology.uniform else ''}"
            )

    def plan(
        self,
        planner: str,
        micro_batch: np.ndarray,
        sizes: np.ndarray,
        member: np.ndarray,
        cost: np.ndarray,
        exchange: Literal["direct", "ring"],
    ) -> StepPlan:
        """The plan that runs the listed micro-batches.

        Args:
            micro_batch: int64 [documents]: in which micro-batch each document lies; none is empty.
            sizes: int64 [micro-batches]: ranks that run each of them.
            member: int64 [sum of sizes]: these ranks, ascending in each micro-batch.
            cost: int64 [micro-batches], time of each of its ranks.
            exchange: what the costs assume to travel between ranks.
        """
        first_member = np.concatenate([[0], np.cumsum(sizes)])
        round = np.zeros(len(sizes), np.int64)
        if self.mode == "lockstep":
            round = _rounds(first_member, member, self.topology.world_size)
            order = np.argsort(round, kind="stable")
            place = np.empty_like(order)
            place[order] = np.arange(len(order))
            listed_at, micro_batch = first_member[order], place[micro_batch]
            round, sizes, cost = round[order], sizes[order], cost[order]
            first_member = np.concatenate([[0], np.cumsum(sizes)])
            member = member[np.repeat(listed_at - first_member[:-1], sizes) + np.arange(len(member))]
        document, first_document = grouped(micro_batch, len(sizes))
        held_in = micro_batch[document]
        return StepPlan(
            topology=self.topology,
            first_member=first_member,
            rank=member,
            first_document=first_document,
            doc=document,
            length=self.lengths[document],
            holder=np.where(sizes > 1, SPLIT, member[first_member[:-1]])[held_in],
            cost=cost,
            lower_bound=self.lower_bound,
            offload=np.zeros(len(sizes), np.int64),
            round=round,
            mode=self.mode,
            planner=planner,
            exchange=exchange,
        ).in_nanoseconds(self.bits)


@compiled
def _rounds(first_member: np.ndarray, member: np.ndarray, world_size: int) -> np.ndarray:  # pragma: no cover - compiled
    """int64 [micro-batches]: the first round in which all ranks of each micro-batch are done with those before it."""
    free = np.zeros(world_size, np.int64)
    rounds = np.empty(len(first_member) - 1, np.int64)
    for i in range(len(rounds)):
        ranks = member[first_member[i] : first_member[i + 1]]
        rounds[i] = free[ranks].max()
        free[ranks] = rounds[i] + 1
    return rounds
