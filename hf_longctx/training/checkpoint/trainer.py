"""How a Trainer saves and resumes: transformers' own hooks, with checkpoints that are whole or not there and fit any number
of ranks.

    save     _save_checkpoint: weights, optimizer and the rest to CheckpointWriter, which writes while training goes on
    resume   train(resume_from_checkpoint=...): all ranks check the checkpoint's files, then each reads what it holds

Trainer's own files for the optimizer, the schedule and random numbers are pickles; none is written, none is read.
"""

import copy
import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging

from hf_longctx.models.stages import cut_of
from hf_longctx.redaction import redacted
from hf_longctx.training.checkpoint import folder as folders
from hf_longctx.training.checkpoint.assembly import gathered
from hf_longctx.training.checkpoint.choice import chosen_checkpoint, damaged
from hf_longctx.training.checkpoint.folder import TRAINING_STATE, CheckpointError
from hf_longctx.training.checkpoint.lock import locked
from hf_longctx.training.checkpoint.ranks import Ranks
from hf_longctx.training.checkpoint.reader import CheckpointReader
from hf_longctx.training.checkpoint.shares import distinct
from hf_longctx.training.checkpoint.state import (
    as_json,
    load_optimizer,
    load_schedule,
    merged,
    optimizer_tensors,
    random_state,
    restore_random_state,
)
from hf_longctx.training.checkpoint.writer import CheckpointWriter, Contents
from hf_longctx.training.termination import EXIT_CODE, Termination
from hf_longctx.training.watchdog import EXCHANGE_MARGIN

logger = logging.get_logger(__name__)

UNFINISHED_SECONDS = 30.0
"""How long a rank whose training failed waits for a checkpoint that is being written: it needs all ranks."""
TRAINING_ARGUMENTS = "training_args"

_Trainer: Any = object
"""What a mixin is typed against."""


