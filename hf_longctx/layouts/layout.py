"""Layouts: which rank holds which tokens of which documents, and everything that follows from it.

A micro-batch is a layout. A layout says, for each rank that takes part, which document segments it holds. Positions,
the document mask, who sends what to whom, and balance are derived from it; none of them is ever stored or negotiated.

    two ranks, documents A (8 tokens), B (3), C (2):      rank 0: A[0:2) A[6:8) B[0:3)
                                                          rank 1: A[2:6) C[0:2)

Segments of one document are disjoint, so a query segment and a key segment of the same document are one of three
cases: the same segment (causal), keys wholly before queries (full), keys wholly after (nothing). No mask is needed,
ever; exchange_schedule.py derives the blocks and the messages.

Ulysses. A layout may split heads inside groups of `ulysses` consecutive ranks: an all-to-all gives each rank of a group
all of the group's tokens of split documents, and its share of the heads. Between the groups, the merged shards are a
layout again. Whole documents take no part in it.

Chunks. A pipeline may run a long document chunk by chunk. The layout of a chunk holds its tokens alone; its `context` says
which ranks have kept the keys and values of the tokens before it.

Nothing is sent between ranks here, and nothing here needs torch.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

Class = TypeVar("Class")


@dataclass(frozen=True, slots=True, order=True)
class Segment:
    """Tokens [start, stop) of one document."""

    doc: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


Shard = tuple[Segment, ...]
"""Segments that one rank holds, in memory order."""


class LayoutError(ValueError):
    """A layout breaks one of its invariants."""


def uncopied(cls: type[Class]) -> type[Class]:
    """Take a dataclass for a plain class from now on. FSDP2 makes new ones of the dataclasses among each layer's arguments, casts
    tensors in them to the dtype that computes, and loses what was derived from them."""
    del cls.__dataclass_fields__  # type: ignore[attr-defined]
    return cls


@uncopied
@dataclass(frozen=True)
class Layout:
    """One micro-batch: {rank: segments it holds, in memory order}. Ranks with an empty shard are dropped.

    Every document of a layout is held whole: its segments, with those of its context before them, tile [0, length)
    exactly once.

    Raises:
        LayoutError: a segment is empty or negative, two segments overlap, a gap is left, no token is held at all,
            `ulysses` does not divide the ranks, or a context is not one of earlier tokens that `chunked` makes.
    """

    shards: Mapping[int, Shard]
    ulysses: int = 1
    """Degree of the head split: ranks[0:u], ranks[u:2u], ... are its groups. 1: none."""
    context: Mapping[int, Shard] = field(default_factory=dict)
    """Segments that came before, in other layouts, and whose keys and values a rank has kept, by position."""

    def __post_init__(self) -> None:
        shards, context = (
            {rank: tuple(by_rank[rank]) for rank in sorted(by_rank) if len(by_rank[rank]) > 0}
            for by_rank in (self.shards, self.context)
        )
        object.__setattr__(self, "shards", shards)
        object.__setattr__(self, "context", context)
        if not shards:
            raise LayoutError("a layout holds at least one token on at least one rank; this one holds none")
        for doc, segments in self._segments_of.items():
            reached = 0
            for segment, rank in segments:
                if not segment.start < segment.stop:
                    raise LayoutError(f"rank {rank} holds {segment}: a segment needs start < stop")
                if segment.start != reached:
                    problem = "overlaps what" if segment.start < reached else "leaves a gap after what"
                    raise LayoutError(
                        f"document {doc}: [{segment.start}, {segment.stop}) on rank {rank} {problem} comes before it, "
                        f"which ends at {reached}; the segments of a document must tile [0, length) exactly once"
                    )
                reached = segment.stop
        if context:
            self._check_context()
        if self.ulysses < 1 or len(shards) % self.ulysses:
            valid = [degree for degree in range(1, len(shards) + 1) if len(shards) % degree == 0]
            raise LayoutError(
                f"ulysses={self.ulysses} must divide the {len(shards)} ranks of a layout ({len(shards)} = "
                f"{len(shards) // max(self.ulysses, 1)} * {self.ulysses} + {len(shards) % max(self.ulysses, 1)}); valid "
                f"degrees: {valid}"
            )

    def _check_context(self) -> None:
        """Raises LayoutError where the engine could not run it."""
        begins: dict[int, int] = {}
        for segment in (segment for shard in self.shards.values() for segment in shard):
            begins[segment.doc] = min(segment.start, begins.get(segment.doc, segment.start))
        for rank, segments in self.context.items():
            wrong = [segment for segment in segments if segment.doc not in begins or segment.stop > begins[segment.doc]]
            if wrong or rank not in self.shards or list(segments) != sorted(segments):
                raise LayoutError(
                    f"context {wrong or list(segments)} of rank {rank}: it must hold sorted segments of documents that go on "
                    f"here, on ranks {list(self.shards)}, before they do, at {begins}"
                )
            if list(self.shards[rank]) != sorted(self.shards[rank]) or self.ulysses != 1:
                raise LayoutError(
                    f"a layout with context needs sorted shards and ulysses=1, got ulysses={self.ulysses} and rank {rank}'s "
                    f"{list(self.shards[rank])}"
                )

    @cached_property
    def _segments_of(self) -> dict[int, list[tuple[Segment, int]]]:
        """Document -> its (segment, rank) pairs by position."""
        holdings = (*self.context.items(), *self.shards.items())
        pairs = sorted((segment, rank) for rank, shard in holdings for segment in shard)
        segments_of: dict[int, list[tuple[Segment, int]]] = {}
        for segment, rank in pairs:
            segments_of.setdefault(segment.doc, []).append((segment, rank))
        return segments_of

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that take part, ascending."""
        return tuple(self.shards)

    @cached_property
    def doc_lengths(self) -> dict[int, int]:
        """Document -> tokens."""
        return {doc: segments[-1][0].stop for doc, segments in self._segments_of.items()}

    @cached_property
    def split_documents(self) -> dict[int, tuple[int, ...]]:
        """Documents held by several ranks -> those ranks, ascending."""
        holders = {doc: tuple(sorted({rank for _, rank in pairs})) for doc, pairs in self._segments_of.items()}
        return {doc: ranks for doc, ranks in holders.items() if len(ranks) > 1}

    def shard(self, rank: int) -> Shard:
        """The segments of a rank, in memory order. Raises LayoutError if the rank takes no part."""
        if rank not in self.shards:
            raise LayoutError(f"rank {rank} takes no part in this layout; its ranks are {list(self.ranks)}")
        return self.shards[rank]

    def tokens(self, rank: int) -> int:
        """Tokens that a rank holds. Every layer asks, so that they are counted once."""
        counted = ("tokens", rank)
        if counted not in self.derived:
            self.derived[counted] = sum(len(segment) for segment in self.shard(rank))
        return self.derived[counted]

    def context_tokens(self, rank: int) -> int:
        """Tokens whose keys and values a rank has kept."""
        return sum(len(segment) for segment in self.context.get(rank, ()))

    def positions(self, rank: int) -> np.ndarray:
        """int64 [tokens]: each token's offset in its document, in memory order."""
        return np.concatenate([np.arange(s.start, s.stop, dtype=np.int64) for s in self.shard(rank)])

    def documents(self, rank: int) -> np.ndarray:
        """int64 [tokens]: each token's document, in memory order."""
        shard = self.shard(rank)
        return np.repeat(np.array([s.doc for s in shard], np.int64), [len(s) for s in shard])

    @cached_property
    def derived(self) -> dict[Hashable, Any]:
        """Return what other modules derive from this layout and keep as long as it lives, e.g. schedules."""
        return {}


