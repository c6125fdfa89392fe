"""Making a trainer's ranks and its model ready for planned steps: sharding, the arrangement of processes, the exchange, patches.

Sent here: what making process groups and beginning with the same weights needs, and what rank 0 finds out about the model
(certificate/sharing.py).
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.state import PartialState
from transformers.utils import logging

from hf_longctx.attention.exchange import Exchange
from hf_longctx.certificate import Certificate, Conditions, certificate_of, run_check, share_certificate
from hf_longctx.certificate.loaded_in_parts import refuse_wrong_parts
from hf_longctx.certified_patch import patch_model
from hf_longctx.hardware.devices import preset_of, said_of_speeds
from hf_longctx.models.attention import is_patched
from hf_longctx.models.documents import documents_of
from hf_longctx.models.patch import attention_layers
from hf_longctx.models.wrappers import language_model_of
from hf_longctx.parallel.reduction import meet
from hf_longctx.parallel.sharding import (
    arranged,
    enable_fsdp,
    expert_parallel,
    is_sharded,
    leave_unwrapped,
    sharding_of,
    tensor_parallel,
)
from hf_longctx.parallel.world import World
from hf_longctx.planner.memory.state_bytes import IN_ROUNDS, Sharding
from hf_longctx.planner.stages.stage_layers import TYPICAL_LENGTH
from hf_longctx.precision import cpu_kind, from_first_rank
from hf_longctx.settings.longctx import LongContextPlugin
from hf_longctx.supervision.progress import Progress
from hf_longctx.supervision.watchdog import EXCHANGE_MARGIN
from hf_longctx.training.arguments import (
    refuse,
    refuse_cpu_ranks_that_see_gpus,
    refuse_launched_parallelism,
    warn_of_kept_store,
)
from hf_longctx.training.memory.capacity import (
    LOSS_CHUNKS,
    capacity_of_memory,
    loss_chunk_of_memory,
    offload_of_memory,
    warm_kernel,
)
from hf_longctx.training.request import Request
from hf_longctx.training.steps.plain import PlainSteps
from hf_longctx.training.steps.staged import StagedSteps
from hf_longctx.training.steps.work import Steps

logger = logging.get_logger(__name__)

AUTOCAST = {"bf16": "bfloat16", "fp16": "float16"}
"""accelerate's mixed precision -> dtype of autocast."""


def agreed_gpu(
    device: torch.device, speaks: bool, name_of: Callable[[torch.device], str] = torch.cuda.get_device_name
) -> str:
    """Name of the first rank's device, by which all ranks plan; a device that is not known is said where `speaks`. Collective."""
    name = from_first_rank(lambda: name_of(device) if device.type == "cuda" else device.type)
    if speaks and preset_of(name) is None and PartialState().is_main_process:
        logger.warning(said_of_speeds(name))
    return name


def arrange(trainer: Any) -> None:
    """Arrange the processes of a trainer that has its accelerator: sets `world`, `exchange`, `steps` and what all ranks know of
    their devices, `cpu` and `gpu`; lets accelerate shard where that is asked for, and keep whole models unwrapped. Collective.

    Raises:
        ValueError: what is asked for, or how the model was loaded, cannot be arranged.
    """
    args, plugin, progress, accelerator = trainer.args, trainer.plugin, trainer.progress, trainer.accelerator
    # What other ranks do before this moment takes as long as it takes; from here on all of them set up.
    progress.begin("waiting for all ranks to make their trainers", collective=True, unbounded=True)
    refuse_cpu_ranks_that_see_gpus(accelerator)
    meet(args.device)
    progress.begin("making process groups")
    if args.device.type == "cpu":
        trainer.cpu = from_first_rank(cpu_kind)
    else:
        trainer.gpu = agreed_gpu(args.device, speaks=plugin.cost is None and plugin.profile is None)
    enable_fsdp(accelerator, args.fsdp_plugin_args)
    trainer.is_fsdp_enabled = getattr(accelerator.state, "fsdp_plugin", None) is not None
    refuse_launched_parallelism(accelerator)
    processes = args.world_size
    sharding = sharding_of(plugin.sharding, processes, trainer.model, accelerator.state)
    refuse_request(trainer, trainer.model, sharding)  # once more, now that it is known how ranks share the model
    before, world = getattr(trainer, "world", None), arranged(processes, sharding, plugin, trainer.model)
    trainer.world = world
    if sharding == "ddp" and processes > 1:
        leave_unwrapped(accelerator, lambda model: trainer.steps.begin_alike(model))
    if world.mode == "lockstep":
        why = f"sharding={sharding!r}" if sharding in IN_ROUNDS else "expert parallelism"
        logger.info(
            f"{why}: ranks meet in every micro-batch, so that steps are planned in rounds, as many on each rank"
        )
    warn_of_kept_store()
    if world == before:  # a trial of a hyperparameter search: its processes are those of the trial before
        return
    trainer.exchange = None
    if world.ranks > 1:
        trainer.exchange = Exchange(
            plugin.stall_timeout_seconds + EXCHANGE_MARGIN,
            ranks_per_node=plugin.ranks_per_node,
            groups=world.exchange_groups,
            progress=progress,
            meet_all=plugin.connect_peers,
        )
    trainer.steps = make_steps(plugin, world, trainer.exchange, args.device, progress)


