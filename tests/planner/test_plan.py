"""StepPlan: what its columns mean, worked by hand, and every kind of damage that `check` finds."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.layouts.layout import Segment
from hf_longctx.planner import PlanError, StepPlan, Topology, plan_step
from tests.builders.plans.random_plans import CPU_COST, GPU_COST, steps

EXAMPLE: dict[str, Any] = {
    "topology": Topology(2, 4),
    "first_member": [0, 2, 3, 4],
    "rank": [0, 1, 0, 1],
    "first_document": [0, 1, 2, 3],
    "doc": [0, 1, 2],
    "length": [8, 3, 2],
    "holder": [-1, 0, 1],
    "cost": [5, 3, 2],
    "lower_bound": 7,
    "offload": [0, 0, 0],
    "round": [0, 0, 0],
}
"""The plan drawn in planner/plan.py's docstring."""
LENGTHS = np.array([8, 3, 2])


def example(**changes: Any) -> StepPlan:
    columns = EXAMPLE | changes
    return StepPlan(**{name: np.array(v) if isinstance(v, list) else v for name, v in columns.items()})


def test_the_example_of_the_docstring_holds():
    plan = example()
    plan.check(LENGTHS)
    assert [micro_batch for micro_batch, _ in plan.layouts(1)] == [0, 2]
    assert plan.layouts(0)[0][1].shards == {0: (Segment(0, 0, 2), Segment(0, 6, 8)), 1: (Segment(0, 2, 6),)}
    assert plan.layouts(1)[1][1].shards == {1: (Segment(2, 0, 2),)}
    rows = plan.rows()
    columns = (rows.micro_batch, rows.rank, rows.doc, rows.start, rows.stop)
    assert list(zip(*(c.tolist() for c in columns))) == [
        (0, 0, 0, 0, 2),
        (0, 0, 0, 6, 8),
        (0, 1, 0, 2, 6),
        (1, 0, 1, 0, 3),
        (2, 1, 2, 0, 2),
    ]
    assert plan.member_tokens.tolist() == [4, 4, 3, 2]
    assert plan.peak_tokens.tolist() == [4, 4]


@pytest.mark.parametrize(
    ("changes", "start", "stop", "makespan"),
    [
        ({}, [0, 5, 5], [5, 8, 7], 8),
        ({"mode": "lockstep", "round": [0, 1, 1]}, [0, 5, 5], [5, 8, 7], 8),
        # Rank 1 has nothing in round 1 and waits for rank 0 all the same.
        ({"mode": "lockstep", "round": [0, 1, 2]}, [0, 5, 8], [5, 8, 10], 10),
        # Three stages: rank 0 fills them with 5 and 3; what is longest flows through the other two.
        ({"mode": "pipeline", "topology": Topology(2, 4, stages=3)}, [0, 5, 5], [5, 8, 7], 5 + 3 + 2 * 5),
        # Rank 1 runs only short ones, but behind the long one of rank 0 in every stage.
        (
            {"mode": "pipeline", "topology": Topology(2, 4, stages=3), "cost": [1, 5, 2], "first_member": [0, 1, 3, 4]}
            | {"rank": [0, 0, 1, 1], "doc": [2, 0, 1], "length": [2, 8, 3], "holder": [0, -1, 1]},
            [0, 1, 6],
            [1, 6, 8],
            1 + 5 + 2 + 2 * 5,
        ),
    ],
)
def test_timelines_by_hand(changes, start, stop, makespan):
    plan = example(**changes)
    plan.check(LENGTHS)
    timeline = plan.timeline()
    assert (timeline.start.tolist(), timeline.stop.tolist(), timeline.makespan) == (start, stop, makespan)
    assert timeline.rank_busy.sum() == (plan.cost * plan.members).sum()
    assert plan.summary().idle_share == pytest.approx(1 - timeline.rank_busy.sum() / (2 * makespan))


def test_a_timeline_is_played_once_and_cannot_be_written_to():
    plan = example()
    timeline = plan.timeline()
    assert plan.timeline() is timeline
    for column in (timeline.start, timeline.stop, timeline.rank_busy):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 1
    assert replace(plan, cost=plan.cost * 2).timeline().makespan == 2 * timeline.makespan


