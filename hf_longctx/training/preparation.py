"""Making a Trainer's model and its ranks ready for planned steps: arguments, sharding, the exchange, patches.

Nothing is sent here but what making process groups and beginning with the same weights needs.
"""

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
from hf_longctx.parallel.world import IN_ROUNDS, Sharding, World
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
from hf_longctx.training.request import Request
from hf_longctx.training.sharding import (
    ShardedModel,
    arranged,
    enable_fsdp,
    is_sharded,
    leave_unwrapped,
    sharding_of,
)
from hf_longctx.training.steps.plain import PlainSteps
from hf_longctx.training.steps.staged import StagedSteps
from hf_longctx.training.steps.work import Steps
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
        self.world: World
        """how processes are arranged; known when the accelerator is"""
        self._sharded: ShardedModel | None = None
        self._memory: ActivationMemory | None = None
        self.steps: Steps
        """runs this process's part of a step; made with the accelerator"""
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
        processes = self.args.world_size
        sharding = sharding_of(self.plugin.sharding, processes, self.model, self.accelerator.state)
        self._refuse(self.model, sharding)  # once more, now that it is known how ranks share the model
        self.world = arranged(processes, sharding, self.plugin, self.model)
        if sharding == "ddp" and processes > 1:
            leave_unwrapped(self.accelerator, lambda model: self.steps.begin_alike(model))
        if self.world.mode == "lockstep":
            why = f"sharding={sharding!r}" if sharding in IN_ROUNDS else "expert parallelism"
            logger.info(
                f"{why}: ranks meet in every micro-batch, so that steps are planned in rounds, as many on each rank"
            )
        self._default_documents = fold_accumulation(self.args, self.plugin, self.world.ranks)
        self.accelerator.longctx_plugin = self.plugin
        warn_of_kept_store()
        if self.world.ranks > 1:
            self.exchange = Exchange(
                self.plugin.stall_timeout_seconds + EXCHANGE_MARGIN,
                ranks_per_node=self.plugin.ranks_per_node,
                groups=self.world.exchange_groups,
                progress=self.progress,
            )
        self.steps = self._make_steps()
        if self.world.stages > 1 and self.model is not None:
            self._patch_model(self.model)
        self.progress.begin("making the trainer")

    @property
    def hdp_rank(self) -> int:
        """Return this process's number among the ranks that documents are spread over."""
        return self.world.rank_of(self.args.process_index)

    def _make_steps(self) -> Steps:
        """Make what runs this process's part of a step."""
        plugin, world, device = self.plugin, self.world, self.args.device
        if world.stages == 1:
            return PlainSteps(world.processes, self.exchange, device, plugin.activation_offload, self.progress)
        return StagedSteps(
            world,
            self.exchange,
            device,
            virtual=plugin.virtual_stages,
            schedule=plugin.pipeline_schedule,
            offload=plugin.activation_offload,
            length=plugin.capacity or TYPICAL_LENGTH,
            timeout_seconds=plugin.stall_timeout_seconds + EXCHANGE_MARGIN,
            progress=self.progress,
        )

    def create_optimizer(self, model: Any = None) -> Any:
        if self.is_fsdp_enabled and not is_sharded(self.model):
            self.steps.shard(self.model, self.accelerator.state.fsdp_plugin)
        return super().create_optimizer(model)

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

    def _refuse(self, model: Any, sharding: Sharding) -> None:
        refuse(Request(self.args, self.plugin, model, self.args.world_size, sharding, self._on_cpu(model)))

    def _on_cpu(self, model: Any) -> bool:
        """Tells whether ranks compute on CPUs, as far as that may be asked: not before a model_init has made its model, since one
        that cannot be patched is refused by its name first."""
        return model is not None and self.args.device.type == "cpu"

    def _patch(self, model: Any) -> Any:
        attention_layers(model)  # of model_init; before its configuration is counted
        self._refuse(model, self.world.sharding)
        if self.plugin.capacity == 0:
            self.plugin = self.plugin.changed(capacity=capacity_of_memory(self.plugin, model, self.args, self.world))
            self.accelerator.longctx_plugin = self.plugin
            logger.info(f"capacity: {self.plugin.capacity} tokens per rank and micro-batch fit into memory")
        if self.plugin.plan_offload:
            self._offload = offload_of_memory(self.plugin, model, self.args, self.world)
        if self.plugin.compile_layers and (is_sharded(model) or self.world.tensor_parallel > 1):
            raise ValueError(
                "compile_layers=True came with a model that was sharded when it was loaded: layers are compiled before they "
                "are sharded. Valid: compile_layers=False, or sharding by the plugin instead of distributed_config"
            )
        return self._patch_model(model)

    def _patch_model(self, model: Any) -> Any:
        """Patch a model to run over layouts, and leave of it what this process runs, before it goes to the device."""
        patched = patch_model(
            model,
            kernel=self.plugin.kernel,
            loss_chunk_tokens=self.plugin.loss_chunk_tokens,
            keep_last_slice=self.plugin.keep_last_slice,
            mlp_tile_tokens=self.plugin.mlp_tile_tokens,
            compile_layers=self.plugin.compile_layers,
            liger_kernels=self.plugin.liger_kernels,
        )
        self.steps.cut(patched)
        return patched

    def _sync_replicated_trainable_parameters(self, model: torch.nn.Module) -> None:
        """Begin the same on all ranks with what is trained beside a model that was sharded when it was loaded. Trainer would
        also average its gradients in each backward, which ranks do not run alike; `training_step` sums them."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.steps.begin_trained_alike(trained)

    def whole_parameters(self) -> dict[str, torch.Tensor]:
        """Name -> parameter of the whole model; without memory (meta) what other stages of a pipeline have."""
        return whole_parameters(self.accelerator.unwrap_model(self.model))

    def _sharded_model(self, model: torch.nn.Module) -> ShardedModel | None:
        """The model under FSDP2, once it is."""
        if self._sharded is None and is_sharded(model):
            self._sharded = ShardedModel(model, self.world.sharding)
        return self._sharded

    def _activation_memory(self, model: Any) -> ActivationMemory:
        if self._memory is None:
            self._memory = ActivationMemory(model, keep_attention=self.plugin.keep_attention, device=self.args.device)
        return self._memory
