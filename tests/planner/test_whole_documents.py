"""Plans of documents that must stay whole: valid in every mode, near the best that there is, refused where one does not fit."""

import itertools
import pickle
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.data.length_index import LengthIndex
from hf_longctx.data.long_documents import cut_documents
from hf_longctx.data.step_plans import Planning, StepPlans
from hf_longctx.planner import PLANNERS, CostModel, GlobalBatches, PlanError, StepPlan, Topology, lower_bound, plan_step
from hf_longctx.planner.cost.adjustment import Adjustment
from hf_longctx.planner.cost.selective_offload import Offload
from hf_longctx.planner.plan import MODES, Mode
from hf_longctx.planner.topology import SPLIT, Documents
from hf_longctx.report.training_runs.run_record import _stored, plan_of
from tests.builders.plans.random_plans import GPU_COST, costs, lengths_for, lognormal_pareto, topologies

KINDS = st.sampled_from(["whole", "alone"])
LABELS = st.sampled_from([None, 0, 1, 2])
"""Seeds of random numbers of labels."""


def assert_whole(plan: StepPlan, lengths: np.ndarray) -> None:
    """The plan holds, each document lies on one rank that has room for its micro-batch, and alone where it must be."""
    plan.check(lengths)
    assert (plan.holder != SPLIT).all()
    assert (plan.members == 1).all()
    assert (plan.chunks == 1).all()
    tokens = np.bincount(plan.micro_batch_of_document, plan.length)
    assert (tokens <= plan.topology.capacities[plan.rank]).all()
    assert plan.topology.documents == "whole" or len(plan.cost) == len(lengths)
    assert plan.timeline().makespan >= plan.lower_bound
    segments = [layout.shard(rank) for rank in range(plan.world_size) for _, layout in plan.layouts(rank)]
    ranges = sorted((segment.doc, segment.start, segment.stop) for shard in segments for segment in shard)
    assert ranges == [(doc, 0, length) for doc, length in enumerate(lengths.tolist())]


@given(st.data(), topologies(), costs(), KINDS, st.sampled_from(MODES), LABELS)
def test_every_document_lies_whole_on_a_rank_that_holds_it(data, topology, cost, kind, mode, labelled):
    topology = replace(topology, documents=kind)
    lengths = np.minimum(data.draw(lengths_for(topology)), topology.longest_document)
    labels = None if labelled is None else np.random.default_rng(labelled).integers(0, lengths + 1)
    offload = Offload(900, 10**6, 100) if mode != "lockstep" and topology.uniform else None
    plan = plan_step(lengths, topology, cost, mode, offload, labels)
    assert_whole(plan, lengths)
    assert not plan.offload.any()
    assert plan.digest() == plan_step(lengths, topology, cost, mode, offload, labels).digest()


def best_alone(times: np.ndarray, lengths: np.ndarray, topology: Topology, mode: Mode) -> int:
    """The least makespan of documents each alone in its micro-batch, on ranks of one speed: all assignments are tried."""
    waits = topology.stages - 1 if mode == "pipeline" else 0
    makespans = []
    for assignment in itertools.product(range(topology.world_size), repeat=len(times)):
        ranks = np.array(assignment)
        if (lengths <= topology.capacities[ranks]).all():
            times_of = [times[ranks == rank] for rank in range(topology.world_size)]
            if mode == "lockstep":  # a rank's longest ones meet those of the others
                rounds = itertools.zip_longest(*(sorted(of.tolist(), reverse=True) for of in times_of), fillvalue=0)
                makespans.append(sum(map(max, rounds)))
            else:
                makespans.append(max(int(of.sum()) + waits * int(of.max(initial=0)) for of in times_of))
    return min(makespans)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("memory", [None, (1000, 500)], ids=["equal", "unequal memory"])
