"""StepPlan: what every rank does in one optimizer step, as columns of integers.

A micro-batch has members, the ranks that run it, and documents. A document is split over all of the micro-batch's ranks
(holder -1) or lies whole on one of them, its holder. Which tokens each rank holds follows from that (placing/rank_shares.py,
zigzag), so 100,000 documents on 16,384 ranks are a few MB, and only the rank that runs a micro-batch builds its Layout.

    two ranks, documents 0 (8 tokens), 1 (3), 2 (2):     first_member    0 2 3 4      first_document  0 1 2 3
                                                         rank            0 1 0 1      doc             0 1 2
      rank 0: | 0[0:2) 0[6:8) | 1[0:3) |                                              length          8 3 2
      rank 1: | 0[2:6)        | 2[0:2) |                                              holder         -1 0 1

In mode "pipeline" a micro-batch of one document may run as several causal chunks (stages/causal_chunks.py), one after another
through the stages, so that the stages behind the first do not wait for all of it.

Micro-batches are numbered in one global order; each rank runs those it takes part in, in that order, so ranks that
wait for each other can never deadlock. In mode "lockstep" the ranks also meet after every round.

Every rank computes the whole plan from the same lengths and labels. Only its 64-bit digest is exchanged, before it runs.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from hf_longctx.layouts.layout import Layout, Segment, chunked, zigzag
from hf_longctx.planner.compiled import planning
from hf_longctx.planner.cost.cost_model import LONGEST_TIME, CostModel
from hf_longctx.planner.invariants import check
from hf_longctx.planner.placing.rank_shares import proportional_shares, shares, shares_of_members
from hf_longctx.planner.stages.causal_chunks import chunk_stops
from hf_longctx.planner.summary import PlanSummary
from hf_longctx.planner.timeline import Timeline, play_costs
from hf_longctx.planner.topology import FULL, SPLIT, Documents, PlanError, Topology

Mode = Literal["async", "lockstep", "pipeline"]
MODES: tuple[Mode, ...] = ("async", "lockstep", "pipeline")

SECONDS = 2e-6
"""A core's, interpreted, for each member of a micro-batch whose shares or times are counted."""

NANOSECONDS_OF_YEAR = 365 * 86_400 * 10**9

COLUMNS = (
    *("first_member", "rank", "first_document", "doc", "length"),
    *("holder", "cost", "offload", "round", "chunks", "labels"),
)
SCALARS = ("lower_bound", "offload_share", "linear_tokens", "mode", "planner", "exchange")
"""Names of all that a plan is, but its topology."""

ALL_LABELLED = np.zeros(0, np.int64)
"""The column `labels` of a plan for which each token has one."""

