"""Shares of a split document: every token dealt out, nobody over the limit, everyone done at the same time; and the zigzag
that balances the areas of unequal shares."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.layouts.exchange_schedule import schedule
from hf_longctx.layouts.layout import Layout, LayoutError, zigzag
from hf_longctx.planner.placing.rank_shares import (
    TWO_TOKENS,
    least_slowest_share,
    proportional_shares,
    shares,
    slowest_of_kinds,
    slowest_share,
    slowest_shares,
)

many_examples = settings(max_examples=8 * settings().max_examples)
"""Of a profile: an example takes microseconds here."""
SPEED = st.one_of(st.sampled_from([250, 500, 1000]), st.integers(1, 5000))


@st.composite
def unequal(draw: st.DrawFn, unlimited: bool = False) -> tuple[int, np.ndarray, np.ndarray]:
    """(length, speeds [ranks], room [ranks]): the room of all is enough, the length as many tokens as ranks or more."""
    ranks = draw(st.integers(1, 12))
    speeds = draw(st.lists(SPEED, min_size=ranks, max_size=ranks))
    room = draw(st.lists(st.one_of(st.integers(1, 5), st.integers(1, 10**5)), min_size=ranks, max_size=ranks))
    length = draw(st.one_of(st.integers(ranks, sum(room)), st.sampled_from([ranks, sum(room)])))
    return length, np.array(speeds), np.full(ranks, length) if unlimited else np.array(room)


@many_examples
@given(st.lists(st.integers(1, 50), min_size=1, max_size=10), st.integers(1, 12))
def test_equal_ranks_hold_equally_many_tokens_of_each_document_and_of_all(lengths, ranks):
    total = np.zeros(ranks, int)
    before = 0
    for length in lengths:
        counts = np.array(shares(length, ranks, before))
        assert counts.sum() == length
        assert counts.max() - counts.min() <= 1
        total += counts
        before += length
    assert total.max() - total.min() <= 1
    assert (np.diff(total) <= 0).all(), "the first ranks hold what is left over"


def test_the_example_of_the_docstring():
    assert [shares(4, 3), shares(5, 3, 4), shares(3, 3, 9)] == [[2, 1, 1], [1, 2, 2], [1, 1, 1]]


@many_examples
@given(unequal())
def test_unequal_ranks_hold_all_within_their_room_and_at_least_a_token(case):
    length, _, room = case
    counts = proportional_shares(*case)
    assert counts.dtype == np.int64
    assert counts.sum() == length
    assert (counts >= 1).all()
    assert (counts <= room).all()


@many_examples
@given(unequal(unlimited=True))
def test_unlimited_ranks_hold_in_proportion_to_their_speed_but_for_a_token(case):
    length, speeds, _ = case
    counts = proportional_shares(*case)
    # A token each goes first; what follows is in proportion, but for a token that rounding leaves over.
    exact = 1 + (length - len(speeds)) * speeds / speeds.sum()
    assert np.abs(counts - exact).max() <= 1


@many_examples
@given(unequal())
def test_no_other_shares_end_more_than_two_tokens_earlier(case):
    """The earliest end of all: the least t in which the ranks, each up to its room, compute the document."""
    length, speeds, room = case
    counts = proportional_shares(*case)
    end = max(counts * 1000 / speeds)
    low, high = 0.0, end
    for _ in range(60):
        middle = (low + high) / 2
        if np.minimum(room, np.maximum(middle * speeds / 1000, 1)).sum() >= length:
            high = middle
        else:
            low = middle
    slowest = int((counts * 1000 / speeds).argmax())
    assert end <= max(high, 1000 / speeds[slowest]) + 2 * 1000 / speeds[slowest]


@many_examples
@given(unequal())
def test_slowest_share_is_when_the_last_rank_ends(case):
    _, speeds, _ = case
    counts = proportional_shares(*case)
    assert slowest_share(*case) == max(-(-int(h) * 1000 // int(v)) for h, v in zip(counts, speeds))


@many_examples
@given(unequal())
def test_what_the_slowest_share_is_about_is_no_more_and_hardly_less(case):
    _, speeds, _ = case
    least, near = least_slowest_share(*case)
    exact = slowest_share(*case)
    assert least <= exact
    assert not near or exact <= least + TWO_TOKENS // int(speeds.min()) + 3


def test_room_without_a_limit_is_as_much_as_is_needed():
    """Room times speeds exceeds 64 bits."""
    speeds = np.tile([1000, 500], 32)
    group, needed = (speeds, np.full(64, 2**50)), (speeds, np.full(64, 10**6))
    assert slowest_share(10**6, *group) == slowest_share(10**6, *needed)
    assert least_slowest_share(10**6, *group) == least_slowest_share(10**6, *needed) == (10**9 // 48_000 - 1, True)


def test_what_the_slowest_share_is_about_is_known_of_most_groups():
    """A document of 3M to 4.9M tokens on 300 ranks fills many of them."""
    rng = np.random.default_rng(0)
    near = [
        least_slowest_share(length, rng.integers(300, 1001, 300), np.full(300, 16_384))[1]
        for length in rng.integers(3_000_000, 300 * 16_384, 200).tolist()
    ]
    assert sum(near) > 190


@many_examples
@given(unequal(), st.data())
def test_ranks_that_are_alike_may_be_counted(case, data):
    """One after another, or how many there are of each kind: the last rank ends at the same time."""
    _, speeds, room = case
    kinds = len(speeds)
    before = np.array(data.draw(st.lists(st.integers(0, 3), min_size=kinds, max_size=kinds)))
    count = np.array(data.draw(st.lists(st.integers(0, 3), min_size=kinds, max_size=kinds)))
    ranks, room_of_all = int(count.sum()), int((count * room).sum())
    if room_of_all <= ranks:
        return
    length = data.draw(st.integers(ranks + 1, room_of_all))
    group = (np.repeat(speeds, count), np.repeat(room, count))
    expected = int(slowest_share(length, *group))
    assert int(slowest_of_kinds(length, speeds, room, before, before + count)) in (expected, -1)
    twice = np.array([length, length]), np.array([ranks, ranks]), *np.tile(group, 2)
    kind = np.tile(np.repeat(np.arange(kinds), count), 2)
    for of_kinds in (speeds, room), (speeds[:0], room[:0]):
        assert slowest_shares(*twice, kind, *of_kinds).tolist() == [expected] * 2


def test_shares_by_hand():
    def of(length: int, speeds: list[int], room: list[int]) -> list[int]:
        return proportional_shares(length, np.array(speeds), np.array(room)).tolist()

    assert of(30, [1000, 500], [99, 99]) == [20, 10]
    assert of(30, [1000, 500], [15, 99]) == [15, 15]
    assert of(28, [1000, 500, 1000], [12, 99, 12]) == [11, 6, 11]
    assert of(40, [1000, 500, 1000], [12, 99, 12]) == [12, 16, 12]
    assert of(29, [1000, 500, 500], [10, 10, 9]) == [10, 10, 9]
    assert of(3, [5000, 1, 1], [99, 99, 99]) == [1, 1, 1]


def test_what_does_not_fit_ends_and_is_left_to_the_check():
    assert proportional_shares(9, np.array([1000, 500]), np.array([4, 3])).tolist() == [6, 3]
    assert proportional_shares(2, np.array([1000, 500, 100]), np.array([4, 4, 4])).tolist() == [1, 1, 0]


@many_examples
@given(unequal())
def test_zigzag_balances_the_areas_of_unequal_shares(case):
    """Causal pairs of each rank are in proportion to its tokens, but for one token, which may lie anywhere; and ranks with
    an odd number shift the middle of what is left to the next ones by half a token each."""
    length, _, _ = case
    counts = proportional_shares(*case)
    layout = Layout(zigzag(0, length, range(len(counts)), counts.tolist()))
    assert [layout.tokens(rank) for rank in layout.ranks] == counts.tolist()
    for rank, tokens in enumerate(counts.tolist()):
        area = sum((s.stop * (s.stop + 1) - s.start * (s.start + 1)) / 2 for s in layout.shards[rank])
        assert abs(area - tokens * (length + 1) / 2) <= (length + 1) / 2 + tokens * rank / 2


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any))
def test_zigzag_areas_are_those_of_the_schedules(counts):
    layout = Layout(zigzag(0, sum(counts), range(len(counts)), counts))
    for rank in layout.ranks:
        area = sum((s.stop * (s.stop + 1) - s.start * (s.start + 1)) / 2 for s in layout.shards[rank])
        assert schedule(layout, rank).area == area


@pytest.mark.parametrize("counts", [[3, 3], [7], [8, -1], [3, 3, 1]])
def test_zigzag_refuses_shares_that_do_not_add_up(counts):
    with pytest.raises(LayoutError, match=r"document 5: shares .* of 2 ranks must add up to 7 tokens"):
        zigzag(5, 7, (0, 1), counts)
