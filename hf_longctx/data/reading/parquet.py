"""Parquet: units of row groups, read batch by batch, so memory is bounded by batches and not by row groups.

Every batch is validated in full before anything of it is used, for a damaged file can decode to offsets that point
anywhere; page checksums are verified where the writer left any. Where a row group can be read no further, one refusal
counts the rows that are left of it, and reading goes on with the next. Nothing is sent between ranks.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow.parquet as pq

from hf_longctx.data.reading.rows import Place, Refused, Row
from hf_longctx.data.reading.tables import SLICE_BYTES, SLICE_ROWS, UNREADABLE, column_twice, rows_of
from hf_longctx.data.reading.unit import FileUnit, Unit, UnreadableFile, fingerprint_of, opened, whole_file


@dataclass(frozen=True)
class RowGroup:
    """A row group as the file's metadata describe it."""

    number: int
    rows: int
    bytes: int
    """before compression"""


def parquet_units(path: str, name: str, unit_bytes: int) -> list[Unit]:
    """Units of row groups, of about `unit_bytes` bytes before compression.

    Raises:
        SourceError: the file cannot be read.
    """
    with opened(path, name) as file:
        size = os.fstat(file.fileno()).st_size
    try:
        with _open(path) as table:
            metadata, schema = table.metadata, table.schema_arrow
        # What a damaged file says of its column chunks must not be asked for: pyarrow ends the process (seen with 26.0).
        described = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        groups = [
            RowGroup(number, row_group.num_rows, row_group.total_byte_size)
            for number, row_group in enumerate(described)
        ]
        problem = column_twice(schema)
        if (rows := sum(group.rows for group in groups)) != metadata.num_rows:
            problem = f"is damaged: it counts {metadata.num_rows} rows, but its row groups have {rows}"
    except UNREADABLE as error:
        problem = f"is not Parquet, or is damaged: {error}"
    if problem:
        return [UnreadableFile(name, size, path, problem)]
    units: list[Unit] = []
    waiting: list[RowGroup] = []
    row = 1
    for group in groups:
        waiting.append(group)
        if sum(row_group.bytes for row_group in waiting) >= unit_bytes or group is groups[-1]:
            units.append(ParquetRows(name, sum(row_group.bytes for row_group in waiting), path, tuple(waiting), row))
            row += sum(row_group.rows for row_group in waiting)
            waiting = []
    return units


@dataclass(frozen=True, eq=False)
class ParquetRows(FileUnit):
    """Some row groups of a file."""

    groups: tuple[RowGroup, ...]
    first_row: int
    """number of the first group's first row"""

    def rows(self) -> Iterator[Row | Refused]:
        row = self.first_row
        try:
            table = _open(self.path)
        except UNREADABLE as error:
            lost = sum(group.rows for group in self.groups)
            yield Refused(Place(self.name, row=row), f"{lost} rows cannot be read: {error}", rows=lost)
            return
        with table:
            for group in self.groups:
                end, problem = row + group.rows, "they are missing"
                batch_rows = max(1, min(SLICE_ROWS, SLICE_BYTES * group.rows // max(1, group.bytes)))
                try:
                    for batch in table.iter_batches(batch_rows, [group.number], use_threads=False):
                        batch.validate(full=True)
                        yield from rows_of(batch, self.name, row)
                        row += batch.num_rows
                except UNREADABLE as error:
                    problem = str(error)
                if row < end:
                    reason = f"{end - row} rows of row group {group.number} cannot be read: {problem}"
                    yield Refused(Place(self.name, row=row), reason, rows=end - row)
                row = end

    def fingerprint(self) -> str:
        numbers = [group.number for group in self.groups]
        return fingerprint_of((type(self).__name__, numbers, whole_file(self.path)))


def _open(path: str) -> pq.ParquetFile:
    # Mapped into memory, a column chunk is no copy. With a buffer instead, a damaged page that claims to have 2 GB would
    # be given 2 GB before anything of it is read (seen with 26.0).
    return pq.ParquetFile(path, memory_map=True, pre_buffer=False, page_checksum_verification=True)
