"""Tables: batches of Arrow -> rows.

A table is turned into Python objects a few megabytes at a time. Lists of integers (tokens) become numpy arrays: a million
took 1 ms, as Python's integers 38 ms. Columns that `datasets` stores as JSON text become what they hold. A value that
Python cannot hold (a date in the year 300,000) refuses its row alone. Nothing is sent between ranks.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic_core import from_json

from hf_longctx.data.reading.rows import Place, Refused, Row

SLICE_BYTES, SLICE_ROWS = 8 << 20, 1024
"""Most bytes and rows that become Python objects at once, unless one row alone has more."""
UNREADABLE = (pa.ArrowException, OSError, ValueError, TypeError, KeyError, ArithmeticError, MemoryError)
"""Errors that reading a damaged table may raise."""


def column_twice(schema: pa.Schema) -> str:
    """Why a table cannot be read whose rows would lose a column; "" for others."""
    names = schema.names
    return "" if len(set(names)) == len(names) else f"names a column twice: {', '.join(map(repr, names))}"


def rows_of(batch: pa.RecordBatch, name: str, first: int) -> Iterator[Row | Refused]:
    """The rows of a batch that is valid; `first` is the number of its first row."""
    step = max(1, min(SLICE_ROWS, batch.num_rows * SLICE_BYTES // max(1, batch.nbytes)))
    for start in range(0, batch.num_rows, step):
        yield from _rows(batch.slice(start, step), name, first + start)


def _rows(batch: pa.RecordBatch, name: str, first: int) -> Iterator[Row | Refused]:
    try:
        columns = [_values(column) for column in batch.columns]
    except UNREADABLE as error:
        if batch.num_rows > 1:
            for row in range(batch.num_rows):
                yield from _rows(batch.slice(row, 1), name, first + row)
        else:
            yield Refused(Place(name, row=first), f"cannot be read: {error}")
        return
    names = batch.schema.names
    for row in range(batch.num_rows):
        yield Row(Place(name, row=first + row), {key: column[row] for key, column in zip(names, columns)})


def _values(column: pa.Array) -> list[Any]:
    """A column as Python values, one for each row."""
    if _is_list(column.type) and pa.types.is_integer(column.type.value_type):
        flat = column.flatten()
        if not flat.null_count:
            integers, missing = flat.to_numpy(), column.is_null().to_pylist()
            stops = np.cumsum(pc.list_value_length(column).fill_null(0).to_numpy()).tolist()
            return [None if none else integers[a:b] for none, a, b in zip(missing, [0, *stops], stops)]
    decode = _decoder(column.type)
    values = column.to_pylist()
    return values if decode is None else [decode(value) for value in values]


def _decoder(kind: pa.DataType) -> Callable[[Any], Any] | None:
    """Return what turns a Python value of this type into one in which JSON text is decoded; None where there is no such text."""
    if isinstance(kind, pa.JsonType):
        return lambda value: None if value is None else from_json(value)
    if pa.types.is_struct(kind):
        fields = {field.name: decode for field in kind if (decode := _decoder(field.type))}
        if fields:
            return lambda value: value and {k: fields[k](v) if k in fields else v for k, v in value.items()}
    if _is_list(kind) and (inner := _decoder(kind.value_type)):
        return lambda value: value and [inner(item) for item in value]
    return None


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)
