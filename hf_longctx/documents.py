"""From a configuration's section `data` to data sets: what `hf-longctx prepare` and `scripts/train.py` share.

A data set that is tokenised already (by `save_to_disk`, or by `hf-longctx prepare`) is used where it lies. Everything else
is prepared in the cache, once for each content and tokenizer (data/prepare.py). Nothing is sent between ranks.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_from_disk

from hf_longctx.data.cache import default_cache_dir
from hf_longctx.data.embedded_corpus import prepare_corpus
from hf_longctx.data.embedded_model import prepare_model
from hf_longctx.data.prepare import Part, Progress, prepare
from hf_longctx.data.prepared import INDEX, load_prepared
from hf_longctx.data.reading.source import Source
from hf_longctx.data.tokenisation import Tokenisation
from hf_longctx.sections import ANY_SPLIT, EMBEDDED_DATA, DataConfig, SourceSection

TOKENS = "input_ids"


def load_split(
    data: DataConfig,
    split: str,
    tokenizer: Any,
    *,
    output: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Dataset:
    """The documents of one split, tokenised, of all sources that have it.

    Args:
        data: what the configuration says.
        split: its train_split or eval_split.
        tokenizer: of transformers; None where documents are tokenised already.
        output: folder to prepare into, whether or not the documents could be used where they lie; None: the cache.
        on_progress: called while documents are prepared.

    Raises:
        ValueError: what is there cannot be read or tokenised; says where, why and what would be valid.
    """
    sections = [each for each in data.all_sources if each.splits is None or {split, ANY_SPLIT} & set(each.splits)]
    if not sections:
        there = dict.fromkeys(repr(name) for each in data.all_sources for name in each.splits or [])
        raise ValueError(f"no source has the split {split!r}, only {', '.join(there)}")
    weights = tuple(tuple(section.weight) for section in sections) if split == data.train_split else ()
    if output is None and len(sections) == 1 and set(weights) <= {(1.0,)} and (found := _in_place(sections[0], split)):
        return found
    parts = [_part(section, split, tokenizer) for section in sections]
    workers, bad_rows = data.workers, data.bad_rows
    prepared = load_prepared(
        prepare(parts, default_cache_dir(), bad_rows=bad_rows, workers=workers, output=output, on_progress=on_progress)
    )
    if set(weights) - {(1.0,)}:
        prepared.weights = weights
    return prepared


def _in_place(section: SourceSection, split: str) -> Dataset | None:
    """A data set that needs no preparation; None: it does."""
    if not isinstance(section.path, str) or section.max_documents or section.max_tokens or section.documents != "rows":
        return None
    directory = _directory(section.path)
    for prepared in (directory, directory / split):
        if (prepared / INDEX).is_file():
            return load_prepared(prepared)
    if not ((directory / "dataset_dict.json").is_file() or (directory / "state.json").is_file()):
        return None
    loaded = load_from_disk(str(directory))
    found = loaded[split] if isinstance(loaded, DatasetDict) else loaded
    return found if section.kind in ("auto", "tokens") and TOKENS in found.column_names else None


def _part(section: SourceSection, split: str, tokenizer: Any) -> Part:
    path: Any = section.path
    if isinstance(path, dict):
        path = tuple(path.get(split) or path[ANY_SPLIT])
    else:
        path = str(_directory(path)) if path == EMBEDDED_DATA else path
    name = section.name or ", ".join([path] if isinstance(path, str) else path)
    source = Source(path, name, section.subset, split, section.documents, section.pattern)
    tokenisation = Tokenisation(tokenizer, section.kind, section.text_column or "text", section.train_on)
    return Part(source, tokenisation, section.max_documents, section.max_tokens)


def _directory(path: str) -> Path:
    if path != EMBEDDED_DATA:
        return Path(path)
    cache = default_cache_dir()
    return prepare_corpus(cache, prepare_model(cache))
