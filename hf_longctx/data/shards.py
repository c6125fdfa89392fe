"""One unit of a source -> a shard: its documents, tokenised, in an Arrow file, with an index of their lengths.

Both files are named after a hash of what the unit holds and how it is tokenised, so a shard is never stale and is made
once. The index is written last: a shard without one was interrupted, and is made again. Nothing is sent between ranks.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hf_longctx.data.length_index import IGNORE_INDEX
from hf_longctx.data.reading.rows import Refused, Row
from hf_longctx.data.reading.source import SourceError, Unit
from hf_longctx.data.tokenisation import EMPTY, Document, Tokenisation
from hf_longctx.whole_files import written_whole

FORMAT = 5
"""Counts changes of what a shard holds."""

BATCH_CHARACTERS = 1 << 21
"""Characters of the rows that a tokenizer gets at once, which its threads share."""
BATCH_ROWS = 1000


@dataclass(frozen=True)
class Shard:
    """Documents of one unit, and what is known of them."""

    path: Path
    """Arrow stream with the column `input_ids`, lists of int32; and `labels`, where not every token is learned"""
    lengths: np.ndarray
    """int64 [documents]"""
    label_tokens: np.ndarray
    """int64 [documents]"""
    refused: tuple[tuple[str, str, int | None], ...]
    """place, reason and number of rows that are no documents; None: unknown, the rest of a file"""
    largest_id: int
    """of all tokens; -1 without any"""
    labels: bool
    """whether it has a column `labels`"""
    unit: str
    """whose name it had when it was read"""
    bytes: int
    """of the file"""
    rendered: bool
    """whether a chat template decided tokens of it"""

    @property
    def is_whole(self) -> bool:
        return self.path.is_file() and self.path.stat().st_size == self.bytes

    @property
    def bad(self) -> list[tuple[str, str, int | None]]:
        """Refused rows, but for those that only have nothing to learn."""
        return [refusal for refusal in self.refused if not refusal[1].startswith(EMPTY)]

    @classmethod
    def read(cls, path: Path) -> "Shard | None":
        """Return the shard in a file, or None if it was never finished or its index is damaged."""
        try:
            with pa.OSFile(str(_index_of(path))) as file, pa.ipc.open_file(file) as reader:
                table = reader.read_all()
            facts = json.loads(table.schema.metadata[b"hf_longctx"])
            refused = tuple((place, reason, rows) for place, reason, rows in facts["refused"])
            lengths, label_tokens = (table[name].to_numpy() for name in ("length", "label_tokens"))
            return cls(
                path,
                lengths,
                label_tokens,
                refused,
                facts["largest_id"],
                facts["labels"],
                facts["unit"],
                facts["bytes"],
                facts.get("rendered", facts["labels"]),  # a shard older than this: most conversations have labels
            )
        except (OSError, pa.ArrowInvalid, KeyError, TypeError, ValueError):
            return None

    def finish(self) -> None:
        """Writes the index."""
        names = ("refused", "largest_id", "labels", "unit", "bytes", "rendered")
        facts = json.dumps({name: getattr(self, name) for name in names})
        table = pa.table({"length": self.lengths, "label_tokens": self.label_tokens})
        write_table(table.replace_schema_metadata({"hf_longctx": facts}), _index_of(self.path))


def shard_of(unit: Unit, tokenisation: Tokenisation, folder: Path) -> Shard:
    """The shard of one unit: found in `folder`, or made there.

    Raises:
        SourceError: the unit cannot be read, or changed while it was read.
    """
    content = unit.fingerprint()
    key = hashlib.blake2b(f"{FORMAT} {content} {tokenisation.fingerprint}".encode(), digest_size=16).hexdigest()
    path = folder / f"{key}.arrow"
    cached = Shard.read(path)
    if (
        cached is not None and cached.is_whole and (not cached.refused or cached.unit == str(unit))
    ):  # places of refused rows name files
        return cached
    with written_whole(path) as partial:
        try:
            shard = _tokenised(unit, tokenisation, path, partial)
        except _LabelsNeeded:
            shard = _tokenised(unit, tokenisation, path, partial, with_labels=True)
        if unit.fingerprint() != content:
            raise SourceError(f"{unit} changed while it was read. Prepare it once nothing writes to it any more")
        partial.chmod(
            partial.stat().st_mode & 0o444
        )  # prepared folders are links to it, and would change with each other
    shard.finish()
    return shard


class _LabelsNeeded(Exception):
    """Not every token is learned, but in the first batch every one was."""


def _tokenised(
    unit: Unit, tokenisation: Tokenisation, path: Path, partial: Path, *, with_labels: bool = False
) -> Shard:
    lengths, label_tokens = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    refused: list[tuple[str, str, int | None]] = []
    largest, rendered = -1, False
    batches = _documents(unit, tokenisation, refused)
    first = next(batches, [])
    with_labels = with_labels or _have_labels(first)
    schema = pa.schema([(name, pa.list_(pa.int32())) for name in ("input_ids", "labels")[: 1 + with_labels]])
    with pa.OSFile(str(partial), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        for documents in chain([first] if first else [], batches):
            if not with_labels and _have_labels(documents):
                raise _LabelsNeeded
            writer.write_batch(_record_batch(documents, schema))
            lengths.append(np.array([len(document.input_ids) for document in documents]))
            label_tokens.append(np.array([_label_tokens(document) for document in documents]))
            largest = max(largest, *map(_largest_id, documents))
            rendered = rendered or any(document.rendered for document in documents)
    counts = np.concatenate(lengths), np.concatenate(label_tokens)
    return Shard(path, *counts, tuple(refused), largest, with_labels, str(unit), partial.stat().st_size, rendered)


def _largest_id(document: Document) -> int:
    """Return the largest of a document's tokens and labels, which a model's vocabulary must hold."""
    columns = [document.input_ids] if document.labels is None else [document.input_ids, document.labels]
    return max(int(column.max()) for column in columns)


def _documents(
    unit: Unit, tokenisation: Tokenisation, refused: list[tuple[str, str, int | None]]
) -> Iterator[list[Document]]:
    """Batches of documents, none of them empty; rows that are no document are added to `refused`."""
    for batch in _batches(unit.rows()):
        documents = []
        made = iter(tokenisation([row.values for row in batch if isinstance(row, Row)]))
        for row in batch:
            if isinstance(row, Refused):
                refused.append((str(row.place), row.reason, row.rows))
            elif isinstance(document := next(made), str):
                refused.append((str(row.place), document, 1))
            else:
                documents.append(document)
        if documents:
            yield documents


def _have_labels(documents: list[Document]) -> bool:
    return any(document.labels is not None for document in documents)


def _batches(rows: Iterable[Row | Refused]) -> Iterator[list[Row | Refused]]:
    batch: list[Row | Refused] = []
    size = 0
    for row in rows:
        batch.append(row)
        if isinstance(row, Row):
            size += _size(row.values)
        if size >= BATCH_CHARACTERS or len(batch) == BATCH_ROWS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _size(value: Any) -> int:
    """About how much a row holds: characters of texts, elements of arrays."""
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, list) and value and isinstance(value[0], dict | str):
        return sum(map(_size, value))
    return len(value) if hasattr(value, "__len__") else 1


def _record_batch(documents: list[Document], schema: pa.Schema) -> pa.RecordBatch:
    offsets = pa.array(np.cumsum([0, *(len(document.input_ids) for document in documents)]), pa.int32())
    columns = [np.concatenate([document.input_ids for document in documents])]
    if "labels" in schema.names:
        labels = (document.input_ids if document.labels is None else document.labels for document in documents)
        columns.append(np.concatenate(list(labels)))
    return pa.record_batch([pa.ListArray.from_arrays(offsets, pa.array(column)) for column in columns], schema=schema)


def _label_tokens(document: Document) -> int:
    if document.labels is None:
        return len(document.input_ids) - 1
    return int(np.count_nonzero(document.labels[1:] != IGNORE_INDEX))


def write_table(table: pa.Table, path: Path) -> None:
    """Writes an Arrow file that appears whole."""
    with (
        written_whole(path) as partial,
        pa.OSFile(str(partial), "wb") as file,
        pa.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table)


def _index_of(shard: Path) -> Path:
    return shard.with_suffix(".index")
