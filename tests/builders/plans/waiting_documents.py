"""Documents that wait for rounds, on the costs of a 7B model on GPUs."""

import numpy as np

from hf_longctx.planner import GPU, CostModel, Topology
from hf_longctx.planner.bound import best_sizes
from hf_longctx.planner.cost.group_times import PlacementContext, placement_context
from hf_longctx.planner.placing.rounds.waiting_documents import Waiting, waiting
from tests.builders.plans.random_plans import MISTRAL_7B

COST = CostModel.from_config(MISTRAL_7B, GPU, ranks_per_node=8)


def documents_of(
    tokens: np.ndarray, topology: Topology, cost: CostModel = COST, counted: float = 1.0
) -> tuple[Waiting, PlacementContext]:
    """Documents that wait, longest first, and the context of their ranks. `counted`: share of its tokens that each counts as."""
    tokens = np.sort(tokens)[::-1].copy()
    lengths = np.maximum((tokens * counted).astype(np.int64), 1)
    fewest = topology.fewest_ranks(tokens)
    best = best_sizes(lengths, fewest, topology.world_size, cost.coefficients)
    alone, shared = cost.work(lengths, 1), cost.work(lengths, fewest)
    return Waiting(*waiting(lengths, tokens, tokens, alone, shared, best)), placement_context(topology, cost)
