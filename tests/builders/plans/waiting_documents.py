"""Documents that wait for rounds, on the costs of a 7B model on GPUs."""

import numpy as np

from hf_longctx.planner import GPU, CostModel, Topology
from hf_longctx.planner.bound import best_sizes
from hf_longctx.planner.cost.group_times import PlacementContext, placement_context
from hf_longctx.planner.placing.rounds.waiting_documents import Waiting, waiting
from tests.builders.plans.random_plans import MISTRAL_7B

COST = CostModel.from_config(MISTRAL_7B, GPU, ranks_per_node=8)


def documents_of(lengths: np.ndarray, topology: Topology) -> tuple[Waiting, PlacementContext]:
    """Documents that wait, longest first, and the context of their ranks."""
    lengths = np.sort(lengths)[::-1].copy()
    fewest = topology.fewest_ranks(lengths)
    best = best_sizes(lengths, fewest, topology.world_size, COST.coefficients)
    alone, shared = COST.work(lengths, 1), COST.work(lengths, fewest)
    return Waiting(*waiting(lengths, lengths, lengths, alone, shared, best)), placement_context(topology, COST)
