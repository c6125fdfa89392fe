"""Balanced layouts: areas within the tolerance, bytes against lower and naive figures, capacity, Ulysses."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.attention.ulysses import inner_group
from hf_longctx.balance import balanced
from hf_longctx.layout import Layout, LayoutError, Segment, zigzag
from hf_longctx.schedule import schedule

many_examples = settings(max_examples=8 * settings().max_examples)
"""Of a profile: an example takes milliseconds here."""

LENGTHS = st.lists(st.one_of(st.integers(1, 5), st.integers(1, 60), st.integers(1, 5000)), min_size=1, max_size=30)


def areas(layout: Layout, ranks: int) -> np.ndarray:
    """float64 [ranks]: (query, key) pairs of each rank, all heads counted as one, as the engine computes them; without the
    schedules, which take minutes on 64 ranks, but compared with them below."""
    sums = np.zeros(ranks)
    index = {rank: i for i, rank in enumerate(layout.ranks)}
    for rank, shard in layout.shards.items():
        first = index[rank] // layout.ulysses * layout.ulysses
        for segment in shard:
            area = (segment.stop * (segment.stop + 1) - segment.start * (segment.start + 1)) / 2
            if segment.doc in layout.split_documents:
                sums[first : first + layout.ulysses] += area / layout.ulysses
            else:
                sums[index[rank]] += area
    return sums


def scheduled_area(layout: Layout, rank: int) -> float:
    if layout.ulysses == 1:
        return schedule(layout, rank).area
    group = inner_group(layout, rank)
    whole = schedule(group.whole, rank).area if group.whole else 0
    return whole + (schedule(group.outer, rank).area / layout.ulysses if group.outer else 0)


def received_tokens(layout: Layout) -> int:
    """Tokens whose keys and values ranks receive from others, without Ulysses; compared with the schedules below."""
    last = {(segment.doc, rank): segment.stop for rank, shard in layout.shards.items() for segment in sorted(shard)}
    return sum(last.values()) - sum(layout.doc_lengths.values())


def tokens(layout: Layout, ranks: int) -> np.ndarray:
    return np.array([layout.tokens(rank) if rank in layout.shards else 0 for rank in range(ranks)])


def pack(kind: str, documents: int, seed: int) -> list[int]:
    random = np.random.default_rng(seed)
    drawn = {
        "lognormal": lambda: random.lognormal(7.6, 1.6, documents),  # median 2K tokens
        "pareto": lambda: (random.pareto(1.1, documents) + 1) * 500,
        "uniform": lambda: random.integers(1, 20_000, documents),
    }[kind]()
    return np.maximum(drawn, 1).astype(int).tolist()


PACKS = {
    (kind, ranks, documents, seed): pack(kind, documents, seed)
    for kind in ("lognormal", "pareto", "uniform")
    for ranks in (2, 3, 4, 8, 16, 64)
    for documents in (ranks * 3 // 2, ranks * 4, ranks * 16)
    for seed in range(4)
}


def fewest_received(lengths: list[int], ranks: int, tolerance: float) -> float:
    """Lower bound: documents too large for one rank, in contiguous pieces, the smallest first; nothing else is cut."""
    limit = tolerance * sum(n * (n + 1) / 2 for n in lengths) / ranks
    bound = 0.0
    for n in lengths:
        pieces = int(np.ceil(n * (n + 1) / 2 / limit))
        shares = [1 - limit * k / (n * (n + 1) / 2) for k in range(1, pieces)]  # of the first pieces - k pieces
        bound += n * float(np.sqrt(np.maximum(shares, 0)).sum())
    return bound


@many_examples
@given(LENGTHS, st.integers(1, 12), st.sampled_from([1, 1, 2, 3, 4]), st.floats(1.0, 3.0), st.booleans())
def test_every_token_is_held_once_within_capacity(
    lengths: list[int], groups: int, ulysses: int, room: float, limited: bool
):
    ranks = groups * ulysses
    capacity = int(-(-sum(lengths) // ranks) * room) if limited else None
    layout = balanced(
        dict(enumerate(lengths, 7)), [3 * rank for rank in range(ranks)], capacity=capacity, ulysses=ulysses
    )
    assert layout.doc_lengths == dict(enumerate(lengths, 7))  # and Layout checks that segments tile
    assert set(layout.ranks) <= {3 * rank for rank in range(ranks)}
    assert layout.ulysses in (1, ulysses)
    if capacity is not None:
        assert max(layout.tokens(rank) for rank in layout.ranks) <= capacity
    assert all(list(layout.shard(rank)) == sorted(layout.shard(rank)) for rank in layout.ranks)
    again = balanced(
        dict(enumerate(lengths, 7)), [3 * rank for rank in range(ranks)], capacity=capacity, ulysses=ulysses
    )
    assert again == layout


@many_examples
@given(LENGTHS, st.integers(1, 3), st.sampled_from([1, 1, 2, 3]))
def test_areas_and_bytes_are_those_of_the_schedules(lengths: list[int], groups: int, ulysses: int):
    layout = balanced(lengths, range(groups * ulysses), ulysses=ulysses)
    expected = [scheduled_area(layout, rank) for rank in layout.ranks]
    assert areas(layout, len(layout.ranks)).tolist() == pytest.approx(expected)
    direct = Layout(layout.shards)
    received = [r.tokens for rank in direct.ranks for step in schedule(direct, rank).rounds for r in step.receives]
    assert received_tokens(direct) == sum(received)


@pytest.mark.parametrize("room", [None, 1.5, 1.0], ids=["any capacity", "1.5 of the mean", "just enough"])
def test_areas_of_random_packs_are_within_the_tolerance(room: float | None):
    ratios = {}
    for key, lengths in PACKS.items():
        ranks = key[1]
        capacity = None if room is None else int(room * sum(lengths) / ranks) + 1
        layout = balanced(lengths, range(ranks), capacity=capacity)
        ratios[key] = areas(layout, ranks).max() / areas(layout, ranks).mean()
        assert capacity is None or tokens(layout, ranks).max() <= capacity
    worst = max(ratios, key=ratios.__getitem__)
    assert ratios[worst] <= 1.05 + 1e-12, (
        f"largest area / mean area: {ratios[worst]:.4f} for {worst} of {len(ratios)} packs"
    )


def test_bytes_are_near_the_lower_bound_and_far_below_splitting_everything():
    received = bound = everything = 0.0
    evenness, unsplit = [], []
    for (_, ranks, _, _), lengths in PACKS.items():
        layout = balanced(lengths, range(ranks))
        share = 1 / (0.75 * (ranks - 1) * sum(lengths))  # zigzag of all documents over all ranks
        received += received_tokens(layout) * share
        bound += fewest_received(lengths, ranks, 1.05) * share
        everything += 1
        evenness.append(tokens(layout, ranks).max() / tokens(layout, ranks).mean())
        if not layout.split_documents:
            unsplit.append(layout)
    figures = (
        f"bytes: {received / bound:.3f} of the bound, {received / everything:.3f} of splitting everything; most tokens / "
        f"mean tokens {np.mean(evenness):.2f}; nothing split in {len(unsplit)} of {len(PACKS)} packs"
    )
    assert received <= 1.2 * bound, figures
    assert received <= 0.25 * everything, figures
    assert np.mean(evenness) <= 1.75, figures
    assert len(unsplit) >= 40, figures


@many_examples
@given(st.lists(st.integers(1, 400), min_size=2, max_size=7), st.integers(2, 3), st.sampled_from([1.05, 1.01, 1.2]))
def test_what_could_stay_whole_stays_whole(lengths: list[int], ranks: int, tolerance: float):
    document_areas = np.array([n * (n + 1) // 2 for n in lengths])
    limit = tolerance * document_areas.sum() / ranks
    ways = itertools.product(range(ranks), repeat=len(lengths))
    could = any(np.bincount(way, document_areas, ranks).max() <= limit for way in ways)
    layout = balanced(lengths, range(ranks), tolerance=tolerance)
    if could:
        assert layout.split_documents == {}
        assert areas(layout, ranks).max() <= limit
    elif layout.split_documents:
        assert received_tokens(layout) > 0


def test_less_capacity_buys_even_tokens_with_bytes():
    for seed in range(4):
        lengths = pack("lognormal", 512, seed)
        mean = sum(lengths) / 32
        layouts = [balanced(lengths, range(32), capacity=int(share * mean) + 1) for share in (8, 2, 1.5, 1.2, 1.05)]
        received = [received_tokens(layout) for layout in layouts]
        assert received == sorted(received), received
        assert tokens(layouts[-1], 32).max() <= 1.05 * mean + 1


def test_one_document_is_zigzag_over_all_ranks():
    for ranks in (1, 2, 5, 8, 64):
        assert balanced([100_000], range(ranks)) == Layout(zigzag(0, 100_000, range(ranks)))


def test_a_remainder_is_contiguous_at_the_front():
    layout = balanced([1000, 600, 540], range(2))  # areas 500500, 180300, 146070: 1.21 : 0.43 : 0.35 of the mean
    assert layout.split_documents == {0: (0, 1)}
    front = min(layout.shards.values(), key=lambda shard: sum(len(segment) for segment in shard if segment.doc == 0))
    assert front[0].start == 0
    assert received_tokens(layout) == front[0].stop < 500


@pytest.mark.parametrize("ulysses", [2, 4, 8])
def test_groups_of_ulysses_balance_and_exchange_less_between_them(ulysses: int):
    imbalance, between, without = {}, 0.0, 0.0
    for key, lengths in PACKS.items():
        if key[1] % ulysses:
            continue
        layout = balanced(lengths, range(key[1]), ulysses=ulysses)
        assert layout.ulysses == ulysses
        imbalance[key] = areas(layout, key[1]).max() / areas(layout, key[1]).mean()
        merged: dict[int, tuple[Segment, ...]] = {}
        for rank, shard in layout.shards.items():
            merged[rank // ulysses] = (*merged.get(rank // ulysses, ()), *shard)
        between += received_tokens(Layout(merged)) / sum(lengths)
        without += received_tokens(balanced(lengths, range(key[1]))) / sum(lengths)
    worst = max(imbalance, key=imbalance.__getitem__)
    assert imbalance[worst] <= 1.05 + 1e-12, f"largest area / mean area: {imbalance[worst]:.4f} for {worst}"
    assert between <= without / ulysses, f"{between / without:.3f} of the exchange without Ulysses"


def test_a_document_that_fits_into_an_inner_group_stays_inside():
    layout = balanced([4000, 4000, 900, 800, 700, 600], range(8), ulysses=4)
    for doc in (0, 1):
        assert len({rank // 4 for rank in layout.split_documents[doc]}) == 1


@pytest.mark.parametrize(
    ("lengths", "ranks", "options", "message"),
    [
        ([], [0], {}, "0 documents on 1 ranks"),
        ([5], [], {}, "1 documents on 0 ranks"),
        ([5, 0], [0], {}, "document 1 has 0 tokens; every document needs >= 1"),
        ([5], [0, 2, 0], {}, r"ranks \[0, 0, 2\] name a rank twice"),
        ([5], [0], {"tolerance": 0.9}, "tolerance=0.9 .* must be >= 1"),
        ([5] * 9, range(6), {"ulysses": 4}, r"ulysses=4 must divide the 6 ranks; valid degrees: \[1, 2, 3, 6\]"),
        (
            *([5, 4], [0, 1], {"capacity": 4}),
            "2 documents have 9 tokens; 2 ranks x 4 tokens of capacity hold 8. They need a capacity >= 5, or >= 3 ranks",
        ),
        ([5], [0], {"capacity": 0}, "hold 0. They need a capacity >= 5$"),
    ],
)
def test_impossible_arguments_are_refused(lengths: list[int], ranks: list[int], options: dict, message: str):
    with pytest.raises(LayoutError, match=message):
        balanced(lengths, ranks, **options)
