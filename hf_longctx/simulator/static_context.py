"""Static context parallelism as a training run has it: one group size for the context that the run is set up for, whatever
a step's longest document happens to be.

The degree is the least divisor of the ranks with which a group holds the context. Documents, longest first, are packed to
the context's tokens, first fit; pack i runs on group i mod (R / degree), all of it split over all ranks of the group.
planner/static_cp.py suits the degree to the longest document of the step instead, which no run can do.
"""

from __future__ import annotations

import numpy as np

from hf_longctx.planner.cost import CostModel
from hf_longctx.planner.dp_packing import first_fit
from hf_longctx.planner.micro_batches import Step
from hf_longctx.planner.plan import Mode, StepPlan
from hf_longctx.planner.topology import PlanError, Topology


def context_degree(context: int, topology: Topology) -> int:
    """Ranks of a group. Raises PlanError where all ranks together do not hold the context."""
    ranks, capacity = topology.world_size, topology.capacity
    if context > topology.tokens:
        raise PlanError(
            f"a context of {context} tokens exceeds {ranks} ranks x {capacity} tokens = {topology.tokens}; it needs "
            f">= {-(-context // capacity)} ranks, or a capacity >= {-(-context // ranks)}"
        )
    return next(d for d in range(1, ranks + 1) if ranks % d == 0 and d * capacity >= context)


def plan_static_context(
    lengths: np.ndarray, topology: Topology, cost: CostModel, mode: Mode = "async", *, context: int
) -> StepPlan:
    """Plan one optimizer step.

    Raises:
        PlanError: a document or the context is longer than all ranks hold, unequal ranks, or an unknown mode.
    """
    step = Step.checked(lengths, topology, cost, mode)
    step.refuse_unequal_ranks("static context parallelism")
    degree = context_degree(max(context, int(step.lengths.max())), topology)
    ordered = step.lengths[step.by_length]
    packed = first_fit(ordered, degree * topology.capacity)
    tokens = np.bincount(packed, ordered).astype(np.int64)
    sizes = np.minimum(degree, tokens)  # a rank without a token runs nothing
    packs = np.split(ordered[np.argsort(packed, kind="stable")], np.cumsum(np.bincount(packed))[:-1])
    costs = [step.cost.ring_time(pack, size) for pack, size in zip(packs, sizes.tolist())]
    first_rank = np.arange(len(sizes)) % (topology.world_size // degree) * degree
    first_member = np.cumsum(sizes) - sizes
    member = np.repeat(first_rank - first_member, sizes) + np.arange(int(sizes.sum()))
    micro_batch = np.empty(len(ordered), np.int64)
    micro_batch[step.by_length] = packed
    return step.plan("static_cp", micro_batch, sizes, member, np.array(costs, np.int64), "ring")