def make_steps(
    plugin: LongContextPlugin, world: World, exchange: Exchange | None, device: torch.device, progress: Progress
) -> Steps:
    """Make what runs this process's part of a step. Collective where there are stages."""
    if world.stages == 1:
        return PlainSteps(world.processes, exchange, device, plugin.activation_offload, progress)
    return StagedSteps(
        world,
        exchange,
        device,
        virtual=plugin.virtual_stages,
        schedule=plugin.pipeline_schedule,
        offload=plugin.activation_offload,
        length=plugin.capacity or TYPICAL_LENGTH,
        timeout_seconds=plugin.stall_timeout_seconds + EXCHANGE_MARGIN,
        progress=progress,
    )


def refuse_request(trainer: Any, model: Any, sharding: Sharding) -> None:
    """Raise ValueError for all that the trainer's settings ask for and a model cannot have."""
    args = trainer.args
    refuse(Request(args, trainer.plugin, model, args.world_size, sharding, computes_on_cpu(model, args)))


def computes_on_cpu(model: Any, args: Any) -> bool:
    """Tell whether ranks compute on CPUs, as far as that may be asked: not before a model_init has made its model, since one that
    cannot be patched is refused by its name first."""
    return model is not None and args.device.type == "cpu"


def prepare_model(trainer: Any, model: Any) -> Any:
    """Make a model ready for planned steps: patched over layouts, and what of it this process runs. Settles a capacity that the
    device's memory decides, and what waits in host memory. Returns the model.

    Raises:
        ValueError: the model cannot have what is asked for.
    """
    args, world = trainer.args, trainer.world
    attention_layers(model)  # of model_init; before its configuration is counted
    refuse_request(trainer, model, world.sharding)
    if trainer.plugin.capacity == 0:
        trainer.plugin = trainer.plugin.changed(capacity=capacity_of_memory(trainer.plugin, model, args, world))
        trainer.accelerator.longctx_plugin = trainer.plugin
        logger.info(f"capacity: {trainer.plugin.capacity} tokens per rank and micro-batch fit into memory")
    if trainer.plugin.loss_chunk_tokens == 0:
        chunk = loss_chunk_of_memory(trainer.plugin, model, args, world)
        trainer.plugin = trainer.accelerator.longctx_plugin = trainer.plugin.model_copy(
            update={"loss_chunk_tokens": chunk}
        )
    plugin = trainer.plugin
    if plugin.plan_offload:
        trainer.offload = offload_of_memory(plugin, model, args, world)
    if plugin.compile_layers and (is_sharded(model) or world.tensor_parallel > 1):
        raise ValueError(
            "compile_layers=True came with a model that was sharded when it was loaded: layers are compiled before they "
            "are sharded. Valid: compile_layers=False, or sharding by the plugin instead of distributed_config"
        )
    model = patched(trainer, model)
    trainer.progress.begin("compiling attention's kernels", unbounded=True)
    warm_kernel(plugin, language_model_of(model), args, world)
    trainer.progress.begin("patching the model")
    trainer.certificate = certificate_of_run(trainer, model)
    if documents_of(model) != "split" and world.ranks > 1:
        logger.warning(
            f"{type(model).__name__} runs on whole documents: each lies on one rank, and must fit into a capacity of "
            f"{plugin.capacity} tokens"
        )
    return model


def refuse_other_arrangement(model: Any, world: World) -> None:
    """Raise ValueError for a model of model_init that was spread over ranks as it was loaded: processes are arranged by then."""
    spread = (tensor_parallel(model), expert_parallel(model)) != (world.tensor_parallel, world.expert_parallel)
    if spread or is_sharded(model):
        raise ValueError(
            "model_init returned a model that was sharded when it was loaded, and how ranks share it was settled before. "
            "Valid: model=..., or a model_init that loads whole weights"
        )