def test_few_documents_end_near_the_best_that_there_is(mode, memory):
    topology = Topology(2, 4096, documents="alone", memory=memory, stages=3 if mode == "pipeline" else 1)
    cost = GPU_COST.scaled(*[1 / topology.stages] * 3)
    ratios = []
    for seed in range(8):
        lengths = np.random.default_rng(seed).integers(100, 4097, 6)
        plan = plan_step(lengths, topology, GPU_COST, mode)
        best = best_alone(cost.time(lengths, 1) + cost.micro_batch_ns, lengths, topology, mode)
        assert plan.lower_bound <= best <= plan.timeline().makespan
        ratios.append(plan.timeline().makespan / best)
    assert np.mean(ratios) < 1.01
    assert max(ratios) < 1.05
    if mode == "lockstep" and memory is None:
        assert max(ratios) == 1


@pytest.mark.parametrize(
    ("kind", "mode", "most"),
    [
        *[("whole", "async", 1.01), ("whole", "lockstep", 1.03), ("whole", "pipeline", 1.05)],
        *[("alone", "async", 1.01), ("alone", "lockstep", 1.001), ("alone", "pipeline", 1.03)],
    ],
)
@pytest.mark.parametrize("memory", [None, (1000, 500) * 4], ids=["equal", "unequal memory"])
def test_many_documents_end_near_the_bound(kind, mode, most, memory):
    if memory and kind == "whole" and mode == "lockstep":
        most = 1.15  # micro-batches of at most the least memory, beside longer documents
    topology = Topology(8, 16_384, documents=kind, memory=memory, stages=2 if mode == "pipeline" else 1)
    lengths = lognormal_pareto(300, 0, 16_384)
    plan = plan_step(lengths, topology, GPU_COST, mode)
    assert_whole(plan, lengths)
    assert plan.timeline().makespan <= most * plan.lower_bound


def test_documents_that_only_some_ranks_hold_bound_the_step():
    """Two of 900 tokens on the one rank of 1000 take as long as both, however many ranks of 500 stand idle."""
    topology = Topology(4, 1000, memory=(500, 1000, 500, 500), documents="whole")
    lengths = np.array([900, 900, 10])
    plan = plan_step(lengths, topology, GPU_COST)
    both = 2 * int(GPU_COST.time(900, 1))
    assert both <= plan.lower_bound <= plan.timeline().makespan
    assert plan.holder[plan.doc < 2].tolist() == [1, 1]


@given(st.data(), topologies(equal=True), costs(), st.sampled_from(MODES))
def test_no_freedom_lost_makes_a_bound_lower(data, topology, cost, mode):
    lengths = np.minimum(data.draw(lengths_for(topology)), topology.capacity)
    ordered = np.sort(lengths)[::-1]
    bounds = [lower_bound(ordered, replace(topology, documents=kind), cost, mode) for kind in get_args(Documents)]
    assert bounds == sorted(bounds)


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (
            Topology(64, 4000, documents="whole"),
            r"document 1 has 5000 .*holds 4000 tokens \(capacity\); .* capacity >= 5000",
        ),
        (Topology(64, 4000, documents="alone"), r"documents='alone'.*more ranks do not help.*at most 4000 tokens"),
        (
            Topology(2, 8000, memory=(300, 600), documents="whole"),
            r"at most 8000 tokens \(capacity\) \* 600 / 1000 \(memory\) = 4800; .* >= 8334, or documents of at most 4800",
        ),
    ],
)
def test_documents_longer_than_a_rank_holds_are_refused(topology, message):
    for planner in PLANNERS.values():
        with pytest.raises(PlanError, match=message):
            planner(np.array([10, 5000]), topology, GPU_COST, "async")
    assert topology.fewest_ranks(np.array([10, 5000])).tolist() == [1, topology.world_size + 1]


def test_the_capacity_that_is_named_would_do():
    topology = Topology(2, 8000, memory=(300, 600), documents="whole")
    assert_whole(plan_step(np.array([10, 5000]), replace(topology, capacity=8334), GPU_COST), np.array([10, 5000]))


def test_an_unknown_kind_is_refused():
    with pytest.raises(PlanError, match="documents is 'packed'; valid: split, whole, alone"):
        Topology(2, 8, documents="packed")  # type: ignore[arg-type]


