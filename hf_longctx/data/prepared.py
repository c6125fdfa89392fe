"""A prepared data set: a folder of Arrow shards, with the lengths of all documents (prepare.py makes it).

    manifest.json     what it was made of: sources, counts, shards
    index.arrow       length, label tokens and source of every document
    shard-00000.arrow ...   documents; memory-mapped, so a rank reads only the slices that it trains on
    refused.jsonl     place and reason of every row that is no document

Nothing is sent between ranks.
"""

import hashlib
import json
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from datasets.table import MemoryMappedTable, concat_tables

from hf_longctx.data.length_index import LengthIndex
from hf_longctx.data.page_cache import map_arrow_stream
from hf_longctx.data.tokenizer_state import TokenizerRecord, tokenizer_name

MANIFEST, INDEX, REFUSED = "manifest.json", "index.arrow", "refused.jsonl"
SHARD = "shard-{:05}.arrow"

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class SourceCounts:
    """Counts of the rows of one source, by what became of them."""

    name: str
    documents: int
    tokens: int
    label_tokens: int
    longest: int
    """tokens"""
    bad_rows: int
    """rows left out because they could not be read or tokenised; the rest of a damaged file counts as one"""
    empty_rows: int
    """rows left out because they teach nothing"""


@dataclass(frozen=True)
class Manifest:
    """The record of what a prepared data set was made of."""

    sources: list[SourceCounts]
    shards: list[tuple[str, int]]
    """name in the cache, which is a hash of its content, and documents that are taken: its first"""
    largest_id: int
    """of all tokens"""
    labels: bool
    """whether some tokens are not learned"""
    tokenizers: list[TokenizerRecord] | None = field(default=None, compare=False)
    """what its sources were prepared with: one, or none where they were tokens and nobody named any; None: the folder is older
    than this field. It follows from the shards, whose names depend on it"""

    def to_json(self) -> str:
        facts = asdict(self)
        if self.tokenizers is None:
            del facts["tokenizers"]
        return json.dumps(facts, indent=1) + "\n"

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Raises ValueError where `prepare` did not write it."""
        try:
            read = json.loads((directory / MANIFEST).read_text())
            sources = [SourceCounts(**counts) for counts in read["sources"]]
            shards = [(str(name), int(count)) for name, count in read["shards"]]
            records = read.get("tokenizers")
            tokenizers = None if records is None else [TokenizerRecord(**record) for record in records]
            return cls(sources, shards, int(read["largest_id"]), bool(read["labels"]), tokenizers)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{directory} is no prepared data set: {MANIFEST}: {error!r}") from error


class PreparedDataset(Dataset):
    """Documents with the columns `input_ids` and, where not every token is learned, `labels`; and what is known of them."""

    manifest: Manifest
    directory: Path
    index: LengthIndex
    source: np.ndarray
    """uint16 [documents]: number of the source of each"""
    weights: Sequence[Sequence[float]] | None = None
    """of each source, passes in epoch 0, 1 and so on (planner/mixture.py); None: every document once in every epoch"""
    data_version: int | None = None
    """what its documents were made as (tokenisation.py); None: not known"""
    compared: bool = False
    """whether the tokenizer that it is used with was compared with its own, and what there was to say was said"""


class ShardTable(MemoryMappedTable):
    """A shard that is mapped to be read at random; sent to other processes as its path, and what was done to its table.

    Args:
        table: as `map_arrow_stream` gives it.
        path: of the Arrow stream.
        replays: what is done to the table, in the form of `datasets`, which goes on with it where rows or columns of a data
            set are chosen.
    """

    def __init__(self, table: pa.Table, path: str, replays: list[tuple[str, tuple[Any, ...], dict[str, Any]]]) -> None:
        super().__init__(self._apply_replays(table, replays), path, replays)

    def __setstate__(self, state: dict[str, Any]) -> None:
        path = state["path"]
        ShardTable.__init__(self, map_arrow_stream(path), path, state["replays"])

    @classmethod
    def of(cls, path: str, kept: int, labels: bool) -> "ShardTable":
        """The first `kept` documents of a shard; with `labels`, which are the tokens themselves where it has none."""
        table = map_arrow_stream(path)
        replays: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [("slice", (0, kept), {})]
        if labels and "labels" not in table.column_names:
            replays.append(("select", (["input_ids", "input_ids"],), {}))
            replays.append(("rename_columns", (["input_ids", "labels"],), {}))
        return cls(table, path, replays)


def load_prepared(directory: str | Path) -> PreparedDataset:
    """Opens what `prepare` made; reads lengths, and no document.

    Raises:
        ValueError: it is none, or files of it are missing or do not fit together. Tokens are not compared with anything:
            that would read all of them.
    """
    directory = Path(directory)
    manifest = Manifest.read(directory)
    try:
        with pa.OSFile(str(directory / INDEX)) as file, pa.ipc.open_file(file) as reader:
            columns = {name: column.to_numpy() for name, column in zip(reader.schema.names, reader.read_all().columns)}
        tables = [
            ShardTable.of(str(directory / SHARD.format(number)), kept, manifest.labels)
            for number, (_, kept) in enumerate(manifest.shards)
        ]
        lengths = np.concatenate([_lengths(table) for table in tables])
        _compare(manifest, columns, lengths)
    except (OSError, ValueError, KeyError) as error:  # Arrow's own are ValueErrors
        raise ValueError(f"{directory} is damaged: {error}. Remove it and prepare it again") from error
    content = " ".join(f"{name}:{kept}" for name, kept in manifest.shards)
    fingerprint = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
    dataset = PreparedDataset(concat_tables(tables), fingerprint=fingerprint)
    dataset.manifest, dataset.directory, dataset.source = manifest, directory, columns["source"]
    dataset.index = LengthIndex(columns["length"], columns["label_tokens"], fingerprint)
    return dataset


def compare_tokenizer(directory: Path, tokenizer: Any) -> None:
    """Compare the tokenizer that documents are used with to the one that their folder was prepared with. Warns where one of them
    is not known, or where other versions of the libraries may be why they differ.

    Args:
        directory: a folder that `prepare` made.
        tokenizer: of transformers; None: none is known.

    Raises:
        ValueError: they differ; says in what, and what would be valid.
    """
    records, unchecked = (
        Manifest.read(directory).tokenizers,
        "so whether its ids mean the same to the model is not checked",
    )
    if records is None:
        warnings.warn(
            f"{directory} does not say which tokenizer it was prepared with, as folders made before that was kept, {unchecked}. "
            "`hf-longctx prepare --output` of the same sources into it adds that",
            stacklevel=2,
        )
    for record in records or ():
        if tokenizer is None:
            warnings.warn(
                f"{directory} was prepared with the tokenizer of {record.name!r}, and none is known of the model, {unchecked}",
                stacklevel=2,
            )
            continue
        own = TokenizerRecord.of(tokenizer, rendered=record.template is not None)
        if own.fingerprint != record.fingerprint:
            difference = (
                f"{directory} was prepared with the tokenizer of {record.name!r}, whose fingerprint is {record.fingerprint}, and "
                f"is used with that of {tokenizer_name(tokenizer)!r}, whose fingerprint is {own.fingerprint}"
            )
            if own.libraries != record.libraries:
                warnings.warn(
                    f"{difference}. That may come from {record.libraries} then and {own.libraries} now, {unchecked}",
                    stacklevel=2,
                )
                continue
            raise ValueError(
                f"{difference}: the same ids would be other texts. Valid: the model, model.added_tokens and model.eos_token that "
                "it was prepared with, or its sources prepared anew with this tokenizer. If both are known to make the same "
                f"tokens, remove 'tokenizers' from {directory / MANIFEST}, and they are not compared"
            )
        if own.template != record.template:
            raise ValueError(
                f"{directory} holds conversations in a chat template with fingerprint {record.template}, and is used with one "
                f"that has {own.template}: the model would learn one and be asked in another. Valid: the model and "
                "model.chat_template that it was prepared with, or its sources prepared anew with this template"
            )


def _lengths(table: ShardTable) -> np.ndarray:
    """int64 [documents], from the offsets of a shard, which are valid."""
    table.table.validate(full=True)
    return pc.list_value_length(table.column("input_ids")).to_numpy().astype(np.int64)


def _compare(manifest: Manifest, columns: dict[str, np.ndarray], lengths: np.ndarray) -> None:
    """Raises ValueError where the index is not that of the shards, or not what the manifest says."""
    if not np.array_equal(columns["length"], lengths):
        raise ValueError(f"{INDEX} has the lengths of other documents than its shards")
    for number, counts in enumerate(manifest.sources):
        own = columns["source"] == number
        expected = counts.documents, counts.tokens, counts.label_tokens
        actual = int(own.sum()), int(lengths[own].sum()), int(columns["label_tokens"][own].sum())
        if expected != actual:
            raise ValueError(
                f"{INDEX} has {actual} documents, tokens and label tokens of {counts.name}, and {MANIFEST} says {expected}"
            )


def length_table(lengths: np.ndarray) -> dict[str, Any]:
    """p50, p90, p99 and longest, in tokens, and documents per power of two: {upper edge: documents}."""
    table: dict[str, Any] = {
        f"p{percent}": int(np.percentile(lengths, percent, method="higher")) for percent in PERCENTILES
    }
    edges = 1 << np.arange(int(np.ceil(np.log2(max(int(lengths.min()), 1)))), int(lengths.max()).bit_length() + 1)
    number = np.searchsorted(edges, lengths)
    return table | {"max": int(lengths.max()), "histogram": dict(zip(edges.tolist(), np.bincount(number).tolist()))}
