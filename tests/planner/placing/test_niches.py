"""Groups whose ranks lie anywhere: niches of ranks that are free first, and windows of nodes that are free together."""

import math
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from hf_longctx.planner import GPU, CostModel, Topology, lower_bound, plan_step
from hf_longctx.planner.batch_lengths import longest_first
from hf_longctx.planner.bound import unit_bits
from hf_longctx.planner.compiled import planning
from hf_longctx.planner.cost.group_times import placement_context
from hf_longctx.planner.placing.search import ENOUGH, LATEST, WORST, Search
from tests.builders.plans.random_plans import MISTRAL_7B, steps

COST = CostModel.from_config(MISTRAL_7B, GPU, ranks_per_node=8)


def search_of(lengths: np.ndarray, topology: Topology, cost: CostModel) -> Search:
    ordered = lengths[longest_first(lengths)]
    cost = cost.in_units(unit_bits(ordered, topology, cost))
    bound, context = lower_bound(ordered, topology, cost), placement_context(topology, cost)
    return Search(ordered, ordered, ordered, cost.time(ordered, 1), topology, cost, bound, context)


def groups_of(search: Search) -> list[np.ndarray]:
    """Ranks of each large document, as they were placed last."""
    first_member = np.concatenate([[0], np.cumsum(search.sizes)])
    order = np.arange(search.large)
    member = search.scattered.members(order, first_member, np.zeros_like(order), search.sizes)
    return np.split(member, first_member[1:-1])


def assert_groups_can_run(search: Search, target: int) -> None:
    """Every group holds its document, lies inside a node or on whole ones, and has its ranks to itself until the target."""
    context, busy = search.context, defaultdict(list)
    for i, ranks in enumerate(groups_of(search)):
        assert (np.diff(ranks) > 0).all()
        assert context.capacities[ranks].sum() >= search.documents.footprints[i]
        nodes = np.unique(ranks // context.node)
        if len(nodes) > 1:
            whole = len(ranks) == len(context.speeds) or len(ranks) % context.node == 0
            assert whole, (ranks, context.node)
        for rank in ranks.tolist():
            busy[rank].append(int(search.starts[i]))
    for rank, starts in busy.items():
        assert len(set(starts)) == len(starts)
        assert max(starts) < search.loads[rank] <= target


@settings(deadline=None, max_examples=60)
@given(steps(max_ranks=24))
def test_niches_of_any_step(step):
    lengths, topology, cost = step
    search = search_of(lengths, topology, cost)
    for even in (False, True):
        for factor, latest in ((1, 1), (1, 2), (1, 16), (2, 2), (16, 16)):
            target, latest = search.bound * factor, search.bound * latest
            filled = (search.sizes, search.starts, search.loads)
            if search.large and search.scattered.in_niches(target, latest, even, *filled):
                assert_groups_can_run(search, latest)


@settings(deadline=None, max_examples=60)
@given(steps(max_ranks=24, equal=True))
def test_windows_of_any_step(step):
    lengths, topology, cost = step
    search = search_of(lengths, topology, cost)
    on_nodes = search.scattered.on_nodes
    for factor in (1, 2, 16):
        search.sizes[:], search.starts[:] = 0, 0
        if on_nodes and search.scattered.in_windows(search.bound * factor, search.sizes, search.starts, search.loads):
            for ranks in groups_of(search)[:on_nodes]:
                assert len(ranks) == topology.world_size or len(ranks) % search.context.node == 0
            assert search.loads.max() <= search.bound * factor


@pytest.mark.parametrize(
    ("documents", "median", "sigma", "ranks", "capacity", "node", "before", "ceiling"),
    [
        # Documents on 9 and 10 of 23 ranks: two side by side leave 3 to 5 idle, and others on as many are far down the order.
        (2187, 5431, 0.2, 23, 595, 23, 1.107, 1.08),
        # Documents on 1 to 100 of 174 ranks, in nodes of two.
        (1500, 1576, 1.6, 174, 812, 2, 1.068, 1.04),
        (3000, 2500, 1.6, 256, 2048, 8, 1.134, 1.125),
    ],
)
def test_documents_that_do_not_divide_the_ranks(documents, median, sigma, ranks, capacity, node, before, ceiling):
    """`before`: makespan over the bound when documents were placed longest first alone."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(math.log(median), sigma, documents), 1, ranks * capacity).astype(np.int64)
    with planning(math.inf):
        plan = plan_step(lengths, Topology(ranks, capacity, node), COST)
    plan.check(lengths)
    assert plan.timeline().makespan < ceiling * plan.lower_bound < before * plan.lower_bound


@pytest.mark.parametrize("ends", [1030, 1049, 1100, 1700])
def test_no_target_is_tried_within_reach_of_one_that_was_missed_nor_twice(ends, monkeypatch):
    # All lie at `ends` thousandths of the bound where a target reaches that.
    search = search_of(np.full(200, 30_000), Topology(64, 8192, 8), COST)
    end, tried = search.bound * ends // 1000, []
    placement = search.in_niches(search.bound * 4, None)

    def in_niches(target, best):
        tried.append(target)
        if target * LATEST < end * 1000:
            return best
        search.soonest = end
        return placement

    search.soonest = WORST
    assert search._lowest(in_niches, 1, None, ENOUGH, LATEST) is placement
    missed = [target for target in tried if target * LATEST < end * 1000]
    assert all(after * 1000 > before * LATEST for before, after in pairwise(missed))
    assert len(set(tried)) == len(tried)
    assert min(tried[len(missed) :]) * LATEST >= end * 1000


def test_a_document_of_fewer_tokens_than_the_ulysses_degree_takes_no_more_ranks_than_tokens():
    lengths = np.array([3, 4, 14])
    speed, memory = (1000, 1) * 4 + (1000,), (1000, 500) * 4 + (1000,)
    cost = CostModel(attention_ps=0, linear_ps=151350548, inside_ps=0, message_ns=16000000)
    plan_step(lengths, Topology(9, 2, 8, 4, speed=speed, memory=memory), cost, "async").check(lengths)
