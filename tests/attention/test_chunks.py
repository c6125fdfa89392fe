"""A document run chunk by chunk gives what it gives whole, forward and backward, on any number of ranks."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from hf_longctx.attention.earlier import EarlierChunks
from hf_longctx.attention.engine import layout_attention
from hf_longctx.attention.exchange import Exchange
from hf_longctx.layouts.layout import Layout, LayoutError, Segment, chunked
from tests.attention.attention_modes import KINDS, NAMES, Kind, dense, tensors
from tests.worlds.fifo import in_order_communicators
from tests.worlds.rank_pool import RankPool, worker_state

LENGTH = 61


def rows_of(layout: Layout, rank: int) -> torch.Tensor:
    return torch.from_numpy(layout.positions(rank))


def run_chunks(
    ranks: int, chunks: int, kind: Kind, keep: bool, recompute: bool, in_order: bool
) -> list[tuple[torch.Tensor, ...]]:
    """On one rank: positions, out, dq, dk, dv of each chunk."""
    exchange: Exchange = worker_state.setdefault("exchange of chunks", Exchange(ranks_per_node=2))
    rank = exchange.rank
    earlier = EarlierChunks()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout) -> torch.Tensor:
        before = layout.context_tokens(rank)
        k, v = earlier.extend(0, before, 2 * k, v)
        return layout_attention(
            *(q, k, v, layout, exchange),
            window=kind.window,
            alibi_slopes=kind.slopes(),
            keep_last_slice=keep,
            again=partial(earlier.again, 0, before),
        )

    ran = []
    with in_order_communicators() if in_order else nullcontext():
        for layout in chunked(0, LENGTH, range(ranks), chunks):
            rows = rows_of(layout, rank)
            q, k, v, grad = (x[rows] for x in tensors(LENGTH, kind, torch.float64))
            leaves = [x.requires_grad_() for x in (q, k / 2, v)]
            out = checkpoint(attend, *leaves, layout, use_reentrant=False) if recompute else attend(*leaves, layout)
            ran.append((rows, out, grad, leaves))
        results = []
        for rows, out, grad, leaves in reversed(ran):
            out.backward(grad)
            dq, dk, dv = (x.grad for x in leaves)
            results.append((rows, out.detach(), dq, dk / 2, dv))
    assert not earlier._kept, "what is kept goes with the chunk"
    return results


@pytest.mark.parametrize(
    ("name", "in_order"),
    [("causal", False), ("grouped", True), ("alibi", True), ("window", True), ("alibi in a window", True)],
)
def test_chunks_are_the_whole_document(any_ranks: RankPool, name: str, in_order: bool):
    kind, ranks = KINDS[name], any_ranks.world_size
    expected = dense(tensors(LENGTH, kind, torch.float64), [LENGTH], kind)
    for chunks, keep, recompute in (
        (1, False, False),
        (2, True, True),
        (3, False, True),
        (LENGTH // ranks, False, False),
    ):
        by_rank = any_ranks.run(run_chunks, ranks, chunks, kind, keep, recompute, in_order)
        parts = [torch.cat(pieces) for pieces in zip(*(chunk for outputs in by_rank for chunk in outputs))]
        back = torch.argsort(parts[0])
        for what, ours, right in zip(NAMES, parts[1:], expected):
            error = float((ours[back] - right).abs().max() / right.abs().max())
            assert error < 1e-10, (what, chunks, error)


@pytest.mark.parametrize("learns", [(True, False, True), (False, True, False)], ids=["q and v", "k"])
def test_adapters_on_some_projections_learn_from_all_chunks(learns: tuple[bool, ...]):
    """Below frozen layers only what is adapted has a gradient."""
    kind = KINDS["causal"]
    given = tensors(LENGTH, kind, torch.float64)
    leaves = [x.requires_grad_(wanted) for x, wanted in zip(given, learns)]
    earlier = EarlierChunks()
    outs = []
    for layout in chunked(0, LENGTH, (0,), 4):
        rows = rows_of(layout, 0)
        q, k, v = (x[rows] for x in leaves)
        outs.append((layout_attention(q, *earlier.extend(0, layout.context_tokens(0), k, v), layout), given[3][rows]))
    for out, grad in reversed(outs):
        out.backward(grad)
    for x, wanted, right in zip(leaves, learns, dense(tensors(LENGTH, kind, torch.float64), [LENGTH], kind)[1:]):
        if wanted:
            torch.testing.assert_close(x.grad, right, rtol=1e-10, atol=1e-10)
        else:
            assert x.grad is None


@pytest.mark.parametrize("chunk", [None, 16])
def test_keys_of_a_document_are_kept_once(chunk: int | None):
    """Not once more for each chunk that attends to them, and not with queries whose memory they share."""
    tokens, heads, width = 64, 2, 8
    earlier, kept, outs = EarlierChunks(), {}, []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage()  # held, so that no address comes twice
        return x

    for layout in chunked(0, tokens, (0,), 8):
        before = layout.context_tokens(0)
        fused = torch.randn(layout.tokens(0), 3 * heads, width, requires_grad=True)
        q, k, v = (fused * 1).split(heads, dim=1)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            joined = earlier.extend(0, before, k, v)
            again = partial(earlier.again, 0, before)
            outs.append(layout_attention(q.clone(), *joined, layout, chunk=chunk, again=again))
        del q, k, v, joined
    for pair in earlier._kept.values():
        for x in pair:
            keep(x.detach())
    row = 4 * heads * width
    lse = 4 * heads
    assert sum(storage.nbytes() for storage in kept.values()) == tokens * (4 * row + lse)  # q, k, v, out
    for out in reversed(outs):
        out.sum().backward()


def test_without_gradients_chunks_are_kept_too():
    kind = KINDS["causal"]
    given = tensors(LENGTH, kind, torch.float64)
    earlier = EarlierChunks()
    outputs = []
    with torch.no_grad():
        for layout in chunked(0, LENGTH, (0,), 4):
            q, k, v, _ = (x[rows_of(layout, 0)] for x in given)
            outputs.append(layout_attention(q, *earlier.extend(0, layout.context_tokens(0), k, v), layout))
    torch.testing.assert_close(torch.cat(outputs), dense(given, [LENGTH], kind)[0], rtol=1e-10, atol=1e-10)


def test_what_many_chunks_find_is_summed_in_float32():
    """A sum of 1 and many 500ths of it would stay 1 in bfloat16."""
    earlier, chunks = EarlierChunks(), 32
    keys = [torch.ones(4, 1, 2, dtype=torch.bfloat16, requires_grad=True) for _ in range(chunks)]
    joined = [earlier.extend(0, 4 * chunk, k, k.detach()) for chunk, k in enumerate(keys)]
    for chunk, (k, _) in reversed(list(enumerate(joined))):
        k.backward(torch.full_like(k, 1.0 if chunk == chunks - 1 else 0.002))
    assert keys[0].grad is not None
    expected = torch.full_like(keys[0], 1 + 0.002 * (chunks - 1))
    torch.testing.assert_close(keys[0].grad, expected, rtol=0.004, atol=0)


def test_a_chunk_needs_those_before_it():
    layouts = chunked(0, 12, (0,), 3)
    earlier = EarlierChunks()
    x = torch.zeros(4, 1, 2)
    earlier.extend(0, 0, x, x)
    with pytest.raises(
        RuntimeError, match="layer 0: the chunk after token 4 has not run, and the one after 8 needs it"
    ):
        earlier.extend(0, layouts[2].context_tokens(0), x, x)
    with pytest.raises(
        ValueError, match=r"must be \[4, Hq, D\], \[8, Hkv, D\], \[8, Hkv, Dv\]: 4 tokens of the shard, then 4"
    ):
        layout_attention(x, x, x, layouts[1])
    earlier = EarlierChunks()
    with torch.no_grad():
        earlier.extend(0, 0, x, x)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        earlier.extend(0, 0, x.clone().requires_grad_(), x)


@pytest.mark.parametrize(
    ("shards", "context", "message"),
    [
        ({0: (Segment(0, 0, 4),)}, {0: (Segment(1, 0, 2),)}, r"must hold sorted segments of documents that go on here"),
        ({0: (Segment(0, 0, 4),)}, {0: (Segment(0, 4, 6),)}, r"on ranks \[0\], before they do, at {0: 0}"),
        ({0: (Segment(0, 2, 4),)}, {1: (Segment(0, 0, 2),)}, r"on ranks \[0\]"),
        ({0: (Segment(0, 2, 4),)}, {0: (Segment(0, 0, 1),)}, r"leaves a gap"),
        ({0: (Segment(0, 3, 4), Segment(0, 2, 3))}, {0: (Segment(0, 0, 2),)}, "needs sorted shards"),
    ],
)
def test_a_context_that_cannot_be_is_refused(shards, context, message):
    with pytest.raises(LayoutError, match=message):
        Layout(shards, context=context)


def test_chunks_end_where_they_are_told_and_give_each_rank_what_the_whole_document_would():
    layouts = chunked(0, 11, (0, 1, 2), [4, 7, 11])
    assert [sum(layout.tokens(rank) for rank in range(3)) for layout in layouts] == [4, 3, 4]
    assert [sum(layout.tokens(rank) for layout in layouts) for rank in range(3)] == [4, 4, 3]
    for ends in ([], [4, 7], [4, 6, 11], [4, 4, 11], [7, 12]):
        with pytest.raises(LayoutError, match="valid ends rise by at least 3 from 0 to 11"):
            chunked(0, 11, (0, 1, 2), ends)


@pytest.mark.parametrize("chunks", [0, 6])
def test_every_rank_needs_a_token_of_each_chunk(chunks):
    with pytest.raises(LayoutError, match="valid are 1 to 5"):
        chunked(0, 11, (0, 1), chunks)
