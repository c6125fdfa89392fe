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
import os
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import logging

from hf_longctx.attention.exchange import Exchange
from hf_longctx.attention.progress import Progress
from hf_longctx.data.collator import LengthAwareCollator, RankStep
from hf_longctx.data.length_index import LengthIndex, refuse_tokens_outside
from hf_longctx.data.loader import PlannedDataLoader, PlannedSteps
from hf_longctx.data.long_documents import Pieces, cut_documents
from hf_longctx.models.patch import patch_model
from hf_longctx.planner import GlobalBatches, Topology
from hf_longctx.planner.adjustment import Adjustments
from hf_longctx.planner.offload import Offload
from hf_longctx.training.activations import ActivationMemory
from hf_longctx.training.arguments import (
    adapted,
    fold_accumulation,
    refuse_arguments,
    refuse_launched_parallelism,
    refuse_mask_columns,
    refuse_ulysses_degree,
    warn_of_unused_loss,
)
from hf_longctx.training.capacity import capacity_of_memory, offload_of_memory
from hf_longctx.training.checkpoint.trainer import CheckpointMixin
from hf_longctx.training.execution import follow_layers, run_micro_batches
from hf_longctx.training.plugin import LongContextPlugin
from hf_longctx.training.recalibration import Recalibration, restored
from hf_longctx.training.reduction import agree_on_plan, all_finite, largest_over_ranks, sum_step
from hf_longctx.training.run_state import RunState
from hf_longctx.training.sharding import (
    ShardedModel,
    Sharding,
    begin_alike,
    chosen_sharding,
    enable_fsdp,
    expert_parallel,
    is_sharded,
    leave_unwrapped,
    planned_mode,
    tensor_parallel,
)
from hf_longctx.training.watchdog import EXCHANGE_MARGIN, Watchdog

logger = logging.get_logger(__name__)

EVALUATION_STEP_CAPACITIES = 8
"""Tokens of one evaluation step, in capacities of all ranks together: enough documents to balance, few enough to
hold."""