def test_several_documents_split_over_the_same_ranks_are_dealt_out_evenly():
    plan = example(topology=Topology(2, 5), first_member=[0, 2], rank=[0, 1], first_document=[0, 3], holder=[-1, -1, 1])
    plan = replace(plan, length=np.array([3, 5, 1]), cost=np.array([9]), offload=np.array([0]), round=np.array([0]))
    plan.check(np.array([3, 5, 1]))
    [(_, layout)] = plan.layouts(0)
    assert {rank: [len(s) for s in layout.shards[rank]] for rank in (0, 1)} == {0: [1, 1, 1, 1], 1: [1, 3, 1]}
    assert plan.member_tokens.tolist() == [4, 5]


def test_unequal_ranks_hold_what_their_speed_and_memory_allow():
    topology = Topology(3, 10, speed=(1000, 500, 1000), memory=(1000, 1000, 300))
    plan = example(topology=topology, first_member=[0, 3], rank=[0, 1, 2], first_document=[0, 1], doc=[0])
    plan = replace(plan, length=np.array([15]), holder=np.array([-1]), cost=np.array([9]), offload=[0], round=[0])
    plan.check(np.array([15]))
    assert plan.member_tokens.tolist() == [8, 4, 3]
    assert [plan.layouts(2)[0][1].tokens(rank) for rank in range(3)] == [8, 4, 3]


@pytest.mark.parametrize(("ranks", "degree", "expected"), [(6, 4, 2), (6, 6, 6), (6, 5, 1), (4, 8, 4), (1, 4, 1)])
def test_the_head_split_divides_the_ranks_of_each_layout(ranks, degree, expected):
    plan = plan_step(np.array([ranks]), Topology(ranks, 1, ulysses_degree=degree), CPU_COST)
    assert [layout.ulysses for _, layout in plan.layouts(0)] == [expected]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topology": Topology(1, 4)}, "micro-batch 0, rank=1: a rank must be 0 to 0"),
        ({"rank": [1, 0, 0, 1]}, "micro-batch 0, rank=0: the ranks of a micro-batch ascend"),
        ({"rank": [0, 0, 0, 1]}, "micro-batch 0, rank=0: the ranks of a micro-batch ascend"),
        ({"first_member": [0, 2, 2, 4]}, r"first_member must rise from 0 to 4, .* micro-batch \(3\)"),
        ({"first_member": [0, 2, 3]}, "first_member must rise"),
        ({"first_member": [1, 2, 3, 4]}, "first_member must rise"),
        ({"first_document": [0, 1, 3, 3]}, "first_document must rise from 0 to 3"),
        ({"cost": [5, 3]}, "first_member must rise"),
        ({"doc": [0, 1, 3]}, "micro-batch 2, doc=3: a document must be 0 to 2"),
        ({"doc": [0, 1, -1]}, "micro-batch 2, doc=-1: a document must be 0 to 2"),
        (
            {"doc": [0, 1, 1], "length": [8, 3, 3]},
            "document 1 is planned 2 times; every document is planned exactly once",
        ),
        ({"length": [8, 3, 1]}, "micro-batch 2, length=1: a document is planned with the tokens it has"),
        ({"holder": [-1, 1, 1]}, "micro-batch 1, holder=1: a holder is a rank of the document's micro-batch"),
        ({"holder": [-1, 0, 7]}, "micro-batch 2, holder=7: a holder is a rank"),
        ({"holder": [-1, 0, -2]}, "micro-batch 2, holder=-2: a holder is a rank"),
        (
            {"holder": [0, 0, 1]},
            "micro-batch 0, rank=1, which holds 0 tokens: every rank of a micro-batch holds a token",
        ),
        ({"topology": Topology(2, 3)}, "micro-batch 0, rank=0, which holds 4 tokens: a rank holds at most 3 tokens"),
        ({"topology": Topology(2, 4, memory=(1000, 750))}, "micro-batch 0, rank=0, which holds 5 tokens"),
        ({"mode": "lockstep", "round": [0, 0, 0]}, "a rank runs at most one micro-batch in each"),
        ({"mode": "lockstep", "round": [1, 0, 0]}, "rounds ascend"),
        ({"offload": [0, 1001, 0]}, "offload is 0 to 1001; it must be 0 to 1000 per mille"),
        ({"offload": [0, -1, 0]}, "offload is -1 to 0"),
        ({"cost": [5, 3, 0]}, "costs must be >= 1"),
        ({"lower_bound": 9}, "no plan can beat the lower bound of 9 ns"),
    ],
)
def test_check_finds_each_kind_of_damage(changes, message):
    with pytest.raises(PlanError, match=message):
        example(**changes).check(LENGTHS)


