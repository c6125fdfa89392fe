"""CSV and TSV: the first line names the columns, every value is a string, and a row may span lines inside quotes.

A file is one unit, for where rows begin is known only after what precedes them. A row of another number of fields, of
bad quoting, or of bytes that are no UTF-8 is refused alone; blank lines are passed over. Memory is bounded by the longest
row. Nothing is sent between ranks.
"""

import csv
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from hf_longctx.data.reading.rows import Place, Refused, Row, SourceError
from hf_longctx.data.reading.unit import FileUnit, Unit, fingerprint_of, opened, opened_text, whole_file

LONGEST_FIELD = 1 << 28
"""Characters. Python's csv refuses fields above 131,072 unless told otherwise, and documents are longer."""

NO_NAMES = "without names of columns, no row of the file is read"


def separated_units(path: str, name: str, separator: str) -> list[Unit]:
    """A file of separated values, as one unit.

    Raises:
        SourceError: the file cannot be read, or `separator` is none.
    """
    try:
        csv.reader((), delimiter=separator)
    except (TypeError, ValueError) as error:
        raise SourceError(f"{name}: fields cannot be separated by {separator!r}: {error}") from error
    with opened(path, name) as file:
        return [Separated(name, os.fstat(file.fileno()).st_size, path, separator)]


@dataclass(frozen=True, eq=False)
class Separated(FileUnit):
    """A whole file of separated values."""

    separator: str
    """between fields, one character"""

    def rows(self) -> Iterator[Row | Refused]:
        columns: list[str] | None = None
        with opened_text(self.path, self.name) as text:
            for record in self._records(text):
                if isinstance(record, Refused):
                    yield record
                    if columns is None:
                        yield Refused(record.place, NO_NAMES, rows=None)
                        return
                    continue
                place, fields = record
                if columns is None:
                    if len(set(fields)) < len(fields):
                        yield Refused(place, f"names a column twice ({', '.join(fields)}): {NO_NAMES}", rows=None)
                        return
                    columns = fields
                elif len(fields) != len(columns):
                    yield Refused(place, f"has {len(fields)} fields, but the file names {len(columns)} columns")
                else:
                    yield Row(place, dict(zip(columns, fields)))

    def fingerprint(self) -> str:
        return fingerprint_of((type(self).__name__, self.separator, whole_file(self.path)))

    def _records(self, text: TextIO) -> Iterator[tuple[Place, list[str]] | Refused]:
        """The place and the fields of each record."""
        csv.field_size_limit(LONGEST_FIELD)
        records = csv.reader(text, delimiter=self.separator, strict=True)
        while True:
            place = Place(self.name, line=records.line_num + 1)
            try:
                fields = next(records, None)
                if fields is None:
                    return
                "".join(fields).encode()
            except csv.Error as error:
                # After an opening quote that is never closed, all that follows is one record.
                lines = "" if records.line_num == place.line else f" (up to line {records.line_num})"
                yield Refused(place, f"is not CSV: {error}{lines}", rows=None if lines else 1)
            except UnicodeEncodeError:
                yield Refused(place, "is not UTF-8")
            else:
                if fields:
                    yield place, fields