def patched(trainer: Any, model: Any) -> Any:
    """Patch a trainer's model to run over layouts, and leave of it what this process runs. Collective where the model has no
    certificate yet, which rank 0 makes."""
    plugin, language_model = trainer.plugin, language_model_of(model)
    if not (hasattr(language_model, "longctx_certificate") or hasattr(language_model, "longctx_traits")):
        trainer.progress.begin("waiting for the model's certificate", unbounded=True)
        share_certificate(language_model)
        if attention_layers(model):
            language_model.longctx_certificate = certificate_of_own_classes(language_model)
        trainer.progress.begin("patching the model")
    if parts := _settings_of_parts(language_model, trainer.world):
        trainer.progress.begin("trying the model in parts with a tiny copy", unbounded=True)
        refuse_wrong_parts(language_model, parts)
        trainer.progress.begin("patching the model")
    if not is_patched(language_model):
        _take_off_autocast(language_model)
    patch_model(
        model,
        kernel=plugin.kernel,
        loss_chunk_tokens=plugin.loss_chunk_tokens or LOSS_CHUNKS[-1],  # which is settled with the capacity
        keep_last_slice=plugin.keep_last_slice,
        mlp_tile_tokens=plugin.mlp_tile_tokens,
        compile_layers=plugin.compile_layers,
        liger_kernels=plugin.liger_kernels,
        uncertified=trainer.uncertified,
    )
    trainer.steps.refuse_other_cut(model)  # patching adopts stages that it was loaded in
    trainer.steps.cut(model)
    return model


def _settings_of_parts(model: Any, world: World) -> dict[str, int]:
    """Return the settings of the DistributedConfig that transformers has loaded a model in parts with, but for its stages, which
    are ours."""
    tensor, expert = world.tensor_parallel, world.expert_parallel
    sharded = world.processes_of_stage // tensor if is_sharded(model) else 1
    settings = {"tp_size": tensor, "fsdp_size": sharded, "ep_size": expert}
    return {name: ranks for name, ranks in settings.items() if ranks > 1}


def _take_off_autocast(model: Any) -> None:
    """Take off what another trainer's accelerator put around a model's forward: this trainer's own puts on what its precision
    needs."""
    if hasattr(model, "_original_forward"):
        attributes = vars(model)
        original = attributes.pop("_original_forward")
        attributes.pop("forward", None)
        if getattr(original, "__func__", None) is not type(model).forward:
            attributes["forward"] = original


def certificate_of_own_classes(model: Any) -> Certificate:
    """Return the certificate of a model with attention classes of ours, which need none to run: one that could not be tested is
    trained as the tests of this package have tested its family.

    Raises:
        ValueError: it was tested, and differs.
    """
    certificate = certificate_of(model)
    if certificate.tested and not certificate.exact:
        raise ValueError(certificate.refusal)
    return certificate


def certificate_of_run(trainer: Any, model: Any) -> str:
    """Run the tiny copy of a certified model as this run computes, and say in a line what is known of its exactness. Collective.

    Raises:
        ValueError: the copy differs by more than rounding.
    """
    language_model, plugin = language_model_of(model), trainer.plugin
    certificate = getattr(language_model, "longctx_certificate", None)
    if certificate is None:
        return "none"
    if not certificate.exact:
        if attention_layers(model):
            name = type(language_model).__name__
            return f"{name} is tested by the suite of hf_longctx, and could not be tested here: {certificate.reason}"
        return str(certificate)
    if trainer.world.stages > 1:
        return f"{certificate}; not covered: stages of a pipeline"
    conditions = Conditions(
        device=str(trainer.args.device),
        weights=str(language_model.dtype).removeprefix("torch."),
        autocast=AUTOCAST.get(trainer.accelerator.mixed_precision),
        kernel=plugin.kernel,
        liger_kernels=plugin.liger_kernels,
        experts=experts_implementation(language_model),
    )
    trainer.progress.begin("waiting for the model's certificate", unbounded=True)
    check = run_check(language_model, conditions)
    trainer.progress.begin("patching the model")
    if check.verdict == "not covered" and trainer.is_world_process_zero():
        logger.warning(
            f"{type(language_model).__name__} is exact in float64 on CPU, and no more is known of it {check}"
        )
    return f"{certificate}; {check}"


def experts_implementation(model: Any) -> str | None:
    """Return transformers' implementation of a model's experts; None for one without a choice."""
    has_choice = getattr(model, "_can_set_experts_implementation", None)
    return model.config._experts_implementation if has_choice is not None and has_choice() else None


WITHOUT_WARMUP = ("constant", "greedy", "reduce_lr_on_plateau")
"""Schedules that begin at the learning rate itself."""


def too_short_for_warmup(args: Any, steps: int) -> str:
    """Say that a run of so many steps ends before its learning rate has risen to what was asked for; "" where it does not."""
    warmup = args.get_warmup_steps(steps)
    kind = getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)
    if warmup < steps or kind in WITHOUT_WARMUP or not steps:
        return ""
    highest = args.learning_rate * (steps - 1) / warmup
    nothing = "" if highest else ", so that no weight changes"
    return (
        f"warmup_steps={args.warmup_steps:g} makes {warmup} steps of warm-up, and this run has {steps}: its learning rate "
        f"ends at {highest:g}, and never reaches learning_rate={args.learning_rate:g}{nothing}. Valid: fewer of them, "
        "or more steps (more epochs, or fewer tokens or documents in each step)"
    )
