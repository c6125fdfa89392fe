"""The checkpoints of a trainer's run: whole or not there, and fit for any number of ranks.

    save     weights, optimizer and the rest go to CheckpointWriter, which writes while training goes on
    resume   all ranks check the checkpoint's files, then each reads what it holds

Trainer's own files for the optimizer, the schedule and random numbers are pickles; none is written, none is read.
"""

import dataclasses
import json
import os
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.nn import Parameter
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging

from hf_longctx.checkpoint import folder as folders
from hf_longctx.checkpoint import writer
from hf_longctx.checkpoint.adapter_weights import (
    adapter_weights,
    by_all_names,
    has_adapters,
    refuse_what_peft_cannot_save,
    second_names,
    trained_adapters,
    without_hooks,
)
from hf_longctx.checkpoint.choice import chosen_checkpoint, damaged
from hf_longctx.checkpoint.export import (
    TRAINING_ARGUMENTS,
    as_peft_saves,
    changed_configuration,
    public_arguments,
    save_configuration,
    saved_dtype,
)
from hf_longctx.checkpoint.folder import TRAINING_STATE, CheckpointError
from hf_longctx.checkpoint.lock import locked, refuse_apart
from hf_longctx.checkpoint.rank_messages import Ranks
from hf_longctx.checkpoint.reader import CheckpointReader
from hf_longctx.checkpoint.state import (
    as_json,
    load_optimizer,
    load_schedule,
    merged,
    optimizer_tensors,
    random_state,
    restore_random_state,
    settings_kept,
)
from hf_longctx.checkpoint.whole_weights import gathered
from hf_longctx.checkpoint.writer import CheckpointWriter, Contents
from hf_longctx.checkpoint.written_shares import distinct
from hf_longctx.models.stages import cut_of
from hf_longctx.supervision.termination import EXIT_CODE, Termination
from hf_longctx.supervision.watchdog import EXCHANGE_MARGIN

logger = logging.get_logger(__name__)

UNFINISHED_SECONDS = 30.0
"""How long a rank whose training failed waits for a checkpoint that is being written: it needs all ranks."""