CHUNKED = {"mode": "pipeline", "topology": Topology(2, 4, stages=2), "chunks": [2, 1, 1], "lower_bound": 1}
"""Document 0 of 8 tokens in two chunks on two ranks: 6 and 2 tokens, as 36 is half of 64, rounded up."""


def test_chunks_by_hand():
    plan = example(**CHUNKED)
    plan.check(LENGTHS)
    assert plan.chunk_stops(0) == [6, 8]
    first, second, whole = (layout for _, layout in plan.layouts(0))
    assert first.shards == {0: (Segment(0, 0, 1), Segment(0, 4, 6)), 1: (Segment(0, 1, 4),)}
    assert second.shards == {0: (Segment(0, 7, 8),), 1: (Segment(0, 6, 7),)}
    assert second.context == first.shards
    assert whole.shards == {0: (Segment(1, 0, 3),)}
    assert [i for i, _ in plan.layouts(0)] == [0, 0, 1]
    # Chunks of 2 and 3 ns: the second stage begins when the first chunk has left the first one.
    timeline = plan.timeline()
    assert (timeline.start.tolist(), timeline.stop.tolist()) == ([0, 5, 5], [5, 8, 7])
    assert timeline.makespan == 2 + 3 + 3 + 3
    digests = {
        replace(plan, **{name: value}).digest() for name, value in (("linear_tokens", 9), ("cost", plan.cost + 1))
    }
    assert len(digests | {plan.digest(), example(**CHUNKED | {"chunks": [1, 1, 1]}).digest()}) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chunks": [5, 1, 1]}, "micro-batch 0 runs in 5 chunks .* at most 2 chunks of 8 tokens"),
        ({"chunks": [2, 1, 0]}, "chunks has 3 entries from 0 to 2; it needs one for each of 3 micro-batches, 1 to 32"),
        ({"chunks": [2, 1]}, "chunks has 2 entries"),
        ({"chunks": [33, 1, 1]}, "from 1 to 33"),
        ({"mode": "async"}, "chunks are up to 2 in mode 'async'"),
        ({"topology": Topology(2, 8, stages=2, memory=(1000, 999))}, "equal ranks: False"),
        ({"topology": Topology(2, 4, stages=2, most_chunks=1)}, "1 to 1"),
        ({"linear_tokens": -1}, "linear_tokens=-1; more than 1 needs mode 'pipeline'"),
        (
            {
                "first_member": [0, 2, 4],
                "first_document": [0, 1, 3],
                "cost": [5, 3],
                "holder": [-1, 0, 1],
                "chunks": [1, 2],
            }
            | {"offload": [0, 0], "round": [0, 0]},
            "micro-batch 1 runs in 2 chunks with 2 documents",
        ),
    ],
)
def test_check_finds_chunks_that_cannot_run(changes, message):
    with pytest.raises(PlanError, match=message):
        example(**CHUNKED | changes).check(LENGTHS)


def test_check_refuses_two_documents_split_over_unequal_ranks():
    changes = {"first_member": [0, 2], "rank": [0, 1], "first_document": [0, 2], "doc": [0, 1], "length": [4, 2]}
    plan = example(
        topology=Topology(2, 9, speed=(1000, 500)), **changes, holder=[-1, -1], cost=[9], offload=[0], round=[0]
    )
    with pytest.raises(PlanError, match="micro-batch 0 splits 2 documents; unequal ranks share one at a time"):
        plan.check(np.array([4, 2]))


def test_what_host_memory_holds_is_room_on_the_device():
    """Half of what a token keeps may leave; 500 per mille of it on both ranks: a quarter of 4 tokens."""
    plan = example(topology=Topology(2, 3), offload=[500, 0, 0], offload_share=500)
    plan.check(LENGTHS)
    assert plan.summary().offloaded_tokens == 4
    with pytest.raises(PlanError, match="which holds 4 tokens"):
        replace(plan, offload_share=499).check(LENGTHS)


