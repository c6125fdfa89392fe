"""Whole documents in the holes before groups: each hole takes the longest that fits, again and again, and none is lost."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.hardware.published import ARCHITECTURES
from hf_longctx.planner import GPU, CostModel, Topology
from hf_longctx.planner.cost.group_times import placement_context
from hf_longctx.planner.placing.least_loaded import place_in_holes, place_on_least_loaded
from tests.builders.plans.plan_invariants import many_examples

COST = CostModel.from_config(ARCHITECTURES["llama-7b"], GPU)


def by_hand(
    holes: np.ndarray, times: np.ndarray, tokens: np.ndarray, topology: Topology
) -> tuple[list[int], list[int]]:
    """The same, one document after the other."""
    rank, ends_it = [-1] * len(times), [-1] * len(times)
    for room, in_rank, document in holes.tolist():
        left, capacity = room * int(topology.speeds[in_rank]) // 1000, int(topology.capacities[in_rank])
        for i in range(len(times)):
            if rank[i] < 0 and times[i] <= left and tokens[i] <= capacity:
                rank[i], ends_it[i] = in_rank, document
                left -= int(times[i])
    return rank, ends_it


@many_examples
@given(
    st.lists(st.integers(1, 1000), max_size=30),
    st.lists(st.tuples(st.integers(0, 2500), st.integers(0, 2), st.integers(0, 9)), max_size=8),
    st.lists(st.integers(250, 1000), min_size=3, max_size=3),
    st.lists(st.sampled_from([250, 500, 1000]), min_size=3, max_size=3),
)
def test_holes_take_the_longest_documents_that_fit(documents, holes, speeds, memory):
    tokens = np.sort(np.array(documents, np.int64))[::-1]
    times = tokens * 2
    topology = Topology(3, 600, speed=tuple(speeds), memory=tuple(memory))
    rows = np.array(holes, np.int64).reshape(-1, 3)
    rank, ends_it = place_in_holes(rows, times, tokens, placement_context(topology, COST))
    assert (rank.tolist(), ends_it.tolist()) == by_hand(rows, times, tokens, topology)


def test_a_long_hole_on_a_fast_rank_takes_what_fits():
    """Room times speed exceeds 64 bits, also in thousandths."""
    topology = Topology(2, 600, speed=(1000, 5000))
    hole = np.array([[2**61, 1, 4]])
    rank, ends_it = place_in_holes(
        hole, np.array([2**60, 2**59, 7]), np.array([5, 5, 1]), placement_context(topology, COST)
    )
    assert rank.tolist() == [1, 1, 1]
    assert ends_it.tolist() == [4, 4, 4]


@many_examples
@given(
    st.lists(st.integers(1, 4000), min_size=1, max_size=12),
    st.lists(st.sampled_from([400, 700, 1000]), min_size=2, max_size=9),
    st.integers(0, 2),
    st.floats(1.0, 3.0),
)
def test_ranks_that_are_alike_may_be_counted(documents, speeds, wide, over):
    """Groups are the same whether times are found from how many ranks there are of each kind or rank by rank."""
    topology = Topology(len(speeds), 2000, speed=tuple(speeds))
    lengths = np.minimum(np.sort(np.array(documents, np.int64))[::-1], topology.tokens)
    context = placement_context(topology, COST)
    nothing = np.empty(0, np.int64)
    unknown = context._replace(kind_speeds=nothing, kind_capacities=nothing, counts=nothing)
    target = int(COST.time(lengths, 1).sum() / sum(speeds) * 1000 * over)
    placed = []
    for known in (context, unknown):
        first_member, member = np.zeros(len(lengths) + 1, np.int64), np.zeros(len(lengths) * len(speeds), np.int64)
        loads, holes = np.zeros(len(speeds), np.int64), np.zeros((len(member), 3), np.int64)
        work_from = np.zeros(len(lengths) + 1)
        count = place_on_least_loaded(
            lengths, lengths, work_from, wide, target, 2**62, known, first_member, member, loads, holes
        )
        assert count >= 0
        placed.append([column.tolist() for column in (first_member, member, loads, holes)])
    assert placed[0] == placed[1]
