"""The documents that `hf-longctx evaluate` measures losses of: which they are, and what is said of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SHORTEST_TEXT = 1024
"""Tokens of the longest embedded document, at least."""
TRAINED_TOKENS = 65536
"""Most tokens of trained documents that are evaluated where none were held out: there may be any number of them."""


def data_of(model: str) -> str:
    """Name the documents that a model is measured on: its run's, else embedded ones."""
    from hf_longctx.report.training_runs.run_record import RUN, read_record
    from hf_longctx.settings import EMBEDDED_DATA

    if not (Path(model) / RUN).is_file():
        return EMBEDDED_DATA
    data = (read_record(Path(model))["configuration"] or {}).get("data")
    return str(Path(model) / RUN) if data else EMBEDDED_DATA


def read_rows(data: str, split: str | None, longest: int, tokenizer: Any) -> Any:
    """Read the documents that --data and --split name: rows with input_ids.

    Args:
        longest: tokens of the longest text that is asked for; embedded documents are as long.

    Raises:
        ValueError: there is nothing of the kind, or it cannot be read.
    """
    from pydantic import ValidationError

    from hf_longctx.data.cache import default_cache_dir
    from hf_longctx.inference.evaluation.texts import embedded_texts
    from hf_longctx.run_documents import load_split
    from hf_longctx.settings import EMBEDDED_DATA, DataConfig
    from hf_longctx.settings.fields import broken_rules

    if data == EMBEDDED_DATA and split is None:
        return embedded_texts(tokenizer, default_cache_dir(), max(SHORTEST_TEXT, longest))
    if (section := _section_of(data)) is not None:
        rows = load_split(section, split or section.held_out or section.train_split, tokenizer)
        return rows if split or section.held_out else drawn(rows, TRAINED_TOKENS)
    try:
        section = DataConfig(path=data, train_split=split or "train")
    except ValidationError as error:
        rules = broken_rules(error)
        raise ValueError(f"--data {data!r} must be a run's YAML file, or documents. As documents: {rules}") from None
    known = section.all_sources[0].splits or []
    return load_split(section, split or ("test" if "test" in known else "train"), tokenizer)


def drawn(rows: Any, tokens: int) -> list[Any]:
    """Return rows in a random order, always the same, until they have so many tokens; at least one."""
    import numpy as np

    chosen: list[Any] = []
    for number in np.random.default_rng(0).permutation(len(rows)).tolist():
        chosen.append(rows[number])
        tokens -= len(chosen[-1]["input_ids"])
        if tokens <= 0:
            break
    return chosen


def _section_of(data: str) -> Any:
    """Read the section `data` of a YAML file or of a run's record; None: --data names documents.

    Raises:
        ValueError: the files of a run are not here any more.
    """
    from pydantic import ValidationError

    from hf_longctx.config import load_config
    from hf_longctx.report.training_runs.run_record import RUN, read_record
    from hf_longctx.settings import DataConfig
    from hf_longctx.settings.fields import broken_rules

    path = Path(data)
    if path.suffix in (".yaml", ".yml"):
        return load_config(path).data
    if path.name != RUN:
        return None
    try:
        return DataConfig(**(read_record(path.parent)["configuration"] or {}).get("data", {}))
    except ValidationError as error:
        rules = broken_rules(error)
        raise ValueError(
            f"the documents of the run {path.parent} are not here: {rules}. Valid: --data names others"
        ) from None


def described(data: str, split: str | None) -> str:
    """Say which documents losses are of, and where they are what a model was trained on."""
    from hf_longctx.report.training_runs.run_record import RUN

    section = _section_of(data)
    if section is None or split is not None:
        return f"{data}, {split}" if split else data
    path = Path(data)
    owner = f"the run {path.parent}" if path.name == RUN else str(path)
    if section.held_out is not None:
        return f"what {owner} holds out"
    return (
        f"some of {section.train_split} of {owner}, which holds nothing out: what it trains on, where losses are lower than on "
        "other documents. For others: --data, or data.eval_fraction in its configuration"
    )
