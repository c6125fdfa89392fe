"""Hypothesis strategies for layouts: any cuts, any memory order, one-token documents, ranks that hold nothing, any
degree of Ulysses.

A *step* is a list of layouts in the order in which ranks meet: each on its own subset of the ranks, so that groups
overlap or not and ranks take part in different numbers of them, down to none.
"""

from collections.abc import Sequence

from hypothesis import strategies as st

from hf_longctx.layouts.layout import Layout, Segment, zigzag


@st.composite
def layouts(
    draw: st.DrawFn,
    ranks: Sequence[int],
    first_doc: int = 0,
    max_documents: int = 4,
    max_tokens: int = 48,
    heads: int = 1,
) -> Layout:
    """A layout over some of `ranks`, of documents first_doc, first_doc + 1, ... of up to `max_tokens` tokens each.

    Each document is whole on one rank, zigzag over several, or cut anywhere with each piece on any rank. The degree of
    Ulysses is any that divides both the ranks that hold something and `heads`.
    """
    shards: dict[int, list[Segment]] = {rank: [] for rank in ranks}
    for doc in range(first_doc, first_doc + draw(st.integers(1, max_documents))):
        length = draw(st.one_of(st.just(1), st.integers(1, max_tokens)))
        how = draw(st.sampled_from(["whole", "zigzag", "cuts"]))
        if how == "whole":
            shards[draw(st.sampled_from(ranks))].append(Segment(doc, 0, length))
        elif how == "zigzag":
            for rank, segments in zigzag(doc, length, draw(st.permutations(ranks))).items():
                shards[rank].extend(segments)
        else:
            cuts = sorted({0, length, *draw(st.sets(st.integers(1, length), max_size=6))})
            owners = draw(st.lists(st.sampled_from(ranks), min_size=len(cuts) - 1, max_size=len(cuts) - 1))
            for start, stop, owner in zip(cuts, cuts[1:], owners):
                shards[owner].append(Segment(doc, start, stop))
    shuffled = {rank: tuple(draw(st.permutations(segments))) for rank, segments in shards.items() if segments}
    degrees = [degree for degree in range(1, len(shuffled) + 1) if len(shuffled) % degree == 0 and heads % degree == 0]
    return Layout(shuffled, draw(st.sampled_from(degrees)))


@st.composite
def steps(
    draw: st.DrawFn,
    world_size: int,
    max_layouts: int = 4,
    max_documents: int = 3,
    max_tokens: int = 48,
    heads: int = 1,
) -> list[Layout]:
    """The layouts of one step, whose documents are numbered 0, 1, 2, ... through all of them; `heads` as in `layouts`."""
    step: list[Layout] = []
    first_doc = 0
    for _ in range(draw(st.integers(1, max_layouts))):
        ranks = sorted(draw(st.sets(st.integers(0, world_size - 1), min_size=1)))
        step.append(draw(layouts(ranks, first_doc, max_documents, max_tokens, heads)))
        first_doc += len(step[-1].doc_lengths)
    return step