def test_the_digest_is_of_what_runs_and_not_of_predictions():
    plan = example()
    assert replace(plan, cost=plan.cost + 1, lower_bound=1, planner="other").digest() == plan.digest()
    digests = {plan.digest()}
    for changes in (
        {"rank": [0, 1, 1, 0], "holder": [-1, 1, 0]},
        {"doc": [0, 2, 1], "length": [8, 2, 3]},
        {"offload": [1, 0, 0]},
        {"round": [0, 1, 1]},
        {"topology": Topology(2, 5)},
        {"topology": Topology(3, 4)},
        {"topology": Topology(2, 4, ulysses_degree=2)},
        {"topology": Topology(2, 4, stages=2)},
        {"topology": Topology(2, 4, speed=(1000, 500))},
        {"topology": Topology(2, 4, memory=(1000, 1250))},
    ):
        digests.add(example(**changes).digest())
    assert len(digests) == 11


def test_a_rank_outside_the_plan_is_refused():
    plan = plan_step(np.array([3]), Topology(2, 10), CPU_COST)
    for rank in (-1, 2):
        with pytest.raises(PlanError, match=f"rank {rank} is not in this plan, which was made for ranks 0 to 1"):
            plan.layouts(rank)


def test_a_plan_cannot_be_changed():
    plan = plan_step(np.array([3, 4]), Topology(2, 10), CPU_COST)
    for column in ("first_member", "rank", "first_document", "doc", "length", "holder", "cost", "offload", "round"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(plan, column)[0] = 1


def test_summary_reads_as_text():
    plan = plan_step(np.array([9, 3, 2]), Topology(2, 5), CPU_COST)
    summary = plan.summary()
    assert (summary.documents, summary.tokens, summary.split_documents) == (3, 14, 1)
    assert summary.ranks_per_document == (1, 1.0, 2)
    assert summary.micro_batches_per_rank == (2, 2.0, 2)
    first, second, third, fourth = str(summary).splitlines()
    assert first == "3 documents (1 split), 14 tokens on 2 ranks"
    assert second == "ranks per document: 1 to 2, median 1; micro-batches per rank: 2 to 2, median 2"
    assert "times the lower bound" in third
    assert fourth == "keys and values of 6 tokens exchanged (0.0% for balance), at most 5 tokens on a rank at a time"


def test_exchanged_tokens_by_hand():
    """16 tokens on 4 ranks of 2 nodes. The ranks hold 4 each, and need 16, 14, 12 and 10 of them: 52 - 16 = 36. The first
    node lacks the 8 tokens of the second, which lacks the first 4 of the first."""
    plan = plan_step(np.array([16]), Topology(4, 4, ranks_per_node=2), CPU_COST)
    summary = plan.summary()
    assert (summary.exchanged_tokens, summary.redundant_tokens, summary.between_nodes_tokens) == (36, 0, 12)
    wide = plan_step(np.array([16]), Topology(4, 8, ranks_per_node=2), GPU_COST)
    wide = replace(wide, first_member=np.array([0, 4]), rank=np.arange(4), holder=np.array([-1]))
    assert (wide.summary().exchanged_tokens, wide.summary().redundant_tokens) == (36, 36 - 16 * 3 // 4)


@given(steps(equal=True), st.sampled_from(["async", "lockstep"]))
def test_exchanged_tokens_are_those_that_come_before_the_last_that_a_rank_holds(step, mode):
    """A rank needs every token of a document that comes before its last one; in zigzag 3/4 of those that it lacks."""
    lengths, topology, cost = step
    plan = plan_step(lengths, topology, cost, mode)
    summary = plan.summary()
    received, between, lost = 0, 0, 0
    layouts = dict(pair for rank in range(topology.world_size) for pair in plan.layouts(rank))
    for layout in layouts.values():
        for doc, ranks in layout.split_documents.items():
            last = {rank: max(s.stop for s in layout.shards[rank] if s.doc == doc) for rank in ranks}
            tokens = {rank: sum(len(s) for s in layout.shards[rank] if s.doc == doc) for rank in ranks}
            received += sum(last[rank] - tokens[rank] for rank in ranks)
            nodes = [{r for r in ranks if r // topology.node_size == node} for node in range(topology.world_size)]
            between += sum(max(last[r] for r in node) - sum(tokens[r] for r in node) for node in nodes if node)
            lost += len(ranks) ** 2  # chunks of whole tokens
    assert abs(summary.exchanged_tokens - received) <= lost
    # A node lacks 1/2 to all of the tokens of a document, 3/4 where nodes hold equal parts.
    assert 0.75 * between - lost <= summary.between_nodes_tokens <= 1.5 * between + lost
    assert summary.most_tokens_per_rank == plan.peak_tokens.max() <= topology.capacity