class Checkpoints:
    """Saves and resumes what a trainer trains. The trainer's hooks call it (training/trainer.py).

    Args:
        trainer: has its arguments, its plugin and its progress; asked for the rest when that is needed.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        progress = trainer.progress  # not the trainer: what handles forks is never forgotten, and would keep the model
        self.termination = Termination(trainer.plugin.grace_seconds, lambda: str(progress))
        self.ranks = Ranks(trainer.plugin.stall_timeout_seconds + EXCHANGE_MARGIN)
        self._alone = False
        """whether this run has the output directory to itself"""
        self.begin()

    def begin(self) -> None:
        """Forget what was saved before: another model, or other weights of it, may be trained now."""
        self.writer = self.make_writer()
        self._saved_step: int | None = None
        self._serial = 0
        """of the checkpoint that was written last into the output directory"""
        self._best_before: str | None = None
        self._failures_said = 0
        self.save_seconds = 0.0
        """how long training has waited for checkpoints so far"""

    def make_writer(self) -> CheckpointWriter:
        """Make what writes checkpoints while training goes on."""
        return CheckpointWriter(self.ranks, self._trainer.plugin.async_save)

    @property
    def model(self) -> Any:
        """The bare model."""
        return self._trainer.accelerator.unwrap_model(self._trainer.model)

    @property
    def _saves(self) -> bool:
        """Whether this run writes checkpoints."""
        return self._trainer.args.save_strategy != SaveStrategy.NO

    # Which checkpoint

    @contextmanager
    def for_training(self, asked: Any) -> Iterator[str | None]:
        """Hold the output directory alone while training runs, end in order on SIGTERM, and finish what is being written when
        training fails. Yields the folder of the checkpoint to resume, or None.

        Args:
            asked: a folder; True: the newest valid checkpoint of the output directory, an error where there is none; "auto": the
                same, but training begins anew where there is no checkpoint at all.

        Raises:
            CheckpointError: the checkpoint is incomplete or corrupt, or none is valid; or another run holds the directory.
        """
        self.writer.wait()
        self.begin()
        with self.alone_in_output_dir(asked):
            folder = self._to_resume(asked)
            self.termination.start()
            try:
                yield folder
            except BaseException:
                if not self.writer.done and self.ranks.rank == 0:
                    logger.warning(
                        f"training has ended while a checkpoint is written ({self.writer.doing}): waiting for it, "
                        f"{UNFINISHED_SECONDS:g} s at most"
                    )
                self.writer.finish(UNFINISHED_SECONDS)
                raise
            finally:
                self.termination.stop()

    @contextmanager
    def alone_in_output_dir(self, asked: Any, writes: bool = False) -> Iterator[None]:
        """Hold the output directory of a run that writes checkpoints; inside another such block: do nothing. Collective.

        Args:
            asked: the checkpoint to resume from, as for `for_training`.
            writes: whether the run leaves other files there, and holds it even if it writes no checkpoint.

        Raises:
            CheckpointError: another run holds it, or has written checkpoints that this one would overwrite; nothing can be
                written there; or it is another folder on another rank.
        """
        if self._alone:
            yield
            return
        self._trainer.progress.begin("waiting for the output directory", unbounded=True)
        with ExitStack() as stack:
            problem = None
            if self.ranks.rank == 0 and (writes or self._saves):
                try:
                    stack.enter_context(locked(Path(self._trainer.args.output_dir), asked))
                except CheckpointError as error:
                    problem = str(error)
            if problem := self.ranks.agreed(problem):
                raise CheckpointError(problem)
            if self._saves:
                refuse_apart(Path(self._trainer.args.output_dir), self.ranks, writer.VISIBLE_SECONDS)
            self._alone = True
            try:
                yield
            finally:
                self._alone = False

    def _to_resume(self, asked: Any) -> str | None:
        self._trainer.progress.begin("checking checkpoints")
        output_dir = Path(self._trainer.args.output_dir)
        if self.ranks.rank == 0 and self._saves:
            folders.remove_leftovers(output_dir)
        checkpoints = self.ranks.agreed([str(path) for path in folders.checkpoints(output_dir)])
        self._serial = max((folders.serial_of(Path(checkpoint)) or 0 for checkpoint in checkpoints), default=0)
        if not asked and checkpoints and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
            logger.warning(
                f"the launcher has started this job again, and training begins anew: {output_dir} holds {len(checkpoints)} "
                'checkpoints. train(resume_from_checkpoint="auto") goes on from the newest'
            )
        return chosen_checkpoint(asked, checkpoints, output_dir, self.ranks) if asked else None

    # Saving

    @property
    def _run_dir(self) -> Path:
        """Return where this run's checkpoints are: a trial of a hyperparameter search has a folder of its own."""
        return Path(self._trainer._get_output_dir(trial=getattr(self._trainer, "_trial", None)))

    def refuse_what_cannot_be_saved(self) -> None:
        """Raise CheckpointError before the first step, not hours later, for what JSON has not, and for configurations and
        adapters that transformers and PEFT refuse to save."""
        if not self._saves:
            return
        self._contents()
        problem = None
        if self.ranks.rank == 0:
            try:
                with tempfile.TemporaryDirectory() as folder:
                    self._export_configuration(Path(folder), saved_dtype(self.model))
                if has_adapters(self.model):
                    refuse_what_peft_cannot_save(as_peft_saves(self.model), _saved_weights(self.model))
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
        if problem := self.ranks.agreed(problem):
            raise CheckpointError(f"no checkpoint of this run could be saved: {problem}")

    def refuse_state_that_cannot_be_saved(self) -> None:
        """Raise CheckpointError for what no checkpoint holds of the state that an optimizer made in its first step."""
        if self._saves:
            self._contents()

    def save(self, trial: Any) -> None:
        """Begin to write a checkpoint of this step."""
        with self._counted():
            self._begin_save(trial)

    def _begin_save(self, trial: Any) -> None:
        trainer = self._trainer
        if trainer.hp_search_backend is None and trial is None:
            trainer.store_flos()
        self.finish()
        final = self._run_dir / f"{folders.PREFIX}{trainer.state.global_step}"
        self._best_before = trainer.state.best_model_checkpoint
        self.note_best(final)
        self._serial += 1
        keep, protected = trainer.args.save_total_limit, trainer.state.best_model_checkpoint
        self.writer.save(self._contents(), final, lambda final: folders.rotate(final, keep, protected))
        self._saved_step = trainer.state.global_step
        if callable(getattr(getattr(trainer.optimizer, "optimizer", None), "eval", None)):
            self.writer.copied()  # schedule-free: weights change between training and evaluation too
        if trainer.args.push_to_hub or self.writer.done:
            self.finish()
        if trainer.args.push_to_hub and self.writer.failure is None:
            trainer._push_from_checkpoint(str(final))

    def note_best(self, writing: Path | None = None) -> None:
        """Note the folder of the best step, if it was saved, or is what is being written."""
        state = self._trainer.state
        if state.best_global_step:
            best = self._run_dir / f"{folders.PREFIX}{state.best_global_step}"
            if self.ranks.agreed(best == writing or best.is_dir()):
                state.best_model_checkpoint = str(best)

    def leave(self) -> NoReturn:
        """End the program, all ranks together, because one was told to; save first what is not saved yet."""
        step = self._trainer.state.global_step
        if self._saves and step not in (0, self._saved_step):
            self._save_by_hook()
        self.finish()
        newest = folders.checkpoints(self._run_dir)
        logger.warning(
            f"SIGTERM: training ends after step {step}; the newest checkpoint is {newest[0] if newest else 'none'}"
        )
        raise SystemExit(EXIT_CODE)

    def _save_by_hook(self) -> None:
        """Save by the trainer's hook, which a subclass may have extended."""
        self._trainer._save_checkpoint(self._trainer.model, getattr(self._trainer, "_trial", None))

    def _contents(self) -> Contents:
        trainer, model = self._trainer, self.model
        weights, adapters = _saved_weights(model), has_adapters(model)
        optimizer, training = None, {}
        if not trainer.args.save_only_model:
            scaler = trainer.accelerator.scaler
            optimizer, groups = optimizer_tensors(
                trainer.optimizer, {id(weight): name for name, weight in weights.items()}
            )
            schedule = as_json(trainer.lr_scheduler.state_dict(), "the schedule's state")
            if cut_of(model) is not None:
                groups, schedule = merged(*zip(*self.ranks.gathered((groups, schedule))))
            training = {
                "optimizer": groups,
                "schedule": schedule,
                "scaler": None if scaler is None else as_json(scaler.state_dict(), "the gradient scaler's state"),
            }
        texts = {}
        if self.ranks.rank == 0:
            states: dict[str, list[Any]] = {}
            for callback in [*trainer.callback_handler.callbacks, trainer.control]:
                if isinstance(callback, ExportableState):
                    states.setdefault(type(callback).__name__, []).append(callback.state())
            trainer.state.stateful_callbacks |= {name: of if len(of) > 1 else of[0] for name, of in states.items()}
            texts = {
                TRAINER_STATE_NAME: json.dumps(dataclasses.asdict(trainer.state), indent=2, sort_keys=True) + "\n",
                TRAINING_STATE: json.dumps(training, indent=1) + "\n",
                f"{TRAINING_ARGUMENTS}.json": public_arguments(trainer.args),
            }

        shown = without_hooks(as_peft_saves(model)) if adapters else None
        shared = second_names(shown) if adapters else {}
        dtype = saved_dtype(model)  # now: the next step may run while files are written

        def export(folder: Path, whole: dict[str, torch.Tensor]) -> None:
            if shown is not None:  # others than those that are trained lie where they were loaded from
                trained = trained_adapters(shown, whole)
                shown.save_pretrained(folder, state_dict=by_all_names(whole, shared), selected_adapters=trained)
            self._export_configuration(folder, dtype)

        return Contents(
            trainer.state.global_step,
            self._serial,
            trainer.world.sharding,
            weights,
            optimizer,
            random_state(),
            texts,
            export,
            adapters,
        )

    def _export_configuration(self, folder: Path, dtype: str) -> None:
        save_configuration(self.model, folder, dtype)
        processing = self._trainer.processing_class or getattr(self._trainer.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(folder)

    def let_weights_change(self) -> None:
        """Wait until what is being saved has been copied; called before an optimizer step."""
        with self._counted():
            self.writer.copied()
            if self.writer.done:
                self.finish()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Count what training waits here as the cost of saving."""
        began = time.monotonic()
        yield
        self.save_seconds += time.monotonic() - began

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, and say so if it failed."""
        self.writer.wait()
        if self.writer.failures > self._failures_said:
            self._failures_said = self.writer.failures
            self._saved_step = None
            self._trainer.state.best_model_checkpoint = self._best_before
            last = folders.checkpoints(self._run_dir)
            logger.error(
                f"a checkpoint could not be written ({self.writer.failure}); what there was of it is removed. "
                f"Training goes on, the next save tries again. The newest checkpoint is {last[0] if last else 'none'}"
            )

    def finish_training(self) -> None:
        """Wait for the last checkpoint, and write it once more if it failed. Raises CheckpointError if it fails again."""
        self.finish()
        if self.writer.failure is not None:
            self._save_by_hook()
            self.finish()
        if self.writer.failure is not None:
            raise CheckpointError(
                f"training is done, and its last checkpoint could not be written: {self.writer.failure}. Make room in "
                f"{str(self._run_dir)!r}, and resume from the newest checkpoint there"
            )

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """Gather the model's weights on rank 0, from the stages of a pipeline and their parts. Collective."""
        weights = gathered(_saved_weights(self.model), self.ranks)
        shared = second_names(as_peft_saves(self.model)) if has_adapters(self.model) else {}
        return by_all_names(weights, shared)

    # Resuming

    def load_weights(self, folder: str, model: Any = None) -> None:
        """Read what this rank holds of a checkpoint's weights."""
        self._trainer.progress.begin("reading the checkpoint")
        bare = self.model if model is None else self._trainer.accelerator.unwrap_model(model)
        reader, weights = CheckpointReader(Path(folder)), _saved_weights(bare)
        if has_adapters(bare):  # checkpoints that are older than their buffers have none
            saved = reader.manifest.weights
            weights = {
                name: tensor for name, tensor in weights.items() if isinstance(tensor, Parameter) or name in saved
            }
        reader.read_weights(weights)

    def load_best(self) -> None:
        """Read the best checkpoint after training, once it is there."""
        self.finish()
        state = self._trainer.state
        best = str(state.best_model_checkpoint)
        if problem := damaged(best, self.ranks):
            raise CheckpointError(f"the best model cannot be loaded: {problem}")
        logger.info(f"Loading best model from {best} (score: {state.best_metric}).")
        self._trainer._load_from_checkpoint(best)

    def load_optimizer(self, folder: str, changed: Collection[str]) -> None:
        """Read what this rank holds of the optimizer's state, and the schedule's.

        Args:
            changed: settings that stay as this run has them, of the optimizer's groups and of the schedule; others are the
                checkpoint's.
        """
        if self.ranks.rank == 0 and (other := changed_configuration(self.model, Path(folder))):
            logger.warning(f"going on from {folder} with a model of another configuration: {', '.join(other)}")
        weights = _saved_weights(self.model)
        saved = _training_state(folder)
        reader = CheckpointReader(Path(folder))
        with settings_kept(self._trainer.optimizer, changed):
            origin = load_optimizer(self._trainer.optimizer, saved["optimizer"], reader, weights)
        load_schedule(self._trainer.lr_scheduler, saved["schedule"], origin, changed)

    def load_scaler(self, folder: str) -> None:
        """Read the gradient scaler's state, where there is one."""
        scaler = self._trainer.accelerator.scaler
        if scaler is not None and (saved := _training_state(folder)["scaler"]):
            scaler.load_state_dict(saved)

    def load_random_state(self, folder: str) -> None:
        """Restore this rank's random numbers, if the checkpoint was saved on as many."""
        if saved := CheckpointReader(Path(folder)).random_state(self.ranks.rank):
            restore_random_state(saved)


def _saved_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return what a checkpoint holds of a model, as this rank has it: all, or with adapters what is trained. What other stages of
    a pipeline have comes without memory (meta)."""
    cut = cut_of(model)
    if has_adapters(model):
        own, elsewhere = adapter_weights(model, {} if cut is None else cut.elsewhere)
    else:
        own = distinct(model.state_dict(keep_vars=True))
        elsewhere = {} if cut is None else cut.elsewhere
    return own if cut is None else dict(sorted((own | elsewhere).items()))


def _training_state(checkpoint: str) -> dict[str, Any]:
    return json.loads((Path(checkpoint) / TRAINING_STATE).read_text())