WHOLE = np.ones(1, np.int64)
"""The column `chunks` of a plan whose documents all run whole."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Segments of a plan, int64 [n] each, ordered by micro-batch, chunk, rank, document and start."""

    micro_batch: np.ndarray
    rank: np.ndarray
    doc: np.ndarray
    start: np.ndarray
    """First token of the segment, counted from the document's beginning."""
    stop: np.ndarray
    """One past its last token."""


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
    """[m]: predicted nanoseconds that each rank of a micro-batch spends on it, on all of its chunks; in a pipeline, in one
    stage."""
    lower_bound: int
    """Nanoseconds that no plan of these documents can beat (bound.py)."""
    offload: np.ndarray
    """[m]: per mille of the activations of the middle layers that wait in host memory."""
    round: np.ndarray
    """[m]: in mode "lockstep", after which all ranks meet; 0 in the others."""
    offload_share: int = 0
    """Per mille of a token's activations that offload is about."""
    chunks: np.ndarray = field(default_factory=lambda: WHOLE)
    """[m]: causal chunks in which a micro-batch runs; more than 1 only in mode "pipeline", for one document alone. Nothing but
    1 stands for all micro-batches, however many entries there are."""
    labels: np.ndarray = field(default_factory=lambda: ALL_LABELLED)
    """[n]: how many tokens of each document have a label, as far as that was planned for; [0]: all tokens of all documents."""
    linear_tokens: int = 0
    """s0 of stages/causal_chunks.py, which says where chunks end."""
    mode: Mode = "async"
    planner: str = "hdp"
    exchange: Literal["direct", "ring"] = "direct"
    """Keys and values that `cost` assumes to travel: those that are needed, or all once around."""

    def __post_init__(self) -> None:
        for name in COLUMNS:
            column = np.asarray(getattr(self, name), dtype=np.int64).view()
            if name == "chunks" and (column == 1).all():
                column = np.ones(len(self.cost), np.int64)
            column.setflags(write=False)
            object.__setattr__(self, name, column)

    @property
    def world_size(self) -> int:
        return self.topology.world_size

    def lengths_counted(self, cost: CostModel) -> np.ndarray:
        """int64 [n]: tokens that predictions count for each document: fewer than it has where some of them have no label."""
        return cost.equivalent_lengths(self.length, self.labels) if len(self.labels) else self.length

    def document_times(self, cost: CostModel) -> np.ndarray:
        """int64 [n]: predicted nanoseconds of each document on each of its ranks."""
        return cost.time(self.lengths_counted(cost), self.ranks_of_document)

    @property
    def unlabelled(self) -> np.ndarray:
        """int64 [n]: tokens of each document without a label, as far as that was planned for."""
        return self.length - self.labels if len(self.labels) else np.zeros(len(self.length), np.int64)

    @property
    def members(self) -> np.ndarray:
        """int64 [m]: ranks of each micro-batch."""
        return np.diff(self.first_member)

    @property
    def rounds(self) -> int:
        """Count the rounds in mode "lockstep"; 1 in the others."""
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
        factors = (topology.speeds, topology.capacities, topology.uniform)
        columns = (self.first_member, self.rank, self.first_document, self.length, self.holder)
        shares = float(self.length.max()) ** 2 * FULL / float(topology.speeds.min())
        with planning(len(self.rank) * SECONDS, largest=shares):
            return shares_of_members(*columns, *factors)

    @cached_property
    def peak_tokens(self) -> np.ndarray:
        """int64 [world_size]: most tokens that each rank holds in one micro-batch."""
        peak = np.zeros(self.world_size, np.int64)
        np.maximum.at(peak, self.rank, self.member_tokens)
        return peak

    def layouts(self, rank: int) -> list[tuple[int, Layout]]:
        """(micro-batch, Layout) of those that a rank takes part in, in global order; may be empty. One of k chunks comes k
        times, with the layout of each chunk, in the order of forward.

        Builds only these. Raises PlanError if the plan has no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise PlanError(f"rank {rank} is not in this plan, which was made for ranks 0 to {self.world_size - 1}")
        mine = np.searchsorted(self.first_member, np.flatnonzero(self.rank == rank), side="right") - 1
        return [(i, layout) for i in mine.tolist() for layout in self._layouts(i)]

    def chunk_stops(self, micro_batch: int) -> list[int]:
        """Return where the chunks of a micro-batch's only document end, in tokens."""
        return chunk_stops(
            int(self.length[self.first_document[micro_batch]]), int(self.chunks[micro_batch]), self.linear_tokens
        )

    def _layouts(self, micro_batch: int) -> list[Layout]:
        """Return the layouts of a micro-batch, one for each chunk."""
        ranks = self.rank[self.first_member[micro_batch] : self.first_member[micro_batch + 1]]
        if self.chunks[micro_batch] == 1:
            return [self._layout(micro_batch, ranks)]
        document = int(self.first_document[micro_batch])
        doc, length = int(self.doc[document]), int(self.length[document])
        return chunked(doc, length, ranks.tolist(), self.chunk_stops(micro_batch))

    def _layout(self, micro_batch: int, ranks: np.ndarray) -> Layout:
        """Return the layout of a micro-batch that runs whole."""
        documents = slice(self.first_document[micro_batch], self.first_document[micro_batch + 1])
        shards: dict[int, list[Segment]] = {rank: [] for rank in ranks.tolist()}
        before = 0
        columns = (self.doc, self.length, self.holder)
        for doc, length, holder in zip(*(column[documents].tolist() for column in columns)):
            if holder != SPLIT:
                shards[holder].append(Segment(doc, 0, length))
                continue
            if self.topology.uniform:
                rank_tokens = shares(length, len(ranks), before)
            else:
                topology = self.topology
                rank_tokens = proportional_shares(length, topology.speeds[ranks], topology.capacities[ranks]).tolist()
            before += length
            for rank, shard in zigzag(doc, length, list(shards), rank_tokens).items():
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
            for layout in self._layouts(micro_batch)
            for rank, shard in layout.shards.items()
            for segment in shard
        ]
        return Rows(*np.array(rows, np.int64).reshape(-1, 5).T)

    def digest(self) -> int:
        """Signed 64-bit fingerprint of everything that runs; equal on every machine. Predictions are no part of it but in mode
        "pipeline", where the order in which stages run follows from them."""
        digest = hashlib.blake2b(digest_size=8)
        topology = self.topology
        sizes = np.array([topology.world_size, topology.capacity, topology.ulysses_degree, topology.stages])
        factors: tuple[np.ndarray, ...] = () if topology.uniform else (topology.speeds, topology.capacities)
        runs = ["first_member", "rank", "first_document", "doc", "length", "holder", "offload", "round"]
        if self.mode == "pipeline":
            runs += ["chunks", "linear_tokens", "cost"]
        if topology.stay_whole:
            factors += (np.array([get_args(Documents).index(topology.documents)]),)
        for column in (sizes, *factors, *(getattr(self, name) for name in runs)):
            digest.update(np.ascontiguousarray(column, dtype="<i8").data)
        return int.from_bytes(digest.digest(), "little", signed=True)

    def in_nanoseconds(self, bits: int) -> StepPlan:
        """Return the plan with its costs and its bound in nanoseconds; they are in units of 2^bits nanoseconds.

        Raises PlanError if the step takes longer than LONGEST_TIME.
        """
        if bits == 0:
            return self
        stages = self.topology.stages if self.mode == "pipeline" else 1
        if int(self.cost.sum()) * stages << bits > LONGEST_TIME and self.timeline().makespan << bits > LONGEST_TIME:
            years = float(self.timeline().makespan) * 2.0**bits / NANOSECONDS_OF_YEAR
            raise PlanError(
                f"the step would take {years:.3g} years, and times are counted up to {LONGEST_TIME / NANOSECONDS_OF_YEAR:.0f}; "
                f"it needs faster or more ranks, or fewer or shorter documents than its {len(self.length)}"
            )
        return replace(self, cost=self.cost << bits, lower_bound=self.lower_bound << bits)

    def timeline(self) -> Timeline:
        """Run the plan on its predicted costs, when first asked; its arrays are read-only."""
        return self._timeline

    @cached_property
    def _timeline(self) -> Timeline:
        stages = self.topology.stages if self.mode == "pipeline" else 1
        columns = (self.first_member, self.rank, self.cost, self.round, self.chunks)
        largest = float(self.cost.sum(dtype=np.float64)) * stages
        with planning((len(self.rank) + int(self.chunks.sum())) * stages * SECONDS, largest=largest):
            start, busy, makespan = play_costs(*columns, self.world_size, self.mode == "lockstep", stages)
        stop = start + self.cost
        for array in (start, stop, busy):
            array.setflags(write=False)
        return Timeline(start=start, stop=stop, rank_busy=busy, makespan=makespan)

    def summary(self) -> PlanSummary:
        """Counts and predicted balance."""
        timeline = self.timeline()
        spread = self.ranks_of_document
        fewest = self.topology.fewest_ranks(self.length)
        needed = 3 * self.length * (np.minimum(spread, fewest) - 1) // 4
        exchanged = self.length * (spread - 1) * (4 if self.exchange == "ring" else 3) // 4
        exchanged += self._tokens_of_earlier_chunks * (spread - 1)
        return PlanSummary(
            planner=self.planner,
            mode=self.mode,
            world_size=self.world_size,
            stages=self.topology.stages,
            documents=len(np.unique(self.doc)),
            tokens=int(self.length.sum()),
            split_documents=int((spread > 1).sum()),
            ranks_per_document=_spread(spread),
            micro_batches_per_rank=_spread(np.bincount(self.rank, minlength=self.world_size)),
            makespan=timeline.makespan,
            lower_bound=self.lower_bound,
            # Of all ranks together, the sum may exceed 64 bits.
            idle_share=1 - sum(timeline.rank_busy.tolist()) / (self.world_size * timeline.makespan),
            exchanged_tokens=int(exchanged.sum()),
            redundant_tokens=int((exchanged - needed).sum()),
            between_nodes_tokens=self._between_nodes(),
            most_tokens_per_rank=int(self.member_tokens.max()),
            offloaded_tokens=int((self.length * self.offload[self.micro_batch_of_document]).sum()) // 1000,
        )

    @property
    def _tokens_of_earlier_chunks(self) -> np.ndarray:
        """int64 [documents]: tokens before each chunk of a document, summed over its chunks: their keys travel again."""
        earlier = np.zeros(len(self.length), np.int64)
        for micro_batch in np.flatnonzero(self.chunks > 1).tolist():
            earlier[self.first_document[micro_batch]] = sum(self.chunk_stops(micro_batch)[:-1])
        return earlier

    def _between_nodes(self) -> int:
        """Tokens that cross from node to node: each node of a group brings in what the others hold, once; over a ring, all but
        the share of the rank over which it enters."""
        node = self.topology.node_size
        nodes = np.repeat(np.arange(len(self.cost)), self.members) * (self.world_size // node + 1) + self.rank // node
        apart = np.bincount(nodes[np.append(True, np.diff(nodes) != 0)] // (self.world_size // node + 1))
        apart, split = apart[self.micro_batch_of_document], self.holder == SPLIT
        if self.exchange == "ring":
            ranks = np.maximum(self.ranks_of_document, 1)
            return int((self.length * np.where(apart > 1, apart, 0) * (ranks - 1) // ranks)[split].sum())
        return int((self.length * 3 // 4 + self._tokens_of_earlier_chunks)[split] @ (apart - 1)[split])

    def check(self, lengths: np.ndarray) -> None:
        """Raise PlanError, naming what breaks it, unless every invariant holds for documents of these lengths (tokens)."""
        check(self, np.asarray(lengths, np.int64))


def _spread(counts: np.ndarray) -> tuple[int, float, int]:
    return int(counts.min()), float(np.median(counts)), int(counts.max())
