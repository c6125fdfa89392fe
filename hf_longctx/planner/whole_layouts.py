"""Layouts for inference with documents that must stay whole: planned as in training, by a cost model that suits any model.

Nothing is sent.
"""

from collections.abc import Sequence

import numpy as np

from hf_longctx.hardware.model_sizes import EVEN_TOKENS
from hf_longctx.layout import Layout
from hf_longctx.planner.cost import CostModel
from hf_longctx.planner.hdp import plan_step
from hf_longctx.planner.topology import Documents, Topology

BALANCE = CostModel(attention_ps=1, linear_ps=EVEN_TOKENS, inside_ps=0)
"""By which whole documents are dealt to ranks: what a model's own terms are is not known here."""


def whole_layouts(lengths: Sequence[int], world_size: int, capacity: int, documents: Documents) -> list[Layout]:
    """Layouts of one rank each, in which every document lies whole, balanced over the ranks.

    Args:
        lengths: tokens of each document.
        capacity: most tokens of a layout.
        documents: "whole" or "alone"; see `hf_longctx.planner.topology.Documents`.

    Raises:
        PlanError: a document is longer than the capacity, or a capacity below 1.
    """
    if not lengths:
        return []
    topology = Topology(world_size, capacity, documents=documents)
    plan = plan_step(np.array(lengths), topology, BALANCE)
    layouts = dict(numbered for rank in range(world_size) for numbered in plan.layouts(rank))
    return [layouts[number] for number in sorted(layouts)]
