"""The cost of a run's steps before anything was measured in it: the cost model that plans them first."""

from dataclasses import replace
from typing import Any

import torch
from transformers.utils import logging

from hf_longctx.hardware.profile import Profile
from hf_longctx.models.costs import counted_cost, guessed_cost
from hf_longctx.models.stages import weights_dtype, whole_parameters
from hf_longctx.planner import CostModel, CpuKind, Topology
from hf_longctx.precision import cpu_kind, preset_speed
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
    a preset for the dtype in which the model computes (its own, or autocast's). For a model that cannot be counted, guess
    from its weights and heads.

    Args:
        cpu: kind of the processors, where they compute; the same on all ranks. None: this machine's.
        gpu: name of the device, where it is none of these; the same on all ranks. None, or one without a preset: an A100's
            speeds.
    """
    if plugin.cost is not None:
        return plugin.cost
    weights = whole_parameters(model)  # all stages of a pipeline plan the same
    half = autocast or weights_dtype(weights.values()).itemsize == 2
    if plugin.profile is not None:
        profile = Profile.load(plugin.profile)
        speed = profile.speed
        if half != (profile.precision != "float32"):
            logger.warning_once(
                f"profile={plugin.profile!r} was measured in {profile.precision}, and this run computes in "
                f"{'half precision' if half else 'float32'}: seconds that are planned are another precision's. Measure it again "
                f"with `hf-longctx profile --precision {'autocast' if half else 'float32'}`, or with the run's YAML file"
            )
    else:
        speed = preset_speed(cpu or cpu_kind() if device.type == "cpu" else None, gpu, half)
    try:
        cost = counted_cost(model, speed, topology)
    except ValueError as error:
        logger.warning(f"{error}. Times are guessed from its weights and heads: only balance depends on them")
        cost = guessed_cost(model, speed, topology)
    trained = sum(weight.numel() for weight in weights.values() if weight.requires_grad)  # an adapter's are few
    elsewhere = sum(weight.numel() for weight in weights.values()) - sum(
        weight.numel() for weight in model.parameters()
    )
    return replace(cost, step_ns=cost.step_ns * trained // (model.num_parameters() + elsewhere))
