"""Plans of documents of which only some tokens have a label: their cost decides where they go, their length where they fit."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.planner import CostModel, PlanError, StepPlan, Topology, plan_step
from hf_longctx.planner.hdp import longest_first
from hf_longctx.planner.offload import Offload
from hf_longctx.planner.plan import MODES
from hf_longctx.report.run_record import _stored as stored
from hf_longctx.report.run_record import plan_of
from tests.random_plans import GPU_COST, steps

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
    """Of 400 documents of the same length, every other one has labels. Each rank gets as much work, not as many tokens."""
    lengths = np.full(400, 1000)
    labels = np.where(np.arange(400) % 2, 1000, 0)
    topology = Topology(4, 4000)
    plan = plan_step(lengths, topology, HEAD_HEAVY, mode, labels=labels)
    ignoring = plan_step(lengths, topology, HEAD_HEAVY, mode)
    assert plan.summary().balance < 1.02
    # What the other plan takes, if the same documents lie where it has them.
    real = HEAD_HEAVY.time(replace(ignoring, labels=labels[ignoring.doc]).lengths_counted(HEAD_HEAVY), 1)
    cost = np.add.reduceat(real, ignoring.first_document[:-1])
    assert replace(ignoring, cost=cost).timeline().makespan >= plan.timeline().makespan


def test_documents_of_more_tokens_and_less_work_come_later():
    lengths, labels = np.array([1000, 1400, 900]), np.array([1000, 0, 900])
    counted = HEAD_HEAVY.equivalent_lengths(lengths, labels)
    assert longest_first(counted).tolist() == [0, 2, 1]
    assert counted[1] < 900
    plan = plan_step(lengths, Topology(2, 1000), HEAD_HEAVY, labels=labels)
    assert plan.ranks_of_document[plan.doc == 1] == 2, "no rank holds all of its tokens"


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
