"""Documents longer than a limit, by default what all ranks together hold: an explicit policy says what becomes of them.

    error      (default) a PlanError that names the document and what would be valid
    truncate   the first `limit` tokens are kept; what follows is not trained on
    split      pieces of `limit` tokens, the last one shorter: every token is kept
    drop       the document is left out

A piece is a document of its own in every respect: its positions begin at 0, its tokens see no other piece, and its
first token is predicted from nothing. So every cut of `split` costs one label, that of the token after it, unless
pieces overlap: then each piece but the first begins `overlap` tokens earlier, and these are context only. They were
learned in the piece before, so no label is learned twice, and with an overlap of 1 or more none is lost:

    limit 4    document               5 6 7 8 9 1            predicted   6 7 8 9 1
               truncate               5 6 7 8                            6 7 8
               split                  5 6 7 8 | 9 1                      6 7 8   1
               split, overlap 2       5 6 7 8 | 7 8 9 1                  6 7 8   9 1

That is what training on a data set cut by hand would be, and is compared with it in the tests. Global batches are made
of pieces, so the limit must not change when a run is resumed on other ranks: training/run_state.py keeps it.

What is cut is counted and said in one warning. Every rank cuts alike, from the same lengths; nothing is sent.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_longctx.data.length_index import IGNORE_INDEX, LengthIndex, count_label_tokens, is_stored, read_tokens
from hf_longctx.planner import PlanError


@dataclass(frozen=True, slots=True)
class Cuts:
    """Counts of what a policy did. All 0 where no document was longer than the limit."""

    documents: int = 0
    """documents longer than the limit"""
    pieces: int = 0
    """pieces of them that are trained on"""
    tokens: int = 0
    """their tokens that are in no such piece: cut off, dropped, or in a piece without any label"""
    labels: int = 0
    """their labels that are predicted no more"""
    repeated: int = 0
    """their tokens that stand in a piece although the one before holds them, as context"""


@dataclass(frozen=True, eq=False)
class Pieces:
    """The texts to train on, in the order of the data set: documents, or pieces of them, each with a label or more."""

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
    """the one that was applied"""
    limit: int | None
    """tokens of the longest piece that is allowed; None: any length"""
    cuts: Cuts
    overlap: int = 0
    """tokens at the beginning of a piece, unless it begins its document, that are context only"""

    def __len__(self) -> int:
        return len(self.document)

    def is_part(self, piece: int) -> bool:
        """Whether a piece is not a whole document."""
        return bool(self.lengths[piece] < self.index.lengths[self.document[piece]])


def cut_documents(
    dataset: Any, index: LengthIndex, policy: str = "error", limit: int | None = None, overlap: int = 0
) -> Pieces:
    """Applies a policy to the usable documents that are longer than `limit` tokens, and warns if there are any.

    Args:
        dataset: what `index` was read from; read only for labels of documents that are cut.
        index: its lengths.
        policy: error, truncate, split or drop.
        limit: tokens; None: nothing is cut.
        overlap: tokens by which each piece of `split` begins before the end of the one before it.

    Raises:
        PlanError: a document is longer than the limit, and the policy is `error`.
        ValueError: no piece has a label, or an overlap that cannot be.
    """
    _refuse_overlap(policy, limit, overlap)
    lengths = index.lengths[index.usable]
    if limit is None or lengths.max() <= limit:
        whole = index.usable, np.zeros_like(lengths), lengths, index.label_tokens[index.usable]
        return Pieces(index, *whole, policy, limit, Cuts(), overlap)
    if policy == "error":
        longest = int(index.usable[lengths.argmax()])
        raise PlanError(
            f"document {longest} has {lengths.max()} tokens, more than longest_document={limit}. Valid: longest_document >= "
            f"{lengths.max()}, a shorter document, or {other_policies(int(lengths.max()), limit)}"
        )
    document, start, stop = _cut(index, policy, limit, overlap)
    label_tokens = index.label_tokens[document]
    part = stop - start < index.lengths[document]
    # The first label counted is the one after its `start`: that of the first token which is not context.
    first = start + np.where(start > 0, max(overlap - 1, 0), 0)
    label_tokens[part] = count_label_tokens(dataset, document[part], first[part], stop[part])
    kept = label_tokens > 0
    if not kept.any():
        raise ValueError(
            f"none of the {len(lengths)} documents can be learned from: "
            + (
                f"all are longer than {limit} tokens (longest_document) and dropped"
                if policy == "drop"
                else f"none of their {len(document)} pieces of at most {limit} tokens (longest_document) has a label after its "
                "first token"
            )
            + ". Valid: a larger longest_document"
        )
    cut, trained = index.usable[lengths > limit], kept & part
    distinct_tokens = _tokens_held(document[trained], start[trained], stop[trained])
    cuts = Cuts(
        documents=len(cut),
        pieces=int(np.count_nonzero(trained)),
        tokens=int(index.lengths[cut].sum()) - distinct_tokens,
        labels=int(index.label_tokens[cut].sum() - label_tokens[trained].sum()),
        repeated=int((stop - start)[trained].sum()) - distinct_tokens,
    )
    warnings.warn(_describe(cuts, policy, limit, len(lengths), int(np.count_nonzero(~kept))), stacklevel=2)
    pieces = document[kept], start[kept], (stop - start)[kept], label_tokens[kept]
    return Pieces(index, *pieces, policy, limit, cuts, overlap)


def read_piece(dataset: Any, pieces: Pieces, piece: int) -> Mapping[str, Any]:
    """The tokens of one piece, and labels where there are any or some tokens are context only: `input_ids` and `labels`,
    [tokens of the piece].

    Of a stored data set only these tokens are read, not the rest of the document.

    Raises:
        ValueError: the document has another length than when its lengths were read.
    """
    document, start = int(pieces.document[piece]), int(pieces.start[piece])
    stop = start + int(pieces.lengths[piece])
    if is_stored(dataset):
        read = {
            name: read_tokens(dataset, name, document, start, stop)
            for name in ("input_ids", "labels")
            if name in dataset.column_names
        }
    else:
        row = dataset[document]
        if not pieces.is_part(piece):
            return row  # the collator compares its length with the plan's
        whole = {name: np.asarray(row[name]) for name in ("input_ids", "labels") if name in row}
        for name, values in whole.items():
            if len(values) != pieces.index.lengths[document]:
                raise ValueError(
                    f"document {document} had {pieces.index.lengths[document]} tokens when lengths were read, but reading it "
                    f"gave {len(values)} {name}: a data set (or its transform) must give the same document every time"
                )
        read = {name: values[start:stop] for name, values in whole.items()}
    if start > 0 and pieces.overlap > 0:
        read["labels"] = read.get("labels", read["input_ids"]).astype(np.int64)
        read["labels"][: pieces.overlap] = IGNORE_INDEX
    return read


def other_policies(length: int, limit: int) -> str:
    """Return what the policies that refuse nothing would make of a document of `length` tokens, for messages."""
    return (
        f"long_documents='truncate' (its first {limit} tokens are kept), long_documents='split' ({-(-length // limit)} "
        "pieces, each a document of its own) or long_documents='drop' (it is left out)"
    )


def _refuse_overlap(policy: str, limit: int | None, overlap: int) -> None:
    if overlap and policy != "split":
        raise ValueError(
            f"overlap_tokens={overlap} needs long_documents='split', got {policy!r}; valid with it: overlap_tokens=0"
        )
    if overlap < 0 or (limit is not None and overlap >= limit):
        raise ValueError(
            f"overlap_tokens={overlap} must be at least 0 and less than longest_document={limit}: of each piece after the first, "
            "longest_document - overlap_tokens tokens are learned"
        )


def _cut(index: LengthIndex, policy: str, limit: int, overlap: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int64 [pieces] each: document, first token, one past the last token.

    limit 4, overlap 2, 7 tokens: pieces begin every 4 - 2 = 2 tokens, and all but the last 2 tokens of one are those of
    the next: ceil((7 - 2) / 2) = 3 pieces, [0, 4) [2, 6) [4, 7).
    """
    lengths = index.lengths[index.usable]
    stride = limit - overlap
    if policy == "split":
        pieces = np.maximum(-(-(lengths - overlap) // stride), 1)
    else:
        pieces = np.where((lengths > limit) & (policy == "drop"), 0, 1)
    document = np.repeat(index.usable, pieces)
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # 0, 1 ... in each document
    start = number * stride
    return document, start, np.minimum(start + limit, index.lengths[document])


def _tokens_held(document: np.ndarray, start: np.ndarray, stop: np.ndarray) -> int:
    """Tokens of documents that are in one piece or more; pieces in the order of documents and their tokens."""
    before = np.where(document[1:] == document[:-1], stop[:-1], 0)
    return int((stop - np.maximum(start, np.append(0, before)[: len(start)])).sum())


def _describe(cuts: Cuts, policy: str, limit: int, documents: int, unlabelled: int) -> str:
    what = {
        "truncate": f"truncated to their first {limit} tokens",
        "split": f"split into pieces of at most {limit} tokens, {cuts.pieces} documents of their own",
        "drop": "dropped",
    }[policy]
    return (
        f"{cuts.documents} of {documents} documents are longer than {limit} tokens (longest_document) and are {what}"
        + (f", in which {cuts.repeated} tokens stand again as context only" if cuts.repeated else "")
        + f". Not trained on: {cuts.tokens} tokens and {cuts.labels} labels"
        + (f", {unlabelled} pieces among them that have no label left" if unlabelled else "")
    )
