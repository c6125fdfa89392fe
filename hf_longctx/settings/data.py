"""The section `data`: which documents are trained on and evaluated, and how rows become documents.

Files and folders are looked for, and small ones that name splits are read; no document is.
"""

import glob
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, WithJsonSchema

from hf_longctx.row_names import format_problems
from hf_longctx.settings.fields import Number, Section, Tokens, as_names, beside, shown

EMBEDDED_DATA = "embedded:python-sources"
EMBEDDED_SPLITS = ("train", "test")
FILE_KINDS = (".jsonl", ".ndjson", ".json", ".parquet", ".csv", ".tsv", ".txt", ".md", ".arrow")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz")
ANY_SPLIT = "(all)"
"""The split of a source that has none: it is trained on."""
HELD_OUT = "(held out)"
"""Documents that `eval_fraction` takes out of the split that is trained on."""
SPLIT = re.compile(r"\w+([.-]\w+)*")
TEXTS = ("auto", "text")
"""Kinds that read `text_column`."""


def _split_name(split: str) -> str:
    if not SPLIT.fullmatch(split):
        raise ValueError(f"must be the name of a split (letters, digits, and _ . - inside), got {shown(split)}")
    return split


def _existing(path: Any, info: ValidationInfo) -> str | dict[str, list[str]]:
    """A directory or a name as it is; files by split."""
    if isinstance(path, str) and path:
        if path == EMBEDDED_DATA or Path(path).is_dir():
            return path
        if names_a_hub(path) and not Path(path).is_file():
            if Path(path).parent.is_dir() and (near := beside(path)):
                raise ValueError(
                    f"{path!r} is no directory (relative to {Path.cwd()}), and {Path(path).parent} is one{near}"
                )
            return path
        if path.startswith("embedded:"):
            raise ValueError(f"the only embedded data set is {EMBEDDED_DATA}, got {path!r}")
    if isinstance(path, str) and "," in path and not Path(path).exists():
        path = as_names(path)
    given = path if isinstance(path, dict) else {info.data.get("train_split") or ANY_SPLIT: path}
    by_split = {}
    for split, files in given.items():
        names = [files] if isinstance(files, str) else files
        if not (isinstance(split, str) and isinstance(names, list) and names):
            raise ValueError(f"must be a path, a non-empty list of paths, or split -> path(s), got {shown(path)}")
        if isinstance(path, dict) and split != ANY_SPLIT:  # which a run's record says of files without splits
            _split_name(split)
        by_split[split] = [file for name in names for file in _files(name)]
        places = Counter(os.path.realpath(file) for file in by_split[split])
        if twice := [place for place, count in places.items() if count > 1]:
            raise ValueError(
                f"{twice[0]} is named {places[twice[0]]} times, and would be read so often; weight repeats documents"
            )
    return by_split


def names_a_hub(path: str) -> bool:
    """org/name, and nothing that looks like a file."""
    return bool(re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path)) and Path(path).suffix not in FILE_KINDS


def _files(given: Any) -> list[str]:
    """The files that a name or wildcard stands for, sorted."""
    is_name = isinstance(given, str) and Path(given).suffix in FILE_KINDS
    files = sorted(glob.glob(given, recursive=True)) if is_name and not Path(given).is_file() else [given]
    if isinstance(given, str) and given.endswith(COMPRESSED) and Path(given).is_file():
        raise ValueError(f"{given!r} is compressed, which is not read: unpack it first")
    if isinstance(given, str) and any(
        kind(Path(given)) for kind in (Path.is_fifo, Path.is_char_device, Path.is_socket)
    ):
        raise ValueError(
            f"{given!r} is a pipe or a device, which is read once, and documents are read at will: save a file"
        )
    if not is_name or not files or not all(Path(file).is_file() for file in files):
        raise ValueError(
            f"must be {EMBEDDED_DATA}, an existing directory, a hub's org/name, or existing files that end in "
            f"{', '.join(FILE_KINDS)}, got {shown(given)} (relative to {Path.cwd()})"
            f"{beside(given) if isinstance(given, str) and given else ''}"
        )
    return files


def is_saved(directory: Path) -> bool:
    """Whether `save_to_disk` of datasets wrote it."""
    return (directory / "dataset_dict.json").is_file() or (directory / "state.json").is_file()


def _saved_splits(directory: Path) -> list[str] | None:
    """Splits of what `save_to_disk` or `hf-longctx prepare` wrote; one data set alone is the split train. None: another
    layout, or a hub's."""
    if (several := directory / "dataset_dict.json").is_file():
        return json.loads(several.read_text())["splits"]
    if (directory / "state.json").is_file() or (directory / "index.arrow").is_file():
        return ["train"]
    return sorted(index.parent.name for index in directory.glob("*/index.arrow")) or None


