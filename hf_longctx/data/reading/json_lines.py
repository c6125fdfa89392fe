"""JSON lines: a file is cut at line ends into runs of lines that are read apart; a malformed line is refused alone.

Lines end at \\n, so a \\r before it is white space; blank lines are passed over, and a byte order mark before the first
line. A file of more than one unit is read once in advance, which counts its lines: a unit knows the number of its
first. Memory stays bounded by a unit's bytes and by the longest line that is read. Nothing is sent between ranks.

    unit_bytes 10    {"a": 1}\\n{"a": 2}\\n{"a": 3}\\n      units [0, 18) from line 1, [18, 27) from line 3
"""

import codecs
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from pydantic_core import from_json

from hf_longctx.data.reading.rows import Place, Refused, Row
from hf_longctx.data.reading.unit import BLOCK, LONGEST_ROW, FileUnit, Unit, changed, fingerprint_of, opened

WHITE_SPACE = b" \t\r\n"
"""White space of JSON; bytes.isspace knows more."""
KINDS = {type(None): "null", bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list"}
"""JSON's names of the values that are no objects."""


def json_line_units(path: str, name: str, unit_bytes: int) -> list[Unit]:
    """Units of about `unit_bytes` bytes, each of whole lines.

    Raises:
        SourceError: the file cannot be read.
    """
    with opened(path, name) as file:
        size = os.fstat(file.fileno()).st_size
        cuts = [(0, 1)] if size <= unit_bytes else list(_cuts(file, unit_bytes))
    stops = [start for start, _ in cuts[1:]] + [size]
    return [JsonLines(name, stop - start, path, start, stop, line) for (start, line), stop in zip(cuts, stops)]


@dataclass(frozen=True, eq=False)
class JsonLines(FileUnit):
    """Bytes [start, stop) of a file, which are whole lines."""

    start: int
    stop: int
    first_line: int
    """number of the line that begins at `start`"""

    def rows(self) -> Iterator[Row | Refused]:
        with opened(self.path, self.name) as file:
            file.seek(self.start)
            position, number = self.start, self.first_line
            while position < self.stop:
                line = file.readline(min(LONGEST_ROW, self.stop - position))
                if not line:
                    raise changed(self.name, self.stop)
                position += len(line)
                place = Place(self.name, line=number)
                number += 1
                if len(line) == LONGEST_ROW and not line.endswith(b"\n"):
                    position += _finish_line(file)[0]
                    yield Refused(place, f"has {LONGEST_ROW} bytes or more, but a line may have fewer only")
                    continue
                if place.line == 1:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if text := line.strip(WHITE_SPACE):
                    values = read_object(text)
                    yield Refused(place, values) if isinstance(values, str) else Row(place, values)

    def fingerprint(self) -> str:
        return fingerprint_of((type(self).__name__, self.first_line), [(self.path, self.start, self.stop)])


def read_object(text: bytes) -> dict[str, Any] | str:
    """The object that UTF-8 encoded JSON holds; or, as a string, why it is none. A key given twice has its last value."""
    try:
        value = from_json(text, cache_strings="keys")
    except ValueError as error:
        return f"is not JSON: {re.sub(' at line 1 column ', ' at column ', str(error))}"
    if isinstance(value, dict):
        return value
    shown = repr(value)[:40]
    return f"holds {KINDS[type(value)]} ({shown}), but a row is an object: column names and their values"


def begins_with_object(path: str, name: str) -> bool:
    """Whether the first line that is not blank is one whole object, and not an empty one: then the file is lines, whatever
    its ending says."""
    with opened(path, name) as file:
        while line := file.readline(LONGEST_ROW):
            if text := line.removeprefix(codecs.BOM_UTF8).strip(WHITE_SPACE):
                values = read_object(text)
                return isinstance(values, dict) and bool(values)
    return True


def _cuts(file: BinaryIO, unit_bytes: int) -> Iterator[tuple[int, int]]:
    """(first byte, number of the first line) of each unit."""
    buffer = bytearray(unit_bytes)
    position, number = 0, 1
    while count := file.readinto(buffer):  # type: ignore[attr-defined]
        yield position, number
        rest, ends = _finish_line(file)
        position += count + rest
        number += buffer.count(b"\n", 0, count) + ends


def _finish_line(file: BinaryIO) -> tuple[int, int]:
    """Reads to the end of the line: how many bytes there were, and how many line ends (0 at the end of the file)."""
    count = 0
    while part := file.readline(BLOCK):
        count += len(part)
        if part.endswith(b"\n"):
            return count, 1
    return count, 0
