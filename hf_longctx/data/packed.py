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

from collections.abc import Callable, Mapping
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

POSITIONS = ("position_ids",)
LENGTHS = ("seq_lengths", "seq_lens", "seqlens", "sequence_lengths", "document_lengths", "doc_lens", "doc_lengths")
BOUNDS = tuple(f"cu_{name}{of}" for name in ("seqlens", "seq_lens") for of in ("", "_q", "_k"))
NUMBERS = ("segment_ids", "document_ids", "doc_ids", "sequence_ids", "seq_idx", "decoder_segment_ids")
MASKS = ("attention_mask",)
COLUMNS = (*POSITIONS, *LENGTHS, *BOUNDS, *NUMBERS, *MASKS)

ROWS_AT_ONCE = 256
"""Rows of a table that are compared at once: temporary arrays stay small where rows are long, and calls few."""

SHOWN = 4
"""Places where a row is to be cut that a message names."""


def packed_reason(row: Mapping[str, Any], tokens: int) -> str:
    """Why a row of `tokens` tokens is not one document; "" if it is. Columns that hold something else than such a tool writes
    are left to who reads them."""
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
    if name in (*MASKS, *POSITIONS) and values.ndim > 1:
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
    """Tokens before which documents after the first begin; and what is wrong with a column that cannot say it."""
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
    numbers_documents = len(values) == tokens and (name not in MASKS or values.max() > 1)
    return (np.flatnonzero(np.diff(values)) + 1 if numbers_documents else none), ""


# Tables: rows that cannot be one document, many at a time


def _suspects(name: str, column: pa.ChunkedArray, tokens: np.ndarray) -> np.ndarray:
    """Rows of the table that have to be looked at; `tokens`: int64 [rows], those of each row's document."""
    kind = column.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        return np.zeros(0, np.int64)
    if not pa.types.is_integer(kind.value_type):
        return np.arange(len(column))
    differs, found, first = _differs(name), list[np.ndarray](), 0
    for chunk in column.chunks:
        for start in range(0, len(chunk), ROWS_AT_ONCE):
            part = chunk.slice(start, ROWS_AT_ONCE)
            lengths = pc.list_value_length(part).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
            values = part.flatten().to_numpy(zero_copy_only=False)
            row = np.repeat(np.arange(len(part)), lengths)
            begin = np.repeat(np.cumsum(lengths) - lengths, lengths)
            bad = np.zeros(len(part), bool)
            if len(values):
                bad[row[differs(values, begin)]] = True
            here = tokens[first + start : first + start + len(part)]
            bad |= (lengths > 0) & (lengths != here) & (name in POSITIONS)
            found.append(first + start + np.flatnonzero(bad))
        first += len(chunk)
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def _differs(name: str) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Which values are not those of a row that is one document; `begin`: where each value's row begins."""
    if name in POSITIONS:
        return lambda values, begin: values != np.arange(len(values)) - begin
    if name in MASKS:
        return lambda values, begin: values > 1
    if name in NUMBERS:
        return lambda values, begin: values != values[begin]
    return lambda values, begin: np.ones(len(values), bool)
