"""The state that a run needs to be continued on any number of ranks, kept in the checkpoint's trainer_state.json.

The global batch and the length at which long documents are cut are fixed at first launch: were they derived again from
the number of processes, a run resumed on another number of ranks would train on other batches. The data set's
fingerprint catches a checkpoint continued on other documents.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerState
from transformers.utils import logging

from hf_longctx.checkpoint.rank_messages import Ranks

logger = logging.get_logger(__name__)

MADE_BEFORE = (
    " (if they were prepared from texts: the checkpoint is older than the end tokens after them, and Tokenisation(..., "
    "version=1) makes documents as then)"
)


HALF = ("bf16", "fp16")
"""Fields of TrainingArguments that a run keeps: whether it computes under autocast, and in what."""
OPTIMIZER_SETTINGS = {
    "learning_rate": "lr",
    "weight_decay": "weight_decay",
    "adam_beta1": "betas",
    "adam_beta2": "betas",
    "adam_epsilon": "eps",
}
"""Fields of TrainingArguments that may change where a run is resumed -> what an optimizer's groups call them."""

LORAPLUS = ("loraplus_lr_ratio", "loraplus_lr_embedding")
"""Fields of the plugin that learning rates of adapters follow from."""
SCHEDULE = ("lr_scheduler_type", "lr_scheduler_kwargs")
SCHEDULE_SETTINGS = (*SCHEDULE, "warmup_steps", "max_grad_norm", "max_steps", "num_train_epochs")
"""Fields of TrainingArguments that may change there too: learning rates follow from them, or what gradients are clipped to."""


