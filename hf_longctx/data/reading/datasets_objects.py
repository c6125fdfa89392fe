"""Data sets given from Python: a `datasets.Dataset` becomes units of row ranges, a stream one unit.

A unit holds its rows of the data set: what is stored in files is pickled as their paths, what is in memory as these rows
alone. The fingerprint of a Dataset is the one that `datasets` keeps, and the range; a stream has none, so its rows are
read once for it. A stream can be sent to another process only if what generates it can be pickled. Nothing is sent
between ranks.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from datasets import Dataset

from hf_longctx.data.reading.rows import Place, Refused, Row, SourceError
from hf_longctx.data.reading.tables import rows_of
from hf_longctx.data.reading.unit import Unit, fingerprint_of


def dataset_units(dataset: Dataset, name: str, unit_bytes: int) -> list[Unit]:
    """Units of about `unit_bytes` bytes of Arrow, all of equally many rows."""
    count = len(dataset)
    row_bytes = max(1, dataset.data.nbytes // max(1, dataset.data.num_rows))
    step = max(1, unit_bytes // row_bytes)
    return [
        DatasetRows(name, (stop - start) * row_bytes, dataset.select(range(start, stop)), start, dataset._fingerprint)
        for start in range(0, count, step)
        for stop in (min(start + step, count),)
    ]


@dataclass(frozen=True, eq=False)
class DatasetRows(Unit):
    """Some rows of a data set."""

    dataset: Dataset
    """of these rows only"""
    start: int
    """which row of the whole data set the first one is, from 0"""
    whole: str
    """fingerprint of the whole data set"""

    def rows(self) -> Iterator[Row | Refused]:
        if self.dataset.format["type"] == "custom":  # made by `set_transform`: what it gives is what counts
            for number in range(len(self.dataset)):
                yield Row(Place(self.name, row=self.start + number + 1), self.dataset[number])
            return
        row = self.start + 1
        for batch in self.dataset.with_format("arrow")[:].to_batches():
            yield from rows_of(batch, self.name, row)
            row += batch.num_rows

    def fingerprint(self) -> str:
        return fingerprint_of((type(self).__name__, self.whole, self.start, len(self.dataset)))

    def __getstate__(self) -> dict[str, Any]:
        """A part of a table in memory is copied out of it: pickling the part would take the whole table along."""
        dataset = self.dataset
        if not dataset.cache_files and dataset.format["type"] != "custom":
            table = dataset.with_format("arrow")[:]
            dataset = Dataset(table.take(np.arange(table.num_rows)), fingerprint=self.whole)
        return self.__dict__ | {"dataset": dataset}


@dataclass(frozen=True, eq=False)
class Stream(Unit):
    """A data set that is only iterated over: a `datasets.IterableDataset`."""

    stream: Iterable[Mapping[str, Any]]

    def rows(self) -> Iterator[Row | Refused]:
        rows, row = iter(self.stream), 1
        while True:
            try:
                values = next(rows)
            except StopIteration:
                return
            except Exception as error:  # whatever the code that generates the rows may raise
                what = f"the stream ended with {type(error).__name__}: {error}"
                raise SourceError(f"{self.name}, row {row}: {what}") from error
            yield Row(Place(self.name, row=row), values)
            row += 1

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for row in self.rows():
            assert isinstance(row, Row)
            digest.update(json.dumps(row.values, default=_plain).encode())
        return fingerprint_of((type(self).__name__, digest.hexdigest()))


def _plain(value: Any) -> Any:
    """Returns what JSON can hold instead of a value: of arrays and tensors their numbers, of pictures their bytes, of
    anything else its description."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return value.tobytes().hex() if hasattr(value, "tobytes") else repr(value)
