"""The makespans that no plan can beat, however its documents are split and ordered.

    async      LB = max( shared / R,  longest )
    pipeline   LB = max( shared / R,  min over k of (1 + (p-1)/k) * (longest + (k-1)*launches) )   p stages; T of one
    lockstep   round_bound.py

    shared      sum_i work(s_i, D_i) + micro_batch * min(tokens_i / C, D_i)     D_i: fewest ranks that hold document i
    longest     max_i min_{D_i <= d <= R} T(s_i, d) + micro_batch          always the document that counts as longest

`shared` spreads all work evenly over the ranks; work never falls as d grows, so the fewest ranks give the least. Unequal ranks
wait for each other, which is counted as work (waiting_bound.py). Where a micro-batch takes long, that they are whole counts
(launch_bound.py).
`longest` is the document that takes longest on the ranks that suit it best.

In a pipeline, a document in k chunks passes the stages chunk by chunk: while its longest chunk, a k-th of it or more, passes
p-1 stages, the first or the last of them waits. Each further chunk costs at least the `launches` of a document and a
micro-batch, and k is at most `most_chunks`. That chunks also receive more keys is left out: the bound stays below.

Documents that stay whole take one rank each and no chunks, and are bounded further (whole_bound.py).

Unequal ranks: R is the sum of their speeds, and d ranks are the d fastest, or those with most memory.
"""

from __future__ import annotations

import math

import numpy as np

from hf_longctx.planner.compiled import borrowing, compiled, listed
from hf_longctx.planner.cost.cost_model import CostModel, work_of
from hf_longctx.planner.launch_bound import bound_of_launches
from hf_longctx.planner.round_bound import bound_of_rounds
from hf_longctx.planner.topology import FULL, Topology
from hf_longctx.planner.waiting_bound import work_with_waiting
from hf_longctx.planner.whole_bound import bound_of_whole

LARGEST_WORK = 2**62
"""Nanoseconds of all documents together up to which times are planned in nanoseconds."""
MANY_MEMBERS = 200_000
"""Members of groups of unequal ranks, on the fewest that hold each document: with more, two orders of ranks are tried. Where
ranks are of many kinds, no group gets more of them for being unequal then, and no better rounds are tried: this takes seconds, as
shares are found rank by rank."""
LARGEST_DOCUMENT = 2**52
"""The same of one document: times a speed (per mille) it still fits 64-bit integers."""
WORK_IN_UNITS = 2**57
"""Units of all documents together at most, where nanoseconds are too fine: targets of 16 times the lower bound still fit."""
DOCUMENT_IN_UNITS = 2**51
"""Units of one document at most: floats count them one by one."""
SIZES_TOGETHER = 8
"""Sizes of groups that are looked at together: up to an eighth larger than the smallest of them."""
ROUNDED = 1e-12
"""A share that is more than a product of three floats loses."""


