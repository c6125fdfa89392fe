"""Directories that hold a data set, and data sets on the hub: which files are read for a split.

What `save_to_disk` wrote says so itself. Any other directory, and a name on the hub, has the files that `load_dataset` of
`datasets` would read for it: by what its README says, or by what names of files and directories say. Files of the hub
are downloaded once, into the cache of `datasets`. Nothing is sent between ranks.
"""

import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset, DatasetBuilder, DownloadManager, config, load_dataset, load_dataset_builder
from datasets.data_files import FILES_TO_IGNORE
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from hf_longctx.data.reading.rows import SourceError

SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files that `save_to_disk` leaves in a directory: of one data set; of several splits."""
CARDS = ("README.md", ".huggingface.yaml")
"""Files in which the author of a data set may say which files it has; then others may lie beside them."""
PLAIN_OPTIONS = {"name", "version", "data_dir", "data_files", "description", "features", "sep", "delimiter"}
"""Options of a builder of `datasets` that are heeded here, or that do not change what is read."""

HUB_SECONDS = 10.0
"""A hub that does not answer in that time is not there."""


class DataFile(NamedTuple):
    """A file of a split."""

    path: str
    """on this machine"""
    name: str
    """in messages"""
    separator: str | None
    """of separated values, where the data set says it"""


def is_saved(directory: str) -> bool:
    """Whether `save_to_disk` wrote a directory."""
    return any(os.path.isfile(os.path.join(directory, name)) for name in (SAVED, SAVED_SPLITS))


def saved_files(directory: str, split: str) -> list[str]:
    """The Arrow files of a split of what `save_to_disk` wrote; one data set alone is the split "train".

    Raises:
        SourceError: there is no such split, or the directory is damaged.
    """
    several = os.path.isfile(os.path.join(directory, SAVED_SPLITS))
    splits = _read_list(directory, SAVED_SPLITS, "splits") if several else ["train"]
    if split not in splits:
        raise SourceError(f"{directory} has no split {split!r}; it has {', '.join(map(repr, splits))}")
    if several:
        directory = os.path.join(directory, split)
    entries = _read_list(directory, SAVED, "_data_files")
    files: list[Any] = [entry.get("filename") if isinstance(entry, dict) else entry for entry in entries]
    beside = os.listdir(directory)
    for number, file in enumerate(files):
        if file not in beside or file in files[:number]:
            wrong = "which is not beside it" if file not in beside else "twice"
            raise SourceError(f"{directory}/{SAVED} names the file {file!r}, {wrong}")
    return [os.path.join(directory, file) for file in files]


def _refuse_unreachable(name: str) -> None:
    """Raises SourceError for a hub's data set that is not in its cache where the hub does not answer in HUB_SECONDS: datasets
    itself asks for half a minute."""
    if config.HF_HUB_OFFLINE or os.path.isdir(os.path.join(config.HF_DATASETS_CACHE, name.replace("/", "___"))):
        return
    try:
        HfApi(endpoint=config.HF_ENDPOINT).dataset_info(name, timeout=HUB_SECONDS)
    except (HfHubHTTPError, HFValidationError):
        return  # the hub has answered; datasets finds the words for what it said
    except Exception as error:  # of any HTTP client
        raise SourceError(
            f"there is no file or directory {name!r} (relative to {Path.cwd()}), and the hub cannot be reached "
            f"({type(error).__name__}). Valid: a name that is here, or `hf download --repo-type dataset {name}` where there is a "
            "network; HF_HUB_OFFLINE=1 uses its cache alone"
        ) from error


def split_files(
    path: str, subset: str | None, split: str, endings: Iterable[str], texts: Collection[str]
) -> list[DataFile] | None:
    """The files that `load_dataset` would read; None where it knows the data set only from its cache, as Arrow.

    Args:
        path: a directory, or a name on the hub.
        subset: one of several that the data set has; None where it has one.
        split: one of its splits.
        endings: of files that must not be left out silently.
        texts: of files that must not be left out where one of these is read.

    Raises:
        SourceError: there is no such data set, subset or split; a file would be left out; or files are to be read with
            options that are not known here.
    """
    is_directory = os.path.isdir(path)
    if not is_directory:
        _refuse_unreachable(path)
    try:
        builder = load_dataset_builder(os.path.abspath(path) if is_directory else path, subset)
        if not is_directory and builder.repo_id is None:  # "json" and the like are readers of files in this directory
            raise ValueError("the name is that of a kind of file")
    except Exception as error:  # of `datasets`, the hub, the network, YAML
        where = "" if is_directory else f"there is no file or directory {path!r} (relative to {Path.cwd()}), and "
        raise SourceError(f"{where}datasets finds no data set {path!r}: {type(error).__name__}: {error}") from error
    by_split: Mapping[Any, list[str]] | None = builder.config.data_files
    if not by_split:
        return None
    if split not in by_split:
        raise SourceError(
            f"{path} has no split {split!r}; it has {', '.join(repr(str(existing)) for existing in by_split)}"
        )
    _refuse_options(path, builder)
    if is_directory and not any(os.path.exists(os.path.join(path, card)) for card in CARDS):
        chosen = {file for files in by_split.values() for file in files}
        own = {os.path.splitext(file)[1].lower() for file in chosen}
        are_texts = not own.isdisjoint(texts)
        if are_texts:
            own |= set(texts)
        _refuse_left_out(path, chosen, (*endings, *own - {""}), are_texts)
    files = list(by_split[split])
    try:
        local = DownloadManager().download(files)
    except Exception as error:
        raise SourceError(f"a file of {path} cannot be downloaded: {type(error).__name__}: {error}") from error
    base = os.path.realpath(path)
    names = [os.path.join(path, os.path.relpath(file, base)) if is_directory else file for file in files]
    separator = getattr(builder.config, "sep", None)
    return [DataFile(file, name, separator) for file, name in zip(local, names)]


def cached_split(path: str, subset: str | None, split: str) -> Dataset:
    """A split of a data set that was loaded from the hub before, where the hub cannot be reached now.

    Raises:
        SourceError: it has no such split.
    """
    try:
        return load_dataset(path, subset, split=split)
    except Exception as error:
        raise SourceError(f"{path} cannot be loaded from the cache: {type(error).__name__}: {error}") from error


def _refuse_options(path: str, builder: DatasetBuilder) -> None:
    plain = type(builder.config)()
    options = {
        name: value
        for name, value in vars(builder.config).items()
        if name not in PLAIN_OPTIONS and value != getattr(plain, name, value)
    }
    if options:
        raise SourceError(
            f"{path} is to be read with {', '.join(f'{name}={value!r}' for name, value in options.items())}, which is not "
            "known here. Load it with load_dataset, and give the Dataset"
        )


def _refuse_left_out(directory: str, chosen: set[str], endings: tuple[str, ...], are_texts: bool) -> None:
    """Files of no split would be lost silently: of other kinds, or whose names do not say a split where others' do."""
    whole = (
        '; or make each file a document: data.documents=files, of which data.pattern="**/*.txt" takes some'
        if are_texts
        else ""
    )
    for folder, folders, files in os.walk(os.path.realpath(directory)):
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        for file in sorted(files):
            path = os.path.join(folder, file)
            if (
                file.lower().endswith(endings)
                and file not in FILES_TO_IGNORE
                and not file.startswith(".")
                and path not in chosen
            ):
                raise SourceError(
                    f"load_dataset would not read {path}: a directory's files are of one kind, and where the name of one "
                    'says its split (train, test ...) all must. Name the files: "directory/*.jsonl", or of several kinds '
                    f'["directory/*.txt", "directory/*.md"]{whole}'
                )


def _read_list(directory: str, file: str, key: str) -> list[Any]:
    """A list in a JSON file of what `save_to_disk` wrote."""
    path = os.path.join(directory, file)
    try:
        with open(path, encoding="utf-8") as text:
            content = json.load(text)
        if not isinstance(content, dict) or not isinstance(content.get(key), list):
            raise ValueError(f"it has no list {key!r}")
        return content[key]
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path}, which save_to_disk writes, cannot be read: {error}") from error
