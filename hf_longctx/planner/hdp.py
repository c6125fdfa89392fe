"""Hybrid Data Parallelism: every document gets its own group of ranks, and all ranks finish together.

`plan_step` plans one optimizer step. In mode `async` ranks meet where they share a document and at the end of the step,
nowhere else. A document of s tokens on d ranks keeps them busy for T(s, d) (cost.py). d is at least ceil(s / C), and
may be more, because a long document on the fewest ranks that hold it is often what everybody waits for.

1. A lower bound says how soon the step can end at best (bound.py). Targets a little above it are tried, until the lowest that
   can be met is found.
2. Large documents, longest first, get groups that end before the target: blocks of adjacent ranks (blocks.py); or only those
   up to the last that needs more than a node, and each node's ranks are divided among the others (bisection.py); and on
   few ranks also any ranks that are free first (least_loaded.py). A group holds its document in zigzag, alone in a
   micro-batch.
3. Small documents stay whole on one rank and communicate nothing. They first fill the holes in which a rank would wait
   for its group; the others, longest first, go to the rank that is done soonest (packing.py).
4. The whole documents that a rank runs between two meetings are packed into micro-batches of at most C tokens.

Mode `pipeline` differs in that the first micro-batch of a rank counts `stages` times (the others follow it through the
stages, and the pipeline empties at the end), and packs are even. Mode `lockstep` is in lockstep.py.

Groups have one order, that in which they were placed or begin, and every rank meets its groups in it: no deadlock. Costs are
integers and ties are broken the same way everywhere, so every rank computes the same plan from the lengths alone. Nothing is
sent.

Source: ByteScale (arXiv 2502.21231) for the fewest ranks that fit and longest-first balance. Larger groups, blocks and
holes are ours.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from hf_longctx.planner.assembly import Placement, assemble
from hf_longctx.planner.bisection import block_width, deal_out, large_documents, largest_room, place_by_bisection
from hf_longctx.planner.blocks import Ground, ground_of
from hf_longctx.planner.bound import best_sizes, lower_bound, refuse_overflow
from hf_longctx.planner.cost import CostModel
from hf_longctx.planner.effort import as_work_decides
from hf_longctx.planner.least_loaded import place_on_least_loaded
from hf_longctx.planner.lockstep import plan_lockstep
from hf_longctx.planner.offload import Offload, room_needed
from hf_longctx.planner.packing import spread_whole
from hf_longctx.planner.pipeline import best_counted_sizes, pipeline_grounds, with_micro_batches
from hf_longctx.planner.plan import MODES, Mode, StepPlan
from hf_longctx.planner.shelves import Shelves
from hf_longctx.planner.topology import FULL, PlanError, Topology

TARGETS = (
    *(1000, 1002, 1005, 1008, 1010, 1013, 1016, 1020, 1030, 1050, 1080, 1120),
    *(1200, 1350, 1600, 2000, 3000, 5000, 8000, 16000),
)
"""Makespans aimed at, in thousandths of the lower bound."""
BLOCKS_FIRST = 3
"""How many of them are tried with blocks alone before anything else, where there are many ranks."""
NEAR = 1008
"""Thousandths of the lower bound up to which blocks are not tried again there."""
FEW = 20_000
"""Large documents up to which shelves are tried even if each document fits into a node."""
ACROSS_NODES = 1005
"""Thousandths of the lower bound up to which groups of several nodes' ranks stay blocks."""
WIDE = (0, 1, 2, 3, 4, 6, 8)
"""How many of the longest documents go over all ranks, tried for each target on few ranks. With 0 alone, 1000 documents
of 32 to 2M tokens on 64 ranks end at up to 1.32 times the lower bound; with these, at 1.003."""
GOOD_ENOUGH = 1002
"""Thousandths of the lower bound at which the search ends: far below the error of any cost model."""
NO_GAIN = 1001
"""Thousandths: documents are not spread again where even perfect balance would gain less than this."""
LARGE_SHARE = 20
"""A document that takes more than 1/20 of the lower bound on one rank may be split even if it fits there. For 6 documents
on 4 ranks, 1/10 ends 0.4 % later on average; 1/40 gains 0.3 % and splits 10 % more documents."""
LITTLE = 200
"""Where all others together take less than 1/200 of the step, one that takes more than 1/1000 of it is large too: 3 documents
of 1/20 each, on ranks that are done at nearly the same time, would make it end 1/20 later."""
LARGE_BESIDE_LITTLE = 1000
"""See LITTLE."""
WORST = 2**62
"""Nanoseconds: more than any makespan."""
THOROUGH = 50_000
"""Ranks times large documents up to which any ranks are tried as a group: about 1 ms for each try."""
Place = Callable[[int, Placement | None], Placement | None]
"""Places all documents so that they end by a target, if it can: (target, best so far) -> the better one."""


