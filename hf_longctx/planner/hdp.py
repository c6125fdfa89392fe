"""Hybrid Data Parallelism: every document gets its own group of ranks, and all ranks finish together.

`plan_step` plans one optimizer step. In mode `async` ranks meet where they share a document and at the end of the step,
nowhere else. A document of s tokens on d ranks keeps them busy for T(s, d) (cost/cost_model.py). d is at least ceil(s / C), and
may be more, because a long document on the fewest ranks that hold it is often what everybody waits for. Files that are named
below lie in placing/, but for bound.py.

1. A lower bound says how soon the step can end at best (bound.py). Targets a little above it are tried, until the lowest that
   can be met is found.
2. Large documents get groups that end before the target: blocks of adjacent ranks, longest first (rank_blocks.py); or ranks
   that are free first get the longest document that fits there (niches.py); or only those up to the last that needs more than a
   node have blocks or windows of nodes (windows.py), and each node's ranks are divided among the others (bisection.py); on few
   ranks also any ranks that are free first (least_loaded.py). A group holds its document in zigzag, alone in a micro-batch.
   search.py chooses.
3. Small documents stay whole on one rank and communicate nothing. They first fill the holes in which a rank would wait
   for its group; the others, longest first, go to the rank that is done soonest (packing.py).
4. The whole documents that a rank runs between two meetings are packed into micro-batches of at most C tokens. In mode `async`,
   if that ends later than full ones would, 2 to 4 are done once more, with as many micro-batches as there were.
5. Where that ends clearly later than rounds might, rounds are made as for mode `lockstep` (rounds/), through windows only if it
   ends far from the bound, and taken without their barriers if they end clearly sooner. They are given up if they must end late.
6. Unequal ranks are planned for in other orders too, for few documents also as if they were equal (rank_order.py). Few documents
   on equal ranks may lie as other planners place them, or all stay whole (other_placements.py).
7. Where ranks still wait for groups, whole documents are placed anew in these holes (holes.py).

Where the model needs documents whole (`Topology.documents`), whole.py plans instead, in all modes.

Mode `pipeline` differs in that the first micro-batch of a rank counts `stages` times (the others follow it through the
stages, and the pipeline empties at the end), and packs are even. Mode `lockstep` is in rounds/lockstep.py.

Groups have one order, that in which they were placed or begin, and every rank meets its groups in it: no deadlock. Costs are
integers and ties are broken the same way everywhere, so every rank computes the same plan from lengths and labels alone. Nothing
is sent.

Source: ByteScale (arXiv 2502.21231) for the fewest ranks that fit and longest-first balance. Larger groups, blocks and
holes are ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from hf_longctx.planner.batch_lengths import longest_first, validated, validated_labels
from hf_longctx.planner.bound import MANY_MEMBERS, lower_bound, unit_bits
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.cost.group_times import PlacementContext, placement_context
from hf_longctx.planner.cost.selective_offload import LEAST_GAIN, Offload, room_needed
from hf_longctx.planner.effort import as_work_decides
from hf_longctx.planner.placing.assembly import assemble
from hf_longctx.planner.placing.bisection import at_least_later
from hf_longctx.planner.placing.holes import fill_holes
from hf_longctx.planner.placing.other_placements import best_of_others
from hf_longctx.planner.placing.rank_order import RankOrder, as_if_equal, orders_by_speed
from hf_longctx.planner.placing.rounds.builder import NEVER
from hf_longctx.planner.placing.rounds.lockstep import WINDOWS, WINDOWS_ABOVE, plans_in_rounds
from hf_longctx.planner.placing.search import GOOD_ENOUGH, NEAR, TOGETHER, Search
from hf_longctx.planner.placing.whole import plan_whole
from hf_longctx.planner.plan import ALL_LABELLED, MODES, Mode, StepPlan
from hf_longctx.planner.stages.chunked_placement import pipeline_contexts
from hf_longctx.planner.topology import SPLIT, PlanError, Topology

MOST_IN_ALL_ORDERS = 10_000
"""Documents up to which all orders of unequal ranks are tried, not two. Of 46 plans of more, the others shortened 4, by 0.7 to
2.3 %, in two to three times the time. Two are, however many: of 13 steps of more than MANY_MEMBERS on ranks of many kinds, 10 end
sooner by speed, one at 1.43 times the bound instead of 1.83, and one as they are, at 1.08 instead of 1.28."""
FAR = 1040
"""Thousandths of the bound of rounds above which a plan ends late enough for rounds to be tried where they promise little; where
they promise more, TOGETHER. Below that, they gained anything for 3 of 429 drawn steps, and took a fifth of all planning. Windows
are tried that far above the lower bound too: without barriers, they gained more than 0.3 % for 2 of 137 steps nearer to it."""
LATER = 1060
"""Thousandths of the plan's makespan up to which first rounds may end for windows, and dearer exchange, to be tried, and few
documents without barriers: 2,194 documents on 96 ranks end at 1.135 times the lower bound, in first rounds at 1.186, and in the
last ones at 1.114; 11 documents on 6 ranks 1.3 % later in rounds, and 0.35 % sooner without their barriers. Of 600 drawn steps,
those of more documents gained nothing by the latter."""
EVEN = 2
"""Documents to a rank; with fewer, rounds hardly ever end near their bound."""
MANY_DOCUMENTS, FAR_FOR_MANY = 5_000, 1020
"""With more, rounds take long (0.7 s for 82,000 documents on 917 ranks), and FAR is less: of 24 drawn steps that end 2 to 4 %
above the bound of rounds, these shortened 4, by 0.4 to 2.3 %, and doubled the time of planning. Of 70 of fewer documents and less
than EVEN, they shortened 3, by 0.3 to 0.8 %; tried for all plans, 25 of 999 that end within 1.045 of the bound, in four times the
time."""
WIDE, MOST_WIDE, ROUNDS = 20, 2_000, 15
"""Ranks that documents need each, on average, for them to be called wide, how many there may be then, and rounds that they fill
at least for some of these to end near their bound, however few documents there are to a rank: 495 documents of 53 ranks each, on
599 ranks, end at 1.012 times the bound so, and at 1.016 without."""
NEAR_IF_WIDE = 1004
"""NEAR of wide documents, whose groups seldom end together otherwise: of 53 drawn steps, rounds shortened 5 by 0.2 to 0.4 %."""
AS_COUNTED = 1003
"""Thousandths of when a placement was to end within which the plan that is made of it ends as counted. Whole documents are placed
as if their micro-batches were full; where the plan ends later than that, they are placed once more with as many as there are. Of
700 drawn steps, 66 ended later; 2,770 documents on 4,831 ranks, one on each, by 3 %."""
FEW_DOCUMENTS, QUICK = 30, 100
"""Up to so many, rounds take so little time that they are tried anyway; and on unequal ranks wherever they may gain 0.2 %, not
only above NEAR: on equal ones, that gained anything for 2 of 377 steps."""
FEW_FOR_WINDOWS = 300
"""Most documents for which windows are not tried in mode async: they take longer than all else there, and gained at most 0.6 %
of the makespan."""
ALIKE, MOST_AS_IF_EQUAL = 800, 150
"""Thousandths of the fastest rank's speed that the slowest has for ranks to be planned as if they were equal too, and documents
up to which they are: rounds of equal ranks are filled in more ways, which may save more than slow ranks lose. 52 documents on 36
ranks end at 1.16 times the bound in rounds, and so at 1.12. Of 66 drawn steps, none of more documents gained anything."""


@as_work_decides
def plan_step(
    lengths: np.ndarray,
    topology: Topology,
    cost: CostModel,
    mode: Mode = "async",
    offload: Offload | None = None,
    labels: np.ndarray | None = None,
) -> StepPlan:
    """Plan one optimizer step of all ranks.

    Args:
        lengths: integers [documents], tokens of each document of the global batch.
        topology: the ranks.
        cost: predicts what a document costs; it decides balance, never correctness.
        mode: "async", "lockstep" or "pipeline".
        offload: what host memory is worth, where activations may wait there; not in mode "lockstep". It lets documents lie on
            fewer ranks, so it does nothing for those that lie on one.
        labels: integers [documents], tokens of each that have a label; None: all. The output head computes nothing for others.

    Raises:
        PlanError: nothing to plan, a document that all ranks together (one rank, where documents stay whole) cannot hold, labels
            that are not 0 to `lengths`, an unknown mode, offload where it is not to be had, or a step that would take more than
            146 years.
    """
    tokens = validated(lengths, topology)
    labels = ALL_LABELLED if labels is None else validated_labels(labels, tokens)
    # What documents cost decides where they go; how long they are, where they have room.
    lengths = _counted(tokens, labels, topology, cost) if len(labels) else tokens
    if (lengths == tokens).all():
        labels = ALL_LABELLED
    if mode not in MODES:
        raise PlanError(f"mode is {mode!r}; valid: {', '.join(MODES)}")
    if offload is not None and (mode == "lockstep" or not topology.uniform):
        raise PlanError(
            f"offload with mode={mode!r} and {'equal' if topology.uniform else 'unequal'} ranks; valid: async or pipeline, "
            "with equal ranks"
        )
    order = longest_first(lengths)
    ordered, tokens = lengths[order], tokens[order]
    if mode == "pipeline":
        cost = cost.scaled(*[1 / topology.stages] * 3)  # a stage holds 1/p of the layers
    # From here on, times are in units of 2^bits nanoseconds.
    bits = unit_bits(ordered, topology, cost)
    cost = cost.in_units(bits)
    if topology.stay_whole:
        plan = plan_whole(ordered, tokens, order, topology, cost, mode)
        return _labelled(plan, labels).in_nanoseconds(bits)
    if topology.uniform or mode == "pipeline":
        best = _best(_planned(ordered, tokens, order, topology, cost, mode, offload))
    else:
        best = _in_best_order(ordered, tokens, order, topology, cost, mode)
        if (
            mode == "async"
            and len(ordered) <= FEW_DOCUMENTS
            and best
            and _makespan(best) * 1000 > best.lower_bound * NEAR
        ):
            # Orders are chosen among by what rounds take with their barriers, or without: the best ones may be of another.
            rounds = _in_best_order(ordered, tokens, order, topology, cost, "lockstep")
            best = _best([_without_barriers(rounds, best.lower_bound)] if rounds else [], best)
    assert best is not None, "ranks as they are give a plan"
    plan = best
    if topology.uniform and mode != "pipeline" and not len(labels):
        plan = best_of_others(plan, lengths, cost)
    if mode == "async" and offload is None:
        plan = fill_holes(plan, lengths, cost)
    return _labelled(plan, labels).in_nanoseconds(bits)


def _planned(
    ordered: np.ndarray,
    tokens: np.ndarray,
    order: np.ndarray,
    topology: Topology,
    cost: CostModel,
    mode: Mode,
    offload: Offload | None = None,
    least: int | None = None,
) -> Iterator[StepPlan]:
    """Plan documents in units of the cost model; yield one plan, then others that may be better.

    Args:
        ordered, tokens: int64 [documents], longest first: tokens that a document counts as, and has.
        order: int64 [documents]: their indices in the global batch.
        least: nanoseconds; others follow unless the first plan ends near it. None: the lower bound.
    """
    bound = lower_bound(ordered, topology, cost, mode, tokens)
    if mode == "lockstep":
        yield from plans_in_rounds(ordered, tokens, order, bound, topology, cost, placement_context(topology, cost))
        return
    times = cost.time(ordered, 1)

    def placed(room: np.ndarray, goal: int, context: PlacementContext, packs: int = 1000) -> tuple[int, StepPlan]:
        search = Search(ordered, at_least_later(tokens), room, times, topology, cost, goal, context, packs)
        placement = search.best()
        arguments = (order, ordered, tokens, times, topology, cost, bound, mode, offload, context)
        return placement.makespan, assemble(placement, *arguments)

    def planned(room: np.ndarray) -> StepPlan:
        goals = [(bound, placement_context(topology, cost))]
        if mode == "pipeline":
            goals = pipeline_contexts(ordered, topology.fewest_ranks(room), times, topology, cost)
        plans = []
        for goal, context in goals:
            end, plan = placed(room, goal, context)
            plans.append(plan)
            if mode == "async" and _makespan(plan) * 1000 > max(end * AS_COUNTED, bound * GOOD_ENOUGH):
                packs = _packs_for_a_thousand(plan)
                if packs > 1000:
                    plans.append(placed(room, goal, context, packs)[1])
        # A placement's own makespan leaves out how documents are packed.
        return min(plans, key=_makespan)

    plan = planned(at_least_later(tokens))
    if offload is not None:
        room = tokens
        # Where it is not enough to move what saves much of a document's work, also what keeps it from meeting on a second rank.
        for least_gain in (LEAST_GAIN, 0.0):
            if least_gain == 0 and _makespan(plan) * 1000 <= bound * NEAR:
                break
            before, room = room, room_needed(ordered, tokens, topology, cost, bound, offload, least_gain)
            bound = min(bound, lower_bound(ordered, topology, cost, mode, tokens, room))
            if (room != before).any():
                other = planned(room)
                plan = other if _is_clearly_better(other, plan) else plan
        plan = replace(plan, lower_bound=bound)
    yield plan
    documents, members = len(ordered), int(topology.fewest_ranks(tokens).sum())
    if mode != "async" or not (topology.few_kinds or members <= MANY_MEMBERS):
        return
    wide = topology.uniform and documents <= MOST_WIDE and members >= WIDE * documents
    near = NEAR_IF_WIDE if wide else _near(documents, topology)
    soonest = _makespan(plan)
    if soonest * 1000 <= (bound if least is None else least) * near:
        return
    likely = documents <= FEW_DOCUMENTS or EVEN * topology.world_size <= documents <= MANY_DOCUMENTS
    likely |= wide and members >= ROUNDS * topology.world_size
    bound_of_rounds = lower_bound(ordered, topology, cost, "lockstep", tokens)
    unlikely = FAR_FOR_MANY if documents > MANY_DOCUMENTS else FAR
    if soonest * 1000 <= bound_of_rounds * (TOGETHER if likely else unlikely):
        return
    far = soonest * 1000 > bound * FAR and FEW_FOR_WINDOWS < documents <= MANY_DOCUMENTS
    windows = WINDOWS if far else ()
    # Rounds that end late at first may end in time through windows, or without their barriers, up to LATER: that is worth a
    # look where it takes little time. Of ranks in another order, they may where they are given back: by how much is not known.
    late = LATER if far or documents <= FEW_DOCUMENTS else 1000
    by = soonest * late // 1000 if least is None else NEVER
    context = placement_context(topology, cost)
    for rounds in plans_in_rounds(ordered, tokens, order, bound_of_rounds, topology, cost, context, windows, by):
        rounds = _without_barriers(rounds, bound)
        yield rounds
        if _makespan(rounds) * 1000 > soonest * (LATER if far else NEAR):
            return  # better rounds hardly ever gain that much


def _without_barriers(rounds: StepPlan, bound: int) -> StepPlan:
    """Return a plan in rounds as one of mode "async", with the lower bound of that."""
    return replace(rounds, mode="async", round=np.zeros_like(rounds.round), lower_bound=bound)


def _packs_for_a_thousand(plan: StepPlan) -> int:
    """How many micro-batches of whole, short documents alone the plan has for a thousand that would be full."""
    capacity, micro_batch = int(plan.topology.capacities[0]), plan.micro_batch_of_document
    whole = plan.holder != SPLIT
    long = 2 * plan.length > capacity
    apart = whole & ~long & ~np.isin(micro_batch, micro_batch[whole & long])
    tokens = int(plan.length[apart].sum())
    return len(np.unique(micro_batch[apart])) * capacity * 1000 // tokens if tokens else 1000


def _near(documents: int, topology: Topology) -> int:
    """Thousandths of the lower bound up to which a plan is near enough for rounds not to be tried."""
    return NEAR if topology.uniform or documents > QUICK else GOOD_ENOUGH


def _makespan(plan: StepPlan) -> int:
    return plan.timeline().makespan


def _best(plans: Iterable[StepPlan], best: StepPlan | None = None) -> StepPlan | None:
    """Return the first plan that no later one clearly beats, `best` before all; None where there is none."""
    for plan in plans:
        if best is None or _is_clearly_better(plan, best):
            best = plan
    return best


def _is_clearly_better(plan: StepPlan, best: StepPlan) -> bool:
    return _makespan(plan) * TOGETHER < _makespan(best) * 1000


def _in_best_order(
    ordered: np.ndarray, tokens: np.ndarray, order: np.ndarray, topology: Topology, cost: CostModel, mode: Mode
) -> StepPlan | None:
    """Plan unequal ranks in orders by speed, as they are second, and, if documents are few, as if ranks of nearly one speed were
    equal, until one order's plan ends soon: in rounds, where better ones of equal ranks are not looked for either. Return the
    first plan that no later one clearly beats."""
    lengths = np.empty_like(ordered)
    lengths[order] = ordered
    bound = lower_bound(ordered, topology, cost, mode, tokens)

    def planned(other: RankOrder | None) -> Iterator[StepPlan]:
        if other is None:
            yield from _planned(ordered, tokens, order, topology, cost, mode)
            return
        for placed in _planned(ordered, tokens, order, other.topology, other.cost(cost), mode, least=bound):
            plan = other.given_back(placed, lengths, cost, bound)
            if plan is not None:
                yield plan

    by_speed = list(orders_by_speed(topology, cost))
    orders: list[RankOrder | None] = [*by_speed[:1], None, *by_speed[1:]]
    if int(topology.fewest_ranks(tokens).sum()) > MANY_MEMBERS or len(ordered) > MOST_IN_ALL_ORDERS:
        orders = orders[:2]
    elif len(ordered) <= MOST_AS_IF_EQUAL and topology.memory is None and _alike(topology):
        orders += as_if_equal(topology, by_speed[:1])
    near = bound * (WINDOWS_ABOVE if mode == "lockstep" else NEAR)
    best: StepPlan | None = None
    for other in orders:
        best = _best(planned(other), best)
        if best is not None and _makespan(best) * 1000 <= near:
            break
    return best


def _alike(topology: Topology) -> bool:
    return bool(topology.speeds.min() * 1000 >= topology.speeds.max() * ALIKE)


def _counted(tokens: np.ndarray, labels: np.ndarray, topology: Topology, cost: CostModel) -> np.ndarray:
    """int64 [documents]: tokens that each counts as."""
    counted, capacity = cost.equivalent_lengths(tokens, labels), int(topology.capacities.min())
    if topology.stay_whole:
        return counted
    if not topology.uniform:  # a rank's share may end at its capacity, which one of a shorter document would not reach
        return np.where(tokens > capacity, tokens, counted)
    # A document that needs more ranks than another comes before it: it counts as the shortest that needs as many.
    return np.maximum(counted, (tokens - 1) // capacity * capacity + 1)


def _labelled(plan: StepPlan, labels: np.ndarray) -> StepPlan:
    """Return the plan with its column `labels`, of int64 [documents] in the order of the batch, or [0]: all tokens have one."""
    return replace(plan, labels=labels[plan.doc]) if len(labels) else plan
