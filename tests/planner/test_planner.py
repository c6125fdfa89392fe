"""Plans of any step against independent references: every invariant recomputed token by token from what each rank sees, an
event simulation of ranks that block until their partners arrive, costs recomputed from the tokens that ranks hold.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_longctx.layouts.layout import Layout
from hf_longctx.planner import CostModel, PlanError, Topology, lower_bound, plan_step
from hf_longctx.planner.placing.search import NEAR, TOGETHER
from hf_longctx.planner.plan import MODES
from tests.builders.plans.plan_invariants import expected_cost, many_examples, simulate, tokens_held_once
from tests.builders.plans.random_plans import CPU_COST, GPU_COST, lengths_for, steps, topologies

FREE_EXCHANGE = CostModel(attention_ps=10**6, linear_ps=10**6, inside_ps=0)
LATE_FOR_BARRIERS = (
    np.array([2, 3, 5, 6, 8, 24, 25, 33, 35, 48, 69]),
    Topology(6, 35),
    CostModel(
        attention_ps=14_563_556,
        linear_ps=164_086_012_062,
        inside_ps=524_288_000,
        message_ns=32_000_000,
        document_ns=32_000_000,
        label_ps=3_024_738_462,
    ),
)
"""A step that ends later in rounds than without, and soonest in rounds without their barriers."""
modes = pytest.mark.parametrize("mode", MODES)


@modes
@many_examples
@given(steps())
@example((np.array([16]), Topology(4, 4), CPU_COST))
@example((np.array([1]), Topology(9, 1), CPU_COST))
@example((np.array([1]), Topology(3, 1, speed=(1600, 250, 250)), GPU_COST))  # faster than the cost model says
@example((np.full(30, 7), Topology(4, 7, ulysses_degree=4, stages=3), GPU_COST))
def test_invariants_recomputed_from_every_ranks_layouts(mode, step):
    lengths, topology, cost = step
    plan = plan_step(lengths, topology, cost, mode)
    plan.check(lengths)
    layouts = tokens_held_once(plan, lengths)

    assert (plan.topology, plan.mode, plan.planner) == (topology, mode, "hdp")
    for layout in (layout for chunks in layouts.values() for layout in chunks):
        assert topology.ulysses_degree % layout.ulysses == 0 == len(layout.ranks) % layout.ulysses
    segments = [
        (micro_batch, rank, segment.doc, segment.start, segment.stop)
        for micro_batch in sorted(layouts)
        for layout in layouts[micro_batch]
        for rank, shard in layout.shards.items()
        for segment in shard
    ]
    rows = plan.rows()
    assert segments == list(zip(*(c.tolist() for c in (rows.micro_batch, rows.rank, rows.doc, rows.start, rows.stop))))
    tokens = [sum(chunk.tokens(rank) for chunk in layouts[i]) for i in sorted(layouts) for rank in layouts[i][0].ranks]
    assert plan.member_tokens.tolist() == tokens
    if mode == "lockstep":
        for rank in range(topology.world_size):
            rounds = [plan.round[micro_batch] for micro_batch, _ in plan.layouts(rank)]
            assert len(rounds) == len(set(rounds)), "at most one micro-batch per rank and round"
        assert sorted(set(plan.round.tolist())) == list(range(plan.rounds))


@modes
@many_examples
@given(steps())
def test_timeline_equals_blocking_ranks_and_never_beats_the_bound(mode, step):
    lengths, topology, cost = step
    plan = plan_step(lengths, topology, cost, mode)
    start, stop, end = simulate(plan)
    timeline = plan.timeline()
    assert timeline.start.tolist() == start
    assert timeline.stop.tolist() == stop
    assert timeline.makespan == end >= plan.lower_bound >= 1
    of_stage = cost.scaled(*[1 / topology.stages] * 3) if mode == "pipeline" else cost
    assert plan.lower_bound == lower_bound(np.sort(lengths)[::-1], topology, of_stage, mode)
    for rank in range(topology.world_size):
        assert timeline.rank_busy[rank] == sum(int(plan.cost[m]) for m in dict(plan.layouts(rank)))
    assert 0 <= plan.summary().idle_share < 1


@many_examples
@given(steps())
@example(LATE_FOR_BARRIERS)
def test_no_plan_in_rounds_ends_clearly_sooner_without_its_barriers(step):
    lengths, topology, cost = step
    plan, rounds = (plan_step(lengths, topology, cost, mode) for mode in ("async", "lockstep"))
    free = replace(rounds, mode="async", round=np.zeros_like(rounds.round))
    enough = max(free.timeline().makespan * TOGETHER, plan.lower_bound * NEAR) // 1000
    # A placement counts a document's share of a micro-batch. Where that is near the bound, no other plan is made.
    packing = cost.micro_batch_ns * len(lengths) * 1000 // int(topology.speeds.min())
    assert plan.timeline().makespan <= enough + packing + 1


def expected_cost_of_chunks(chunks: list[Layout], cost: CostModel) -> tuple[Fraction, Fraction]:
    """Nanoseconds of a document in chunks on equal ranks, counted from what the layouts of its chunks hold, and how much may
    be lost by rounding."""
    ranks, ps = len(chunks[0].ranks), Fraction(1, 1000)
    window = cost.window or 10**9
    node = cost.ranks_per_node or ranks
    exact, lost = Fraction(0), Fraction(1)
    for layout in chunks:
        new = sum(layout.tokens(rank) for rank in layout.ranks)
        before = sum(layout.context_tokens(rank) for rank in layout.ranks)
        attention = Fraction(0)
        for coefficient, width in ((cost.attention_ps, 10**9), (cost.windowed_ps, window)):
            squares = [min(tokens, width) * (2 * tokens - min(tokens, width)) for tokens in (before, before + new)]
            # Queries and keys of each pair of ranks.
            blocks = Fraction(new + min(before, width) + new, 2) * cost.attention_half_tokens
            attention += coefficient * ps * (Fraction(squares[1] - squares[0], ranks) + blocks)
        seen = new + (before if cost.attention_ps else min(before, window))
        received = Fraction(seen * (ranks - 1), ranks)
        exchange = cost.inside_ps * ps * received + cost.message_ns * (ranks - 1)
        exchange += cost.between_ps * ps * seen * Fraction(max(ranks - node, 0), ranks * node)
        linear = cost.linear_ps * ps * Fraction(new, ranks) + cost.state_ns * (ranks - 1)
        exact += cost.micro_batch_ns + cost.document_ns + linear + max(attention, exchange)
        # Picoseconds are divided before tokens multiply: a nanosecond for each of these.
        lost += 1 + 8 * (before + new + seen) * (1 + Fraction(cost.attention_half_tokens, 2))
    return exact, lost


@modes
@many_examples
@given(steps())
def test_costs_are_those_of_the_tokens_that_ranks_hold(mode, step):
    lengths, topology, cost = step
    plan = plan_step(lengths, topology, cost, mode)
    of_stage = cost.scaled(*[1 / topology.stages] * 3) if mode == "pipeline" else cost
    for micro_batch, layouts in tokens_held_once(plan, lengths).items():
        if len(layouts) > 1:
            exact, lost = expected_cost_of_chunks(layouts, of_stage)
            assert exact - lost <= plan.cost[micro_batch] <= exact + lost
            continue
        exact, lost = expected_cost(layouts[0], topology, of_stage)
        assert exact - 1 <= plan.cost[micro_batch] <= exact + lost


@modes
@settings(max_examples=2 * settings().max_examples)
@given(steps())
def test_same_lengths_same_plan_other_lengths_other_digest(mode, step):
    lengths, topology, cost = step
    given_lengths = lengths.copy()
    first = plan_step(lengths, topology, cost, mode)
    assert (lengths == given_lengths).all()
    assert first.digest() == plan_step(lengths.astype(np.int32), topology, cost, mode).digest()
    assert -(2**63) <= first.digest() < 2**63
    assert plan_step(np.append(lengths, 1), topology, cost, mode).digest() != first.digest()
    if topology.uniform:
        for changed in (
            Topology(topology.world_size + 1, topology.capacity),
            Topology(topology.world_size, topology.capacity + 1),
        ):
            assert plan_step(lengths, changed, cost, mode).digest() != first.digest()


@pytest.mark.processes
def test_plans_are_the_same_in_another_process_and_without_compilation():
    """Plain Python integers have no 64 bits to overflow, and plain Python lists no end to write behind."""
    code = """
