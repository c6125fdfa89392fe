"""Loss by position and by length of documents: does a model use the far context?

    position      0 ... 127 | 128 ... 255 | 256 ... 511 | 512 ...        the tokens before it; edges are powers of two
    loss               2.31 |        1.98 |        1.84 | 1.79           of the tokens at these positions, given all before them
    near loss          2.31 |        1.98 |        1.84 | 1.83           the same tokens, given only the last few hundred

A loss that falls with the position may fall because later tokens are easier. The near loss tells: what it is above the
loss is what the far context is worth. For it a document is cut into windows of 2 * near tokens that overlap by half, and
each token is scored by the window in whose second half it lies, so that it has near to 2 * near - 1 tokens before it:

    near = 2    tokens 0 1 2 3 4 5 6      windows  [0 1 2 3]   [2 3 4 5]   [4 5 6]
                                          scores      1 2 3         4 5         6

Documents are scored across ranks by `score`, which sends one number a token; nothing else is sent here. Sums are float64,
by document, so that two models can be compared document by document. Shapes: D documents, B buckets of positions.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from hf_longctx.attention.exchange import Exchange
from hf_longctx.data.length_index import IGNORE_INDEX
from hf_longctx.data.masks import mask_reason
from hf_longctx.data.media import ONLY_TEXT, media_column
from hf_longctx.data.packed import packed_reason
from hf_longctx.inference.evaluation.batches import batches_of
from hf_longctx.inference.score import score
from hf_longctx.models.documents import documents_of, refuse_beyond_positions

FIRST_EDGE = 128
"""End of the first bucket of positions, and of lengths."""
NEAR = 512
"""Tokens of context that the near loss grants, at least."""


@dataclass(frozen=True)
class Bucket:
    """Tokens of some positions, or documents of some lengths."""

    start: int
    """positions: the first; lengths: documents are longer than this"""
    stop: int
    """positions: after the last; lengths: documents have at most so many tokens"""
    documents: int
    tokens: int
    """that are predicted and counted"""
    loss: float
    """nats per token"""
    near_loss: float | None
    """the same tokens, given their near context only; None: not measured"""


@dataclass(frozen=True, eq=False)
class DocumentLosses:
    """Sums of -log p by document and bucket of positions."""

    lengths: np.ndarray
    """int64 [D], tokens of each document"""
    edges: np.ndarray
    """int64 [B + 1]: bucket b holds the positions edges[b] to edges[b + 1] - 1"""
    tokens: np.ndarray
    """int64 [D, B], tokens that count"""
    nll: np.ndarray
    """float64 [D, B], nats"""
    near_nll: np.ndarray | None
    """the same tokens, given their near context only"""

    @property
    def loss(self) -> float:
        """Nats per token, over all documents."""
        return float(self.nll.sum() / self.tokens.sum())

    @cached_property
    def length_bucket(self) -> np.ndarray:
        """int64 [D]: bucket b holds lengths above edges[b], up to edges[b + 1]."""
        return np.searchsorted(self.edges, self.lengths) - 1

    def by_position(self) -> list[Bucket]:
        """Buckets that hold tokens, from the first."""
        return self._buckets(self.tokens, self.nll, self.near_nll)

    def by_length(self) -> list[Bucket]:
        """Buckets that hold documents, from the shortest."""
        near = None if self.near_nll is None else self.by_length_table(self.near_nll)
        return self._buckets(self.by_length_table(self.tokens), self.by_length_table(self.nll), near)

    def by_length_table(self, table: np.ndarray) -> np.ndarray:
        """[D, B] by positions -> [D, B] by the length of the document: each row has one entry, its sum."""
        by_length = np.zeros_like(table)
        by_length[np.arange(len(table)), self.length_bucket] = table.sum(1)
        return by_length

    def _buckets(self, tokens: np.ndarray, nll: np.ndarray, near: np.ndarray | None) -> list[Bucket]:
        counts = tokens.sum(0)
        return [
            Bucket(
                start=int(self.edges[b]),
                stop=int(self.edges[b + 1]),
                documents=int((tokens[:, b] > 0).sum()),
                tokens=int(counts[b]),
                loss=float(nll[:, b].sum() / counts[b]),
                near_loss=None if near is None else float(near[:, b].sum() / counts[b]),
            )
            for b in np.flatnonzero(counts)
        ]


@dataclass(frozen=True)
class Document:
    """Tokens, and which of them count."""

    ids: torch.Tensor
    """int64 [T]"""
    counted: np.ndarray
    """bool [T]; the first is False: nothing precedes it"""


def as_documents(rows: Sequence[Any]) -> list[Document]:
    """Rows as a trainer takes them: mappings with `input_ids` and perhaps `labels`, or token ids alone. Documents of which no
    token counts are left out.

    Raises:
        ValueError: none is left, labels are not the tokens themselves or -100, or a row is several documents, holds images,
            sound or video, or masks instead of labels.
    """
    documents = [_document(rows[number], number) for number in range(len(rows))]
    documents = [document for document in documents if document.counted.any()]
    if not documents:
        raise ValueError(
            f"none of the {len(rows)} documents holds a token to predict: a document needs at least two tokens, and with labels, "
            f"one that is not {IGNORE_INDEX} after the first"
        )
    return documents


def _document(row: Any, number: int) -> Document:
    given, labels = (row["input_ids"], row.get("labels")) if isinstance(row, Mapping) else (row, None)
    ids = torch.as_tensor(given).long()
    if isinstance(row, Mapping):
        if (media := media_column(row)) is not None:
            raise ValueError(f"document {number} has {media!r}, and {ONLY_TEXT}")
        if reason := packed_reason(row, len(ids)) or mask_reason(row):
            raise ValueError(f"document {number}: {reason}")
    counted = np.ones(len(ids), bool)
    if labels is not None:
        wanted = torch.as_tensor(labels).long()
        counted = (wanted != IGNORE_INDEX).numpy()
        if wanted.shape != ids.shape or not torch.equal(wanted[counted], ids[counted]):
            raise ValueError(
                f"document {number}: labels must be, for each of the {len(ids)} tokens, that token or {IGNORE_INDEX}; they are "
                "shifted here"
            )
    counted[:1] = False
    return Document(ids, counted)


def document_losses(
    model: torch.nn.Module,
    documents: Sequence[Document],
    *,
    exchange: Exchange | None = None,
    capacity: int | None = None,
    near: int = NEAR,
    on_progress: Callable[[int], None] = lambda tokens: None,
) -> DocumentLosses:
    """The losses of documents, the same on every rank.

    Args:
        model: patched by `patch_model`.
        documents: as `as_documents` returns them.
        exchange: the ranks that share the work; None: this process does it all.
        capacity: most tokens of a micro-batch on one rank; None: 8192, or what the longest document needs.
        near: tokens of context that the near loss grants; 0: it is not measured.
        on_progress: called with the tokens that have been scored since the last call; `scored_tokens` in all.

    Raises:
        ValueError: `near` is negative, and what `score` and `batches_of` refuse.
    """
    if near < 0:
        raise ValueError(f"near={near}: tokens of context that the near loss grants, or 0 to leave it out")
    lengths = np.array([len(document.ids) for document in documents])
    edges = powers_of_two(int(lengths.max()))
    shape = len(documents), len(edges) - 1
    tokens, nll = np.zeros(shape, np.int64), np.zeros(shape)
    for d, document in enumerate(documents):
        tokens[d] = _sums(document.counted, edges, 0)
    settings: dict[str, Any] = {"exchange": exchange, "capacity": capacity}
    for d, values in _scored(model, [document.ids for document in documents], on_progress, settings):
        nll[d] = _sums(np.where(documents[d].counted, values, 0.0), edges, 0)
    near_nll = None
    if near:
        near_nll = nll.copy()  # of documents that one window holds
        windows = _windows(documents, near)
        for d in {window.document for window in windows}:
            near_nll[d] = 0.0
        pieces = [documents[span.document].ids[span.start : span.stop] for span in windows]
        for number, values in _scored(model, pieces, on_progress, settings):
            window = windows[number]
            counted = documents[window.document].counted[window.start : window.stop].copy()
            counted[: window.scored - window.start] = False
            near_nll[window.document] += _sums(np.where(counted, values, 0.0), edges, window.start)
    return DocumentLosses(lengths, edges, tokens, nll, near_nll)


def scored_tokens(documents: Sequence[Document], near: int = NEAR) -> int:
    """Tokens that `document_losses` runs the model on."""
    windows = _windows(documents, near) if near else []
    return sum(len(document.ids) for document in documents) + sum(window.stop - window.start for window in windows)


def powers_of_two(longest: int) -> np.ndarray:
    """int64: 0, FIRST_EDGE, and its doubles, up to the first that `longest` does not exceed."""
    edges = [0, FIRST_EDGE]
    while edges[-1] < longest:
        edges.append(2 * edges[-1])
    return np.array(edges)


@dataclass(frozen=True)
class _Window:
    """Tokens [start, stop) of a document; those from `scored` on are scored."""

    document: int
    start: int
    scored: int
    stop: int


def _windows(documents: Sequence[Document], near: int) -> list[_Window]:
    """Cut the documents that one window does not hold."""
    windows = []
    for d, document in enumerate(documents):
        length = len(document.ids)
        if length <= 2 * near:
            continue
        for start in range(0, length - near, near):
            window = _Window(d, start, start + near if start else 0, min(start + 2 * near, length))
            if document.counted[window.scored : window.stop].any():
                windows.append(window)
    return windows


def _sums(values: np.ndarray, edges: np.ndarray, start: int) -> np.ndarray:
    """float64 [B]: sums of values by bucket; values [n] are those of positions start, start + 1, ..."""
    bucket = np.searchsorted(edges, np.arange(start, start + len(values)), side="right") - 1
    return np.bincount(bucket, values, len(edges) - 1)


def _scored(
    model: torch.nn.Module,
    documents: Sequence[torch.Tensor],
    on_progress: Callable[[int], None],
    settings: Mapping[str, Any],
) -> Iterator[tuple[int, np.ndarray]]:
    """Number of a document and float64 [T]: -log p of each of its tokens; of the first, 0."""
    exchange = settings["exchange"]
    lengths = [len(ids) for ids in documents]
    ranks = exchange.world_size if exchange else 1
    if lengths:
        longest = int(np.argmax(lengths))
        refuse_beyond_positions(model, lengths[longest], f"document {longest}")
    capacity, batches = batches_of(lengths, ranks, settings["capacity"], documents_of(model))
    for batch in batches:
        given = [documents[number] for number in batch]
        for number, log_probabilities in zip(batch, score(model, given, **{**settings, "capacity": capacity})):
            yield number, np.concatenate([[0.0], -log_probabilities.double().cpu().numpy()])
        on_progress(sum(map(len, given)))
