"""Unit: a run of rows that one process reads at once; and the fingerprint of what it reads.

Units are plain data, so that they can be sent to worker processes; a file is opened where it is read. The fingerprint
is SHA-256 over the bytes of a unit and over how they are read, so a cache that is keyed by it can never be stale, and
moving files, or touching them, changes nothing. Nothing is sent between ranks.
"""

import codecs
import hashlib
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import BinaryIO, TextIO

from hf_longctx.data.reading.rows import Place, Refused, Row, SourceError

READING = 1
"""Raised by one when the same bytes are read as other rows than before."""
BLOCK = 1 << 20
"""Bytes read at once where there is no other reason for a size."""
LONGEST_ROW = 1 << 30
"""Bytes of a line or a text that is read at once; what is longer is refused, for it is hardly one document."""
Span = tuple[str, int, int]
"""path, first byte, one past the last byte"""


@dataclass(frozen=True, eq=False)
class Unit(ABC):
    """A run of rows in one file, or of small files."""

    name: str
    """what messages call the file"""
    bytes: int
    """what it counts for in a progress bar"""

    def __str__(self) -> str:
        return self.name

    @abstractmethod
    def rows(self) -> Iterator[Row | Refused]:
        """The rows in their order; raises SourceError where the file can be read no longer, or has changed."""

    @abstractmethod
    def fingerprint(self) -> str:
        """32 hex digits of the content that `rows` gives and of how it is read: not of paths or times. Reads all of
        it; raises SourceError like `rows`."""


@dataclass(frozen=True, eq=False)
class FileUnit(Unit):
    """A unit of one file."""

    path: str
    """what is opened"""


@dataclass(frozen=True, eq=False)
class UnreadableFile(FileUnit):
    """A file of which no row can be read."""

    reason: str

    def rows(self) -> Iterator[Row | Refused]:
        yield Refused(Place(self.name), self.reason, rows=None)

    def fingerprint(self) -> str:
        return fingerprint_of((type(self).__name__, whole_file(self.path)))


@contextmanager
def opened(path: str, name: str) -> Iterator[BinaryIO]:
    """A file open for reading bytes; what the system refuses meanwhile is a SourceError."""
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise SourceError(f"{name} cannot be read: {error}") from error


@contextmanager
def opened_text(path: str, name: str) -> Iterator[TextIO]:
    """A file open for reading UTF-8 text, after its byte order mark if it has one, with line ends as they are. A byte that
    is no UTF-8 becomes a surrogate (Python's "surrogateescape"), so that it spoils one row and not all that are read with
    it."""
    with opened(path, name) as file:
        # Python's codec "utf-8-sig" would lose a mark that is cut off.
        if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
            file.seek(0)
        yield io.TextIOWrapper(file, encoding="utf-8", errors="surrogateescape", newline="")


def whole_file(path: str) -> str:
    """Fingerprint of a file's bytes. Each process reads the file once for it, and again only if its size or one of its times
    have changed, of which no program sets the time of the last change. Raises SourceError where it cannot be read."""
    with opened(path, path) as file:
        status = os.fstat(file.fileno())
    return _whole_file(path, status.st_size, (status.st_ino, status.st_mtime_ns, status.st_ctime_ns))


@lru_cache
def _whole_file(path: str, size: int, version: tuple[int, ...]) -> str:
    return fingerprint_of((), [(path, 0, size)])


def changed(name: str, size: int) -> SourceError:
    return SourceError(f"{name} had {size} bytes or more and is shorter now: it must not change while it is read")


def fingerprint_of(how: Iterable[object], spans: Iterable[Span] = ()) -> str:
    """32 hex digits of `how`, of which the repr counts, and of bytes of files.

    Raises:
        SourceError: a file cannot be read, or is shorter than its span.
    """
    digest = hashlib.sha256(repr((READING, *how)).encode("utf-8", "backslashreplace"))
    buffer = memoryview(bytearray(BLOCK))
    for path, start, stop in spans:
        digest.update((stop - start).to_bytes(8, "little"))
        with opened(path, path) as file:
            file.seek(start)
            while start < stop:
                count = file.readinto(buffer[: min(BLOCK, stop - start)])  # type: ignore[attr-defined]
                if not count:
                    raise changed(path, stop)
                digest.update(buffer[:count])
                start += count
    return digest.hexdigest()[:32]
