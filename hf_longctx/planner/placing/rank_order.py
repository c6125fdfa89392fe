"""Orders of unequal ranks by speed, so that groups of neighbours consist of ranks that are about equally fast.

A document keeps all ranks of its group until the slowest is done: where fast and slow ranks alternate, every group of
neighbours is slow. So a step is planned for the same ranks in another order, and the plan is given back to them:

    ranks        0    1    2    3  |  4    5    6    7       speeds  1000 300 1000 300 | 1000 300 1000 300      nodes of 4
    in order     0    2  | 4    6  |  1    3  | 5    7       as nodes of 2

Ranks of a node are sorted by speed and cut into parts, and these are sorted by the mean of their speeds. While a step is planned,
parts stand for nodes: no more than their ranks are counted on to pass keys and values on inside a node, so that an order is not
chosen for what its groups could not do. Ranks of nearly one speed may also be planned as if they were equal, which opens to
them what only equal ranks can do. What a plan costs is always counted on the ranks as they are. Nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.placing.assembly import group_costs
from hf_longctx.planner.placing.packing import sums
from hf_longctx.planner.plan import StepPlan
from hf_longctx.planner.topology import SPLIT, Topology


@dataclass(frozen=True)
class RankOrder:
    """The ranks of a topology in another order."""

    rank: np.ndarray
    """int64 [world_size]: the rank of `original` at each place."""
    original: Topology
    topology: Topology
    """Topology of the places; its nodes are the parts."""

    def cost(self, cost: CostModel) -> CostModel:
        """Return the cost model of these places."""
        part = self.topology.ranks_per_node
        if cost.ranks_per_node is None or part is None:
            return cost
        return replace(cost, ranks_per_node=min(cost.ranks_per_node, part))

    def given_back(self, plan: StepPlan, lengths: np.ndarray, cost: CostModel, lower_bound: int) -> StepPlan | None:
        """Return a plan of places as one of ranks.

        Args:
            plan: of these places.
            lengths: int64 [documents], what each counts as, in the order of the batch.
            cost, lower_bound: those of the ranks.

        Returns:
            The plan with costs as its ranks have them, or None if a rank would hold more than its capacity: in another order, a
            token that division leaves over is another rank's.
        """
        micro_batch = np.repeat(np.arange(len(plan.cost)), plan.members)
        rank = self.rank[plan.rank]
        rank = rank[np.lexsort([rank, micro_batch])]
        holder = np.where(plan.holder == SPLIT, SPLIT, self.rank[plan.holder])
        restored = replace(plan, topology=self.original, rank=rank, holder=holder, lower_bound=lower_bound)
        if (restored.member_tokens > self.original.capacities[rank]).any():
            return None
        return replace(restored, cost=_costs(restored, lengths[plan.doc], cost))


def _costs(plan: StepPlan, lengths: np.ndarray, cost: CostModel) -> np.ndarray:
    """int64 [micro_batches]: what each costs its slowest rank. `lengths`: int64 [documents], in the order of the plan."""
    members, micro_batch = plan.members, plan.micro_batch_of_document
    split = np.flatnonzero(plan.holder == SPLIT)
    shared = np.full(len(members), cost.micro_batch_ns)
    groups = plan.rank[np.repeat(np.isin(np.arange(len(members)), micro_batch[split]), members)]
    shared[micro_batch[split]] = group_costs(lengths[split], members[micro_batch[split]], groups, plan.topology, cost)
    whole = np.flatnonzero(plan.holder != SPLIT)
    key = np.repeat(np.arange(len(members)), members) * plan.world_size + plan.rank  # ascends
    member = np.searchsorted(key, micro_batch[whole] * plan.world_size + plan.holder[whole])
    own = sums(member, cost.time(lengths[whole], 1), len(plan.rank))
    alone = np.repeat(members == 1, members)
    in_group = np.repeat(shared, members) + plan.topology.times(own, plan.rank)
    times = np.where(alone, plan.topology.times(cost.micro_batch_ns + own, plan.rank), in_group)
    return np.maximum.reduceat(times, plan.first_member[:-1])


def orders_by_speed(topology: Topology, cost: CostModel) -> Iterator[RankOrder]:
    """Orders of unequal ranks: by halves of nodes, one by one, and by nodes; equal ones once. The first ends soonest for most."""
    before = [np.arange(topology.world_size)]
    size = topology.ranks_per_node or cost.ranks_per_node
    parts = dict.fromkeys((max(size // 2, 1), 1, size)) if size else (None,)
    for part in parts:
        rank = _in_parts(topology.speeds, size or topology.world_size, part or topology.world_size)
        if any((rank == other).all() for other in before):
            continue
        before.append(rank)
        speed, memory = (
            None if values is None else tuple(np.array(values)[rank].tolist())
            for values in (topology.speed, topology.memory)
        )
        yield RankOrder(rank, topology, replace(topology, speed=speed, memory=memory, ranks_per_node=part))


def as_if_equal(topology: Topology, orders: Iterable[RankOrder]) -> Iterator[RankOrder]:
    """Ranks as they are, and in each of these orders, as if all were equally fast while they are planned."""
    for order in (RankOrder(np.arange(topology.world_size), topology, topology), *orders):
        yield replace(order, topology=replace(order.topology, speed=None))


def _in_parts(speeds: np.ndarray, node_size: int, size: int) -> np.ndarray:
    """int64 [world_size]: ranks by parts of so many ranks of a node, the fastest parts first. Parts of fewer ranks come last, so
    that all others stay aligned."""
    ranks = np.arange(len(speeds))
    node = ranks // node_size
    by_node = np.lexsort([-speeds, node])  # stable: equal speeds in order
    begins = node * node_size
    part = (ranks - begins) // size + begins  # unique: a part begins at its number or later
    _, part, count = np.unique(part, return_inverse=True, return_counts=True)
    mean = np.bincount(part, speeds[by_node]) / count
    place = np.empty(len(count), np.int64)
    place[np.lexsort([-mean, count < size])] = np.arange(len(count))
    return by_node[np.argsort(place[part], kind="stable")]
