"""Columns of lists in Arrow tables, a few million values at a time: temporary arrays stay small whatever rows hold.

Nothing is sent between ranks.
"""

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

VALUES_AT_ONCE = 2**22
"""Values in a part: 32 MiB as int64. Rows are not cut, so a part may be longer by one row."""


def is_list(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds a list in each row."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def parts(column: pa.ChunkedArray) -> Iterator[tuple[int, np.ndarray, pa.Array]]:
    """Yield runs of rows of a column of lists: the first row, int64 [rows] lengths, and the values, one list after the
    other. A missing list has length 0."""
    first = 0
    for chunk in column.chunks:
        lengths = pc.list_value_length(chunk).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        cuts = np.flatnonzero(np.diff(np.cumsum(lengths) // VALUES_AT_ONCE)) + 1
        for start, stop in pairwise([0, *cuts.tolist(), len(chunk)]):
            yield first + start, lengths[start:stop], chunk.slice(start, stop - start).flatten()
        first += len(chunk)


def rows_at(values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64: the rows, counted from the first of a part, in which the values at these places stand.

    lengths 2 0 3, values 0 1 | | 2 3 4:   places 1, 2, 4 stand in rows 0, 2, 2
    """
    return np.searchsorted(np.cumsum(lengths), values, "right")
