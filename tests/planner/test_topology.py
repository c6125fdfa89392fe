"""The ranks that a plan is made for: factors, nodes, and what few of them hold at most."""

import itertools

import numpy as np
import pytest
from hypothesis import given

from hf_longctx.planner import PlanError, Topology
from tests.builders.plans.random_plans import topologies


def test_equal_ranks_need_no_factors():
    plain = Topology(3, 100)
    assert plain.uniform
    assert plain.speeds.tolist() == [1000] * 3
    assert plain.capacities.tolist() == [100] * 3
    assert (plain.tokens, plain.node_size) == (300, 3)
    assert Topology(3, 100, speed=(1000,) * 3, memory=(1000,) * 3) == plain


def test_factors_are_per_mille_of_speed_and_capacity():
    mixed = Topology(3, 150, speed=(1000, 400, 2500), memory=(1000, 333, 7))
    assert not mixed.uniform
    assert mixed.speeds.tolist() == [1000, 400, 2500]
    assert mixed.capacities.tolist() == [150, 49, 1]
    assert mixed.speeds.dtype == mixed.capacities.dtype == np.int64
    assert mixed.tokens == 200
    assert mixed.summed_speed(np.array([1, 2, 3])).tolist() == [2500, 3500, 3900]
    assert Topology(2, 10, memory=[500, 1000]).memory == (500, 1000)  # type: ignore[arg-type]
    assert hash(mixed) == hash(Topology(3, 150, speed=(1000, 400, 2500), memory=(1000, 333, 7)))


@pytest.mark.parametrize(("ranks_per_node", "expected"), [(None, 6), (1, 1), (4, 4), (6, 6), (8, 6)])
def test_a_node_holds_no_more_than_all_ranks(ranks_per_node, expected):
    assert Topology(6, 1, ranks_per_node=ranks_per_node).node_size == expected


@given(topologies())
def test_no_choice_of_fewer_ranks_holds_a_document(topology):
    lengths = np.arange(1, topology.tokens + 1)
    fewest = topology.fewest_ranks(lengths)
    most_held = [
        max(sum(group) for group in itertools.combinations(topology.capacities.tolist(), ranks))
        for ranks in range(topology.world_size + 1)
    ]
    assert [most_held[ranks] >= length for length, ranks in zip(lengths, fewest)] == [True] * len(lengths)
    assert [most_held[ranks - 1] < length for length, ranks in zip(lengths, fewest)] == [True] * len(lengths)


@given(topologies())
def test_no_choice_of_as_many_ranks_is_faster(topology):
    ranks = np.arange(1, topology.world_size + 1)
    fastest = [max(map(sum, itertools.combinations(topology.speeds.tolist(), count))) for count in ranks]
    assert topology.summed_speed(ranks).tolist() == fastest


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "world_size is 0; it must be >= 1"),
        ({"world_size": -3}, "world_size is -3; it must be >= 1"),
        ({"world_size": 2.0}, "world_size is 2.0; it must be"),
        ({"capacity": 0}, "capacity is 0; it must be >= 1"),
        ({"ulysses_degree": 0}, "ulysses_degree is 0; it must be >= 1"),
        ({"stages": 0}, "stages is 0; it must be >= 1"),
        ({"most_chunks": 0}, "most_chunks is 0; it must be >= 1"),
        ({"most_chunks": 33}, "most_chunks is 33; it must be 1 to 32"),
        ({"ranks_per_node": 0}, "ranks_per_node is 0; it must be >= 1, or None for one node"),
        (
            {"speed": (1000,)},
            r"speed has 1 factors, the smallest 1000; it needs one per rank \(2\), per mille, each >= 1",
        ),
        ({"speed": ()}, "speed has 0 factors, the smallest None"),
        ({"memory": (1000, 0)}, "memory has 2 factors, the smallest 0"),
        (
            {"memory": (1000, 90), "capacity": 10},
            r"rank 1 holds capacity 10 \* memory 90 / 1000 = 0 tokens; it needs a capacity >= 12",
        ),
    ],
)
def test_errors_name_the_value_and_the_rule(arguments, message):
    with pytest.raises(PlanError, match=message):
        Topology(**{"world_size": 2, "capacity": 10} | arguments)


def test_the_capacity_that_the_error_names_is_enough():
    assert Topology(2, 12, memory=(1000, 90)).capacities.tolist() == [12, 1]
