"""StepPlan: what every rank does in one optimizer step, as columns of integers.

One row is one segment: tokens [start, stop) of document doc, held by a rank in a micro-batch. Rows are ordered by
micro-batch, rank, and memory order. Micro-batches are numbered in one global order; each rank runs those it takes part
in, in that order, so ranks that wait for each other can never deadlock.

    two ranks, documents 0 (8 tokens), 1 (3), 2 (2):   micro_batch  0 0 0   1   2
                                                       rank         0 0 1   0   1
      rank 0: | 0[0:2) 0[6:8) | 1[0:3) |               doc          0 0 0   1   2
      rank 1: | 0[2:6)        | 2[0:2) |               start        0 6 2   0   0
                                                       stop         2 8 6   3   2

Every rank computes the whole plan from the same lengths. Only its 64-bit digest is exchanged, before it runs.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hf_longctx.layout import Layout, Segment


class PlanError(ValueError):
    """A step cannot be planned, or a plan breaks one of its invariants."""


@dataclass(frozen=True, eq=False, slots=True)
class Timeline:
    """When each micro-batch runs, predicted: it starts as soon as all of its ranks are free. Nanoseconds."""

    start: np.ndarray
    """int64 [micro-batches]."""
    stop: np.ndarray
    """int64 [micro-batches]."""
    rank_busy: np.ndarray
    """int64 [world_size]: time that a rank computes, waiting excluded."""
    makespan: int
    """When the last micro-batch stops."""


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """What a person wants to know about a plan; str() says it in three lines."""

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
    """Predicted nanoseconds of the step."""
    balance: float
    """Makespan divided by the lower bound: 1 is perfect."""
    idle_share: float
    """Share of all ranks' time spent waiting, 0 to 1."""

    def __str__(self) -> str:
        def spread(values: tuple[int, float, int]) -> str:
            return f"{values[0]} to {values[2]}, median {values[1]:g}"

        return (
            f"{self.documents} documents ({self.split_documents} split), {self.tokens} tokens on "
            f"{self.world_size} ranks\n"
            f"ranks per document: {spread(self.ranks_per_document)}; "
            f"micro-batches per rank: {spread(self.micro_batches_per_rank)}\n"
            f"predicted step {self.makespan / 1e9:.3g} s, {self.balance:.3f} times the lower bound, "
            f"ranks idle {self.idle_share:.1%}"
        )


