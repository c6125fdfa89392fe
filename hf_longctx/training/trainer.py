"""LongContextTrainer: transformers' Trainer, with planned optimizer steps.

One item of the data loader is one optimizer step of this rank: its micro-batches, any number of them, none included.
`training_step` runs them all, then the ranks meet once to sum gradients (parallel/reduction.py). Everything else is Trainer's:
optimizer, schedule, clipping, logging, saving, resuming.

    rank 0   exchange+compute | compute | ................ | sum gradients | optimizer step
    rank 1   exchange+compute | compute | compute | ...... | sum gradients | optimizer step

No DDP wraps the model: a collective in the middle of a step would wait for ranks that wait for this one's keys and
values.

    class MyTrainer(LongContextMixin, SFTTrainer): ...      # works with other Trainer subclasses

Trainer's methods that are overridden, in the order of this file, the release that brought them if later than 4.20, and why:

    __init__                                     takes the plugin, refuses what cannot be honoured, patches the model
    create_accelerator_and_postprocess     4.30  arranges processes as soon as there is a process group
    _hp_search_setup                             a search varies what the run goes by
    _build_accelerator_args                5.2   a model that was loaded in parts has its own mesh
    call_model_init                              patches each trial's model
    get_train_dataloader                         planned steps
    get_eval_dataloader                          planned steps
    get_test_dataloader                          planned steps, for `evaluation_loop`
    create_optimizer                             stages are sharded before their optimizer is made; LoRA+
    get_optimizer_cls_and_kwargs                 Muon
    _sync_replicated_trainable_parameters  5.19  begins alike, and leaves gradients to `training_step`
    train                                        finds the checkpoint; watches and ends in order
    _inner_training_loop                         plans, and checks evaluation's documents, before any time is lost
    set_initial_training_values            4.49  an epoch has as many steps as the planner made of it
    _prepare_for_training                  5.3   follows layers; refuses before the first step what cannot be saved
    _init_training_state                   5.3   resumes at a planned step; begins to measure
    _run_epoch                             5.3   the same, each epoch anew
    get_batch_samples                      4.46  one item is a whole step; measures the wait for it
    _track_num_input_tokens                5.3   tokens of a planned step
    _finalize_training                     5.3   the last checkpoint is written, or said to be lost; mean of finite losses
    _finish_current_push                   4.32  an upload may take longer than any step
    training_step                                one optimizer step
    _clip_grad_norm                        5.3   stages share one norm
    _get_grad_norm                         5.3   stages share one norm
    floating_point_ops                           tokens of a planned step
    _maybe_log_save_evaluate                     what a callback of one rank asks for, all do; no loss spoils later ones
    log                                          adds what the plan and the measurements say
    _evaluate                              4.33  what a callback of one rank then asks for, all do
    evaluation_loop                              planned steps; loss and token metrics
    predict                                      refused: logits are never materialised
    _save_checkpoint                             whole or not there, on any number of ranks
    _load_from_checkpoint                        each rank reads what it holds
    _load_best_model                             waits until it is written
    _load_optimizer_and_scheduler                no pickle
    _load_scaler                           4.49  no pickle
    _load_rng_state                              no pickle
    save_model                                   whole, from stages and shards
    _save                                        arguments without the hub's token
    push_to_hub                                  without what a killed process left half-written
"""

import math
import os
import time
import weakref
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils.memory import clear_device_cache
from torch.distributed.tensor import DTensor
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, HPSearchBackend
from transformers.utils import logging

