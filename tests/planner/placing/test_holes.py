"""Whole documents placed anew where ranks wait for a group: the same groups, every invariant, and never a later end."""

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.hardware.published import ARCHITECTURES
from hf_longctx.planner import GPU, CostModel, StepPlan, Topology, plan_step
from hf_longctx.planner.bound import unit_bits
from hf_longctx.planner.placing.holes import fill_holes
from hf_longctx.planner.placing.micro_batches import Step

COST = CostModel.from_config(ARCHITECTURES["llama-7b"], GPU, ranks_per_node=8)


def in_rounds(lengths: np.ndarray, topology: Topology) -> StepPlan:
    """The plan in rounds, without its barriers, in the units of COST."""
    assert unit_bits(lengths, topology, COST) == 0
    rounds = plan_step(lengths, topology, COST, "lockstep")
    return replace(rounds, mode="async", round=np.zeros_like(rounds.round))


def groups(plan: StepPlan) -> list[tuple[list[int], list[int], int]]:
    """Ranks, documents and cost of each group, in the order of their first document."""
    return sorted(
        (
            plan.rank[plan.first_member[i] : plan.first_member[i + 1]].tolist(),
            plan.doc[plan.first_document[i] : plan.first_document[i + 1]].tolist(),
            int(plan.cost[i]),
        )
        for i in np.flatnonzero(plan.members > 1)
    )


def test_holes_beside_a_long_group_take_whole_documents() -> None:
    # A on ranks 0 to 5, then B on all: ranks 6 and 7 wait for it, although 600 documents follow on all ranks.
    lengths, topology = np.array([48_000, 60_000, *[500] * 600]), Topology(8, 8_000)
    step = Step.checked(lengths, topology, COST, "async")
    in_packs = np.arange(600) // 16
    micro_batch = np.concatenate([[0, 1], 2 + in_packs])
    ranks = np.concatenate([np.arange(6), np.arange(8), np.arange(38) % 8])
    sizes = np.array([6, 8, *[1] * 38])
    times = [COST.time(length, size) for length, size in ((48_000, 6), (60_000, 8))]
    packs = np.bincount(in_packs) * COST.time(500, 1)
    plan = step.plan("hdp", micro_batch, sizes, ranks, np.append(times, packs) + COST.micro_batch_ns, "direct")
    filled = fill_holes(plan, lengths, COST)
    filled.check(lengths)
    assert groups(filled) == groups(plan)
    begin_of_b = filled.timeline().start[filled.micro_batch_of_document[filled.doc == 1]]
    assert filled.timeline().rank_busy[6:].min() > plan.timeline().rank_busy[6:].max()
    assert (filled.timeline().start < begin_of_b).sum() == 7, "A, and three packs on ranks 6 and 7 each"
    # As soon as if nobody waited, but for what one document takes.
    mean = filled.timeline().rank_busy.mean()
    assert filled.timeline().makespan < mean + COST.time(500, 1) + 2 * COST.micro_batch_ns


@given(
    lengths=st.lists(st.integers(1, 30_000), min_size=1, max_size=60),
    ranks=st.integers(1, 9),
    capacity=st.sampled_from([3_400, 8_000]),
    slow=st.sampled_from([None, 400, 900]),
    small=st.sampled_from([None, 500]),
)
def test_plans_stay_valid_and_end_no_later(
    lengths: list[int], ranks: int, capacity: int, slow: int | None, small: int | None
) -> None:
    speed, memory = (
        tuple(1000 if rank % 3 else other for rank in range(ranks)) if other else None for other in (slow, small)
    )
    topology = Topology(ranks, capacity, ranks_per_node=4, speed=speed, memory=memory)
    counted = np.array([length for length in lengths if length <= topology.longest_document] or [1])
    plan = in_rounds(counted, topology)
    filled = fill_holes(plan, counted, COST)
    filled.check(counted)
    assert filled.timeline().makespan <= plan.timeline().makespan
    assert groups(filled) == groups(plan)


def test_plans_of_whole_documents_alone_stay_as_they_are() -> None:
    plan = in_rounds(np.full(19, 5_000), Topology(6, 8_000))
    assert fill_holes(plan, np.full(19, 5_000), COST) is plan
