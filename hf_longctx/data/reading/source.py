"""Source: what a user names (files, directories, a data set of the hub, an object) -> units of rows.

    "a.jsonl", "data/*.parquet", a list of such    each file by its ending, all of its rows
    a directory that `save_to_disk` wrote          its Arrow files; `split` chooses among its splits
    a directory that `prepare` wrote               its documents, or those of the folder in it that is named as `split`
    any other directory, or a name on the hub      the files that `load_dataset` would read, by `subset` and `split`
    .txt and .md among them                        each file is one row
    documents="files" or "directories"             the files below a directory that match `pattern`, as text
    Dataset, IterableDataset                       the object's rows
    a mapping of splits, DatasetDict               what it has for `split`, one of the above

Units come in the same order wherever and whenever they are made. Rows are read by units, not here; pickles are never
read, and no code of a data set is run. Nothing is sent between ranks.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Any, Literal, get_args

from datasets import Dataset, IterableDataset

from hf_longctx.data.prepared import INDEX, load_prepared
from hf_longctx.data.reading.arrow_files import arrow_units
from hf_longctx.data.reading.datasets_objects import Stream, dataset_units
from hf_longctx.data.reading.folders import TEXT_ENDINGS, directory_units, files_below, text_file, text_units
from hf_longctx.data.reading.json_lines import json_line_units
from hf_longctx.data.reading.json_values import json_units
from hf_longctx.data.reading.layouts import cached_split, is_saved, saved_files, split_files
from hf_longctx.data.reading.parquet import parquet_units
from hf_longctx.data.reading.rows import SourceError
from hf_longctx.data.reading.separated import separated_units
from hf_longctx.data.reading.unit import Unit

Documents = Literal["rows", "files", "directories"]
UNIT_BYTES = 8 << 20
"""Long enough that handing out a unit costs nothing beside reading it, short enough to share out a file among workers."""
READERS: dict[str, Callable[[str, str, int], list[Unit]]] = {
    ".jsonl": json_line_units,
    ".ndjson": json_line_units,
    ".json": json_units,
    ".parquet": parquet_units,
    ".arrow": arrow_units,
    ".csv": lambda path, name, _: separated_units(path, name, ","),
    ".tsv": lambda path, name, _: separated_units(path, name, "\t"),
    ".txt": lambda path, name, unit_bytes: text_units([text_file(path, name)], unit_bytes),
    ".md": lambda path, name, unit_bytes: text_units([text_file(path, name)], unit_bytes),
}
"""File ending -> (path, name in messages, bytes of a unit) -> units."""
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""Names that the hub allows: NAME or OWNER/NAME."""


