"""Hybrid Data Parallelism: every document gets its own group of ranks, and all ranks finish together.

`plan_step` plans one optimizer step. In mode `async` ranks meet where they share a document and at the end of the step,
nowhere else. A document of s tokens on d ranks keeps them busy for T(s, d) (cost.py). d is at least ceil(s / C), and
may be more, because a long document on the fewest ranks that hold it is often what everybody waits for.

1. A lower bound says how soon the step can end at best (bound.py). Targets a little above it are tried in turn.
2. Large documents, longest first, get groups that end before the target: blocks of adjacent ranks (blocks.py), and on
   few ranks also any ranks that are free first (least_loaded.py). A group holds its document in zigzag, alone in a
   micro-batch.
3. Small documents stay whole on one rank and communicate nothing. They first fill the holes in which a rank would wait
   for its group; the others, longest first, go to the rank that is done soonest (packing.py).
4. The whole documents that a rank runs between two meetings are packed into micro-batches of at most C tokens.

Mode `pipeline` differs in that the first micro-batch of a rank counts `stages` times (the others follow it through the
stages, and the pipeline empties at the end), and packs are even. Mode `lockstep` is in lockstep.py.

Groups are placed in one order and every rank meets its groups in that order: no deadlock. Costs are integers and ties
are broken the same way everywhere, so every rank computes the same plan from the lengths alone. Nothing is sent.

Source: ByteScale (arXiv 2502.21231) for the fewest ranks that fit and longest-first balance. Larger groups, blocks and
holes are ours.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np

from hf_longctx.planner.blocks import Ground, place_in_blocks
from hf_longctx.planner.bound import best_sizes, lower_bound, refuse_overflow
from hf_longctx.planner.cost import CostModel
from hf_longctx.planner.least_loaded import place_on_least_loaded
from hf_longctx.planner.lockstep import plan_lockstep
from hf_longctx.planner.offload import Offload, room_needed
from hf_longctx.planner.packing import grouped, pack, spread_whole, sums
from hf_longctx.planner.plan import MODES, SPLIT, Mode, StepPlan
from hf_longctx.planner.shares import proportional_shares, slowest_share
from hf_longctx.planner.topology import FULL, PlanError, Topology

TARGETS = (1000, 1002, 1005, 1010, 1020, 1030, 1050, 1080, 1120, 1200, 1350, 1600, 2000, 3000, 5000, 8000, 16000)
"""Makespans aimed at, in thousandths of the lower bound, until one is met."""
SHELVES = 12
"""Most shelves tried for each target."""
WIDE = (0, 1, 2, 3, 4, 6, 8)
"""How many of the longest documents go over all ranks, tried for each target on few ranks. With 0 alone, 1000 documents
of 32 to 2M tokens on 64 ranks end at up to 1.32 times the lower bound; with these, at 1.003."""
GOOD_ENOUGH = 1002
"""Thousandths of the lower bound at which the search ends: far below the error of any cost model."""
NO_GAIN = 1001
"""Thousandths: documents are not spread again where even perfect balance would gain less than this."""
ACROSS_NODES = 1005
"""Thousandths of the lower bound up to which groups of several nodes' ranks stay blocks."""
LARGE_SHARE = 20
"""A document that takes more than 1/20 of the lower bound on one rank may be split even if it fits there. For 6 documents
on 4 ranks, 1/10 ends 0.4 % later on average; 1/40 gains 0.3 % and splits 10 % more documents."""
THOROUGH = 50_000
"""Ranks times large documents up to which any ranks are tried as a group: about 1 ms for each try."""


@dataclass(frozen=True, slots=True)
class _Placement:
    """Which ranks hold which document. Documents are counted longest first: large ones, then small ones."""

    first_member: np.ndarray
    """[large + 1]"""
    member: np.ndarray
    """Ranks of each large document, ascending."""
    small_rank: np.ndarray
    small_before: np.ndarray | None
    """The large document that a small one runs before on its rank; the number of large ones if it runs after all. None:
    all run after all."""
    makespan: int


