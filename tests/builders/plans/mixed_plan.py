"""A plan in which ranks share some documents and hold others alone."""

import numpy as np

from hf_longctx.planner import StepPlan, Topology
from hf_longctx.planner.topology import SPLIT


def mixed_plan() -> StepPlan:
    """Ranks 0, 1 and 3 share document 0, rank 0 also holds all of 1; ranks 2 and 3 hold 2 and 3, without sharing; then all
    share 4 and 5."""
    plan = StepPlan(
        topology=Topology(world_size=4, capacity=40, ranks_per_node=2),
        first_member=np.array([0, 3, 5, 9]),
        rank=np.array([0, 1, 3, 2, 3, 0, 1, 2, 3]),
        first_document=np.array([0, 2, 4, 6]),
        doc=np.array([0, 1, 2, 3, 4, 5]),
        length=np.array([20, 30, 5, 6, 9, 17]),
        holder=np.array([SPLIT, 0, 2, 3, SPLIT, SPLIT]),
        cost=np.array([7, 3, 4]),
        lower_bound=5,
        offload=np.array([0, 0, 500]),
        round=np.zeros(3),
    )
    plan.check(plan.length)
    return plan
