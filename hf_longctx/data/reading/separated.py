"""CSV and TSV: the first line names the columns, every value is a string, and a row may span lines inside quotes.

A file is one unit, for where rows begin is known only after what precedes them. A row of another number of fields, of
bad quoting, or of bytes that are no UTF-8 is refused alone; blank lines are passed over. Memory is bounded by the longest
row. Nothing is sent between ranks.
"""

import csv
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from hf_longctx.data.reading.rows import Place, Refused, Row
from hf_longctx.data.reading.unit import FileUnit, Unit, fingerprint_of, opened

LONGEST_FIELD = 1 << 28
"""Characters. Python's csv refuses fields above 131,072 unless told otherwise, and documents are longer."""


def separated_units(path: str, name: str, separator: str) -> list[Unit]:
    """One unit.

    Raises:
        SourceError: the file cannot be read.
    """
    with opened(path, name) as file:
        return [Separated(name, os.fstat(file.fileno()).st_size, path, separator)]


@dataclass(frozen=True, eq=False)
class Separated(FileUnit):
    """A whole file of separated values."""

    separator: str
    """between fields, one character"""

    def rows(self) -> Iterator[Row | Refused]:
        columns: list[str] | None = None
        with opened(self.path, self.name) as file:
            for place, fields in self._records(file):
                if columns is None:
                    if isinstance(fields, list) and len(set(fields)) == len(fields):
                        columns = fields
                        continue
                    problem = fields if isinstance(fields, str) else f"names a column twice: {', '.join(fields)}"
                    yield Refused(place, f"{problem}; without names of columns no row of the file is read", rows=None)
                    return
                if isinstance(fields, str):
                    yield Refused(place, fields)
                elif len(fields) != len(columns):
                    yield Refused(place, f"has {len(fields)} fields, but the file names {len(columns)} columns")
                else:
                    yield Row(place, dict(zip(columns, fields)))

    def fingerprint(self) -> str:
        return fingerprint_of((type(self).__name__, self.separator), [(self.path, 0, self.bytes)])

    def _records(self, file: BinaryIO) -> Iterator[tuple[Place, list[str] | str]]:
        """The place of each record, and its fields, or why it has none."""
        csv.field_size_limit(LONGEST_FIELD)
        # Bytes that are no UTF-8 are kept, so that they spoil one row and not all that are read with it.
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="")
        records = csv.reader(text, delimiter=self.separator, strict=True)
        while True:
            place = Place(self.name, line=records.line_num + 1)
            try:
                fields = next(records, None)
                if fields is None:
                    return
                "".join(fields).encode()
            except csv.Error as error:
                last = f", up to line {records.line_num}" if records.line_num != place.line else ""
                yield place, f"is not CSV: {error}{last}"
            except UnicodeEncodeError:
                yield place, "is not UTF-8"
            else:
                if fields:
                    yield place, fields
