"""Results of reading: rows with their places, and what could not be read, with its place and the reason.

Nothing that a file holds is lost silently: it comes out as a `Row`, or a `Refused` counts it. What becomes of a refused
row (an error, or a counted skip) is decided by who reads. Nothing is sent between ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class SourceError(ValueError):
    """There is nothing to read: no such file, split or subset, an unknown kind, or a file that changes while it is
    read."""


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a row; lines and rows are counted from 1."""

    file: str
    """as the user named it, or below the directory that the user named"""
    line: int | None = None
    """of a text format: the line in which the row begins"""
    row: int | None = None
    """of a format that has rows rather than lines"""

    def __str__(self) -> str:
        row = "" if self.row is None else f", row {self.row}"
        return f"{self.file}{row}" + ("" if self.line is None else f", line {self.line}")


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a source."""

    place: Place
    values: Mapping[str, Any]
    """column -> value: plain Python values, but lists of integers in tables are numpy arrays [T] of their own type"""


@dataclass(frozen=True, slots=True)
class Refused:
    """A row, several, or a whole file that cannot be read."""

    place: Place
    """of the first row concerned; of the file where it is the whole file"""
    reason: str
    """goes on after the place: "is not JSON: expected value at column 1" """
    rows: int | None = 1
    """how many rows are lost; None: not known"""

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}"
