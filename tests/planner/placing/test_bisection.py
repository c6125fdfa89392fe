"""Groups of a node's ranks by bisection: documents that leave ranks idle where each takes the fewest that hold it."""

import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from hf_longctx.planner import GPU, CostModel, StepPlan, Topology, plan_step
from hf_longctx.planner.bound import lower_bound
from hf_longctx.planner.compiled import planning
from hf_longctx.planner.cost.group_times import placement_context
from hf_longctx.planner.placing.bisection import (
    LARGEST_BLOCK,
    at_least_later,
    block_width,
    deal_out,
    large_documents,
    largest_room,
)
from hf_longctx.planner.placing.search import Search
from hf_longctx.simulator.lengths import draw
from tests.builders.plans.random_plans import MISTRAL_7B

COST = CostModel.from_config(MISTRAL_7B, GPU, ranks_per_node=8)
SLOW_MESSAGES = CostModel.from_config(MISTRAL_7B, replace(GPU, message_seconds=5e-4), ranks_per_node=8)


def planned(lengths: np.ndarray, topology: Topology, cost: CostModel = COST) -> tuple[StepPlan, float]:
    """A plan that has been checked, and its makespan over the lower bound."""
    plan = plan_step(lengths, topology, cost)
    plan.check(lengths)
    return plan, plan.timeline().makespan / plan.lower_bound


@pytest.mark.parametrize("cost", [COST, SLOW_MESSAGES])
@pytest.mark.parametrize(
    ("documents", "ranks", "capacity", "ceiling"),
    [(1000, 64, 16384, 1.008), (2000, 64, 16384, 1.007), (1500, 128, 8192, 1.012), (900, 64, 32768, 1.012)],
)
def test_documents_longer_than_a_rank_keep_all_ranks_of_a_node_busy(documents, ranks, capacity, ceiling, cost):
    """Trajectories of agents, of which a rank holds half of the median one. In blocks alone they ended up to 40 % later."""
    with planning(math.inf):
        for seed in range(3):
            _, balance = planned(draw("agent_trajectories", documents, seed), Topology(ranks, capacity, 8), cost)
            assert balance < ceiling, seed


def test_equal_documents_that_do_not_divide_by_the_groups_are_spread_wider():
    """Four ranks hold each; 32 groups have 24.4 of them: 24 or 25 one after another, were not some on 8 ranks."""
    lengths = np.full(782, 32768)
    plan, balance = planned(lengths, Topology(128, 8192, 8))
    assert balance < 1.006
    assert balance < 25 / (782 / 32)
    sizes = Counter(plan.members.tolist())
    assert set(sizes) == {4, 8}
    assert sizes[8] < 32


def test_groups_lie_inside_a_node_and_begin_together():
    """Every group of up to a node's ranks is a run of adjacent ranks of one node, and no rank waits for another of its group."""
    topology = Topology(64, 16384, 8)
    lengths = np.sort(np.minimum(draw("agent_trajectories", 1000, 5), 8 * 16384))[::-1]
    bound, context = lower_bound(lengths, topology, COST), placement_context(topology, COST)
    search = Search(lengths, lengths, lengths, COST.time(lengths, 1), topology, COST, bound, context)
    with planning(math.inf):
        assert search.bisected(bound * 101 // 100, None) is not None
    end = np.zeros(64, np.int64)
    for i in np.argsort(search.starts, kind="stable"):
        ranks = slice(search.first_rank[i], search.first_rank[i] + search.sizes[i])
        if search.sizes[i] <= 8:
            assert ranks.start // 8 == (ranks.stop - 1) // 8
        assert np.ptp(end[ranks]) == 0
        end[ranks] = max(search.starts[i], 0) + COST.time(int(lengths[i]), int(search.sizes[i])) + COST.micro_batch_ns


@pytest.mark.parametrize(
    ("node", "width", "cuts"),
    [
        (1, 1, [0, 1, 2]),
        (8, 8, [0, 8, 16]),
        (32, 32, [0, 32, 64]),
        (33, 17, [0, 17, 33, 50, 66, 83]),
        (72, 24, [0, 24, 48, 72]),
    ],
)
def test_blocks_end_where_their_nodes_do(node, width, cuts):
    assert block_width(node) == width
    assert width <= LARGEST_BLOCK
    ranks = cuts[-1] + 1
    topology = Topology(ranks, 100, ranks_per_node=node)
    context = placement_context(topology, COST)
    one = np.ones(1, np.int64)
    documents = large_documents(100 * one, 100 * one, one, one, topology, COST, context)
    dealt, roots = deal_out(0, width, documents, np.zeros(ranks, np.int64), context)
    assert dealt
    assert roots.first.tolist() == cuts
    assert roots.width.tolist() == np.diff([*cuts, ranks]).tolist()
    assert largest_room(width, context) == 100 * roots.width.max()


def test_a_document_that_offload_lets_fewer_ranks_hold_does_not_shrink_the_groups_of_shorter_ones():
    """The longer one has room on 5 ranks, the shorter one needs 8."""
    topology = Topology(16, 1000, ranks_per_node=8)
    lengths, tokens_held = np.array([9000, 8000]), np.array([5000, 8000])
    best = np.full(2, 16)
    documents = large_documents(
        lengths, tokens_held, best, COST.time(lengths, 1), topology, COST, placement_context(topology, COST)
    )
    assert documents.footprints.tolist() == [8000, 8000]


def test_tokens_that_never_rise_are_an_array_of_their_own():
    """A view would have all that takes it compiled twice: a quarter of all compiling."""
    tokens = at_least_later(np.array([5, 2, 9, 1, 3]))
    assert tokens.tolist() == [9, 9, 9, 3, 3]
    assert tokens.flags.c_contiguous