def plan_step(
    lengths: np.ndarray, topology: Topology, cost: CostModel, mode: Mode = "async", offload: Offload | None = None
) -> StepPlan:
    """Plan one optimizer step of all ranks.

    Args:
        lengths: integers [documents], tokens of each document of the global batch.
        topology: the ranks.
        cost: predicts what a document costs; it decides balance, never correctness.
        mode: "async", "lockstep" or "pipeline".
        offload: what host memory is worth, where activations may wait there; not in mode "lockstep".

    Raises:
        PlanError: nothing to plan, a document that all ranks together cannot hold, an unknown mode, or offload where it
            is not to be had.
    """
    lengths = validated(lengths, topology)
    if mode not in MODES:
        raise PlanError(f"mode is {mode!r}; valid: {', '.join(MODES)}")
    if offload is not None and (mode == "lockstep" or not topology.uniform):
        raise PlanError(
            f"offload with mode={mode!r} and {'equal' if topology.uniform else 'unequal'} ranks; valid: async or pipeline, "
            "with equal ranks"
        )
    order = longest_first(lengths)
    ordered = lengths[order]
    if mode == "lockstep":
        refuse_overflow(ordered, topology, cost)
        return plan_lockstep(ordered, order, topology, cost, ground_of(topology, cost))
    if mode == "pipeline":
        cost = cost.scaled(*[1 / topology.stages] * 3)  # a stage holds 1/p of the layers
    stages = topology.stages if mode == "pipeline" else 1
    bound = lower_bound(ordered, topology, cost, mode)
    times = cost.time(ordered, 1)
    placements = [_search(ordered, ordered, times, topology, cost, bound, stages)]
    if offload is not None:
        held = room_needed(ordered, topology, cost, bound, offload)
        bound = min(bound, lower_bound(ordered, topology, cost, mode, held))
        if (held < ordered).any():
            placements.append(_search(ordered, held, times, topology, cost, bound, stages))
    plans = [_build(placement, order, ordered, times, topology, cost, bound, mode, offload) for placement in placements]
    # A placement's own makespan leaves out how documents are packed, which may outweigh what offload saves.
    return plans[0] if len(plans) == 1 else min(plans, key=lambda plan: plan.timeline().makespan)


def validated(lengths: np.ndarray, topology: Topology) -> np.ndarray:
    """int64 [documents]. Raises PlanError unless every document can be planned."""
    lengths = np.asarray(lengths)
    if lengths.ndim != 1 or len(lengths) == 0 or not np.issubdtype(lengths.dtype, np.integer):
        raise PlanError(
            f"lengths has dtype {lengths.dtype} and shape {lengths.shape}; "
            "it must be integers, one per document, at least one"
        )
    lengths = lengths.astype(np.int64)
    shortest, longest = int(lengths.argmin()), int(lengths.argmax())
    if lengths[shortest] < 1:
        raise PlanError(f"document {shortest} has {lengths[shortest]} tokens; every document needs >= 1")
    if (tokens := int(lengths[longest])) > topology.tokens:
        ranks, capacity = topology.world_size, topology.capacity
        factors = "" if topology.memory is None else " (times their memory factors)"
        raise PlanError(
            f"document {longest} has {tokens} tokens; {ranks} ranks x {capacity} tokens of capacity{factors} hold "
            f"{topology.tokens}. It needs a capacity >= {-(-tokens * capacity // topology.tokens)}, or >= "
            f"{-(-tokens * ranks // topology.tokens)} ranks"
        )
    return lengths


def longest_first(lengths: np.ndarray) -> np.ndarray:
    """int64 [documents]: their indices by falling length, equal lengths in order."""
    bits = len(lengths).bit_length()
    longest = int(lengths.max())
    if longest.bit_length() + bits >= 63:
        return np.argsort(-lengths, kind="stable")
    # Sorting one 64-bit key per document is 6 times as fast as argsort.
    keys = ((longest - lengths) << bits) | np.arange(len(lengths))
    keys.sort()
    return keys & ((1 << bits) - 1)


def ground_of(topology: Topology, cost: CostModel, first_factor: int = 1) -> Ground:
    """What the compiled functions need of ranks and costs."""
    return Ground(
        speeds=topology.speeds,
        capacities=topology.capacities,
        before=np.concatenate([[0], np.cumsum(topology.capacities)]),
        uniform=topology.uniform,
        node=topology.node_size,
        multiple=topology.ulysses_degree,
        first_factor=first_factor,
        coefficients=cost.coefficients,
        micro_batch=cost.micro_batch_ns,
    )


