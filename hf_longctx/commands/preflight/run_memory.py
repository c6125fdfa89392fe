"""The plan and memory of a run, from its configuration alone: its model without weights (meta tensors),
the sharding that `auto` comes to, and the memory of one rank.

The same decisions as the trainer's (training/preparation.py, training/memory/capacity.py), for ranks that need not exist. No
weight is read, no process group is made, nothing is sent.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_longctx.commands.shared.ranks import gpus
from hf_longctx.hardware.devices import CPU_DEVICES, KNOWN_DEVICES
from hf_longctx.hardware.kernel_bytes import Workspace, float32_operands
from hf_longctx.hardware.speeds import product_scratch
from hf_longctx.settings import Config, ModelConfig

if TYPE_CHECKING:
    from hf_longctx.commands.shared.room import Room
    from hf_longctx.hardware.speeds import CpuKind
    from hf_longctx.parallel.world import World
    from hf_longctx.planner.memory.memory_model import MemoryModel
    from hf_longctx.planner.memory.state_bytes import Sharding
    from hf_longctx.precision import Decision
    from hf_longctx.settings.longctx import LongContextPlugin

ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Planned:
    """A run, as far as its configuration says."""

    plugin: LongContextPlugin
    arguments: Any
    """transformers.TrainingArguments, on a CPU"""
    model: Any
    """on the meta device"""
    world: World
    why: str
    """why it is sharded so"""
    memory: MemoryModel | None
    """None: it cannot be counted"""
    uncounted: str
    """why not"""
    cpu: CpuKind | None
    """kind of the processors that ranks compute on; None: they compute on GPUs or NPUs"""

    @property
    def on_cpu(self) -> bool:
        """Tell whether ranks compute on CPUs."""
        return self.cpu is not None


def computes_on_cpu(config: Config, device: str | None) -> bool:
    """Tell whether ranks would compute on CPUs. A preset says so by its name, whatever training.use_cpu is; of a profile's file
    and of this machine the setting does, or that there are no GPUs here."""
    if device in KNOWN_DEVICES:
        return device in CPU_DEVICES
    return bool(config.training.get("use_cpu")) or (device is None and not gpus())


def planned_run(
    config: Config,
    ranks: int,
    device: str | None = None,
    room: Room | None = None,
    precision: Decision | None = None,
) -> Planned:
    """Plans what `ranks` ranks would do. Its training.bf16 is true or false: which device decides an `auto`, the caller says.

    Args:
        device: that it is planned for, by its name; None: this machine's.
        room: its memory; where that is a GPU's, what is no tensor's counts too.
        precision: what an `auto` came to, whatever the launcher's environment says; None: somebody chose it.

    Raises:
        ValueError: settings that the trainer would refuse, a model whose configuration cannot be read, or one whose memory
            cannot be counted and is to decide the capacity.
    """
    from hf_longctx.certified_patch import patch_model
    from hf_longctx.models.patch import attention_layers
    from hf_longctx.parallel.sharding import arranged
    from hf_longctx.precision import kind_of
    from hf_longctx.settings.longctx import LongContextPlugin
    from hf_longctx.training.arguments import adapted, refuse
    from hf_longctx.training.muon import training_arguments
    from hf_longctx.training.request import Request

    plugin = LongContextPlugin(**config.longctx.given())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what this machine cannot do, and of libraries' use of each other
        # On a CPU, whose features are nobody's error here.
        arguments = training_arguments({k: v for k, v in config.training.items() if k != "tf32"} | {"use_cpu": True})
        model = empty_model(config.model)
    if precision is not None:
        arguments.mixed_precision = precision.mixed
    attention_layers(model)
    on_cpu = computes_on_cpu(config, device)
    cpu = kind_of(device if device in CPU_DEVICES else "cpu") if on_cpu else None
    arguments = adapted(arguments, model, plugin, processes=ranks, on_cpu=on_cpu)
    sharding, why = _sharding(plugin.sharding, arguments, ranks)
    refuse(Request(arguments, plugin, model, ranks, sharding, on_cpu))
    world = arranged(ranks, sharding, plugin, model)
    memory, uncounted = None, ""
    try:
        memory = memory_of(config, plugin, arguments, model, world, cpu, room)
    except ValueError as error:
        if not plugin.capacity:
            raise
        uncounted = str(error)
    patch_model(  # which refuses what it cannot run over a layout
        model,
        kernel=plugin.kernel,
        mlp_tile_tokens=plugin.mlp_tile_tokens,
        compile_layers=plugin.compile_layers,
        liger_kernels=False,
        uncertified=config.model.uncertified,
    )
    return Planned(plugin, arguments, model, world, why, memory, uncounted, cpu)


def empty_model(chosen: ModelConfig, config: Any = None) -> Any:
    """Make the model without weights: its configuration, scaled, frozen in part or with adapters as training would have it.

    config: one that has been read and scaled; None: that of `chosen`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from hf_longctx.models.adapters.peft_adapters import add_lora, freeze
    from hf_longctx.models.rope_scaling import scale_rope

    if config is None:
        config = model_config(chosen)
        if chosen.rope_scaling is not None:
            scale_rope(config, **chosen.rope_scaling.model_dump())
        config.get_text_config().vocab_size += len(chosen.added_tokens or ())  # some of its rows may be spare
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, chosen.dtype))
        if chosen.freeze is not None:
            freeze(model, chosen.freeze)
        if chosen.lora is None:
            return model
        return add_lora(
            model, **chosen.lora.model_dump() | {"init_lora_weights": False}
        )  # there are no values to begin from


