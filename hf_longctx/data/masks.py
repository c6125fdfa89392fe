"""Masks: columns that say which tokens count. They are not read; here, labels say it, under that name alone.

    input_ids          5 6 7 8
    completion_mask    0 0 1 1      leaves tokens out: without labels all would be learned, so it is refused
    attention_mask     1 1 1 1      leaves none out: harmless, and so is any other mask beside labels
    attention_mask     0 0 1 1      hides tokens from later ones, which labels do not say: refused beside labels too
    label_ids          -100 -100 7 8   labels by another name, which Trainer's own collator reads: refused without labels

Rows and columns of stored data sets have the same rule. A configuration is checked by the names of columns alone, before
anything is read: a mask that is made to leave tokens out is refused there; an attention mask, which tokenizers add to
everything, waits until its values are seen. Nothing is sent between ranks.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hf_longctx.data.list_columns import is_list, parts, rows_at

ATTENTION_MASK = "attention_mask"
PARTIAL = ("assistant_masks", "completion_mask", "loss_mask", "response_mask")
"""Masks that are made to leave tokens out."""
Rows = Callable[[np.ndarray, np.ndarray], np.ndarray]
HIDES = (
    f"column {ATTENTION_MASK!r} hides tokens from those that follow them, as padding on the left does: masks are not read, so "
    "these would be attended to. Valid: documents without padding, which may have any length, or with padding at their end"
)
MASKS = (ATTENTION_MASK, *PARTIAL)
OTHER_NAMES = ("label_ids", "label")
"""Columns that Trainer's default collator makes labels of, if they are lists: one number is the class of a whole text."""

VALID = "labels, -100 where nothing is learned, or tokens without padding (documents may have any length) and without this column"


def mask_reason(row: Mapping[str, Any]) -> str:
    """Return why the masks of a row cannot be left unread; "" if they can."""
    if row.get("labels") is not None:
        return HIDES if _hides(row.get(ATTENTION_MASK)) else ""
    renamed = (name for name in OTHER_NAMES if np.ndim(row.get(name, 0)))
    if (name := next(renamed, None)) is not None:
        return _renamed(name)
    return next((_reason(name) for name in MASKS if _leaves_out(row.get(name))), "")


def refuse_masks(dataset: datasets.Dataset, rows: np.ndarray) -> None:
    """Raises ValueError if a mask of a stored data set leaves tokens out, and there are no labels, or hides tokens from later
    ones.

    Args:
        rows: int64 [documents]: rows of its table.
    """
    if "labels" in dataset.column_names:
        if ATTENTION_MASK in dataset.column_names:
            hides = _rows_with(dataset.data.column(ATTENTION_MASK), _hides, _with_zeros_first)[rows]
            if hides.any():
                raise ValueError(f"row {int(np.argmax(hides))}: {HIDES}")
        return
    for name in OTHER_NAMES:
        if name in dataset.column_names and is_list(dataset.data.column(name).type):
            raise ValueError(_renamed(name))
    for name in MASKS:
        if name in dataset.column_names:
            leaves_out = _rows_with(dataset.data.column(name), _leaves_out, _with_zeros)[rows]
            if leaves_out.any():
                raise ValueError(f"row {int(np.argmax(leaves_out))}: {_reason(name)}")


def refuse_partial_masks(columns: Iterable[str]) -> None:
    """Raises ValueError if, by their names alone, columns leave tokens out and none holds labels."""
    names = set(columns)
    if "labels" not in names and (masks := [name for name in PARTIAL if name in names]):
        raise ValueError(_reason(masks[0]))


def _renamed(name: str) -> str:
    return f"column {name!r} holds labels, which are read from a column 'labels' alone. Valid: rename it, or remove it"


def _reason(name: str) -> str:
    return f"column {name!r} leaves tokens out, and there is no column 'labels': masks are not read. Valid: {VALID}"


def _leaves_out(mask: Any) -> bool:
    """Return whether a mask holds anything but numbers other than 0; numbers above 1 are looked at by packed.py."""
    if mask is None:
        return False
    values = _numbers(mask)
    return values is None or not values.all()


def _hides(mask: Any) -> bool:
    """Return whether a mask has a 0 before something else, or is no row of numbers."""
    if mask is None:
        return False
    values = _numbers(mask)
    if values is None or max(values.shape, default=1) < values.size:
        return True
    zero = values.reshape(-1) == 0
    return bool((zero[:-1] & ~zero[1:]).any())


def _numbers(mask: Any) -> np.ndarray | None:
    """A mask as an array; None if it holds anything but numbers."""
    try:
        values = np.asarray(mask)
    except (ValueError, TypeError, OverflowError):  # lists of different lengths, for one
        return None
    return values if values.dtype.kind in "biuf" else None


def _rows_with(column: pa.ChunkedArray, of_row: Callable[[Any], bool], in_zeros: Rows) -> np.ndarray:
    """bool [rows]: those whose mask `of_row` says yes of.

    Args:
        in_zeros: the same for many rows: of which values are 0, and of the lengths of the rows.
    """
    chosen, kind = np.zeros(len(column), bool), column.type
    inner = kind.value_type if is_list(kind) else kind
    if pa.types.is_null(inner):
        return chosen
    if inner is kind or not (pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner)):
        return np.fromiter((of_row(mask.as_py()) for mask in column), bool, len(column))
    for first, lengths, values in parts(column):
        lowest = pc.min_max(values)["min"].as_py()
        if lowest is not None and lowest <= 0:
            chosen[first + in_zeros(values.to_numpy(zero_copy_only=False) == 0, lengths)] = True
    return chosen


def _with_zeros(zero: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64: the rows with a 0."""
    return rows_at(np.flatnonzero(zero), lengths)


def _with_zeros_first(zero: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64: the rows with a 0 before something else."""
    ends = np.flatnonzero(zero[:-1] & ~zero[1:])
    rows = rows_at(ends, lengths)
    return rows[rows == rows_at(ends + 1, lengths)]
