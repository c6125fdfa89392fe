"""What the steps of a run cost, before anything was measured in it: the cost model that plans them first."""

from dataclasses import replace
from typing import Any

import torch

from hf_longctx.hardware.devices import gpu_speed
from hf_longctx.hardware.profile import Profile
from hf_longctx.models.stages import whole_parameters
from hf_longctx.planner import CostModel, CpuKind, Topology
from hf_longctx.precision import cpu_core, cpu_kind
from hf_longctx.settings.longctx import LongContextPlugin


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
    a preset for the dtype in which the model computes (its own, or autocast's).

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
    cost = CostModel.from_config(
        model.config.get_text_config(),
        speed,
        ranks_per_node=topology.ranks_per_node,
        world_size=topology.world_size,
    )
    trained = sum(each.numel() for each in weights.values() if each.requires_grad)  # an adapter's are few
    elsewhere = sum(each.numel() for each in weights.values()) - sum(each.numel() for each in model.parameters())
    return replace(cost, step_ns=cost.step_ns * trained // (model.num_parameters() + elsewhere))
