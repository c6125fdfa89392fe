"""StepPlan: what every rank does in one optimizer step, as columns of integers.

A micro-batch has members, the ranks that run it, and documents. A document is split over all of the micro-batch's ranks
(holder -1) or lies whole on one of them, its holder. Which tokens each rank holds follows from that (shares.py, zigzag),
so 100,000 documents on 16,384 ranks are a few MB, and only the rank that runs a micro-batch builds its Layout.

    two ranks, documents 0 (8 tokens), 1 (3), 2 (2):     first_member    0 2 3 4      first_document  0 1 2 3
                                                         rank            0 1 0 1      doc             0 1 2
      rank 0: | 0[0:2) 0[6:8) | 1[0:3) |                                              length          8 3 2
      rank 1: | 0[2:6)        | 2[0:2) |                                              holder         -1 0 1

Micro-batches are numbered in one global order; each rank runs those it takes part in, in that order, so ranks that
wait for each other can never deadlock. In mode "lockstep" the ranks also meet after every round.

Every rank computes the whole plan from the same lengths. Only its 64-bit digest is exchanged, before it runs.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from hf_longctx.layout import Layout, Segment, zigzag
from hf_longctx.planner.compiled import compiled
from hf_longctx.planner.shares import proportional_shares, shares
from hf_longctx.planner.topology import PlanError, Topology

SPLIT = -1
"""The holder of a document that all ranks of its micro-batch share."""

Mode = Literal["async", "lockstep", "pipeline"]
MODES: tuple[Mode, ...] = ("async", "lockstep", "pipeline")

COLUMNS = ("first_member", "rank", "first_document", "doc", "length", "holder", "cost", "offload", "round")


@dataclass(frozen=True, eq=False, slots=True)
class Timeline:
    """When each micro-batch runs, predicted: it starts as soon as all of its ranks are free. Nanoseconds."""

    start: np.ndarray
    """int64 [micro-batches]. In a pipeline, in its first stage."""
    stop: np.ndarray
    """int64 [micro-batches]."""
    rank_busy: np.ndarray
    """int64 [world_size]: time that a rank computes, waiting excluded."""
    makespan: int
    """When the last micro-batch stops, in a pipeline in its last stage."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Segments of a plan, int64 [n] each, ordered by micro-batch, rank, document and start."""

    micro_batch: np.ndarray
    rank: np.ndarray
    doc: np.ndarray
    start: np.ndarray
    """First token of the segment, counted from the document's beginning."""
    stop: np.ndarray
    """One past its last token."""


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A plan's certificate: what a person wants to know about it; str() says it in four lines."""

    planner: str
    mode: str
    world_size: int
    documents: int
    tokens: int
    split_documents: int
    """Documents held by more than one rank."""
    ranks_per_document: tuple[int, float, int]
    """Minimum, median, maximum."""
    micro_batches_per_rank: tuple[int, float, int]
    """Minimum, median, maximum."""
    makespan: int
    """Predicted nanoseconds of the step, gradient reduction and optimizer left out."""
    lower_bound: int
    """Nanoseconds that no plan of these documents in this mode can beat (bound.py)."""
    idle_share: float
    """Share of all ranks' time spent waiting, 0 to 1."""
    exchanged_tokens: int
    """Tokens whose keys and values a rank receives from another in forward, all ranks (zigzag: 3/4 of all but its own)."""
    redundant_tokens: int
    """How many of these would not be exchanged, were every document on the fewest ranks that hold it."""
    between_nodes_tokens: int
    """How many of these cross from node to node: once per node that needs them, where they are relayed."""
    most_tokens_per_rank: int
    """Most tokens that any rank holds in one micro-batch."""
    offloaded_tokens: int
    """Tokens whose activations wait in host memory, all micro-batches."""

    @property
    def balance(self) -> float:
        """Makespan divided by the lower bound: 1 is perfect."""
        return self.makespan / self.lower_bound

    def __str__(self) -> str:
        def spread(values: tuple[int, float, int]) -> str:
            return f"{values[0]} to {values[2]}, median {values[1]:g}"

        redundant = self.redundant_tokens / self.exchanged_tokens if self.exchanged_tokens else 0.0
        return (
            f"{self.documents} documents ({self.split_documents} split), {self.tokens} tokens on "
            f"{self.world_size} ranks\n"
            f"ranks per document: {spread(self.ranks_per_document)}; "
            f"micro-batches per rank: {spread(self.micro_batches_per_rank)}\n"
            f"predicted step {self.makespan / 1e9:.3g} s, {self.balance:.3f} times the lower bound, "
            f"ranks idle {self.idle_share:.1%}\n"
            f"keys and values of {self.exchanged_tokens} tokens exchanged ({redundant:.1%} for balance), at most "
            f"{self.most_tokens_per_rank} tokens on a rank at a time"
        )


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One optimizer step of m micro-batches with k members and n documents. Columns are int64 and read-only."""

    topology: Topology
    first_member: np.ndarray
    """[m + 1]: micro-batch i runs on rank[first_member[i]:first_member[i + 1]]."""
    rank: np.ndarray
    """[k]: ascending in each micro-batch."""
    first_document: np.ndarray
    """[m + 1]: micro-batch i holds documents first_document[i] to first_document[i + 1]."""
    doc: np.ndarray
    """[n]: index of the document in the global batch; ascending in each micro-batch."""
    length: np.ndarray
    """[n]: its tokens."""
    holder: np.ndarray
    """[n]: the rank that holds it whole, or SPLIT."""
    cost: np.ndarray
    """[m]: predicted nanoseconds that each rank of a micro-batch spends on it; in a pipeline, in one stage."""
    lower_bound: int
    """Nanoseconds that no plan of these documents can beat (bound.py)."""
    offload: np.ndarray
    """[m]: per mille of the activations of the middle layers that wait in host memory."""
    round: np.ndarray
    """[m]: in mode "lockstep", after which all ranks meet; 0 in the others."""
    offload_share: int = 0
    """Per mille of a token's activations that offload is about."""
    mode: Mode = "async"
    planner: str = "hdp"
    exchange: Literal["direct", "ring"] = "direct"
    """What `cost` assumes to travel: what is needed, or everything once around."""

    def __post_init__(self) -> None:
        for name in COLUMNS:
            column = np.asarray(getattr(self, name), dtype=np.int64).view()
            column.setflags(write=False)
            object.__setattr__(self, name, column)

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    @property
    def members(self) -> np.ndarray:
        """int64 [m]: ranks of each micro-batch."""
        return np.diff(self.first_member)

    @property
    def rounds(self) -> int:
        """In mode "lockstep", rounds; 1 in the others."""
        return int(self.round.max()) + 1

    @cached_property
    def micro_batch_of_document(self) -> np.ndarray:
        """int64 [n]"""
        return np.repeat(np.arange(len(self.cost)), np.diff(self.first_document))

    @cached_property
    def ranks_of_document(self) -> np.ndarray:
        """int64 [n]: over how many ranks each document is spread."""
        return np.where(self.holder == SPLIT, self.members[self.micro_batch_of_document], 1)

    @cached_property
    def member_tokens(self) -> np.ndarray:
        """int64 [k]: tokens that each member holds."""
        topology = self.topology
        return _member_tokens(
            self.first_member,
            self.rank,
            self.first_document,
            self.length,
            self.holder,
            topology.speeds,
            topology.capacities,
            topology.uniform,
        )

    @cached_property
    def peak_tokens(self) -> np.ndarray:
        """int64 [world_size]: most tokens that each rank holds in one micro-batch."""
        peak = np.zeros(self.world_size, np.int64)
        np.maximum.at(peak, self.rank, self.member_tokens)
        return peak

    def layouts(self, rank: int) -> list[tuple[int, Layout]]:
        """(micro-batch, Layout) of those that a rank takes part in, in global order; may be empty.

        Builds only these. Raises PlanError if the plan has no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise PlanError(f"rank {rank} is not in this plan, which was made for ranks 0 to {self.world_size - 1}")
        mine = np.searchsorted(self.first_member, np.flatnonzero(self.rank == rank), side="right") - 1
        return [(i, self._layout(i)) for i in mine.tolist()]

    def _layout(self, micro_batch: int) -> Layout:
        ranks = self.rank[self.first_member[micro_batch] : self.first_member[micro_batch + 1]]
        documents = slice(self.first_document[micro_batch], self.first_document[micro_batch + 1])
        shards: dict[int, list[Segment]] = {rank: [] for rank in ranks.tolist()}
        before = 0
        columns = (self.doc, self.length, self.holder)
        for doc, length, holder in zip(*(column[documents].tolist() for column in columns)):
            if holder != SPLIT:
                shards[holder].append(Segment(doc, 0, length))
                continue
            if self.topology.uniform:
                held = shares(length, len(ranks), before)
            else:
                topology = self.topology
                held = proportional_shares(length, topology.speeds[ranks], topology.capacities[ranks]).tolist()
            before += length
            for rank, shard in zigzag(doc, length, list(shards), held).items():
                shards[rank].extend(shard)
        holding = sum(1 for shard in shards.values() if shard)
        return Layout(
            {rank: tuple(shard) for rank, shard in shards.items()}, math.gcd(holding, self.topology.ulysses_degree)
        )

    def rows(self) -> Rows:
        """All segments, for pictures and checks of plans of a few thousand documents."""
        rows = [
            (micro_batch, rank, segment.doc, segment.start, segment.stop)
            for micro_batch in range(len(self.cost))
            for rank, shard in self._layout(micro_batch).shards.items()
            for segment in shard
        ]
        return Rows(*np.array(rows, np.int64).reshape(-1, 5).T)

    def digest(self) -> int:
        """Signed 64-bit fingerprint of everything that runs, not of predictions; equal on every machine."""
        digest = hashlib.blake2b(digest_size=8)
        topology = self.topology
        sizes = np.array([topology.world_size, topology.capacity, topology.ulysses_degree, topology.stages])
        factors = () if topology.uniform else (topology.speeds, topology.capacities)
        runs = ("first_member", "rank", "first_document", "doc", "length", "holder", "offload", "round")
        for column in (sizes, *factors, *(getattr(self, name) for name in runs)):
            digest.update(np.ascontiguousarray(column, dtype="<i8").data)
        return int.from_bytes(digest.digest(), "little", signed=True)

    def timeline(self) -> Timeline:
        """Run the plan on its predicted costs."""
        stages = self.topology.stages if self.mode == "pipeline" else 1
        columns = (self.first_member, self.rank, self.cost, self.round)
        start, busy, makespan = _play(*columns, self.world_size, self.mode == "lockstep", stages)
        return Timeline(start=start, stop=start + self.cost, rank_busy=busy, makespan=makespan)

    def summary(self) -> PlanSummary:
        """Counts and predicted balance."""
        timeline = self.timeline()
        spread = self.ranks_of_document
        fewest = self.topology.fewest_ranks(self.length)
        needed = 3 * self.length * (np.minimum(spread, fewest) - 1) // 4
        exchanged = self.length * (spread - 1) * (4 if self.exchange == "ring" else 3) // 4
        return PlanSummary(
            planner=self.planner,
            mode=self.mode,
            world_size=self.world_size,
            documents=len(np.unique(self.doc)),
            tokens=int(self.length.sum()),
            split_documents=int((spread > 1).sum()),
            ranks_per_document=_spread(spread),
            micro_batches_per_rank=_spread(np.bincount(self.rank, minlength=self.world_size)),
            makespan=timeline.makespan,
            lower_bound=self.lower_bound,
            idle_share=1 - int(timeline.rank_busy.sum()) / (self.world_size * timeline.makespan),
            exchanged_tokens=int(exchanged.sum()),
            redundant_tokens=int((exchanged - needed).sum()),
            between_nodes_tokens=self._between_nodes(),
            most_tokens_per_rank=int(self.member_tokens.max()),
            offloaded_tokens=int((self.length * self.offload[self.micro_batch_of_document]).sum()) // 1000,
        )

    def _between_nodes(self) -> int:
        """Tokens that cross from node to node: each node of a group brings in what the others hold, once."""
        node = self.topology.node_size
        nodes = np.repeat(np.arange(len(self.cost)), self.members) * (self.world_size // node + 1) + self.rank // node
        apart = np.bincount(nodes[np.append(True, np.diff(nodes) != 0)] // (self.world_size // node + 1))
        split = self.holder == SPLIT
        return int((self.length * (apart[self.micro_batch_of_document] - 1))[split].sum()) * 3 // 4

    def check(self, lengths: np.ndarray) -> None:
        """Raise PlanError, naming what breaks it, unless every invariant holds for documents of these lengths (tokens)."""
        lengths = np.asarray(lengths, np.int64)
        counts = {"first_member": len(self.rank), "first_document": len(self.doc)}
        for name, count in counts.items():
            first = getattr(self, name)
            if len(first) != len(self.cost) + 1 or first[0] != 0 or first[-1] != count or (np.diff(first) < 1).any():
                raise PlanError(
                    f"{name} must rise from 0 to {count}, one entry per micro-batch ({len(self.cost)}) and one more: "
                    "every micro-batch has a rank and a document"
                )
        members = np.repeat(np.arange(len(self.cost)), self.members)
        same = np.diff(members) == 0
        self._refuse(
            "rank", (self.rank < 0) | (self.rank >= self.world_size), f"a rank must be 0 to {self.world_size - 1}"
        )
        self._refuse("rank", np.append(False, same & (np.diff(self.rank) < 1)), "the ranks of a micro-batch ascend")
        self._refuse("doc", (self.doc < 0) | (self.doc >= len(lengths)), f"a document must be 0 to {len(lengths) - 1}")
        planned = np.bincount(self.doc, minlength=len(lengths))
        if (planned != 1).any():
            i = int((planned != 1).argmax())
            raise PlanError(f"document {i} is planned {planned[i]} times; every document is planned exactly once")
        self._refuse("length", self.length != lengths[self.doc], "a document is planned with the tokens it has")

        # A member's key is unique: its micro-batch and rank.
        keys = members * self.world_size + self.rank
        held_by = self.micro_batch_of_document * self.world_size + self.holder
        whole = self.holder != SPLIT
        outside = (self.holder < 0) | (self.holder >= self.world_size) | ~np.isin(held_by, keys)
        self._refuse("holder", whole & outside, "a holder is a rank of the document's micro-batch")
        split = np.bincount(self.micro_batch_of_document[~whole], minlength=len(self.cost))
        if not self.topology.uniform and (split > 1).any():
            raise PlanError(
                f"micro-batch {int(split.argmax())} splits {split.max()} documents; unequal ranks share one at a time"
            )
        room = self.topology.capacities[self.rank]
        offloaded = self.member_tokens * self.offload[members] * self.offload_share // 10**6
        self._refuse("rank", self.member_tokens < 1, "every rank of a micro-batch holds a token")
        most = f"a rank holds at most {self.topology.capacity} tokens in a micro-batch"
        self._refuse("rank", self.member_tokens - offloaded > room, most)
        if self.mode == "lockstep":
            taken = np.sort(self.round[members] * self.world_size + self.rank)
            if (np.diff(self.round) < 0).any() or (np.diff(taken) == 0).any():
                raise PlanError("rounds ascend, and a rank runs at most one micro-batch in each")
        if (self.offload < 0).any() or (self.offload > 1000).any():
            raise PlanError(f"offload is {self.offload.min()} to {self.offload.max()}; it must be 0 to 1000 per mille")
        if (self.cost < 1).any() or self.timeline().makespan < self.lower_bound:
            raise PlanError(f"costs must be >= 1 and no plan can beat the lower bound of {self.lower_bound} ns")

    def _refuse(self, column: str, wrong: np.ndarray, rule: str) -> None:
        if wrong.any():
            row = int(wrong.argmax())
            first = self.first_member if column == "rank" else self.first_document
            micro_batch = int(np.searchsorted(first, row, side="right")) - 1
            value = getattr(self, column)[row]
            held = f", which holds {self.member_tokens[row]} tokens" if "holds" in rule and column == "rank" else ""
            raise PlanError(f"micro-batch {micro_batch}, {column}={value}{held}: {rule}")


def _spread(counts: np.ndarray) -> tuple[int, float, int]:
    return int(counts.min()), float(np.median(counts)), int(counts.max())


@compiled
def _play(
    first_member: np.ndarray,
    rank: np.ndarray,
    cost: np.ndarray,
    round: np.ndarray,
    world_size: int,
    lockstep: bool,
    stages: int,
) -> tuple[np.ndarray, np.ndarray, int]:  # pragma: no cover - compiled
    """start [m] and busy [world_size] in the first stage, and the makespan.

    A micro-batch enters a stage when it has left the one before and its ranks are free there. For ranks that share
    nothing, p stages take the sum of their micro-batches and p-1 times the longest.
    """
    busy = np.zeros(world_size, np.int64)
    start = np.empty(len(cost), np.int64)
    left = np.zeros(len(cost), np.int64)  # when each micro-batch left the stage before
    end = 0  # when the last micro-batch so far ends
    for stage in range(stages):
        free = np.zeros(world_size, np.int64)
        met = 0  # when the ranks met last
        for i in range(len(cost)):
            if lockstep and i > 0 and round[i] != round[i - 1]:
                met = end
            begin = max(met, left[i])
            for j in range(first_member[i], first_member[i + 1]):
                begin = max(begin, free[rank[j]])
            left[i] = begin + cost[i]
            for j in range(first_member[i], first_member[i + 1]):
                free[rank[j]] = left[i]
            end = max(end, left[i])
            if stage == 0:
                start[i] = begin
                for j in range(first_member[i], first_member[i + 1]):
                    busy[rank[j]] += cost[i]
    return start, busy, end


@compiled
def _member_tokens(
    first_member: np.ndarray,
    rank: np.ndarray,
    first_document: np.ndarray,
    length: np.ndarray,
    holder: np.ndarray,
    speeds: np.ndarray,
    capacities: np.ndarray,
    uniform: bool,
) -> np.ndarray:  # pragma: no cover - compiled
    held = np.zeros(len(rank), np.int64)
    for i in range(len(first_member) - 1):
        low, high = first_member[i], first_member[i + 1]
        shared = 0
        for j in range(first_document[i], first_document[i + 1]):
            if holder[j] < 0:
                shared += length[j]
            else:
                held[low + np.searchsorted(rank[low:high], holder[j])] += length[j]
        if shared and uniform:
            each, left = shared // (high - low), shared % (high - low)
            for position in range(high - low):
                held[low + position] += each + (position < left)
        elif shared:
            ranks = rank[low:high]
            held[low:high] += proportional_shares(shared, speeds[ranks], capacities[ranks])
    return held
