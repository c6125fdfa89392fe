from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.hardware.published import ARCHITECTURES
from hf_longctx.planner import GPU, CostModel, Topology, plan_step
from hf_longctx.planner.placing.rank_order import orders_by_speed
from hf_longctx.planner.placing.search import NEAR, TOGETHER
from tests.builders.plans.random_plans import steps

COST = CostModel(attention_ps=1000, linear_ps=10**6, inside_ps=1000, document_ns=10)


@pytest.mark.parametrize(("ranks_per_node", "by_node"), [(4, [[0, 2, 1, 3, 4, 6, 5, 7]]), (None, []), (1, [])])
def test_orders_of_ranks_that_alternate(ranks_per_node, by_node):
    """By nodes nothing changes but inside them: fast ranks first. Halves of nodes are equally fast, so they sort as single
    ranks do."""
    topology = Topology(8, 100, ranks_per_node, speed=(1000, 300) * 4)
    chosen = [order.rank.tolist() for order in orders_by_speed(topology, COST)]
    assert chosen == [[0, 2, 4, 6, 1, 3, 5, 7], *by_node]
    for order in orders_by_speed(topology, COST):
        assert order.topology.speeds.tolist() == topology.speeds[order.rank].tolist()


def test_a_part_with_fewer_ranks_comes_last():
    topology = Topology(7, 100, 4, speed=(300, 300, 300, 300, 1000, 1000, 1000))
    halves = next(iter(orders_by_speed(topology, COST)))
    assert halves.rank.tolist() == [4, 5, 0, 1, 2, 3, 6], "rank 6 has no half of a node beside it"
    assert halves.topology.ranks_per_node == halves.cost(replace(COST, ranks_per_node=4)).ranks_per_node == 2
    assert halves.cost(COST) == COST, "all ranks are equally near"


def test_documents_run_on_ranks_of_their_speed():
    """Fast and slow ranks alternate, and each document fills four ranks: with a slow one among them, it takes as long as on
    four slow ones."""
    topology, lengths = Topology(8, 1000, speed=(1000, 250) * 4), np.full(40, 3900)
    plan = plan_step(lengths, topology, replace(COST, message_ns=2 * 10**6))  # over all ranks would take longer
    plan.check(lengths)
    groups = topology.speeds[plan.rank].reshape(-1, 4)
    assert (groups == groups[:, :1]).all()
    assert plan.timeline().makespan < 1.3 * plan.lower_bound


@pytest.mark.parametrize("mode", ["async", "lockstep"])
@given(step=steps(max_ranks=8, equal=False))
def test_a_plan_given_back_is_valid_and_no_longer_or_near_the_bound(mode, step):
    from hf_longctx.planner import hdp

    lengths, topology, cost = step
    plan = plan_step(lengths, topology, cost, mode)
    plan.check(lengths)
    makespan = plan.timeline().makespan
    assert makespan >= plan.lower_bound
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hdp, "orders_by_speed", lambda topology, cost: ())
        patch.setattr(hdp, "as_if_equal", lambda topology, orders: ())
        as_they_are = plan_step(lengths, topology, cost, mode).timeline().makespan
    assert makespan * 1000 <= max(as_they_are * TOGETHER, plan.lower_bound * NEAR)


@given(step=steps(max_ranks=9, equal=True), seed=st.integers(0, 99))
def test_ranks_of_nearly_one_speed_end_no_later_than_without_planning_them_as_equal(step, seed):
    from hf_longctx.planner import hdp

    lengths, equal, cost = step
    speed = tuple(np.random.default_rng(seed).integers(800, 1001, equal.world_size).tolist())
    topology = replace(equal, speed=speed, documents="split")
    for mode in ("async", "lockstep"):
        plan = plan_step(lengths, topology, cost, mode)
        plan.check(lengths)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(hdp, "as_if_equal", lambda topology, orders: ())
            without = plan_step(lengths, topology, cost, mode).timeline().makespan
        assert plan.timeline().makespan <= without


@pytest.mark.parametrize("mode", ["async", "lockstep"])
def test_few_documents_of_ranks_of_nearly_one_speed_are_planned_as_if_they_were_equal(mode, monkeypatch):
    """24 documents on 11 ranks end 4 % later without."""
    from hf_longctx.planner import hdp

    rng = np.random.default_rng(32)
    lengths = np.clip(rng.lognormal(np.log(330), 0.5, 24), 50, 4000).astype(np.int64)
    topology = Topology(11, 4354, 8, speed=tuple(rng.integers(900, 1001, 11).tolist()))
    cost = CostModel.from_config(ARCHITECTURES["llama-7b"], replace(GPU, message_seconds=3e-5), ranks_per_node=8)
    makespan = plan_step(lengths, topology, cost, mode).timeline().makespan
    monkeypatch.setattr(hdp, "as_if_equal", lambda topology, orders: ())
    assert makespan < 0.98 * plan_step(lengths, topology, cost, mode).timeline().makespan


def test_documents_of_unequal_ranks_are_dealt_to_rounds(monkeypatch):
    """400 documents of a median of 0.2 capacities on 88 ranks, every second one of which is a sixth slower: 8 % later without."""
    from hf_longctx.planner.placing.rounds.dealer import Dealer

    lengths = np.clip(np.random.default_rng(2).lognormal(np.log(111), 1.2, 400), 1, 3666).astype(np.int64)
    topology = Topology(88, 611, 8, speed=(1000, 836) * 44)
    cost = CostModel.from_config(ARCHITECTURES["llama-7b"], GPU, ranks_per_node=8)
    makespan = plan_step(lengths, topology, cost, "lockstep").timeline().makespan
    monkeypatch.setattr(Dealer, "estimates", lambda *_: iter(()))
    assert makespan < 0.95 * plan_step(lengths, topology, cost, "lockstep").timeline().makespan


@pytest.mark.parametrize("mode", ["async", "lockstep"])
def test_a_rank_may_have_work_of_which_a_thousand_times_as_much_exceeds_64_bits(mode):
    lengths = np.full(20, 1)
    cost = CostModel(attention_ps=0, linear_ps=2**50 * 1000, inside_ps=0)
    plan = plan_step(lengths, Topology(2, 1000, speed=(1000, 999)), cost, mode)
    plan.check(lengths)
    assert plan.timeline().makespan < 1.01 * plan.lower_bound
