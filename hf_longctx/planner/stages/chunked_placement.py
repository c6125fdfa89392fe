"""Mode "pipeline": for how long a chunk all stages wait, and what that makes of documents and micro-batches.

A rank of p stages needs the time of all its micro-batches in one stage, and (p - 1) times that of its longest chunk or
micro-batch of whole documents: its `unit`. A smaller unit means less waiting and more, dearer chunks. What it costs all in all is
estimated for some units, with every document on the fewest ranks that hold it:

    (p - 1)*unit  +  max( time of all documents / R,  the longest document's )

and the plans of the best ones (PLANNED) are compared. Nothing is sent.
"""

from __future__ import annotations

import numpy as np

from hf_longctx.planner.compiled import compiled, listed
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.cost.group_times import PlacementContext, chunks_on, equal_time, placement_context
from hf_longctx.planner.topology import FULL, Topology

UNITS = (8, 16, 32, 64)
"""Units that are tried: what a rank works on average over so much."""
PLANNED = 4
"""How many of them are planned with."""
WITHOUT_CHUNKS = (2, 16)
"""Units that are planned with where documents run whole."""


def pipeline_contexts(
    lengths: np.ndarray, fewest: np.ndarray, times: np.ndarray, topology: Topology, cost: CostModel
) -> list[tuple[int, PlacementContext]]:
    """Return what to plan with: nanoseconds at which ranks could at best be done, stages' waiting left out, and the context.

    Args:
        lengths, fewest, times: int64 [documents], longest first: tokens, fewest ranks, nanoseconds on one rank.
    """
    speed = int(topology.speeds.sum())
    context = placement_context(topology, cost, topology.stages, 0)
    mean = max(1, int(cost.work(lengths, fewest).sum()) * FULL // speed)
    if topology.stages == 1:
        return [(mean, context._replace(unit=mean))]
    if not topology.uniform:  # unequal ranks run no chunks
        return [(mean, context._replace(unit=max(1, mean // share))) for share in WITHOUT_CHUNKS]
    candidates = []
    split = int(np.count_nonzero(fewest > 1))
    for share in UNITS:
        of_unit = context._replace(unit=max(1, mean // share))
        _, chunked = chunk_split(lengths[:split], fewest[:split], of_unit)
        whole = with_micro_batches(lengths[split:], lengths[split:], times[split:], of_unit)
        goal = max(1, (int((chunked * fewest[:split]).sum()) + int(whole.sum())) // topology.world_size)
        best = best_counted_sizes(lengths[:1], fewest[:1], np.full(1, topology.world_size), of_unit)
        goal = max(goal, int(equal_time(int(lengths[0]), int(best[0]), of_unit)))
        candidates.append((goal + (topology.stages - 1) * of_unit.unit, goal, share, of_unit))
    return [(goal, of_unit) for _, goal, _, of_unit in sorted(candidates)[:PLANNED]]


def room_in_time(context: PlacementContext) -> int:
    """Nanoseconds of documents that a micro-batch of whole ones should hold, itself not counted; its launches take at most
    half of it."""
    return max(context.unit - context.micro_batch, context.micro_batch, 1)


def with_micro_batches(
    lengths: np.ndarray, tokens: np.ndarray, times: np.ndarray, context: PlacementContext, packs: int = 1000
) -> np.ndarray:
    """int64 [documents]: nanoseconds of whole documents, each with its share of a micro-batch, which `tokens` fill; `packs`: how
    many micro-batches there are for a thousand that would be full.

    Outside of a pipeline, a document of more than half the capacity has a micro-batch of its own, and shorter ones first fill
    what these leave: no two of the long ones lie together.
    """
    capacity = int(context.capacities[0])
    share = context.micro_batch * tokens // capacity
    if context.stages == 1:
        long = (2 * tokens > capacity) & (tokens <= capacity)
        short = int(tokens[2 * tokens <= capacity].sum())
        beside = min(capacity * int(long.sum()) - int(tokens[long].sum()), short)
        if beside:
            share = share // short * (short - beside) + share % short * (short - beside) // short
        share = np.minimum(share, context.micro_batch * 1000 // packs) * packs // 1000  # a micro-batch at most
        return times + np.where(long, context.micro_batch, share)
    _, chunked = chunk_whole(lengths, times, context)
    return chunked + np.maximum(share, context.micro_batch * times // room_in_time(context))


@compiled
def chunk_split(
    lengths: np.ndarray, sizes: np.ndarray, context: PlacementContext
) -> tuple[np.ndarray, np.ndarray]:  # pragma: no cover - compiled
    """int64 [documents] each: chunks of documents on so many ranks, and nanoseconds of each rank."""
    chunks, times = np.empty(len(lengths), np.int64), np.empty(len(lengths), np.int64)
    lengths, sizes = listed(lengths), listed(sizes)
    for i in range(len(lengths)):
        chunks[i], times[i] = chunks_on(lengths[i], sizes[i], context)
    return chunks, times


def chunk_whole(lengths: np.ndarray, times: np.ndarray, context: PlacementContext) -> tuple[np.ndarray, np.ndarray]:
    """int64 [documents] each: chunks of documents that lie on one rank, and their nanoseconds without one micro-batch;
    `times` are those without chunks."""
    chunks = np.ones(len(lengths), np.int64)
    if context.stages > 1 and context.uniform:
        long = np.flatnonzero(times + context.micro_batch > context.unit)
        times = times.copy()
        chunks[long], chunked_times = chunk_split(lengths[long], np.ones(len(long), np.int64), context)
        times[long] = chunked_times - context.micro_batch
    return chunks, times


@compiled
def best_counted_sizes(
    lengths: np.ndarray, fewest: np.ndarray, most: np.ndarray, context: PlacementContext
) -> np.ndarray:  # pragma: no cover - compiled
    """int64 [documents]: the number of equal ranks on which each document counts least, from `fewest` to `most`.

    Found by bisection, as if what further ranks save and what they cost met once: nearly so.
    """
    best = np.empty(len(lengths), np.int64)
    lengths, fewest, most = listed(lengths), listed(fewest), listed(most)
    for i in range(len(lengths)):
        low, high = fewest[i], max(fewest[i], min(most[i], lengths[i]))
        while low < high:
            middle = (low + high) // 2
            if equal_time(lengths[i], middle + 1, context) < equal_time(lengths[i], middle, context):
                low = middle + 1
            else:
                high = middle
        best[i] = low
    return best
