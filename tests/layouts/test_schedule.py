"""Schedules against brute force over (query, key) pairs: computed once each, by a rank that holds or receives the key."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.layouts.blocks import Block, Mask
from hf_longctx.layouts.exchange_schedule import Schedule, Send, schedule
from hf_longctx.layouts.layout import Layout, Segment, zigzag
from tests.builders.plans.random_layouts import layouts
from tests.layouts.token_order import Token, memory_tokens, sorted_tokens

"""(document, position)"""

many_examples = settings(max_examples=4 * settings().max_examples)
"""Of a profile: an example takes milliseconds here."""

RANKS = st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True)
OPTIONS = st.fixed_dictionaries(
    {
        "window": st.none() | st.integers(1, 20),
        "tile": st.none() | st.integers(1, 20),
        "ranks_per_node": st.none() | st.integers(1, 5),
    }
)
DIRECT = {"window": None, "tile": None, "ranks_per_node": None}


def delivered(layout: Layout, options: dict) -> dict[tuple[int, int, int], list[Token]]:
    """(rank, round, receive) -> the tokens of the slice, by passing messages as the engine does.

    Messages of a round between two ranks are matched in order; every message must be expected, and none be missing.
    """
    schedules = {rank: schedule(layout, rank, **options) for rank in layout.ranks}
    slices: dict[tuple[int, int, int], list[Token]] = {}
    assert len({len(rank_schedule.rounds) for rank_schedule in schedules.values()}) == 1
    for index in range(len(schedules[layout.ranks[0]].rounds)):
        on_the_way: dict[tuple[int, int], list[tuple[Send, list[Token]]]] = {}
        for rank, rank_schedule in schedules.items():
            for send in rank_schedule.rounds[index].sends:
                rows = sorted_tokens(layout, rank) if send.source is None else slices[rank, index - 1, send.source]
                tokens = [token for start, stop in send.runs for token in rows[start:stop]]
                assert len(tokens) == send.tokens > 0
                on_the_way.setdefault((rank, send.rank), []).append((send, tokens))
        for rank, rank_schedule in schedules.items():
            for number, receive in enumerate(rank_schedule.rounds[index].receives):
                send, slices[rank, index, number] = on_the_way[receive.rank, rank].pop(0)
                assert len(slices[rank, index, number]) == receive.tokens
                assert send.gradient_round == receive.gradient_round >= index
        assert not any(on_the_way.values())
    return slices


def pairs(block: Block, queries: list[Token], keys: list[Token]) -> list[tuple[Token, Token]]:
    seen = {Mask.FULL: lambda x, y: True, Mask.CAUSAL: lambda x, y: y <= x, Mask.ANTICAUSAL: lambda x, y: y >= x}
    tokens = [
        (queries[q], keys[k])
        for q in range(block.q_start, block.q_stop)
        for k in range(block.k_start, block.k_stop)
        if seen[block.mask](q - block.q_start, k - block.k_start)
    ]
    assert len(tokens) == block.area
    return tokens


def computed_pairs(
    layout: Layout, rank: int, options: dict, slices: dict[tuple[int, int, int], list[Token]]
) -> Counter:
    rows, rank_schedule = sorted_tokens(layout, rank), schedule(layout, rank, **options)
    with_keys = [(block, rows) for block in (*rank_schedule.local, *rank_schedule.near)]
    for index, round in enumerate(rank_schedule.rounds):
        for number, receive in enumerate(round.receives):
            with_keys += [(block, slices[rank, index, number]) for block in receive.blocks]
    if options["window"] or options["tile"]:
        for block, keys in with_keys:
            for (_, query), (_, key) in pairs(block, rows, keys):
                x, y = rows.index((_, query)) - block.q_start, keys.index((_, key)) - block.k_start
                assert query - key == block.distance + x - y
    return Counter(pair for block, keys in with_keys for pair in pairs(block, rows, keys))


@many_examples
@given(RANKS.flatmap(lambda ranks: layouts(ranks, max_documents=3, max_tokens=30)), OPTIONS)
def test_blocks_of_all_ranks_cover_each_pair_in_the_window_once(layout: Layout, options: dict):
    slices = delivered(layout, options)
    computed = {rank: computed_pairs(layout, rank, options, slices) for rank in layout.ranks}
    assert sum(computed.values(), Counter()) == Counter(
        ((doc, query), (doc, key))
        for doc, length in layout.doc_lengths.items()
        for query in range(length)
        for key in range(max(0, query + 1 - (options["window"] or length)), query + 1)
    )
    for rank in layout.ranks:
        assert {query for query, _ in computed[rank]} <= set(memory_tokens(layout, rank))
        assert schedule(layout, rank, **options).area == computed[rank].total()


@many_examples
@given(RANKS.flatmap(layouts), st.none() | st.integers(1, 20))
def test_nothing_unused_is_sent(layout: Layout, window: int | None):
    for rank in layout.ranks:
        rounds = schedule(layout, rank, window=window).rounds
        assert len(rounds) == len(layout.ranks) - 1
        for round in rounds:
            for receive in round.receives:
                assert {row for b in receive.blocks for row in range(b.k_start, b.k_stop)} == set(range(receive.tokens))
            for send in round.sends:
                assert all(before[1] < after[0] for before, after in zip(send.runs, send.runs[1:]))


@many_examples
@given(RANKS.flatmap(layouts), OPTIONS, st.integers(1, 4))
def test_what_crosses_to_a_node_crosses_once(layout: Layout, options: dict, ranks_per_node: int):
    options = options | {"ranks_per_node": ranks_per_node}
    slices = delivered(layout, options)
    crossed: Counter = Counter()
    for (rank, index, number), tokens in slices.items():
        sender = schedule(layout, rank, **options).rounds[index].receives[number].rank
        if sender // ranks_per_node != rank // ranks_per_node:
            crossed.update((rank // ranks_per_node, token) for token in tokens)
    assert set(crossed.values()) <= {1}
    needed: set[tuple[int, Token]] = set()
    for rank in layout.ranks:
        for _, key in computed_pairs(layout, rank, options, slices):
            holder = next(other for other in layout.ranks if key in memory_tokens(layout, other))
            if holder // ranks_per_node != rank // ranks_per_node:
                needed.add((rank // ranks_per_node, key))
    assert set(crossed) == needed


@many_examples
@given(RANKS.flatmap(layouts), OPTIONS)
def test_local_causal_blocks_cover_every_row_once(layout: Layout, options: dict):
    for rank in layout.ranks:
        rank_schedule = schedule(layout, rank, **options)
        assert [block.q_start for block in rank_schedule.local] == [0] + [
            block.q_stop for block in rank_schedule.local[:-1]
        ]
        assert rank_schedule.local[-1].q_stop == layout.tokens(rank)
        limit = min(filter(None, (options["window"], options["tile"])), default=layout.tokens(rank))
        for block in rank_schedule.local:
            assert block.mask is Mask.CAUSAL
            assert (block.q_start, block.q_stop) == (block.k_start, block.k_stop)
            assert block.q_stop - block.q_start <= limit


def test_two_ranks_by_hand():
    """Three documents by hand: rank 1 receives A[0:2) only, rank 0 receives A[2:6), B and C cost no communication."""
    a, b, c = 0, 1, 2
    layout = Layout(
        {
            0: (Segment(a, 0, 2), Segment(a, 6, 8), Segment(b, 0, 3)),
            1: (Segment(a, 2, 4), Segment(a, 4, 6), Segment(c, 0, 2)),
        }
    )
    first, second = schedule(layout, 0), schedule(layout, 1)
    assert isinstance(first, Schedule)
    assert second.local == (Block(0, 4, 0, 4, Mask.CAUSAL), Block(4, 6, 4, 6, Mask.CAUSAL))
    (received,), (sent,) = second.rounds[0].receives, second.rounds[0].sends
    assert (received.rank, received.tokens) == (0, 2)
    assert received.blocks == (Block(0, 4, 0, 2, Mask.FULL),)
    assert sent.runs == ((0, 4),)
    (received,), (sent,) = first.rounds[0].receives, first.rounds[0].sends
    assert first.local == (Block(0, 4, 0, 4, Mask.CAUSAL), Block(4, 7, 4, 7, Mask.CAUSAL))
    assert sent.runs == ((0, 2),)
    assert received.blocks == (Block(2, 4, 0, 4, Mask.FULL),)
    assert (first.near, second.near) == ((), ())
    assert (first.area, second.area) == (10 + 6 + 8, 10 + 3 + 8)


def test_a_relay_of_two_nodes():
    """Rank 0's keys are needed by all; ranks 2 and 3 are the other node: one of them receives and passes on."""
    layout = Layout({rank: [Segment(0, 10 * rank, 10 * rank + 10)] for rank in range(4)})
    rounds = schedule(layout, 2, ranks_per_node=2).rounds
    (receive,) = rounds[1].receives
    (passed_on,) = rounds[2].sends
    assert (receive.rank, receive.tokens, receive.gradient_round) == (0, 10, 3)
    assert (passed_on.rank, passed_on.source, passed_on.runs, passed_on.gradient_round) == (3, 0, ((0, 10),), 2)


