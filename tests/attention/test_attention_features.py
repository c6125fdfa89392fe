"""What families other than Llama ask of attention, against dense attention in float64: sinks, values of another
dimension than queries and keys, chunks, soft caps.

Each kind of attention runs on one process, and over two ranks on documents that are packed, split and permuted, by direct
exchange and by Ulysses. Tolerance in float64: 1e-12 of the largest element of the output or of a gradient.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from hf_longctx.attention.chunked_attention import in_chunks
from hf_longctx.attention.engine import layout_attention
from hf_longctx.attention.exchange import Exchange
from hf_longctx.attention.kept import KeptAttention
from hf_longctx.attention.kernels import KERNELS, AttentionCall, KernelError, select_kernel
from hf_longctx.attention.kernels.padded_heads import PaddedHeads
from hf_longctx.layouts.blocks import Block, Mask
from hf_longctx.layouts.layout import Layout, LayoutError, Segment, chunked, zigzag
from tests.attention.attention_modes import memory_rows
from tests.builders.plans.random_layouts import steps
from tests.worlds.rank_pool import RankPool, worker_state

LENGTHS = (37, 1, 12, 23)
SPLIT = {
    0: (*zigzag(0, 37, (0, 1))[0], Segment(3, 11, 23), Segment(2, 0, 12), Segment(3, 5, 8)),
    1: (Segment(3, 0, 5), Segment(1, 0, 1), *zigzag(0, 37, (0, 1))[1][::-1], Segment(3, 8, 11)),
}
"""Documents 0 and 3 are split over two ranks, the others whole; no rank holds them in order."""
ALONE = Layout({0: tuple(Segment(doc, 0, length) for doc, length in enumerate(LENGTHS))})


@dataclass(frozen=True)
class Kind:
    """A kind of attention."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    value_dim: int = 8
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False

    @property
    def slopes(self) -> torch.Tensor | None:
        return 2.0 ** -torch.arange(1, self.heads + 1) if self.alibi else None

    def inputs(self, tokens: int, dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], torch.Tensor]:
        """q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, Dv], and sinks [Hq] if there are any; and the gradient of the output."""
        generator = torch.Generator().manual_seed(tokens)
        rows = [
            torch.randn(tokens, heads, dim, generator=generator)
            for heads, dim in (
                (self.heads, self.head_dim),
                (self.kv_heads, self.head_dim),
                (self.kv_heads, self.value_dim),
                (self.heads, self.value_dim),
            )
        ]
        q, k, v, grad, sinks = (x.to(dtype) for x in (*rows, torch.randn(self.heads, generator=generator)))
        return [q, k, v, sinks] if self.sinks else [q, k, v], grad


KINDS = {
    "sinks": Kind(sinks=True),
    "sinks, one key-value head": Kind(sinks=True, kv_heads=1),
    "sinks in a window, with ALiBi": Kind(sinks=True, window=7, alibi=True),
    "narrow values": Kind(head_dim=12, value_dim=8),
    "wide values in a window": Kind(head_dim=8, value_dim=12, window=7),
    "chunks": Kind(chunk=8),
    "chunks of one token": Kind(chunk=1),
    "a chunk longer than all documents": Kind(chunk=64),
    "chunks, window, sinks, ALiBi": Kind(chunk=11, window=7, sinks=True, alibi=True),
    "soft cap": Kind(softcap=1.5),
    "soft cap, window, sinks, narrow values": Kind(softcap=0.5, window=7, sinks=True, head_dim=12, value_dim=8),
    "soft cap, chunks, one key-value head": Kind(softcap=50.0, chunk=8, kv_heads=1),
    "narrow values, sinks, ALiBi": Kind(head_dim=12, value_dim=8, sinks=True, alibi=True, kv_heads=1),
}


