"""Layouts: every token once, rows in memory order, zigzag, and what is refused. Schedules are in test_schedule.py."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.layouts.exchange_schedule import schedule
from hf_longctx.layouts.layout import Layout, LayoutError, Segment, zigzag
from tests.builders.plans.random_layouts import layouts
from tests.layouts.token_order import memory_tokens, sorted_tokens

"""(document, position)"""

many_examples = settings(max_examples=4 * settings().max_examples)
"""Of a profile: an example takes milliseconds here."""

RANKS = st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)


@many_examples
@given(RANKS.flatmap(layouts))
def test_rows_positions_and_documents_follow_memory_order(layout: Layout):
    tokens_of: Counter = Counter()
    for rank in layout.ranks:
        tokens = memory_tokens(layout, rank)
        assert layout.tokens(rank) == len(tokens) > 0
        assert layout.documents(rank).tolist() == [doc for doc, _ in tokens]
        assert layout.positions(rank).tolist() == [position for _, position in tokens]
        assert layout.positions(rank).dtype == layout.documents(rank).dtype == np.int64
        assert sorted_tokens(layout, rank) == sorted(tokens)
        assert (schedule(layout, rank).order is None) == (tokens == sorted(tokens))
        tokens_of.update(tokens)
    assert tokens_of == Counter((doc, at) for doc, length in layout.doc_lengths.items() for at in range(length))
    for doc, ranks in layout.split_documents.items():
        assert ranks == tuple(rank for rank in layout.ranks if doc in layout.documents(rank))
    holders = Counter(doc for rank in layout.ranks for doc in set(layout.documents(rank).tolist()))
    assert set(layout.split_documents) == {doc for doc, count in holders.items() if count > 1}


@many_examples
@given(st.integers(1, 300), st.integers(1, 12))
def test_zigzag_tiles_any_length_with_equal_shares(length: int, ranks: int):
    layout = Layout(zigzag(7, length, range(ranks)))  # Layout checks that the segments tile [0, length)
    assert layout.doc_lengths == {7: length}
    tokens = [layout.tokens(rank) if rank in layout.ranks else 0 for rank in range(ranks)]
    assert max(tokens) - min(tokens) <= 1
    assert all(len(shard) <= 2 for shard in layout.shards.values())


def test_zigzag_example():
    assert zigzag(3, 10, (0, 1)) == {0: (Segment(3, 0, 2), Segment(3, 7, 10)), 1: (Segment(3, 2, 7),)}
    assert Layout(zigzag(0, 1, (4, 2))).shards == {4: (Segment(0, 0, 1),)}


def test_ranks_without_segments_are_dropped_and_ranks_are_sorted():
    layout = Layout({5: (Segment(1, 0, 2),), 3: (), 0: (Segment(0, 0, 1),)})
    assert layout.ranks == (0, 5)
    assert sorted(layout.shards) == [0, 5]


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ({}, "at least one token"),
        ({0: []}, "this one holds none"),
        ({0: [Segment(0, 0, 2), Segment(0, 1, 3)]}, r"document 0: \[1, 3\) on rank 0 overlaps .* ends at 2; .* tile"),
        ({0: [Segment(4, 0, 2)], 2: [Segment(4, 3, 5)]}, r"document 4: \[3, 5\) on rank 2 leaves a gap .* ends at 2"),
        ({0: [Segment(0, 1, 2)]}, r"\[1, 2\) on rank 0 leaves a gap .* ends at 0"),
        ({0: [Segment(0, 0, 2)], 1: [Segment(0, 0, 2)]}, "overlaps"),
        ({1: [Segment(0, 0, 0)]}, r"rank 1 holds Segment\(doc=0, start=0, stop=0\): a segment needs start < stop"),
        ({1: [Segment(0, 0, 3), Segment(0, 3, 2)]}, "needs start < stop"),
        ({1: [Segment(0, -2, 3)]}, r"\[-2, 3\) on rank 1 overlaps"),
    ],
)
def test_broken_layouts_are_refused(shards: dict, message: str):
    with pytest.raises(LayoutError, match=message):
        Layout(shards)


def test_a_rank_that_takes_no_part_is_refused():
    layout = Layout({1: (Segment(0, 0, 2),), 4: (Segment(1, 0, 2),)})
    methods = (layout.shard, layout.tokens, layout.positions, layout.documents, lambda rank: schedule(layout, rank))
    for method in methods:
        with pytest.raises(LayoutError, match=r"rank 3 takes no part .* its ranks are \[1, 4\]"):
            method(3)


def test_a_degree_of_ulysses_that_does_not_divide_the_ranks_is_refused():
    shards = zigzag(0, 60, range(6))
    assert Layout(shards, ulysses=3).ulysses == 3
    with pytest.raises(LayoutError, match=r"ulysses=4 must divide the 6 ranks .*6 = 1 \* 4 \+ 2.*: \[1, 2, 3, 6\]"):
        Layout(shards, ulysses=4)
    with pytest.raises(LayoutError, match="ulysses=0"):
        Layout(shards, ulysses=0)


def test_a_window_without_a_token_is_refused():
    with pytest.raises(LayoutError, match="window=0"):
        schedule(Layout({0: [Segment(0, 0, 3)]}), 0, window=0)
