"""Defaults of `init`: this machine's devices, a file named after the model, and what the data are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_longctx.data.reading.rows import Refused, Row
    from hf_longctx.data.reading.source import Source

LOOKED_AT = 1000
"""Documents of a data set that are looked at."""
STEPS = 20
"""Optimizer steps that an epoch of few documents has at least, if their lengths allow."""
UNKNOWN_GPU = "a100"
"""Speeds that a GPU without a preset is planned with, as in training."""


@dataclass(frozen=True)
class Machine:
    """The devices that are planned for."""

    device: str
    gpus: int
    per_node: int
    memory: float | None
    """GiB of one, where its preset does not say"""
    note: str = ""
    """how they were found; "" where all was given"""


def machine(device: str | None, gpus: int | None, per_node: int | None, memory: float | None) -> Machine:
    """Return the devices as they were given, and this machine's for what was not.

    Raises:
        ValueError: so many devices are no whole machines.
    """
    from hf_longctx.hardware.devices import CPU_DEVICES, preset_of

    description = ""
    if device is None and gpus is None:
        import torch

        count = torch.cuda.device_count()
        if count:
            name = torch.cuda.get_device_name(0)
            preset = preset_of(name)
            device, gpus = preset.name if preset else UNKNOWN_GPU, count
            if preset is None and memory is None:
                memory = torch.cuda.get_device_properties(0).total_memory / 2**30
            description = f"this machine: {count} x {name}"
        else:
            device, gpus, description = (
                "cpu",
                1,
                "this machine: its processors, for it has no GPU (--gpus and --device name others)",
            )
        per_node = per_node or gpus
    device, gpus = device or "h100", gpus or 1
    if per_node is None:
        per_node = gpus if device in CPU_DEVICES else 8
    return Machine(device, gpus, per_node, memory, description)


def file_of(model: str) -> Path:
    """Name the file of a model: llama-3.1-8b.yaml of meta-llama/Llama-3.1-8B."""
    name = re.sub(r"[^a-z0-9.]+", "-", model.rstrip("/").rsplit("/", 1)[-1].rsplit(":", 1)[-1].lower()).strip("-.")
    return Path(f"{name or 'run'}.yaml")


@dataclass(frozen=True)
class Documents:
    """Documents that lie here, as far as they were looked at."""

    kind: str = ""
    """of their rows; "" where it is not known"""
    line: str = ""
    """about them"""
    step: int | None = None
    """most tokens of an optimizer step that leave STEPS to an epoch, or those of the longest document; None: there are many, or
    it is not known"""


def look_at(data: str, model: str) -> Documents:
    """Look at the first documents that lie here.

    Args:
        data: as in `data.path`.
        model: whose tokenizer counts.

    Raises:
        ValueError: they cannot be read, or hold nothing that can be trained on.
    """
    from pydantic import ValidationError

    from hf_longctx.data.tokenisation import Tokenisation
    from hf_longctx.run_documents import load_tokenizer, source_of
    from hf_longctx.settings import DataConfig
    from hf_longctx.settings.data import names_a_hub

    if names_a_hub(data) and not Path(data).exists():
        return Documents(line=f"{data} is on a hub, and is not looked at")
    try:
        section = DataConfig(path=data, max_documents=LOOKED_AT)
    except ValidationError:
        return Documents()  # the file that is written is checked as a whole, and says what is wrong
    source = source_of(section.all_sources[0], section.train_split)
    first = _first_row(source)
    tokenizer: Any = None
    if Path(model).is_dir() or model.startswith("embedded:"):
        tokenizer = load_tokenizer(model)
    if tokenizer is None and "input_ids" not in first.values:
        columns = ", ".join(first.values)
        return Documents(
            line=f"{data} has the columns {columns}; lengths take the tokenizer of {model}, which is not here"
        )
    return _counted(section, tokenizer, Tokenisation(tokenizer).kind_of(first.values))


def _first_row(source: Source) -> Row:
    """Return the first row that can be read. Raises ValueError, with the reason of the first that cannot, where none can."""
    from hf_longctx.data.reading.rows import Row

    refused: Refused | None = None
    for row in chain.from_iterable(unit.rows() for unit in source.units()):
        if isinstance(row, Row):
            return row
        refused = refused or row
    raise ValueError(f"none of its rows can be read: {refused}" if refused else "it holds no row")


def _counted(section: Any, tokenizer: Any, kind: str) -> Documents:
    from hf_longctx.data.length_index import LengthIndex
    from hf_longctx.data.prepared import length_table
    from hf_longctx.run_documents import load_split

    index = LengthIndex.from_dataset(load_split(section, section.train_split, tokenizer))
    table = length_table(index.lengths)
    all_of_them = len(index) < LOOKED_AT
    first = f"{len(index):,}" if all_of_them else f"the first {LOOKED_AT:,}"
    line = f"{kind}: {first} documents, p50 {table['p50']:,} tokens, p99 {table['p99']:,}, longest {table['max']:,}"
    step = max(int(index.lengths.sum()) // STEPS, int(index.lengths.max())) if all_of_them else None
    return Documents(kind, line, step)
