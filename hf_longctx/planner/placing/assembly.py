"""From places of documents to the columns of a StepPlan: whole documents become micro-batches, in one global order with the split
ones, and everything gets its cost. Nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_longctx.planner.compiled import compiled, listed
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.cost.group_times import LARGEST_PRODUCT, PlacementContext
from hf_longctx.planner.cost.selective_offload import Offload
from hf_longctx.planner.placing.packing import grouped, pack, sums
from hf_longctx.planner.placing.rank_shares import slowest_shares
from hf_longctx.planner.plan import Mode, StepPlan
from hf_longctx.planner.stages.chunked_placement import chunk_split, chunk_whole, room_in_time
from hf_longctx.planner.topology import FULL, SPLIT, Topology

FELT = 15
"""Percent of the mean that is added to a makespan when placements are compared. Of two for 10,000 documents on 1,024 ranks, the
one that ends 0.3 % earlier, by 3 % more work, ends 2.5 % later where each document's time is 5 % off."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The ranks that hold each document. Documents are numbered so: large ones as they run, then small ones, longest first."""

    sequence: np.ndarray
    """[large]: the large documents in the order in which their groups run; all below is in this order."""
    first_member: np.ndarray
    """[large + 1]"""
    member: np.ndarray
    """Ranks of each large document, ascending."""
    small_rank: np.ndarray
    small_before: np.ndarray | None
    """The large document that a small one runs before on its rank; the number of large ones if it runs after all. None:
    all run after all."""
    makespan: int
    mean: int
    """Nanoseconds that a rank is busy, on average."""
    sent: int
    """Tokens of split documents, each times its ranks but one: what is sent grows with it."""

    @property
    def likely(self) -> int:
        """Compare placements of a step by this: true times differ from predicted ones, and ranks that wait anyway feel less of
        it."""
        return likely_makespan(self.makespan, self.mean)


def likely_makespan(makespan: int, mean: int) -> int:
    """A makespan, and a share of how long ranks are busy on average, nanoseconds: only good for comparing."""
    return makespan + mean * FELT // 100