class CheckpointMixin(_Trainer):
    """Put before a Trainer class, which sets `plugin` and `progress` before it calls this one's __init__."""

    args: Any
    state: Any
    model: Any
    optimizer: Any
    lr_scheduler: Any
    plugin: Any
    progress: Any
    sharding: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given: dict[str, Any] = dict(zip(("model", "args"), args)) | kwargs
        arguments = given.get("args")
        spread = getattr(given.get("model"), "is_distributed_loading_by_transformers", False)
        asked = None
        if spread and arguments is not None:
            asked = arguments.save_only_model
            # Trainer refuses to save the optimizer of such models, because it could not resume; this one can.
            arguments = copy.copy(arguments)
            arguments.save_only_model = True
            if len(args) > 1:
                args = args[0], arguments, *args[2:]
            else:
                kwargs = kwargs | {"args": arguments}
        super().__init__(*args, **kwargs)
        if asked is not None:
            self.args.save_only_model = asked

        progress = self.progress  # not self: what handles forks is never forgotten, and would keep the model
        self.termination = Termination(self.plugin.grace_seconds, lambda: str(progress))
        self.ranks = Ranks(self.plugin.stall_timeout_seconds + EXCHANGE_MARGIN)
        self._begin_saving()

    def _begin_saving(self) -> None:
        self.checkpoint_writer = CheckpointWriter(self.ranks, self.plugin.async_save)
        self._saved_step: int | None = None
        self._serial = 0
        """of the checkpoint that was written last into the output directory"""
        self._best_before: str | None = None
        self._failures_said = 0
        self.save_seconds = 0.0
        """how long training has waited for checkpoints so far"""

    # Which checkpoint

    def train(
        self,
        resume_from_checkpoint: str | os.PathLike | bool | Literal["auto"] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Trainer's, where `resume_from_checkpoint` is a folder; True: the newest valid checkpoint of the output directory, an
        error where there is none; "auto": the same, but training begins anew where there is no checkpoint at all.

        Raises:
            CheckpointError: the checkpoint is incomplete or corrupt, or none is valid; or this run has something that none can
                hold, before its first step; or its last one could not be written.
        """
        self.checkpoint_writer.wait()
        self._begin_saving()  # another model, or other weights of it, may be trained than before
        with self._alone_in_output_dir():
            folder = self._checkpoint_to_resume(resume_from_checkpoint)
            self.termination.start()
            try:
                return super().train(folder, *args, **kwargs)
            except BaseException:
                self.checkpoint_writer.finish(UNFINISHED_SECONDS)
                raise
            finally:
                self.termination.stop()

    @contextmanager
    def _alone_in_output_dir(self) -> Iterator[None]:
        with ExitStack() as held:
            problem = None
            if self.ranks.rank == 0 and self.args.save_strategy != SaveStrategy.NO:
                try:
                    held.enter_context(locked(Path(self.args.output_dir)))
                except CheckpointError as error:
                    problem = str(error)
            if problem := self.ranks.agreed(problem):
                raise CheckpointError(problem)
            yield

    def _checkpoint_to_resume(self, asked: Any) -> str | None:
        self.progress.begin("checking checkpoints")
        output_dir = Path(self.args.output_dir)
        if self.ranks.rank == 0 and self.args.save_strategy != SaveStrategy.NO:
            folders.remove_leftovers(output_dir)
        found = self.ranks.agreed([str(path) for path in folders.checkpoints(output_dir)])
        self._serial = max((folders.serial_of(Path(each)) or 0 for each in found), default=0)
        if not asked and found and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
            logger.warning(
                f"the launcher has started this job again, and training begins anew: {output_dir} holds {len(found)} "
                'checkpoints. train(resume_from_checkpoint="auto") goes on from the newest'
            )
        return chosen_checkpoint(asked, found, output_dir, self.ranks) if asked else None

    # Saving

    @property
    def _run_dir(self) -> Path:
        """Where this run's checkpoints are: a trial of a hyperparameter search has a folder of its own."""
        return Path(self._get_output_dir(trial=getattr(self, "_trial", None)))

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        if self.args.save_strategy != SaveStrategy.NO:
            self._refuse_what_cannot_be_saved()
        return prepared

    def _refuse_what_cannot_be_saved(self) -> None:
        """Before the first step, not hours later: what JSON has not, and configurations that transformers refuses to save."""
        self._contents()
        problem = None
        if self.ranks.rank == 0:
            try:
                with tempfile.TemporaryDirectory() as folder:
                    self._export_configuration(Path(folder))
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        if problem := self.ranks.agreed(problem):
            raise CheckpointError(f"no checkpoint of this run could be saved: {problem}")

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with self._counted():
            self._begin_save(trial)

    def _begin_save(self, trial: Any) -> None:
        if self.hp_search_backend is None and trial is None:
            self.store_flos()
        self._finish_save()
        final = self._run_dir / f"{folders.PREFIX}{self.state.global_step}"
        self._best_before = self.state.best_model_checkpoint
        self._note_best(final)
        self._serial += 1
        keep, protected = self.args.save_total_limit, self.state.best_model_checkpoint
        self.checkpoint_writer.save(self._contents(), final, lambda final: folders.rotate(final, keep, protected))
        self._saved_step = self.state.global_step
        if callable(getattr(getattr(self.optimizer, "optimizer", None), "eval", None)):
            self.checkpoint_writer.copied()  # schedule-free: weights change between training and evaluation too
        if self.args.push_to_hub or self.checkpoint_writer.done:
            self._finish_save()
        if self.args.push_to_hub and self.checkpoint_writer.failure is None:
            self._push_from_checkpoint(str(final))

    def _note_best(self, writing: Path | None = None) -> None:
        """Notes the folder of the best step, if it was saved, or is what is being written."""
        if self.state.best_global_step:
            best = self._run_dir / f"{folders.PREFIX}{self.state.best_global_step}"
            if self.ranks.agreed(best == writing or best.is_dir()):
                self.state.best_model_checkpoint = str(best)

    def _leave(self) -> NoReturn:
        """All ranks together, because one was told to: saves what is not saved yet, and ends the program."""
        step = self.state.global_step
        if self.args.save_strategy != SaveStrategy.NO and step not in (0, self._saved_step):
            self._save_checkpoint(self.model, getattr(self, "_trial", None))
        self._finish_save()
        newest = folders.checkpoints(self._run_dir)
        logger.warning(
            f"SIGTERM: training ends after step {step}; the newest checkpoint is {newest[0] if newest else 'none'}"
        )
        raise SystemExit(EXIT_CODE)

    def _contents(self) -> Contents:
        model = self.accelerator.unwrap_model(self.model)
        weights, adapters = _saved_weights(model), has_adapters(model)
        optimizer, training = None, {}
        if not self.args.save_only_model:
            scaler = self.accelerator.scaler
            optimizer, groups = optimizer_tensors(
                self.optimizer, {id(weight): name for name, weight in weights.items()}
            )
            if cut_of(model) is not None:
                groups = merged(self.ranks.gathered(groups))
            training = {
                "optimizer": groups,
                "schedule": as_json(self.lr_scheduler.state_dict(), "the schedule's state"),
                "scaler": None if scaler is None else as_json(scaler.state_dict(), "the gradient scaler's state"),
            }
        texts = {}
        if self.ranks.rank == 0:
            states: dict[str, list[Any]] = {}
            for callback in [*self.callback_handler.callbacks, self.control]:
                if isinstance(callback, ExportableState):
                    states.setdefault(type(callback).__name__, []).append(callback.state())
            self.state.stateful_callbacks |= {name: of if len(of) > 1 else of[0] for name, of in states.items()}
            texts = {
                TRAINER_STATE_NAME: json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True) + "\n",
                TRAINING_STATE: json.dumps(training, indent=1) + "\n",
                f"{TRAINING_ARGUMENTS}.json": self._public_arguments(),
            }

        def export(folder: Path, whole: dict[str, torch.Tensor]) -> None:
            if adapters:  # others than those that are trained lie where they were loaded from
                trained = [each for each in model.peft_config if any(f".{each}." in f"{name}." for name in whole)]
                _as_peft_saves(model).save_pretrained(folder, state_dict=dict(whole), selected_adapters=trained)
            self._export_configuration(folder)

        return Contents(
            self.state.global_step,
            self._serial,
            self.world.sharding,
            weights,
            optimizer,
            random_state(),
            texts,
            export,
            adapters,
        )

    def _export_configuration(self, folder: Path) -> None:
        save_configuration(self.accelerator.unwrap_model(self.model), folder)
        processing = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(folder)

    def _let_weights_change(self) -> None:
        """Before an optimizer step: what is being saved has been copied."""
        with self._counted():
            self.checkpoint_writer.copied()
            if self.checkpoint_writer.done:
                self._finish_save()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """What training waits here is the cost of saving."""
        began = time.monotonic()
        yield
        self.save_seconds += time.monotonic() - began

    def _finish_save(self) -> None:
        """Waits for the checkpoint that is being written, and says so if it failed."""
        self.checkpoint_writer.wait()
        if self.checkpoint_writer.failures > self._failures_said:
            self._failures_said = self.checkpoint_writer.failures
            self._saved_step = None
            self.state.best_model_checkpoint = self._best_before
            last = folders.checkpoints(self._run_dir)
            logger.error(
                f"a checkpoint could not be written ({self.checkpoint_writer.failure}); what there was of it is removed. "
                f"Training goes on, the next save tries again. The newest checkpoint is {last[0] if last else 'none'}"
            )

    def _finalize_training(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        self._finish_save()
        if self.checkpoint_writer.failure is not None:
            self._save_checkpoint(self.model, trial)
            self._finish_save()
        if self.checkpoint_writer.failure is not None:
            raise CheckpointError(
                f"training is done, and its last checkpoint could not be written: {self.checkpoint_writer.failure}. Make room in "
                f"{str(self._run_dir)!r}, and resume from the newest checkpoint there"
            )
        return super()._finalize_training(trial, *args, **kwargs)

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """Of the model, on rank 0, from the stages of a pipeline and their parts. Collective."""
        return gathered(_saved_weights(self.accelerator.unwrap_model(self.model)), self.ranks)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        """Trainer's, with the arguments as JSON: its pickle holds the hub's token."""
        trained, self.model = self.model, _as_peft_saves(self.model)
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.model = trained
        if self.args.should_save:
            folder = Path(output_dir if output_dir is not None else self.args.output_dir)
            (folder / f"{TRAINING_ARGUMENTS}.bin").unlink(missing_ok=True)
            (folder / f"{TRAINING_ARGUMENTS}.json").write_text(self._public_arguments())

    def _public_arguments(self) -> str:
        """As JSON, for whoever reads the model: it may be pushed. Nothing reads it again."""
        return json.dumps(redacted(self.args.to_dict()), indent=2) + "\n"

    # Resuming

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.progress.begin("reading the checkpoint")
        model = self.accelerator.unwrap_model(self.model if model is None else model)
        CheckpointReader(Path(resume_from_checkpoint)).read_weights(_saved_weights(model))

    def _load_best_model(self) -> None:
        """After training: waits until the best checkpoint is there."""
        self._finish_save()
        best = str(self.state.best_model_checkpoint)
        if problem := damaged(best, self.ranks):
            raise CheckpointError(f"the best model cannot be loaded: {problem}")
        logger.info(f"Loading best model from {best} (score: {self.state.best_metric}).")
        self._load_from_checkpoint(best)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        weights = _saved_weights(self.accelerator.unwrap_model(self.model))
        saved = _training_state(checkpoint)
        origin = load_optimizer(self.optimizer, saved["optimizer"], CheckpointReader(Path(checkpoint)), weights)
        load_schedule(self.lr_scheduler, saved["schedule"], origin)

    def _load_scaler(self, checkpoint: str | None) -> None:
        scaler = self.accelerator.scaler
        if checkpoint is not None and scaler is not None and (saved := _training_state(checkpoint)["scaler"]):
            scaler.load_state_dict(saved)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None and (saved := CheckpointReader(Path(checkpoint)).random_state(self.ranks.rank)):
            restore_random_state(saved)


def has_adapters(model: Any) -> bool:
    """Whether PEFT trains something beside a model that stays as it is."""
    return bool(getattr(model, "peft_config", None))


def _as_peft_saves(model: Any) -> Any:
    """Where this process has some stages of a model with adapters, the whole of it, without memory."""
    cut = cut_of(model)
    return model if cut is None or cut.adapted is None else cut.adapted


def _saved_weights(model: Any) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of a model, as this rank has it: all, or with adapters what is trained. What other stages of a
    pipeline have comes without memory (meta)."""
    cut = cut_of(model)
    if has_adapters(model):
        held = distinct({name: weight for name, weight in model.named_parameters() if weight.requires_grad})
        elsewhere = {} if cut is None else {name: each for name, each in cut.elsewhere.items() if each.requires_grad}
    else:
        held = distinct(model.state_dict(keep_vars=True))
        elsewhere = {} if cut is None else cut.elsewhere
    return held if cut is None else dict(sorted((held | elsewhere).items()))


def _training_state(checkpoint: str) -> dict[str, Any]:
    return json.loads((Path(checkpoint) / TRAINING_STATE).read_text())


def save_configuration(model: Any, folder: Path) -> None:
    """What transformers needs beside weights to load a model."""
    config = copy.deepcopy(model.config)
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    config.architectures = [type(bare).__name__.removeprefix("FSDP")]
    config.dtype = str(bare.dtype).removeprefix("torch.")
    if getattr(config, "distributed_config", None) is not None:
        config.distributed_config = None
    config.save_pretrained(folder)
    if bare.can_generate():
        bare.generation_config.save_pretrained(folder)
