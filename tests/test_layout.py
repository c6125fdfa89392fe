"""Layouts against brute force over (query, key) pairs: computed once each, by a rank that holds or receives the key."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.layout import Block, Layout, LayoutError, Schedule, Segment, zigzag
from tests.random_layouts import layouts

Token = tuple[int, int]
"""(document, position)"""

many_examples = settings(max_examples=4 * settings().max_examples)
"""Of a profile: an example takes milliseconds here."""

RANKS = st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)


def memory_tokens(layout: Layout, rank: int) -> list[Token]:
    return [(s.doc, position) for s in layout.shards[rank] for position in range(s.start, s.stop)]


def sorted_tokens(layout: Layout, rank: int) -> list[Token]:
    """The tokens of the rank's sorted rows, by its schedule."""
    tokens, order = memory_tokens(layout, rank), layout.schedule(rank).order
    return tokens if order is None else [tokens[row] for row in order]


def sent_tokens(layout: Layout, rank: int, index: int) -> list[Token]:
    """What a rank sends at one step, in the order of the slice."""
    rows = sorted_tokens(layout, rank)
    return [token for start, stop in layout.schedule(rank).steps[index].send_runs for token in rows[start:stop]]


def received_tokens(layout: Layout, rank: int, index: int) -> list[Token]:
    return sent_tokens(layout, layout.schedule(rank).steps[index].receive_from, index)


def pairs(block: Block, queries: list[Token], keys: list[Token]) -> list[tuple[Token, Token]]:
    return [
        (queries[q], keys[k])
        for q in range(block.q_start, block.q_stop)
        for k in range(block.k_start, block.k_stop)
        if not block.causal or k - block.k_start <= q - block.q_start
    ]


def computed_pairs(layout: Layout, rank: int) -> Counter:
    rows, schedule = sorted_tokens(layout, rank), layout.schedule(rank)
    found = Counter(pair for block in schedule.local for pair in pairs(block, rows, rows))
    for index, step in enumerate(schedule.steps):
        keys = received_tokens(layout, rank, index)
        found.update(pair for block in step.blocks for pair in pairs(block, rows, keys))
    return found


@many_examples
@given(RANKS.flatmap(layouts))
def test_blocks_of_all_ranks_cover_each_causal_pair_of_each_document_once(layout: Layout):
    computed = sum((computed_pairs(layout, rank) for rank in layout.ranks), Counter())
    causal = {
        ((doc, query), (doc, key))
        for doc, length in layout.doc_lengths.items()
        for query in range(length)
        for key in range(query + 1)
    }
    assert computed == Counter(causal)
    for rank in layout.ranks:
        held = set(memory_tokens(layout, rank))
        assert {query for query, _ in computed_pairs(layout, rank)} <= held
        assert layout.schedule(rank).area == sum(computed_pairs(layout, rank).values())


@many_examples
@given(RANKS.flatmap(layouts))
def test_both_sides_of_every_exchange_agree_and_nothing_unused_is_sent(layout: Layout):
    for rank in layout.ranks:
        steps = layout.schedule(rank).steps
        assert len(steps) == len(layout.ranks) - 1
        assert {step.receive_from for step in steps} == set(layout.ranks) - {rank}
        for index, step in enumerate(steps):
            sender = layout.schedule(step.receive_from).steps[index]
            assert sender.send_to == rank
            assert sender.send_tokens == step.receive_tokens == len(received_tokens(layout, rank, index))
            used = {row for block in step.blocks for row in range(block.k_start, block.k_stop)}
            assert used == set(range(step.receive_tokens))
            assert all(run[0] < run[1] for run in sender.send_runs)
            assert all(before[1] < after[0] for before, after in zip(sender.send_runs, sender.send_runs[1:]))


@many_examples
@given(RANKS.flatmap(layouts))
def test_rows_positions_and_documents_follow_memory_order(layout: Layout):
    held: Counter = Counter()
    for rank in layout.ranks:
        tokens = memory_tokens(layout, rank)
        assert layout.tokens(rank) == len(tokens) > 0
        assert layout.documents(rank).tolist() == [doc for doc, _ in tokens]
        assert layout.positions(rank).tolist() == [position for _, position in tokens]
        assert layout.positions(rank).dtype == layout.documents(rank).dtype == np.int64
        assert sorted_tokens(layout, rank) == sorted(tokens)
        assert (layout.schedule(rank).order is None) == (tokens == sorted(tokens))
        held.update(tokens)
    assert held == Counter((doc, at) for doc, length in layout.doc_lengths.items() for at in range(length))
    for doc, ranks in layout.split_documents.items():
        assert ranks == tuple(rank for rank in layout.ranks if doc in layout.documents(rank))
    holders = Counter(doc for rank in layout.ranks for doc in set(layout.documents(rank).tolist()))
    assert set(layout.split_documents) == {doc for doc, count in holders.items() if count > 1}


