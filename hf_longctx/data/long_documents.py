"""Documents longer than a limit, by default what all ranks together hold: an explicit policy says what becomes of them.

    error      (default) a PlanError that names the document and what would be valid
    truncate   the first `limit` tokens are kept; what follows is not trained on
    split      pieces of `limit` tokens, the last one shorter: every token is kept

A piece is a document of its own in every respect: its positions begin at 0, its tokens see no other piece, and its
first token is predicted from nothing. So every cut of `split` costs one label, that of the token after it:

    limit 4    document   5 6 7 8 9 1      predicted   6 7 8 9 1
               truncate   5 6 7 8                      6 7 8
               split      5 6 7 8 | 9 1                6 7 8   1

That is what training on a data set cut by hand would be, and is compared with it in the tests. Global batches are made
of pieces, so the limit must not change when a run is resumed on other ranks: training/run_state.py keeps it.

What is cut is counted and said in one warning. Every rank cuts alike, from the same lengths; nothing is sent.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_longctx.data.length_index import LengthIndex, count_label_tokens, is_stored, read_tokens
from hf_longctx.planner import PlanError

POLICIES = ("error", "truncate", "split")


@dataclass(frozen=True, slots=True)
class Cuts:
    """What a policy did. All 0 where no document was longer than the limit."""

    documents: int = 0
    """documents longer than the limit"""
    pieces: int = 0
    """pieces of them that are trained on"""
    tokens: int = 0
    """their tokens that are in no such piece: cut off, or in a piece without any label"""
    labels: int = 0
    """their labels that are predicted no more"""


@dataclass(frozen=True, eq=False)
class Pieces:
    """What is trained on, in the order of the data set: documents, or pieces of them, each with a label or more."""

    index: LengthIndex
    """of the whole documents"""
    document: np.ndarray
    """int64 [pieces]: row of the data set"""
    start: np.ndarray
    """int64 [pieces]: first token, counted from the document's beginning"""
    lengths: np.ndarray
    """int64 [pieces]: tokens of each piece"""
    label_tokens: np.ndarray
    """int64 [pieces]: labels of each piece that are learned"""
    policy: str
    """the one of POLICIES that was applied"""
    limit: int | None
    """tokens of the longest piece that is allowed; None: any length"""
    cuts: Cuts

    def __len__(self) -> int:
        return len(self.document)

    def is_part(self, piece: int) -> bool:
        """Whether a piece is not a whole document."""
        return bool(self.lengths[piece] < self.index.lengths[self.document[piece]])


def cut_documents(dataset: Any, index: LengthIndex, policy: str = "error", limit: int | None = None) -> Pieces:
    """Applies a policy to the usable documents that are longer than `limit` tokens, and warns if there are any.

    Args:
        dataset: what `index` was read from; read only for labels of documents that are cut.
        index: its lengths.
        policy: one of POLICIES.
        limit: tokens; None: nothing is cut.

    Raises:
        PlanError: a document is longer than the limit, and the policy is `error`.
        ValueError: no piece has a label.
    """
    lengths = index.lengths[index.usable]
    if limit is None or lengths.max() <= limit:
        whole = index.usable, np.zeros_like(lengths), lengths, index.label_tokens[index.usable]
        return Pieces(index, *whole, policy, limit, Cuts())
    if policy == "error":
        longest = int(index.usable[lengths.argmax()])
        raise PlanError(
            f"document {longest} has {lengths.max()} tokens, more than longest_document={limit}. Valid: longest_document >= "
            f"{lengths.max()}, a shorter document, or {other_policies(int(lengths.max()), limit)}"
        )
    document, start, stop = _cut(index, policy, limit)
    partial = stop - start < index.lengths[document]
    label_tokens = index.label_tokens[document]
    label_tokens[partial] = count_label_tokens(dataset, document[partial], start[partial], stop[partial])
    kept = label_tokens > 0
    if not kept.any():
        raise ValueError(
            f"none of the {len(document)} pieces of at most {limit} tokens (longest_document) can be learned from: none has "
            "a label after its first token. Valid: a larger longest_document"
        )
    cut, trained = np.unique(document[partial]), kept & partial
    cuts = Cuts(
        documents=len(cut),
        pieces=int(np.count_nonzero(trained)),
        tokens=int(index.lengths[cut].sum() - (stop - start)[trained].sum()),
        labels=int(index.label_tokens[cut].sum() - label_tokens[trained].sum()),
    )
    warnings.warn(_describe(cuts, policy, limit, len(index.usable), int(np.count_nonzero(~kept))), stacklevel=2)
    lengths = (stop - start)[kept]
    return Pieces(index, document[kept], start[kept], lengths, label_tokens[kept], policy, limit, cuts)


def read_piece(dataset: Any, pieces: Pieces, piece: int) -> Mapping[str, Any]:
    """The tokens of one piece, and labels where there are any: `input_ids` and `labels`, [tokens of the piece].

    Of a stored data set only these tokens are read, not the rest of the document.

    Raises:
        ValueError: the document has another length than when its lengths were read.
    """
    document, start = int(pieces.document[piece]), int(pieces.start[piece])
    stop = start + int(pieces.lengths[piece])
    if is_stored(dataset):
        return {
            name: read_tokens(dataset, name, document, start, stop)
            for name in ("input_ids", "labels")
            if name in dataset.column_names
        }
    row = dataset[document]
    if not pieces.is_part(piece):
        return row  # the collator compares its length with the plan's
    whole = {name: np.asarray(row[name]) for name in ("input_ids", "labels") if name in row}
    for name, values in whole.items():
        if len(values) != pieces.index.lengths[document]:
            raise ValueError(
                f"document {document} had {pieces.index.lengths[document]} tokens when lengths were read, but reading it gave "
                f"{len(values)} {name}: a data set (or its transform) must give the same document every time"
            )
    return {name: values[start:stop] for name, values in whole.items()}


def other_policies(length: int, limit: int) -> str:
    """What the two policies that cut would make of a document of `length` tokens, for messages."""
    return (
        f"long_documents='truncate' (its first {limit} tokens are kept) or long_documents='split' "
        f"({-(-length // limit)} pieces, each a document of its own)"
    )


def _cut(index: LengthIndex, policy: str, limit: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int64 [pieces] each: document, first token, one past the last token."""
    lengths = index.lengths[index.usable]
    pieces = -(-lengths // limit) if policy == "split" else np.ones_like(lengths)
    document = np.repeat(index.usable, pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # 0, 1 ... in each document
    start = number * limit
    return document, start, np.minimum(start + limit, index.lengths[document])


def _describe(cuts: Cuts, policy: str, limit: int, documents: int, unlabelled: int) -> str:
    what = (
        f"truncated to their first {limit} tokens"
        if policy == "truncate"
        else f"split into pieces of at most {limit} tokens, {cuts.pieces} documents of their own"
    )
    return (
        f"{cuts.documents} of {documents} documents are longer than {limit} tokens (longest_document) and are {what}. Not "
        f"trained on: {cuts.tokens} tokens and {cuts.labels} labels"
        + (f", {unlabelled} pieces among them that have no label left" if unlabelled else "")
    )
