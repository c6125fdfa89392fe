"""Global batches: order, budgets and stability, against a one-document-at-a-time reference."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.planner import GlobalBatches

lengths_of = st.lists(st.integers(1, 50), min_size=1, max_size=60).map(lambda x: np.array(x, np.int64))
seeds = st.integers(0, 2**40)


def as_lists(batches) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


@settings(max_examples=150, deadline=None)
@given(lengths_of, seeds, st.integers(0, 5), st.integers(1, 120))
def test_token_budget_closes_before_exceeding_and_never_skips(lengths, seed, epoch, tokens):
    order = np.concatenate(list(GlobalBatches(lengths, seed, documents=len(lengths)).epoch(epoch)))
    expected: list[list[int]] = [[]]
    for doc in order.tolist():
        if expected[-1] and lengths[expected[-1] + [doc]].sum() > tokens:
            expected.append([])
        expected[-1].append(doc)
    batches = as_lists(GlobalBatches(lengths, seed, tokens=tokens).epoch(epoch))
    assert batches == expected
    assert all(len(b) == 1 or lengths[b].sum() <= tokens for b in batches)


@settings(max_examples=100, deadline=None)
@given(lengths_of, seeds, st.integers(0, 5), st.integers(1, 70))
def test_document_budget_is_a_contiguous_run_and_the_last_batch_is_kept(lengths, seed, epoch, documents):
    batches = as_lists(GlobalBatches(lengths, seed, documents=documents).epoch(epoch))
    whole = as_lists(GlobalBatches(lengths, seed, documents=len(lengths)).epoch(epoch))[0]
    assert sorted(whole) == list(range(len(lengths)))
    assert batches == [whole[i : i + documents] for i in range(0, len(whole), documents)]


@settings(max_examples=50, deadline=None)
@given(lengths_of, seeds, st.integers(1, 120))
def test_any_batch_is_found_without_those_before(lengths, seed, tokens):
    epoch = GlobalBatches(lengths, seed, tokens=tokens).epoch(3)
    batches = as_lists(epoch)
    assert len(batches) == len(epoch)
    assert as_lists(epoch[len(epoch) // 2 :]) == batches[len(batches) // 2 :]
    assert epoch[-1].tolist() == batches[-1]
    with pytest.raises(IndexError):
        epoch[len(epoch)]


def test_order_is_fixed_forever():
    """These numbers are in people's checkpoints: a change here resumes them on the wrong documents."""
    batches = GlobalBatches(np.ones(10, np.int64), 42, documents=10)
    assert batches.epoch(0)[0].tolist() == [4, 8, 1, 9, 3, 6, 0, 7, 2, 5]
    assert batches.epoch(1)[0].tolist() == [1, 2, 8, 5, 3, 9, 6, 0, 4, 7]


def test_every_seed_and_epoch_has_an_order_of_its_own():
    orders = {
        tuple(GlobalBatches(np.ones(50, np.int64), seed, documents=50).epoch(epoch)[0].tolist())
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25


def test_every_document_is_as_likely_at_every_place():
    counts = np.zeros((4, 4), np.int64)
    batches = GlobalBatches(np.ones(4, np.int64), 7, documents=4)
    for epoch in range(4000):
        counts[np.arange(4), batches.epoch(epoch)[0]] += 1
    assert (abs(counts - 1000) < 5 * np.sqrt(1000 * 0.75)).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": [], "documents": 1}, r"shape \(0,\)"),
        ({"lengths": [1.0], "documents": 1}, "dtype float64"),
        ({"lengths": [4, 0], "documents": 1}, "document 1 has 0 tokens; every document needs >= 1"),
        ({"lengths": [4]}, "global_batch_documents is None and global_batch_tokens is None; set exactly one"),
        ({"lengths": [4], "documents": 1, "tokens": 2}, "is 1 and global_batch_tokens is 2; set exactly one"),
        ({"lengths": [4], "documents": 0}, "global_batch_documents is 0; it must be >= 1"),
        ({"lengths": [4], "tokens": 0}, "global_batch_tokens is 0; it must be >= 1"),
        ({"lengths": [4], "documents": 1, "seed": -1}, "seed is -1; it must be >= 0"),
    ],
)
def test_bad_input_names_the_value_and_the_rule(arguments, message):
    with pytest.raises(ValueError, match=message):
        GlobalBatches(np.array(arguments.pop("lengths")), arguments.pop("seed", 0), **arguments)


def test_negative_epoch_is_refused():
    with pytest.raises(ValueError, match="epoch is -1"):
        GlobalBatches(np.array([1]), 0, documents=1).epoch(-1)
