"""ByteScale's two planners: groups of the fewest ranks, dealt out in turn (Alg. 1) or to those that lag (Alg. 2).

A document of s tokens gets D(s) = ceil(s / C) ranks, any ranks, over which it is split alone; shorter ones are packed to
C tokens on one rank. Keys and values pass around the ring of the document's own ranks.

Algorithm 1, naive: documents in the order of the batch, the short ones packed best fit; each micro-batch takes the next
D ranks, cyclically. All ranks hold about as many tokens, and wait for those whose tokens are of the longest documents.

Algorithm 2, balanced: documents, longest first, lie in buckets of equal FLOPs. In each turn the ranks that lag more than
delta behind the busiest are served, the idlest first, until no document is left: as many as the next document needs, or
one, with as many short documents of its bucket as it holds. A group may take ranks in that do not lag.

    busy until |  A A A           |      Ranks 3, 4 and 5 lag, 5 the most. Of the next documents, each
       ^       |  A A A B B       |      of one rank, the first goes to 5, then one to 3 and one to 4.
       |       |  A A A B B .     |      0 to 2 get none in this turn.
       +-------+------------------+
                  0 1 2 3 4 5  ranks

    DP-balance (async, lockstep)   draws from the first bucket that has documents left: always the longest ones
    PP-balance (pipeline)          draws from the buckets in turn, so that micro-batches of all lengths follow each other

Without the selective offload of the paper, which planner "hdp" has too. Interpreted or compiled (planner/compiled.py); nothing
is sent.

Source: ByteScale (arXiv 2502.21231), sections 5 and 6. Where it leaves a number open, it is Megatron-Core's, whose
BalancedCPScheduler descends from Algorithm 2: delta, and one bucket for each group size that occurs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hf_longctx.planner.compiled import compiled
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.effort import as_work_decides
from hf_longctx.planner.placing.micro_batches import Step
from hf_longctx.planner.placing.packing import sums
from hf_longctx.planner.plan import Mode, StepPlan
from hf_longctx.planner.topology import Topology

DELTA = 50
"""Per mille of the busiest rank's time: Megatron-Core's default slack of 5 %."""


@as_work_decides
def plan_bytescale_naive(lengths: np.ndarray, topology: Topology, cost: CostModel, mode: Mode = "async") -> StepPlan:
    """Plan one optimizer step by Algorithm 1.

    Raises:
        PlanError: nothing to plan, a document that all ranks together cannot hold, unequal ranks, documents that must
            be alone, or an unknown mode.
    """
    step = Step.checked(lengths, topology, cost, mode)
    step.refuse_unequal_ranks("ByteScale's planner")
    step.refuse_kept_whole("ByteScale's planner", "packs short ones", kinds=("alone",))
    micro_batch = best_fit(step.lengths, topology.capacity)
    # Numbered in the order in which the batch first comes to them.
    _, first, named = np.unique(micro_batch, return_index=True, return_inverse=True)
    place = np.empty(len(first), np.int64)
    place[np.argsort(first)] = np.arange(len(first))
    micro_batch = place[named]
    sizes = np.ones(len(first), np.int64)
    fewest = topology.fewest_ranks(step.lengths)
    sizes[micro_batch] = fewest
    listed = np.repeat(np.arange(len(sizes)), sizes)
    ranks = np.arange(len(listed)) % topology.world_size
    member = np.sort(listed * topology.world_size + ranks) % topology.world_size
    costs = sums(micro_batch, _ring_times(step.lengths, fewest, step.cost), len(sizes)) + step.cost.micro_batch_ns
    return step.plan("bytescale_naive", micro_batch, sizes, member, costs, "ring")


@as_work_decides
def plan_bytescale_balanced(lengths: np.ndarray, topology: Topology, cost: CostModel, mode: Mode = "async") -> StepPlan:
    """Plan one optimizer step by Algorithm 2.

    Raises:
        PlanError: nothing to plan, a document that all ranks together cannot hold, unequal ranks, documents that must
            be alone, or an unknown mode.
    """
    step = Step.checked(lengths, topology, cost, mode)
    step.refuse_unequal_ranks("ByteScale's planner")
    step.refuse_kept_whole("ByteScale's planner", "packs short ones", kinds=("alone",))
    ordered = step.lengths[step.by_length]
    fewest = topology.fewest_ranks(ordered)
    member = np.empty(int(fewest.sum()), np.int64)
    sizes, costs = np.empty(len(ordered), np.int64), np.empty(len(ordered), np.int64)
    packed, count = _serve_lagging(
        ordered,
        fewest,
        _ring_times(ordered, fewest, step.cost),
        _buckets(step.cost.work(ordered, 1), len(np.unique(fewest))),
        step.mode == "pipeline",
        topology.capacity,
        step.cost.micro_batch_ns,
        topology.world_size,
        member,
        sizes,
        costs,
    )
    micro_batch = np.empty(len(ordered), np.int64)
    micro_batch[step.by_length] = packed
    sizes, costs = sizes[:count], costs[:count]
    return step.plan("bytescale_balanced", micro_batch, sizes, member[: int(sizes.sum())], costs, "ring")


def _ring_times(lengths: np.ndarray, sizes: np.ndarray, cost: CostModel) -> np.ndarray:
    """int64 [documents]: nanoseconds on a ring of so many ranks; over several nodes, all of it as slow as the link between
    them, and never faster than the direct exchange."""
    direct = cost.time(lengths, sizes)
    if cost.ranks_per_node is None:
        return direct
    one_link = replace(cost, inside_ps=max(cost.inside_ps, cost.between_ps), between_ps=0)
    return np.where(sizes > cost.ranks_per_node, np.maximum(direct, one_link.time(lengths, sizes)), direct)


def _buckets(flops: np.ndarray, count: int) -> np.ndarray:
    """int64 [count + 1]: bucket b holds documents b to b + 1, each about as many FLOPs; some may be empty."""
    ends = np.cumsum(flops)
    targets = [int(ends[-1]) * bucket // count for bucket in range(1, count)]
    return np.concatenate([[0], np.searchsorted(ends, targets), [len(flops)]]).astype(np.int64)


@compiled
def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:  # pragma: no cover - compiled
    """int64 [documents]: the fullest pack that has room for each document, in their order; those longer than `capacity`
    are alone in theirs.

    A binary tree over the tokens of room counts the packs that have so much: logarithmic time per document.
    """
    leaves = 1
    while leaves <= capacity:
        leaves *= 2
    with_room = np.zeros(2 * leaves, np.int64)  # packs whose room lies below each node
    newest = np.full(capacity + 1, -1)  # of the packs with so much room, a chain
    older = np.empty(len(lengths), np.int64)
    pack_of = np.empty(len(lengths), np.int64)
    packs = 0
    for i in range(len(lengths)):
        if lengths[i] > capacity:
            pack_of[i] = packs
            packs += 1
            continue
        node = leaves + lengths[i]
        while with_room[node] == 0:  # to the nearest subtree to the right that has a pack
            while node & 1:
                node //= 2
            if node == 0:
                break
            node += 1
        if node == 0:
            pack, room = packs, capacity
            packs += 1
        else:
            while node < leaves:
                node *= 2
                if with_room[node] == 0:
                    node += 1
            room = node - leaves
            pack = newest[room]
            newest[room] = older[pack]
            _count(with_room, leaves + room, -1)
        pack_of[i] = pack
        room -= lengths[i]
        older[pack] = newest[room]
        newest[room] = pack
        _count(with_room, leaves + room, 1)
    return pack_of


@compiled
def _count(tree: np.ndarray, node: int, change: int) -> None:  # pragma: no cover - compiled
    while node > 0:
        tree[node] += change
        node //= 2


@compiled
def _serve_lagging(
    lengths: np.ndarray,
    fewest: np.ndarray,
    times: np.ndarray,
    buckets: np.ndarray,
    in_turn: bool,
    capacity: int,
    micro_batch_time: int,
    world_size: int,
    member: np.ndarray,
    sizes: np.ndarray,
    costs: np.ndarray,
) -> tuple[np.ndarray, int]:  # pragma: no cover - compiled
    """Micro-batch of each document, int64 [documents], and their number.

    Args:
        lengths, fewest, times: int64 [documents], longest first: tokens, ranks, nanoseconds on these ranks.
        buckets: int64 [buckets + 1]: where each bucket begins and ends.
        in_turn: draw from one bucket after another, not from the first.
        member, sizes, costs: filled: ranks of each micro-batch, ascending; how many; nanoseconds.
    """
    loads = np.zeros(world_size, np.int64)
    next_in = buckets[:-1].copy()
    micro_batch_of = np.empty(len(lengths), np.int64)
    left, count, members = len(lengths), 0, 0
    bucket = -1
    while left > 0:
        order = np.argsort(loads, kind="mergesort")
        busiest = loads[order[-1]]
        lagging = 0
        while lagging < world_size and loads[order[lagging]] < busiest - busiest * DELTA // 1000:
            lagging += 1
        if lagging == 0:
            lagging = world_size
        at = 0
        while at < lagging and left > 0:
            drawn = (bucket + 1) % len(next_in) if in_turn else 0
            while next_in[drawn] == buckets[drawn + 1]:
                drawn = (drawn + 1) % len(next_in)
            first = next_in[drawn]
            size = fewest[first]
            if at + size > world_size:
                break  # in the next turn
            bucket = drawn
            room, cost, end = capacity - lengths[first], times[first], first + 1
            if size == 1:
                while end < buckets[drawn + 1] and lengths[end] <= room:
                    room -= lengths[end]
                    cost += times[end]
                    end += 1
            next_in[drawn] = end
            micro_batch_of[first:end] = count
            left -= end - first
            ranks = np.sort(order[at : at + size])
            at += size
            cost += micro_batch_time
            loads[ranks] = loads[ranks].max() + cost
            member[members : members + size] = ranks
            sizes[count], costs[count] = size, cost
            members += size
            count += 1
    return micro_batch_of, count
