"""DATA on the command line -> documents to plan with.

github, byted, lognormal_pareto        a distribution: as many documents are drawn as the steps need
embedded:python-sources                source files of the installed Python packages
FILE.npy, FILE.txt                     lengths in tokens: an array, or one on each line
DIRECTORY                              written by `save_to_disk` of datasets
FILE.json, FILE.jsonl, FILE.parquet    documents: a column input_ids, or text and --text-column
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from datasets.exceptions import DatasetsError

from hf_longctx.config import EMBEDDED_DATA, FILE_KINDS
from hf_longctx.data.cache import default_cache_dir
from hf_longctx.data.length_index import LengthIndex
from hf_longctx.data.long_documents import Pieces, cut_documents
from hf_longctx.data.sources import load_splits
from hf_longctx.simulator.lengths import DISTRIBUTIONS, LONGEST, draw, draw_tokens

LENGTH_FILES = (".npy", ".txt")


@dataclass(frozen=True)
class Wanted:
    """How much a verb needs of a distribution: documents, or else most tokens."""

    documents: int | None
    tokens: int | None


@dataclass(frozen=True)
class Source:
    """Documents whose lengths are known."""

    name: str
    dataset: Any
    index: LengthIndex

    def pieces(self, policy: str, limit: int | None) -> Pieces:
        """What would be trained on: data/long_documents.py."""
        return cut_documents(self.dataset, self.index, policy, limit)


class OnlyLengths:
    """Stands for documents of which nothing but the length is known: every token but the first is a label."""

    def __getitem__(self, document: int) -> dict[str, Any]:
        return {}


def read_documents(
    data: str,
    wanted: Wanted,
    *,
    seed: int,
    longest: int,
    split: str = "train",
    text_column: str | None = None,
    tokenizer: Any = None,
) -> Source:
    """The documents that `data` names, see above.

    Args:
        data: as on the command line.
        wanted: how many documents, or how many tokens, are drawn of a distribution.
        seed: of a distribution.
        longest: of a distribution: what is drawn longer is truncated to so many tokens, and the source's name says so.
        split: of a data set.
        text_column: to tokenise with `tokenizer` (transformers).

    Raises:
        ValueError: there is nothing of the kind, or it cannot be read.
    """
    if data in DISTRIBUTIONS:
        if wanted.documents is not None:
            lengths = draw(data, wanted.documents, seed, longest)
        else:
            lengths = draw_tokens(data, wanted.tokens or 0, seed, longest)
        return _of_lengths(f"{data} up to {longest:,} tokens" if longest < LONGEST else data, lengths)
    if data == EMBEDDED_DATA:
        from hf_longctx.data.embedded_corpus import prepare_corpus
        from hf_longctx.data.embedded_model import prepare_model

        cache = default_cache_dir()
        dataset = load_splits(prepare_corpus(cache, prepare_model(cache)), [split])[split]
        return Source(data, dataset, LengthIndex.from_dataset(dataset))
    path = Path(data)
    if path.is_file() and path.suffix in LENGTH_FILES:
        return _of_lengths(data, _lengths(path))
    if not (path.is_dir() or (path.is_file() and path.suffix in FILE_KINDS)):
        raise ValueError(
            f"DATA is {data!r}; it must be a distribution ({', '.join(DISTRIBUTIONS)}), {EMBEDDED_DATA}, an existing directory "
            f"written by datasets, or an existing file that ends in {', '.join([*LENGTH_FILES, *FILE_KINDS])} (relative to "
            f"{Path.cwd()})"
        )
    try:
        files: Any = path if path.is_dir() else {split: [data]}
        dataset = load_splits(files, [split], text_column, tokenizer)[split]
        if "input_ids" not in dataset.column_names:
            raise ValueError(
                f"{data} has no column 'input_ids'; its columns are {', '.join(map(repr, dataset.column_names))}. Tokenise the "
                "documents first, or name the text with --text-column"
            )
        return Source(data, dataset, LengthIndex.from_dataset(dataset))
    except (DatasetsError, TypeError, FileNotFoundError) as error:
        raise ValueError(f"{data} cannot be read: {error.__cause__ or error}") from error


def _of_lengths(name: str, lengths: np.ndarray) -> Source:
    return Source(name, OnlyLengths(), LengthIndex(lengths, np.maximum(lengths - 1, 0)))


def _lengths(path: Path) -> np.ndarray:
    """int64 [documents]"""
    rule = "it must hold one length in tokens per document: integers"
    try:
        is_array = path.suffix == ".npy"
        lengths = np.load(path, allow_pickle=False) if is_array else np.loadtxt(path, dtype=np.int64, ndmin=1)
    except ValueError as error:
        raise ValueError(f"{path}: {error}; {rule}, one on each line") from None
    if lengths.ndim != 1 or not lengths.size or not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError(f"{path} holds {lengths.dtype} of shape {lengths.shape}; {rule}, at least one")
    return lengths.astype(np.int64)
