"""LongContextTrainer: transformers' Trainer, with planned optimizer steps.

One item of the data loader is one optimizer step of this rank: its micro-batches, any number of them, none included.
`training_step` runs them all, then the ranks meet once to sum gradients (reduction.py). Everything else is Trainer's:
optimizer, schedule, clipping, logging, saving, resuming.

    rank 0   exchange+compute | compute | ................ | sum gradients | optimizer step
    rank 1   exchange+compute | compute | compute | ...... | sum gradients | optimizer step

No DDP wraps the model: a collective in the middle of a step would wait for ranks that wait for this one's keys and
values.

    class MyTrainer(LongContextMixin, SFTTrainer): ...      # works with other Trainer subclasses
"""

import itertools
import math
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import Trainer
from transformers.utils import logging

from hf_longctx.data.collator import RankStep
from hf_longctx.training.arguments import refuse_other_objective
from hf_longctx.training.checkpoint.folder import remove_leftovers
from hf_longctx.training.embedding_noise import EmbeddingNoise, noisy_embeddings
from hf_longctx.training.evaluation import EvaluationMixin
from hf_longctx.training.execution import follow_layers
from hf_longctx.training.measurements import Measurements
from hf_longctx.training.recalibration import Recalibration
from hf_longctx.training.reduction import agree_on_plan, all_finite, largest_over_ranks
from hf_longctx.training.run_state import RunState
from hf_longctx.training.steps.work import Work

logger = logging.get_logger(__name__)


