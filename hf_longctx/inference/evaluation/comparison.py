"""Two models on the same documents: what the one is better or worse by, and how sure that is.

Both models predict the same tokens, so their losses are compared document by document: what makes a document hard is hard for
both, and leaves the difference. The interval is a bootstrap over documents (Efron 1979), tokens of one document being
no independent evidence: documents are drawn with replacement as often as there are, the difference per token is taken of
what was drawn, and the interval holds the middle 95 % of RESAMPLES such differences. It is drawn from a fixed seed, so that it
is the same everywhere. Nothing is sent between ranks. Shapes: D documents, B buckets.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hf_longctx.inference.evaluation.losses import DocumentLosses

RESAMPLES = 2000
"""Ends of the interval of 200 documents of normal noise vary by 3 % of its width from seed to seed."""
CONFIDENCE = 0.95
DRAWN_AT_ONCE = 100
"""Rows of the matrix of how often each document was drawn that exist at once."""


@dataclass(frozen=True)
class Difference:
    """Difference of the losses of two models on the same tokens, in nats per token. Below 0: the first model is better."""

    start: int
    """as in Bucket"""
    stop: int
    documents: int
    tokens: int
    difference: float
    interval: tuple[float, float] | None
    """95 %; None: of one document there is none"""


@dataclass(frozen=True)
class Comparison:
    """The first model's losses minus the second's."""

    overall: Difference
    by_position: list[Difference]
    by_length: list[Difference]


def compare(first: DocumentLosses, second: DocumentLosses) -> Comparison:
    """Paired differences.

    Raises:
        ValueError: they were not measured on the same tokens.
    """
    if not np.array_equal(first.lengths, second.lengths) or not np.array_equal(first.tokens, second.tokens):
        raise ValueError(
            f"the losses are of other tokens: {len(first.lengths)} documents with {first.tokens.sum()} counted tokens, and "
            f"{len(second.lengths)} with {second.tokens.sum()}. Evaluate both models on the same documents, with one tokenizer"
        )
    extra, tokens = first.nll - second.nll, first.tokens
    everywhere = extra.sum(1, keepdims=True), tokens.sum(1, keepdims=True)
    [overall] = _differences(*everywhere, np.array([0, int(first.lengths.max())]))
    by_position = list(_differences(extra, tokens, first.edges))
    by_length = list(_differences(first.by_length_table(extra), first.by_length_table(tokens), first.edges))
    return Comparison(overall, by_position, by_length)


def _differences(extra: np.ndarray, tokens: np.ndarray, edges: np.ndarray) -> Iterator[Difference]:
    """extra: float64 [D, B], what the first model's nats are more; tokens: int64 [D, B]."""
    low, high = _intervals(extra, tokens)
    counts, documents = tokens.sum(0), (tokens > 0).sum(0)
    for b in np.flatnonzero(counts):
        interval = (float(low[b]), float(high[b])) if documents[b] > 1 else None
        mean = float(extra[:, b].sum() / counts[b])
        yield Difference(int(edges[b]), int(edges[b + 1]), int(documents[b]), int(counts[b]), mean, interval)


def _intervals(extra: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """float64 [2, B]: where the middle 95 % of the resampled differences begin and end; nan in a bucket without tokens."""
    documents = len(extra)
    drawing, drawn = np.random.default_rng(0), []
    for _ in range(RESAMPLES // DRAWN_AT_ONCE):
        times = drawing.multinomial(documents, np.full(documents, 1 / documents), DRAWN_AT_ONCE)
        counts = times @ tokens
        drawn.append(np.divide(times @ extra, counts, out=np.full(counts.shape, np.nan), where=counts > 0))
    differences = np.concatenate(drawn)
    ends = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    seen = ~np.isnan(differences).all(0)
    quantiles = np.full((2, extra.shape[1]), np.nan)
    quantiles[:, seen] = np.nanquantile(differences[:, seen], ends, axis=0)
    return quantiles
