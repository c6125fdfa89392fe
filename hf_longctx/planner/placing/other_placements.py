"""Placements of other planners, tried where ours ends late and there are few documents.

Ours gives every split document a micro-batch of its own. Where few documents meet few ranks, several that share one may balance
better: three documents over all of three ranks leave nothing idle. Dynamic context parallelism and static groups place documents
so, others lie as ByteScale's first algorithm has them. Only where documents lie is taken from these planners. It is costed as our
own plans are, whose keys and values travel directly.

Before them, where every document is short enough, all stay whole: whole.py evens out by exchanges what ours evens out by splits.
Fifteen documents on four ranks ended at 1.020 times the bound with three of them split, and end at 1.017 with none. Such a plan
sends no keys and values, so it is taken where it ends as soon. Planning sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from hf_longctx.planner.baselines.bytescale import plan_bytescale_naive
from hf_longctx.planner.baselines.dynamic_cp import plan_dynamic_cp
from hf_longctx.planner.baselines.static_cp import context_degree, plan_static_cp
from hf_longctx.planner.batch_lengths import longest_first
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.placing.packing import sums
from hf_longctx.planner.placing.search import GOOD_ENOUGH, TOGETHER
from hf_longctx.planner.placing.whole import plan_whole
from hf_longctx.planner.plan import Mode, StepPlan
from hf_longctx.planner.topology import SPLIT, PlanError, Topology

FAR = 1030
"""Thousandths of the lower bound above which a plan ends late enough for others that take long, or rarely gain."""


@dataclass(frozen=True)
class Other:
    """A planner whose placement is tried where there are few enough documents."""

    planner: Callable[[np.ndarray, Topology, CostModel, Mode], StepPlan]
    near: int
    """Most documents that it is tried for if our plan ends within FAR."""
    far: int
    """Most documents that it is tried for if our plan ends later."""


MOST_MEMBERS = 100_000
"""Most ranks of all documents' groups together for each document to be tried alone in a static group."""


def _plan_static_groups_unpacked(lengths: np.ndarray, topology: Topology, cost: CostModel, mode: Mode) -> StepPlan:
    """Plan each document alone in a static group, where that takes no more members than MOST_MEMBERS; otherwise PlanError."""
    members = len(lengths) * context_degree(int(lengths.max()), topology)
    if members > MOST_MEMBERS:
        raise PlanError(f"{members} members in static groups of one document each; at most {MOST_MEMBERS} are tried")
    return plan_static_cp(lengths, topology, cost, mode, packed=False)


OTHERS = (
    Other(plan_dynamic_cp, near=300, far=10_000),
    Other(plan_static_cp, near=2_000, far=2_000),
    Other(_plan_static_groups_unpacked, near=0, far=2_000),
    Other(plan_bytescale_naive, near=0, far=2_000),
)
"""Planners that are tried, in this order. They make about 90 of 4,000 plans of drawn steps end more than 0.2 % sooner; for more
documents, they gained nothing. ByteScale's second algorithm is not among them: it spreads groups over up to six times as many
nodes as they need, which no cost counts."""
WHOLE_DOCUMENTS = 2_000
"""Most documents for a plan that splits nothing to be tried."""


def best_of_others(plan: StepPlan, lengths: np.ndarray, cost: CostModel) -> StepPlan:
    """Return the plan; or one that splits nothing if it ends as soon; or that of one of OTHERS if it ends clearly sooner.

    Args:
        plan: of equal ranks, mode "async" or "lockstep", in the units of `cost`.
        lengths: int64 [documents], tokens, in the order of the batch.
    """
    makespan = plan.timeline().makespan
    far = makespan * 1000 > plan.lower_bound * FAR
    others = [other.planner for other in OTHERS if len(lengths) <= (other.far if far else other.near)]
    if not others or makespan * 1000 <= plan.lower_bound * GOOD_ENOUGH:
        return plan
    longest = int(lengths.max())
    could = longest <= plan.topology.capacity and int(cost.time(longest, 1)) <= makespan
    if could and len(lengths) <= WHOLE_DOCUMENTS and (plan.holder == SPLIT).any():
        whole = _all_whole(plan, lengths, cost)
        end = whole.timeline().makespan
        if end <= makespan:
            plan, makespan = whole, end
    for planner in others:
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
