"""Documents dealt to several rounds at once: rounds hold what ranks and nodes allow, and end about when an estimate says."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hf_longctx.planner import CostModel, Topology, plan_step
from hf_longctx.planner.bound import unit_bits
from hf_longctx.planner.compiled import planning
from hf_longctx.planner.cost.group_times import group_time
from hf_longctx.planner.placing.rank_shares import proportional_shares
from hf_longctx.planner.placing.rounds.dealing import deal
from hf_longctx.planner.placing.rounds.levels import estimated, fewest_ranks_of_whole, lowest_height
from hf_longctx.planner.placing.rounds.unequal_dealing import deal_to_unequal
from hf_longctx.simulator.lengths import draw
from tests.builders.plans.waiting_documents import COST, documents_of


def dealt(rounds: int, height: int, even: bool, documents, context):
    """When each round ends; round, first rank and size of each document."""
    columns = tuple(np.full(len(documents.lengths), -(10**6)) for _ in range(3))
    return deal(rounds, height, even, documents, context, *columns), *columns


@given(
    lengths=st.lists(st.integers(1, 60_000), min_size=1, max_size=60),
    ranks=st.integers(1, 40),
    node=st.sampled_from([None, 1, 3, 8]),
    more_rounds=st.integers(0, 3),
    even=st.booleans(),
    share=st.floats(0, 1),
)
def test_rounds_hold_every_document_once_within_tokens_nodes_and_time(lengths, ranks, node, more_rounds, even, share):
    topology = Topology(ranks, 8192, node)
    lengths = np.minimum(np.array(lengths), topology.tokens)
    documents, context = documents_of(lengths, topology)
    low = int(COST.time(int(documents.lengths[0]), int(documents.best[0]))) + COST.micro_batch_ns
    with planning(0):
        rounds = -(-int(lengths.sum()) // topology.tokens) + more_rounds
        ends, round_of, first, size = dealt(rounds, int(low * (1 + 20 * share)), even, documents, context)
    if not len(ends):
        return
    busy, tokens = np.zeros((len(ends), ranks)), np.zeros((len(ends), ranks))
    owner = np.full((len(ends), ranks), -1)
    groups = np.flatnonzero(size > 1)
    for i in groups:
        members = slice(first[i], first[i] + size[i])
        assert first[i] + size[i] <= ranks
        assert (owner[round_of[i], members] == -1).all()
        owner[round_of[i], members] = i
        busy[round_of[i], members] = group_time(documents.lengths[i], 0, size[i], context)
        tokens[round_of[i], members] += -(-documents.lengths[i] // size[i])
        if size[i] <= topology.node_size:
            assert first[i] // topology.node_size == (first[i] + size[i] - 1) // topology.node_size
    for i in np.flatnonzero(size <= 1):
        rank = first[i] - min(size[i], 0) if size[i] < 1 else first[i]
        group = owner[round_of[i], rank]
        if size[i] == 1:
            assert group in (-1, -2)
            owner[round_of[i], rank] = -2
            busy[round_of[i], rank] = max(busy[round_of[i], rank], COST.micro_batch_ns)
        else:  # beside a split one, in its micro-batch
            assert group in groups
            assert first[group] == first[i]
        busy[round_of[i], rank] += documents.alone[i]
        tokens[round_of[i], rank] += documents.lengths[i]
    assert (tokens <= topology.capacity).all()
    assert busy.max(axis=1).tolist() == ends.tolist()


@given(
    tokens=st.lists(st.integers(1, 60_000), min_size=1, max_size=60),
    ranks=st.lists(st.tuples(st.integers(200, 1000), st.integers(500, 1500)), min_size=2, max_size=40),
    node=st.sampled_from([None, 1, 3, 8]),
    counted=st.floats(0.5, 1),
    more_rounds=st.integers(0, 3),
    share=st.floats(0, 1),
)
def test_rounds_of_unequal_ranks_hold_every_document_once_within_tokens_nodes_and_time(
    tokens, ranks, node, counted, more_rounds, share
):
    speed, memory = zip(*ranks)
    topology = Topology(len(ranks), 8192, node, speed=speed, memory=memory)
    tokens = np.minimum(np.array(tokens), topology.tokens)
    documents, context = documents_of(tokens, topology, counted=counted)
    low = int(COST.time(int(documents.lengths[0]), int(documents.best[0]))) + COST.micro_batch_ns
    columns = tuple(np.full(len(tokens), -(10**6)) for _ in range(3))
    with planning(0):
        rounds = -(-int(tokens.sum()) // topology.tokens) + more_rounds
        ends = deal_to_unequal(rounds, int(low * (1 + 20 * share)), documents, context, *columns)
    if not len(ends):
        return
    round_of, first, size = columns
    own = np.diff(documents.tokens_before)
    busy, filled = np.zeros((rounds, len(ranks))), np.zeros((rounds, len(ranks)))
    owner = np.full((rounds, len(ranks)), -1)
    for i in np.flatnonzero(size > 1):
        members = slice(first[i], first[i] + size[i])
        assert first[i] + size[i] <= len(ranks)
        assert (owner[round_of[i], members] == -1).all()
        owner[round_of[i], members] = i
        busy[round_of[i], members] = group_time(documents.lengths[i], first[i], size[i], context)
        filled[round_of[i], members] = proportional_shares(
            own[i], topology.speeds[members], topology.capacities[members]
        )
        last = first[i] + size[i] - 1
        assert first[i] // topology.node_size == last // topology.node_size or first[i] % topology.node_size == 0
    for i in np.flatnonzero(size <= 1):
        rank = first[i] - min(size[i], 0) if size[i] < 1 else first[i]
        group = owner[round_of[i], rank]
        if size[i] < 1:  # beside a split one
            assert group >= 0
            assert first[i] == first[group]
        else:
            assert group == -1
        busy[round_of[i], rank] += documents.alone[i] * 1000 / speed[rank]
        if size[i] == 1 and filled[round_of[i], rank] == 0:
            busy[round_of[i], rank] += COST.micro_batch_ns * 1000 / speed[rank]
        filled[round_of[i], rank] += own[i]
    assert (filled <= topology.capacities).all()
    assert np.abs(busy.max(axis=1) - ends).max() <= 2000 / min(speed) + 2  # nanoseconds lost to division


def test_ends_of_rounds_of_unequal_ranks_are_right_where_a_thousand_times_as_much_exceeds_64_bits():
    topology, tokens = Topology(2, 10**6, speed=(1000, 900)), np.full(1200, 1000)
    cost = CostModel(attention_ps=0, linear_ps=10**18, inside_ps=0)
    cost = cost.in_units(unit_bits(tokens, topology, cost))
    documents, context = documents_of(tokens, topology, cost)
    columns = tuple(np.empty(1200, np.int64) for _ in range(3))
    with planning(0):
        ends = deal_to_unequal(1, int(documents.alone.sum()) * 10 // 19, documents, context, *columns)
    alone, ranks = int(documents.alone[0]), np.bincount(columns[1], minlength=2).tolist()
    assert 1000 * 600 * alone > 2**63
    assert abs(int(ends[0]) - max(ranks[0] * alone, ranks[1] * alone * 10 // 9)) < alone


@given(st.integers(0, 10_000))
@example(17)
@example(64)
def test_documents_with_few_labels_leave_unequal_ranks_within_their_capacity(seed):
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(2, 12))
    topology = Topology(ranks, int(rng.integers(50, 400)), speed=tuple(rng.integers(300, 1001, ranks).tolist()))
    lengths = np.minimum(np.exp(rng.normal(4.5, 1, int(rng.integers(4, 40)))).astype(np.int64) + 1, topology.tokens)
    labels = (lengths * rng.random(len(lengths)) ** 4).astype(np.int64)
    cost = CostModel(attention_ps=10, linear_ps=10**6, inside_ps=10, message_ns=10, label_ps=9 * 10**5)
    plan_step(lengths, topology, cost, "lockstep", labels=labels).check(lengths)


def test_documents_of_two_speeds_are_dealt_in_proportion():
    # Twelve of one length for two ranks of full and two of half speed, which hold two of them at most.
    topology = Topology(4, 2000, speed=(1000, 500, 1000, 500))
    documents, context = documents_of(np.full(12, 1000), topology)
    columns = tuple(np.empty(12, np.int64) for _ in range(3))
    height = 2 * int(documents.alone[0] + COST.micro_batch_ns)
    with planning(0):
        ends = deal_to_unequal(2, height, documents, context, *columns)
    assert len(ends) == 2
    assert (ends <= height).all()
    assert np.bincount(columns[1], minlength=4).tolist() == [4, 2, 4, 2]


def test_documents_without_room_are_not_dealt():
    # Five of 6 tokens on four ranks of 10: no two share one.
    topology = Topology(4, 10)
    documents, context = documents_of(np.full(5, 6), topology)
    height = 100 * int(documents.alone[0]) + 100 * COST.micro_batch_ns
    with planning(0):
        assert fewest_ranks_of_whole(0, documents, context) == 5
        assert estimated(1, height, False, True, documents, context)[1] == np.inf
        assert not len(dealt(1, height, False, documents, context)[0])
        assert len(dealt(2, height, False, documents, context)[0]) == 2


@pytest.mark.parametrize(("lengths", "fewest"), [([10, 1], 2), ([6, 4, 4], 2), ([7, 7, 5, 5, 5], 4), ([3] * 7, 3)])
def test_ranks_that_whole_documents_need(lengths, fewest):
    documents, context = documents_of(np.array(lengths), Topology(4, 10))
    with planning(0):
        assert fewest_ranks_of_whole(0, documents, context) == fewest


@pytest.mark.parametrize("capacity", [8192, 16384, 65536])
def test_rounds_end_when_the_estimate_says(capacity):
    topology = Topology(64, capacity, 8)
    documents, context = documents_of(draw("agent_trajectories", 1000, 0), topology)
    fewest = -(-int(documents.lengths.sum()) // topology.tokens)
    high = int(COST.time(int(documents.lengths[0]), int(topology.fewest_ranks(documents.lengths[:1])[0])))
    low = int(COST.time(int(documents.lengths[0]), int(documents.best[0]))) + COST.micro_batch_ns
    compared = 0
    for rounds in range(fewest, 2 * fewest):
        height = int(lowest_height(rounds, low, high + COST.micro_batch_ns, True, documents, context))
        if height:
            total = estimated(rounds, height, True, True, documents, context)[1]
            ends = dealt(rounds, height, True, documents, context)[0]
            if len(ends) == rounds:
                assert ends.sum() == pytest.approx(total, rel=0.03)
                compared += 1
    assert compared


@pytest.mark.parametrize(
    ("documents", "median", "sigma", "ranks", "capacity", "ceiling"),
    [(1000, 1500, 1.0, 32, 8192, 1.015), (600, 5000, 0.8, 16, 8192, 1.03), (900, 700, 0.3, 24, 16384, 1.015)],
)
def test_whole_and_split_documents_keep_all_ranks_busy(documents, median, sigma, ranks, capacity, ceiling):
    """Rounds that are only filled one after the other end 1.02 to 1.06 times as late."""
    lengths = np.random.default_rng(0).lognormal(np.log(median), sigma, documents)
    plan = plan_step(lengths.astype(np.int64) + 1, Topology(ranks, capacity, 8), COST, "lockstep")
    assert plan.timeline().makespan <= ceiling * plan.lower_bound
