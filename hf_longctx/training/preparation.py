"""Making a Trainer's model and its ranks ready for planned steps: arguments, sharding, the exchange, patches.

Nothing is sent here but what making process groups and beginning with the same weights needs.
"""

import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from accelerate.state import PartialState
from transformers.utils import logging

from hf_longctx.attention.exchange import Exchange
from hf_longctx.attention.progress import Progress
from hf_longctx.hardware.devices import preset_of, said_of_speeds
from hf_longctx.models.patch import attention_layers, patch_model
from hf_longctx.models.stages import loaded_stages, whole_parameters
from hf_longctx.planner import CpuKind
from hf_longctx.planner.offload import Offload
from hf_longctx.planner.stage_layers import TYPICAL_LENGTH
from hf_longctx.precision import Decision, cpu_kind, from_first_rank
from hf_longctx.settings.longctx import LongContextPlugin
from hf_longctx.training.activations import ActivationMemory
from hf_longctx.training.arguments import (
    adapted,
    fold_accumulation,
    refuse,
    refuse_arguments,
    refuse_launched_parallelism,
    refuse_replaced_loss,
    refuse_whole_optimizer,
    warn_of_kept_store,
)
from hf_longctx.training.autocast import say_if_much_slower
from hf_longctx.training.capacity import capacity_of_memory, offload_of_memory
from hf_longctx.training.checkpoint.trainer import CheckpointMixin
from hf_longctx.training.pipeline.pipeline import Pipeline, refuse_other_cut
from hf_longctx.training.request import Request
from hf_longctx.training.sharding import (
    ShardedModel,
    Sharding,
    begin_alike,
    chosen_sharding,
    enable_fsdp,
    is_sharded,
    leave_unwrapped,
    planned_mode,
    shard_over,
    tensor_parallel,
)
from hf_longctx.training.watchdog import EXCHANGE_MARGIN, Watchdog

logger = logging.get_logger(__name__)

OUTSIDE = "running code outside the trainer"
"""The work of a rank between making a trainer and training, as far as the watchdog knows."""


def agreed_gpu(
    device: torch.device, speaks: bool, name_of: Callable[[torch.device], str] = torch.cuda.get_device_name
) -> str:
    """Name of the first rank's device, by which all ranks plan; a device that is not known is said where `speaks`. Collective."""
    name = from_first_rank(lambda: name_of(device) if device.type == "cuda" else device.type)
    if speaks and preset_of(name) is None and PartialState().is_main_process:
        logger.warning(said_of_speeds(name))
    return name