@as_work_decides
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
    bound = lower_bound(ordered, topology, cost, mode)
    times = cost.time(ordered, 1)

    def placed(room: np.ndarray) -> list[tuple[Placement, Ground]]:
        goals = [(bound, ground_of(topology, cost))]
        if mode == "pipeline":
            goals = pipeline_grounds(ordered, topology.fewest_ranks(room), times, topology, cost)
        return [(_search(ordered, room, times, topology, cost, goal, ground), ground) for goal, ground in goals]

    placements = placed(ordered)
    if offload is not None:
        held = room_needed(ordered, topology, cost, bound, offload)
        bound = min(bound, lower_bound(ordered, topology, cost, mode, held))
        if (held < ordered).any():
            placements += placed(held)
    plans = [
        assemble(placement, order, ordered, times, topology, cost, bound, mode, offload, ground)
        for placement, ground in placements
    ]
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


def _search(
    lengths: np.ndarray,
    room: np.ndarray,
    times: np.ndarray,
    topology: Topology,
    cost: CostModel,
    bound: int,
    ground: Ground,
) -> Placement:
    """Steps 2 and 3 for targets until the lowest that can be met is found. `lengths` descend; `room` is what each document's
    group must have, `times` what each takes on one rank."""
    world_size = topology.world_size
    too_long = lengths > topology.capacities.min()
    large = int(np.count_nonzero(too_long | (times > bound // LARGE_SHARE)))
    if int(times[large:].sum()) < bound * int(topology.speeds.sum()) // FULL // LITTLE:
        # Too little to fill with what the large ones leave free: where each of them ends matters.
        large = int(np.count_nonzero(too_long | (times > bound // LARGE_BESIDE_LITTLE)))
    split, held = lengths[:large], room[:large]
    best_size = best_sizes(split, topology.fewest_ranks(held), world_size, cost.coefficients)
    if ground.stages > 1:
        best_size = best_counted_sizes(split, topology.fewest_ranks(held), best_size, ground)
    # A whole document brings its share of a micro-batch, so that ranks with many small ones are not underestimated.
    alone = with_micro_batches(lengths, times, ground)
    small_times = alone[large:]
    first_rank, sizes = np.empty(large, np.int64), np.empty(large, np.int64)
    loads, starts = np.empty(world_size, np.int64), np.empty(large, np.int64)

    block_ranks = block_width(ground.node)
    too_wide = (held > largest_room(block_ranks, ground)) | (
        cost.time(split, np.minimum(block_ranks, best_size)) > bound
    )
    wide = int(np.flatnonzero(too_wide)[-1]) + 1 if too_wide.any() else 0
    blocks = Shelves(split, held, best_size, ground, large if large <= FEW else wide)

    def in_blocks(
        target: int, best: Placement | None, blocks: Shelves = blocks, evenly: Sequence[bool] = (False, True)
    ) -> Placement | None:
        for even in evenly:
            if blocks.first_that_fits(target, even, first_rank, sizes, loads):
                best = spread(None, best)
            if met(best, target):
                break
        return best

    documents = large_documents(split, held, best_size, alone[:large], topology, cost, ground)
    shelves_of_wide = Shelves(split[:wide], held[:wide], best_size[:wide], ground, wide)

    def bisected(target: int, best: Placement | None) -> Placement | None:
        for even in (False, True) if wide else (False,):
            if shelves_of_wide.first_that_fits(target, even, first_rank[:wide], sizes[:wide], loads):
                dealt, roots = deal_out(wide, block_ranks, documents, loads, ground)
                if dealt:
                    starts[:wide] = -1
                    place_by_bisection(documents, roots, target, ground, first_rank, sizes, starts, loads)
                    best = spread(starts, best)
                    break
        return best

    def spread(starts: np.ndarray | None, best: Placement | None) -> Placement | None:
        """The better one of `best` and what has just been placed; `starts` decide in which order groups run."""
        evenly = (int((loads * topology.speeds).sum()) // FULL + total_small) * FULL // total_speed
        if best is not None and max(evenly * NO_GAIN // 1000, int(loads.max())) >= best.makespan:
            return best
        rank = spread_whole(small_times, loads, ground.speeds)
        if best is not None and int(loads.max()) >= best.makespan:
            return best
        order = np.arange(large) if starts is None else np.argsort(starts, kind="stable")
        first_member = np.concatenate([[0], np.cumsum(sizes[order])])
        member = np.repeat(first_rank[order] - first_member[:-1], sizes[order]) + np.arange(first_member[-1])
        return Placement(order, first_member, member, rank, None, int(loads.max()))

    total_small, total_speed = int(small_times.sum()), int(topology.speeds.sum())

    def met(best: Placement | None, target: int) -> bool:
        return best is not None and best.makespan <= max(target, bound * GOOD_ENOUGH // 1000)

    def thorough(target: int, best: Placement | None) -> Placement | None:
        # Any ranks may lie on many nodes, which costs what no estimate counts: then only where blocks are far off.
        near = best is not None and topology.node_size < world_size and best.makespan * 1000 <= bound * ACROSS_NODES
        if near or world_size * large > THOROUGH:
            return best
        for widest in WIDE:
            if widest <= large:
                limit = WORST if best is None else best.makespan
                found = _thorough(split, held, small_times, lengths[large:], widest, target, limit, topology, ground)
                best = best if found is None else _better(best, found)
        return best

    def lowest(place: Place, first: int, best: Placement | None) -> Placement | None:
        """The best that is placed for the lowest target that is met, as if all above it were met too, and that is below what has
        been found; TARGETS[first] is tried first, then those above it until something is placed."""
        low, high, probe = 0, len(TARGETS), first
        while low < high and not met(best, bound):
            target = bound * TARGETS[probe] // 1000
            if best is None or target < best.makespan:
                best = place(target, best)
            low, high = (low, probe) if met(best, target) else (probe + 1, high)
            probe = low if best is None else (low + high) // 2
        return best

    best: Placement | None = None
    if world_size * large > THOROUGH and ground.stages == 1:
        for target in (bound * thousandths // 1000 for thousandths in TARGETS[:BLOCKS_FIRST]):
            if not met(best, target):
                best = in_blocks(target, best, evenly=(False,))
        if not met(best, bound * TARGETS[BLOCKS_FIRST - 1] // 1000):
            best = lowest(bisected, 1, best)
        if not met(best, bound * NEAR // 1000):
            best = lowest(in_blocks, BLOCKS_FIRST, best)
    else:
        # What documents cost in a pipeline, bisection.py does not know.
        ways = (in_blocks, bisected, thorough) if ground.stages == 1 else (in_blocks, thorough)
        low, high = 0, len(TARGETS)
        while low < high:
            # One after another where the first are mostly met; in a pipeline they are not, as its bound leaves waiting out.
            middle = (low + high) // 2 if ground.stages > 1 else low
            target = bound * TARGETS[middle] // 1000
            for place in ways:
                if not met(best, target):
                    best = place(target, best)
            low, high = (low, middle) if met(best, target) else (middle + 1, high)
    target = bound * TARGETS[-1] // 1000
    uncut = Shelves(split, documents.held, best_size, ground._replace(node=world_size), large)
    while best is None:  # blocks that are not cut at the borders of nodes always fit in the end
        target *= 2
        best = in_blocks(target, best, uncut)
    return best


def _better(a: Placement | None, b: Placement) -> Placement:
    return b if a is None or b.makespan < a.makespan else a


def _thorough(
    split: np.ndarray,
    held: np.ndarray,
    small_times: np.ndarray,
    small_lengths: np.ndarray,
    wide: int,
    target: int,
    limit: int,
    topology: Topology,
    ground: Ground,
) -> Placement | None:
    """Steps 2 and 3 on any ranks that are free first; None if that must take until `limit` or longer."""
    large, world_size = len(held), topology.world_size
    first_member, member = np.empty(large + 1, np.int64), np.empty(large * world_size, np.int64)
    loads = np.empty(world_size, np.int64)
    holes = np.empty((large * world_size, 3), np.int64)
    count = place_on_least_loaded(split, held, wide, target, limit, ground, first_member, member, loads, holes)
    if count < 0:
        return None
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
    # Even if all ranks ended together: each document's time on its rank is rounded down.
    even = int((loads * topology.speeds).sum()) + int(small_times[rest].sum()) * FULL
    if (even - len(rest) * int(topology.speeds.max())) // int(topology.speeds.sum()) >= limit:
        return None
    rank[rest] = spread_whole(small_times[rest], loads, ground.speeds)
    return Placement(np.arange(large), first_member, member[: first_member[-1]], rank, before, int(loads.max()))
