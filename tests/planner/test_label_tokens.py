"""Plans of documents of which only some tokens have a label: their cost decides where they go, their length where they fit."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.data.collator import LengthAwareCollator
from hf_longctx.data.length_index import LengthIndex
from hf_longctx.data.loader import PlannedSteps
from hf_longctx.data.long_documents import cut_documents
from hf_longctx.data.remote.wire import PackedStep
from hf_longctx.data.step_plans import UNADJUSTED
from hf_longctx.planner import GPU, CostModel, GlobalBatches, PlanError, StepPlan, Topology, plan_step
from hf_longctx.planner.batch_lengths import longest_first
from hf_longctx.planner.cost.adjustment import split_sample, whole_parts
from hf_longctx.planner.cost.selective_offload import Offload
from hf_longctx.planner.hdp import _counted
from hf_longctx.planner.plan import MODES
from hf_longctx.report.training_runs.run_record import _stored as stored
from hf_longctx.report.training_runs.run_record import plan_of
from hf_longctx.simulator.workload import workload
from tests.builders.plans.plan_invariants import expected_cost, tokens_held_once
from tests.builders.plans.random_plans import GPU_COST, SMOLLM2_135M, steps

many_examples = settings(max_examples=4 * settings().max_examples)
HEAD_HEAVY = CostModel(attention_ps=1000, linear_ps=10**7, label_ps=9 * 10**6, inside_ps=1000, message_ns=1000)
"""As of a small model with a large vocabulary: its head is nine tenths of a token."""


@pytest.mark.parametrize("mode", MODES)
@many_examples
@given(steps(), st.data())
def test_documents_without_labels_are_planned_whole_and_within_memory(mode, step, data):
    lengths, topology, cost = step
    shares = data.draw(st.lists(st.floats(0, 1), min_size=len(lengths), max_size=len(lengths)))
    labels = (lengths * np.array(shares)).astype(np.int64)
    offload = Offload(800, 1000, 100) if mode != "lockstep" and topology.uniform and data.draw(st.booleans()) else None
    plan = plan_step(lengths, topology, cost, mode, offload, labels)
    plan.check(lengths)
    assert plan.timeline().makespan >= plan.lower_bound >= 1
    counted = _counted(lengths, labels, topology, cost)
    checked = mode != "pipeline" and offload is None
    for micro_batch, layouts in tokens_held_once(plan, lengths).items() if checked else ():
        exact, lost = expected_cost(layouts[0], topology, cost, counted)
        assert exact - 1 - lost <= plan.cost[micro_batch] <= exact + lost
    if topology.uniform and offload is None:
        needed, order = topology.fewest_ranks(lengths), longest_first(counted)
        assert (np.diff(needed[order]) <= 0).all(), "none is given more ranks than it needs for the sake of a later one"
    if len(plan.labels):
        assert plan.labels.tolist() == labels[plan.doc].tolist()
        assert (plan.lengths_counted(cost) <= plan.length).all()
    assert plan_of(stored(plan)).labels.tolist() == plan.labels.tolist()


@pytest.mark.parametrize("mode", MODES)
@given(steps())
def test_if_each_token_but_the_last_has_a_label_the_plan_is_the_same(mode, step):
    """A document's last token predicts nothing, and the head is less than what a token costs."""
    lengths, topology, cost = step
    first = plan_step(lengths, topology, cost, mode)
    for labels in (lengths, lengths - 1):
        assert vars_of(plan_step(lengths, topology, cost, mode, labels=labels)) == vars_of(first)


def vars_of(plan: StepPlan) -> tuple[int, int, list[int], list[int]]:
    return plan.digest(), plan.lower_bound, plan.cost.tolist(), plan.labels.tolist()


@pytest.mark.parametrize("mode", MODES)
def test_work_is_balanced_rather_than_tokens(mode):
    # Of 400 documents of the same length, those before have no labels. Each rank gets as much work, not as many tokens.
    lengths = np.full(400, 1000)
    labels = np.where(np.arange(400) < 190, 0, 1000)
    topology = Topology(4, 4000)
    plan = plan_step(lengths, topology, HEAD_HEAVY, mode, labels=labels)
    ignoring = plan_step(lengths, topology, HEAD_HEAVY, mode)
    assert plan.summary().balance < 1.02
    # What the other plan takes, if the same documents lie where it has them.
    real = HEAD_HEAVY.time(replace(ignoring, labels=labels[ignoring.doc]).lengths_counted(HEAD_HEAVY), 1)
    cost = np.add.reduceat(real, ignoring.first_document[:-1])
    assert replace(ignoring, cost=cost + HEAD_HEAVY.micro_batch_ns).timeline().makespan > plan.timeline().makespan