def test_short_whole_documents_exchange_nothing():
    layout = Layout({rank: (Segment(2 * rank, 0, 5), Segment(2 * rank + 1, 0, 1 + rank)) for rank in range(4)})
    for rank in layout.ranks:
        for round in schedule(layout, rank).rounds:
            assert (round.sends, round.receives) == ((), ())


def test_a_window_sends_only_what_it_reaches():
    """100 tokens cut in 4; a window of 11 reaches 10 tokens back into the rank before, and no further."""
    layout = Layout({rank: [Segment(0, 25 * rank, 25 * rank + 25)] for rank in range(4)})
    received = {
        rank: [(r.rank, r.tokens) for round in schedule(layout, rank, window=11).rounds for r in round.receives]
        for rank in range(4)
    }
    assert received == {0: [], 1: [(0, 10)], 2: [(1, 10)], 3: [(2, 10)]}


@many_examples
@given(st.integers(2, 8), st.integers(20, 200))
def test_zigzag_balances_attention(ranks: int, tokens_per_rank: int):
    layout = Layout(zigzag(0, ranks * tokens_per_rank, range(ranks)))
    areas = [schedule(layout, rank).area for rank in layout.ranks]
    assert max(areas) <= (1 + 2 / tokens_per_rank) * sum(areas) / ranks, areas


def test_zigzag_of_long_documents_is_one_block_a_round():
    layout = Layout(zigzag(0, 8192, range(4)))
    for rank in layout.ranks:
        rank_schedule = schedule(layout, rank)
        assert len(rank_schedule.local) == 1
        assert [[len(receive.blocks) for receive in round.receives] for round in rank_schedule.rounds] == [[1]] * 3
    assert {schedule(layout, rank).area for rank in layout.ranks} == {8192 * 8193 // 2 // 4}
