"""Lengths of a data set's documents: all that the planner sees of it.

For `datasets` they come from the offsets of the Arrow columns: no token is turned into a Python object, so a data set
of millions of documents takes seconds. Any other indexable data set is walked document by document.

A label is predicted from the tokens before it, so the label at position 0 of a document predicts nothing. Labels:

    [-100, -100,   7,   2]     2 label tokens           [   5]     none: the only label stands at position 0
    no `labels` column, n tokens: n - 1 label tokens

Nothing is sent between ranks: every rank reads the same lengths.
"""

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hf_longctx.data.masks import KINDS, MASKS, OTHER_NAMES, mask_reason, refuse_masks
from hf_longctx.data.media import ONLY_TEXT, media_column, refuse_media
from hf_longctx.data.packed import packed_reason, refuse_packed

IGNORE_INDEX = -100
"""A label that is not learned, as in transformers and torch."""
SAMPLED = 32
"""Documents that are compared where a run is resumed."""
READ = ("labels", *MASKS, *OTHER_NAMES, *KINDS)
"""Columns that say which tokens are learned, and of which kind they are."""


@dataclass(frozen=True, eq=False)
class LengthIndex:
    """Length and number of label tokens of every document of a data set, in its order.

    Documents that teach nothing (no token, or no label token) are left out of `usable`, and one warning counts them.

    Raises:
        TypeError: the arrays do not hold integers.
        ValueError: the arrays disagree, there is no document, or no document has a label token.
    """

    lengths: np.ndarray
    """int64 [documents]: tokens of each document"""
    label_tokens: np.ndarray
    """int64 [documents]: labels of each document that are learned, at positions 1 to length - 1"""
    content: str = ""
    """what tells documents of the same lengths apart, where it is known"""
    usable: np.ndarray = field(init=False)
    """int64: indices of the documents to train on, ascending"""

    def __post_init__(self) -> None:
        for name in ("lengths", "label_tokens"):
            array = np.asarray(getattr(self, name))
            if array.size and not np.issubdtype(array.dtype, np.integer):
                raise TypeError(f"{name} must hold integers, got {array.dtype}")
            if array.ndim != 1:
                raise ValueError(f"{name} must have one entry per document, got an array of shape {array.shape}")
            object.__setattr__(self, name, array.astype(np.int64))
        if len(self.lengths) != len(self.label_tokens):
            raise ValueError(f"{len(self.lengths)} lengths, but {len(self.label_tokens)} counts of label tokens")
        if len(self.lengths) == 0:
            raise ValueError("the data set is empty: it needs at least one document with at least two tokens")
        limit = np.maximum(self.lengths - 1, 0)
        impossible = np.flatnonzero((self.lengths < 0) | (self.label_tokens < 0) | (self.label_tokens > limit))
        if impossible.size:
            doc = impossible[0]
            raise ValueError(
                f"document {doc}: {self.label_tokens[doc]} label tokens in {self.lengths[doc]} tokens; a document of n "
                "tokens has 0 to n - 1 label tokens (the first token is predicted from nothing)"
            )
        object.__setattr__(self, "usable", np.flatnonzero(self.label_tokens))
        dropped = len(self.lengths) - len(self.usable)
        empty = int(np.count_nonzero(self.lengths == 0))
        reason = f"{empty} without any token, {dropped - empty} without any label token"
        if not self.usable.size:
            raise ValueError(
                f"none of the {dropped} documents can be learned from: {reason}. A label token is a label at position "
                f"1 or later that is not {IGNORE_INDEX}; without a `labels` column, every token but the first is one."
            )
        if dropped:
            warnings.warn(f"{dropped} of {len(self.lengths)} documents are dropped: {reason}", stacklevel=3)

    def __len__(self) -> int:
        return len(self.lengths)

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits of the lengths and label counts of all documents, in order, and of their content where known."""
        digest = hashlib.blake2b(self.content.encode(), digest_size=8)
        for column in (self.lengths, self.label_tokens):
            digest.update(column.astype("<i8").tobytes())
        return digest.hexdigest()

    @classmethod
    def from_dataset(cls, dataset: Any, vocabulary: int | None = None) -> "LengthIndex":
        """Reads the lengths of `input_ids` and counts the label tokens of `labels`, where there are any.

        Args:
            dataset: a `datasets.Dataset`, or anything with `len()` and integer indexing that gives mappings: lists of
                dicts, torch data sets. Sequences may be lists, numpy arrays or torch tensors, [T].
            vocabulary: tokens of the model; documents that are read one by one must hold no others. What is stored is left to
                `refuse_tokens_outside`.

        Raises:
            TypeError: not an indexable data set, or columns that are not sequences of integers.
            ValueError: no column `input_ids`, labels of another length than the tokens, rows that are several documents
                (packed.py), hold images, sound or video (media.py), masks instead of labels (masks.py) or other tokens, and what
                LengthIndex refuses.
        """
        known = getattr(dataset, "index", None)
        # A prepared data set brings its own; a copy of it with other columns has another fingerprint.
        if isinstance(known, cls) and known.content == getattr(dataset, "_fingerprint", known.content):
            return known
        lengths, label_tokens = _from_arrow(dataset) if is_stored(dataset) else _from_documents(dataset, vocabulary)
        return cls(lengths, label_tokens)


def is_stored(dataset: Any) -> bool:
    """Return whether rows are what the Arrow table holds; a transform of the user's makes others, and must be left in
    place, as must a format that leaves out columns that are read."""
    if not isinstance(dataset, datasets.Dataset) or dataset.format["type"] == "custom":
        return False
    left_out = set(dataset.column_names).difference(dataset.format["columns"])
    return left_out.isdisjoint(READ)


def sample_of(dataset: Any) -> str | None:
    """Return a hash of the tokens and labels of SAMPLED documents, evenly spread over a data set, which tells documents of the
    same lengths apart; None where another reading may give others: rows that are made as they are read."""
    if not is_stored(dataset) and not isinstance(dataset, list | tuple):
        return None
    if isinstance(dataset, datasets.Dataset):
        dataset = dataset.with_format(None)
    hashed = hashlib.blake2b(digest_size=8)
    for document in np.unique(np.linspace(0, len(dataset) - 1, SAMPLED).astype(np.int64)).tolist():
        row = dataset[document]
        for name in ("input_ids", "labels"):
            if row.get(name) is not None:
                hashed.update(np.asarray(row[name]).astype(np.int64).tobytes())
    return hashed.hexdigest()


def count_label_tokens(dataset: Any, document: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """Label tokens of pieces of documents: labels that are learned, at positions start + 1 to stop - 1.

    The first token of a piece is predicted from nothing, as that of a document is.

    Args:
        dataset: one whose lengths a LengthIndex has read.
        document, start, stop: int64 [pieces]: tokens [start, stop) of a document. The pieces of a document stand
            together, or it is read more than once.

    Returns:
        int64 [pieces].
    """
    if is_stored(dataset):
        return _count_in_table(dataset, document, start, stop)
    counts = np.maximum(stop - start - 1, 0)
    read: tuple[int, Mapping[str, Any]] | None = None
    for piece, doc in enumerate(document.tolist()):
        if read is None or read[0] != doc:
            read = doc, dataset[doc]
        if "labels" in read[1]:
            labels = _integers(read[1], "labels", doc)[start[piece] + 1 : stop[piece]]
            counts[piece] = np.count_nonzero(labels != IGNORE_INDEX)
    return counts


def read_tokens(dataset: datasets.Dataset, name: str, document: int, start: int, stop: int) -> np.ndarray:
    """[stop - start] integers: values [start, stop) of a document's list in the Arrow column `name`. A view: nothing
    else of the document is read or copied."""
    row = document if dataset._indices is None else dataset._indices.column(0)[document].as_py()
    return dataset.data.column(name)[row].values[start:stop].to_numpy(zero_copy_only=False)


def _from_arrow(dataset: datasets.Dataset) -> tuple[np.ndarray, np.ndarray]:
    """int64 [documents] each: lengths and label tokens."""
    if not len(dataset):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    refuse_media(dataset)
    _require_input_ids(dataset.column_names, "the data set's columns are")
    rows = _table_rows(dataset, np.arange(len(dataset)))
    lengths = _list_lengths(dataset, "input_ids")[rows]
    refuse_packed(dataset, rows, lengths)
    refuse_masks(dataset, rows)
    if "labels" in dataset.column_names:
        _require_equal_lengths(lengths, _list_lengths(dataset, "labels")[rows])
    return lengths, _count_in_table(dataset, np.arange(len(dataset)), np.zeros_like(lengths), lengths)


def _table_rows(dataset: datasets.Dataset, document: np.ndarray) -> np.ndarray:
    """int64: rows of the table that hold these documents; `select` and `shuffle` leave the table as it is and keep a
    list of its rows."""
    if dataset._indices is None:
        return document
    return dataset._indices.column(0).to_numpy().astype(np.int64)[document]


def _count_in_table(dataset: datasets.Dataset, document: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """count_label_tokens, from the Arrow column."""
    if "labels" not in dataset.column_names:
        return np.maximum(stop - start - 1, 0)
    rows, counts = _table_rows(dataset, document), np.zeros(len(document), np.int64)
    order = np.argsort(rows, kind="stable")
    chunks = dataset.data.column("labels").chunks
    first = np.cumsum([0, *map(len, chunks)])
    bounds = np.searchsorted(rows[order], first)
    for chunk, row, begin, end in zip(chunks, first, bounds, bounds[1:]):
        pieces = order[begin:end]
        if pieces.size:
            counts[pieces] = _count_label_tokens(chunk, rows[pieces] - row, start[pieces], stop[pieces])
    return counts


def _list_lengths(dataset: datasets.Dataset, name: str) -> np.ndarray:
    """int64 [rows of the table]: length of each list of a column; a missing list has length 0."""
    column = dataset.data.column(name)
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    # An empty list alone has no type of value: null.
    if not any(kind(column.type) for kind in kinds) or not (
        pa.types.is_integer(column.type.value_type) or pa.types.is_null(column.type.value_type)
    ):
        raise TypeError(f"the column {name!r} must hold lists of integers, got {column.type}")
    return pc.list_value_length(column).fill_null(0).to_numpy().astype(np.int64)


def _count_label_tokens(labels: pa.Array, row: np.ndarray, start: np.ndarray, stop: np.ndarray) -> np.ndarray:
    """int64 [pieces]: labels of rows of a chunk that are learned, from differences of a running count.

    labels   9 -100 4 | -100 | 3 3
    learned  1    0 1 |    0 | 1 1
    count    0    1 1      2   2 3   4      before each token, and at the end
    whole documents start at 0, 3, 4 and stop at 3, 4, 6;   count[stop] - count[start + 1] = 2-1, 2-2, 4-3 = 1, 0, 1
    """
    learned = pc.not_equal(labels.flatten(), IGNORE_INDEX)
    if learned.null_count:
        raise TypeError(
            f"the column 'labels' holds {learned.null_count} missing values inside its lists: use {IGNORE_INDEX}"
        )
    count = np.concatenate([[0], np.cumsum(learned.to_numpy(zero_copy_only=False), dtype=np.int64)])
    ends = np.cumsum(pc.list_value_length(labels).fill_null(0).to_numpy(zero_copy_only=False), dtype=np.int64)
    first = np.concatenate([[0], ends])[row]
    return count[first + stop] - count[first + np.minimum(start + 1, stop)]


def _from_documents(dataset: Any, vocabulary: int | None) -> tuple[np.ndarray, np.ndarray]:
    """int64 [documents] each: lengths and label tokens."""
    if isinstance(dataset, Mapping):
        raise TypeError(
            f"expected one data set, got a mapping with the splits {', '.join(map(repr, dataset))}: pass one"
        )
    refuse_stream(dataset)
    lengths, label_lengths, label_tokens = np.zeros((3, len(dataset)), np.int64)
    for doc in range(len(dataset)):
        row = dataset[doc] if doc else _first_row(dataset)
        if not isinstance(row, Mapping):
            raise TypeError(f"document {doc} must be a mapping with the key 'input_ids', got {type(row).__name__}")
        if (media := media_column(row)) is not None:
            raise ValueError(f"document {doc} has {media!r}, and {ONLY_TEXT}")
        _require_input_ids(list(row), f"the keys of document {doc} are")
        lengths[doc] = label_lengths[doc] = len(_integers(row, "input_ids", doc))
        if reason := packed_reason(row, int(lengths[doc])) or mask_reason(row):
            raise ValueError(f"document {doc}: {reason}")
        label_tokens[doc] = max(lengths[doc] - 1, 0)
        if vocabulary is not None:
            _refuse_tokens_of(row, doc, vocabulary)
        if "labels" in row:
            labels = _integers(row, "labels", doc)
            label_lengths[doc], label_tokens[doc] = len(labels), np.count_nonzero(labels[1:] != IGNORE_INDEX)
    _require_equal_lengths(lengths, label_lengths)
    return lengths, label_tokens


def refuse_stream(dataset: Any) -> None:
    """Raise TypeError for a data set whose documents can only be read one after another."""
    streams = any(base.__name__ == "IterableDataset" for base in type(dataset).__mro__)  # of torch, and of datasets
    if streams or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"{type(dataset).__name__} has no len() or no indexing; lengths must be known before training, so "
            "streaming data sets must be turned into indexable ones first"
        )


def _first_row(dataset: Any) -> Any:
    """Read document 0, by which a table that is indexed by columns is known."""
    try:
        return dataset[0]
    except (KeyError, NotImplementedError) as error:
        raise TypeError(
            f"{type(dataset).__name__} has no document 0 ({type(error).__name__}: {error}): documents are read by their numbers. "
            "Valid: a list of mappings, a datasets.Dataset (Dataset.from_pandas makes one of a table), a torch data set"
        ) from error


def _integers(row: Mapping[str, Any], name: str, doc: int) -> np.ndarray:
    """[T] integers."""
    values = np.asarray(row[name])
    if isinstance(row[name], list) and bool in set(map(type, row[name])):
        values = np.asarray([True])  # numpy counts it as 1 where integers stand beside it
    if values.ndim != 1 or (values.size and not np.issubdtype(values.dtype, np.integer)):
        raise TypeError(
            f"{name} of document {doc} must be one sequence of integers, got {values.dtype} of shape {values.shape}"
        )
    return values


def _refuse_tokens_of(row: Mapping[str, Any], doc: int, vocabulary: int) -> None:
    """Raises ValueError for token ids and labels of a document that a model with this vocabulary cannot take."""
    for name in ("input_ids", "labels"):
        values = _integers(row, name, doc) if name in row else np.zeros(0, np.int64)
        outside = (values < 0) | (values >= vocabulary)
        if name == "labels":
            outside &= values != IGNORE_INDEX
        if outside.any():
            at = int(outside.argmax())
            raise ValueError(
                f"document {doc} holds {values[at]} at position {at} of {name!r}; the model's vocabulary has "
                f"{vocabulary} tokens, {_allowed(name, vocabulary)}"
            )


def _allowed(name: str, vocabulary: int) -> str:
    """Say which values a column may hold."""
    ignored = f", or {IGNORE_INDEX} where nothing is learned" if name == "labels" else ""
    valid = f"0 to {vocabulary - 1}{ignored}"
    return f"so they must lie in {valid}. Was another tokenizer used?"


def _require_input_ids(names: list[str], introduction: str) -> None:
    if "input_ids" not in names:
        raise ValueError(
            f"documents must be tokenised into 'input_ids'; {introduction} {', '.join(map(repr, names)) or 'none'}"
        )


def _require_equal_lengths(lengths: np.ndarray, label_lengths: np.ndarray) -> None:
    different = np.flatnonzero(lengths != label_lengths)
    if different.size:
        doc = different[0]
        raise ValueError(
            f"document {doc} has {lengths[doc]} tokens but {label_lengths[doc]} labels; every token needs a label "
            f"({IGNORE_INDEX} where nothing is learned). {different.size} of {len(lengths)} documents differ."
        )


def refuse_tokens_outside(dataset: Any, vocabulary: int) -> None:
    """Raises ValueError for token ids and labels that a model with this vocabulary cannot take, before training begins.

    Reads Arrow columns only: two passes at memory speed. Documents of other data sets are looked at where their lengths are
    read (`LengthIndex.from_dataset`).
    """
    if not is_stored(dataset):
        return
    if (manifest := getattr(dataset, "manifest", None)) is not None and manifest.largest_id < vocabulary:
        return  # a prepared data set knows without being read again
    for name in {"input_ids", "labels"} & set(dataset.column_names):
        column = dataset.data.column(name)
        try:
            _refuse_values_outside(name, column, vocabulary)
        except ValueError:
            if dataset._indices is None:
                raise
            # `select` leaves the table whole: only the rows that are left count.
            _refuse_values_outside(name, column.take(dataset._indices.column(0)), vocabulary)


def _refuse_values_outside(name: str, column: pa.ChunkedArray, vocabulary: int) -> None:
    for chunk in column.chunks:
        values = chunk.flatten()
        if values.null_count:
            raise ValueError(f"the column {name!r} holds {values.null_count} missing values inside its lists")
        if name == "labels":
            values = values.filter(pc.not_equal(values, IGNORE_INDEX))
        limits = pc.min_max(values).as_py()
        if len(values) and not 0 <= limits["min"] <= limits["max"] < vocabulary:
            raise ValueError(
                f"the column {name!r} holds values from {limits['min']} to {limits['max']}; the model's vocabulary has "
                f"{vocabulary} tokens, {_allowed(name, vocabulary)}"
            )
