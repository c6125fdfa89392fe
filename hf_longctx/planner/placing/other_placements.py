"""Placements of other planners, tried where ours ends late and there are few documents.

Ours gives every split document a micro-batch of its own. Where few documents meet few ranks, several that share one may balance
better: three documents over all of three ranks leave nothing idle. Dynamic context parallelism, static groups and ByteScale's
first algorithm place documents so, in a few milliseconds. Only where documents lie is taken from them. It is costed as our own
plans are, whose keys and values travel directly.

Before them, where every document is short enough, all stay whole: whole.py evens out by exchanges what ours evens out by splits.
Fifteen documents on four ranks ended at 1.020 times the bound with three of them split, and end at 1.017 with none. Such a plan
sends no keys and values, so it is taken where it ends as soon. Planning sends nothing.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hf_longctx.planner.baselines.bytescale import plan_bytescale_naive
from hf_longctx.planner.baselines.dynamic_cp import plan_dynamic_cp
from hf_longctx.planner.baselines.static_cp import plan_static_cp
from hf_longctx.planner.batch_lengths import longest_first
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.placing.packing import sums
from hf_longctx.planner.placing.search import GOOD_ENOUGH, TOGETHER
from hf_longctx.planner.placing.whole import plan_whole
from hf_longctx.planner.plan import StepPlan
from hf_longctx.planner.topology import SPLIT, PlanError

OTHERS = (plan_dynamic_cp, plan_static_cp, plan_bytescale_naive)
FEW = 2_000
"""Documents up to which they are tried: 30 ms for all three. Of 500 drawn steps of up to 5,000 documents, those that they made
end sooner had 4 to 1,368."""


def best_of_others(plan: StepPlan, lengths: np.ndarray, cost: CostModel) -> StepPlan:
    """Return the plan; or one that splits nothing if it ends as soon; or that of one of OTHERS if it ends clearly sooner.

    Args:
        plan: of equal ranks, mode "async" or "lockstep", in the units of `cost`.
        lengths: int64 [documents], tokens, in the order of the batch.
    """
    makespan = plan.timeline().makespan
    if len(lengths) > FEW or makespan * 1000 <= plan.lower_bound * GOOD_ENOUGH:
        return plan
    longest = int(lengths.max())
    could = longest <= plan.topology.capacity and int(cost.time(longest, 1)) <= makespan
    if could and (plan.holder == SPLIT).any():
        whole = _all_whole(plan, lengths, cost)
        end = whole.timeline().makespan
        if end <= makespan:
            plan, makespan = whole, end
    for planner in OTHERS:
        try:
            placed = planner(lengths, plan.topology, cost, plan.mode)
        except PlanError:
            continue  # the group that it would take holds no document of this length
        if (placed.length < placed.ranks_of_document).any():
            continue  # some of these ranks hold none of it, and others more than is counted
        placed = replace(
            placed,
            cost=_costs(placed, cost),
            lower_bound=plan.lower_bound,
            planner=plan.planner,
            exchange=plan.exchange,
        )
        end = placed.timeline().makespan
        if end * TOGETHER < makespan * 1000:
            plan, makespan = placed, end
    return plan


def _all_whole(plan: StepPlan, lengths: np.ndarray, cost: CostModel) -> StepPlan:
    """Plan the same documents with each of them on one rank."""
    order = longest_first(lengths)
    whole = plan_whole(lengths[order], lengths[order], order, plan.topology, cost, plan.mode)
    return replace(whole, lower_bound=plan.lower_bound)


def _costs(plan: StepPlan, cost: CostModel) -> np.ndarray:
    """int64 [micro-batches]: how long each takes.

    Split documents of a micro-batch travel together, so that they share its messages, and the attention of one hides the keys
    and values of another. Less than the lower bound counts must not come out: there, each document waits for its own.
    """
    spread, micro_batch, count = plan.ranks_of_document, plan.micro_batch_of_document, len(plan.cost)
    local = cost.without_exchange()
    first = np.diff(micro_batch, prepend=-1) > 0
    exchanging = cost.without_attention()
    linear = local.without_attention().work(plan.length, spread)
    exchange = np.where(
        first, exchanging.work(plan.length, spread), replace(exchanging, message_ns=0).work(plan.length, spread)
    )
    attention = local.work(plan.length, spread)
    together = sums(micro_batch, linear, count)
    hidden = np.maximum(*(sums(micro_batch, part - linear, count) for part in (attention, exchange)))
    least = sums(micro_batch, cost.work(plan.length, plan.topology.fewest_ranks(plan.length)), count)
    times = -(-np.maximum(together + hidden, least) // plan.members)
    np.maximum.at(times, micro_batch, cost.time(plan.length, spread))
    return times + cost.micro_batch_ns