@dataclass(frozen=True, eq=False)
class StepPlan:
    """One optimizer step. Arrays are int64 and read-only; n rows (segments), m micro-batches."""

    world_size: int
    capacity: int
    """Most tokens that a rank holds in one micro-batch."""
    micro_batch: np.ndarray
    """[n]: 0 to m - 1, ascending."""
    rank: np.ndarray
    """[n]"""
    doc: np.ndarray
    """[n]: index of the document in the global batch."""
    start: np.ndarray
    """[n]: first token of the segment, counted from the document's beginning."""
    stop: np.ndarray
    """[n]: one past its last token."""
    cost: np.ndarray
    """[m]: predicted nanoseconds that each rank of a micro-batch spends on it."""
    lower_bound: int
    """Nanoseconds that no plan of these documents can beat (bound.py)."""
    ulysses_degree: int = 1
    """Most ranks of a micro-batch among which heads are split: a micro-batch of n ranks uses gcd(n, degree)."""

    def __post_init__(self) -> None:
        for name in ("micro_batch", "rank", "doc", "start", "stop", "cost"):
            column = np.array(getattr(self, name), dtype=np.int64)
            column.setflags(write=False)
            object.__setattr__(self, name, column)

    @cached_property
    def _first_row(self) -> np.ndarray:
        """[m + 1]: micro-batch i is rows _first_row[i] to _first_row[i + 1]."""
        return np.searchsorted(self.micro_batch, np.arange(len(self.cost) + 1))

    def layouts(self, rank: int) -> list[tuple[int, Layout]]:
        """(micro-batch, Layout) of those that a rank takes part in, in global order; may be empty.

        Builds only these. Raises PlanError if the plan has no such rank.
        """
        if not 0 <= rank < self.world_size:
            raise PlanError(f"rank {rank} is not in this plan, which was made for ranks 0 to {self.world_size - 1}")
        found = []
        for micro_batch in np.unique(self.micro_batch[self.rank == rank]).tolist():
            rows = slice(self._first_row[micro_batch], self._first_row[micro_batch + 1])
            shards: dict[int, tuple[Segment, ...]] = {}
            columns = (self.rank, self.doc, self.start, self.stop)
            for holder, doc, start, stop in zip(*(column[rows].tolist() for column in columns)):
                shards[holder] = (*shards.get(holder, ()), Segment(doc, start, stop))
            found.append((micro_batch, Layout(shards, math.gcd(len(shards), self.ulysses_degree))))
        return found

    def digest(self) -> int:
        """Signed 64-bit fingerprint of everything that runs, not of predictions; equal on every machine."""
        digest = hashlib.blake2b(digest_size=8)
        sizes = np.array([self.world_size, self.capacity, self.ulysses_degree, len(self.rank), len(self.cost)])
        for column in (sizes, self.micro_batch, self.rank, self.doc, self.start, self.stop):
            digest.update(np.ascontiguousarray(column, dtype="<i8").tobytes())
        return int.from_bytes(digest.digest(), "little", signed=True)

    def timeline(self) -> Timeline:
        """Run the plan on its predicted costs."""
        members = self._first_of_runs(self.micro_batch, self.rank)
        first_member = np.searchsorted(self.micro_batch[members], np.arange(len(self.cost) + 1)).tolist()
        rank = self.rank[members]
        free = np.zeros(self.world_size, np.int64)
        stop = np.empty_like(self.cost)
        for i, cost in enumerate(self.cost.tolist()):
            group = rank[first_member[i] : first_member[i + 1]]
            stop[i] = free[group] = free[group].max() + cost
        busy = np.zeros(self.world_size, np.int64)
        np.add.at(busy, rank, self.cost[self.micro_batch[members]])
        return Timeline(start=stop - self.cost, stop=stop, rank_busy=busy, makespan=int(stop.max()))

    def summary(self) -> PlanSummary:
        """Counts and predicted balance."""
        timeline = self.timeline()
        members = self._first_of_runs(self.micro_batch, self.rank)
        documents, ranks_per_document = np.unique(
            np.unique(np.stack([self.doc, self.rank]), axis=1)[0], return_counts=True
        )
        return PlanSummary(
            world_size=self.world_size,
            documents=len(documents),
            tokens=int((self.stop - self.start).sum()),
            split_documents=int((ranks_per_document > 1).sum()),
            ranks_per_document=_spread(ranks_per_document),
            micro_batches_per_rank=_spread(np.bincount(self.rank[members], minlength=self.world_size)),
            makespan=timeline.makespan,
            balance=timeline.makespan / self.lower_bound,
            idle_share=1 - int(timeline.rank_busy.sum()) / (self.world_size * timeline.makespan),
        )

    def check(self, lengths: np.ndarray) -> None:
        """Raise PlanError, naming the row, unless every invariant holds for documents of these lengths (tokens)."""
        lengths = np.asarray(lengths, np.int64)
        tokens = self.stop - self.start
        self._refuse((self.rank < 0) | (self.rank >= self.world_size), f"a rank must be 0 to {self.world_size - 1}")
        self._refuse((self.doc < 0) | (self.doc >= len(lengths)), f"a document must be 0 to {len(lengths) - 1}")
        self._refuse(tokens < 1, "a segment holds at least one token")

        step = np.diff(self.micro_batch, prepend=-1)
        self._refuse((step != 0) & (step != 1), "micro-batches are numbered 0, 1, 2 ... in row order")
        if self.micro_batch[-1] != len(self.cost) - 1:
            raise PlanError(f"{len(self.cost)} costs for {int(self.micro_batch[-1]) + 1} micro-batches")
        falls = np.diff(self.rank, prepend=0) < 0
        self._refuse(falls & (step == 0), "the rows of a micro-batch are ordered by rank")

        shard = np.cumsum((step != 0) | (np.diff(self.rank, prepend=-1) != 0)) - 1
        held = np.zeros(len(self.rank), np.int64)
        np.add.at(held, shard, tokens)
        self._refuse(held[shard] > self.capacity, f"a rank holds at most {self.capacity} tokens in a micro-batch")

        by_position = np.lexsort([self.start, self.doc])
        doc, start, stop = (column[by_position] for column in (self.doc, self.start, self.stop))
        opens = np.diff(doc, prepend=-1) != 0
        expected = np.where(opens, 0, np.roll(stop, 1))
        self._refuse((start != expected)[np.argsort(by_position)], "the segments of a document tile it exactly once")
        together = opens | (np.diff(self.micro_batch[by_position], prepend=-1) == 0)
        self._refuse(~together[np.argsort(by_position)], "a document lies in one micro-batch")
        planned = np.zeros(len(lengths), np.int64)
        np.maximum.at(planned, self.doc, self.stop)
        if (planned != lengths).any():
            i = int((planned != lengths).argmax())
            raise PlanError(f"document {i} has {lengths[i]} tokens and the plan holds {planned[i]} of it")

        if (self.cost < 1).any() or self.timeline().makespan < self.lower_bound:
            raise PlanError(f"costs must be >= 1 and no plan can beat the lower bound of {self.lower_bound} ns")

    def _refuse(self, wrong: np.ndarray, rule: str) -> None:
        if wrong.any():
            row = int(wrong.argmax())
            columns = ("micro_batch", "rank", "doc", "start", "stop")
            raise PlanError(f"row {row} ({', '.join(f'{c}={getattr(self, c)[row]}' for c in columns)}): {rule}")

    @staticmethod
    def _first_of_runs(*columns: np.ndarray) -> np.ndarray:
        """Rows at which any of the columns differs from the row before."""
        return np.flatnonzero(np.logical_or.reduce([np.diff(column, prepend=-1) != 0 for column in columns]))


def _spread(counts: np.ndarray) -> tuple[int, float, int]:
    return int(counts.min()), float(np.median(counts)), int(counts.max())
