"""Groups of adjacent ranks: when they end, and whether that is in time."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_longctx.planner import CostModel, Topology
from hf_longctx.planner.cost.group_times import adjacent_time, ends_within, equal_time, placement_context, unequal_time
from hf_longctx.planner.placing.bisection import large_documents
from hf_longctx.planner.placing.niche_sizes import time_of

COST = CostModel(attention_ps=1200, linear_ps=60_000_000, inside_ps=90_000, message_ns=8000, micro_batch_ns=400_000)


@settings(max_examples=5 * settings().max_examples)
@given(st.data())
def test_unequal_ranks_end_in_time_where_their_slowest_does(data: st.DataObject):
    """Bounds decide most cases; those that they leave open, and those at the limit itself, are as the shares have it."""
    ranks = data.draw(st.integers(2, 12))
    slowest = data.draw(st.integers(100, 999))
    speed = tuple(data.draw(st.lists(st.integers(slowest, 1000), min_size=ranks, max_size=ranks)))
    context = placement_context(Topology(ranks, data.draw(st.sampled_from([7, 100, 4096])), speed=speed), COST)
    first = data.draw(st.integers(0, ranks - 1))
    size = data.draw(st.integers(1, ranks - first))
    room = int(context.before[first + size] - context.before[first])
    length = data.draw(st.integers(min(size, room), room))
    time = int(adjacent_time(length, first, size, context))
    assert time == unequal_time(length, np.arange(first, first + size), context), "ranks that are alike may be counted"
    for limit in (time - 1, time, time + 1, time * 101 // 100, time * 99 // 100):
        assert ends_within(length, first, size, limit, context) == (time <= limit)
    assert np.diff(context.speed_before).tolist() == context.speeds.tolist()


@given(st.integers(0, 2**32), st.integers(100, 990), st.sampled_from([1, 3]))
def test_a_group_of_many_ranks_takes_about_as_long_by_what_they_are_like(seed: int, slowest: int, memories: int):
    """Exactly as long, where it has at most twice as many ranks as there are kinds."""
    rng, ranks = np.random.default_rng(seed), 300
    speed = tuple(rng.integers(slowest, 1001, ranks).tolist())
    memory = tuple(rng.choice([1000, 900, 700][:memories], ranks).tolist())
    context = placement_context(Topology(ranks, 8192, speed=speed, memory=memory), COST)
    assert 1 < len(context.kind_speeds) <= 32
    assert context.kinds_before[-1].sum() == ranks
    tolerance = 0.015 if memories == 1 else 0.04  # a third of the speeds for each
    for size in (20, 64, 130, ranks):
        first = int(rng.integers(ranks - size + 1))
        length = int(rng.integers(0.3 * context.before[size], context.before[first + size] - context.before[first] + 1))
        time = adjacent_time(length, first, size, context)
        exact = unequal_time(length, np.arange(first, first + size), context)
        assert abs(time - exact) <= (0 if size <= 2 * len(context.kind_speeds) else tolerance * exact)


@given(st.data())
def test_ranks_of_a_list_end_as_those_of_an_array(data: st.DataObject):
    """Counted by kind where kinds are few, or one by one."""
    ranks = data.draw(st.integers(2, 12))
    speed = tuple(data.draw(st.lists(st.sampled_from([400, 1000, *range(500, 1000)]), min_size=ranks, max_size=ranks)))
    topology = Topology(ranks, data.draw(st.sampled_from([7, 100, 4096])), speed=speed)
    context = placement_context(topology, COST)
    listed = np.array(data.draw(st.permutations(range(ranks))))
    size = data.draw(st.integers(2, ranks))
    length = np.array([data.draw(st.integers(1, size * topology.capacity))])
    following = np.full(ranks, -1)
    following[listed[:-1]] = listed[1:]
    alone, best = COST.time(length, 1), np.array([ranks])
    large = large_documents(length, length, best, alone, topology, COST, context)
    expected = int(unequal_time(int(length[0]), listed[:size], context))
    assert time_of(0, size, 1, int(listed[0]), following, large, context) == expected


@example(length=5, size=2**17, stages=1, late=1)
@given(st.integers(1, 2**24), st.integers(1, 2**20), st.sampled_from([1, 3]), st.sampled_from([1, 2**30, 2**46, 2**62]))
def test_equal_ranks_end_in_time_by_a_product_as_by_a_quotient(length, size, stages, late):
    """Also where 64 bits do not hold the product."""
    context = placement_context(Topology(1, 4096, most_chunks=4), COST, stages, COST.micro_batch_ns)
    time = int(equal_time(length, size, context))
    for limit in (-3 * 2**45, 0, time - 1, time, time + 1, max(time, late)):
        assert ends_within(length, 0, size, limit, context) == (time <= limit)
