"""Arrow files, of the file format or the stream format, as `datasets` saves them: units of record batches.

A file is walked once, which finds where each record batch lies; it is mapped into memory, so data are not read for that
(but compressed ones are). Its end must be marked, so that a file cut off between two batches is noticed. Every batch is
validated in full before anything of it is used, as Arrow demands of files that are not trusted (offsets may point
anywhere); an invalid batch is refused, with the number of its rows. Nothing is sent between ranks.

    file format   ARROW1 0 0 | schema | batch | batch | end | footer: where batches lie | its length | ARROW1
    stream        schema | batch | batch | end
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from hf_longctx.data.reading.rows import Place, Refused, Row
from hf_longctx.data.reading.tables import UNREADABLE, column_twice, rows_of
from hf_longctx.data.reading.unit import FileUnit, Unit, UnreadableFile, fingerprint_of, opened

MAGIC = b"ARROW1\0\0"
"""With what the file format begins; the rest up to its footer is a stream."""
ENDS = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")
"""Marks of a stream's end, the second one of Arrow before 0.15."""


@dataclass(frozen=True)
class BatchSpan:
    """A record batch in its file."""

    rows: int
    start: int
    stop: int
    """[start, stop): its bytes in the file, with those of dictionaries that come before it"""


def arrow_units(path: str, name: str, unit_bytes: int) -> list[Unit]:
    """Units of record batches, of about `unit_bytes` bytes; one unit where batches share dictionaries.

    Raises:
        SourceError: the file cannot be read.
    """
    with opened(path, name) as file:
        size = os.fstat(file.fileno()).st_size
    try:
        schema, spans = _walk(path)
        problem = column_twice(schema)
    except UNREADABLE as error:
        problem = f"is not an Arrow file, or is damaged: {error}"
    if problem:
        return [UnreadableFile(name, size, path, problem)]
    shared = any("dictionary<" in str(kind) for kind in schema.types)
    units: list[Unit] = []
    waiting: list[BatchSpan] = []
    row = 1
    for span in spans:
        waiting.append(span)
        waiting_bytes = span.stop - waiting[0].start
        if span is spans[-1] or (waiting_bytes >= unit_bytes and not shared):
            units.append(ArrowRows(name, waiting_bytes, path, tuple(waiting), row, str(schema), shared))
            row += sum(batch.rows for batch in waiting)
            waiting = []
    return units


@dataclass(frozen=True, eq=False)
class ArrowRows(FileUnit):
    """Some record batches of a file."""

    spans: tuple[BatchSpan, ...]
    first_row: int
    """number of the first batch's first row"""
    schema: str
    """names and types of the columns"""
    shared: bool
    """whether batches need dictionaries that precede them: then these are all the batches of the file"""

    def rows(self) -> Iterator[Row | Refused]:
        row = self.first_row
        end = row + sum(span.rows for span in self.spans)
        problem = "they are missing"
        try:
            with pa.memory_map(self.path) as source:
                for batch in self._batches(source):
                    try:
                        batch.validate(full=True)
                    except UNREADABLE as error:
                        reason = f"{batch.num_rows} rows of a record batch are invalid: {error}"
                        yield Refused(Place(self.name, row=row), reason, rows=batch.num_rows)
                    else:
                        yield from rows_of(batch, self.name, row)
                    row += batch.num_rows
        except UNREADABLE as error:
            problem = str(error)
        if row < end:
            yield Refused(Place(self.name, row=row), f"{end - row} rows cannot be read: {problem}", rows=end - row)

    def fingerprint(self) -> str:
        first, last = self.spans[0].start, self.spans[-1].stop
        return fingerprint_of((type(self).__name__, self.schema, self.first_row), [(self.path, first, last)])

    def _batches(self, source: pa.MemoryMappedFile) -> Iterator[pa.RecordBatch]:
        reader = _stream(source)
        if self.shared:
            yield from reader
            return
        for span in self.spans:
            source.seek(span.start)
            yield pa.ipc.read_record_batch(pa.ipc.read_message(source), reader.schema)


def _stream(source: pa.MemoryMappedFile) -> pa.RecordBatchStreamReader:
    """A reader of the stream that a file is, or holds; reading begins at its first batch."""
    if source.read(len(MAGIC)) != MAGIC:
        source.seek(0)
    return pa.ipc.open_stream(source)


def _walk(path: str) -> tuple[pa.Schema, list[BatchSpan]]:
    """The schema, and where batches lie. Raises one of UNREADABLE where the file is no whole Arrow file."""
    with pa.memory_map(path) as source:
        reader = _stream(source)
        start, spans = source.tell(), []
        for batch in reader:
            spans.append(BatchSpan(batch.num_rows, start, source.tell()))
            start = source.tell()
        stop = source.tell()
        source.seek(0)
        is_file = source.read(len(MAGIC)) == MAGIC
        source.seek(start)
        if source.read(stop - start) not in ENDS:
            raise ValueError(f"it ends after {len(spans)} record batches without the mark of an end")
        if is_file and (count := pa.ipc.open_file(source).num_record_batches) != len(spans):
            raise ValueError(f"its footer counts {count} record batches, but there are {len(spans)}")
        if not is_file and stop != source.size():
            raise ValueError(f"{source.size() - stop} bytes follow its end")
        return reader.schema, spans
