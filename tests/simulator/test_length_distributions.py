"""Distributions of document lengths: the shares that are published, and what a draw promises."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_longctx.simulator.lengths import (
    DISTRIBUTIONS,
    LONGEST,
    Histogram,
    LognormalPareto,
    Resampled,
    distribution_name,
    draw,
    draw_tokens,
    split_at,
)

OWN = Resampled(np.array([5, 80_000, 300, 3], dtype=np.int32))
distributions = st.sampled_from([*DISTRIBUTIONS, OWN])
contexts = st.sampled_from([1000, 4096, 100_000, LONGEST])
seeds = st.integers(0, 2**32)
MANY = 2_000_000
K = 1024


def share_above(lengths: np.ndarray, tokens: int) -> float:
    """Return the share of all tokens, in percent."""
    return 100 * lengths[lengths > tokens].sum() / lengths.sum()


def test_shares_that_bytescale_states():
    """16.2 and 9.8 % of GitHub's tokens lie above 128K and 256K, 44.3 and 12.1 % of Byted's above 128K and 1M. Sampling
    2M documents, a percent of the tokens in the longest of them is 0.2 percentage points uncertain."""
    github, byted = draw("github", MANY, 0), draw("byted", MANY, 0)
    assert share_above(github, 128 * K) == pytest.approx(16.2, abs=1)
    assert share_above(github, 256 * K) == pytest.approx(9.8, abs=1)
    assert share_above(byted, 128 * K) == pytest.approx(44.3, abs=1)
    assert share_above(byted, K * K) == pytest.approx(12.1, abs=1)


@pytest.mark.parametrize("name", ["github", "byted"])
def test_shares_of_all_buckets(name: str):
    histogram = DISTRIBUTIONS[name]
    assert isinstance(histogram, Histogram)
    lengths = draw(name, MANY, 1)
    tokens, _ = np.histogram(lengths - 1, bins=histogram.edges, weights=lengths)  # bins without their lower edge
    assert tokens.sum() == lengths.sum()
    published = np.array(histogram.token_shares) / sum(histogram.token_shares)
    np.testing.assert_allclose(tokens / tokens.sum(), published, atol=0.01)
    documents, _ = np.histogram(lengths - 1, bins=histogram.edges)
    np.testing.assert_allclose(documents / MANY, histogram.document_shares, atol=0.002)


def test_log_uniform_inside_a_bucket():
    lengths = draw(Histogram((1000, 4000), (1.0,)), 200_000, 0)
    assert lengths.min() == 1001
    assert lengths.max() == 4000
    assert np.quantile(lengths, [0.25, 0.5, 0.75]) == pytest.approx([1000 * 4**q for q in (0.25, 0.5, 0.75)], rel=0.01)


def test_lognormal_with_a_pareto_tail():
    lengths = draw("lognormal_pareto", MANY, 0)
    assert np.median(lengths) == pytest.approx(1050, rel=0.02)  # of body and tail together
    body = LognormalPareto(tail_share=0.0)
    logs = np.log(draw(body, 200_000, 0))
    assert logs.mean() == pytest.approx(np.log(1000), abs=0.02)
    assert logs.std() == pytest.approx(1.2, abs=0.02)
    tail = draw(LognormalPareto(tail_share=1.0), 200_000, 0)
    assert tail.min() == 16384
    assert tail.max() <= LONGEST
    # P(longer than x) = ((start / x)^a - (start / longest)^a) / (1 - (start / longest)^a)
    end = (16384 / LONGEST) ** 0.95
    for x in (32768, 131072, 2**20):
        assert (tail > x).mean() == pytest.approx(((16384 / x) ** 0.95 - end) / (1 - end), abs=0.005)


def test_agent_trajectories_are_as_long_as_those_published():
    """CoderForge: median 38K, 95 % up to 71K, at most 184K tokens."""
    lengths = draw("agent_trajectories", 500_000, 0)
    assert np.quantile(lengths, [0.5, 0.95]) == pytest.approx([38_000, 71_000], rel=0.01)
    assert np.log(lengths).std() == pytest.approx(0.38, abs=0.005)
    assert lengths.min() >= 500
    assert lengths.max() <= 184_000
    clipped = LognormalPareto(38_000.0, 2.0, tail_share=0.0, shortest=500, longest=184_000)
    assert np.unique(draw(clipped, 10_000, 0))[[0, -1]].tolist() == [500, 184_000]


def test_verls_mix_has_1k_to_16k_tokens():
    lengths = draw("verl_1k_16k", 200_000, 0)
    assert (lengths.min(), lengths.max()) == (1024, 16384)
    assert np.quantile(lengths, [0.25, 0.5, 0.75]) == pytest.approx([2048, 4096, 8192], rel=0.01)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_distribution_is_known_with_hyphens_too_and_between_its_ends(name: str):
    assert distribution_name(name) == distribution_name(name.replace("_", "-")) == name
    drawn, known = draw(name.replace("_", "-"), 100_000, 3), DISTRIBUTIONS[name]
    np.testing.assert_array_equal(drawn, draw(name, 100_000, 3))
    assert known.shortest <= drawn.min() < drawn.max() <= known.longest
    assert distribution_name(f"{name}s") is None


def test_resampled_lengths_are_equally_likely():
    lengths, counts = np.unique(draw(OWN, 100_000, 0), return_counts=True)
    assert lengths.tolist() == [3, 5, 300, 80_000]
    assert (OWN.shortest, OWN.longest) == (3, 80_000)
    assert counts == pytest.approx([25_000] * 4, rel=0.05)


@given(
    distributions, st.integers(0, 300), st.integers(0, 300), seeds, contexts, st.sampled_from(["truncate", "exclude"])
)
def test_a_longer_draw_begins_with_the_shorter(distribution, few, more, seed, longest, beyond):
    lengths = draw(distribution, few, seed, longest, beyond)
    assert lengths.dtype == np.int64
    assert len(lengths) == few
    assert ((lengths >= 1) & (lengths <= longest)).all()
    np.testing.assert_array_equal(draw(distribution, few + more, seed, longest, beyond)[:few], lengths)


@given(distributions, st.integers(0, 300), seeds, contexts)
def test_what_becomes_of_documents_beyond_the_context(distribution, documents, seed, longest):
    whole = draw(distribution, documents, seed)
    np.testing.assert_array_equal(draw(distribution, documents, seed, longest), np.minimum(whole, longest))
    pieces = draw(distribution, documents, seed, longest, "split")
    assert pieces.sum() == whole.sum()
    assert len(pieces) == (-(-whole // longest)).sum()
    kept = whole[whole <= longest]
    np.testing.assert_array_equal(draw(distribution, documents, seed, longest, "exclude")[: len(kept)], kept)


def test_split():
    assert split_at(np.array([5, 10, 11, 25]), 10).tolist() == [5, 10, 10, 1, 10, 10, 5]
    assert split_at(np.array([], dtype=np.int64), 10).tolist() == []


@given(
    distributions,
    st.integers(LONGEST, 20 * LONGEST),
    seeds,
    contexts,
    st.sampled_from(["truncate", "split", "exclude"]),
)
def test_tokens_are_closed_before_they_are_exceeded(distribution, tokens, seed, longest, beyond):
    lengths = draw_tokens(distribution, tokens, seed, longest, beyond)
    assert lengths.sum() <= tokens
    more = draw(distribution, len(lengths) + 1, seed, longest, beyond)[: len(lengths) + 1]
    np.testing.assert_array_equal(more[:-1], lengths)
    assert more.sum() > tokens


def test_a_document_of_more_tokens_is_there_alone():
    assert draw_tokens(Resampled(np.array([7])), 2, 0).tolist() == [7]


def test_seeds_differ():
    assert (draw("github", 100, 0) != draw("github", 100, 1)).any()


def test_what_cannot_be_drawn():
    with pytest.raises(
        ValueError, match=r"distribution 'gitlab' is unknown; valid: github, byted, lognormal_pareto, agent"
    ):
        draw("gitlab", 1, 0)
    with pytest.raises(ValueError, match=r"documents=-1 must not be negative"):
        draw("github", -1, 0)
    with pytest.raises(ValueError, match=r"longest=0: a document has at least 1 token"):
        draw("github", 1, 0, 0)
    with pytest.raises(ValueError, match=r"beyond='drop' is unknown; valid: truncate, split, exclude"):
        draw("github", 1, 0, 1000, "drop")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"longest=200 excludes every document: the shortest has 257 tokens"):
        draw("github", 1, 0, 200, "exclude")
    with pytest.raises(ValueError, match=r"tokens=0: a document has at least 1 token"):
        draw_tokens(OWN, 0, 0)
    with pytest.raises(ValueError, match=r"edges \(5, 2\) must be positive, ascend"):
        Histogram((5, 2), (1.0,))
    with pytest.raises(
        ValueError, match=r"token_shares \(0\.0,\) must not be negative, and at least one must be positive"
    ):
        Histogram((2, 5), (0.0,))
    with pytest.raises(ValueError, match=r"lengths have shape \(0,\) and dtype float64"):
        Resampled(np.array([]))
    with pytest.raises(ValueError, match=r"a document has 0 tokens; lengths must be at least 1"):
        Resampled(np.array([3, 0]))


def test_drawing_ends_where_hardly_a_document_is_short_enough():
    with pytest.raises(ValueError, match=r"longest=4096 excludes all but 0 of 1,310,720 documents; valid: a context"):
        draw("agent_trajectories", 10, 0, longest=4096, beyond="exclude")
