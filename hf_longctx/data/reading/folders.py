"""Files of text: a document each, or the files of a directory joined to one document.

    ==> animals/cat.txt <==
    The cat sat.
    ==> animals/dog.txt <==
    The dog ran.

That is one document of a directory: its own files, not those of directories in it, in the order of their names, each
after a line that names it as `head` does. Small files are read many to a unit. A file that is no UTF-8 text is refused
alone. Nothing is sent between ranks.
"""

import codecs
import io
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath

from fsspec.utils import glob_translate

from hf_longctx.data.reading.rows import Place, Refused, Row, SourceError
from hf_longctx.data.reading.unit import LONGEST_ROW, Unit, fingerprint_of, whole_file

COLUMN = "text"
"""Name of the column in which a document's text stands."""
TEXT_ENDINGS = (".txt", ".md")
"""Endings of texts, which often lie beside data without being data."""
TextFile = tuple[str, str, int]
"""path, path below the directory that is read (it stands in the line before the text), bytes"""


def text_file(path: str, relative: str) -> TextFile:
    """Return the file, of a link to nothing the link; reading it will be refused."""
    return path, relative, os.stat(path, follow_symlinks=os.path.exists(path)).st_size


def files_below(directory: str, pattern: str) -> list[TextFile]:
    """The files below a directory whose relative paths match, sorted. Names that begin with a dot, of files or
    directories, are passed over unless the pattern has such a part; links to directories are not followed.

    Raises:
        SourceError: a directory or file cannot be read, or the pattern is none.
    """
    try:
        matches = re.compile(glob_translate(pattern)).match
    except (ValueError, re.error) as error:
        raise SourceError(f"the pattern {pattern!r} cannot be used: {error}") from error
    hidden_too = any(part.startswith(".") for part in PurePosixPath(pattern).parts)

    def refuse(error: OSError) -> None:
        raise SourceError(f"{error.filename} cannot be read: {error}") from error

    text_files = []
    for folder, folders, files in os.walk(directory, onerror=refuse):
        if not hidden_too:
            folders[:] = [name for name in folders if not name.startswith(".")]
        for file in files:
            path = os.path.join(folder, file)
            relative = os.path.relpath(path, directory).replace(os.sep, "/")
            special = os.path.exists(path) and not os.path.isfile(path)  # a socket or a pipe holds nothing to read
            if matches(relative) and (hidden_too or not file.startswith(".")) and not special:
                text_files.append(text_file(path, relative))
    return sorted(text_files, key=lambda file: file[1])


def text_units(files: Iterable[TextFile], unit_bytes: int) -> list[Unit]:
    """Units of documents of one file each."""
    return _units([(file,) for file in files], False, unit_bytes)


def directory_units(files: Iterable[TextFile], unit_bytes: int) -> list[Unit]:
    """Units of documents that join the files of one directory each; files as `files_below` returns them."""
    by_directory = sorted(files, key=lambda file: os.path.split(file[1]))
    groups = [tuple(group) for _, group in groupby(by_directory, key=lambda file: os.path.dirname(file[1]))]
    return _units(groups, True, unit_bytes)


@dataclass(frozen=True, eq=False)
class TextDocuments(Unit):
    """Some documents, each of the files that it joins."""

    documents: tuple[tuple[TextFile, ...], ...]
    joined: bool
    """whether a line before each file's text names it"""

    def rows(self) -> Iterator[Row | Refused]:
        for files in self.documents:
            texts = []
            for path, relative, size in files:
                text, problem = _read(path, size)
                if problem:
                    yield Refused(Place(path), problem)
                else:
                    texts.append(_headed(relative, text) if self.joined else text)
            if texts:
                path = files[0][0]
                yield Row(Place(os.path.dirname(path) if self.joined else path), {COLUMN: "".join(texts)})

    def fingerprint(self) -> str:
        contents = [
            [(self.joined and relative, os.access(path, os.R_OK) and whole_file(path)) for path, relative, _ in files]
            for files in self.documents
        ]
        return fingerprint_of((type(self).__name__, self.joined, contents))


def _read(path: str, size: int) -> tuple[str, str]:
    """A file's text, with line ends as Python reads them; and why it is refused, or nothing."""
    if size > LONGEST_ROW:
        return "", f"has {size} bytes, but a document may have at most {LONGEST_ROW}"
    texts_alone = "" if path.lower().endswith(TEXT_ENDINGS) else '; data.pattern="**/*.txt" takes files of text alone'
    try:
        data = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8)
        text = io.TextIOWrapper(io.BytesIO(data), encoding="utf-8").read()
    except UnicodeDecodeError as error:
        return "", f"is not UTF-8 text: {error}{texts_alone}"
    except OSError as error:
        return "", f"cannot be read: {error}"
    return text, f"is not text: character {text.index(chr(0)) + 1} is NUL{texts_alone}" if "\0" in text else ""


def _headed(relative: str, text: str) -> str:
    return f"==> {relative} <==\n{text}" + ("" if text.endswith("\n") or not text else "\n")


def _units(documents: Iterable[tuple[TextFile, ...]], joined: bool, unit_bytes: int) -> list[Unit]:
    units: list[Unit] = []
    waiting: list[tuple[TextFile, ...]] = []
    size = 0
    for document in documents:
        waiting.append(document)
        size += sum(size for _, _, size in document)
        if size >= unit_bytes:
            units.append(TextDocuments(waiting[0][0][0], size, tuple(waiting), joined))
            waiting, size = [], 0
    if waiting:
        units.append(TextDocuments(waiting[0][0][0], size, tuple(waiting), joined))
    return units
