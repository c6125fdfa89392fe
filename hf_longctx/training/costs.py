"""What the steps of a run cost, before anything was measured in it: the cost model that plans them first."""

from dataclasses import replace
from typing import Any

import torch
from transformers.utils import logging

from hf_longctx.hardware.devices import gpu_speed
from hf_longctx.hardware.model_sizes import flops_of_weights
from hf_longctx.hardware.profile import Profile
from hf_longctx.models.stages import whole_parameters
from hf_longctx.planner import CostModel, CpuKind, Topology
from hf_longctx.precision import cpu_core, cpu_kind
from hf_longctx.settings.longctx import LongContextPlugin

logger = logging.get_logger(__name__)


def cost_model(
    plugin: LongContextPlugin,
    model: Any,
    topology: Topology,
    device: torch.device,
    autocast: bool = False,
    cpu: CpuKind | None = None,
    gpu: str | None = None,
) -> CostModel:
    """Return the plugin's `cost`; else count FLOPs and bytes of the model's configuration, at the speeds of its `profile`, or of
    a preset for the dtype in which the model computes (its own, or autocast's). For a model that cannot be counted and keeps
    documents whole, guess from its weights.

    Args:
        cpu: kind of the processors, where they compute; the same on all ranks. None: this machine's.
        gpu: name of the device, where it is none of these; the same on all ranks. None, or one without a preset: an A100's
            speeds.
    """
    if plugin.cost is not None:
        return plugin.cost
    weights = whole_parameters(model)  # all stages of a pipeline plan the same
    half = autocast or next(iter(weights.values())).element_size() == 2
    on_gpu = gpu_speed(gpu) if half else replace(gpu_speed(gpu), activation_bytes=4)
    speed = cpu_core(cpu or cpu_kind(), half) if device.type == "cpu" else on_gpu
    if plugin.profile is not None:
        speed = Profile.load(plugin.profile).speed
    config = model.config.get_text_config()
    spread: Any = {"ranks_per_node": topology.ranks_per_node, "world_size": topology.world_size}
    try:
        cost = CostModel.from_config(config, speed, **spread)
    except ValueError as error:
        if not topology.stay_whole:
            raise
        logger.warning(
            f"{error}. Its documents stay whole on a rank, so that times are guessed from its weights: only balance depends on "
            "them"
        )
        parameters = sum(weight.numel() for weight in weights.values())
        guess = flops_of_weights(parameters, getattr(config, "num_hidden_layers", 1))
        cost = CostModel.from_flops(guess, speed, **spread)
    trained = sum(weight.numel() for weight in weights.values() if weight.requires_grad)  # an adapter's are few
    elsewhere = sum(weight.numel() for weight in weights.values()) - sum(
        weight.numel() for weight in model.parameters()
    )
    return replace(cost, step_ns=cost.step_ns * trained // (model.num_parameters() + elsewhere))