def model_config(chosen: ModelConfig) -> Any:
    """transformers' configuration of what is trained, with the keys of `model.config`; of well-known models on a hub, their
    published sizes.

    Raises:
        ValueError: there is none, or none that these keys fit.
    """
    from transformers import AutoConfig

    from hf_longctx.commands.shared.costs import refuse_unreachable
    from hf_longctx.commands.shared.models import published_sizes, transformers_config
    from hf_longctx.settings.model_overrides import overridden

    if chosen.random_init is not None:
        return AutoConfig.for_model(**chosen.random_init)
    path, trusted, overrides = str(chosen.path), chosen.trust_remote_code, chosen.config or {}
    sizes = published_sizes(path)
    # Keys are those of the real file, which may hold more than the language model that is published here.
    if sizes is not None and not overrides:
        return transformers_config(sizes)
    refuse_unreachable(path)
    read = AutoConfig.from_pretrained(path, trust_remote_code=trusted)
    return overridden(read, overrides, path=path, trust_remote_code=trusted)


def _sharding(setting: str, arguments: Any, processes: int) -> tuple[Sharding, str]:
    """Decide what the setting comes to, by the trainer's own rules, and say why."""
    from hf_longctx.parallel.sharding import fsdp_settings
    from hf_longctx.parallel.world import resolved_sharding

    given = fsdp_settings(arguments, setting) if processes > 1 else None
    by_launcher = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if given is None and processes > 1 and by_launcher:
        reshard = os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "true"
        given = {"reshard_after_forward": reshard}
    reshards = None if given is None else bool(given["reshard_after_forward"])
    sharding = resolved_sharding(setting, processes, reshards=reshards, loaded=False, launched="several processes")
    if setting != "auto":
        return sharding, f"longctx.sharding is {setting!r}" if processes > 1 else "one process holds everything"
    return sharding, f"auto: {'FSDP settings' if given is not None else 'no FSDP settings'}"


def memory_of(
    config: Config,
    plugin: LongContextPlugin,
    arguments: Any,
    model: Any,
    world: World,
    cpu: CpuKind | None,
    room: Room | None,
    workspace: Workspace | None = None,
) -> MemoryModel:
    """Count memory as training/memory/capacity.py does where accelerate's state is that of the run; `workspace`: instead of the
    room's."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from torch.distributed.fsdp import CPUOffloadPolicy

    from hf_longctx.parallel.sharding import fsdp_settings
    from hf_longctx.training.memory.capacity import counted_memory, trained_weights

    given = fsdp_settings(arguments, plugin.sharding, plugin.host_offload) if world.sharding != "ddp" else None
    lora = config.model.lora
    memory = counted_memory(
        model.config,
        plugin,
        arguments,
        world,
        weight_bytes=ELEMENT_BYTES[config.model.dtype],
        by_accelerate=world.sharding != "ddp",
        optimizer_on_host=given is not None
        and isinstance(FullyShardedDataParallelPlugin(**given).cpu_offload, CPUOffloadPolicy),
        lora_rank=lora.r if lora else 0,
        lora_targets=None if lora is None or isinstance(lora.target_modules, str) else lora.target_modules,
        trained=trained_weights(model, arguments.optim),
        product_scratch=product_scratch(cpu, arguments.bf16 or config.model.dtype == "bfloat16"),
        workspace=workspace or (float32_operands if room is None else room.workspace),
    )
    if room is None:
        return memory
    return room.with_outside(memory, world.ranks, tensor_parallel=world.tensor_parallel, stages=world.stages)