Split = Annotated[str, AfterValidator(_split_name)]
_FILES: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
Documents = Annotated[
    str | dict[str, list[str]],
    BeforeValidator(_existing),
    Field(min_length=1),
    WithJsonSchema({"anyOf": [*_FILES["anyOf"], {"type": "object", "additionalProperties": _FILES}]}),
]
Passes = Annotated[Number, Field(ge=0, le=1000)]
_PASSES: dict[str, Any] = {"type": "number", "minimum": 0, "maximum": 1000}
Weights = Annotated[
    list[Passes],
    BeforeValidator(lambda given: given if isinstance(given, list) else [given]),
    Field(min_length=1),
    WithJsonSchema({"anyOf": [_PASSES, {"type": "array", "items": _PASSES, "minItems": 1}]}),
]


class SourceKeys(Section):
    """How rows become documents, and how many of them."""

    name: str | None = Field(default=None, min_length=1)
    """for reports; null: the path"""
    subset: str | None = Field(default=None, min_length=1)
    """of a hub's data set that has several"""
    documents: Literal["rows", "files", "directories"] = "rows"
    """of a directory of files: each file is a document, or each directory; rows: files hold documents as rows"""
    pattern: str = Field(default="**/*", min_length=1)
    """of a directory of files: which of them"""
    kind: Literal["auto", "text", "messages", "prompt_completion", "tokens", "sharegpt", "alpaca"] = "auto"
    """what a row holds; auto: as its columns are named (input_ids; messages; prompt and completion; text; conversations;
    instruction and output)"""
    columns: dict[str, str] | None = Field(default=None, min_length=1)
    """columns that are called something else, {prompt: question, completion: answer}; role and content: keys of a message"""
    roles: dict[str, str] | None = Field(default=None, min_length=1)
    """roles in conversations that are called something else, {customer: user, agent: assistant}"""
    text_column: str | None = Field(default=None, min_length=1)
    """column of texts, tokenised with the model's tokenizer; null: text"""
    train_on: Literal["assistant", "all"] = "assistant"
    """of conversations: learn what the assistant (or the completion) says, or everything"""
    add_eos: bool | None = None
    """whether a text ends with the tokenizer's end token (eos); null: yes, and a tokenizer without one is only mentioned; true:
    it must have one"""
    max_documents: int | None = Field(default=None, gt=0)
    """only its first"""
    max_tokens: Tokens | None = Field(default=None, gt=0)
    """only its first documents that together have no more tokens"""
    weight: Weights = Field(default=[1.0])
    """how often each document is seen in an epoch: 0.5: half of them, drawn anew each epoch; a list: one for each epoch, the
    last goes on"""


