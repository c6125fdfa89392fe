"""Rows that are tokenised when they are read: of a data set that is too large to store once more, only lengths are kept.

1. Tasks of Ray tokenise all rows, a run of rows at a time, and send back lengths and label counts; the tokens are dropped.
   With a cache folder this is done once for the same rows and tokenizer.
2. From then on everything is known that global batches and plans are made from, so both loaders work as they do with
   stored documents: the same steps, policies for long documents, mixtures, and exact resuming.
3. Whoever reads a document tokenises its row again: a document server, or the local loader. What several ranks of a server
   share is tokenised once.

Tokenising is a function of the row, so a second time gives the same tokens; where it does not, reading says so.
"""

import json
import threading
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import numpy as np
import ray
from ray.exceptions import RayError

from hf_longctx.data.length_index import IGNORE_INDEX, LengthIndex, is_stored
from hf_longctx.data.remote.cluster import RemoteError, cause_of, connect
from hf_longctx.data.tokenisation import EMPTY, Tokenisation
from hf_longctx.whole_files import built_whole

ROWS_PER_TASK = 1000
"""A task costs about a millisecond, tokenising a thousand short rows a hundred."""
ROWS_AT_ONCE = 100
"""Tokenised by one call of the tokenizer: what a task holds in memory."""
KEPT_BYTES = 64 << 20
"""Bytes of tokens that a process keeps for the next rank: a document of 2M tokens with its labels takes 16 MB."""
NAMED_ROWS = 3
"""Bad rows that a message names."""

Refusal = tuple[int, str]
"""Row, and why it is no document."""


@dataclass(frozen=True)
class Measured:
    """Rows [begin, begin + n)."""

    begin: int
    lengths: np.ndarray
    """int64 [n]: tokens; 0 of a row that is no document"""
    label_tokens: np.ndarray
    """int64 [n]"""
    refused: list[Refusal]


def measure(rows: Any, tokenisation: Tokenisation, begin: int, stop: int) -> Measured:
    """Lengths of rows [begin, stop)."""
    lengths, label_tokens = np.zeros((2, stop - begin), np.int64)
    refused: list[Refusal] = []
    for first in range(begin, stop, ROWS_AT_ONCE):
        batch = range(first, min(first + ROWS_AT_ONCE, stop))
        for row, document in zip(batch, tokenisation([rows[number] for number in batch]), strict=True):
            if isinstance(document, str):
                refused.append((row, document))
                continue
            labels = document.input_ids if document.labels is None else document.labels
            lengths[row - begin] = len(document.input_ids)
            label_tokens[row - begin] = np.count_nonzero(labels[1:] != IGNORE_INDEX)
    return Measured(begin, lengths, label_tokens, refused)


class RawDocuments:
    """A data set of documents, each tokenised from its row when it is read. Can be pickled, if rows and tokenizer can.

    Args:
        rows: anything with len() and integer indexing that gives mappings, such as a `datasets.Dataset`.
        tokenisation: what makes documents of them.
        index: lengths of all rows; rows that are no documents have length 0.
    """

    def __init__(self, rows: Any, tokenisation: Tokenisation, index: LengthIndex) -> None:
        self.rows, self.tokenisation, self.index = rows, tokenisation, index
        self._forget()

    @property
    def data_version(self) -> int:
        """version of the documents (data/tokenisation.py)"""
        return self.tokenisation.version

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, document: int) -> dict[str, np.ndarray]:
        """int32 [T] each: `input_ids`, and `labels` where not every token is learned."""
        with self._lock:  # a tokenizer serves one thread at a time
            if document not in self._kept:
                [made] = self.tokenisation([self.rows[document]])
                if isinstance(made, str):
                    raise ValueError(
                        f"row {document} is no document: {made}. When lengths were measured it was one of "
                        f"{self.index.lengths[document]} tokens: rows must stay as they are"
                    )
                read = {"input_ids": made.input_ids} | ({} if made.labels is None else {"labels": made.labels})
                self._kept[document] = read
                self._kept_bytes += sum(column.nbytes for column in read.values())
                while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
                    self._kept_bytes -= sum(column.nbytes for column in self._kept.popitem(last=False)[1].values())
            return self._kept[document]

    def _forget(self) -> None:
        self._kept: OrderedDict[int, dict[str, np.ndarray]] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": self.rows, "tokenisation": self.tokenisation, "index": self.index}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()


