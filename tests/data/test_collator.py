"""Whatever the plan, the ranks together hold each token of each document once, with the label that the document gives it."""

from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx import LengthAwareCollator
from hf_longctx.planner import CPU_CORE, PLANNERS, CostModel, PlanError, Topology
from hf_longctx.planner.plan import MODES
from tests.builders.tiny_models import tiny_llama
from tests.builders.training_runs import Rows, assembled, documents, held_segments

COST = CostModel.from_config(tiny_llama().config, CPU_CORE)


def collators(world_size: int, capacity: int) -> list[LengthAwareCollator]:
    """One per rank."""
    return [LengthAwareCollator(Topology(world_size, capacity), COST, rank) for rank in range(world_size)]


def shifted(row: dict[str, list[int]]) -> list[int]:
    """Return what each token of a document predicts: written down once more, from the definition."""
    return [*row.get("labels", row["input_ids"])[1:], -100]


@given(
    lengths=st.lists(st.integers(2, 60), min_size=1, max_size=12),
    world_size=st.integers(1, 5),
    spare=st.integers(0, 20),
    labels=st.booleans(),
    speeds=st.none() | st.tuples(*[st.sampled_from([500, 1000])] * 5),
    planner=st.sampled_from(sorted(PLANNERS.keys() - {"dp_packing"})),  # which splits no document
    mode=st.sampled_from(MODES),
)
def test_every_token_is_held_once_with_its_shifted_label(lengths, world_size, spare, labels, speeds, planner, mode):
    rows = documents(lengths, labels)
    rows = [row for row in rows if set(shifted(row)) != {-100}] or documents([2])
    capacity = -(-max(len(row["input_ids"]) for row in rows) // world_size) + spare
    unequal = speeds is not None and planner == "hdp"  # the others are made for equal ranks
    topology = Topology(world_size, capacity, speed=speeds[:world_size] if unequal else None)
    ranks = range(world_size)
    steps = [LengthAwareCollator(topology, COST, rank, planner, mode)(rows) for rank in ranks]

    shards = [held_segments(step, rank) for rank, step in enumerate(steps)]
    assert assembled(shards) == sorted(row["input_ids"] for row in rows)
    for rank, step in enumerate(steps):
        for micro_batch in step.micro_batches:
            labelled = [row for row, label in enumerate(micro_batch.shift_labels[0].tolist()) if label != -100]
            assert micro_batch.label_rows.tolist() == labelled
        assert mode != "lockstep" or len(step.micro_batches) == step.plan.rounds
        for micro_batch, segments in zip(step.micro_batches, split_by_micro_batch(step, rank)):
            if micro_batch.idle:
                assert mode == "lockstep"
                assert set(micro_batch.shift_labels[0].tolist()) == {-100}
                continue
            expected = [label for doc, start, stop in segments for label in shifted(rows[doc])[start:stop]]
            assert micro_batch.shift_labels.tolist() == [expected]
            assert micro_batch.input_ids.shape == micro_batch.shift_labels.shape == (1, len(expected))
            assert micro_batch.input_ids.dtype == micro_batch.shift_labels.dtype == torch.int64
            assert len(expected) <= capacity
    learned = sum(label != -100 for row in rows for label in shifted(row))
    for step in steps:
        assert step.num_items == learned
        assert step.num_tokens == sum(len(row["input_ids"]) for row in rows)
        assert step.plan.digest() == steps[0].plan.digest()
    kept = sum(int((m.shift_labels != -100).sum()) for step in steps for m in step.micro_batches)
    assert kept == learned
    assert sum(step.tokens for step in steps) == steps[0].num_tokens


def split_by_micro_batch(step, rank: int) -> list[list[tuple[int, int, int]]]:
    return [[(s.doc, s.start, s.stop) for s in m.layout.shard(rank)] for m in step.micro_batches]


def test_the_label_of_the_last_token_before_a_shard_boundary_is_the_next_rank_s_token():
    [first, second] = [collator([{"input_ids": [5, 6, 7, 8, 9]}]) for collator in collators(2, capacity=3)]
    pairs: dict[int, int] = {}
    for step in (first, second):
        [micro_batch] = step.micro_batches
        pairs |= dict(zip(micro_batch.input_ids[0].tolist(), micro_batch.shift_labels[0].tolist()))
    assert pairs == {5: 6, 6: 7, 7: 8, 8: 9, 9: -100}
    assert 0 < first.tokens < 5  # it really is split
    assert first.num_items == second.num_items == 4


def test_only_documents_of_which_a_rank_holds_a_part_are_read():
    rows = documents([40, 3, 5, 8, 9, 2, 7, 11])
    read: list[set[int]] = []
    for collator in collators(4, capacity=12):
        read.append(set())

        def read_row(doc: int) -> dict[str, list[int]]:
            read[-1].add(doc)
            return rows[doc]

        lengths = np.array([len(row["input_ids"]) for row in rows])
        step = collator.collate(lengths, lengths - 1, read_row)
        assert read[-1] == {segment[0] for segment in held_segments(step, collator.rank)}
    assert set.union(*read) == set(range(8))
    assert all(len(numbers) < 8 for numbers in read)


def test_columns_may_be_arrays_tensors_or_narrow_integers():
    rows = documents([9, 4, 6], labels=True)
    [expected] = [collator(rows) for collator in collators(1, 32)]
    variants: tuple[list[Any], ...] = (
        [{name: np.array(column, np.int16) for name, column in row.items()} for row in rows],
        [{name: torch.tensor(column) for name, column in row.items()} for row in rows],
        list(Dataset.from_list(rows).with_format("numpy")),
    )
    for variant in variants:
        [step] = [collator(variant) for collator in collators(1, 32)]
        torch.testing.assert_close(step.micro_batches[0].input_ids, expected.micro_batches[0].input_ids)
        torch.testing.assert_close(step.micro_batches[0].shift_labels, expected.micro_batches[0].shift_labels)


def test_documents_that_teach_nothing_are_dropped_and_counted_once():
    rows: Rows = [{"input_ids": [1, 2, 3]}, {"input_ids": []}, {"input_ids": [4]}, {"input_ids": [5, 6]}]
    with pytest.warns(UserWarning, match="2 of 4 documents are dropped: 1 without any token, 1 without any label") as w:
        step = LengthAwareCollator(Topology(1, 8), COST)(rows)
    assert len(w) == 1
    assert assembled([held_segments(step, 0)]) == [[1, 2, 3], [5, 6]]
    assert (step.num_items, step.num_tokens) == (3, 5)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        ([], ValueError, "the data set is empty"),
        ([{"input_ids": [1, 2], "labels": [1]}], ValueError, "document 0 has 2 tokens but 1 labels"),
        ([{"input_ids": [1, 2], "labels": [2, -100]}], ValueError, "none of the 1 documents can be learned from"),
        ([{"text": "a"}], ValueError, "tokenised into 'input_ids'.*'text'"),
        ([{"input_ids": [0.5, 1.0]}], TypeError, "must be one sequence of integers, got float64"),
        (documents([25]), PlanError, "25 tokens; 2 ranks x 12 tokens.*hold 24.*capacity >= 13, or >= 3 ranks"),
    ],
)
def test_bad_documents_are_named(rows, error, message):
    with pytest.raises(error, match=message):
        LengthAwareCollator(Topology(2, 12), COST)(rows)


def test_a_step_can_be_moved_to_a_device():
    step = LengthAwareCollator(Topology(1, 8), COST)(documents([5, 3]))
    moved = step.micro_batches[0].to(torch.device("meta"))
    for tensor in (moved.input_ids, moved.shift_labels, moved.label_rows):
        assert tensor.device.type == "meta"
    assert moved.layout is step.micro_batches[0].layout