import numpy as np
from hf_longctx.planner import CostModel, Topology, plan_step
from hf_longctx.planner.cost.selective_offload import Offload

cost = CostModel(10**3, 10**7, 10**6, between_ps=10**6, message_ns=10**3, micro_batch_ns=10**5, ranks_per_node=4)
lengths = np.arange(1, 70) * 7 % 613 + 1
unequal = dict(speed=(1000, 500, 730) * 4, memory=(1000, 750, 1000) * 4)
for mode in ("async", "pipeline", "lockstep"):
    for more in ({}, {"ranks_per_node": 4, "stages": 2, "ulysses_degree": 2}, unequal):
        print(plan_step(lengths, Topology(12, 200, **more), cost, mode).digest())
for mode in ("async", "pipeline"):
    slow = cost.scaled(exchange=1000)
    print(plan_step(lengths, Topology(12, 200, stages=3), slow, mode, Offload(900, 1000, 10**6)).digest())
"""
    command = [sys.executable, "-c", code]
    environments: tuple[dict[str, str], ...] = (
        {"PYTHONHASHSEED": "1"},
        {"PYTHONHASHSEED": "2", "NUMBA_DISABLE_JIT": "1"},
    )
    printed = [
        subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | changes).stdout
        for changes in environments
    ]
    assert printed[0] == printed[1]
    assert len(set(printed[0].split())) >= 9


@modes
@pytest.mark.parametrize("cost", [CPU_COST, GPU_COST, FREE_EXCHANGE], ids=["cpu", "gpu", "free"])
@pytest.mark.parametrize(
    ("lengths", "world_size", "capacity"),
    [
        ([700], 1, 700),  # one document, one rank
        ([700] * 9, 1, 1000),
        ([1], 8, 1),
        ([64], 8, 8),  # one giant that needs every token of all ranks
        ([64, 64, 64], 8, 8),
        ([64] + [1] * 50, 8, 8),
        ([100] * 31, 4, 100),  # all equal, and no multiple of the ranks
        ([1] * 100, 8, 5),  # one token each
        ([1, 2, 3], 100, 5),  # more ranks than tokens
        ([3, 2, 4, 1, 1], 5, 1),  # a token on a rank at a time
        ([2**18, 5], 16, 16384),  # all of them hold the longest exactly
    ],
)
def test_odd_inputs(mode, cost, lengths, world_size, capacity):
    topology = Topology(world_size, capacity, stages=2)
    plan = plan_step(np.array(lengths), topology, cost, mode)
    plan.check(np.array(lengths))
    tokens_held_once(plan, np.array(lengths))
    assert simulate(plan)[2] == plan.timeline().makespan


@given(topologies(max_ranks=64), st.data())
def test_a_step_of_many_ranks(topology, data):
    """Blocks, nodes and all other ranks in one: groups of ranks that are not adjacent come up, and holes before them."""
    lengths = data.draw(lengths_for(topology, 150))
    for mode in MODES:
        plan = plan_step(lengths, topology, GPU_COST, mode)
        plan.check(lengths)
        tokens_held_once(plan, lengths)


def test_a_document_that_fits_one_rank_is_split_when_all_would_wait_for_it():
    plan = plan_step(np.array([4096, 200, 100, 50]), Topology(2, 8192), CPU_COST)
    assert [layout.split_documents for _, layout in plan.layouts(0) if 0 in layout.doc_lengths] == [{0: (0, 1)}]
    whole = int(CPU_COST.time(4096, 1))
    assert plan.timeline().makespan < 0.7 * whole


@modes
def test_short_documents_stay_whole_when_there_are_enough_of_them(mode):
    plan = plan_step(np.full(1000, 100), Topology(4, 1000), CPU_COST, mode)
    assert plan.summary().split_documents == 0
    assert plan.summary().micro_batches_per_rank == (25, 25.0, 25)
    assert plan.summary().balance == 1


@modes
def test_a_rank_with_nothing_to_do_gets_no_micro_batch(mode):
    plan = plan_step(np.array([1, 1]), Topology(4, 10), CPU_COST, mode)
    assert sorted(len(plan.layouts(rank)) for rank in range(4)) == [0, 0, 1, 1]
    assert plan.summary().micro_batches_per_rank == (0, 0.5, 1)


def test_holes_before_a_meeting_are_filled():
    """Three ranks, two documents that need two of them each: whoever waits has short documents to do."""
    lengths = np.array([200, 200] + [10] * 60)
    plan = plan_step(lengths, Topology(3, 100), FREE_EXCHANGE)
    assert plan.summary().balance < 1.03


@pytest.mark.parametrize(
    ("lengths", "topology", "message"),
    [
        (
            [3, 70000],
            Topology(4, 16384),
            r"document 1 has 70000 tokens; 4 ranks x 16384 .* hold 65536.*>= 17500, or >= 5 ranks",
        ),
        (
            [3, 9],
            Topology(2, 10, memory=(500, 300)),
            r"document 1 has 9 tokens; 2 ranks x 10 tokens of capacity \(times their memory factors\) hold 8",
        ),
        ([3, 0], Topology(4, 10), "document 1 has 0 tokens; every document needs >= 1"),
        ([-5], Topology(4, 10), "document 0 has -5 tokens"),
        ([], Topology(2, 10), r"shape \(0,\); it must be integers, one per document, at least one"),
        ([1.5], Topology(2, 10), "dtype float64"),
        ([[1]], Topology(2, 10), r"shape \(1, 1\)"),
    ],
)
def test_bad_input_names_the_value_and_what_is_valid(lengths, topology, message):
    for mode in MODES:
        with pytest.raises(PlanError, match=message):
            plan_step(np.array(lengths), topology, CPU_COST, mode)


def test_an_unknown_mode_is_refused():
    modes: Mapping[str, str] = {"mode": "fast"}
    with pytest.raises(PlanError, match="mode is 'fast'; valid: async, lockstep, pipeline"):
        plan_step(np.array([3]), Topology(1, 3), CPU_COST, **modes)  # type: ignore[arg-type]


def test_the_sizes_that_the_error_names_are_exactly_enough():
    lengths = np.array([3, 70000])
    plan_step(lengths, Topology(4, 17500), CPU_COST).check(lengths)
    plan_step(lengths, Topology(5, 16384), CPU_COST).check(lengths)
    with pytest.raises(PlanError):
        plan_step(lengths, Topology(4, 17499), CPU_COST)