@pytest.mark.parametrize("mode", MODES)
def test_a_long_document_without_labels_makes_no_others_split(mode):
    """It needs two ranks, and takes less time than the others, each of which fills one."""
    lengths, labels = np.array([1000] * 40 + [1001]), np.array([1000] * 40 + [0])
    assert HEAD_HEAVY.equivalent_lengths(lengths, labels)[-1] < 500
    plan = plan_step(lengths, Topology(4, 1000), HEAD_HEAVY, mode, labels=labels)
    ignoring = plan_step(lengths, Topology(4, 1000), HEAD_HEAVY, mode)
    assert plan.summary().split_documents == ignoring.summary().split_documents
    assert plan.timeline().makespan <= ignoring.timeline().makespan


@pytest.mark.parametrize("mode", ["async", "lockstep"])
def test_unequal_shares_end_at_capacities_of_tokens(mode):
    # Of 2000 tokens each rank holds 1000, however fast it is, so the slower one decides.
    topology = Topology(2, 1000, speed=(1000, 3000))
    plan = plan_step(np.array([2000]), topology, HEAD_HEAVY, mode, labels=np.array([0]))
    assert plan.member_tokens.tolist() == [1000, 1000]
    assert plan.cost[0] >= HEAD_HEAVY.time(2000, 2)


@pytest.mark.parametrize("labels", [[5], [500, -3]])
def test_columns_that_cannot_be_are_refused(labels):
    plan = plan_step(np.array([40, 30]), Topology(1, 100), HEAD_HEAVY)
    with pytest.raises(PlanError, match="labels"):
        replace(plan, labels=np.array(labels)).check(np.array([40, 30]))


def test_what_is_learned_from_tells_the_head_from_attention():
    lengths, labels = np.array([900, 800]), np.array([90, 0])
    plan = plan_step(lengths, Topology(1, 2000), HEAD_HEAVY, labels=labels)
    attention, linear = whole_parts(plan, 0, HEAD_HEAVY)
    assert attention == 900**2 + 800**2
    assert linear == (1700 * 10**7 - (1700 - 90) * 9 * 10**6) // 1000
    split = plan_step(np.array([2000]), Topology(2, 1000), HEAD_HEAVY, labels=np.array([200]))
    _, sample = split_sample(split, 0, HEAD_HEAVY)
    assert sample.attention == 2000**2 // 2
    assert sample.linear == (2000 * 10**7 - 1800 * 9 * 10**6) // 2000


def test_simulated_steps_leave_the_head_out():
    # As predictions do: of two tokens in three.
    lengths = np.array([8000, 6000])
    topology, config = Topology(1, 16_384), SMOLLM2_135M
    cost = CostModel.from_config(config, GPU)
    plans = [plan_step(lengths, topology, cost, labels=labels) for labels in (None, lengths // 3)]
    seconds = [float(workload(plan, config, GPU).linear_seconds.sum()) for plan in plans]
    unlabelled = int(plans[1].unlabelled.sum())
    assert unlabelled == int((lengths - lengths // 3).sum())
    assert seconds[0] - seconds[1] == pytest.approx(unlabelled * cost.label_ps / 1e12, rel=1e-6)
    planned = [plan.timeline().makespan / 1e9 for plan in plans]
    assert planned[0] - planned[1] == pytest.approx(seconds[0] - seconds[1], rel=1e-2)


def test_loader_collator_and_wire_pass_labels_on():
    rows = [{"input_ids": [1] * 90, "labels": [-100] * 80 + [1] * 10}, {"input_ids": [1] * 60, "labels": [1] * 60}]
    collator = LengthAwareCollator(Topology(1, 200), HEAD_HEAVY)
    assert sorted(collator(rows).plan.labels.tolist()) == [10, 59]
    pieces = cut_documents(rows, LengthIndex.from_dataset(rows))
    steps = PlannedSteps(rows, pieces, GlobalBatches(pieces.lengths, 0, documents=2), collator)
    assert sorted(steps.plan(0, 0).labels.tolist()) == [10, 59]
    packed = PackedStep.pack(steps.plans.planned(0, 0, UNADJUSTED))
    assert sorted(packed.unpack().plan.labels.tolist()) == [10, 59]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([4, 2], r"labels has dtype int64 and shape \(2,\); it must be integers, one for each of the 3 documents"),
        ([1.0, 1.0, 1.0], "labels has dtype float64"),
        ([3, 6, 2], "document 1 has 6 labels and 5 tokens; valid: 0 to 5 labels"),
        ([3, -1, 2], "document 1 has -1 labels and 5 tokens; valid: 0 to 5 labels"),
    ],
)
def test_impossible_labels_are_refused(labels, message):
    with pytest.raises(PlanError, match=message):
        plan_step(np.array([3, 5, 2]), Topology(1, 10), GPU_COST, labels=np.array(labels))