from hf_longctx.attention.exchange import Exchange
from hf_longctx.checkpoint.checkpoints import Checkpoints
from hf_longctx.checkpoint.export import named_as_made, named_once, publish_arguments, saved_as_peft, whole_state_dict
from hf_longctx.checkpoint.folder import remove_leftovers
from hf_longctx.data.collator import RankStep
from hf_longctx.data.loader import NotWanted, PlannedDataLoader, PlannedSteps
from hf_longctx.hardware.speeds import CpuKind
from hf_longctx.models.patch import attention_layers
from hf_longctx.models.stages import loaded_stages, whole_parameters
from hf_longctx.parallel.reduction import agree_on_plan, all_finite
from hf_longctx.parallel.sharding import ShardedModel, is_sharded
from hf_longctx.parallel.world import World
from hf_longctx.planner.cost.selective_offload import Offload
from hf_longctx.precision import Decision
from hf_longctx.settings.longctx import LongContextPlugin
from hf_longctx.settings.training import MUON
from hf_longctx.supervision.progress import Progress
from hf_longctx.supervision.watchdog import Watchdog
from hf_longctx.training.arguments import (
    adapted,
    as_if_weights_alone_were_saved,
    fold_accumulation,
    refuse_arguments,
    refuse_changed_model,
    refuse_changed_settings,
    refuse_frozen,
    refuse_hooks_on_logits,
    refuse_idle_loraplus,
    refuse_idle_search,
    refuse_other_batch,
    refuse_other_objective,
    refuse_replaced_loss,
    refuse_sharded_optimizer,
    refuse_unknown_metric,
    refuse_whole_optimizer,
    say_unused_saves,
)
from hf_longctx.training.autocast import say_if_much_slower
from hf_longctx.training.embedding_noise import EmbeddingNoise, noisy_embeddings
from hf_longctx.training.evaluation import evaluate_what_is_due, mean_metrics
from hf_longctx.training.execution import follow_layers
from hf_longctx.training.loraplus import loraplus_optimizer
from hf_longctx.training.measuring.mean_loss import MeanLoss
from hf_longctx.training.measuring.measurements import Measurements
from hf_longctx.training.measuring.recalibration import Recalibration
from hf_longctx.training.memory.activations import ActivationMemory
from hf_longctx.training.muon import muon_and_settings
from hf_longctx.training.preparation import (
    arrange,
    computes_on_cpu,
    patched,
    prepare_model,
    refuse_other_arrangement,
    too_short_for_warmup,
)
from hf_longctx.training.run_data import RunData, position_of, training_values
from hf_longctx.training.run_state import RunState
from hf_longctx.training.step_log import describe_step
from hf_longctx.training.steps.requests import CallbackRequests
from hf_longctx.training.steps.work import Steps, Work

logger = logging.get_logger(__name__)

OUTSIDE = "running code outside the trainer"
"""The work of a rank between making a trainer and training, as far as the watchdog knows."""

_Trainer: Any = object
"""The class that a mixin is typed against."""