def test_check_refuses_plans_that_break_it():
    lengths = np.array([8, 3, 2])
    split = plan_step(lengths, Topology(2, 4), GPU_COST)
    wide = replace(split, topology=Topology(2, 8, documents="whole"))
    with pytest.raises(PlanError, match=r"holder=-1: a document on several ranks: .*documents='whole'"):
        wide.check(lengths)
    packed = plan_step(lengths, Topology(1, 20, documents="whole"), GPU_COST)
    packed.check(lengths)
    with pytest.raises(PlanError, match=r"micro-batch 0 holds 3 documents: .* alone in its micro-batch"):
        replace(packed, topology=Topology(1, 20, documents="alone")).check(lengths)
    one = plan_step(lengths[:1], Topology(1, 8, documents="whole", stages=2), GPU_COST, "pipeline")
    with pytest.raises(PlanError, match="micro-batch 0 runs in 2 chunks"):
        replace(one, chunks=np.array([2])).check(lengths[:1])


def test_digest_wire_and_record_know_it():
    # That of a plan which may split is what it was before there was a choice.
    plan = plan_step(np.array([8, 3, 2]), Topology(2, 20), GPU_COST)
    kinds = {kind: replace(plan, topology=Topology(2, 20, documents=kind)) for kind in get_args(Documents)}
    assert len({kind_plan.digest() for kind_plan in kinds.values()}) == 3
    assert kinds["split"].digest() == plan.digest()
    for kind, kind_plan in kinds.items():
        assert pickle.loads(pickle.dumps(kind_plan)).topology.documents == kind
        assert plan_of(_stored(kind_plan)).topology == kind_plan.topology
    older = _stored(plan)
    del older["topology"]["documents"]
    assert plan_of(older).topology == plan.topology


LISTED = np.array([900, 30, 500, 80, 80, 300, 1000, 7])


@pytest.mark.parametrize("name", sorted(PLANNERS))
@pytest.mark.parametrize("kind", ["whole", "alone"])
def test_every_planner_honours_it_or_refuses(name, kind):
    honours = {"hdp", "dp_packing", "static_cp_unpacked"}
    if kind == "whole":
        honours |= {"static_cp", "bytescale_naive", "bytescale_balanced"}
    topology = Topology(3, 1000, documents=kind)
    if name in honours:
        assert_whole(PLANNERS[name](LISTED, topology, GPU_COST, "async"), LISTED)
    else:
        with pytest.raises(PlanError, match=f"documents is '{kind}'.*Valid: planner 'hdp', or dp_packing"):
            PLANNERS[name](LISTED, topology, GPU_COST, "async")


def test_documents_of_a_data_set_are_refused_by_name_with_what_would_do():
    rows = [{"input_ids": list(range(length))} for length in (5, 40, 7)]
    planning = Planning(Topology(4, 20, documents="whole"), GPU_COST)

    def plans(**options):
        pieces = cut_documents(rows, LengthIndex.from_dataset(rows), **options)
        return StepPlans(pieces, GlobalBatches(pieces.lengths, 0, documents=3), planning)

    with pytest.raises(PlanError, match=r"document 1 has 40 tokens.*capacity >= 40.*'truncate' \(its first 20 tokens"):
        plans()
    part = r"a piece of document 1 has 30 tokens.*longest_document <= 20 instead of 30"
    with pytest.warns(UserWarning, match="30"), pytest.raises(PlanError, match=part):
        plans(policy="split", limit=30)
    with pytest.warns(UserWarning, match="20"):
        plan = plans(policy="split", limit=20).planned(0, 0, Adjustment(speed=(1000, 500, 1000, 700))).plan
    assert_whole(plan, plan.length[np.argsort(plan.doc)])


def test_costs_in_units_of_their_own():
    # Where nanoseconds do not fit 64 bits, a plan is the same, and never below its bound.
    cost = CostModel(attention_ps=10**13, linear_ps=10**13, inside_ps=0, micro_batch_ns=10**9)
    lengths = np.array([10_000, 9_000, 300, 20, 20])
    for mode, kind in itertools.product(MODES, ("whole", "alone")):
        topology = Topology(2, 10_000, documents=kind, stages=4, memory=(1000, 950))
        assert_whole(plan_step(lengths, topology, cost, mode), lengths)
