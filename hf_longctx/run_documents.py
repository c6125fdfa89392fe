"""From a configuration's sections `data` and `model` to data sets and tokenizers: what verbs and `scripts/train.py` share.

A data set that is tokenised already (by `save_to_disk`, or by `hf-longctx prepare`) is used where it lies. Everything else
is prepared in the cache, once for each content and tokenizer (data/prepare.py). Nothing is sent between ranks.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import starmap
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from transformers import AutoTokenizer

from hf_longctx.data.cache import default_cache_dir, naming_cache
from hf_longctx.data.chats.shipped_templates import prepare_tokenizer
from hf_longctx.data.embedded.embedded_corpus import prepare_corpus
from hf_longctx.data.embedded.embedded_model import prepare_model
from hf_longctx.data.formats import RowFormat
from hf_longctx.data.holding_out import part_of
from hf_longctx.data.masks import refuse_partial_masks
from hf_longctx.data.prepare import Part, Progress, prepare
from hf_longctx.data.prepared import INDEX, Manifest, compare_tokenizer, load_prepared
from hf_longctx.data.reading.source import Source
from hf_longctx.data.tokenisation import VERSION, Tokenisation
from hf_longctx.settings import ANY_SPLIT, EMBEDDED_DATA, EMBEDDED_MODEL, DataConfig, ModelConfig, SourceSection
from hf_longctx.settings.data import HELD_OUT, is_saved, no_split

TOKENS = "input_ids"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "*.tiktoken",
    "vocab.*",
    "spiece.model",
)
"""One of these is in every folder with a tokenizer."""


def model_directory(path: str | None) -> str | None:
    """Return where a model's files are: the embedded one is made, anything else is a directory or a hub id already; None for
    a new model, which has none."""
    if path != EMBEDDED_MODEL:
        return path
    cache = default_cache_dir()
    with naming_cache(cache):
        return str(prepare_model(cache))


def has_tokenizer(path: str) -> bool:
    """Return whether a model has a tokenizer. A folder without one is that of a model that was trained on tokens; a hub's model
    is taken to have one."""
    return not Path(path).is_dir() or any(next(Path(path).glob(name), None) for name in TOKENIZER_FILES)


def load_tokenizer(path: str | None, *, trust_remote_code: bool = False) -> Any:
    """Load transformers' tokenizer of a model, embedded:smollm2-135m included; None where it has none: a new model, or one that
    was trained on tokens.

    Raises:
        ValueError: its files cannot be read.
    """
    directory = model_directory(path)
    if directory is None or not has_tokenizer(directory):
        return None
    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        problem = " ".join(str(error).split())
        raise ValueError(f"the tokenizer of {path!r} cannot be loaded: {problem}") from error


def tokenizer_of(model: ModelConfig) -> Any:
    """Load the tokenizer that a configuration trains with, with its chat template and tokens; None where the model has none.

    Raises:
        ValueError: its files cannot be read, or the tokens that are asked for are none.
    """
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    if tokenizer is None:
        return None
    return prepare_tokenizer(
        tokenizer,
        chat_template=model.chat_template,
        added_tokens=model.added_tokens or (),
        eos_token=model.eos_token,
    )


def load_split(
    data: DataConfig,
    split: str,
    tokenizer: Any,
    *,
    output: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    ray_address: str | None = None,
    prepared: Path | None = None,
    version: int = VERSION,
) -> Any:
    """Load the documents of one split, tokenised, of all sources that have it: a `datasets.Dataset`, or with on_the_fly
    RawDocuments (data/remote/on_the_fly.py).

    Args:
        data: the configuration's section.
        split: its train_split or what it holds out (`DataConfig.held_out`).
        tokenizer: of transformers; None where documents are tokenised already.
        output: folder to prepare into, whether or not the documents could be used where they lie; None: the cache.
        on_progress: called while documents are prepared.
        ray_address: with on_the_fly, of the Ray that measures lengths; None: one is started.
        prepared: folder into which another process has prepared exactly this; nothing is read again.
        version: how documents are made (data/tokenisation.py): that of the run that is resumed.

    Raises:
        ValueError: what is there cannot be read or tokenised; says where, why and what would be valid.
    """
    if data.eval_fraction is not None and split in (data.train_split, HELD_OUT):
        whole = data.model_copy(update={"eval_fraction": None})
        settings: dict[str, Any] = {"ray_address": ray_address, "prepared": prepared, "version": version}
        dataset = load_split(whole, data.train_split, tokenizer, output=output, on_progress=on_progress, **settings)
        return part_of(dataset, data.eval_fraction, held_out=split == HELD_OUT)
    sources = data.sources_of(split)
    if not sources:
        raise ValueError(no_split(split, data.all_sources))
    if data.on_the_fly and output is not None:
        raise ValueError(f"output={str(output)!r} with on_the_fly, which prepares nothing: remove one of them")
    if data.on_the_fly:
        return _raw(data, *sources[0], _tokenisation(sources[0][0], tokenizer, version), ray_address)
    if prepared is None:
        for folder in filter(None, starmap(prepared_folder, sources)):
            compare_tokenizer(folder, tokenizer)
    weights = tuple(tuple(section.weight) for section, _ in sources) if split == data.train_split else ()
    if (
        output is None
        and (alone := _alone(data, split)) is not None
        and (in_place := _in_place(*alone, skips=data.bad_rows == "skip"))
    ):
        return in_place
    if prepared is None:
        cache = default_cache_dir()
        with naming_cache(cache) if output is None else nullcontext():
            prepared = prepare(
                [_part(section, name, _tokenisation(section, tokenizer, version)) for section, name in sources],
                cache,
                bad_rows=data.bad_rows,
                workers=data.workers,
                output=output,
                on_progress=on_progress,
            )
    dataset = load_prepared(prepared)
    dataset.data_version, dataset.compared = version, True
    if set(weights) - {(1.0,)}:
        dataset.weights = weights
    return dataset


def _alone(data: DataConfig, split: str) -> tuple[SourceSection, str] | None:
    """Return the only source of a split and what it calls that, if each of its documents is seen once in an epoch; None: they
    are prepared, to be mixed."""
    sources = data.sources_of(split)
    once = len(sources) == 1 and (split != data.train_split or tuple(sources[0][0].weight) == (1.0,))
    return sources[0] if once else None


def _in_place(section: SourceSection, split: str, *, skips: bool) -> Dataset | None:
    """Load a data set that needs no preparation; None: it does, as where bad rows are to be left out (`skips`)."""
    if not _may_be_in_place(section):
        return None
    directory = _directory(str(section.path))
    prepared = _prepared_in(directory, split)
    if prepared is None:
        return None if skips else _tokenised_in(section, directory, split)
    dataset = load_prepared(prepared)
    dataset.compared = True
    return dataset


def _may_be_in_place(section: SourceSection) -> bool:
    limited = section.max_documents or section.max_tokens
    return isinstance(section.path, str) and not limited and section.documents == "rows"


def prepared_folder(section: SourceSection, split: str) -> Path | None:
    """Return the folder that `prepare` made of a source's split; None: the source is something else."""
    if not isinstance(section.path, str) or section.path == EMBEDDED_DATA or section.documents != "rows":
        return None
    return _prepared_in(Path(section.path).expanduser(), split)