def raw_documents(
    rows: Any,
    tokenisation: Tokenisation,
    *,
    bad_rows: Literal["error", "skip"] = "error",
    workers: int = 1,
    cache_dir: str | Path | None = None,
    ray_address: str | None = None,
) -> RawDocuments:
    """Measures all rows through Ray, which is started or joined (cluster.py), unless the lengths are in the cache.

    Args:
        rows, tokenisation: as for RawDocuments.
        bad_rows: what becomes of rows that cannot be tokenised: an error; or they are left out and counted, as rows that
            only have nothing to learn always are.
        workers: tasks at a time.
        cache_dir: where lengths of a `datasets.Dataset` are kept; None: they are measured each time.
        ray_address: of `connect`.

    Raises:
        ValueError: a row is bad and `bad_rows` is "error"; no row is a document; what the tokenisation refuses.
        RemoteError: a task died, and again when it was repeated.
    """
    tokenisation.warn_of_missing_end()
    identity = rows._fingerprint if is_stored(rows) else None
    content = blake2b(f"{identity} {len(rows)} {tokenisation.fingerprint}".encode(), digest_size=16).hexdigest()
    if cache_dir is None or identity is None:
        measured = _measured(rows, tokenisation, workers, ray_address)
    else:
        folder = Path(cache_dir) / "lengths" / content
        if not folder.is_dir():
            with built_whole(folder) as partial:
                _save(_measured(rows, tokenisation, workers, ray_address), partial)
        measured = _load(folder)
    bad = [refusal for refusal in measured.refused if not refusal[1].startswith(EMPTY)]
    if bad:
        named = "; ".join(f"row {row}: {reason}" for row, reason in bad[:NAMED_ROWS])
        message = (
            f"{len(bad)} of {len(rows)} rows cannot be tokenised: {named}{'; ...' if len(bad) > NAMED_ROWS else ''}"
        )
        if bad_rows == "error":
            raise ValueError(f"{message}. Valid: mend the rows, or bad_rows='skip', which leaves them out")
        warnings.warn(message, stacklevel=2)
    return RawDocuments(rows, tokenisation, LengthIndex(measured.lengths, measured.label_tokens, content))


def _measured(rows: Any, tokenisation: Tokenisation, workers: int, ray_address: str | None) -> Measured:
    connect(ray_address)
    lengths, label_tokens = np.zeros((2, len(rows)), np.int64)
    refused: list[Refusal] = []
    for part in _parts(rows, tokenisation, workers):
        place = slice(part.begin, part.begin + len(part.lengths))
        lengths[place], label_tokens[place] = part.lengths, part.label_tokens
        refused += part.refused
    return Measured(0, lengths, label_tokens, sorted(refused))


def _parts(rows: Any, tokenisation: Tokenisation, workers: int) -> Iterator[Measured]:
    """Yield parts as they come; at most `workers` are under way."""
    task: Any = ray.remote(measure).options(num_cpus=0, scheduling_strategy="SPREAD")
    sent = ray.put(rows), ray.put(tokenisation)
    begins = iter(range(0, len(rows), ROWS_PER_TASK))
    under_way: dict[Any, int] = {}
    while True:
        while len(under_way) < workers and (begin := next(begins, None)) is not None:
            under_way[task.remote(*sent, begin, min(begin + ROWS_PER_TASK, len(rows)))] = begin
        if not under_way:
            return
        [done], _ = ray.wait(list(under_way))
        begin = under_way.pop(done)
        try:
            yield ray.get(done)
        except RayError as error:
            cause = cause_of(error)
            if not isinstance(cause, RayError):
                raise cause from error
            raise RemoteError(f"rows {begin} to {begin + ROWS_PER_TASK - 1} could not be measured: {error}") from error


def _save(measured: Measured, folder: Path) -> None:
    np.savez(folder / "lengths.npz", lengths=measured.lengths, label_tokens=measured.label_tokens)
    (folder / "refused.json").write_text(json.dumps(measured.refused))


def _load(folder: Path) -> Measured:
    with np.load(folder / "lengths.npz") as columns:
        refused = [(row, reason) for row, reason in json.loads((folder / "refused.json").read_text())]
        return Measured(0, columns["lengths"], columns["label_tokens"], refused)
