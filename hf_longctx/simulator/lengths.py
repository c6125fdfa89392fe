"""Document lengths as they come in training: distributions to plan and to simulate with.

    github, byted       ByteScale's two data sets (arXiv 2502.21231, figure 4): the share of *tokens* in documents of up to
                        2K, 4K, ... 2M tokens, read off the figure; 16.2 % and 44.3 % of tokens lie above 128K.
                        Log-uniform inside a bucket: a document is as likely to have 3 as 3.1 thousand tokens
    lognormal_pareto    a lognormal body (median 1000) and, for 4 % of documents, a truncated Pareto tail from 16K on
    agent_trajectories  a lognormal (median 38,000, sigma 0.38) from 500 to 184,000 tokens, 5 % of documents above 71,000. The
                        median, the 95 % and the longest are CoderForge's (togethercomputer/CoderForge-Preview, 155,144
                        trajectories of coding agents). That it is a lognormal, and its shortest, are assumptions
    verl_1k_16k         1,024 to 16,384 tokens: the mix on which verl reports 1.61 times the speed of static context parallelism
                        by Megatron's dynamic one. How lengths lie in between is not published: log-uniform is an assumption
    Resampled(lengths)  the user's own, drawn with replacement

A draw of more documents begins with the same documents, so a longer simulation continues a shorter one. What is longer than
a context is truncated, split, or left out, as the caller says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

LONGEST = 2**21
"""Tokens of the longest document of the named distributions."""
Beyond = Literal["truncate", "split", "exclude"]
"""Treatment of a document longer than the context: its first tokens are kept and the rest is lost, as in ByteScale's sweeps
over context lengths; it is cut into pieces of the context's length and a shorter last one, each a document; or it does not
occur."""
UNIFORMS = 3
"""Random numbers for each document."""
MOST_DRAWN, RAREST = 2**20, 1000
"""Documents after which drawing ends if not even one of so many is short enough."""


class Distribution(Protocol):
    """Random numbers -> lengths."""

    @property
    def shortest(self) -> int:
        """Tokens of the shortest document there is."""

    @property
    def longest(self) -> int:
        """Tokens of the longest."""

    def lengths(self, uniform: np.ndarray) -> np.ndarray:
        """uniform: float64 [documents, UNIFORMS] in [0, 1) -> int64 [documents]"""


@dataclass(frozen=True)
class Histogram:
    """Shares of tokens by length of document, log-uniform inside each bucket."""

    edges: tuple[int, ...]
    """tokens; bucket i holds documents of more than edges[i] and up to edges[i + 1]"""
    token_shares: tuple[float, ...]
    """of all tokens, by bucket; they need not add up to 1"""

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.token_shares) + 1 or min(np.diff(self.edges)) < 1 or self.edges[0] < 1:
            raise ValueError(
                f"edges {self.edges} must be positive, ascend, and be one more than the {len(self.token_shares)} shares"
            )
        if min(self.token_shares) < 0 or sum(self.token_shares) <= 0:
            raise ValueError(
                f"token_shares {self.token_shares} must not be negative, and at least one must be positive"
            )

    @property
    def shortest(self) -> int:
        return self.edges[0] + 1

    @property
    def longest(self) -> int:
        return self.edges[-1]

    @property
    def document_shares(self) -> np.ndarray:
        """float64 [buckets]: a bucket's share of tokens over its mean length, of all documents."""
        low, high = np.array(self.edges[:-1], float), np.array(self.edges[1:], float)
        shares = np.array(self.token_shares) * np.log(high / low) / (high - low)
        return shares / shares.sum()

    def lengths(self, uniform: np.ndarray) -> np.ndarray:
        edges = np.array(self.edges)
        upper = np.cumsum(self.document_shares)
        bucket = np.minimum(np.searchsorted(upper, uniform[:, 0], side="right"), len(upper) - 1)
        low, high = edges[bucket], edges[bucket + 1]
        drawn = np.ceil(low * (high / low) ** uniform[:, 1]).astype(np.int64)
        return np.clip(drawn, low + 1, high)


@dataclass(frozen=True)
class LognormalPareto:
    """Most documents short, a few very long."""

    median: float = 1000.0
    """tokens, of the lognormal body"""
    sigma: float = 1.2
    """of the logarithm"""
    tail_share: float = 0.04
    """of documents that come from the tail"""
    tail_start: int = 16384
    """tokens of the tail's shortest document"""
    tail_exponent: float = 0.95
    """how fast the tail falls: P(longer than x) ~ x^-exponent"""
    shortest: int = 32
    longest: int = LONGEST

    def lengths(self, uniform: np.ndarray) -> np.ndarray:
        normal = np.sqrt(-2 * np.log1p(-uniform[:, 1])) * np.cos(2 * math.pi * uniform[:, 2])  # Box-Muller
        body = self.median * np.exp(self.sigma * normal)
        reached = 1 - (self.tail_start / self.longest) ** self.tail_exponent
        tail = self.tail_start / (1 - uniform[:, 1] * reached) ** (1 / self.tail_exponent)
        drawn = np.where(uniform[:, 0] < self.tail_share, tail, body)
        return np.clip(drawn.astype(np.int64), self.shortest, self.longest)


