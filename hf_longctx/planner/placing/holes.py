"""Places a plan's whole documents anew, without barriers: first where ranks wait for a group, then where ranks are done soonest.

Rounds give each rank one micro-batch beside a long group, and niches let ranks wait, however many short documents there are:

    ranks 0-5  A A A A B B B w w w w w         A A A A B B B w w         A on all ranks but 6 and 7, B on all: before B, two
    rank 6     w . . . B B B w w w w w    ->   w w w w B B B w w         ranks have room for more whole documents w
    rank 7     w . . . B B B w w w w w         w w w w B B B w w

Groups keep their ranks and their order, and begin as soon as these ranks are free of other groups. What a rank waits for one then
is a hole. Whole documents come longest first, each goes to the largest hole, and those that fit into none to the ranks that are
done first (packing.py).

Interpreted or compiled (planner/compiled.py); integers only. Nothing is sent.
"""

from __future__ import annotations

from dataclasses import replace
from heapq import heapify, heapreplace
from typing import Any

import numpy as np

from hf_longctx.planner.compiled import compiled, listed
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.placing.packing import joined_rows, pack, spread_whole, sums
from hf_longctx.planner.placing.search import TOGETHER
from hf_longctx.planner.plan import WHOLE, StepPlan
from hf_longctx.planner.topology import FULL

NEAR = 1005
"""Thousandths of the lower bound up to which whole documents stay where they are."""


def fill_holes(plan: StepPlan, lengths: np.ndarray, cost: CostModel) -> StepPlan:
    """Return the plan, or one with the same groups that ends clearly sooner.

    Args:
        plan: of mode "async", without offload, in the units of `cost`.
        lengths: int64 [documents], tokens that each counts as, in the order of the batch.
    """
    topology, timeline = plan.topology, plan.timeline()
    longest = np.maximum.reduceat(plan.length, plan.first_document[:-1])
    moves = (plan.members == 1) & (longest <= topology.capacities.min())
    # Even if all ranks were done together.
    mean = topology.summed_work(timeline.rank_busy) // int(topology.speeds.sum())
    soonest = max(mean, plan.lower_bound * NEAR // 1000)
    if moves.all() or not moves.any() or soonest * TOGETHER >= timeline.makespan * 1000:
        return plan
    groups = np.flatnonzero(~moves)
    groups = groups[np.argsort(timeline.start[groups], kind="stable")]
    whole = np.flatnonzero(moves[plan.micro_batch_of_document])
    times = cost.time(lengths[plan.doc[whole]], 1)
    longest_first = np.argsort(-times, kind="stable")
    whole, times = whole[longest_first], times[longest_first]

    speeds, capacities, launch = topology.speeds, topology.capacities, cost.micro_batch_ns
    first_member, members = joined_rows(plan.first_member, groups)
    ranks, costs, tokens = plan.rank[members], plan.cost[groups], plan.length[whole]
    before, rank, loads = _in_holes(first_member, ranks, costs, times, tokens, launch, speeds, capacities)
    rest = rank < 0
    launches = launch * tokens[rest] // topology.capacity
    rank[rest] = spread_whole(times[rest] + launches, loads, speeds)
    if int(loads.max()) * TOGETHER >= timeline.makespan * 1000:
        return plan

    # Documents of one place lie on one rank and run before the same group.
    place = before * topology.world_size + rank
    by_place = np.argsort(place, kind="stable")
    whole, times, place, rank = whole[by_place], times[by_place], place[by_place], rank[by_place]
    tokens = plan.length[whole]
    packed, packs = pack(place, tokens, times, capacities[rank], np.ones(len(whole), np.int64), 0, False)
    any_of = np.empty(packs, np.int64)  # a document of each pack
    any_of[packed] = np.arange(len(packed))
    pack_rank, pack_times = rank[any_of], sums(packed, times, packs) + launch

    # Groups, then packs; from these, the order in which they run: a pack before the group of this index.
    runs_before = np.concatenate([np.arange(len(groups)), place[any_of] // topology.world_size])
    order = np.lexsort([np.arange(len(runs_before)) < len(groups), runs_before])
    first_member, members = joined_rows(np.append(first_member, len(ranks) + np.arange(1, packs + 1)), order)
    first_document, documents = joined_rows(plan.first_document, groups)
    in_packs = np.argsort(packed, kind="stable")
    documents = np.append(documents, whole[in_packs])
    ends = len(documents) - len(whole) + np.searchsorted(packed[in_packs], np.arange(packs), side="right")
    first_document, chosen = joined_rows(np.append(first_document, ends), order)
    documents = documents[chosen]
    ascending = np.lexsort([plan.doc[documents], np.repeat(np.arange(len(order)), np.diff(first_document))])
    documents = documents[ascending]
    holder = plan.holder.copy()
    holder[whole] = rank
    filled = replace(
        plan,
        first_member=first_member,
        rank=np.append(ranks, pack_rank)[members],
        first_document=first_document,
        doc=plan.doc[documents],
        length=plan.length[documents],
        holder=holder[documents],
        cost=np.append(costs, topology.times(pack_times, pack_rank))[order],
        offload=np.zeros(len(order), np.int64),
        round=np.zeros(len(order), np.int64),
        chunks=WHOLE,
    )
    return filled if filled.timeline().makespan * TOGETHER < timeline.makespan * 1000 else plan


@compiled
def _in_holes(
    first_member: np.ndarray,
    member: np.ndarray,
    costs: np.ndarray,
    times: np.ndarray,
    tokens: np.ndarray,
    launch: int,
    speeds: np.ndarray,
    capacities: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # pragma: no cover - compiled
    """Run groups as soon as their ranks are free, and give whole documents the time that ranks wait.

    Args:
        first_member, member, costs: int64 [groups + 1], [members] and [groups]: ranks of each group, and nanoseconds.
        times, tokens: int64 [documents], longest first: nanoseconds at speed 1000, and tokens.
        launch: nanoseconds of a micro-batch.

    Returns:
        int64 [documents] twice: the group that each document runs before, and its rank, or the number of groups and -1 where it
        fits into no hole; and int64 [world_size]: when each rank has done its groups.
    """
    groups, free = len(costs), np.zeros(len(speeds), np.int64)
    least = launch + times[-1]
    # By room, the most first: nanoseconds at speed 1000, less than 0, and the index of the hole's rank in `member`.
    holes: Any = [(np.int64(0), np.int64(0))]
    holes.pop()
    group_of = np.empty(len(member), np.int64)
    for group in range(groups):
        begin = np.int64(0)
        for i in range(first_member[group], first_member[group + 1]):
            begin = max(begin, free[member[i]])
            group_of[i] = group
        for i in range(first_member[group], first_member[group + 1]):
            rank = member[i]
            room = (begin - free[rank]) // FULL * speeds[rank]
            if room >= least:
                holes.append((-room, np.int64(i)))
            free[rank] = begin + costs[group]
    heapify(holes)
    left = np.zeros(len(member), np.int64)  # tokens that the last micro-batch in a hole has room for
    before, chosen = np.full(len(times), groups), np.full(len(times), -1)
    member, times, tokens, left = listed(member), listed(times), listed(tokens), listed(left)
    for document in range(len(times)):
        if len(holes) == 0:
            break
        room, i = -holes[0][0], holes[0][1]
        needs = times[document]
        if tokens[document] > left[i]:
            needs += launch
        if needs > room:
            continue
        if tokens[document] > left[i]:
            left[i] = capacities[member[i]]
        left[i] -= tokens[document]
        before[document], chosen[document] = group_of[i], member[i]
        heapreplace(holes, (needs - room, i))
    return before, chosen, free
