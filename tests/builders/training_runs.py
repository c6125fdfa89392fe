"""Small training runs, the same on any number of ranks, and what they are compared with.

`train` runs in a worker of a rank pool, or in this process as a world of one, and gives back what a test looks at: the
log, the weights, and which tokens each rank held in each step. `reference` is a loop over documents with plain
transformers attention, one document at a time, in one process: what every run must equal, written down without plans.

accelerate keeps its state in globals of the process. `train` clears them first, so that one worker runs many.
"""

import logging
import os
from collections import ChainMap
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState
from datasets import Dataset
from torch.nn.functional import cross_entropy
from transformers import Trainer, TrainerCallback, TrainingArguments, get_scheduler
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from hf_longctx import LongContextMixin, LongContextPlugin, LongContextTrainer
from hf_longctx.data.collator import RankStep
from hf_longctx.parallel.sharding import forget_trainers
from hf_longctx.planner import GlobalBatches
from hf_longctx.training.muon import training_arguments
from tests.builders.tiny_models import (
    GENERAL,
    RUN_ALONE,
    TINY,
    tiny_alone,
    tiny_bloom,
    tiny_general,
    tiny_llama,
    tiny_mistral,
    tiny_mixtral,
    tiny_mpt,
)
from tests.worlds.fifo import in_order_communicators

ModelName = str
"""One of ANY_MODELS."""
MODELS: dict[ModelName, Any] = {
    "llama": tiny_llama,
    "mixtral": partial(tiny_mixtral, output_router_logits=True, router_aux_loss_coef=0.1),
    "mistral": tiny_mistral,
    "bloom": tiny_bloom,
    "mpt": tiny_mpt,
}

ANY_MODELS = ChainMap(
    MODELS,
    {family: partial(tiny_general, family) for family in GENERAL},
    {family: partial(tiny_alone, family) for family in RUN_ALONE},
)
"""These, also those that a test adds, and families whose attention classes are transformers' own
(tests/models/test_any_decoder.py, tests/models/test_whole_models.py)."""

Rows = list[dict[str, list[int]]]
HeldSegment = tuple[int, int, list[int]]
"""Document of the global batch, first token, tokens."""


@dataclass
class Run:
    """What one rank saw."""

    log: list[dict[str, float]]
    """Trainer's history, in order."""
    weights: dict[str, torch.Tensor]
    held: list[list[HeldSegment]]
    """[step]: what this rank held."""
    seen_by_callback: list[dict[str, float]]
    """Training logs as a callback got them."""
    messages: list[str]
    """Messages of hf_longctx at level WARNING and above."""
    evaluation: dict[str, float]
    """Of `evaluate()` after training; empty without an evaluation data set."""

    def series(self, name: str) -> list[float]:
        return [entry[name] for entry in self.log if name in entry]


_Trainer: Any = object
"""What a mixin is typed against."""


class HeldSegments(_Trainer):
    """Mixed in before LongContextMixin: notes what this rank held in each step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.held: list[list[HeldSegment]] = []
        super().__init__(*args, **kwargs)

    def training_step(self, model: Any, inputs: RankStep, *args: Any) -> torch.Tensor:
        self.held.append(held_segments(inputs, self.hdp_rank))
        return super().training_step(model, inputs, *args)


class RecordingTrainer(HeldSegments, LongContextTrainer):  # type: ignore[misc]
    """LongContextTrainer that notes what it held."""


POISONED_STEPS = (2, 4)
"""Steps in which a PoisonedTrainer's last rank has a gradient that is not finite."""


class PoisonedTrainer(RecordingTrainer):
    """On the last rank, one gradient of some steps holds one NaN."""

    poisoned: tuple[int, ...] = POISONED_STEPS

    def training_step(self, model: Any, inputs: Any, *args: Any) -> torch.Tensor:
        last_rank = self.args.process_index == self.args.world_size - 1
        if self.state.global_step + 1 not in self.poisoned or not last_rank:
            return super().training_step(model, inputs, *args)
        hook = self.model.model.norm.weight.register_hook(self._poisoned)
        loss = super().training_step(model, inputs, *args)
        hook.remove()
        return loss

    @staticmethod
    def _poisoned(gradient: torch.Tensor) -> torch.Tensor:
        return torch.cat([gradient[:-1], torch.full_like(gradient[-1:], torch.nan)])


class OtherTrainer(Trainer):
    """Somebody's subclass of Trainer, with a habit of its own: it signs its logs."""

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        super().log({**logs, "other_trainer": 1.0}, *args, **kwargs)


class MixedTrainer(HeldSegments, LongContextMixin, OtherTrainer):  # type: ignore[misc]
    """The mixin before a Trainer class of somebody else."""


