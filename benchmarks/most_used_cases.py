"""Families, documents and settings of most_used.py, and what a rank does with them."""

import dataclasses
import functools
from typing import Any

import numpy as np
import torch

from benchmarks.tiny_copies import configuration
from hf_longctx import patch_model
from hf_longctx.certificate import ordinary_tokens, tiny_configuration, tiny_model
from hf_longctx.certificate.field_kinds import Kind, kind_of
from hf_longctx.certificate.tiny_model import causal_lm_class
from hf_longctx.models.documents import documents_of
from tests.builders.training_runs import Rows, train

LENGTHS = (90, 7, 23, 44, 12, 60, 31, 5)
CAPACITY = {1: 96, 2: 48, 4: 24}
"""Ranks -> tokens of a rank; the longest document takes all ranks."""
WINDOWS = (7, 64)
"""Tokens: less, and more, than a rank's part of the longest document."""
SHARDINGS = ("ddp", "zero1", "zero3")
STEPS, DOCUMENTS_OF_A_STEP, SEED = 2, 4, 3
LEARNING_RATE = 1e-3
"""Adam's first step is as large where a gradient is nothing but rounding: with ten times as much, the norm of Qwen3.5's second
step moves by 1e-3, and its first one's by 1e-6."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A family as it is trained."""

    model_type: str
    window: int | None
    """One of WINDOWS; None: it has no windows."""
    ranks: int
    sharding: str

    @property
    def name(self) -> str:
        """Return the path of its figures."""
        window = f", window {self.window}" if self.window else ""
        return f"{self.model_type}{window}/{self.ranks} rank{'s' * (self.ranks > 1)}/{self.sharding}"


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a rank saw."""

    capped: bool
    """Whether documents are whole on a rank."""
    losses: list[float]
    norms: list[float]


@functools.cache
def tiny(model_type: str, window: int | None) -> Any:
    """Return the tiny configuration of a type; its windows are `window` tokens."""
    given = configuration(model_type)
    config = tiny_configuration(given, cls=causal_lm_class(given))
    for name in windows_of(config) if window else ():
        setattr(config.get_text_config(decoder=True), name, window)
    return config


def windows_of(config: Any) -> list[str]:
    """Return the fields that hold windows in tokens."""
    fields = config.get_text_config(decoder=True).to_dict()
    return [name for name, value in fields.items() if kind_of(name) is Kind.WINDOW and type(value) is int and value]


def model_of(case: Case) -> Any:
    """Make the random model of a case, the same in every process."""
    given = configuration(case.model_type)
    return tiny_model(tiny(case.model_type, case.window), torch.float32, cls=causal_lm_class(given))


def rows_of(case: Case, capped: bool) -> Rows:
    """Draw documents; a third of their tokens has no label."""
    lengths = [min(length, CAPACITY[case.ranks]) if capped else length for length in LENGTHS]
    rng = np.random.default_rng(SEED)
    tokens = ordinary_tokens(tiny(case.model_type, case.window), sum(lengths)).split(lengths)
    return [
        {
            "input_ids": ids.tolist(),
            "labels": np.where(rng.random(len(ids)) < 0.67, ids.numpy(), -100).tolist(),
        }
        for ids in tokens
    ]


def settings(output: str) -> dict[str, Any]:
    """Return the arguments that the trainer and the loop share."""
    return {"output_dir": output, "max_steps": STEPS, "seed": SEED, "learning_rate": LEARNING_RATE}


def trained(case: Case, output: str) -> Trained:
    """Train a case on this rank."""
    capped = documents_of(patch_model(model_of(case))) != "split"
    model = model_of(case)
    checkpointing = case.sharding != "ddp" and model.supports_gradient_checkpointing
    run = train(
        model,
        rows_of(case, capped),
        {
            "capacity": CAPACITY[case.ranks],
            "global_batch_documents": DOCUMENTS_OF_A_STEP,
            "sharding": case.sharding,
        },
        settings(output) | {"gradient_checkpointing": checkpointing},
    )
    return Trained(capped, run.series("loss"), run.series("grad_norm"))
