"""Planners as people call them: by what they do, and by who else does it so."""

from collections.abc import Sequence
from typing import Final

from hf_longctx.planner.plan import StepPlan

OURS: Final = "hdp"

PLANNER_NAMES: Final[dict[str, tuple[str, str]]] = {
    OURS: ("a group for each document", "hybrid data parallelism"),
    "static_cp": ("fixed groups", "as accelerate and DeepSpeed do"),
    "static_cp_unpacked": ("fixed groups, unpacked", "a document at a time, as NeMo Automodel does"),
    "dynamic_cp": ("groups of powers of two", "as Megatron-LM and verl do"),
    "dp_packing": ("packs on single ranks", "as most training scripts do"),
    "bytescale_naive": ("fewest ranks, in turn", "ByteScale's algorithm 1"),
    "bytescale_balanced": ("fewest ranks, by load", "ByteScale's algorithm 2"),
}
"""Name of a planner in code -> what pages call it, and what they add in small print."""


def planner_name(planner: str) -> str:
    return PLANNER_NAMES.get(planner, (planner, ""))[0]


def plan_names(plans: Sequence[StepPlan]) -> list[str]:
    """Name each plan by its planner, with its mode and a number where that tells it from others."""
    modes = len({plan.mode for plan in plans}) > 1
    names = [planner_name(plan.planner) + (f" ({plan.mode})" if modes else "") for plan in plans]
    return [name if names.count(name) == 1 else f"{name} #{i + 1}" for i, name in enumerate(names)]