def assemble(
    placement: Placement,
    order: np.ndarray,
    lengths: np.ndarray,
    tokens: np.ndarray,
    times: np.ndarray,
    topology: Topology,
    cost: CostModel,
    bound: int,
    mode: Mode,
    offload: Offload | None,
    context: PlacementContext,
) -> StepPlan:
    """Turn a placement into a plan: step 4 of planner/hdp.py. `order` holds the index in the batch of each document counted
    longest first, `lengths` and `tokens` what it counts as and has."""
    world_size, large = topology.world_size, len(placement.sequence)
    # From here on a document is counted as in `placement`: by its number, it is known what runs before what.
    as_they_run = np.concatenate([placement.sequence, np.arange(large, len(order))])
    order, lengths, tokens, times = (column[as_they_run] for column in (order, lengths, tokens, times))
    sizes = np.diff(placement.first_member)
    split = np.flatnonzero(sizes > 1)
    whole, rank, before = _whole_documents(placement, world_size)

    # Documents of one place lie on one rank and run before the same split document. Both are one number, so that one sort brings
    # a place together: of 4 ranks, rank 3 before document 2 is place 11, and 11 // 4 and 11 % 4 give both back. Sorts are stable:
    # documents of a place keep their order.
    place = rank if before is None else before * world_size + rank
    if before is None and world_size <= 2**16:
        by_place = np.argsort(place.astype(np.uint16), kind="stable")  # numpy sorts 16 bits by radix, in linear time
    else:
        by_place = np.argsort(place, kind="stable")
    whole, rank, place = whole[by_place], rank[by_place], place[by_place]
    whole_chunks, times = chunk_whole(lengths[whole], times[whole], context)
    packed, packs = pack(
        place, tokens[whole], times, topology.capacities[rank], whole_chunks, room_in_time(context), mode == "pipeline"
    )
    any_of = np.empty(packs, np.int64)  # a document of each pack; all of a pack are of one place
    any_of[packed] = np.arange(len(packed))
    pack_rank = rank[any_of]
    pack_before = np.full(packs, large) if before is None else place[any_of] // world_size

    # One global order, in which a pack runs before the split document named in pack_before. Both ascend, so that they are merged
    # by counting: in front of a split document stand the split ones before it and all packs that name it or an earlier one. Split
    # documents 0 and 3, packs that name 0, 3, 3 and 5 (none): split_id 1, 4, pack_id 0, 2, 3, 5.
    split_id = np.arange(len(split)) + np.searchsorted(pack_before, split, side="right")
    pack_id = np.arange(packs) + np.searchsorted(split, pack_before, side="left")
    micro_batches = len(split) + packs

    members = np.ones(micro_batches, np.int64)
    members[split_id] = sizes[split]
    first_member = np.concatenate([[0], np.cumsum(members)])
    ranks = np.empty(first_member[-1], np.int64)
    # A pack has one member. All other members are of groups, and these follow each other in placement.member as in the order.
    ranks[first_member[pack_id]] = pack_rank
    in_groups = np.repeat(sizes > 1, sizes)
    groups = placement.member[in_groups]
    at = np.ones(len(ranks), bool)
    at[first_member[pack_id]] = False
    ranks[at] = groups

    costs = np.empty(micro_batches, np.int64)
    chunks = np.ones(micro_batches, np.int64)
    if mode == "pipeline" and topology.uniform:
        chunks[split_id], costs[split_id] = chunk_split(lengths[split], sizes[split], context)
        chunks[pack_id] = whole_chunks[any_of]
    else:
        costs[split_id] = group_costs(lengths[split], sizes[split], groups, topology, cost)
    packed_times = sums(packed, times, packs) + cost.micro_batch_ns
    costs[pack_id] = packed_times if topology.speed is None else topology.times(packed_times, pack_rank)

    ratios = np.zeros(micro_batches, np.int64)
    if offload is not None:
        ratios[split_id] = offload.ratio(-(-tokens[split] // sizes[split]), topology.capacity)
        ratios[pack_id] = offload.ratio(sums(packed, tokens[whole], packs), topology.capacity)

    micro_batch = np.empty(len(order), np.int64)
    # Back to the numbers that documents have in the global batch.
    micro_batch[order[split]] = split_id
    micro_batch[order[whole]] = pack_id[packed]
    holder = np.full(len(order), SPLIT)
    holder[order[whole]] = rank
    document, first_document = grouped(micro_batch, micro_batches)
    length = np.empty(len(order), np.int64)
    length[order] = tokens
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
        chunks=chunks,
        linear_tokens=context.linear_tokens if mode == "pipeline" else 0,
        mode=mode,
    )


def group_costs(
    lengths: np.ndarray, sizes: np.ndarray, members: np.ndarray, topology: Topology, cost: CostModel
) -> np.ndarray:
    """int64: nanoseconds of documents, each alone in a micro-batch on its group; `members` holds group after group."""
    if topology.uniform:
        return cost.time(lengths, sizes) + cost.micro_batch_ns
    if not len(lengths):
        return np.empty(0, np.int64)
    # A group ends with its slowest share: as a rank of speed 1000 with `slowest` of the tokens would.
    speeds, capacities = topology.speeds[members], topology.capacities[members]
    kinds, kind = topology.kinds
    kinds = kinds if topology.few_kinds else kinds[:, :0]
    slowest = slowest_shares(lengths, sizes, speeds, capacities, kind[members], kinds[0].copy(), kinds[1].copy())
    launches = cost.micro_batch_ns * FULL // np.minimum.reduceat(speeds, np.cumsum(sizes) - sizes)
    work = cost.work(lengths, sizes)
    if float(work.max()) * float(slowest.max()) < LARGEST_PRODUCT:
        return -(-work * slowest // lengths) + launches
    # Python's integers: work times tokens may exceed 64 bits.
    rows = zip(work.tolist(), slowest.tolist(), lengths.tolist())
    return np.array([-(-work * share // length) for work, share, length in rows], np.int64) + launches


def _whole_documents(placement: Placement, world_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """int64 [whole documents] each: which they are, their ranks, and the split document each runs before."""
    sizes = np.diff(placement.first_member)
    large = len(sizes)
    alone = np.flatnonzero(sizes == 1)
    whole = np.concatenate([alone, np.arange(large, large + len(placement.small_rank))])
    rank = np.concatenate([placement.member[placement.first_member[alone]], placement.small_rank])
    if placement.small_before is None:
        return whole, rank, None
    before = _next_split(placement.first_member, placement.member, world_size)
    # A hole lies before a large document that meets there, hence before a split one.
    return whole, rank, np.concatenate([before[alone], placement.small_before])


@compiled
def _next_split(
    first_member: np.ndarray, member: np.ndarray, world_size: int
) -> np.ndarray:  # pragma: no cover - compiled
    """int64 [large documents]: the next one on the rank of each that is split; how many there are, beyond all numbers, where none
    comes or the document itself is split."""
    count = len(first_member) - 1
    next_split, before = np.full(world_size, count), np.full(count, count)
    first_member, member = listed(first_member), listed(member)
    for i in range(count - 1, -1, -1):
        if first_member[i + 1] - first_member[i] == 1:
            before[i] = next_split[member[first_member[i]]]
        else:
            for at in range(first_member[i], first_member[i + 1]):
                next_split[member[at]] = i
    return before