class LongContextMixin(CheckpointMixin):
    """Put before a Trainer class. Takes the additional keyword `plugin`; see LongContextPlugin."""

    args: Any
    control: Any
    model: Any
    optimizer: Any

    def __init__(self, *args: Any, plugin: LongContextPlugin | None = None, **kwargs: Any) -> None:
        refuse_arguments(kwargs)
        self.plugin = plugin or LongContextPlugin()
        self.exchange: Exchange | None = None
        self.progress = Progress()
        self.sharding: Sharding = "ddp"
        self.run_state: Any = None
        self._last_step: tuple[RankStep, float] | None = None
        self._recalibration: Any = None
        self._resuming_from: str | None = None
        self._training_steps: PlannedSteps | None = None
        self._evaluation_steps: dict[int, PlannedSteps] = {}
        self._sharded: ShardedModel | None = None
        self._memory: ActivationMemory | None = None
        self._offload: Offload | None = None
        super().__init__(*args, **kwargs)
        warn_of_unused_loss(self)
        self._patch(self.model)

    def create_accelerator_and_postprocess(self) -> None:
        self.args = adapted(self.args, self.model, self.plugin.sharding)
        super().create_accelerator_and_postprocess()
        enable_fsdp(self.accelerator, self.args.fsdp_plugin_args)
        self.is_fsdp_enabled = getattr(self.accelerator.state, "fsdp_plugin", None) is not None
        refuse_launched_parallelism(self.accelerator)
        self.sharding = chosen_sharding(self.plugin.sharding, self.accelerator, self.model)
        self.mode = planned_mode(self.sharding, self.model)
        if self.sharding == "ddp" and self.args.world_size > 1:
            leave_unwrapped(self.accelerator)
        if self.mode == "lockstep":
            why = f"sharding={self.sharding!r}" if self.sharding in ("zero2", "zero3") else "expert parallelism"
            logger.info(
                f"{why}: ranks meet in every micro-batch, so that steps are planned in rounds, as many on each rank"
            )
        if self.plugin.plan_offload and self.mode == "lockstep":
            raise ValueError(
                f"plan_offload=True with sharding={self.sharding!r} and {expert_parallel(self.model)} expert-parallel ranks: "
                "steps that are planned in rounds leave what waits in host memory to activation_offload. Valid: sharding ddp or "
                "zero1, without expert parallelism"
            )
        self._default_documents = fold_accumulation(self.args, self.plugin, self.hdp_size)
        self.accelerator.longctx_plugin = self.plugin
        self._begin_checkpoints(self.plugin.async_save, self.plugin.grace_seconds)
        if self.hdp_size > 1:
            self.exchange = Exchange(
                self.plugin.stall_timeout_seconds + EXCHANGE_MARGIN,
                ranks_per_node=self.plugin.ranks_per_node,
                groups=self._groups(),
                progress=self.progress,
            )

    @property
    def hdp_size(self) -> int:
        """Ranks that documents are spread over: all, or with tensor parallelism of t, one of every t."""
        return self.args.world_size // tensor_parallel(self.model)

    @property
    def hdp_rank(self) -> int:
        """This one's number among them; the ranks of a tensor-parallel group, which follow each other, have the same."""
        return self.args.process_index // tensor_parallel(self.model)

    def _groups(self) -> list[list[int]]:
        """Ranks that exchange keys and values: those with the same heads."""
        degree = tensor_parallel(self.model)
        return [list(range(first, self.args.world_size, degree)) for first in range(degree)]

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        arguments = super()._build_accelerator_args(**kwargs)
        # A model that was sharded when it was loaded has its own mesh; accelerate would make another, on GPUs only.
        arguments.pop("parallelism_config", None)
        return arguments

    def call_model_init(self, trial: Any = None) -> Any:
        model = super().call_model_init(trial)
        if is_sharded(model):
            raise ValueError(
                "model_init returned a model that was sharded when it was loaded, and how ranks share it was settled before. "
                "Valid: model=..., or a model_init that loads whole weights"
            )
        self._sharded = self._memory = None
        return self._patch(model)

    def _patch(self, model: Any) -> Any:
        if self.plugin.capacity == 0:
            self.plugin = replace(self.plugin, capacity=capacity_of_memory(self.plugin, model, self.args))
            self.accelerator.longctx_plugin = self.plugin
            logger.info(f"capacity: {self.plugin.capacity} tokens per rank and micro-batch fit into memory")
        if self.plugin.plan_offload:
            self._offload = offload_of_memory(self.plugin, model, self.args)
        refuse_ulysses_degree(self.plugin.ulysses_degree, model)
        if self.plugin.compile_layers and (is_sharded(model) or tensor_parallel(model) > 1):
            raise ValueError(
                "compile_layers=True came with a model that was sharded when it was loaded: layers are compiled before they "
                "are sharded. Valid: compile_layers=False, or sharding by the plugin instead of distributed_config"
            )
        return patch_model(
            model,
            kernel=self.plugin.kernel,
            loss_chunk_tokens=self.plugin.loss_chunk_tokens,
            keep_last_slice=self.plugin.keep_last_slice,
            mlp_tile_tokens=self.plugin.mlp_tile_tokens,
            compile_layers=self.plugin.compile_layers,
            liger_kernels=self.plugin.liger_kernels,
        )

    # Data

    def planned_steps(
        self,
        dataset: Any,
        batches_of: Callable[[Pieces], GlobalBatches],
        begin: Callable[[LengthIndex], None] = lambda index: None,
    ) -> PlannedSteps:
        """Planned steps over a data set; `begin` is called before long documents are cut."""
        refuse_mask_columns(dataset)
        index = LengthIndex.from_dataset(dataset)
        refuse_tokens_outside(dataset, self.model.config.vocab_size)
        topology = Topology(
            world_size=self.hdp_size,
            capacity=self.plugin.capacity,
            ranks_per_node=self.exchange.ranks_per_node if self.exchange is not None else None,
            ulysses_degree=self.plugin.ulysses_degree,
        )
        half = self.args.bf16 or self.args.fp16
        cost = self.plugin.cost_model(self.model, topology, self.args.device, autocast=half)
        collator = LengthAwareCollator(topology, cost, self.hdp_rank, self.plugin.planner, self.mode, self._offload)
        begin(index)
        pieces = cut_documents(dataset, index, self.plugin.long_documents, self._longest_document())
        return PlannedSteps(dataset, pieces, batches_of(pieces), collator)

    def training_steps(self) -> PlannedSteps:
        """The planned optimizer steps of this run, for training and for looking at."""
        if self._training_steps is None:
            if self.train_dataset is None:
                raise ValueError("training needs a train_dataset with a column input_ids")
            self._training_steps = self.planned_steps(self.train_dataset, self._training_batches, self._begin_run)
            cost = self._training_steps.collator.cost
            self._training_steps.adjustments = restored(self.run_state.calibration, cost, self.hdp_size)
        return self._training_steps

    def get_train_dataloader(self) -> PlannedDataLoader:
        return self._dataloader(self.training_steps())

    def get_eval_dataloader(self, eval_dataset: Any = None) -> PlannedDataLoader:
        dataset = self.eval_dataset[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        dataset = dataset if dataset is not None else self.eval_dataset
        if dataset is None:
            raise ValueError("evaluation needs an eval_dataset with a column input_ids")
        planned = self._evaluation_steps.get(id(dataset))
        if planned is None or planned.dataset is not dataset or planned.pieces.limit != self._longest_document():
            tokens = EVALUATION_STEP_CAPACITIES * self.plugin.capacity * self.hdp_size
            planned = self.planned_steps(dataset, lambda pieces: GlobalBatches(pieces.lengths, 0, tokens=tokens))
            self._evaluation_steps[id(dataset)] = planned
        if self._last_step is not None:  # planned as the training step before it was
            now = self.training_steps().adjustments.at(*self._last_step[0].position)
            planned.adjustments = Adjustments([(0, 0, now)])
        return self._dataloader(planned)

    def _dataloader(self, steps: PlannedSteps) -> PlannedDataLoader:
        return PlannedDataLoader(
            steps,
            num_workers=self.args.dataloader_num_workers,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            persistent_workers=self.args.dataloader_persistent_workers,
            pin_memory=self.args.dataloader_pin_memory and self.args.device.type == "cuda",
        )

    def _longest_document(self) -> int | None:
        """Tokens at which long documents are cut, once the run has begun as it began; None: they are not."""
        if self.run_state is not None:
            return self.run_state.longest_document
        return self.plugin.first_longest_document(self.hdp_size)

    def _training_batches(self, pieces: Pieces) -> GlobalBatches:
        run = self.run_state
        return GlobalBatches(
            pieces.lengths, run.seed, documents=run.global_batch_documents, tokens=run.global_batch_tokens
        )

    def _begin_run(self, index: LengthIndex) -> None:
        """Fixes what a checkpoint must remember, the global batches among it: the plugin's, else Trainer's batch size; a
        checkpoint's when resuming."""
        documents, tokens = self.plugin.global_batch_documents, self.plugin.global_batch_tokens
        if documents is None and tokens is None:
            documents = self._default_documents
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        if self.run_state is not None:
            self.remove_callback(self.run_state)
        longest = self.plugin.first_longest_document(self.hdp_size)
        self.run_state = RunState(documents, tokens, seed, index.fingerprint, self.plugin.long_documents, longest)
        self.add_callback(self.run_state)
        if self._resuming_from is not None:
            self.run_state.restore(
                TrainerState.load_from_json(os.path.join(self._resuming_from, TRAINER_STATE_NAME)),
                {
                    "global_batch_documents": self.plugin.global_batch_documents,
                    "global_batch_tokens": self.plugin.global_batch_tokens,
                    "seed": self.args.data_seed,
                    "long_documents": self.plugin.long_documents,
                    "longest_document": self.plugin.longest_document,
                },
            )

    # Trainer's loop: an epoch has as many steps as the planner made of it, which need not be the same number each time

    def _inner_training_loop(self, *args: Any, resume_from_checkpoint: str | None = None, **kwargs: Any) -> Any:
        self._resuming_from = resume_from_checkpoint
        self._training_steps = None  # a checkpoint decides what the global batches are
        if self.args.eval_strategy != "no":  # what is wrong with these documents is said before any time is lost
            self.training_steps()  # a checkpoint decides where documents are cut
            for dataset in self.eval_dataset.values() if isinstance(self.eval_dataset, dict) else [self.eval_dataset]:
                self.get_eval_dataloader(dataset)
        watchdog = self.watchdog()
        with ExitStack() as self._while_training:
            self._while_training.callback(watchdog.stop)
            watchdog.start()
            return super()._inner_training_loop(*args, resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def watchdog(self) -> Watchdog:
        """What says, while training lasts, whom everyone waits for."""
        return Watchdog(self.progress, self.plugin.stall_timeout_seconds)

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        self._while_training.enter_context(follow_layers(self.accelerator.unwrap_model(self.model), self.progress))
        return prepared

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.progress.begin("saving a checkpoint")
        super()._save_checkpoint(*args, **kwargs)
        self.progress.begin("callbacks")

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self.progress.begin("ending training")
        return super()._finalize_training(*args, **kwargs)

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
        every, ahead = self.plugin.recalibrate_steps, self.get_train_dataloader().ahead
        self._recalibration = Recalibration(self.training_steps(), self.hdp_rank, every, ahead, self.args.device)
        epoch, left = 0, self.state.global_step
        while left >= (steps := self.training_steps().steps(epoch)):
            epoch, left = epoch + 1, left - steps
        return epoch, 0 if self.args.ignore_data_skip else left

    def _run_epoch(self, *, epoch: int, train_dataloader: Any, **kwargs: Any) -> None:
        steps = train_dataloader.dataset.steps(epoch)
        kwargs |= {"steps_in_epoch": steps, "num_update_steps_per_epoch": steps}
        super()._run_epoch(epoch=epoch, train_dataloader=train_dataloader, **kwargs)

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[RankStep], None]:
        self.progress.begin_step(self.state.global_step + 1)
        self.progress.begin("loading data")
        return list(itertools.islice(epoch_iterator, num_batches)), None

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
        sent_before = self._bytes_sent()
        mark = self._recalibration.begin_step(inputs.plan)
        bare_model = self.accelerator.unwrap_model(model)
        sharded = self._sharded_model(bare_model)
        memory = self._activation_memory(bare_model)
        loss = run_micro_batches(
            bare_model,
            inputs,
            self.exchange,
            device,
            self.accelerator.backward,
            mark,
            sharded,
            memory,
            self.plugin.activation_offload,
            self.progress,
        )
        self.progress.begin("summing gradients", collective=True)
        sent = self._bytes_sent() - sent_before
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        statistics = torch.stack([loss, torch.tensor(sent, dtype=torch.float64, device=device)])
        # What is in parts, FSDP2 has summed; the rest is the same on all ranks, adapters on a model in parts among it.
        whole = [parameter for parameter in trained if not isinstance(parameter, DTensor)]
        loss, sent = sum_step(whole, statistics)
        degree = tensor_parallel(bare_model)
        loss = loss / degree  # the ranks of a group have each counted it
        if degree > 1:
            for parameter in whole:
                if parameter.grad is not None:
                    parameter.grad /= degree
        scaler = self.accelerator.scaler
        if scaler is not None and not inputs.micro_batches:
            scaler.scale(loss.float())  # a rank that ran no backward must have the same scaler as the others
        self._skip_unless_finite(trained)
        self._recalibrate(inputs.position)
        self._last_step = (inputs, float(sent))
        self._let_weights_change()
        self.progress.begin("optimizer step and callbacks")
        return loss.float()

    def _sync_replicated_trainable_parameters(self, model: torch.nn.Module) -> None:
        """What is trained beside a model that was sharded when it was loaded begins the same on all ranks. Trainer would
        also average its gradients in each backward, which ranks do not run alike; `training_step` sums them."""
        if self.args.world_size > 1:
            begin_alike(parameter for parameter in model.parameters() if parameter.requires_grad)

    def _sharded_model(self, model: torch.nn.Module) -> ShardedModel | None:
        """The model under FSDP2, once it is."""
        if self._sharded is None and is_sharded(model):
            self._sharded = ShardedModel(model, self.sharding)
        return self._sharded

    def _activation_memory(self, model: Any) -> ActivationMemory:
        if self._memory is None:
            self._memory = ActivationMemory(model, keep_attention=self.plugin.keep_attention, device=self.args.device)
        return self._memory

    def _recalibrate(self, position: tuple[int, int]) -> None:
        """After every so many steps, all ranks agree on what their times say of the costs that plan the next ones."""
        every = self.plugin.recalibrate_steps
        if every and (self.state.global_step + 1) % every == 0:
            self.run_state.recalibrations += self._recalibration.agree(position)
            self.run_state.calibration = self._recalibration.state(position)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        """What a callback of any rank asked for, all ranks do: stop, save, evaluate, log. One alone would wait for
        the others."""
        self._recalibration.end_step()
        self.progress.begin("agreeing on what callbacks asked for", collective=True)
        if self.args.world_size > 1:
            names = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
            asked = torch.tensor([getattr(self.control, name) for name in names], dtype=torch.int32)
            for name, value in zip(names, largest_over_ranks(asked.to(self.args.device)).tolist()):
                setattr(self.control, name, bool(value))
        self.progress.begin("callbacks")
        super()._maybe_log_save_evaluate(*args, **kwargs)

    def _bytes_sent(self) -> int:
        return self.exchange.bytes_sent if self.exchange is not None else 0

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
            "save_seconds": round(self.save_seconds, 3),
            "failed_saves": self.checkpoint_writer.failures,
            **({"offloaded_tokens": summary.offloaded_tokens} if self.plugin.plan_offload else {}),
        } | self._recalibration.describe(summary.makespan)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds what the plan of the last step said: makespan / lower bound, idle share, MiB exchanged by all ranks,
        seconds predicted and measured."""
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

    # Evaluation

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Refused with a ValueError: it would return the logits of all documents."""
        raise ValueError(
            "predict() returns the logits of all documents, which are never materialised. Valid: evaluate(), or a plain model "
            "over the checkpoint"
        )

    def evaluation_loop(
        self,
        dataloader: PlannedDataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Loss per label token over all documents: the same number on any number of ranks. A router's auxiliary loss
        is left out.
        """
        if self.is_fsdp_enabled and not is_sharded(self.model):  # before training, which would shard it
            self.create_optimizer()
            self.model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
            self.model_wrapped = self.model
        device, model = self.args.device, self.accelerator.unwrap_model(self.model)
        model.eval()
        if callable(getattr(self.optimizer, "eval", None)):
            self.optimizer.eval()
        self.callback_handler.eval_dataloader = dataloader
        sharded = self._sharded_model(model)
        arguments: Any = {"output_router_logits": False} if hasattr(model.config, "output_router_logits") else {}
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        with self.progress.evaluation():
            for step in dataloader:
                self.progress.begin("agreeing on the plan", collective=True)
                if agree_on_plan(step.fingerprint, device, self.termination.requested):
                    self._leave()
                # Weights under FSDP2 are in the dtype they compute in already.
                with torch.no_grad(), nullcontext() if sharded is not None else self.accelerator.autocast():
                    loss = run_micro_batches(
                        model, step, self.exchange, device, sharded=sharded, progress=self.progress, **arguments
                    )
                totals += torch.stack([loss * step.num_items, torch.tensor(float(step.num_items), device=device)])
                self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
                self.progress.begin("loading data")
            self.progress.begin("summing losses", collective=True)
            loss_sum = sum_step([], totals[:1]) / tensor_parallel(model)
        metrics = {f"{metric_key_prefix}_loss": float(loss_sum / totals[1])}
        none: Any = None
        return EvalLoopOutput(none, none, metrics, num_samples=self.num_examples(dataloader))


class LongContextTrainer(LongContextMixin, Trainer):  # type: ignore[misc]
    """transformers' Trainer with Hybrid Data Parallelism: the same arguments, and `plugin=LongContextPlugin(...)`.

    Raises:
        ValueError: settings that cannot be honoured; each error names the value, the reason, and what would be valid.
        PlanError: a document longer than all ranks can hold, before training begins.
    """