@dataclass(frozen=True, eq=False)
class Resampled:
    """Lengths drawn from given ones, each as likely as the others."""

    given: np.ndarray = field(repr=False)
    """int64 [documents], tokens"""

    def __post_init__(self) -> None:
        if self.given.ndim != 1 or not len(self.given) or not np.issubdtype(self.given.dtype, np.integer):
            raise ValueError(
                f"lengths have shape {self.given.shape} and dtype {self.given.dtype}; one integer per document is needed, and at "
                "least one document"
            )
        if self.given.min() < 1:
            raise ValueError(f"a document has {self.given.min()} tokens; lengths must be at least 1")

    @property
    def shortest(self) -> int:
        return int(self.given.min())

    @property
    def longest(self) -> int:
        return int(self.given.max())

    def lengths(self, uniform: np.ndarray) -> np.ndarray:
        return self.given[(uniform[:, 0] * len(self.given)).astype(np.int64)].astype(np.int64)


_BUCKETS = (256, *(2**power for power in range(11, 22)))

DISTRIBUTIONS: dict[str, Distribution] = {
    "github": Histogram(_BUCKETS, (34.0, 11.4, 10.4, 9.7, 9.5, 4.4, 4.4, 6.4, 4.5, 3.2, 2.1)),
    "byted": Histogram(_BUCKETS, (10.2, 7.6, 7.6, 7.6, 7.6, 7.5, 7.6, 7.3, 10.7, 14.2, 12.1)),
    "lognormal_pareto": LognormalPareto(),
    "agent_trajectories": LognormalPareto(38_000.0, 0.38, tail_share=0.0, shortest=500, longest=184_000),
    "verl_1k_16k": Histogram((1023, 16384), (1.0,)),
}
"""Distributions that have a name on the command line. ByteScale's lowest edge is not published; documents below 256 tokens
are left out."""


def distribution_name(text: str) -> str | None:
    """Return the key of DISTRIBUTIONS that `text` spells, with hyphens or underscores; None where it spells none."""
    name = text.replace("-", "_")
    return name if name in DISTRIBUTIONS else None


def draw(
    distribution: str | Distribution, documents: int, seed: int, longest: int = LONGEST, beyond: Beyond = "truncate"
) -> np.ndarray:
    """int64 lengths in tokens of so many documents; of more pieces where documents are split.

    Args:
        distribution: a name of DISTRIBUTIONS, also spelled with hyphens, or one of the classes here.
        longest: the context: no length is larger.
        beyond: what becomes of longer documents, see `Beyond`.

    Raises:
        ValueError: an unknown name, a count below its least, or no document is short enough.
    """
    if documents < 0:
        raise ValueError(f"documents={documents} must not be negative")
    chosen = _found(distribution, longest, beyond)
    count = documents
    while True:
        drawn = chosen.lengths(np.random.default_rng(seed).random((count, UNIFORMS)))
        if beyond == "exclude":
            drawn = drawn[drawn <= longest]
        if len(drawn) >= documents:
            break
        if count >= max(MOST_DRAWN, documents) and len(drawn) * RAREST < count:
            raise ValueError(
                f"longest={longest} excludes all but {len(drawn):,} of {count:,} documents; valid: a context that holds more "
                f"than one of {RAREST:,} of them, or truncating or splitting longer ones"
            )
        count *= 2
    drawn = drawn[:documents]
    return split_at(drawn, longest) if beyond == "split" else np.minimum(drawn, longest)


def draw_tokens(
    distribution: str | Distribution, tokens: int, seed: int, longest: int = LONGEST, beyond: Beyond = "truncate"
) -> np.ndarray:
    """int64 lengths of as many documents, in the order drawn, as have at most so many tokens together: closed before the one
    that exceeds them, as global batches are. A first document that is longer is there alone. Arguments and errors of `draw`.
    """
    if tokens < 1:
        raise ValueError(f"tokens={tokens}: a document has at least 1 token")
    documents = 64
    while (total := np.cumsum(lengths := draw(distribution, documents, seed, longest, beyond)))[-1] <= tokens:
        documents *= 2
    return lengths[: max(1, int(np.searchsorted(total, tokens, side="right")))]


def split_at(lengths: np.ndarray, longest: int) -> np.ndarray:
    """Documents cut into pieces of at most `longest` tokens, in order: all but the last of a document are full."""
    pieces = -(-lengths // longest)
    cut = np.full(int(pieces.sum()), longest, dtype=np.int64)
    cut[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * longest
    return cut


def _found(distribution: str | Distribution, longest: int, beyond: str) -> Distribution:
    if isinstance(distribution, str):
        name = distribution_name(distribution)
        if name is None:
            raise ValueError(f"distribution {distribution!r} is unknown; valid: {', '.join(DISTRIBUTIONS)}")
        distribution = DISTRIBUTIONS[name]
    if beyond not in ("truncate", "split", "exclude"):
        raise ValueError(f"beyond={beyond!r} is unknown; valid: truncate, split, exclude")
    if longest < 1:
        raise ValueError(f"longest={longest}: a document has at least 1 token")
    if beyond == "exclude" and distribution.shortest > longest:
        raise ValueError(f"longest={longest} excludes every document: the shortest has {distribution.shortest} tokens")
    return distribution
