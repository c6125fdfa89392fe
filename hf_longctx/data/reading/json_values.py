"""JSON that is no lines: a list of objects, or objects one after another, over as many lines as they like.

The text is read piece by piece and cut into values, so memory is bounded by the longest value, not by the file. A value
that is JSON but no row is refused alone; where the text is no JSON, no later row can be found, and one refusal stands
for the rest of the file. Nothing is sent between ranks.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from hf_longctx.data.reading.json_lines import begins_with_object, json_line_units, read_object
from hf_longctx.data.reading.rows import Place, Refused, Row
from hf_longctx.data.reading.unit import BLOCK, FileUnit, Unit, fingerprint_of, opened_text, whole_file

WHITE_SPACE = re.compile(r"[ \t\r\n]*")
SCANNER = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=str)
"""Finds where a value ends; what it makes of numbers is not used."""
LONGEST_TOKEN = 16
"""An error so close to the end of what has been read may only say that the text goes on: a literal or an escape has been
cut in two."""


def json_units(path: str, name: str, unit_bytes: int) -> list[Unit]:
    """Units of lines where the file's first line is an object, as many tools write it; else one unit.

    Raises:
        SourceError: the file cannot be read.
    """
    if begins_with_object(path, name):
        return json_line_units(path, name, unit_bytes)
    size = os.path.getsize(path)
    return [JsonValues(name, size, path)]


@dataclass(frozen=True, eq=False)
class JsonValues(FileUnit):
    """A whole file of JSON values."""

    def rows(self) -> Iterator[Row | Refused]:
        row = 1
        with opened_text(self.path, self.name) as file:
            text = _Text(file)
            try:
                for value, line in text.values():
                    place = Place(self.name, line, row)
                    values = read_object(value.encode("utf-8", "surrogateescape"))
                    yield Refused(place, values) if isinstance(values, str) else Row(place, values)
                    row += 1
            except _NotJson as error:
                place = Place(self.name, text.line, row)
                yield Refused(place, f"is not JSON: {error}; from here on, the file is not read", rows=None)

    def fingerprint(self) -> str:
        return fingerprint_of((type(self).__name__, whole_file(self.path)))


class _NotJson(ValueError):
    pass


class _Text:
    """A text that is read as far as it is looked at."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._read = ""
        self._position = 0
        self.line = 1
        """in which the position lies"""

    def values(self) -> Iterator[tuple[str, int]]:
        """Each value's text, and the line in which it begins. Raises _NotJson."""
        if self._next() != "[":
            while self._next():
                yield self._value()
            return
        self._move(self._position + 1)
        while self._next() != "]":
            yield self._value()
            if self._next() not in (",", "]"):
                raise _NotJson(f"expected `,` or `]` after a list's value, found {self._found()}")
            if self._next() == ",":
                self._move(self._position + 1)
                if self._next() == "]":
                    raise _NotJson("expected a value after `,`, found `]`")
        self._move(self._position + 1)
        if self._next():
            raise _NotJson(f"the list has ended, but {self._found()} follows")

    def _value(self) -> tuple[str, int]:
        while True:
            try:
                _, end = SCANNER.raw_decode(self._read, self._position)
            except RecursionError:
                raise _NotJson("values are nested too deep") from None
            except json.JSONDecodeError as error:
                cut = error.pos >= len(self._read) - LONGEST_TOKEN or error.msg.startswith("Unterminated string")
                if cut and self._more():
                    continue
                line = self.line + self._read.count("\n", self._position, error.pos)
                raise _NotJson(f"{error.msg} in line {line}") from None
            if end == len(self._read) and self._more():  # a number may go on
                continue
            value = self._read[self._position : end], self.line
            self._move(end)
            return value

    def _next(self) -> str:
        """The next character that is no white space, to which the position moves; "" at the end."""
        while True:
            blank = WHITE_SPACE.match(self._read, self._position)
            assert blank
            self._move(blank.end())
            if self._position < len(self._read) or not self._more():
                return self._read[self._position : self._position + 1]

    def _found(self) -> str:
        return repr(self._read[self._position : self._position + LONGEST_TOKEN]) if self._next() else "the end"

    def _move(self, position: int) -> None:
        self.line += self._read.count("\n", self._position, position)
        self._position = position

    def _more(self) -> bool:
        """Reads on, at least as much as is waiting, so that a long value is scanned few times."""
        waiting = self._read[self._position :]
        new = self._file.read(max(BLOCK, len(waiting)))
        self._read, self._position = waiting + new, 0
        return bool(new)
