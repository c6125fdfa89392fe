"""Orders of unequal ranks by speed, so that groups of neighbours consist of ranks that are about equally fast.

A document keeps all ranks of its group until the slowest is done: where fast and slow ranks alternate, every group of
neighbours is slow. So a step is planned for the same ranks in another order, and the plan is given back to them:

    ranks        0    1    2    3  |  4    5    6    7       speeds  1000 300 1000 300 | 1000 300 1000 300      nodes of 4
    in order     0    2  | 4    6  |  1    3  | 5    7       as nodes of 2

Ranks of a node are sorted by speed and cut into parts, and these are sorted by the mean of their speeds. Parts stand for nodes:
no more than their ranks are counted on to pass keys and values on inside a node. So parts of a whole node promise
nothing that does not hold, and smaller parts promise less than holds. Nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from hf_longctx.planner.cost import CostModel
from hf_longctx.planner.plan import SPLIT, StepPlan
from hf_longctx.planner.topology import Topology


@dataclass(frozen=True)
class RankOrder:
    """The ranks of a topology in another order."""

    rank: np.ndarray
    """int64 [world_size]: the rank of `original` at each place."""
    original: Topology
    topology: Topology
    """What each place is; its nodes are the parts."""

    def cost(self, cost: CostModel) -> CostModel:
        """Return the cost model of these places."""
        return replace(cost, ranks_per_node=self.topology.ranks_per_node)

    def given_back(self, plan: StepPlan, lower_bound: int) -> StepPlan | None:
        """Return a plan of places as one of ranks, with their lower bound. None if a rank would hold more than its capacity: in
        another order, a token that division leaves over may be another rank's."""
        micro_batch = np.repeat(np.arange(len(plan.cost)), plan.members)
        rank = self.rank[plan.rank]
        rank = rank[np.lexsort([rank, micro_batch])]
        holder = np.where(plan.holder == SPLIT, SPLIT, self.rank[plan.holder])
        found = replace(plan, topology=self.original, rank=rank, holder=holder, lower_bound=lower_bound)
        return found if (found.member_tokens <= self.original.capacities[rank]).all() else None


def orders_by_speed(topology: Topology) -> Iterator[RankOrder]:
    """Orders of unequal ranks: by nodes, by halves of nodes, and one by one; equal ones once."""
    size, before = topology.node_size, [np.arange(topology.world_size)]
    for part in dict.fromkeys((size, max(size // 2, 1), 1)) if topology.ranks_per_node else (size,):
        rank = _in_parts(topology, part)
        if any((rank == other).all() for other in before):
            continue
        before.append(rank)
        speed, memory = (
            None if each is None else tuple(np.array(each)[rank].tolist()) for each in (topology.speed, topology.memory)
        )
        nodes = part if topology.ranks_per_node else None
        yield RankOrder(rank, topology, replace(topology, speed=speed, memory=memory, ranks_per_node=nodes))


def _in_parts(topology: Topology, size: int) -> np.ndarray:
    """int64 [world_size]: ranks by parts of so many ranks of a node, the fastest parts first. Parts of fewer ranks come last, so
    that all others stay aligned."""
    ranks, speeds = np.arange(topology.world_size), topology.speeds
    node = ranks // topology.node_size
    by_node = np.lexsort([-speeds, node])  # stable: equal speeds in order
    begins = node * topology.node_size
    part = (ranks - begins) // size + begins  # unique: a part begins at its number or later
    _, part, count = np.unique(part, return_inverse=True, return_counts=True)
    mean = np.bincount(part, speeds[by_node]) / count
    place = np.empty(len(count), np.int64)
    place[np.lexsort([-mean, count < size])] = np.arange(len(count))
    return by_node[np.argsort(place[part], kind="stable")]
