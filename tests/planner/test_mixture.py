"""Mixtures: what an epoch draws, by weight."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.planner import GlobalBatches
from hf_longctx.planner.mixture import Mixture

SOURCE = np.array([0] * 10 + [1] * 6 + [2] * 4)


def times(mixture: Mixture, seed: int, epoch: int) -> list[int]:
    return np.bincount(mixture.drawn(seed, epoch), minlength=len(mixture.source)).tolist()


def test_whole_weights_are_passes():
    assert times(Mixture(SOURCE, ((1.0,), (2.0,), (0.0,))), 3, 0) == [1] * 10 + [2] * 6 + [0] * 4


def test_a_part_of_a_source_is_drawn_anew_in_each_epoch():
    mixture = Mixture(SOURCE, ((0.5,), (1.5,), (1.0,)))
    drawn = [times(mixture, 3, epoch) for epoch in range(40)]
    for counts in drawn:
        assert [sum(counts[:10]), sum(counts[10:16]), sum(counts[16:])] == [5, 9, 4]
        assert set(counts[:10]) == {0, 1}
        assert set(counts[10:16]) == {1, 2}
    assert len({tuple(counts) for counts in drawn}) > 30
    seen = np.sum(drawn, axis=0)[:10]
    assert seen.min() > 8
    assert seen.max() < 32


def test_weights_change_from_epoch_to_epoch_and_the_last_goes_on():
    mixture = Mixture(SOURCE, ((1.0, 0.0), (0.0, 1.0, 2.0), (1.0,)))
    assert [mixture.at(epoch) for epoch in range(4)] == [[1, 0, 1], [0, 1, 1], [0, 2, 1], [0, 2, 1]]
    assert [len(mixture.drawn(0, epoch)) for epoch in range(4)] == [14, 10, 16, 16]


@given(st.integers(0, 5), st.integers(0, 5), st.lists(st.floats(0, 3), min_size=3, max_size=3).filter(any))
def test_batches_hold_exactly_what_is_drawn(seed, epoch, weights):
    mixture = Mixture(SOURCE, tuple((weight,) for weight in weights))
    drawn = mixture.drawn(seed, epoch)
    batches = GlobalBatches(np.full(20, 7), seed, documents=3, mixture=mixture).epoch(epoch)
    assert sorted(np.concatenate(list(batches)).tolist()) == drawn.tolist()
    expected = [weight * count for weight, count in zip(weights, (10, 6, 4))]
    for number, count in enumerate(np.bincount(SOURCE[drawn], minlength=3)):
        assert abs(count - expected[number]) < 1 or len(drawn) == 1


def test_equal_weights_of_one_change_nothing():
    lengths = np.arange(1, 21)
    plain = GlobalBatches(lengths, 3, tokens=30).epoch(2)
    mixed = GlobalBatches(lengths, 3, tokens=30, mixture=Mixture(SOURCE, ((1.0,), (1.0,), (1.0,)))).epoch(2)
    assert [batch.tolist() for batch in plain] == [batch.tolist() for batch in mixed]


def test_a_part_of_one_document_is_a_chance():
    mixture = Mixture(np.array([0, 1, 1]), ((0.5,), (1.0,)))
    drawn = [len(mixture.drawn(3, epoch)) - 2 for epoch in range(200)]
    assert set(drawn) == {0, 1}
    assert 70 < sum(drawn) < 130
    alone = Mixture(np.array([0, 0]), ((0.1,),))
    assert {len(alone.drawn(3, epoch)) for epoch in range(50)} == {1}  # never an epoch of nothing


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (((1.0,), (1.0,)), "source 2, and 2 sources have weights"),
        (((1.0,), (-1.0,), (1.0,)), r"source 1 has the weights \[-1.0\]"),
        (((1.0,), (float("nan"),), (1.0,)), "must be from 0 to 1000"),
        (((1.0,), (1e300,), (1.0,)), "must be from 0 to 1000"),
        (((1.0,), (), (1.0,)), "at least one"),
        (((1.0, 0.0), (0.0,), (0.0,)), r"no document is drawn in epoch 1: the weights are \[0.0, 0.0, 0.0\]"),
    ],
)
def test_weights_that_mean_nothing_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        Mixture(SOURCE, weights)