class SourceSection(SourceKeys):
    """One source of a mixture."""

    train_split: Split | None = None
    """its split that is trained on, where that has another name than in the others; null: data.train_split"""
    path: Documents
    """a directory (a data set, or files); files, by name or wildcard: one, a list, or a mapping from split to file(s); the id of
    a data set on a hub; embedded:python-sources. Relative to the current directory."""

    @property
    def splits(self) -> list[str] | None:
        """Names of the splits; None: not known without asking a hub, or without looking at what files are called."""
        if isinstance(self.path, dict):
            return list(self.path)
        if self.path == EMBEDDED_DATA:
            return list(EMBEDDED_SPLITS)
        return _saved_splits(Path(self.path)) if self.documents == "rows" else [ANY_SPLIT]

    def has(self, split: str, trained: bool) -> bool:
        """Tell whether there is such a split, as far as that is known; rows of no split are trained on."""
        return self.splits is None or not {split, *([ANY_SPLIT] if trained else [])}.isdisjoint(self.splits)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Key and rule of what does not go together."""
        if self.train_split is not None and not self.has(self.train_split, trained=True):
            yield "train_split", no_split(self.train_split, [self])
        if self.text_column is not None and self.kind not in TEXTS:
            yield "text_column", f"{self.text_column!r} is not read with kind={self.kind!r}; valid: kind text, or auto"
        if self.add_eos and self.kind not in TEXTS:
            yield "add_eos", f"only texts get an end token, and kind is {self.kind!r}; valid: kind text, or auto"
        yield from format_problems(self.columns or {}, self.roles or {})
        if self.columns and "text" in self.columns and self.text_column is not None:
            yield (
                "text_column",
                f"{self.text_column!r} beside columns.text ({self.columns['text']!r}): keep one of them",
            )
        if self.documents != "rows" and not (isinstance(self.path, str) and Path(self.path).is_dir()):
            yield "documents", f"{self.documents!r} needs a path that is a directory of files, got {shown(self.path)}"


def no_split(split: str, sources: list[SourceSection]) -> str:
    """Word that no source has a split."""
    names = dict.fromkeys(repr(name) for source in sources for name in source.splits or [])
    return f"no source has the split {split!r}, only {', '.join(names)}"


class DataConfig(SourceKeys):
    """Documents that are trained on and evaluated: one source, or a mixture of `sources`."""

    train_split: Split = "train"
    """the split trained on; files given without a split belong to it"""
    eval_split: Split | None = None
    """the held-out split; null: no evaluation, or what eval_fraction holds out"""
    eval_fraction: Number | None = Field(default=None, gt=0, lt=1)
    """share of the documents of train_split that is held out, chosen by a hash of each document's tokens: the same ones in any
    order, on any number of ranks, and however many are added"""
    path: Documents | None = Field(default=None)
    """one source: embedded:python-sources, a directory, files (one, a list, or a mapping from split to file(s)), or the id of
    a data set on a hub. Relative to the current directory. Once validated, files are split -> list of files."""
    sources: list[SourceSection] | None = Field(default=None, min_length=1)
    """a mixture: each with its own path and the keys of one source"""
    bad_rows: Literal["error", "skip"] = "error"
    """rows that cannot be read or tokenised: an error, or left out, counted and listed"""
    workers: int | None = Field(default=None, gt=0)
    """processes that tokenise; null: one for each processor, for 64 MiB or more; 1: the tokenizer's own threads"""
    on_the_fly: bool = False
    """of one source that lies as Arrow already (saved by datasets, or a hub's): keep only lengths, which Ray measures, and
    tokenise a document whenever it is read; for data that are too large to be stored once more"""

    def problems(self) -> Iterator[tuple[str, str]]:
        """Key and rule of what does not go together."""
        if self.path is None and self.sources is None:
            yield "path", "missing: give path (one source) or sources (a mixture)"
            return
        if self.sources is not None:
            for name in sorted(self.model_fields_set & (SourceKeys.model_fields.keys() | {"path"})):
                if getattr(self, name) is not None:
                    yield name, "stands beside data.sources, which are a mixture: give each source its own"
        sources = self.all_sources
        for number, source in enumerate(sources):
            for key, rule in source.problems():
                yield (key if self.sources is None else f"sources.{number}.{key}"), rule
        if all(set(source.weight) == {0.0} for source in sources):
            yield "weight" if self.sources is None else "sources", "weight 0 everywhere leaves no document to train on"
        if self.eval_fraction is not None and self.eval_split is not None:
            yield "eval_fraction", f"{self.eval_fraction} beside eval_split ({self.eval_split!r}): keep one of them"
        if self.on_the_fly:
            yield from self._only_rows_of_arrow()
        yield from self._missing_splits(sources)

    def _missing_splits(self, sources: list[SourceSection]) -> Iterator[tuple[str, str]]:
        by_default = [source for source in sources if source.train_split is None]
        if by_default and not any(source.has(self.train_split, trained=True) for source in by_default):
            yield "train_split", no_split(self.train_split, sources)
        if self.eval_split is None:
            return
        if not any(source.has(self.eval_split, trained=False) for source in sources):
            yield "eval_split", no_split(self.eval_split, sources)
        for number, source in enumerate(sources):
            if source.train_split == self.eval_split:
                yield (
                    f"sources.{number}.train_split",
                    f"{self.eval_split!r} is data.eval_split too, and would be learned and measured",
                )
            if isinstance(source.path, dict):
                learned = map(os.path.realpath, source.path.get(source.train_split or self.train_split, []))
                if both := sorted(set(learned) & set(map(os.path.realpath, source.path.get(self.eval_split, [])))):
                    yield (
                        "path" if self.sources is None else f"sources.{number}.path",
                        f"{both[0]} is of the split to train on and of data.eval_split, {self.eval_split!r}, and would be "
                        "learned and measured",
                    )

    def _only_rows_of_arrow(self) -> Iterator[tuple[str, str]]:
        for name, value in (("sources", self.sources), ("max_tokens", self.max_tokens)):
            if value is not None:
                yield name, "on_the_fly takes one source, and all of its rows or the first max_documents"
        if self.eval_fraction is not None:
            yield "eval_fraction", "on_the_fly does not hold tokens to choose by: give data.eval_split"
        if self.documents != "rows":
            yield "documents", f"on_the_fly needs rows, got {self.documents!r}"
        if self.path == EMBEDDED_DATA:
            yield "path", f"{EMBEDDED_DATA} is tokenised already: remove on_the_fly"
        elif isinstance(self.path, dict) or (
            self.path is not None and Path(self.path).is_dir() and not is_saved(Path(self.path))
        ):
            yield (
                "path",
                "on_the_fly reads what lies as Arrow already: a directory by save_to_disk of datasets, or a hub's data "
                "set. Files are prepared: remove on_the_fly",
            )
        if set(self.weight) != {1.0}:
            yield "weight", f"on_the_fly sees every document once in an epoch, got {self.weight}"

    @property
    def held_out(self) -> str | None:
        """the name of the documents that are held out: eval_split, or what eval_fraction chooses; None: there are none"""
        return self.eval_split if self.eval_fraction is None else HELD_OUT

    @property
    def all_sources(self) -> list[SourceSection]:
        if self.sources is not None:
            return self.sources
        keys = {name: getattr(self, name) for name in SourceKeys.model_fields}
        return [SourceSection.model_construct(path=self.path, **keys)]

    def sources_of(self, split: str) -> list[tuple[SourceSection, str]]:
        """List the sources that have a split, and what each calls it."""
        trained = split == self.train_split
        named = [(source, source.train_split or split if trained else split) for source in self.all_sources]
        return [(source, name) for source, name in named if source.has(name, trained)]