class LongContextMixin(_Trainer):
    """Put before a Trainer class. Takes the additional keyword `plugin`; see LongContextPlugin.

    A subclass must leave the names `world`, `steps`, `exchange`, `run_data`, `checkpoints`, `progress`, `measurements`,
    `recalibration`, `offload`, `certificate`, `uncertified` and `plugin` to it.
    """

    args: Any
    control: Any
    hp_space: Any
    model: Any
    optimizer: Any
    neftune_noise_alpha: float | None
    _tr_loss: torch.Tensor

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_other_objective(cls)

    def __init__(
        self,
        *args: Any,
        plugin: LongContextPlugin | None = None,
        watching: Watchdog | None = None,
        precision: Decision | None = None,
        uncertified: bool = False,
        **kwargs: Any,
    ) -> None:
        """`watching`: a watchdog that has begun before there was a trainer; default: the one that `watchdog` makes.
        `precision`: what `bf16: auto` came to, which `args` say already; None: somebody chose it.
        `uncertified`: take a model that could not be tested; see `hf_longctx.patch_model`."""
        given = dict(zip(("model", "args", "data_collator", "train_dataset"), args)) | kwargs | {"plugin": plugin}
        refuse_arguments(given)
        self.plugin = plugin or LongContextPlugin()
        self.precision = precision
        self.uncertified = uncertified
        self.certificate = ""
        """what is known of the model's exactness, in a line"""
        self.progress = watching.progress if watching is not None else Progress()
        self._watching = self._ended_with_me(watching or self.watchdog())
        self.world: World
        """how processes are arranged; this and the next four are known when the accelerator is made (preparation.py)"""
        self.steps: Steps
        """runs this process's part of a step"""
        self.exchange: Exchange | None = None
        """of keys and values with other ranks; None where there are none"""
        self.cpu: CpuKind | None = None
        """kind of rank 0's processors, where ranks compute on these: all plan with the same speeds"""
        self.gpu: str | None = None
        """name of rank 0's device, where ranks compute on GPUs, for the same reason"""
        self.offload: Offload | None = None
        """what plans may leave in host memory"""
        self.run_data = RunData(self)
        self.measurements: Any = None
        self.recalibration: Any = None
        self._noise: EmbeddingNoise | None = None
        self._sharded: ShardedModel | None = None
        self._memory: ActivationMemory | None = None
        self._accumulation = 1
        self._requests = CallbackRequests(self)
        self._optimizers_given = kwargs.get("optimizers")
        self.bytes_of_last_step = 0.0
        self.data_wait_seconds = 0.0
        with self._watching.explaining():
            self._watch()
            self.progress.begin("making the trainer", unbounded=True)
            args, kwargs, save_only_model = as_if_weights_alone_were_saved(args, kwargs)
            super().__init__(*args, **kwargs)
            self.checkpoints = Checkpoints(self)
            if save_only_model is not None:
                self.args.save_only_model = save_only_model
            refuse_whole_optimizer(self)
            refuse_hooks_on_logits(self)
            say_unused_saves(self)
            self._collator = self.data_collator
            say_if_much_slower(self.args, self.model, precision)
            self.progress.begin("patching the model")
            prepare_model(self, self.model)
        self.neftune_noise_alpha = None  # Trainer's own noise depends on the plan
        self.progress.begin(OUTSIDE, unbounded=True)

    # What is made once

    def create_accelerator_and_postprocess(self) -> None:
        if self.model is not None:
            attention_layers(self.model)  # refuses other models before anything else is read of them
        if (stages := loaded_stages(self.model)) > 1 and self.plugin.pipeline_stages == 1:
            self.plugin = self.plugin.changed(pipeline_stages=stages)
        self.args = adapted(self.args, self.model, self.plugin, on_cpu=computes_on_cpu(self.model, self.args))
        super().create_accelerator_and_postprocess()
        self._watch()
        arrange(self)
        refuse_sharded_optimizer(self, self._optimizers_given)
        refuse_idle_loraplus(self, self._optimizers_given)
        self._accumulation = max(self._accumulation, self.args.gradient_accumulation_steps)
        self.args.gradient_accumulation_steps = (
            self._accumulation
        )  # which was folded in before, in a search's first trial
        self.default_documents = fold_accumulation(self.args, self.plugin, self.world.ranks)
        self.accelerator.longctx_plugin = self.plugin
        if self.world.stages > 1 and self.model is not None:
            patched(self, self.model)  # before all of it goes to the device
        elif self.model is not None:
            self.steps.refuse_other_cut(self.model)
        self.progress.begin("making the trainer")

    def _hp_search_setup(self, trial: Any) -> None:
        if trial is None or self.hp_search_backend is None:
            super()._hp_search_setup(trial)
            return
        is_optuna = self.hp_search_backend == HPSearchBackend.OPTUNA  # gives the same values when it is asked again
        refuse_idle_search(self.plugin, self.hp_space(trial) if is_optuna else trial)
        # What was folded in is the trial's to change.
        self.args.gradient_accumulation_steps, self._accumulation = self._accumulation, 1
        super()._hp_search_setup(trial)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments = super()._build_accelerator_args(**kwargs)
        # A model that was sharded when it was loaded has its own mesh; accelerate would make another, on GPUs only.
        arguments.pop("parallelism_config", None)
        return arguments

    def call_model_init(self, trial: Any = None) -> Any:
        model = super().call_model_init(trial)
        refuse_other_arrangement(model, self.world)
        self._sharded = self._memory = None
        return prepare_model(self, model)

    def get_train_dataloader(self) -> PlannedDataLoader:
        return self.run_data.training_loader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> PlannedDataLoader:
        return self.run_data.evaluation_loader(eval_dataset)

    def get_test_dataloader(self, test_dataset: Any) -> PlannedDataLoader:
        return self.run_data.evaluation_loader(test_dataset)

    def create_optimizer(self, model: Any = None) -> Any:
        if self.is_fsdp_enabled and not is_sharded(self.model):
            self.steps.shard(self.model, self.accelerator.state.fsdp_plugin)
        if self.optimizer is None and self.plugin.loraplus_lr_ratio is not None:
            self.optimizer = loraplus_optimizer(self, self.model if model is None else model)
        return super().create_optimizer(model)

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> Any:
        if args.optim == MUON:
            return muon_and_settings(args, model)
        return super().get_optimizer_cls_and_kwargs(args, model)

    def _sync_replicated_trainable_parameters(self, model: torch.nn.Module) -> None:
        # Trainer would also average their gradients in each backward, which ranks do not run alike; `training_step` sums them.
        self.steps.begin_trained_alike([parameter for parameter in model.parameters() if parameter.requires_grad])

    # What the hooks share

    @property
    def hdp_rank(self) -> int:
        """Return this process's number among the ranks that documents are spread over."""
        return self.world.rank_of(self.args.process_index)

    @property
    def run_state(self) -> Any:
        """RunState: what a checkpoint remembers of the run; None before its steps are planned."""
        return self.run_data.state

    def training_steps(self) -> PlannedSteps:
        """Return the planned optimizer steps of this run, for training and for looking at."""
        return self.run_data.training_steps()

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        """Return name -> parameter of the whole model; without memory (meta) what other stages of a pipeline have."""
        return whole_parameters(self.accelerator.unwrap_model(self.model))

    def watchdog(self) -> Watchdog:
        """Make what says, from here to the end of training, whom everyone waits for."""
        return Watchdog(self.progress, self.plugin.stall_timeout_seconds)

    def _watch(self) -> None:
        """Watch, where nothing watches already, as soon as there is a process group."""
        if self._watching.ended:  # as it has after each training
            self._watching = self._ended_with_me(self.watchdog())
        self._watching.start()

    def _ended_with_me(self, watching: Watchdog) -> Watchdog:
        """Let a trainer that is made and never trains leave no threads behind."""
        weakref.finalize(self, watching.stop)
        return watching

    def sharded_model(self, model: torch.nn.Module) -> ShardedModel | None:
        """Return the model under FSDP2, once it is."""
        if self._sharded is None and is_sharded(model):
            self._sharded = ShardedModel(model, self.world.sharding, varies=self.world.stages == 1)
        return self._sharded

    def _activation_memory(self, model: Any) -> ActivationMemory:
        if self._memory is None:
            self._memory = ActivationMemory(
                model,
                keep_attention=self.plugin.keep_attention,
                device=self.args.device,
                longest_document=self.plugin.longest_document,
            )
        return self._memory

    # Trainer's loop: an epoch has as many steps as the planner made of it, which need not be the same number each time

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
        refuse_replaced_loss(self)
        refuse_hooks_on_logits(self)
        refuse_changed_settings(self, self._collator)
        self._watch()
        try:
            with self._watching.explaining():
                self.progress.begin_setting_up()
                with self.checkpoints.for_training(resume_from_checkpoint) as folder:
                    return super().train(folder, *args, **kwargs)
        finally:
            self._watching.stop()

    def _inner_training_loop(self, *args: Any, resume_from_checkpoint: str | None = None, **kwargs: Any) -> Any:
        refuse_frozen(self)
        refuse_changed_model(self)
        self.run_data.begin(resume_from_checkpoint)
        if self.args.eval_strategy != "no":  # what is wrong with these documents is said before any time is lost
            refuse_unknown_metric(self)
            self.training_steps()  # a checkpoint decides where documents are cut
            for dataset in self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]:
                self.get_eval_dataloader(dataset)
        self._watch()
        with ExitStack() as self._while_training:
            self._while_training.callback(self._watching.stop)
            self._while_training.enter_context(self._watching.explaining())
            self.progress.begin("planning the first step")
            return super()._inner_training_loop(*args, resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def set_initial_training_values(self, args: Any, dataloader: Any) -> tuple[int, ...]:
        return training_values(dataloader.dataset, args)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        self.progress.begin("preparing the model and its optimizer")
        if self.is_world_process_zero() and (warning := too_short_for_warmup(self.args, args[0])):
            logger.warning(warning)
        prepared = super()._prepare_for_training(*args, **kwargs)
        self.checkpoints.refuse_what_cannot_be_saved()
        self.progress.begin("callbacks")
        bare_model = self.accelerator.unwrap_model(self.model)
        if not hasattr(Trainer, "_sync_replicated_trainable_parameters"):  # which calls it otherwise
            self._sync_replicated_trainable_parameters(bare_model)
        self._while_training.enter_context(follow_layers(bare_model, self.progress))
        noise = noisy_embeddings(bare_model, self.args.neftune_noise_alpha)
        self._noise = self._while_training.enter_context(noise)
        return prepared

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
        self.run_data.state = next(
            callback for callback in self.callback_handler.callbacks if isinstance(callback, RunState)
        )
        # Where ranks meet in rounds, a micro-batch takes as long as that of the slowest rank, and says nothing of its own.
        timed = self.steps.times_ranks and self.world.mode == "async"
        every = self.plugin.recalibrate_steps if timed else 0
        ahead = self.get_train_dataloader().ahead
        self.recalibration = Recalibration(self.training_steps(), self.hdp_rank, every, ahead, self.args.device)
        bare, plugin = self.accelerator.unwrap_model(self.model), self.plugin
        self.measurements = Measurements(bare, self.args, plugin.profile, plugin.token_metrics)
        self._mean_loss, self._resumed_at = MeanLoss(self.args.device, self.run_state.losses), self.state.global_step
        self._saw_state = self._skipped = False
        if self.state.global_step >= max_steps:  # Trainer would train one step more in the middle of an epoch
            return num_train_epochs, 0
        epoch, step = position_of(self.training_steps(), self.state.global_step)
        return epoch, 0 if self.args.ignore_data_skip else step

    def _run_epoch(self, *, epoch: int, train_dataloader: Any, **kwargs: Any) -> None:
        self._tr_loss = self._tr_loss.float()  # whatever torch's default dtype is
        evaluate_what_is_due(self)
        steps = train_dataloader.dataset.steps(epoch)
        kwargs |= {"steps_in_epoch": steps, "num_update_steps_per_epoch": steps}
        super()._run_epoch(epoch=epoch, train_dataloader=train_dataloader, **kwargs)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[RankStep], None]:
        self.progress.begin_step(self.state.global_step + 1)
        self.progress.begin("loading data")
        self.measurements.begin_step()
        began = time.monotonic()
        try:
            batches = list(islice(epoch_iterator, num_batches))
        except NotWanted:
            self.progress.begin("agreeing on the plan", collective=True)
            agree_on_plan(0, self.args.device, leave=True)
            self.checkpoints.leave()
        self.data_wait_seconds = time.monotonic() - began
        self.measurements.step = batches[0] if batches else None
        return batches, None

    def _track_num_input_tokens(self, inputs: RankStep) -> None:
        if self.args.include_num_input_tokens_seen != "no":
            self.state.num_input_tokens_seen += inputs.num_tokens

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        evaluate_what_is_due(self)
        self.progress.begin("ending training")
        self.checkpoints.finish_training()
        self._tr_loss.zero_()
        # Trainer divides by the steps of this call, or by 0.001 where there are none; releases that do not know where it began,
        # by all. Of no loss at all, the mean is NaN.
        divisor = self.state.global_step - getattr(self, "_initial_global_step", 0)
        self._total_loss_scalar = self._mean_loss.mean() * max(divisor, 0.001)
        return super()._finalize_training(*args, **kwargs)

    def _finish_current_push(self) -> None:
        self._watching.stop()  # an upload may take longer than any step
        super()._finish_current_push()

    # One optimizer step

    def training_step(self, model: torch.nn.Module, inputs: RankStep, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run this rank's micro-batches and sum gradients over ranks. Returns the step's loss, the same on every
        rank."""
        refuse_other_batch(inputs)
        device = self.args.device
        self.progress.begin("agreeing on the plan", collective=True)
        if agree_on_plan(inputs.fingerprint, device, self.checkpoints.termination.requested):
            self.checkpoints.leave()
        if self.state.global_step == 0:
            logger.info(f"Plan of the first step: {inputs.plan.summary()}")
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        sent_before = self.steps.bytes_sent
        mark = self.recalibration.begin_step(inputs.plan)
        bare_model = self.accelerator.unwrap_model(model)
        if self._noise is not None:
            self._noise.begin_step(inputs, self.run_state.seed)
        sharded = self.sharded_model(bare_model)
        work = Work(
            backward=self.accelerator.backward,
            arguments=self.measurements.forward_arguments,
            sharded=sharded,
            memory=self._activation_memory(bare_model),
            mark=mark,
        )
        loss = self.steps.run(bare_model, inputs, work)
        if (every := self.args.torch_empty_cache_steps) is not None and self.state.global_step % every == 0:
            clear_device_cache()
        self.progress.begin("summing gradients", collective=True)
        own_sent = self.steps.bytes_sent - sent_before
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        statistics = torch.stack([loss, torch.tensor(own_sent, dtype=torch.float64, device=device)])
        statistics = torch.cat([statistics, self.measurements.take()])
        sums = self.steps.sum_gradients(bare_model, trained, statistics, sharded)
        loss, sent = sums[0], sums[1]
        self.measurements.add(sums[2:])
        degree = self.world.tensor_parallel
        loss = loss / degree  # the ranks of a group have each counted it
        if degree > 1:
            for parameter in trained:
                if parameter.grad is not None and not isinstance(parameter, DTensor):
                    parameter.grad /= degree
        self._skip_unless_finite(trained)
        self._recalibrate(inputs.position)
        self.run_data.last_step, self.bytes_of_last_step = inputs, float(sent)
        self.progress.begin("copying what is saved")
        self.checkpoints.let_weights_change()
        self.progress.begin("optimizer step and callbacks")
        self._mean_loss.add(loss)
        return loss.float()

    def _skip_unless_finite(self, trained: list[torch.nn.Parameter]) -> None:
        """Drops the gradients of a step in which one is not finite, on all ranks together; the optimizer then changes
        nothing.

        With float16 the gradient scaler does this itself, and needs to see what is not finite: it is said and counted alone.
        """
        self._skipped = not all_finite(trained, self.args.device)
        if not self._skipped:
            return
        cause = ""
        if self.accelerator.scaler is None:
            for parameter in trained:
                parameter.grad = None
        else:
            cause = ", multiplied by the gradient scaler's factor, which becomes smaller"
        self.run_state.skipped_steps += 1
        logger.warning(
            f"step {self.state.global_step + 1} is skipped on all ranks: its gradients are not finite{cause}. "
            f"{self.run_state.skipped_steps} skipped so far"
        )

    def _recalibrate(self, position: tuple[int, int]) -> None:
        """Correct the costs that plan the next steps by what all ranks have measured, every `recalibrate_steps` steps."""
        every = self.recalibration.every
        if every and (self.state.global_step + 1) % every == 0:
            self.run_state.recalibrations += self.recalibration.agree(position)
            self.run_state.calibration = self.recalibration.state(position)

    def _clip_grad_norm(self, model: Any) -> Any:
        norm = self.steps.gradient_norm(self.accelerator.unwrap_model(self.model), self.args.max_grad_norm)
        return super()._clip_grad_norm(model) if norm is None else norm

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        if grad_norm is None:
            grad_norm = self.steps.gradient_norm(self.accelerator.unwrap_model(self.model), math.inf)
        return super()._get_grad_norm(model, grad_norm)

    def floating_point_ops(self, inputs: RankStep) -> int:
        # All processes are summed over; those of tensor parallelism have the same tokens.
        parameters = self.model.num_parameters(exclude_embeddings=True)
        return 6 * inputs.tokens * parameters // self.world.tensor_parallel

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self.recalibration.end_step()
        if not (self._saw_state or self._skipped):
            self._saw_state = True
            self.checkpoints.refuse_state_that_cannot_be_saved()
        memory = self.measurements.end_step(self.state.global_step, self.data_wait_seconds)
        self.measurements.peak_memory_mib = self._requests.agree(memory)
        if self.control.should_log:  # by itself: a callback that reads a log may ask for more, on one rank alone
            with self._requests.logging():
                super()._maybe_log_save_evaluate(*args, **kwargs)
        calls_back = self.control.should_evaluate or self.control.should_save
        super()._maybe_log_save_evaluate(*args, **kwargs)
        if calls_back:
            self._requests.agree()
        if self._globalstep_last_logged == self.state.global_step:
            self._tr_loss.zero_()  # Trainer subtracts it from itself, which leaves NaN what is NaN

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add what the plan of the last step said: makespan / lower bound, idle share, MiB exchanged by all ranks,
        seconds predicted and measured, how long this process waited for its data, and what measuring/measurements.py says."""
        if "train_loss" in logs and self.state.global_step == self._resumed_at:
            return  # a summary of no step
        if "loss" in logs and self.run_data.last_step is not None:
            logs = logs | describe_step(self, self.run_data.last_step, self.bytes_of_last_step)
        super().log(logs, *args, **kwargs)
        self._requests.put_aside()

    # Evaluation

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = super()._evaluate(*args, **kwargs)
        self._requests.agree()
        return metrics

    def evaluation_loop(
        self,
        dataloader: PlannedDataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Return the loss per label token over all documents, and token metrics: the same on any number of ranks."""
        refuse_hooks_on_logits(self)
        none: Any = None
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in mean_metrics(self, dataloader).items()}
        return EvalLoopOutput(none, none, metrics, num_samples=self.num_examples(dataloader))

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Raise a ValueError: the logits of all documents are never materialised."""
        raise ValueError(
            "predict() returns the logits of all documents, which are never materialised. Valid: evaluate(), or a plain model "
            "over the checkpoint"
        )

    # Checkpoints and models

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.progress.begin("saving a checkpoint")
        self.run_data.say_changed_files()
        self.run_state.losses = self._mean_loss.sums()
        self.checkpoints.save(trial)
        self.progress.begin("callbacks")

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.checkpoints.load_weights(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        self.checkpoints.load_best()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.run_state.refuse_other_base(Path(checkpoint), self.checkpoints.ranks)
            says = self.args.process_index == 0
            changed = self.run_state.changed_settings(Path(checkpoint), self.optimizer, says=says)
            self.checkpoints.load_optimizer(checkpoint, changed)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.checkpoints.load_scaler(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.checkpoints.load_random_state(checkpoint)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model, so that plain transformers loads it, also where checkpoints are in parts: with accelerate's
        default of SHARDED_STATE_DICT, Trainer would save nothing here."""
        if self.world.stages > 1:
            weights = self.checkpoints.whole_weights()
            # Before 5.23 `_save` writes on any rank. That of a model which was spread as it was loaded meets all ranks.
            if self.args.should_save or getattr(self, "is_distributed_loading_by_transformers", False):
                self._save(output_dir, weights)
            if self.args.push_to_hub and not _internal_call:
                self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)
            return
        with whole_state_dict(self.accelerator.state):
            super().save_model(output_dir, _internal_call)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        with saved_as_peft(self), named_as_made(self.model):
            super()._save(output_dir, named_once(self.model, state_dict))
        publish_arguments(self, output_dir)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's, without what a process that was killed left half-written in the output directory."""
        self.checkpoints.writer.wait()
        if self.is_world_process_zero():
            remove_leftovers(Path(self.args.output_dir))
        return super().push_to_hub(*args, **kwargs)


class LongContextTrainer(LongContextMixin, Trainer):  # type: ignore[misc]
    """transformers' Trainer with Hybrid Data Parallelism: the same arguments, and `plugin=LongContextPlugin(...)`.

    Raises:
        ValueError: settings that cannot be honoured; each error names the value, the reason, and what would be valid.
        PlanError: a document longer than all ranks can hold, before training begins.
    """
