"""When groups of ranks end: what a document takes on ranks, equal or not, mostly adjacent ones, and whether that is in time.

Interpreted or compiled (planner/compiled.py); integers only. Nothing is sent.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hf_longctx.planner.compiled import borrowing, by_address, compiled, inlined, listed, remembered
from hf_longctx.planner.cost.cost_model import CostModel, work_of
from hf_longctx.planner.placing.rank_shares import TWO_TOKENS, least_slowest_share, slowest_of_kinds, slowest_share
from hf_longctx.planner.stages.causal_chunks import best_chunks, counted
from hf_longctx.planner.topology import FULL, Topology

SMALLEST_CHUNK = 32
"""Chunks hold a 32nd of a rank's tokens or more: matrix products of few tokens are slow, which a cost model does not know."""


SPEEDS = 32
"""Speeds that ranks of more than MOST_KINDS kinds are counted as while they are placed, in groups of more than twice as many. Of
282 drawn steps on unequal ranks, 30 were planned otherwise than by the speed of each rank, and ended 0.27 % later at worst;
those of groups of hundreds of ranks were planned in a fifth to a half of the time."""
SHORT, FEW_RANKS = 2**44, 2**18
"""Nanoseconds and ranks whose product 64-bit integers hold."""
LARGEST_PRODUCT = 2.0**62
"""Largest product of a document's tokens and those of its slowest rank: 64-bit integers hold it."""


@by_address
class PlacementContext(NamedTuple):
    """Ranks and cost coefficients, as a named tuple for the compiled functions."""

    speeds: np.ndarray
    """int64 [world_size], per mille."""
    speed_before: np.ndarray
    """int64 [world_size + 1]: per mille of all ranks before each together."""
    capacities: np.ndarray
    """int64 [world_size], tokens."""
    capacity: int
    """Tokens of rank 0."""
    before: np.ndarray
    """int64 [world_size + 1]: tokens that the ranks before each hold together."""
    slowest: int
    """Per mille of the slowest rank."""
    fastest: int
    """The same of the fastest."""
    smallest: int
    """Tokens of the rank that holds fewest."""
    kind_speeds: np.ndarray
    """int64 [kinds], per mille, of ranks that are alike, or nearly: see `_kinds`; [0] where all are equal."""
    kind_capacities: np.ndarray
    """int64 [kinds], tokens."""
    kind: np.ndarray
    """int64 [world_size]: the kind of each rank, where there are kinds."""
    kinds_before: np.ndarray
    """int64 [world_size + 1, kinds]: ranks of each kind before each rank."""
    counts: np.ndarray
    """int64 [kinds]: room for whoever counts the ranks of a group."""
    uniform: bool
    node: int
    """Ranks per node."""
    multiple: int
    """Ulysses degree."""
    stages: int
    """Stages of a pipeline; 1 without."""
    unit: int
    """Nanoseconds of the chunks for which all stages wait anyway (planner/stages/causal_chunks.py)."""
    most: int
    """Chunks of a document."""
    least: int
    """Tokens that a rank must have of a chunk, on average."""
    linear_tokens: int
    """s0 of planner/stages/causal_chunks.py."""
    coefficients: tuple[int, ...]
    micro_batch: int
    """Nanoseconds, or the units of the cost model; so is every other time."""


