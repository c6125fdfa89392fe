"""Rows that another tool packed: several documents in one row, found by the columns that say so, and refused.

    input_ids        5 6 7 8 9 4
    position_ids     0 1 2 0 1 2     positions begin anew (flattening collators)
    seq_lengths      3 3             lengths of the documents (TRL)
    cu_seqlens       0 3 6           their bounds (kernels that pack)
    segment_ids      1 1 1 2 2 2     their numbers; so do document_ids, seq_idx
    attention_mask   1 1 1 2 2 2     the same (LLaMA-Factory, axolotl)

Here a row is one document: tokens of a packed one would see other documents, and first tokens be predicted from them. A
row is not cut, because documents are counted, ordered and resumed by their rows. Nothing is sent between ranks.
"""

from collections.abc import Mapping
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hf_longctx.data.list_columns import is_list, parts, rows_at
from hf_longctx.data.masks import ATTENTION_MASK

POSITIONS = ("position_ids",)
LENGTHS = ("seq_lengths", "seq_lens", "seqlens", "sequence_lengths", "document_lengths", "doc_lens", "doc_lengths")
BOUNDS = tuple(f"cu_{name}{of}" for name in ("seqlens", "seq_lens") for of in ("", "_q", "_k"))
NUMBERS = ("segment_ids", "document_ids", "doc_ids", "sequence_ids", "seq_idx", "decoder_segment_ids")
COLUMNS = (*POSITIONS, *LENGTHS, *BOUNDS, *NUMBERS, ATTENTION_MASK)

SHOWN = 4
"""Places at which a row is to be cut, as many as a message names."""


def packed_reason(row: Mapping[str, Any], tokens: int) -> str:
    """Return why a row of `tokens` tokens is not one document; "" if it is. Columns that do not hold integers are no such
    tool's, and say nothing about it."""
    for name in COLUMNS:
        if row.get(name) is not None and (reason := _reason(name, row[name], tokens)):
            return reason
    return ""


def refuse_packed(dataset: datasets.Dataset, rows: np.ndarray, lengths: np.ndarray) -> None:
    """Raises ValueError if a row of a stored data set is not one document.

    Args:
        dataset: with a column `input_ids`.
        rows: int64 [documents]: rows of its table.
        lengths: int64 [documents]: tokens of each.
    """
    for name in {*COLUMNS} & set(dataset.column_names):
        column = dataset.data.column(name)
        tokens = np.zeros(len(column), np.int64)
        tokens[rows] = lengths
        suspect = np.zeros(len(column), bool)
        suspect[_suspects(name, column, tokens)] = True
        for document in np.flatnonzero(suspect[rows]):
            values = column[int(rows[document])].as_py()
            if values is not None and (reason := _reason(name, values, int(lengths[document]))):
                raise ValueError(f"row {document}: {reason}")


def _reason(name: str, given: Any, tokens: int) -> str:
    try:
        values = np.asarray(given)
    except (ValueError, TypeError, OverflowError):  # lists of different lengths, for one
        return ""
    if not values.size or not np.issubdtype(values.dtype, np.integer):
        return ""
    if values.ndim > 1:
        of_each = values.reshape(-1, values.shape[-1])  # of a batch of one, or for each axis
        values = of_each[0] if (of_each == of_each[0]).all() else values
    if name in (ATTENTION_MASK, *POSITIONS) and values.ndim > 1:
        return (
            f"column {name!r} has the shape {list(values.shape)}, and is not read. Valid: one document in each row, whose "
            "tokens see all tokens before them, at positions 0, 1, 2 ..."
        )
    if values.ndim != 1:
        return ""
    cuts, wrong = _cuts(name, values.astype(np.int64), tokens)
    if wrong:
        return f"column {name!r} holds {wrong}, and is not read. Valid: none, or what says that the row is one document"
    if not len(cuts):
        return ""
    shown = ", ".join(map(str, cuts[:SHOWN])) + (", ..." if len(cuts) > SHOWN else "")
    return (
        f"column {name!r} says that its {tokens} tokens are {len(cuts) + 1} documents, packed into one row, which would be "
        f"trained on as one. Valid: a row for each document: cut input_ids and labels before token {shown} and leave "
        f"{name!r} out (docs/data.md, 'Rows that are packed already')"
    )


def _cuts(name: str, values: np.ndarray, tokens: int) -> tuple[np.ndarray, str]:
    """Return the tokens before which documents after the first begin, and what is wrong with a column that cannot say it."""
    none = np.zeros(0, np.int64)
    if name in LENGTHS:
        if values.sum() != tokens or values.min() < 0:
            return none, f"lengths that add up to {values.sum()}, of {tokens} tokens"
        return np.unique(np.cumsum(values[values > 0])[:-1]), ""
    if name in BOUNDS:
        if values[0] != 0 or values[-1] != tokens or (np.diff(values) < 0).any():
            return none, f"bounds from {values[0]} to {values[-1]}, of {tokens} tokens"
        inner = np.unique(values)
        return inner[(inner > 0) & (inner < tokens)], ""
    if name in POSITIONS:
        if len(values) != tokens:
            return none, f"{len(values)} positions, of {tokens} tokens"
        cuts = np.flatnonzero(np.diff(values) != 1) + 1
        begins = np.concatenate([[0], cuts])
        if values[begins].any():
            where = int(begins[np.argmax(values[begins] != 0)])
            return none, f"the position {values[where]} at token {where}, other positions than 0, 1, 2 ..."
        return cuts, ""
    numbers_documents = len(values) == tokens and (name != ATTENTION_MASK or values.max() > 1)
    return (np.flatnonzero(np.diff(values)) + 1 if numbers_documents else none), ""


# Tables: rows that may be several documents, many at a time


def _suspects(name: str, column: pa.ChunkedArray, tokens: np.ndarray) -> np.ndarray:
    """Return the rows of a table that have to be looked at one by one; `tokens`: int64 [rows], those of each row's
    document."""
    kind = column.type
    if is_list(kind) and is_list(kind.value_type):
        return np.arange(len(column))
    if not (is_list(kind) and pa.types.is_integer(kind.value_type)):
        return np.zeros(0, np.int64)
    suspects = [
        first + np.flatnonzero(_differs(name, lengths, values, tokens[first : first + len(lengths)]))
        for first, lengths, values in parts(column)
    ]
    return np.concatenate(suspects) if suspects else np.zeros(0, np.int64)


def _differs(name: str, lengths: np.ndarray, given: pa.Array, tokens: np.ndarray) -> np.ndarray:
    """bool [rows]: whether a row of a part (list_columns.py) holds anything but what one document has."""
    rows = np.zeros(len(lengths), bool)
    if name == ATTENTION_MASK and (pc.max(given).as_py() or 0) <= 1:
        return rows
    values, begins = given.to_numpy(zero_copy_only=False), np.cumsum(lengths) - lengths
    if name in (*LENGTHS, *BOUNDS):
        whole = [tokens] if name in LENGTHS else [0 * tokens, tokens]  # what a row says that is one document
        alike = lengths == len(whole)
        for place, expected in enumerate(whole):
            alike[alike] = values[begins[alike] + place] == expected[alike]
        return (lengths > 0) & ~alike
    if name == ATTENTION_MASK:
        differs = values > 1
    else:
        begin = np.repeat(begins, lengths)
        differs = values != (np.arange(len(values)) - begin if name in POSITIONS else values[begin])
    rows[rows_at(np.flatnonzero(differs), lengths)] = True
    return rows | ((lengths > 0) & (lengths != tokens)) if name in POSITIONS else rows