class LogCallback(TrainerCallback):
    """Keeps the logs of training steps."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.logs.append(dict(logs))


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def arguments(output_dir: Any, **settings: Any) -> TrainingArguments:
    """TrainingArguments of a quiet run that logs every step and saves nothing.

    Adam's epsilon is raised from 1e-8: a gradient that is nothing but rounding would otherwise be divided by its own
    size (seen: 2.5e-5 in one weight of 6144; gradients here are of size 1e-2).
    """
    defaults: dict[str, Any] = {
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "seed": 3,
    }
    fixed = {"output_dir": str(output_dir), "use_cpu": True, "disable_tqdm": True}
    return training_arguments(fixed | defaults | settings)


def fresh_accelerator_state() -> None:
    """Forgets what accelerate remembers of the last run of this process, in its globals and in the environment."""
    forget_trainers()
    for name in [name for name in os.environ if name.startswith("FSDP_") or name == "ACCELERATE_USE_FSDP"]:
        del os.environ[name]
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def plugin_with(planner: str = "hdp", **settings: Any) -> LongContextPlugin:
    """A plugin whose trainer plans as `planner` does: any valid plan is run exactly, whoever made it."""
    return LongContextPlugin(**settings).model_copy(update={"planner": planner})  # no setting names another one


def train(
    model: ModelName | torch.nn.Module,
    rows: Any,
    plugin: dict[str, Any],
    settings: dict[str, Any],
    *,
    eval_rows: Any = None,
    resume: str | None = None,
    in_order: bool | Literal["one at a time"] = False,
    trainer_class: Any = RecordingTrainer,
    callbacks: Sequence[TrainerCallback] = (),
) -> Run:
    """Trains on this rank and says what it saw. `settings` are fields of TrainingArguments, `plugin` arguments of
    plugin_with; rows are documents, or a mapping of them for evaluation."""
    fresh_accelerator_state()
    watched, messages = LogCallback(), _Messages()
    logger = logging.getLogger("hf_longctx")
    logger.addHandler(messages)
    try:
        one_at_a_time = in_order == "one at a time"
        with in_order_communicators(one_at_a_time=one_at_a_time) if in_order else nullcontext():
            trainer = trainer_class(
                model=ANY_MODELS[model]() if isinstance(model, str) else model,
                args=arguments(**settings),
                train_dataset=_dataset(rows),
                eval_dataset=_dataset(eval_rows),
                plugin=plugin_with(**plugin),
                callbacks=[watched, *callbacks],
            )
            trainer.train(resume_from_checkpoint=resume)
            log = list(trainer.state.log_history)
            evaluation = {} if eval_rows is None else trainer.evaluate()
    finally:
        logger.removeHandler(messages)
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    return Run(log, weights, trainer.held, watched.logs, messages.texts, evaluation)


def _dataset(rows: Any) -> Any:
    if isinstance(rows, dict):
        return {name: _dataset(split) for name, split in rows.items()}
    return Dataset.from_list(rows) if rows is not None else None


def documents(lengths: Sequence[int], labels: bool = False, seed: int = 0) -> Rows:
    """Random documents. With labels, about a third of them is -100, and differs from the tokens."""
    rng = np.random.default_rng(seed)
    rows = []
    for length in lengths:
        row = {"input_ids": rng.integers(0, TINY["vocab_size"], length).tolist()}
        if labels:
            learned = rng.random(length) < 0.67
            row["labels"] = np.where(learned, rng.integers(0, TINY["vocab_size"], length), -100).tolist()
        rows.append(row)
    return rows


def held_segments(step: RankStep, rank: int) -> list[HeldSegment]:
    """Return what a rank's step holds, segment by segment."""
    segments = []
    for micro_batch in step.micro_batches:
        if micro_batch.idle:
            continue
        tokens = micro_batch.input_ids[0].tolist()
        for segment in micro_batch.layout.shard(rank):
            length = segment.stop - segment.start
            segments.append((segment.doc, segment.start, tokens[:length]))
            tokens = tokens[length:]
        assert not tokens
    return segments


def assembled(shards: Sequence[Sequence[HeldSegment]]) -> list[list[int]]:
    """The documents of one step, sorted, from what each rank [rank] held; fails where a token is missing or doubled."""
    parts: dict[int, list[tuple[int, list[int]]]] = {}
    for doc, start, tokens in (segment for rank in shards for segment in rank):
        parts.setdefault(doc, []).append((start, tokens))
    token_lists = []
    for segments in parts.values():
        whole: list[int] = []
        for start, tokens in sorted(segments):
            assert start == len(whole), f"tokens [{len(whole)}, {start}) are held by no rank or twice"
            whole += tokens
        token_lists.append(whole)
    return sorted(token_lists)


def reference(
    model: ModelName | torch.nn.Module,
    rows: Rows,
    batches: GlobalBatches,
    epochs: int,
    settings: dict[str, Any],
    skipped_steps: Sequence[int] = (),
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and final weights of a loop over documents with plain attention, in this process."""
    plain: Any = ANY_MODELS[model]() if isinstance(model, str) else model
    plain.train()
    args = arguments(**settings)
    optimizer = torch.optim.AdamW(plain.parameters(), args.learning_rate, eps=args.adam_epsilon, weight_decay=0.0)
    steps = [batch for epoch in range(epochs) for batch in batches.epoch(epoch)]
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, args.get_warmup_steps(len(steps)), len(steps))
    losses, norms = [], []
    for step, batch in enumerate(steps, 1):
        loss = step_loss(plain, [rows[i] for i in batch])
        loss.backward()
        if step in skipped_steps:
            optimizer.zero_grad()
        norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), args.max_grad_norm)))
        losses.append(float(loss.detach()))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return losses, norms, plain.state_dict()


def step_loss(model: Any, rows: Rows, router: bool = True) -> torch.Tensor:
    """Cross-entropy per label token of some documents, and the auxiliary loss of each, weighted by its tokens."""
    labels = [row.get("labels", row["input_ids"])[1:] for row in rows]
    label_tokens = sum(label != -100 for document in labels for label in document)
    tokens = sum(len(row["input_ids"]) for row in rows)
    router = router and getattr(model.config, "output_router_logits", False)
    loss = torch.zeros(())
    for row, expected in zip(rows, labels):
        arguments = {"output_router_logits": True} if router else {}
        outputs = model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False, **arguments)
        loss = (
            loss + cross_entropy(outputs.logits[0, :-1].float(), torch.tensor(expected), reduction="sum") / label_tokens
        )
        if router:
            config = model.config
            aux = load_balancing_loss_func(outputs.router_logits, config.num_local_experts, config.num_experts_per_tok)
            loss = loss + config.router_aux_loss_coef * len(row["input_ids"]) / tokens * aux
    return loss