@dataclass(frozen=True)
class Source:
    """A source of rows.

    Raises:
        SourceError: `documents` is none of the valid ones, or is "directories" for something else than directories.
    """

    path: Any
    """a path, a pattern such as "data/*.jsonl", a name on the hub, a list of such, a mapping from split to such; or a
    Dataset, an IterableDataset or a mapping of them"""
    name: str | None = None
    """what reports call it"""
    subset: str | None = None
    """of a data set on the hub, or in a directory of the same layout, that has several"""
    split: str = "train"
    """which one is read where there are several; a file or a pattern belongs to any split"""
    documents: Documents = "rows"
    """of files: their rows; or each file, or each directory's own files, as one document of text"""
    pattern: str = "**/*"
    """for documents of files: which files below a directory, as in fsspec; * stays within a name, ** does not"""

    def __post_init__(self) -> None:
        if self.documents not in get_args(Documents):
            raise SourceError(f"documents is {self.documents!r}; valid are {', '.join(get_args(Documents))}")

    def __str__(self) -> str:
        objects = Dataset | IterableDataset | Mapping
        return self.name or (type(self.path).__name__ if isinstance(self.path, objects) else str(self.path))

    def units(self, unit_bytes: int = UNIT_BYTES) -> list[Unit]:
        """Runs of rows of about `unit_bytes` bytes, which can be read apart and in any order.

        Raises:
            SourceError: there is nothing to read, or it cannot be read; says what there is.
        """
        units = self._units(self.path, unit_bytes)
        if not units:
            wanted = "no row" if self.documents == "rows" else f"no file that matches {self.pattern!r}"
            raise SourceError(f"{self} holds nothing to read: {wanted}")
        return units

    def _units(self, path: Any, unit_bytes: int) -> list[Unit]:
        if isinstance(path, Mapping):
            if self.split not in path:
                raise SourceError(f"{self} has no split {self.split!r}; it has {', '.join(map(repr, map(str, path)))}")
            return self._units(path[self.split], unit_bytes)
        if isinstance(path, Dataset):
            return dataset_units(path, str(self), unit_bytes)
        if isinstance(path, IterableDataset):
            return [Stream(str(self), 0, path)]
        if isinstance(path, list | tuple):
            return [unit for part in path for unit in self._units(part, unit_bytes)]
        if not isinstance(path, str | os.PathLike):
            raise SourceError(f"{path!r} is no path, Dataset or IterableDataset, nor a list or a mapping of them")
        named = os.path.expanduser(path)
        if os.path.isdir(named):
            return self._directory(named, unit_bytes)
        if os.path.isfile(named):
            return self._file(named, unit_bytes)
        if matches := _outermost(sorted(glob(named, recursive=True))):
            read = [self._directory if os.path.isdir(match) else self._file for match in matches]
            return [unit for match, units_of in zip(matches, read) for unit in units_of(match, unit_bytes)]
        if HUB_NAME.fullmatch(named) and self.documents == "rows" and os.path.splitext(named)[1] not in READERS:
            return self._layout(named, unit_bytes)
        raise SourceError(f"there is no file or directory {named!r} (relative to {Path.cwd()}), and nothing matches it")

    def _file(self, path: str, unit_bytes: int) -> list[Unit]:
        if self.documents == "directories":
            raise SourceError(f"{path} is a file, but with documents='directories' directories are read")
        if not os.path.isfile(path):
            raise SourceError(f"{path} is no file, or a link to nothing")
        if self.documents == "files":
            return text_units([text_file(path, os.path.basename(path))], unit_bytes)
        return _reader(path)(path, path, unit_bytes)

    def _directory(self, directory: str, unit_bytes: int) -> list[Unit]:
        if self.documents != "rows":
            files = files_below(directory, self.pattern)
            return (text_units if self.documents == "files" else directory_units)(files, unit_bytes)
        for prepared in (directory, os.path.join(directory, self.split)):
            if os.path.isfile(os.path.join(prepared, INDEX)):
                return dataset_units(load_prepared(prepared), str(self), unit_bytes)
        if is_saved(directory):
            saved = saved_files(directory, self.split)
            return [unit for file in saved for unit in arrow_units(file, file, unit_bytes)]
        return self._layout(directory, unit_bytes)

    def _layout(self, path: str, unit_bytes: int) -> list[Unit]:
        files = split_files(path, self.subset, self.split, READERS.keys() - TEXT_ENDINGS, TEXT_ENDINGS)
        if files is None:
            return dataset_units(cached_split(path, self.subset, self.split), str(self), unit_bytes)
        units: list[Unit] = []
        for file in files:
            reader = _reader(file.name)
            if file.separator is not None:
                units += separated_units(file.path, file.name, file.separator)
            else:
                units += reader(file.path, file.name, unit_bytes)
        return units


def _reader(path: str) -> Callable[[str, str, int], list[Unit]]:
    """Raises SourceError for a file whose ending is not known."""
    ending = os.path.splitext(path)[1].lower()
    if ending not in READERS:
        raise SourceError(
            f"{path} ends in {ending or 'nothing'}; valid are {', '.join(READERS)}, or documents='files', which reads any text. "
            "Compressed files are to be unpacked first; pickles are never read, for they run code"
        )
    return READERS[ending]


def _outermost(matches: list[str]) -> list[str]:
    """Drop what lies in a folder that matched too, and is read with it."""
    folders = {os.path.normpath(match) for match in matches if os.path.isdir(match)}
    return [
        match
        for match in matches
        if not any(str(parent) in folders for parent in Path(os.path.normpath(match)).parents)
    ]
