"""Document lengths -> StepPlan: which ranks hold which document, when. No torch."""

from hf_longctx.planner.bound import lower_bound
from hf_longctx.planner.cost import CPU_CORE, GPU, CostModel, RankSpeed
from hf_longctx.planner.global_batch import EpochBatches, GlobalBatches
from hf_longctx.planner.hdp import plan_step
from hf_longctx.planner.plan import PlanError, PlanSummary, StepPlan, Timeline

__all__ = [
    "CPU_CORE",
    "GPU",
    "CostModel",
    "EpochBatches",
    "GlobalBatches",
    "PlanError",
    "PlanSummary",
    "RankSpeed",
    "StepPlan",
    "Timeline",
    "lower_bound",
    "plan_step",
]