def lower_bound(
    lengths: np.ndarray,
    topology: Topology,
    cost: CostModel,
    mode: str = "async",
    tokens: np.ndarray | None = None,
    footprints: np.ndarray | None = None,
) -> int:
    """Return a makespan that no plan goes below: nanoseconds, or units of a cost model in units.

    Args:
        lengths: int64 [documents], longest first, none longer than `Topology.longest_document`: tokens that each counts as.
        tokens: int64 [documents] that it has; None: as many.
        footprints: int64 [documents]: tokens of capacity that its group must have, where offload makes them fewer.
    """
    tokens = lengths if tokens is None else tokens
    if cost.unit_bits is None:
        bits = unit_bits(lengths, topology, cost)
        return lower_bound(lengths, topology, cost.in_units(bits), mode, tokens, footprints) << bits
    fewest = topology.fewest_ranks(tokens if footprints is None else footprints)
    work = cost.work(lengths, fewest)
    if footprints is None and not topology.stay_whole:
        work = work_with_waiting(work, tokens, topology)
    # A document that offload lets fewer ranks hold than its tokens fill has their micro-batches to itself.
    capacity = int(topology.capacities.max())
    packing = cost.micro_batch_ns * int(np.minimum(tokens, fewest * capacity).sum()) // capacity
    speed = int(topology.speeds.sum())
    longest = int(best_times(lengths[:1], fewest[:1], topology, cost)[0])
    whole = bound_of_whole(cost.time(lengths, 1), tokens, topology, cost, mode) if topology.stay_whole else 1
    shared = (int(work.sum()) + packing) * FULL // speed
    if footprints is None:
        shared = max(shared, bound_of_launches(work, tokens, cost.micro_batch_ns, topology))
    if mode == "lockstep":
        # In floats, as the product may exceed 64 bits, and a little less, as they round.
        shares = cost.micro_batch_ns * (tokens / int(topology.capacities.max())) * (1 - ROUNDED)
        launched = work + shares.astype(np.int64)

        def least(some: np.ndarray) -> np.ndarray:
            # As if they had no more tokens than they count as: none before them takes less then.
            return best_times(some, topology.fewest_ranks(some), topology, cost)

        return max(bound_of_rounds(lengths, tokens, launched, topology.tokens, speed, least), shared, whole)
    if mode == "pipeline":
        launches = cost.document_ns + cost.micro_batch_ns
        in_chunks = topology.uniform and not topology.stay_whole
        chunks = np.arange(1, topology.most_chunks + 1) if in_chunks else np.ones(1, np.int64)
        longest = int(((longest + (chunks - 1) * launches) * (chunks + topology.stages - 1) // chunks).min())
    return max(shared, longest, whole)


def best_times(lengths: np.ndarray, fewest: np.ndarray, topology: Topology, cost: CostModel) -> np.ndarray:
    """int64 [documents]: min over group sizes from `fewest` of T(s, d), the group being the fastest ranks, plus a
    micro-batch. Documents that stay whole take the fastest rank."""
    if topology.stay_whole:
        return (cost.time(lengths, 1) + cost.micro_batch_ns) * FULL // int(topology.speeds.max())
    sizes = best_sizes(lengths, fewest, topology.world_size, cost.coefficients)
    if topology.speed is None:
        return -(-cost.work(lengths, sizes) // sizes) + cost.micro_batch_ns
    micro_batch = cost.micro_batch_ns * FULL // int(topology.speeds.max())
    speeds = topology.summed_speed(np.arange(1, topology.world_size + 1))
    return _best_on_fastest(lengths, fewest, speeds, cost.coefficients) + micro_batch


@compiled
def _best_on_fastest(
    lengths: np.ndarray, fewest: np.ndarray, speeds: np.ndarray, coefficients: tuple[int, ...]
) -> np.ndarray:  # pragma: no cover - compiled
    """int64 [documents]: the least time of each on `fewest` or more of the fastest ranks. `speeds`: int64 [world_size], per mille
    of so many of them together. More ranks are slower ones: the best size of equal ranks need not be the best here."""
    times = np.empty(len(lengths), np.int64)
    lengths, fewest, speeds = listed(lengths), listed(fewest), listed(speeds)
    for i in range(len(lengths)):
        size, most, best = fewest[i], min(len(speeds), lengths[i]), 2**62
        while size <= most:
            end = min(size + size // SIZES_TOGETHER, most)
            # None of these sizes takes less: work never falls as ranks are more.
            if work_of(lengths[i], size, coefficients) * FULL // speeds[end - 1] < best:
                for ranks in range(size, end + 1):
                    best = min(best, work_of(lengths[i], ranks, coefficients) * FULL // speeds[ranks - 1])
            size = end + 1
        times[i] = best
    return times


@compiled
def best_sizes(
    lengths: np.ndarray, fewest: np.ndarray, world_size: int, coefficients: tuple[int, ...]
) -> np.ndarray:  # pragma: no cover - compiled
    """int64 [documents]: the group size from `fewest` to min(world_size, length) with the least T(s, d).

    T falls until the exchange outweighs what a further rank saves, then rises; so its minimum is found by bisection, which begins
    where that of the document before lies: neighbours are mostly of nearly the same length.
    """
    best = np.empty(len(lengths), np.int64)
    lengths, fewest = listed(lengths), listed(fewest)
    before = 1
    for i in range(len(lengths)):
        low, high = fewest[i], max(fewest[i], min(world_size, lengths[i]))
        step = 1
        if low <= before < high and _falls(lengths[i], before, coefficients):
            low = before + 1
            while low + step < high and _falls(lengths[i], low + step - 1, coefficients):
                low += step
                step *= 2
            high = min(high, low + step)
        elif low <= before <= high:
            high = before
            while high - step > low and not _falls(lengths[i], high - step, coefficients):
                high -= step
                step *= 2
            low = max(low, high - step)
        while low < high:
            middle = (low + high) // 2
            if _falls(lengths[i], middle, coefficients):
                low = middle + 1
            else:
                high = middle
        before = best[i] = low
    return best


def most_ranks(lengths: np.ndarray, fewest: np.ndarray, topology: Topology, cost: CostModel) -> np.ndarray:
    """int64 [documents]: the group size beyond which none of them ends sooner.

    Equal ranks: `best_sizes`. On unequal ranks, of which each is full, fast ones wait for slow ones. There, a document ends
    sooner on more ranks until each holds as much of it as suits its speed; more are not tried where that would take long.
    """
    best = best_sizes(lengths, fewest, topology.world_size, cost.coefficients)
    if topology.uniform or not (topology.few_kinds or int(fewest.sum()) <= MANY_MEMBERS):
        return best
    suiting = -(-fewest * int(topology.speeds.max()) * topology.world_size // int(topology.speeds.sum()))
    return np.maximum(best, np.minimum(suiting, np.minimum(topology.world_size, lengths)))


@borrowing
@compiled
def _falls(length: int, ranks: int, coefficients: tuple[int, ...]) -> bool:  # pragma: no cover - compiled
    """Whether a document takes less time on one rank more."""
    return work_of(length, ranks + 1, coefficients) / (ranks + 1) < work_of(length, ranks, coefficients) / ranks


def unit_bits(lengths: np.ndarray, topology: Topology, cost: CostModel) -> int:
    """Return k such that a step can be planned with 64-bit integers in units of 2^k nanoseconds: 0 wherever nanoseconds will do.

    Powers of two times all coefficients are powers of two times all times, and the same plan, where k is not 0.
    """
    total, one = largest_work(lengths, topology, cost)
    if total < LARGEST_WORK and one < LARGEST_DOCUMENT:
        return 0
    return math.frexp(max(total / WORK_IN_UNITS, one / DOCUMENT_IN_UNITS))[1]


def largest_work(lengths: np.ndarray, topology: Topology, cost: CostModel) -> tuple[float, float]:
    """Bounds on the nanoseconds of all documents, and of one, that no plan exceeds."""
    longest, tokens = float(lengths.max()), float(lengths.sum())
    ranks, fewest = float(topology.world_size), float(topology.fewest_ranks(lengths.max(keepdims=True))[0])
    # Every document over all ranks is more than any plan; so is what all of them lose there on short blocks.
    one = cost.most_work(longest, ranks, longest) + cost.micro_batch_ns * ranks
    reach = longest + cost.attention_half_tokens * (ranks - fewest)
    total = cost.most_work(reach, fewest, tokens, len(lengths)) + cost.micro_batch_ns * fewest * len(lengths)
    slowest = FULL / float(topology.speeds.min())
    return max(cost.largest_product(longest), total * slowest), one * slowest
