"""Lockstep: every rank runs the same number of rounds, and each round costs its slowest rank.

ZeRO-2, ZeRO-3 and expert parallelism need this: their collectives make all ranks meet in every micro-batch.

A round of a given height is filled as filling.py says, and rounds follow each other as builder.py says. Where that ends late,
rounds are also filled through windows, and those of few documents as if exchange were dearer. Ranks that a round leaves empty get
no micro-batch in it.

Interpreted or compiled (planner/compiled.py); integers decide, and one ratio of them in float64, the same on every machine (a
division and a comparison, correctly rounded). Nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from hf_longctx.planner.bound import unit_bits
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.cost.group_times import PlacementContext, placement_context
from hf_longctx.planner.placing.assembly import group_costs
from hf_longctx.planner.placing.packing import sums
from hf_longctx.planner.placing.rounds.builder import NEVER, Rounds, RoundsBuilder
from hf_longctx.planner.placing.rounds.dealer import DEALT_DOCUMENTS
from hf_longctx.planner.plan import StepPlan
from hf_longctx.planner.topology import SPLIT, Topology

RESERVED_BELOW = (8, 2)
"""Documents shorter than these shares of the capacity wait until all others have their rounds, then fill the gaps; the
best of these plans, and of one in which none waits, is taken. Without that, 1000 documents of the GitHub distribution on 64 ranks
end 5 % later."""
RESERVED_TOKENS = 50
"""Only if they hold a 50th of all tokens: gaps are as large."""
GOOD_ENOUGH = 1005
"""Thousandths of the lower bound up to which nothing else is tried."""
WINDOWS = (990, 980, 960)
"""Per mille of a round's height that groups must take at first (filling.py), tried where rounds without end late."""
WINDOWS_ABOVE = 1025
"""Thousandths of the lower bound above which windows are tried, and rounds made higher: with windows, planning takes six times as
long."""
DEARER, DEARER_DOCUMENTS = 3.0, 5_000
"""Rounds of up to so many documents are then also filled as if exchange were so many times as slow: alone, a round is filled best
over more ranks than the step as a whole can spare. 155 documents on 84 ranks end at 1.079 times the bound, and so at 1.044.
Equal ranks only: unequal ones are planned in several orders already."""


def plans_in_rounds(
    lengths: np.ndarray,
    tokens: np.ndarray,
    order: np.ndarray,
    bound: int,
    topology: Topology,
    cost: CostModel,
    context: PlacementContext,
    windows: Sequence[int] = WINDOWS,
    soonest: int = NEVER,
) -> Iterator[StepPlan]:
    """Yield a plan in rounds, and then perhaps better ones, which take several times as long to find.

    Args:
        lengths, tokens: int64 [documents], longest first: tokens that a document counts as, and has.
        order: int64 [documents]: their indices in the global batch.
        bound: nanoseconds, of `lower_bound` in mode "lockstep". Plans that come near are good enough.
        windows: as WINDOWS.
        soonest: nanoseconds. There is no plan where it shows early that rounds hardly end by then.
    """
    rounds = None
    for rounds in rounds_tried(lengths, tokens, bound, RESERVED_BELOW, windows, topology, cost, context, soonest):
        yield _build(lengths, tokens, order, rounds, bound, topology, cost)
    late = rounds is not None and rounds.makespan * 1000 > bound * WINDOWS_ABOVE
    if not late or len(lengths) > DEARER_DOCUMENTS or not topology.uniform:
        return
    dearer = _dearer(lengths, topology, cost)
    if dearer is not None:
        seen = placement_context(topology, dearer)
        # How many ranks suit a document remains what the true costs say. Fewer would keep groups from being rounded up to whole
        # nodes, and the cost of sharing a node with others is not counted.
        rounds = best_rounds(lengths, tokens, bound, RESERVED_BELOW, (), topology, cost, seen)
        yield _build(lengths, tokens, order, rounds, bound, topology, cost)


def _dearer(lengths: np.ndarray, topology: Topology, cost: CostModel) -> CostModel | None:
    """Return the same costs with exchange DEARER times as slow; None where 64-bit integers would not do for them."""
    try:
        dearer = cost.scaled(exchange=DEARER)
    except ValueError:
        return None
    return dearer if unit_bits(lengths, topology, dearer) == 0 else None


def best_rounds(
    lengths: np.ndarray,
    footprints: np.ndarray,
    bound: int,
    reserved_below: Sequence[int],
    windows: Sequence[int],
    topology: Topology,
    cost: CostModel,
    context: PlacementContext,
) -> Rounds:
    """Return the last, which is the best, of `rounds_tried`."""
    *_, best = rounds_tried(lengths, footprints, bound, reserved_below, windows, topology, cost, context)
    return best


