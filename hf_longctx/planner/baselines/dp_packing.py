"""Packing and data parallelism: whole documents are packed to C tokens, and the packs are dealt to the ranks.

What most training scripts do. Documents, longest first, go into the first pack that has room for them (first fit
decreasing); pack i runs on rank i mod R. Nothing is split and nothing is exchanged, so a document must fit on one rank,
and a rank of long documents computes much more than one of short ones that hold as many tokens. Where each must be alone in its
micro-batch, each is a pack of its own.

Nothing is sent.
"""

from __future__ import annotations

import numpy as np

from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.effort import as_work_decides
from hf_longctx.planner.placing.micro_batches import Step
from hf_longctx.planner.placing.packing import first_fit, sums
from hf_longctx.planner.plan import Mode, StepPlan
from hf_longctx.planner.topology import PlanError, Topology


@as_work_decides
def plan_dp_packing(lengths: np.ndarray, topology: Topology, cost: CostModel, mode: Mode = "async") -> StepPlan:
    """Plan one optimizer step. With unequal ranks, all packs are of the tokens that the smallest rank holds.

    Raises:
        PlanError: a document longer than a rank holds, nothing to plan, or an unknown mode.
    """
    step = Step.checked(lengths, topology, cost, mode)
    capacity = int(topology.capacities.min())
    longest = int(step.by_length[0])
    if (tokens := int(step.lengths[longest])) > capacity:
        raise PlanError(
            f"document {longest} has {tokens} tokens; packing without context parallelism holds every document on one rank, "
            f"at most {capacity} tokens. It needs a capacity >= {-(-tokens * topology.capacity // capacity)}, or a planner that "
            "splits documents, such as hdp"
        )
    micro_batch = np.empty(len(step.lengths), np.int64)
    if topology.documents == "alone":
        micro_batch[step.by_length] = np.arange(len(step.lengths))
    else:
        micro_batch[step.by_length] = first_fit(step.lengths[step.by_length], capacity)
    packs = int(micro_batch.max()) + 1
    rank = np.arange(packs) % topology.world_size
    times = sums(micro_batch, step.cost.time(step.lengths, 1), packs) + step.cost.micro_batch_ns
    times = topology.times(times, rank)
    return step.plan("dp_packing", micro_batch, np.ones(packs, np.int64), rank, times, "direct")