@many_examples
@given(RANKS.flatmap(layouts))
def test_each_block_is_causal_at_home_and_full_abroad(layout: Layout):
    for rank in layout.ranks:
        schedule = layout.schedule(rank)
        assert [block.q_start for block in schedule.local] == [0] + [block.q_stop for block in schedule.local[:-1]]
        for block in schedule.local:
            assert block.causal
            assert (block.q_start, block.q_stop) == (block.k_start, block.k_stop)
        for step in schedule.steps:
            assert not any(block.causal for block in step.blocks)


def test_two_ranks_of_the_design():
    """DESIGN.md's example: rank 1 receives A[0:2) only, rank 0 receives A[2:6), B and C cost no communication."""
    a, b, c = 0, 1, 2
    layout = Layout(
        {
            0: (Segment(a, 0, 2), Segment(a, 6, 8), Segment(b, 0, 3)),
            1: (Segment(a, 2, 4), Segment(a, 4, 6), Segment(c, 0, 2)),
        }
    )
    first, second = layout.schedule(0), layout.schedule(1)
    assert isinstance(first, Schedule)
    assert second.local == (Block(0, 4, 0, 4, causal=True), Block(4, 6, 4, 6, causal=True))
    assert second.steps[0].receive_tokens == 2
    assert second.steps[0].blocks == (Block(0, 4, 0, 2, causal=False),)
    assert second.steps[0].send_runs == ((0, 4),)
    assert first.local == (Block(0, 4, 0, 4, causal=True), Block(4, 7, 4, 7, causal=True))
    assert first.steps[0].send_runs == ((0, 2),)
    assert first.steps[0].blocks == (Block(2, 4, 0, 4, causal=False),)
    assert (first.area, second.area) == (10 + 6 + 8, 10 + 3 + 8)
    assert layout.positions(0).tolist() == [0, 1, 6, 7, 0, 1, 2]
    assert layout.split_documents == {a: (0, 1)}


def test_short_whole_documents_exchange_nothing():
    layout = Layout({rank: (Segment(2 * rank, 0, 5), Segment(2 * rank + 1, 0, 1 + rank)) for rank in range(4)})
    for rank in layout.ranks:
        for step in layout.schedule(rank).steps:
            assert (step.send_tokens, step.receive_tokens, step.blocks) == (0, 0, ())


@many_examples
@given(st.integers(1, 300), st.integers(1, 12))
def test_zigzag_tiles_any_length_with_equal_shares(length: int, ranks: int):
    layout = Layout(zigzag(7, length, range(ranks)))  # Layout checks that the segments tile [0, length)
    assert layout.doc_lengths == {7: length}
    tokens = [layout.tokens(rank) if rank in layout.ranks else 0 for rank in range(ranks)]
    assert max(tokens) - min(tokens) <= 1
    assert all(len(shard) <= 2 for shard in layout.shards.values())


@many_examples
@given(st.integers(2, 8), st.integers(20, 200))
def test_zigzag_balances_attention(ranks: int, tokens_per_rank: int):
    layout = Layout(zigzag(0, ranks * tokens_per_rank, range(ranks)))
    areas = [layout.schedule(rank).area for rank in layout.ranks]
    assert max(areas) <= (1 + 2 / tokens_per_rank) * sum(areas) / ranks, areas


def test_zigzag_of_long_documents_is_one_block_a_step():
    layout = Layout(zigzag(0, 8192, range(4)))
    for rank in layout.ranks:
        assert len(layout.schedule(rank).local) == 1
        assert [len(step.blocks) for step in layout.schedule(rank).steps] == [1, 1, 1]
    areas = {layout.schedule(rank).area for rank in layout.ranks}
    assert areas == {8192 * 8193 // 2 // 4}


def test_zigzag_example():
    assert zigzag(3, 10, (0, 1)) == {0: (Segment(3, 0, 2), Segment(3, 7, 10)), 1: (Segment(3, 2, 7),)}
    assert Layout(zigzag(0, 1, (4, 2))).shards == {4: (Segment(0, 0, 1),)}


def test_ranks_without_segments_are_dropped_and_ranks_are_sorted():
    layout = Layout({5: (Segment(1, 0, 2),), 3: (), 0: (Segment(0, 0, 1),)})
    assert layout.ranks == (0, 5)
    assert [layout.schedule(rank).steps[0].receive_from for rank in layout.ranks] == [5, 0]


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
    for method in (layout.shard, layout.tokens, layout.positions, layout.documents, layout.schedule):
        with pytest.raises(LayoutError, match=r"rank 3 takes no part .* its ranks are \[1, 4\]"):
            method(3)