def zigzag(doc: int, length: int, ranks: Sequence[int], shares: Sequence[int] | None = None) -> dict[int, Shard]:
    """Splits one document over P ranks so that causal attention balances: rank i holds chunks i and 2P-1-i of 2P.

    `shares` says how many tokens each rank holds; without it they differ by at most one, whatever the length, and with
    fewer tokens than ranks the last ranks hold none. A rank's area is in proportion to its tokens either way: what is
    taken from the front and from the back lies at the document's middle on average. The two chunks of the last rank
    touch and are one segment.

        length 10, ranks (0, 1):   rank 0: [0:2) [7:10)    rank 1: [2:7)
    """
    if shares is None:
        shares = [length // len(ranks) + (i < length % len(ranks)) for i in range(len(ranks))]
    elif len(shares) != len(ranks) or sum(shares) != length or min(shares) < 0:
        raise LayoutError(f"document {doc}: shares {list(shares)} of {len(ranks)} ranks must add up to {length} tokens")
    shards: dict[int, Shard] = {}
    low, high = 0, length
    for i, rank in enumerate(ranks):
        first, second = shares[i] // 2, shares[i] - shares[i] // 2
        chunks = [(low, low + first), (high - second, high)]
        low, high = low + first, high - second
        if chunks[0][1] == chunks[1][0]:
            chunks = [(chunks[0][0], chunks[1][1])]
        shards[rank] = tuple(Segment(doc, start, stop) for start, stop in chunks if start < stop)
    return shards


def chunked(doc: int, length: int, ranks: Sequence[int], chunks: int | Sequence[int]) -> list[Layout]:
    """One document as layouts that follow each other, each over all ranks in zigzag, with the chunks before it as its context.

        length 8, ranks (0, 1), 2 chunks:   rank 0: [0:1) [3:4)  then  [4:5) [7:8), with context [0:1) [3:4)
                                            rank 1: [1:3)        then  [5:7), with context [1:3)

    What a chunk leaves over after division by the ranks goes to the ranks that follow those which got the last, so that all
    chunks together give each rank what the whole document would.

    Args:
        chunks: how many, of equally many tokens, whose attention grows: chunk c computes about (2c + 1) / chunks^2 of the
            document's; or where each chunk ends, in tokens, the last at `length`.

    Raises:
        LayoutError: a chunk would leave a rank without a token, or the ends are none.
    """
    if isinstance(chunks, int):
        if not 1 <= chunks <= length // len(ranks):
            raise LayoutError(
                f"document {doc}: {chunks} chunks of {length} tokens over {len(ranks)} ranks; each rank needs a token of each, "
                f"so valid are 1 to {length // len(ranks)}"
            )
        chunks = [length * (chunk + 1) // chunks for chunk in range(chunks)]
    sizes = [stop - start for start, stop in zip([0, *chunks], chunks)]
    if min(sizes, default=0) < len(ranks) or sum(sizes) != length:
        raise LayoutError(
            f"document {doc}: chunks end at {list(chunks)}; each needs a token for each of {len(ranks)} ranks, so valid ends "
            f"rise by at least {len(ranks)} from 0 to {length}"
        )
    layouts: list[Layout] = []
    before: dict[int, Shard] = {}
    start = 0
    for size in sizes:
        shares = [size // len(ranks) + ((i - start) % len(ranks) < size % len(ranks)) for i in range(len(ranks))]
        shards = {
            rank: tuple(Segment(doc, start + s.start, start + s.stop) for s in shard)
            for rank, shard in zigzag(doc, size, ranks, shares).items()
        }
        layouts.append(Layout(shards, context=before))
        before = {rank: (*before.get(rank, ()), *shard) for rank, shard in shards.items()}
        start += size
    return layouts