def _prepared_in(directory: Path, split: str) -> Path | None:
    return next((folder for folder in (directory, directory / split) if (folder / INDEX).is_file()), None)


def _tokenised_in(section: SourceSection, directory: Path, split: str) -> Dataset | None:
    """Open what `save_to_disk` wrote, if its rows are tokens; no row is read."""
    if not is_saved(directory):
        return None
    loaded = load_from_disk(str(directory))
    dataset = loaded[split] if isinstance(loaded, DatasetDict) else loaded
    as_tokens = section.kind in ("auto", "tokens") and not section.columns
    return dataset if as_tokens and TOKENS in dataset.column_names else None


def saved_problems(data: DataConfig) -> Iterator[tuple[int, str]]:
    """Yield the sources, by number, that are used where they lie and cannot be: files are missing, or columns are masks without
    labels, as far as their names say it. No row is read: values are checked by the dry run and the trainer (data/masks.py),
    rows that are prepared one by one."""
    for split in () if data.on_the_fly else dict.fromkeys(filter(None, (data.train_split, data.eval_split))):
        if (alone := _alone(data, split)) is None:
            continue
        section, name = alone
        if not _may_be_in_place(section) or not is_saved(directory := Path(str(section.path))):
            continue
        if _prepared_in(directory, name) is not None:
            continue
        try:
            dataset = _tokenised_in(section, directory, name)
            refuse_partial_masks(dataset.column_names if dataset is not None else ())
        except (OSError, ValueError) as error:
            yield data.all_sources.index(section), f"{section.path!r}: {error}"
            return


def _raw(
    data: DataConfig, section: SourceSection, split: str, tokenisation: Tokenisation, ray_address: str | None
) -> Any:
    """Load rows that are tokenised when they are read. The first process of a machine measures them, the others find it done."""
    from hf_longctx.data.remote.on_the_fly import raw_documents

    if not isinstance(section.path, str):
        raise ValueError(f"on_the_fly reads a saved or a hub's data set, got files: {section.path}")
    if is_saved(Path(section.path)):
        loaded = load_from_disk(section.path)
        rows = loaded[split] if isinstance(loaded, DatasetDict) else loaded
    else:
        rows = load_dataset(section.path, section.subset, split=split)
    if section.max_documents is not None:
        rows = rows.select(range(min(section.max_documents, len(rows))))
    return raw_documents(
        rows,
        tokenisation,
        bad_rows=data.bad_rows,
        workers=data.workers or len(os.sched_getaffinity(0)),
        cache_dir=default_cache_dir(),
        ray_address=ray_address,
    )


def source_of(section: SourceSection, split: str) -> Source:
    """Return where the rows of a source's split come from."""
    path: Any = section.path
    if isinstance(path, dict):
        path = tuple(path.get(split) or path[ANY_SPLIT])
    else:
        path = str(_directory(path)) if path == EMBEDDED_DATA else path
    name = section.name or ", ".join([path] if isinstance(path, str) else path)
    return Source(path, name, section.subset, split, section.documents, section.pattern)


def _part(section: SourceSection, split: str, tokenisation: Tokenisation) -> Part:
    folder = prepared_folder(section, split)
    records = Manifest.read(folder).tokenizers if folder is not None else None
    rendered = any(record.template is not None for record in records or ())
    return Part(source_of(section, split), tokenisation, section.max_documents, section.max_tokens, rendered)


def _tokenisation(section: SourceSection, tokenizer: Any, version: int) -> Tokenisation:
    text_column = section.text_column or "text"
    return Tokenisation(
        *(tokenizer, section.kind, text_column, section.train_on, section.add_eos, version),
        format=RowFormat(section.columns or {}, section.roles or {}),
    )


def _directory(path: str) -> Path:
    if path != EMBEDDED_DATA:
        return Path(path)
    cache = default_cache_dir()
    with naming_cache(cache):
        return prepare_corpus(cache, prepare_model(cache))
