"""Ways to train the same documents in the same optimizer steps: ours, plain Trainer, and the peers, unmodified.

Each module offers `WAYS`, {name: prepare}. `prepare(case, settings)` says which Trainer runs, with which arguments, over
which micro-batches. All but ours take gradient accumulation, with one row of the data set as one micro-batch:

    step 0: packs A B C, step 1: packs D E, two ranks that hold different data, accumulation 2

    rows      A     none    B     C    |  none  none    D     E          rank 0 takes rows 0, 2, ..., rank 1 rows 1, 3, ...

Rows without documents come first in a step, and cost nothing: `GivenStepsTrainer` does not run them. (Synchronisation of
gradients hangs on a step's last row.) So a step may have any number of micro-batches, which stock Trainer does not allow.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from training_cases import Case
from transformers import Trainer

from hf_longctx.planner import StepPlan

IGNORED = -100
"""Label of a token that is not predicted."""


class CannotRun(Exception):
    """A way of training does not run here; the message says why."""


@dataclass(frozen=True)
class Settings:
    """What is chosen for one way or for all."""

    capacity: int
    """tokens that a rank holds at once, ours only"""
    pack_length: int = 0
    """tokens of a pack"""
    padded_rows: int = 8
    """documents of a padded batch: the default of TrainingArguments"""
    profile: str | None = None
    """file of the speeds that plans follow, ours only; None: a preset's"""
    plans: tuple[StepPlan, ...] = ()
    """plan of each step, ours only; (): the trainer plans"""
    sharding: str = "auto"
    """how ranks share the model, ours only"""
    learning_rate: float = 1e-3
    gradients: str | None = None
    """folder where the gradient of each step is written; None: nowhere"""


@dataclass(frozen=True)
class Way:
    """How one rank trains."""

    trainer: Callable[..., Trainer]
    """called with model, args, train_dataset, callbacks"""
    dataset: Any
    accumulation: int = 1
    arguments: dict[str, Any] = field(default_factory=dict)
    """of TrainingArguments, beyond those of all"""
    attention: str = "sdpa"
    computed: int | None = None
    """tokens that go through the model in all steps, padding included; None: those of the documents"""


Prepare = Callable[[Case, Settings], Way]
MicroBatches = Sequence[tuple[int, ...]]
"""Documents of each micro-batch of one step."""


class GivenStepsTrainer(Trainer):
    """Trainer that does not run micro-batches without any label; returns a loss of zero for them."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        if bool((inputs.get("labels", inputs.get("shift_labels")) == IGNORED).all()):
            return torch.zeros((), device=self.args.device)
        return super().training_step(model, inputs, num_items_in_batch)


def rows(steps: Sequence[MicroBatches], ranks: int) -> tuple[list[tuple[int, ...]], int]:
    """All micro-batches in the order of the data set, and how many a rank accumulates; `ranks` hold different data.

    Each step ends with its own micro-batches; the module docstring has an example.
    """
    accumulation = max(-(-len(step) // ranks) for step in steps)
    ordered: list[tuple[int, ...]] = []
    for step in steps:
        if len(step) < ranks:
            raise ValueError(f"a step of {len(step)} micro-batches leaves one of {ranks} ranks without any")
        ordered += [()] * (accumulation * ranks - len(step)) + list(step)
    return ordered, accumulation


class MicroBatchRows(torch.utils.data.Dataset):
    """One micro-batch of documents at an index, as what `collate` makes of their token ids."""

    def __init__(self, case: Case, ordered: Sequence[tuple[int, ...]], collate: Callable[..., dict[str, Any]]) -> None:
        self.case, self.ordered, self.collate = case, ordered, collate

    def __len__(self) -> int:
        return len(self.ordered)

    def __getitem__(self, row: int) -> dict[str, Any]:
        documents = [self.case.tokens(document) for document in self.ordered[row]]
        if documents:
            return self.collate(documents)
        nothing = self.collate([[0] * 4])
        return nothing | {"labels": torch.full_like(nothing["labels"], IGNORED)}


def only(features: list[dict[str, Any]]) -> dict[str, Any]:
    """A data collator: a row of the data set is a batch already."""
    (batch,) = features
    return batch


def one_row(documents: list[list[int]], multiple: int = 1) -> dict[str, Any]:
    """Documents one after the other in one row, positions from 0 in each; filled up to a multiple of tokens.

    The filling follows what it must not disturb: causal attention never looks ahead.
    """
    fill = -sum(map(len, documents)) % multiple
    ids = [token for document in documents for token in document] + [0] * fill
    labels = [label for document in documents for label in (IGNORED, *document[1:])] + [IGNORED] * fill
    positions = [position for document in documents for position in range(len(document))]
    positions += range(positions[-1] + 1, positions[-1] + 1 + fill)
    columns = {"input_ids": ids, "labels": labels, "position_ids": positions}
    return {name: torch.tensor([column]) for name, column in columns.items()}