class PreparationMixin(CheckpointMixin):
    """Put before a Trainer class. Takes the additional keyword `plugin`; see LongContextPlugin."""

    def __init__(
        self,
        *args: Any,
        plugin: LongContextPlugin | None = None,
        watching: Watchdog | None = None,
        precision: Decision | None = None,
        **kwargs: Any,
    ) -> None:
        """`watching`: a watchdog that has begun before there was a trainer; default: the one that `watchdog` makes.
        `precision`: what `bf16: auto` came to, which `args` say already; None: somebody chose it."""
        refuse_arguments(dict(zip(("model", "args", "data_collator"), args)) | kwargs)
        self.plugin = plugin or LongContextPlugin()
        self.precision = precision
        self.cpu: CpuKind | None = None
        """kind of rank 0's processors, where ranks compute on these: all plan with the same speeds"""
        self.gpu: str | None = None
        """name of rank 0's device, where ranks compute on GPUs, for the same reason"""
        self.exchange: Exchange | None = None
        self.progress = watching.progress if watching is not None else Progress()
        self._watching = self._ended_with_me(watching or self.watchdog())
        self.sharding: Sharding = "ddp"
        self._sharded: ShardedModel | None = None
        self._memory: ActivationMemory | None = None
        self.pipeline: Pipeline | None = None
        self._offload: Offload | None = None
        with self._watching.explaining():
            self._watch()
            self.progress.begin("making the trainer", unbounded=True)
            super().__init__(*args, **kwargs)
            refuse_whole_optimizer(self)
            names = ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics")  # also by position
            refuse_arguments({name: getattr(self, name, None) for name in names})
            say_if_much_slower(self.args, self.model, precision)
            self.progress.begin("patching the model")
            self._patch(self.model)
        self.progress.begin(OUTSIDE, unbounded=True)

    def watchdog(self) -> Watchdog:
        """Make what says, from here to the end of training, whom everyone waits for."""
        return Watchdog(self.progress, self.plugin.stall_timeout_seconds)

    def _watch(self) -> None:
        """Watch, where nothing watches already, as soon as there is a process group."""
        if self._watching.ended:  # as it has after each training
            self._watching = self._ended_with_me(self.watchdog())
        self._watching.start()

    def _ended_with_me(self, watching: Watchdog) -> Watchdog:
        """So that a trainer that is made and never trains leaves no threads behind."""
        weakref.finalize(self, watching.stop)
        return watching

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """CheckpointMixin's, watched from its beginning."""
        refuse_replaced_loss(self)
        self._watch()
        try:
            with self._watching.explaining():
                self.progress.begin_setting_up()
                return super().train(*args, **kwargs)
        finally:
            self._watching.stop()

    def create_accelerator_and_postprocess(self) -> None:
        if self.model is not None:
            attention_layers(self.model)  # refuses other models before anything else is read of them
        if (stages := loaded_stages(self.model)) > 1 and self.plugin.pipeline_stages == 1:
            self.plugin = self.plugin.changed(pipeline_stages=stages)
        self.args = adapted(self.args, self.model, self.plugin, on_cpu=self._on_cpu(self.model))
        super().create_accelerator_and_postprocess()
        self._watch()
        # What other ranks do before this moment takes as long as it takes; from here on all of them set up.
        self.progress.begin("waiting for all ranks to make their trainers", collective=True, unbounded=True)
        self.accelerator.wait_for_everyone()
        self.progress.begin("making process groups")
        if self.args.device.type == "cpu":
            self.cpu = from_first_rank(cpu_kind)
        else:
            self.gpu = agreed_gpu(self.args.device, speaks=self.plugin.cost is None and self.plugin.profile is None)
        enable_fsdp(self.accelerator, self.args.fsdp_plugin_args)
        self.is_fsdp_enabled = getattr(self.accelerator.state, "fsdp_plugin", None) is not None
        refuse_launched_parallelism(self.accelerator)
        self.sharding = chosen_sharding(self.plugin.sharding, self.accelerator, self.model)
        self._refuse(self.model)  # once more, now that it is known how ranks share the model
        self.mode = planned_mode(self.sharding, self.model, self.plugin.pipeline_stages)
        self._make_pipeline()
        if self.sharding == "ddp" and self.args.world_size > 1:
            leave_unwrapped(self.accelerator, self._begin_alike)
        if self.mode == "lockstep":
            why = f"sharding={self.sharding!r}" if self.sharding in ("zero2", "zero3") else "expert parallelism"
            logger.info(
                f"{why}: ranks meet in every micro-batch, so that steps are planned in rounds, as many on each rank"
            )
        self._default_documents = fold_accumulation(self.args, self.plugin, self.hdp_size)
        self.accelerator.longctx_plugin = self.plugin
        warn_of_kept_store()
        if self.hdp_size > 1:
            self.exchange = Exchange(
                self.plugin.stall_timeout_seconds + EXCHANGE_MARGIN,
                ranks_per_node=self.plugin.ranks_per_node,
                groups=self._groups(),
                progress=self.progress,
            )
        self.progress.begin("making the trainer")

    @property
    def _ranks_of_stage(self) -> int:
        """All, or in a pipeline those that have the same layers."""
        return self.args.world_size // self.plugin.pipeline_stages

    @property
    def hdp_size(self) -> int:
        """Ranks that documents are spread over: all, or with tensor parallelism of t, one of every t; in a pipeline of each
        stage."""
        return self._ranks_of_stage // tensor_parallel(self.model)

    @property
    def hdp_rank(self) -> int:
        """This one's number among them; the ranks of a tensor-parallel group, which follow each other, have the same."""
        return self.args.process_index % self._ranks_of_stage // tensor_parallel(self.model)

    def _groups(self) -> list[list[int]]:
        """Ranks that exchange keys and values: those with the same layers and heads."""
        degree, ranks = tensor_parallel(self.model), self._ranks_of_stage
        return [
            list(range(block + first, block + ranks, degree))
            for block in range(0, self.args.world_size, ranks)
            for first in range(degree)
        ]

    def _make_pipeline(self) -> None:
        """Make the pipeline of this process, and cut its part of the model before that goes to the device."""
        plugin = self.plugin
        if plugin.pipeline_stages == 1:
            refuse_other_cut(self.model, 1, [0])
            return
        if self.pipeline is None:
            self.pipeline = Pipeline(
                plugin.pipeline_stages,
                virtual=plugin.virtual_stages,
                schedule=plugin.pipeline_schedule,
                tensor_parallel=tensor_parallel(self.model),
                length=plugin.capacity or TYPICAL_LENGTH,
                timeout_seconds=plugin.stall_timeout_seconds + EXCHANGE_MARGIN,
                progress=self.progress,
            )
        if self.model is not None:
            self._patch_model(self.model)

    def create_optimizer(self, model: Any = None) -> Any:
        if self.pipeline is not None and self.is_fsdp_enabled and not is_sharded(self.model):
            self.pipeline.begin_alike(self.model)
            shard_over(self.model, self.pipeline.group, self.accelerator.state.fsdp_plugin)
        return super().create_optimizer(model)

    def _begin_alike(self, model: Any) -> None:
        if self.pipeline is not None:
            self.pipeline.begin_alike(model)
        else:
            begin_alike(itertools.chain(model.parameters(), model.buffers()))

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

    def _refuse(self, model: Any) -> None:
        refuse(Request(self.args, self.plugin, model, self.args.world_size, self.sharding, self._on_cpu(model)))

    def _on_cpu(self, model: Any) -> bool:
        """Tells whether ranks compute on CPUs, as far as that may be asked: not before a model_init has made its model, since one
        that cannot be patched is refused by its name first."""
        return model is not None and self.args.device.type == "cpu"

    def _patch(self, model: Any) -> Any:
        attention_layers(model)  # of model_init; before its configuration is counted
        self._refuse(model)
        if self.plugin.capacity == 0:
            self.plugin = self.plugin.changed(capacity=capacity_of_memory(self.plugin, model, self.args))
            self.accelerator.longctx_plugin = self.plugin
            logger.info(f"capacity: {self.plugin.capacity} tokens per rank and micro-batch fit into memory")
        if self.plugin.plan_offload:
            self._offload = offload_of_memory(self.plugin, model, self.args)
        if self.plugin.compile_layers and (is_sharded(model) or tensor_parallel(model) > 1):
            raise ValueError(
                "compile_layers=True came with a model that was sharded when it was loaded: layers are compiled before they "
                "are sharded. Valid: compile_layers=False, or sharding by the plugin instead of distributed_config"
            )
        return self._patch_model(model)

    def _patch_model(self, model: Any) -> Any:
        """Over layouts, and in a pipeline this process's stages alone."""
        patched = patch_model(
            model,
            kernel=self.plugin.kernel,
            loss_chunk_tokens=self.plugin.loss_chunk_tokens,
            keep_last_slice=self.plugin.keep_last_slice,
            mlp_tile_tokens=self.plugin.mlp_tile_tokens,
            compile_layers=self.plugin.compile_layers,
            liger_kernels=self.plugin.liger_kernels,
        )
        if self.pipeline is not None:
            self.pipeline.cut(patched)
        return patched

    def _sync_replicated_trainable_parameters(self, model: torch.nn.Module) -> None:
        """Begin the same on all ranks with what is trained beside a model that was sharded when it was loaded. Trainer would
        also average its gradients in each backward, which ranks do not run alike; `training_step` sums them."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if self.pipeline is not None:
            begin_alike(trained, self.pipeline.block[0], self.pipeline.group)
        elif self.args.world_size > 1:
            begin_alike(trained)

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        """Name -> parameter of the whole model; without memory (meta) what other stages of a pipeline have."""
        return whole_parameters(self.accelerator.unwrap_model(self.model))

    def _sharded_model(self, model: torch.nn.Module) -> ShardedModel | None:
        """The model under FSDP2, once it is."""
        if self._sharded is None and is_sharded(model):
            self._sharded = ShardedModel(model, self.sharding)
        return self._sharded

    def _activation_memory(self, model: Any) -> ActivationMemory:
        if self._memory is None:
            self._memory = ActivationMemory(model, keep_attention=self.plugin.keep_attention, device=self.args.device)
        return self._memory
