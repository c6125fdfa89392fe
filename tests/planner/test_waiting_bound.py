"""The least that unequal ranks wait for each other, beside every choice of ranks and of a duration."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.planner import Topology, lower_bound, plan_step
from hf_longctx.planner.waiting_bound import least_waiting, work_with_waiting
from tests.builders.plans.random_plans import GPU_COST

GENERATIONS = Topology(6, 3000, speed=(1000, 300) * 3)
DIFFERENT = Topology(4, 1000, speed=(1000, 500, 250, 125))


@st.composite
def unequal(draw: st.DrawFn) -> tuple[Topology, int]:
    """Ranks, and tokens that they hold together."""
    ranks = draw(st.integers(2, 6))
    some = st.lists(st.integers(200, 1000), min_size=ranks, max_size=ranks)
    speed, memory = draw(some), draw(st.none() | some)
    topology = Topology(
        ranks, draw(st.integers(5, 60)), speed=tuple(speed), memory=None if memory is None else tuple(memory)
    )
    return topology, draw(st.integers(1, topology.tokens))


def waiting_of(tokens: int, speeds: np.ndarray, rooms: np.ndarray) -> float:
    """Tokens that these ranks wait for, in the least time in which they hold so many; by bisection."""
    short, long = 0.0, float((rooms / speeds).max())
    for _ in range(60):
        middle = (short + long) / 2
        if np.minimum(speeds * middle, rooms).sum() >= tokens:
            long = middle
        else:
            short = middle
    return float(np.maximum(speeds * long - rooms, 0).sum())


@settings(max_examples=4 * settings().max_examples)
@given(unequal())
def test_no_ranks_wait_less(step: tuple[Topology, int]):
    topology, tokens = step
    if topology.uniform:
        return
    [least] = least_waiting(np.array([tokens]), topology)
    speeds, rooms = topology.speeds / 1000, topology.capacities.astype(float)
    for chosen in range(1, 2**topology.world_size):
        ranks = [rank for rank in range(topology.world_size) if chosen >> rank & 1]
        if rooms[ranks].sum() >= tokens:
            assert waiting_of(tokens, speeds[ranks], rooms[ranks]) >= least - 1e-6 * (1 + least)


@pytest.mark.parametrize(
    ("tokens", "waiting"),
    [
        (9_000, 0),  # on the three slow ones
        (11_700, 0),  # on all: the fast ones are just full
        (18_000, 3 * (3_000 / 0.3 - 3_000)),  # all are full, and the fast ones wait until the slow ones are done
    ],
)
def test_waiting_by_hand(tokens: int, waiting: float):
    assert least_waiting(np.array([tokens]), GENERATIONS) == pytest.approx([waiting])


@pytest.mark.parametrize(("topology", "tokens", "part"), [(GENERATIONS, 12_000, 1), (DIFFERENT, 1_950, 1 / 2)])
def test_a_micro_batch_waits_for_one_of_its_documents(topology: Topology, tokens: int, part: float):
    """It holds one of more than half of all tokens, with all of its waiting; two of a third to half, with half of it."""
    work = np.array([10**9, 10**9, 10**7])
    [waits] = least_waiting(np.array([tokens]), topology)
    assert waits > 0
    counted = work_with_waiting(work, np.array([tokens, tokens, 1]), topology)
    assert counted[:2] == pytest.approx(1e9 * (1 + part * waits / tokens), rel=1e-6)
    assert counted[2] == int(1e9 / tokens)  # its token fills no more of the waiting than one of theirs


def test_documents_that_wait_for_nobody_are_counted_as_before():
    work = np.array([7, 5])
    assert work_with_waiting(work, np.array([4_000, 4_000]), GENERATIONS) is work
    assert work_with_waiting(work, np.array([18_000, 18_000]), Topology(6, 3000)) is work


def test_documents_that_need_all_ranks_are_planned_near_the_bound():
    """Without the waiting, the bound was half of what any plan takes."""
    lengths, cost = np.array([18_000] * 8 + [500] * 60), GPU_COST
    plan = plan_step(lengths, GENERATIONS, cost)
    assert plan.lower_bound <= plan.timeline().makespan <= 1.05 * plan.lower_bound
    alone = (
        int(cost.work(np.sort(lengths)[::-1], GENERATIONS.fewest_ranks(np.sort(lengths)[::-1])).sum()) * 1000 // 3900
    )
    assert plan.lower_bound > 1.5 * alone
    assert plan.lower_bound == lower_bound(np.sort(lengths)[::-1], GENERATIONS, cost)