@dataclass(eq=False)
class RunState(TrainerCallback, ExportableState):
    """A callback only in that Trainer stores the state of its callbacks with every checkpoint."""

    global_batch_documents: int | None
    global_batch_tokens: int | None
    seed: int
    """of the order of documents"""
    data_fingerprint: str
    """of the lengths and label counts of the data set, in order, and where known of its content"""
    long_documents: str = "error"
    """what becomes of documents longer than longest_document"""
    longest_document: int | None = None
    """tokens; None: nothing is cut"""
    overlap_tokens: int = 0
    """of the pieces of a document that is split"""
    weights: list[list[float]] | None = None
    """of a mixture's sources: passes in epoch 0, 1 and so on; None: every document once in every epoch"""
    calibration: dict[str, Any] | None = None
    """what the run has learned about its costs (trainer.py): of which cost model, and what holds from which step on"""
    recalibrations: int = 0
    """how often it has learned something"""
    skipped_steps: int = 0
    """optimizer steps skipped because of gradients that were not finite"""
    evaluation_due: bool = False
    """the evaluation after the last step was broken off by SIGTERM"""
    bf16: bool | None = None
    """whether it computes under autocast in bfloat16; None: the checkpoint is older than this field"""
    fp16: bool | None = None
    """the same of float16"""
    frozen: str | None = None
    """dtypes of the weights that adapters stand on, which a checkpoint does not hold; None: there are no adapters, or the
    checkpoint is older than this field"""
    base: dict[str, str] | None = None
    """hashes of some of these weights (checkpoint/adapter_weights.py), of rank 0; None as above"""
    data_version: int | None = None
    """what texts and conversations were made into documents as (data/tokenisation.py); None: not known"""
    optimizer: dict[str, float] | None = None
    """fields of OPTIMIZER_SETTINGS, and what they are; None: the checkpoint is older than this field"""
    schedule: dict[str, str] | None = None
    """the same of SCHEDULE_SETTINGS, in words"""
    arguments: dict[str, str] | None = None
    """the same of optim and optim_args, and of LORAPLUS where it is asked for; others have their defaults"""
    documents: str | None = None
    """hash of some of the data set's documents (data/length_index.py); None: not known, or the checkpoint is older"""
    losses: Sequence[float] = (0.0, 0)
    """sum of the finite losses of all steps until a checkpoint, and how many they are (training/measuring/mean_loss.py)"""
    seconds: float | None = 0.0
    """of training until now, at this start and those before; None: not known, since the run began before this field"""

    def __post_init__(self) -> None:
        self._counted: float | None = None
        """until when the seconds are counted; None: nothing is trained"""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._counted = time.monotonic()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._count_seconds()
        self._counted = None

    def _count_seconds(self) -> None:
        if self._counted is not None and self.seconds is not None:
            now = time.monotonic()
            self.seconds, self._counted = self.seconds + now - self._counted, now

    def state(self) -> dict[str, Any]:
        self._count_seconds()
        return {"args": asdict(self), "attributes": {}}

    def restore(self, checkpoint_state: TrainerState, asked: dict[str, Any], noise: float | None = None) -> None:
        """Takes over a checkpoint's batches, order and counter.

        Args:
            checkpoint_state: of the checkpoint to resume from.
            asked: what the caller set explicitly, field -> value; None where nothing was set.
            noise: neftune_noise_alpha, where it is this rank that says what is to be known of it.

        Raises:
            ValueError: the checkpoint was made on other documents or in another precision, or the caller asked for other
                batches or another order.
        """
        callbacks: Any = checkpoint_state.stateful_callbacks
        stored = (callbacks or {}).get(type(self).__name__)
        if stored is None:
            raise ValueError(
                "the checkpoint's trainer_state.json holds no RunState: it was not saved by LongContextTrainer, so its global "
                "batches are unknown. Start a new run from its weights instead"
            )
        saved = RunState(**stored["args"])
        if saved.data_fingerprint != self.data_fingerprint:
            older = "" if "data_version" in stored["args"] else MADE_BEFORE
            raise ValueError(
                f"the checkpoint was made on documents with fingerprint {saved.data_fingerprint}, these have "
                f"{self.data_fingerprint}: resuming would repeat some and lose others. Give the same data set in "
                f"the same order{older}, of texts and conversations with the tokenizer, chat template and data.* settings as "
                "they were, or start a new run"
            )
        if saved.documents is not None and self.documents is not None and saved.documents != self.documents:
            raise ValueError(
                "the checkpoint was made on documents of the same lengths with other tokens or labels: some that were compared "
                f"have the hash {self.documents}, and had {saved.documents}. Give the same data set in the same order, or start "
                "a new run from the checkpoint's weights"
            )
        if other := [name for name in HALF if getattr(saved, name) not in (None, getattr(self, name))]:
            asked_for, trained = (
                ", ".join(f"{name}={getattr(state, name)}" for name in other) for state in (self, saved)
            )
            written = ", ".join(f"training.{name}: {str(getattr(saved, name)).lower()}" for name in other)
            auto = " or auto" if other == ["bf16"] else ""
            raise ValueError(
                f"resuming with {asked_for}, but the checkpoint was trained with {trained}: a run keeps its precision. Valid: "
                f"{written}{auto} in YAML, TrainingArguments({trained}), or a new run from the checkpoint's weights"
            )
        if saved.frozen not in (None, self.frozen):
            raise ValueError(
                f"resuming with adapters on weights in {self.frozen}, but the checkpoint was trained on weights in "
                f"{saved.frozen}: a run keeps its precision. Valid: the model in {saved.frozen} (model.dtype and "
                "model.load_in_4bit in YAML), or a new run from the adapters"
            )
        asked = asked | self._changed_weights(saved, max(math.ceil(checkpoint_state.epoch or 0) - 1, 0))
        changed = {name: value for name, value in asked.items() if value not in (None, getattr(saved, name))}
        if changed:
            before = {name: getattr(saved, name) for name in changed}
            raise ValueError(
                f"resuming with {changed}, but the checkpoint was made with {before}: the rest of the epoch would repeat some "
                "documents and lose others. Set them as they were, or start a new run from the checkpoint's weights"
            )
        if noise and "data_version" not in stored["args"]:
            logger.warning(
                f"neftune_noise_alpha={noise}: the checkpoint may be older than noise that does not depend on plans. From here "
                "on the run has other noise than it began with, of the same size"
            )
        own = ("weights", *HALF, "frozen", "base", "data_version", "optimizer", "schedule", "arguments", "documents")
        kept = {name: getattr(self, name) for name in own}
        self.__dict__.update(asdict(saved) | kept)
        self.seconds = stored["args"].get("seconds")

    def changed_settings(self, checkpoint: Path, optimizer: Any, *, says: bool) -> set[str]:
        """Return the settings that a checkpoint was trained with other values of, and say so where this rank `says` what is to be
        known: what `optimizer`'s groups call its own, and those of SCHEDULE_SETTINGS.

        Raises:
            ValueError: an argument of the optimizer has another value, and is none that its groups hold as a number.
        """
        changes: dict[str, str] = {}
        for kind, now in (("optimizer", self.optimizer), ("schedule", self.schedule)):
            before = recorded(checkpoint, kind) or {}
            for name, value in (now or {}).items():
                if name in before and before[name] != value:
                    old, new = (f"{one:g}" if isinstance(one, float) else one for one in (before[name], value))
                    changes[name] = f"{name} {old} -> {new}"
        arguments = self._changed_arguments(recorded(checkpoint, "arguments"), optimizer)
        changes |= arguments
        if changes and says:
            settings = ", ".join(changes.values())
            logger.warning(f"going on from {checkpoint} with other settings: {settings}")
        return {"lr" if name in LORAPLUS else OPTIMIZER_SETTINGS.get(name, name) for name in changes}

    def _changed_arguments(self, before: dict[str, str] | None, optimizer: Any) -> dict[str, str]:
        """Return the arguments that have other values than before, and a line about each. Raises as `changed_settings` does."""
        if before is None or self.arguments is None:
            return {}
        names = before | self.arguments
        if before["optim"] != self.arguments["optim"]:  # arguments of another optimizer are not the same ones
            names = {name: value for name, value in names.items() if name in LORAPLUS}
        both = [{name: given.get(name, "default") for name in names} for given in (before, self.arguments)]
        changes = {name: f"{name} {old} -> {both[1][name]}" for name, old in both[0].items() if old != both[1][name]}
        values = [{**group} for group in optimizer.param_groups]
        for name, change in changes.items():
            kinds = {type(group[name]) for group in values if name in group}
            if name not in LORAPLUS and not kinds & {int, float}:
                raise ValueError(
                    f"resuming with another value in optim_args ({change}), which is no number that the groups of the optimizer "
                    "hold: it would go on with that of the checkpoint. Valid: optim_args as they were, or a new run from the "
                    "checkpoint's weights"
                )
        return changes

    def refuse_other_base(self, checkpoint: Path, ranks: Ranks) -> None:
        """Raise ValueError on all ranks where adapters would go on upon other weights than rank 0 had before. Collective."""
        before, now = recorded(checkpoint, "base") or {}, self.base or {}
        compared = [name for name in now if name in before]
        other = [name for name in compared if before[name] != now[name]]
        problem = None
        if other:
            problem = (
                f"resuming adapters from {checkpoint} on another model: {len(other)} of {len(compared)} of its weights that were "
                f"compared have other values than the run began with, {other[0]} among them (hash {before[other[0]]} then, "
                f"{now[other[0]]} now). A run keeps the model under its adapters. Valid: that model (model.path in YAML), or a "
                "new run from the adapters"
            )
        if problem := ranks.agreed(problem):
            raise ValueError(problem)

    def _changed_weights(self, saved: "RunState", epoch: int) -> dict[str, Any]:
        """Return the weights that are asked for, where they differ from the checkpoint's in an epoch that has begun; later
        ones may change."""
        mixtures = [None if state.weights is None else tuple(map(tuple, state.weights)) for state in (self, saved)]
        until_now = [_passes(mixture, epoch) for mixture in mixtures]
        return {} if until_now[0] == until_now[1] else {"weights": self.weights or "none"}


