"""Masks: columns that say which tokens count, or of which kind they are. They are not read; here, labels say what counts, under
that name alone.

    input_ids          5 6 7 8
    completion_mask    0 0 1 1      leaves tokens out: without labels all would be learned, so it is refused
    attention_mask     1 1 1 1      leaves none out: harmless, and so is any other mask beside labels
    attention_mask     0 0 1 1      hides tokens from later ones, which labels do not say: refused beside labels too
    label_ids          -100 -100 7 8   labels by another name, which Trainer's own collator reads: refused without labels
    token_type_ids     0 0 1 1      kinds of tokens, whose embeddings models such as GPT-2 add: refused unless all are 0

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
Rows = Callable[[pa.Array, np.ndarray], np.ndarray]
HIDES = (
    f"column {ATTENTION_MASK!r} hides tokens from those that follow them, as padding on the left does: masks are not read, so "
    "these would be attended to. Valid: documents without padding, which may have any length, or with padding at their end"
)
MASKS = (ATTENTION_MASK, *PARTIAL)
OTHER_NAMES = ("label_ids", "label")
"""Columns that Trainer's default collator makes labels of, if they are lists: one number is the class of a whole text."""
KINDS = ("token_type_ids", "mm_token_type_ids", "task_type_ids")
"""Columns that say of which kind each token is, 0 where nothing else is known."""

VALID = "labels, -100 where nothing is learned, or tokens without padding (documents may have any length) and without this column"


def mask_reason(row: Mapping[str, Any]) -> str:
    """Return why the masks and kinds of a row cannot be left unread; "" if they can."""
    if (name := next((name for name in KINDS if _has_kinds(row.get(name))), None)) is not None:
        return _of_kinds(name)
    if row.get("labels") is not None:
        return HIDES if _hides(row.get(ATTENTION_MASK)) else ""
    renamed = (name for name in OTHER_NAMES if np.ndim(row.get(name, 0)))
    if (name := next(renamed, None)) is not None:
        return _renamed(name)
    return next((_reason(name) for name in MASKS if _leaves_out(row.get(name))), "")


def refuse_masks(dataset: datasets.Dataset, rows: np.ndarray) -> None:
    """Raises ValueError if a mask of a stored data set leaves tokens out, and there are no labels, or hides tokens from later
    ones, or if tokens are of several kinds.

    Args:
        rows: int64 [documents]: rows of its table.
    """
    for name in KINDS:
        if name in dataset.column_names:
            kinds = _rows_with(dataset.data.column(name), _has_kinds, _with_kinds)[rows]
            if kinds.any():
                raise ValueError(f"row {int(np.argmax(kinds))}: {_of_kinds(name)}")
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


def _of_kinds(name: str) -> str:
    return (
        f"column {name!r} says that tokens are of several kinds, and is not read. Valid: 0 for every token, or rows without it "
        "(Dataset.remove_columns), if the model needs none or is to learn without"
    )


def _has_kinds(column: Any) -> bool:
    """Return whether a column holds numbers other than 0."""
    values = None if column is None else _numbers(column)
    return values is not None and bool(values.any())


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


def _rows_with(column: pa.ChunkedArray, of_row: Callable[[Any], bool], in_values: Rows) -> np.ndarray:
    """bool [rows]: those of which `of_row` says yes.

    Args:
        in_values: the same for many rows: of all their values, and of the lengths of the rows.
    """
    chosen, kind = np.zeros(len(column), bool), column.type
    inner = kind.value_type if is_list(kind) else kind
    if pa.types.is_null(inner):
        return chosen
    if inner is kind or not (pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner)):
        return np.fromiter((of_row(values.as_py()) for values in column), bool, len(column))
    for first, lengths, values in parts(column):
        chosen[first + in_values(values, lengths)] = True
    return chosen


def _with_zeros(values: pa.Array, lengths: np.ndarray) -> np.ndarray:
    """int64: the rows with a 0."""
    return rows_at(np.flatnonzero(_zeros(values)), lengths)


def _with_zeros_first(values: pa.Array, lengths: np.ndarray) -> np.ndarray:
    """int64: the rows with a 0 before something else."""
    zero = _zeros(values)
    ends = np.flatnonzero(zero[:-1] & ~zero[1:])
    rows = rows_at(ends, lengths)
    return rows[rows == rows_at(ends + 1, lengths)]


def _with_kinds(values: pa.Array, lengths: np.ndarray) -> np.ndarray:
    """int64: the rows with anything but 0."""
    if pc.max(values).as_py() == 0 == pc.min(values).as_py():
        return np.zeros(0, np.int64)
    return rows_at(np.flatnonzero(values.to_numpy(zero_copy_only=False) != 0), lengths)


def _zeros(values: pa.Array) -> np.ndarray:
    """bool: where values are 0; none, if all are larger."""
    lowest = pc.min_max(values)["min"].as_py()
    if lowest is None or lowest > 0:
        return np.zeros(0, bool)
    return values.to_numpy(zero_copy_only=False) == 0