def with_gradients(out: torch.Tensor, inputs: list[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


def dense(kind: Kind, lengths: tuple[int, ...] = LENGTHS, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """out, dq, dk, dv (and dsinks) in float64 of inputs in `dtype`, each document alone, written out."""
    inputs, grad = kind.inputs(sum(lengths), dtype)
    inputs = [x.double().requires_grad_() for x in inputs]
    outs = []
    for q, k, v in zip(*(x.split(lengths) for x in inputs[:3])):
        keys, values = (x.repeat_interleave(kind.heads // kind.kv_heads, 1).transpose(0, 1) for x in (k, v))
        position = torch.arange(len(q))
        distance = position[:, None] - position
        scores = q.transpose(0, 1) @ keys.transpose(1, 2) * kind.head_dim**-0.5
        if kind.softcap is not None:
            scores = kind.softcap * (scores / kind.softcap).tanh()
        if kind.slopes is not None:
            scores = scores - kind.slopes.double()[:, None, None] * distance
        hidden = (distance < 0) | (distance >= (kind.window or len(q)))
        if kind.chunk is not None:
            hidden |= position[:, None] // kind.chunk != position // kind.chunk
        scores = scores.masked_fill(hidden, float("-inf"))
        if kind.sinks:
            scores = torch.cat([scores, inputs[3][:, None, None].expand(-1, len(q), 1)], -1)
        outs.append((scores.softmax(-1)[..., : len(q)] @ values).transpose(0, 1))
    return with_gradients(torch.cat(outs), inputs, grad.double())


def attend(
    kind: Kind,
    layout: Layout,
    exchange: Exchange | None = None,
    dtype: torch.dtype = torch.float64,
    keep_last_slice: bool = False,
    recompute: bool = False,
) -> list[torch.Tensor]:
    """out, dq, dk, dv (and dsinks) of this rank's rows, in memory order."""
    rows = memory_rows(layout, layout.ranks[0] if exchange is None else exchange.rank)
    inputs, grad = kind.inputs(sum(layout.doc_lengths.values()), dtype)
    inputs = [x[rows].requires_grad_() for x in inputs[:3]] + [x.requires_grad_() for x in inputs[3:]]
    keep = KeptAttention() if recompute else None

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        return layout_attention(
            q,
            k,
            v,
            layout,
            exchange,
            window=kind.window,
            chunk=kind.chunk,
            softcap=kind.softcap,
            alibi_slopes=kind.slopes,
            sinks=sinks,
            keep_last_slice=keep_last_slice,
            keep=keep,
        )

    out = checkpoint(keep.in_layer(run), *inputs, use_reentrant=False) if keep else run(*inputs)
    assert out.dtype == dtype
    return with_gradients(out, inputs, grad[rows])


def error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, relative to the largest element; where all are zero, as gradients of queries that see one key,
    the difference itself: some processors round what others cancel."""
    return float((ours.double() - expected).abs().max() / (expected.abs().max() or 1.0))


def assert_equal(ours: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-12) -> None:
    errors = {name: error(*both) for name, *both in zip(("out", "dq", "dk", "dv", "dsinks"), ours, expected)}
    assert max(errors.values()) <= tolerance, errors


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_packed_documents_on_one_process(kind: Kind):
    expected = dense(kind)
    assert_equal(attend(kind, ALONE), expected)
    assert_equal(attend(kind, ALONE, recompute=True), expected)


def exchange_of_features(ranks_per_node: int) -> Exchange:
    name = f"exchange of features, {ranks_per_node}"
    if name not in worker_state:
        worker_state[name] = Exchange(ranks_per_node=ranks_per_node)
    return worker_state[name]


def on_two_ranks(asked: list[Kind]) -> list[list[torch.Tensor]]:
    """On one rank: its rows of each kind, by direct exchange and by Ulysses; one of them keeps what it may, in turn."""
    exchange = exchange_of_features(2)
    return [
        attend(kind, Layout(SPLIT, ulysses), exchange, keep_last_slice=keep, recompute=keep)
        for number, kind in enumerate(asked)
        for ulysses, keep in ((1, bool(number % 2)), (2, not number % 2))
    ]


def test_documents_split_over_two_ranks(ranks2: RankPool):
    """Gradients of sinks add up over the ranks, whichever of them computed a head."""
    asked = list(KINDS.values())
    for number, both in enumerate(zip(*ranks2.run(on_two_ranks, asked))):
        assert_equal(gathered(Layout(SPLIT), both), dense(asked[number // 2]))


def gathered(layout: Layout, by_rank: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    """out, dq, dk, dv of all ranks' rows, documents laid end to end, and the sum of what they give the sinks."""
    back = torch.argsort(torch.cat([memory_rows(layout, rank) for rank in layout.ranks]))
    parts = list(zip(*by_rank))
    return [torch.cat(rows)[back] for rows in parts[:4]] + [sum(sinks) for sinks in parts[4:]]


def run_step(
    step: list[Layout], kind: Kind, ranks_per_node: int, options: dict[str, bool]
) -> dict[int, list[torch.Tensor]]:
    """On one rank: each of its layouts."""
    exchange = exchange_of_features(ranks_per_node)
    return {
        n: attend(kind, layout, exchange, **options) for n, layout in enumerate(step) if exchange.rank in layout.ranks
    }


@st.composite
def kinds(draw: st.DrawFn) -> Kind:
    """All features together, as far as they go together."""
    alibi = draw(st.booleans())
    return Kind(
        heads=12,
        kv_heads=draw(st.sampled_from([1, 2, 3, 12])),
        head_dim=draw(st.sampled_from([4, 8])),
        value_dim=draw(st.sampled_from([4, 8])),
        window=draw(st.sampled_from([None, 1, 5, 13])),
        chunk=draw(st.sampled_from([None, 1, 6, 16])),
        softcap=None if alibi else draw(st.sampled_from([None, 0.7, 20.0])),
        alibi=alibi,
        sinks=draw(st.booleans()),
    )


@settings(max_examples=max(12, settings().max_examples // 2))
@given(data=st.data())
def test_features_together_on_random_layouts(any_ranks: RankPool, data: st.DataObject):
    """Any cuts, any memory order, any degree of Ulysses, nodes, the last slice kept, attention kept by checkpointing. A
    gradient may be zero: an element of 1 or more gives the scale there."""
    step, kind = data.draw(steps(any_ranks.world_size, max_layouts=2, heads=12)), data.draw(kinds())
    options = {name: data.draw(st.booleans()) for name in ("keep_last_slice", "recompute")}
    answers = any_ranks.run(run_step, step, kind, data.draw(st.sampled_from([1, any_ranks.world_size])), options)
    for number, layout in enumerate(step):
        results = gathered(layout, [answers[rank][number] for rank in layout.ranks])
        for ours, expected in zip(results, dense(kind, tuple(layout.doc_lengths.values()))):
            assert (ours - expected).abs().max() <= 1e-12 * expected.abs().max().clamp_min(1.0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)])
@pytest.mark.parametrize("name", ["sinks", "soft cap, window, sinks, narrow values"])
def test_other_dtypes(name: str, dtype: torch.dtype, tolerance: float):
    """Relative to the largest element; parameters get gradients in their own dtype."""
    kind = KINDS[name]
    results = attend(kind, ALONE, dtype=dtype)
    assert {x.dtype for x in results} == {dtype}
    assert_equal(results, dense(kind, dtype=dtype), tolerance)


def test_a_sink_that_is_far_below_or_above_all_scores():
    """A score of -inf changes nothing; one of 1e4 takes all probability, and no number overflows."""
    kind = Kind(sinks=True)
    (q, k, v, _), grad = kind.inputs(sum(LENGTHS))
    sinks = torch.tensor([-torch.inf, -1e4, 1e4, 0.0], dtype=torch.float64, requires_grad=True)
    out = layout_attention(q, k, v, ALONE, sinks=sinks)
    torch.testing.assert_close(out[:, :2], layout_attention(q, k, v, ALONE)[:, :2], rtol=0, atol=0)
    assert not out[:, 2].any()
    (gradient,) = torch.autograd.grad(out, sinks, grad)
    assert gradient[:3].tolist() == [0.0, 0.0, 0.0]
    assert gradient[3] != 0


@pytest.mark.parametrize("name", ["cpu_flash", "reference"])
@pytest.mark.parametrize("dims", [(12, 8), (8, 12)])
def test_values_are_padded_only_for_kernels_that_need_it(name: str, dims: tuple[int, int]):
    q, k, value = torch.empty(5, 4, dims[0]), torch.empty(5, 2, dims[0]), torch.empty(5, 2, dims[1])
    call = AttentionCall(q, k, value, [Block(0, 5, 0, 5, Mask.CAUSAL)], 1.0)
    kernel = select_kernel(call, name)
    assert isinstance(kernel, PaddedHeads) == (name == "cpu_flash")
    assert kernel.name == name
    (partial,) = kernel.forward(call)
    assert partial.out.shape == (5, 4, dims[1])
    assert partial.out.untyped_storage().nbytes() == 5 * 4 * dims[1] * 4
    assert select_kernel(call._replace(v=k), name) is KERNELS[name]


def sent(kind: Kind, layout: Layout) -> int:
    """Bytes that one rank sends forward and backward."""
    exchange = exchange_of_features(2)
    before = exchange.bytes_sent
    attend(kind, layout, exchange)
    return exchange.bytes_sent - before


def test_chunks_send_less_and_nothing_where_they_are_whole(ranks2: RankPool):
    """Zigzag chunks of 10 tokens: rank 0 holds [0:10) and [30:40), rank 1 [10:30). Attention in chunks of 10 and of 30 needs
    nothing of another rank, or for [10:30) the first 10; in chunks of 20 each rank's second half needs 10 of the other."""
    layout = Layout(zigzag(0, 40, (0, 1)))
    for chunk, rows in ((10, 0), (30, 10), (20, 20), (40, 30), (None, 30)):
        assert sum(ranks2.run(sent, Kind(chunk=chunk), layout)) == 3 * rows * 2 * 2 * 8 * 8


@pytest.mark.parametrize("chunk", [1, 8, 10, 13, 37])
def test_chunks_of_attention_in_chunks_of_a_pipeline(chunk: int):
    # Of the keys kept from earlier, only those in the same chunk of attention are used, and get gradients.
    kind = Kind(chunk=chunk)
    inputs, grad = kind.inputs(37)
    inputs = [x.requires_grad_() for x in inputs]
    q, k, v = inputs
    outs = []
    for layout in chunked(0, 37, (0,), [5, 16, 31, 37]):
        start, stop = layout.shard(0)[0].start, layout.shard(0)[-1].stop
        keys, values = (torch.cat([x[start:stop], x[:start]]) for x in (k, v))
        outs.append(layout_attention(q[start:stop], keys, values, layout, chunk=chunk))
    assert_equal(with_gradients(torch.cat(outs), inputs, grad), dense(kind, (37,)))


def test_chunks_are_derived_once():
    layout = Layout(SPLIT)
    assert in_chunks(layout, 8) is in_chunks(layout, 8)
    assert in_chunks(layout, 37) is layout
    for chunk in (0, -8):
        with pytest.raises(
            LayoutError, match=f"chunk={chunk}: a query attends at least to itself, so a chunk has 1 token"
        ):
            in_chunks(layout, chunk)


def test_keys_and_values_travel_at_their_own_widths(ranks2: RankPool):
    """40 tokens in zigzag chunks of 10: rank 0 (chunks 0, 3) needs 20 rows of rank 1, which needs 10; they travel forward, in
    backward again, and their gradients return."""
    layout = Layout(zigzag(0, 40, (0, 1)))
    for dims in ((8, 8), (12, 8), (8, 12)):
        kind = Kind(head_dim=dims[0], value_dim=dims[1])
        assert sum(ranks2.run(sent, kind, layout)) == 3 * 30 * kind.kv_heads * sum(dims) * 8


def test_soft_caps_that_no_kernel_computes_are_refused():
    (q, k, v), _ = Kind().inputs(sum(LENGTHS))
    for wrong in (0.0, -30.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"softcap={wrong}: a soft cap is positive and finite"):
            layout_attention(q, k, v, ALONE, softcap=wrong)
    with pytest.raises(ValueError, match=r"alibi_slopes came with a softcap: .* Valid: one of them"):
        layout_attention(q, k, v, ALONE, softcap=30.0, alibi_slopes=torch.ones(4))
    with pytest.raises(KernelError, match="cpu_flash: has no soft-capping"):
        layout_attention(q, k, v, ALONE, softcap=30.0, kernel="cpu_flash")
    assert select_kernel(AttentionCall(q, k, v, (), 1.0, softcap=30.0)).name == "tiled"
    assert select_kernel(AttentionCall(q, k, v, (), 1.0)).name == "cpu_flash"


def test_sinks_of_another_shape_are_refused():
    (q, k, v, sinks), _ = Kind(sinks=True).inputs(sum(LENGTHS))
    for wrong in (sinks[:2], sinks[None], torch.tensor(0.0)):
        with pytest.raises(ValueError, match=r"sinks has shape .*: one number for each of 4 query heads, \(4,\)"):
            layout_attention(q, k, v, ALONE, sinks=wrong)