def placement_context(topology: Topology, cost: CostModel, stages: int = 1, unit: int = 0) -> PlacementContext:
    """Return what the compiled functions need of ranks and costs."""
    kinds, kind = _kinds(topology)
    of_kind = kind[:, None] == np.arange(kinds.shape[1])
    return PlacementContext(
        speeds=topology.speeds,
        speed_before=np.concatenate([[0], np.cumsum(topology.speeds)]),
        capacities=topology.capacities,
        capacity=int(topology.capacities[0]),
        before=np.concatenate([[0], np.cumsum(topology.capacities)]),
        slowest=int(topology.speeds.min()),
        fastest=int(topology.speeds.max()),
        smallest=int(topology.capacities.min()),
        kind_speeds=np.ascontiguousarray(kinds[0]),
        kind_capacities=np.ascontiguousarray(kinds[1]),
        kind=kind,
        kinds_before=np.concatenate([np.zeros((1, of_kind.shape[1]), np.int64), np.cumsum(of_kind, axis=0)]),
        counts=np.zeros(of_kind.shape[1], np.int64),
        uniform=topology.uniform,
        node=topology.node_size,
        multiple=topology.ulysses_degree,
        stages=stages,
        unit=unit,
        most=topology.most_chunks,
        least=max(2, topology.capacity // SMALLEST_CHUNK),
        linear_tokens=cost.linear_tokens,
        coefficients=cost.coefficients,
        micro_batch=cost.micro_batch_ns,
    )


def _kinds(topology: Topology) -> tuple[np.ndarray, np.ndarray]:
    """int64 [2, kinds]: speed and capacity of ranks that are alike; int64 [world_size]: the kind of each rank.

    Ranks of many speeds are alike if these are nearly the same, SPEEDS of them: how long a group of many ranks takes depends on
    their speeds together, hardly on that of each. [2, 0] kinds if all are equal, or if too many hold more than others.
    """
    kinds, kind = topology.kinds
    if topology.uniform or topology.few_kinds:
        return kinds[:, : 0 if topology.uniform else None], kind
    capacities, capacity = np.unique(topology.capacities, return_inverse=True)
    speeds, levels = topology.speeds, SPEEDS // len(capacities)
    if levels < 2:
        return kinds[:, :0], kind
    level = np.searchsorted(_levels(int(speeds.min()), int(speeds.max()), levels), speeds, side="right")
    levels_of_kinds, kind, count = np.unique(capacity * (levels + 1) + level, return_inverse=True, return_counts=True)
    summed = np.zeros(len(count), np.int64)
    np.add.at(summed, kind, speeds)
    return np.stack([(summed + count // 2) // count, capacities[levels_of_kinds // (levels + 1)]]), kind


@borrowing
@compiled
def group_time(length: int, first: int, size: int, context: PlacementContext) -> int:  # pragma: no cover - compiled
    """Nanoseconds that a document, alone in its micro-batch, counts on ranks first to first + size - 1."""
    if context.uniform:
        return equal_time(length, size, context)
    return adjacent_time(length, first, size, context)


@compiled
def group_times(
    lengths: np.ndarray, first: np.ndarray, sizes: np.ndarray, context: PlacementContext
) -> np.ndarray:  # pragma: no cover - compiled
    """int64 [documents]: `group_time` of each document."""
    times = np.empty(len(lengths), np.int64)
    lengths, first, sizes = listed(lengths), listed(first), listed(sizes)
    for i in range(len(lengths)):
        times[i] = group_time(lengths[i], first[i], sizes[i], context)
    return times


@remembered
@borrowing
@compiled
def adjacent_time(length: int, first: int, size: int, context: PlacementContext) -> int:  # pragma: no cover - compiled
    """Nanoseconds that a document counts on unequal ranks first to first + size - 1."""
    end = first + size
    time = time_of_kinds(length, size, context.kinds_before[first], context.kinds_before[end], context)
    if time >= 0:
        return time
    return time_on(length, context.speeds[first:end], context.capacities[first:end], context)


@lru_cache
def _levels(slowest: int, fastest: int, most: int) -> tuple[int, ...]:
    """Return speeds at which levels begin, at most so many, each about as many times as fast as the one before. Integers decide,
    which are the same on all machines."""

    def begins(more: int) -> list[int]:
        speeds = [slowest]
        while speeds[-1] <= fastest and len(speeds) <= most:
            speeds.append(max(speeds[-1] + 1, speeds[-1] * (FULL + more) // FULL))
        return speeds

    more = bisect_left(range(fastest * FULL), True, key=lambda more: begins(more)[-1] > fastest)
    return tuple(begins(more)[:-1])


@inlined
@borrowing
@compiled
def _has_kinds(size: int, context: PlacementContext) -> bool:  # pragma: no cover - compiled
    """Whether there are so few kinds that they say sooner than the ranks how long a group of so many takes."""
    return 0 < 2 * len(context.kind_speeds) < size


@borrowing
@compiled
def time_of_kinds(
    length: int, size: int, before: np.ndarray, end: np.ndarray, context: PlacementContext
) -> int:  # pragma: no cover - compiled
    """Nanoseconds that a document counts on `size` unequal ranks, however many there are; -1 where their kinds do not say, or
    not sooner than the ranks.

    `before`, `end`: int64 [kinds]: ranks of each kind before the group, and before what follows it.
    """
    if not _has_kinds(size, context) or length <= size:
        return -1
    slowest = slowest_of_kinds(length, context.kind_speeds, context.kind_capacities, before, end)
    if slowest < 0:
        return -1
    speed = context.fastest
    for kind in range(len(end)):
        if end[kind] > before[kind]:
            speed = min(speed, context.kind_speeds[kind])
    return _time_of_slowest(length, work_of(length, size, context.coefficients), slowest, speed, context)


@remembered
@borrowing
@compiled
def chunks_on(length: int, size: int, context: PlacementContext) -> tuple[int, int]:  # pragma: no cover - compiled
    """Chunks of a document on so many equal ranks, and nanoseconds of each rank."""
    return best_chunks(
        length,
        size,
        context.stages,
        context.unit,
        context.most,
        context.least,
        context.linear_tokens,
        context.micro_batch,
        context.coefficients,
    )


@remembered
@borrowing
@compiled
def equal_time(length: int, size: int, context: PlacementContext) -> int:  # pragma: no cover - compiled
    """Nanoseconds that a document, alone in its micro-batch, counts on so many equal ranks."""
    if context.stages == 1:
        return -(-work_of(length, size, context.coefficients) // size) + context.micro_batch
    chunks, time = chunks_on(length, size, context)
    return counted(time, chunks, context.stages, context.unit)


@compiled
def unequal_time(length: int, ranks: np.ndarray, context: PlacementContext) -> int:  # pragma: no cover - compiled
    """Nanoseconds that a document counts on these unequal ranks, which need not be adjacent. They run no chunks."""
    return time_on(length, context.speeds[ranks], context.capacities[ranks], context)


@borrowing
@compiled
def time_on(
    length: int, speeds: np.ndarray, capacities: np.ndarray, context: PlacementContext
) -> int:  # pragma: no cover - compiled
    """Nanoseconds that a document counts on ranks of these speeds and capacities."""
    work = work_of(length, len(speeds), context.coefficients)
    least = speeds[0]
    for speed in speeds:
        least = min(least, speed)
    return _time_of_slowest(length, work, slowest_share(length, speeds, capacities), least, context)


@borrowing
@compiled
def _time_of_slowest(
    length: int, work: int, slowest: int, speed: int, context: PlacementContext
) -> int:  # pragma: no cover - compiled
    """Nanoseconds that a document counts whose work is `work`. `slowest`: as of `slowest_share`. `speed`: the least of all."""
    # work * slowest / length, rounded up, in two parts: the product itself may exceed 64 bits.
    rest = work % length
    if float(length) * slowest < LARGEST_PRODUCT:
        more = -(-(rest * slowest) // length)
    else:
        more = int(np.ceil(float(rest) / length * slowest))
    time = work // length * slowest + more + context.micro_batch * 1000 // speed
    return counted(time, 1, context.stages, context.unit)


@borrowing
@compiled
def ends_within(
    length: int, first: int, size: int, limit: int, context: PlacementContext
) -> bool:  # pragma: no cover - compiled
    """Whether a document, alone in its micro-batch on ranks first to first + size - 1, counts no more than `limit`."""
    if context.uniform and context.stages > 1:
        return equal_time(length, size, context) <= limit
    if context.uniform:
        work, left = work_of(length, size, context.coefficients), limit - context.micro_batch
        if 0 <= left < SHORT and size < FEW_RANKS:
            return work <= left * size  # a product takes a tenth of a quotient's time
        return -(-work // size) <= left
    # If they shared it in proportion to their speeds, to the fraction of a token, they could not take less than this.
    speed = context.speed_before[first + size] - context.speed_before[first]
    work = work_of(length, size, context.coefficients)
    if work * 1000 // speed > limit:
        return False
    # Where all have room, none holds two tokens more than that.
    if length >= size and (length - size) * context.fastest // speed + 2 <= context.smallest:
        slowest = (length - size) * 1000 // speed + TWO_TOKENS // context.slowest + 3
        if _time_of_slowest(length, work, slowest, context.slowest, context) <= limit:
            return True
    if not _has_kinds(size, context) and length > size:
        # Bounds of the slowest share mostly decide; the share itself takes ten times as long to find.
        end = first + size
        slowest, is_close = least_slowest_share(length, context.speeds[first:end], context.capacities[first:end])
        if _time_of_slowest(length, work, slowest, context.fastest, context) > limit:
            return False
        slowest += TWO_TOKENS // context.slowest + 3
        if is_close and _time_of_slowest(length, work, slowest, context.slowest, context) <= limit:
            return True
    return adjacent_time(length, first, size, context) <= limit