def rounds_tried(
    lengths: np.ndarray,
    footprints: np.ndarray,
    bound: int,
    reserved_below: Sequence[int],
    windows: Sequence[int],
    topology: Topology,
    cost: CostModel,
    context: PlacementContext,
    soonest: int = NEVER,
) -> Iterator[Rounds]:
    """Yield rounds, and better ones, in which short documents wait; then, where those end late and ranks are equal, or of few
    kinds and their documents too many to be dealt, the better of them and of rounds through windows.

    Args:
        lengths, footprints: int64 [documents], longest first: tokens that a document counts as, and those that its group must
            have room for.
        bound: nanoseconds. Plans that come near are good enough.
        reserved_below: shares of the capacity, as RESERVED_BELOW.
        windows: as WINDOWS; they are tried with the best of these shares.
        soonest: as of `plans_in_rounds`.
    """
    near = bound * WINDOWS_ABOVE // 1000
    builder = RoundsBuilder(lengths, footprints, topology, cost, context, near)
    tokens, capacity = np.append(0, np.cumsum(footprints)), int(topology.capacities.min())
    # Lengths fall, their negatives ascend: the first document that is no longer than the share.
    stops = [int(np.searchsorted(-lengths, -(capacity // share))) for share in reserved_below]
    # Where documents from there on hold little, or are all, nothing waits; equal stops make one plan.
    few = [stop == 0 or (tokens[-1] - tokens[stop]) * RESERVED_TOKENS < tokens[-1] for stop in stops]
    stops = [len(lengths) if nothing else stop for stop, nothing in zip(stops, few)]
    first = builder.rounds_unless_late(soonest)
    if first is None:
        return
    yield first
    best, best_stop = first, len(lengths)
    for stop in dict.fromkeys(stops):
        if stop == len(lengths) or best.makespan * 1000 <= bound * GOOD_ENOUGH:
            continue
        rounds = builder.rounds(stop, (), soonest)
        if rounds.makespan < best.makespan:
            best, best_stop = rounds, stop
            yield best
    through_windows = context.uniform or (topology.few_kinds and len(lengths) > DEALT_DOCUMENTS)
    if windows and through_windows and best.makespan > near:
        yield min(best, builder.rounds(best_stop, windows, soonest), key=lambda rounds: rounds.makespan)


def _build(
    lengths: np.ndarray,
    tokens: np.ndarray,
    order: np.ndarray,
    rounds: Rounds,
    bound: int,
    topology: Topology,
    cost: CostModel,
) -> StepPlan:
    """Documents whose micro-batch begins on the same rank in the same round share it."""
    places, micro_batch = np.unique(rounds.round * topology.world_size + rounds.first_rank, return_inverse=True)
    split = rounds.size > 1
    members = np.ones(len(places), np.int64)
    members[micro_batch[split]] = rounds.size[split]
    first_member = np.concatenate([[0], np.cumsum(members)])
    begins = places % topology.world_size
    # Ranks of one micro-batch after the other: 3 from rank 3 on, then 1 from rank 0 on, are [3, 3, 3, -3] + [0, 1, 2, 3].
    rank = np.repeat(begins - first_member[:-1], members) + np.arange(first_member[-1])

    # A member is as long busy as its share of a split document and its whole documents take; the slowest counts.
    member = first_member[micro_batch] + rounds.holder - begins[micro_batch]
    whole_times = sums(member[~split], cost.time(lengths[~split], 1), len(rank))
    shared = np.full(len(places), cost.micro_batch_ns)
    split_in_order = np.flatnonzero(split)[np.argsort(micro_batch[split])]
    groups = rank[np.repeat(np.isin(np.arange(len(places)), micro_batch[split]), members)]
    shared[micro_batch[split_in_order]] = group_costs(
        lengths[split_in_order], rounds.size[split_in_order], groups, topology, cost
    )
    alone = np.repeat(members == 1, members)
    times = np.repeat(shared, members) + whole_times
    in_group = np.repeat(shared, members) + topology.times(whole_times, rank)
    times = np.where(alone, topology.times(times, rank), in_group)
    document = np.lexsort([order, micro_batch])
    return StepPlan(
        topology=topology,
        first_member=first_member,
        rank=rank,
        first_document=np.searchsorted(micro_batch[document], np.arange(len(places) + 1)),
        doc=order[document],
        length=tokens[document],
        holder=np.where(split, SPLIT, rounds.holder)[document],
        cost=np.maximum.reduceat(times, first_member[:-1]),
        lower_bound=bound,
        offload=np.zeros(len(places), np.int64),
        round=places // topology.world_size,
        mode="lockstep",
    )
