"""Document lengths -> StepPlan: which ranks hold which document, when. No torch."""

from collections.abc import Callable
from functools import partial

import numpy as np

from hf_longctx.hardware.speeds import CPU_CORE, CPU_CORES, GPU, Computes, CpuKind, RankSpeed
from hf_longctx.planner.baselines.bytescale import plan_bytescale_balanced, plan_bytescale_naive
from hf_longctx.planner.baselines.dp_packing import plan_dp_packing
from hf_longctx.planner.baselines.dynamic_cp import plan_dynamic_cp
from hf_longctx.planner.baselines.static_cp import plan_static_cp
from hf_longctx.planner.bound import lower_bound
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.global_batch import EpochBatches, GlobalBatches
from hf_longctx.planner.hdp import plan_step
from hf_longctx.planner.plan import Mode, PlanSummary, StepPlan, Timeline
from hf_longctx.planner.topology import PlanError, Topology

Planner = Callable[[np.ndarray, Topology, CostModel, Mode], StepPlan]

PLANNERS: dict[str, Planner] = {
    "hdp": plan_step,
    "static_cp": plan_static_cp,
    "static_cp_unpacked": partial(plan_static_cp, packed=False),
    "dynamic_cp": plan_dynamic_cp,
    "dp_packing": plan_dp_packing,
    "bytescale_naive": plan_bytescale_naive,
    "bytescale_balanced": plan_bytescale_balanced,
}
"""Ways to plan a step, by name: ours, and those that it is compared with."""


def planners_for(context: int) -> dict[str, Planner]:
    """Return all planners by name, for a run whose longest document has `context` tokens: static context parallelism has one
    degree for all steps."""
    return PLANNERS | {
        "static_cp": partial(plan_static_cp, context=context),
        "static_cp_unpacked": partial(plan_static_cp, context=context, packed=False),
    }


__all__ = [
    "CPU_CORE",
    "CPU_CORES",
    "GPU",
    "PLANNERS",
    "Computes",
    "CostModel",
    "CpuKind",
    "EpochBatches",
    "GlobalBatches",
    "Mode",
    "PlanError",
    "PlanSummary",
    "Planner",
    "RankSpeed",
    "StepPlan",
    "Timeline",
    "Topology",
    "lower_bound",
    "plan_step",
    "planners_for",
]
