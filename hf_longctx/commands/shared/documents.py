"""DATA on the command line -> documents to plan with.

github, agent_trajectories, ...        a distribution (simulator/lengths.py): as many documents are drawn as the steps need
embedded:python-sources                source files of the installed Python packages
FILE.npy, FILE.txt                     lengths in tokens: an array, or one on each line
anything else                          what `data.path` of a configuration may name: directories, files, a hub's data set;
                                       tokenised, or text and --text-column
"""

import warnings
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

import numpy as np
from datasets.exceptions import DatasetsError
from pydantic import ValidationError

from hf_longctx.data.length_index import LengthIndex
from hf_longctx.data.long_documents import Pieces, cut_documents
from hf_longctx.settings import DataConfig
from hf_longctx.settings.fields import MOST_TOKENS, broken_rules
from hf_longctx.simulator.lengths import DISTRIBUTIONS, distribution_name, draw, draw_tokens

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
        """Return what would be trained on: data/long_documents.py."""
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
    model: str | None = None,
) -> Source:
    """The documents that `data` names, see above.

    Args:
        data: as on the command line.
        wanted: how many documents, or how many tokens, are drawn of a distribution.
        seed: of a distribution.
        longest: of a distribution: what is drawn longer is truncated to so many tokens, and the source's name says so.
        split: of a data set.
        text_column: of documents that are texts.
        model: whose tokenizer texts and conversations are counted with; a preset of sizes has none, and the embedded model's
            is taken, which the source's name says. None: documents must be tokens.

    Raises:
        ValueError: there is nothing of the kind, or it cannot be read.
    """
    if (name := distribution_name(data)) is not None:
        if wanted.documents is not None:
            lengths = draw(name, wanted.documents, seed, longest)
        else:
            lengths = draw_tokens(name, wanted.tokens or 0, seed, longest)
        cut = longest < DISTRIBUTIONS[name].longest
        return _of_lengths(f"{name} up to {longest:,} tokens" if cut else name, lengths)
    path = Path(data)
    if path.is_file() and path.suffix in LENGTH_FILES and text_column is None:
        return _of_lengths(data, _lengths(path))
    from hf_longctx.run_documents import load_split

    try:
        section = DataConfig(path=data, train_split=split, text_column=text_column)
    except ValidationError as error:
        problems = broken_rules(error)
        raise ValueError(
            f"DATA is {data!r}; it must be a distribution ({', '.join(DISTRIBUTIONS)}), a file of lengths "
            f"({', '.join(LENGTH_FILES)}), or documents. As documents: {problems}"
        ) from None
    try:
        try:
            dataset, name = load_split(section, split, _prepared_for(section, split, model)), data
        except ValueError as error:
            if model is None or "needs a tokenizer" not in str(error):
                raise
            tokenizer, whose = _tokenizer(model)
            dataset, name = load_split(section, split, tokenizer), f"{data} in tokens of {whose}"
        return Source(name, dataset, LengthIndex.from_dataset(dataset))
    except (DatasetsError, TypeError, FileNotFoundError) as error:
        raise ValueError(f"{data} cannot be read: {error.__cause__ or error}") from error


def _tokenizer(model: str) -> tuple[Any, str]:
    """Return a model's tokenizer, and whose it is: the embedded model's for a preset, and for a well-known model whose own is not
    to be had here. Raises ValueError for any other model without one."""
    from hf_longctx.commands.shared.costs import published_id, read_tokenizer
    from hf_longctx.commands.shared.models import published_sizes
    from hf_longctx.hardware.published import ARCHITECTURES
    from hf_longctx.settings import EMBEDDED_MODEL

    if model not in ARCHITECTURES:
        whose = published_id(model)
        try:
            return read_tokenizer(whose), whose
        except ValueError:
            if published_sizes(whose) is None:
                raise
    return read_tokenizer(EMBEDDED_MODEL), EMBEDDED_MODEL


def _prepared_for(section: DataConfig, split: str, model: str | None) -> Any:
    """Load the tokenizer of a model that is here, to be compared with that of a prepared folder; None: there is nothing to
    compare, or nothing to compare with."""
    from hf_longctx.run_documents import load_tokenizer, prepared_folder
    from hf_longctx.settings import EMBEDDED_MODEL

    if not any(starmap(prepared_folder, section.sources_of(split))):
        return None
    return load_tokenizer(model) if model == EMBEDDED_MODEL or (model and Path(model).is_dir()) else None


def _of_lengths(name: str, lengths: np.ndarray) -> Source:
    return Source(name, OnlyLengths(), LengthIndex(lengths, np.maximum(lengths - 1, 0)))


def _lengths(path: Path) -> np.ndarray:
    """int64 [documents]"""
    rule = "it must hold one length in tokens per document: integers"
    try:
        is_array = path.suffix == ".npy"
        with warnings.catch_warnings(category=UserWarning, action="ignore"):  # numpy's, of an empty file
            lengths = np.load(path, allow_pickle=False) if is_array else _lines(path)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path}: {error}; {rule}, one on each line") from None
    if lengths.ndim != 1 or not lengths.size or not np.issubdtype(lengths.dtype, np.integer):
        raise ValueError(f"{path} holds {lengths.dtype} of shape {lengths.shape}; {rule}, at least one")
    wrong = np.flatnonzero((lengths < 0) | (lengths > MOST_TOKENS))
    if wrong.size:
        raise ValueError(f"{path}: document {wrong[0]} has {lengths[wrong[0]]} tokens; {rule}, 0 to {MOST_TOKENS}")
    return lengths.astype(np.int64)


def _lines(path: Path) -> np.ndarray:
    """int64 [lines], of a text that may begin with the mark of its encoding"""
    return np.loadtxt(path, dtype=np.int64, ndmin=1, encoding="utf-8-sig")