def _search(
    lengths: np.ndarray,
    room: np.ndarray,
    times: np.ndarray,
    topology: Topology,
    cost: CostModel,
    bound: int,
    stages: int,
) -> _Placement:
    """Steps 2 and 3 for one target after another. `lengths` descend; `room` is what each document's group must have,
    `times` what each takes on one rank."""
    world_size = topology.world_size
    ground = ground_of(topology, cost, stages)
    large = int(np.count_nonzero((lengths > topology.capacities.min()) | (times > bound // LARGE_SHARE)))
    split, held = lengths[:large], room[:large]
    best_size = best_sizes(split, topology.fewest_ranks(held), world_size, cost.coefficients)
    # A small document brings its share of a micro-batch, so that ranks with many small ones are not underestimated.
    small_times = times[large:] + cost.micro_batch_ns * lengths[large:] // topology.capacity
    first_rank, sizes = np.empty(large, np.int64), np.empty(large, np.int64)
    loads = np.empty(world_size, np.int64)

    def in_blocks(target: int, ground: Ground, best: _Placement | None) -> _Placement | None:
        # Each document that needs more than half of all ranks has a shelf to itself.
        most_shelves = min(large, SHELVES + int(np.count_nonzero(2 * held > topology.tokens)))
        for shelves in range(most_shelves + 1):
            if place_in_blocks(split, held, best_size, target, shelves, ground, first_rank, sizes, loads):
                even = (int((loads * topology.speeds).sum()) // FULL + total_small) * FULL // total_speed
                if best is not None and even * NO_GAIN >= best.makespan * 1000:
                    return best
                first_member = np.concatenate([[0], np.cumsum(sizes)])
                member = np.repeat(first_rank - first_member[:-1], sizes) + np.arange(first_member[-1])
                return _better(best, _spread_small(first_member, member, small_times, loads.copy(), ground))
        return best

    total_small, total_speed = int(small_times.sum()), int(topology.speeds.sum())
    best: _Placement | None = None
    for thousandths in TARGETS:
        target = bound * thousandths // 1000
        if best is not None and best.makespan <= max(target, bound * GOOD_ENOUGH // 1000):
            break
        best = in_blocks(target, ground, best)
        if best is not None and best.makespan <= max(target, bound * GOOD_ENOUGH // 1000):
            break
        # Any ranks may lie on many nodes, which costs what no estimate counts: then only where blocks are far off.
        near = best is not None and topology.node_size < world_size and best.makespan * 1000 <= bound * ACROSS_NODES
        if world_size * large <= THOROUGH and not near:
            for wide in WIDE:
                if wide <= large:
                    best = _better(
                        best, _thorough(split, held, small_times, lengths[large:], wide, target, topology, ground)
                    )
    target = bound * TARGETS[-1] // 1000
    while best is None:  # blocks that are not cut at the borders of nodes always fit in the end
        target *= 2
        best = in_blocks(target, ground._replace(node=world_size), best)
    return best


def _better(a: _Placement | None, b: _Placement) -> _Placement:
    return b if a is None or b.makespan < a.makespan else a


def _spread_small(
    first_member: np.ndarray, member: np.ndarray, times: np.ndarray, loads: np.ndarray, ground: Ground
) -> _Placement:
    """Step 3 without holes. `times` descend."""
    _reserve_first(loads, times, ground)
    rank = spread_whole(times, loads, ground.speeds)
    return _Placement(first_member, member, rank, None, int(loads.max()))


def _reserve_first(loads: np.ndarray, times: np.ndarray, ground: Ground) -> None:
    """In a pipeline, what the first micro-batch of a rank without a group costs more than once: about a full one."""
    if ground.first_factor > 1 and len(times):
        loads[loads == 0] += (ground.first_factor - 1) * int(times.sum() // len(loads) // 4)


def _thorough(
    split: np.ndarray,
    held: np.ndarray,
    small_times: np.ndarray,
    small_lengths: np.ndarray,
    wide: int,
    target: int,
    topology: Topology,
    ground: Ground,
) -> _Placement:
    """Steps 2 and 3 on any ranks that are free first."""
    large, world_size = len(held), topology.world_size
    first_member, member = np.empty(large + 1, np.int64), np.empty(large * world_size, np.int64)
    loads = np.empty(world_size, np.int64)
    holes = np.empty((large * world_size, 3), np.int64)
    count = place_on_least_loaded(split, held, wide, target, ground, first_member, member, loads, holes)
    rank = np.empty(len(small_times), np.int64)
    before = np.full(len(small_times), large)
    times, tokens = small_times[::-1].tolist(), small_lengths[::-1].tolist()
    documents = list(range(len(small_times) - 1, -1, -1))
    for room, hole_rank, ends_it in sorted(holes[:count].tolist(), reverse=True):
        speed, capacity = int(topology.speeds[hole_rank]), int(topology.capacities[hole_rank])
        left = room * speed // FULL  # in time of a rank of speed 1000
        while fitting := min(bisect_right(times, left), bisect_right(tokens, capacity)):
            left -= times.pop(fitting - 1)
            tokens.pop(fitting - 1)
            document = documents.pop(fitting - 1)
            rank[document], before[document] = hole_rank, ends_it
    rest = np.array(documents[::-1], np.int64)
    _reserve_first(loads, small_times, ground)
    rank[rest] = spread_whole(small_times[rest], loads, ground.speeds)
    return _Placement(first_member, member[: first_member[-1]], rank, before, int(loads.max()))


def _build(
    placement: _Placement,
    order: np.ndarray,
    lengths: np.ndarray,
    times: np.ndarray,
    topology: Topology,
    cost: CostModel,
    bound: int,
    mode: Mode,
    offload: Offload | None,
) -> StepPlan:
    """Step 4, and the plan's columns. `order` holds the index in the batch of each document counted longest first."""
    world_size, large = topology.world_size, len(placement.first_member) - 1
    sizes = np.diff(placement.first_member)
    split = np.flatnonzero(sizes > 1)
    whole, rank, before = _whole_documents(placement, world_size)

    # Documents of one place lie on one rank and run before the same split document.
    place = rank if before is None else before * world_size + rank
    if before is None and world_size <= 2**16:
        by_place = np.argsort(place.astype(np.uint16), kind="stable")  # a radix sort
    else:
        by_place = np.argsort(place, kind="stable")
    whole, rank, place = whole[by_place], rank[by_place], place[by_place]
    times = times[whole]
    packed, packs = pack(place, lengths[whole], times, topology.capacities[rank], mode == "pipeline")
    any_of = np.empty(packs, np.int64)  # a document of each pack; all of a pack are of one place
    any_of[packed] = np.arange(len(packed))
    pack_rank = rank[any_of]
    pack_before = np.full(packs, large) if before is None else place[any_of] // world_size

    # One global order: a pack runs before the split document named in pack_before, both ascend.
    split_id = np.arange(len(split)) + np.searchsorted(pack_before, split, side="right")
    pack_id = np.arange(packs) + np.searchsorted(split, pack_before, side="left")
    micro_batches = len(split) + packs

    members = np.ones(micro_batches, np.int64)
    members[split_id] = sizes[split]
    first_member = np.concatenate([[0], np.cumsum(members)])
    ranks = np.empty(first_member[-1], np.int64)
    ranks[first_member[pack_id]] = pack_rank
    in_groups = np.repeat(sizes > 1, sizes)
    groups = placement.member[in_groups]
    at = np.ones(len(ranks), bool)
    at[first_member[pack_id]] = False
    ranks[at] = groups

    costs = np.empty(micro_batches, np.int64)
    costs[split_id] = _group_costs(lengths[split], sizes[split], groups, topology, cost)
    packed_times = sums(packed, times, packs) + cost.micro_batch_ns
    costs[pack_id] = packed_times if topology.speed is None else -(-packed_times * FULL // topology.speeds[pack_rank])

    ratios = np.zeros(micro_batches, np.int64)
    if offload is not None:
        ratios[split_id] = offload.ratio(-(-lengths[split] // sizes[split]), topology.capacity)
        ratios[pack_id] = offload.ratio(sums(packed, lengths[whole], packs), topology.capacity)

    micro_batch = np.empty(len(order), np.int64)
    micro_batch[order[split]] = split_id
    micro_batch[order[whole]] = pack_id[packed]
    holder = np.full(len(order), SPLIT)
    holder[order[whole]] = rank
    document, first_document = grouped(micro_batch, micro_batches)
    length = np.empty(len(order), np.int64)
    length[order] = lengths
    return StepPlan(
        topology=topology,
        first_member=first_member,
        rank=ranks,
        first_document=first_document,
        doc=document,
        length=length[document],
        holder=holder[document],
        cost=costs,
        lower_bound=bound,
        offload_share=offload.share if offload is not None else 0,
        offload=ratios,
        round=np.zeros(micro_batches, np.int64),
        mode=mode,
    )


def _group_costs(
    lengths: np.ndarray, sizes: np.ndarray, members: np.ndarray, topology: Topology, cost: CostModel
) -> np.ndarray:
    """int64: nanoseconds of documents, each alone in a micro-batch on its group; `members` holds group after group."""
    if topology.uniform:
        return cost.time(lengths, sizes) + cost.micro_batch_ns
    works = cost.work(lengths, sizes).tolist()
    costs = []
    for length, work, group in zip(lengths.tolist(), works, np.split(members, np.cumsum(sizes)[:-1])):
        speeds = topology.speeds[group]
        slowest = slowest_share(proportional_shares(length, speeds, topology.capacities[group]), speeds)
        costs.append(-(-work * int(slowest) // length) + cost.micro_batch_ns * FULL // int(speeds.min()))
    return np.array(costs, np.int64)


def _whole_documents(placement: _Placement, world_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """int64 [whole documents] each: which they are, their ranks, and the split document each runs before."""
    sizes = np.diff(placement.first_member)
    large = len(sizes)
    alone = np.flatnonzero(sizes == 1)
    whole = np.concatenate([alone, np.arange(large, large + len(placement.small_rank))])
    rank = np.concatenate([placement.member[placement.first_member[alone]], placement.small_rank])
    if placement.small_before is None:
        return whole, rank, None
    next_split = np.full(world_size, large)
    before = np.full(large, large)
    for i in range(large - 1, -1, -1):
        group = placement.member[placement.first_member[i] : placement.first_member[i + 1]]
        if len(group) > 1:
            next_split[group] = i
        else:
            before[i] = next_split[group[0]]
    # A hole lies before a large document that meets there, hence before a split one.
    return whole, rank, np.concatenate([before[alone], placement.small_before])