class LongContextMixin(EvaluationMixin):
    """Put before a Trainer class. Takes the additional keyword `plugin`; see LongContextPlugin."""

    args: Any
    control: Any
    model: Any
    optimizer: Any

    neftune_noise_alpha: float | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_other_objective(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._recalibration: Any = None
        self.measurements: Any = None
        self._noise: EmbeddingNoise | None = None
        super().__init__(*args, **kwargs)
        self.neftune_noise_alpha = None  # Trainer's own noise depends on the plan

    # Trainer's loop: an epoch has as many steps as the planner made of it, which need not be the same number each time

    def _inner_training_loop(self, *args: Any, resume_from_checkpoint: str | None = None, **kwargs: Any) -> Any:
        self._resuming_from = resume_from_checkpoint
        self._training_steps = None  # a checkpoint decides what the global batches are
        if self.args.eval_strategy != "no":  # what is wrong with these documents is said before any time is lost
            self.training_steps()  # a checkpoint decides where documents are cut
            for dataset in self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]:
                self.get_eval_dataloader(dataset)
        self._watch()
        with ExitStack() as self._while_training:
            self._while_training.callback(self._watching.stop)
            self._while_training.enter_context(self._watching.explaining())
            self.progress.begin("planning the first step")
            return super()._inner_training_loop(*args, resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        self.progress.begin("preparing the model and its optimizer")
        prepared = super()._prepare_for_training(*args, **kwargs)
        self.progress.begin("callbacks")
        bare_model = self.accelerator.unwrap_model(self.model)
        self._while_training.enter_context(follow_layers(bare_model, self.progress))
        noise = noisy_embeddings(bare_model, self.args.neftune_noise_alpha)
        self._noise = self._while_training.enter_context(noise)
        return prepared

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.progress.begin("saving a checkpoint")
        super()._save_checkpoint(*args, **kwargs)
        self.progress.begin("callbacks")

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._evaluate_what_is_due()
        self.progress.begin("ending training")
        return super()._finalize_training(*args, **kwargs)

    def _finish_current_push(self) -> None:
        self._watching.stop()  # an upload may take longer than any step
        super()._finish_current_push()

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[int, ...]:
        steps = dataloader.dataset
        documents = len(steps)
        whole, part = int(args.num_train_epochs), args.num_train_epochs % 1
        if args.max_steps > 0:
            max_steps, epochs, left = args.max_steps, 0, args.max_steps
            while left > 0:
                left -= steps.steps(epochs)
                epochs += 1
        else:
            max_steps = sum(steps.steps(epoch) for epoch in range(whole)) + math.ceil(part * steps.steps(whole))
            epochs = whole + (part > 0)
        first = steps.steps(0)
        batch = round(documents / first)
        return epochs, first, documents, documents * max_steps // first, batch, first, max_steps

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: Any,
        trial: Any,
    ) -> tuple[int, int]:
        super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        # With restore_callback_states_from_checkpoint, Trainer has put a new object in the callback's place.
        self.run_state = next(each for each in self.callback_handler.callbacks if isinstance(each, RunState))
        every = self.plugin.recalibrate_steps if self.steps.times_ranks else 0
        ahead = self.get_train_dataloader().ahead
        self._recalibration = Recalibration(self.training_steps(), self.hdp_rank, every, ahead, self.args.device)
        self.measurements = Measurements(self.accelerator.unwrap_model(self.model), self.args, self.plugin.profile)
        epoch, left = 0, self.state.global_step
        while left >= (steps := self.training_steps().steps(epoch)):
            epoch, left = epoch + 1, left - steps
        return epoch, 0 if self.args.ignore_data_skip else left

    def _run_epoch(self, *, epoch: int, train_dataloader: Any, **kwargs: Any) -> None:
        self._evaluate_what_is_due()
        steps = train_dataloader.dataset.steps(epoch)
        kwargs |= {"steps_in_epoch": steps, "num_update_steps_per_epoch": steps}
        super()._run_epoch(epoch=epoch, train_dataloader=train_dataloader, **kwargs)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[RankStep], None]:
        self.progress.begin_step(self.state.global_step + 1)
        self.progress.begin("loading data")
        self.measurements.begin_step()
        began = time.monotonic()
        batches = list(itertools.islice(epoch_iterator, num_batches))
        self._data_wait_seconds = time.monotonic() - began
        self.measurements.step = batches[0] if batches else None
        return batches, None

    # One optimizer step

    def training_step(self, model: torch.nn.Module, inputs: RankStep, num_items_in_batch: Any = None) -> torch.Tensor:
        """Runs this rank's micro-batches and sums gradients over ranks. Returns the step's loss, the same on every
        rank."""
        device = self.args.device
        self.progress.begin("agreeing on the plan", collective=True)
        if agree_on_plan(inputs.fingerprint, device, self.termination.requested):
            self._leave()
        if self.state.global_step == 0:
            logger.info(f"Plan of the first step: {inputs.plan.summary()}")
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        sent_before = self.steps.bytes_sent
        mark = self._recalibration.begin_step(inputs.plan)
        bare_model = self.accelerator.unwrap_model(model)
        if self._noise is not None:
            self._noise.begin_step(inputs, self.run_state.seed)
        sharded = self._sharded_model(bare_model)
        work = Work(
            backward=self.accelerator.backward,
            arguments={"loss_by_length": self.measurements.losses},
            sharded=sharded,
            memory=self._activation_memory(bare_model),
            mark=mark,
        )
        loss = self.steps.run(bare_model, inputs, work)
        self.progress.begin("summing gradients", collective=True)
        own_sent = self.steps.bytes_sent - sent_before
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        statistics = torch.stack([loss, torch.tensor(own_sent, dtype=torch.float64, device=device)])
        statistics = torch.cat([statistics, self.measurements.losses.take().flatten()])
        sums = self.steps.sum_gradients(bare_model, trained, statistics, sharded is not None)
        loss, sent = sums[0], sums[1]
        self.measurements.add_losses(sums[2:])
        degree = self.world.tensor_parallel
        loss = loss / degree  # the ranks of a group have each counted it
        if degree > 1:
            for parameter in trained:
                if parameter.grad is not None and not isinstance(parameter, DTensor):
                    parameter.grad /= degree
        scaler = self.accelerator.scaler
        if scaler is not None and not inputs.micro_batches:
            scaler.scale(loss.float())  # a rank that ran no backward must have the same scaler as the others
        self._skip_unless_finite(trained)
        self._recalibrate(inputs.position)
        self._last_step = (inputs, float(sent))
        self.progress.begin("copying what is saved")
        self._let_weights_change()
        self.progress.begin("optimizer step and callbacks")
        return loss.float()

    def _recalibrate(self, position: tuple[int, int]) -> None:
        """After every so many steps, all ranks agree on what their times say of the costs that plan the next ones."""
        every = self._recalibration.every
        if every and (self.state.global_step + 1) % every == 0:
            self.run_state.recalibrations += self._recalibration.agree(position)
            self.run_state.calibration = self._recalibration.state(position)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """What a callback of any rank asked for, all ranks do: stop, save, evaluate, log. One alone would wait for
        the others. The fullest rank's memory travels with it."""
        self._recalibration.end_step()
        memory = self.measurements.end_step(self.state.global_step, self._data_wait_seconds)
        self.progress.begin("agreeing on what callbacks asked for", collective=True)
        if self.args.world_size > 1:
            names = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
            asked = torch.tensor([*(getattr(self.control, name) for name in names), memory], dtype=torch.int32)
            *agreed, memory = largest_over_ranks(asked.to(self.args.device)).tolist()
            for name, value in zip(names, agreed):
                setattr(self.control, name, bool(value))
        self.measurements.peak_memory_mib = memory
        self.progress.begin("callbacks")
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = self.steps.gradient_norm(self.accelerator.unwrap_model(self.model), self.args.max_grad_norm)
        return super()._clip_grad_norm(model) if norm is None else norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is None:
            grad_norm = self.steps.gradient_norm(self.accelerator.unwrap_model(self.model), math.inf)
        return super()._get_grad_norm(model, grad_norm)

    def _skip_unless_finite(self, trained: list[torch.nn.Parameter]) -> None:
        """Drops the gradients of a step in which one is not finite, on all ranks together; the optimizer then changes
        nothing.

        With float16 the gradient scaler does this itself, and needs to see what is not finite.
        """
        if self.accelerator.scaler is not None or all_finite(trained, self.args.device):
            return
        for parameter in trained:
            parameter.grad = None
        self.run_state.skipped_steps += 1
        logger.warning(
            f"step {self.state.global_step + 1} is skipped on all ranks: its gradients are not finite. "
            f"{self.run_state.skipped_steps} skipped so far"
        )

    def _describe(self, step: RankStep, sent: float) -> dict[str, float]:
        """What is logged of a step; sent: bytes, all ranks."""
        summary = step.plan.summary()
        return {
            "documents": summary.documents,
            "split_documents": summary.split_documents,
            "tokens": step.num_tokens,
            "plan_balance": round(summary.balance, 4),
            "plan_idle": round(summary.idle_share, 4),
            "exchanged_mib": round(sent / 2**20, 3),
            "recalibrations": self.run_state.recalibrations,
            "skipped_steps": self.run_state.skipped_steps,
            "data_wait_seconds": float(f"{self._data_wait_seconds:.3g}"),
            "save_seconds": round(self.save_seconds, 3),
            "failed_saves": self.checkpoint_writer.failures,
            **({"offloaded_tokens": summary.offloaded_tokens} if self.plugin.plan_offload else {}),
            **self.steps.describe(),
            **self._recalibration.describe(summary.makespan),
        } | self.measurements.log()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds what the plan of the last step said: makespan / lower bound, idle share, MiB exchanged by all ranks,
        seconds predicted and measured, how long this process waited for its data, and what measurements.py says."""
        if "loss" in logs and self._last_step is not None:
            logs = logs | self._describe(*self._last_step)
        super().log(logs, *args, **kwargs)

    def floating_point_ops(self, inputs: RankStep) -> int:
        return 6 * inputs.tokens * self.model.num_parameters(exclude_embeddings=True)

    def _track_num_input_tokens(self, inputs: RankStep) -> None:
        if self.args.include_num_input_tokens_seen != "no":
            self.state.num_input_tokens_seen += inputs.num_tokens

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the whole model, so that plain transformers loads it, also where checkpoints are in parts: with accelerate's
        default of SHARDED_STATE_DICT, Trainer would save nothing here."""
        if self.world.stages > 1:
            self._save(output_dir, self.whole_weights())
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
            return
        fsdp = getattr(self.accelerator.state, "fsdp_plugin", None)
        kind = getattr(fsdp, "state_dict_type", None)
        if _internal_call or fsdp is None or "FULL_STATE_DICT" in str(kind):
            super().save_model(output_dir, _internal_call)
            return
        fsdp.set_state_dict_type("FULL_STATE_DICT")
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            fsdp.set_state_dict_type(kind)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, without what a process that was killed left half-written in the output directory."""
        self.checkpoint_writer.wait()
        if self.is_world_process_zero():
            remove_leftovers(Path(self.args.output_dir))
        return super().push_to_hub(*args, **kwargs)


class LongContextTrainer(LongContextMixin, Trainer):  # type: ignore[misc]
    """transformers' Trainer with Hybrid Data Parallelism: the same arguments, and `plugin=LongContextPlugin(...)`.

    Raises:
        ValueError: settings that cannot be honoured; each error names the value, the reason, and what would be valid.
        PlanError: a document longer than all ranks can hold, before training begins.
    """