def optimizer_arguments(args: Any, plugin: Any) -> dict[str, str]:
    """Return `optim`, the names in `optim_args`, and those of LORAPLUS where the plugin asks for it, and what they are."""
    parts = (part.split("=", 1) for part in (args.optim_args or "").replace(" ", "").split(",") if "=" in part)
    loraplus = LORAPLUS if plugin.loraplus_lr_ratio is not None else ()
    optimizer = {"optim": str(getattr(args.optim, "value", args.optim))}
    return optimizer | dict(parts) | {name: str(getattr(plugin, name)) for name in loraplus}


def schedule_in_words(args: Any) -> dict[str, str]:
    """Return SCHEDULE_SETTINGS and what they are in TrainingArguments."""
    values = ((name, getattr(args, name)) for name in SCHEDULE_SETTINGS)
    return {name: str(getattr(value, "value", value)) for name, value in values}  # of an enumeration, its value


def recorded(folder: Path, name: str, before: Any = None) -> Any:
    """Read a field of RunState from a checkpoint, or from a run's output directory; None: there is none that can be read.

    Args:
        before: what stands for the field in a checkpoint that is older than it.
    """
    try:
        state = json.loads((folder / TRAINER_STATE_NAME).read_text())
        return state["stateful_callbacks"][RunState.__name__]["args"].get(name, before)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # said where it is resumed
        return None


def data_version_of(checkpoint: Path) -> int | None:
    """Read how the documents of a checkpoint's run were made (data/tokenisation.py); None: it does not say, or cannot be
    read."""
    return recorded(checkpoint, "data_version", before=1)


def _passes(weights: tuple[tuple[float, ...], ...] | None, epoch: int) -> list[list[float]] | None:
    """List how often each source is passed in all epochs up to this one; None: every document once."""
    passes = [[source[min(number, len(source) - 1)] for number in range(epoch + 1)] for source in weights or ()]
    return passes if any(weight != 1 for source in passes for weight in source) else None
