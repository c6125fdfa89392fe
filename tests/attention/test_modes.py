"""Every mode of the engine on every kind of attention, against dense attention in float64, forward and backward.

Modes are degrees of Ulysses: 1 is direct exchange alone, all ranks of a layout is Ulysses alone, and hybrids lie between
them. Layouts are random, one of each example on all ranks in every mode; with nodes of 2 ranks or one node, with and without
the slice kept for backward, and with every group's operations in NCCL's order.

Tolerances, relative to the largest element: 1e-5 (out) and 1e-4 (gradients) in float32; 1e-10 in float64. bfloat16 is
compared with what one rank makes of it: ranks accumulate in float32, so its error (L2) must not grow with their number.
"""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.attention.engine import layout_attention
from hf_longctx.attention.exchange import Exchange
from hf_longctx.layouts.layout import Layout, Segment, zigzag
from tests.attention.attention_modes import HEADS, KINDS, NAMES, Kind, Results, dense, memory_rows, tensors
from tests.builders.plans.random_layouts import layouts, steps
from tests.worlds.fifo import in_order_communicators
from tests.worlds.rank_pool import RankPool, worker_state

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def attend(layout: Layout, kind: Kind, dtype: torch.dtype, exchange: Exchange | None, keep: bool = False) -> Results:
    """This rank's rows, in memory order."""
    rank = layout.ranks[0] if exchange is None else exchange.rank
    given = tensors(sum(layout.doc_lengths.values()), kind, dtype)
    q, k, v, grad = (x[memory_rows(layout, rank)] for x in given)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = layout_attention(
        q, k, v, layout, exchange, window=kind.window, alibi_slopes=kind.slopes(), keep_last_slice=keep
    )
    assert out.dtype == dtype
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def run_step(
    step: list[Layout], kind: Kind, dtypes: tuple[torch.dtype, ...], ranks_per_node: int, keep: bool, in_order: bool
) -> dict[tuple[int, torch.dtype], Results]:
    """On one rank: each of its layouts in each dtype."""
    key = f"exchange {ranks_per_node}"
    if key not in worker_state:
        worker_state[key] = Exchange(ranks_per_node=ranks_per_node)
    exchange: Exchange = worker_state[key]
    with in_order_communicators() if in_order else nullcontext():
        return {
            (number, dtype): attend(layout, kind, dtype, exchange, keep)
            for number, layout in enumerate(step)
            if exchange.rank in layout.ranks
            for dtype in dtypes
        }


def gathered(layout: Layout, number: int, dtype: torch.dtype, answers: list[dict]) -> Results:
    """The rows of all ranks, documents laid end to end."""
    rows = torch.cat([memory_rows(layout, rank) for rank in layout.ranks])
    parts = [answers[rank][number, dtype] for rank in layout.ranks]
    return [torch.cat(pieces)[torch.argsort(rows)] for pieces in zip(*parts)]


def whole(layout: Layout) -> Layout:
    """The same documents on one rank."""
    return Layout({0: tuple(Segment(doc, 0, length) for doc, length in layout.doc_lengths.items())})


def l2_errors(ours: Results, right: Results) -> list[float]:
    """Relative to the reference, or to inputs of unit size where that is smaller."""
    return [float((x.double() - y).norm() / y.norm().clamp_min(y.numel() ** 0.5)) for x, y in zip(ours, right)]


@st.composite
def modes(draw: st.DrawFn, world_size: int) -> list[Layout]:
    """A random step, and the same random shards on all ranks in every mode."""
    ranks = range(world_size)
    step = draw(steps(world_size, max_layouts=2, heads=HEADS))
    drawn = draw(layouts(ranks))
    split = zigzag(len(drawn.doc_lengths), draw(st.integers(world_size, 60)), draw(st.permutations(ranks)))
    shards = {rank: (*split[rank], *drawn.shards.get(rank, ())) for rank in ranks}
    return [*step, *(Layout(shards, u) for u in range(1, world_size + 1) if world_size % u == 0)]


@pytest.mark.parametrize(
    ("kind", "in_order"),
    [pytest.param(kind, True, id=f"{name}-in order") for name, kind in KINDS.items()]
    + [
        pytest.param(
            kind, False, id=f"{name}-gloo", marks=[] if name in ("causal", "alibi in a window") else pytest.mark.nightly
        )
        for name, kind in KINDS.items()
    ],
)
@settings(max_examples=max(3, settings().max_examples // 8))
@given(data=st.data())
def test_random_layouts_equal_dense_attention(any_ranks: RankPool, kind: Kind, in_order: bool, data: st.DataObject):
    step = data.draw(modes(any_ranks.world_size))
    ranks_per_node, keep = data.draw(st.sampled_from([2, any_ranks.world_size])), data.draw(st.booleans())
    answers = any_ranks.run(run_step, step, kind, DTYPES, ranks_per_node, keep, in_order)
    for number, layout in enumerate(step):
        lengths = list(layout.doc_lengths.values())
        for dtype in DTYPES:
            results = gathered(layout, number, dtype, answers)
            right = dense(tensors(sum(lengths), kind, dtype), lengths, kind)
            if dtype == torch.bfloat16:
                alone = l2_errors(attend(whole(layout), kind, dtype, None), right)
                for name, error, single in zip(NAMES, l2_errors(results, right), alone):
                    assert error <= 1.3 * single + 1e-3, f"{name}: {error:.1e}, on one rank {single:.1e}"
                continue
            for name, ours, expected in zip(NAMES, results, right):
                error = float((ours.double() - expected).abs().max() / expected.abs().max().clamp_min(1.0))
                limit = 1e-10 if dtype == torch.float64 else 1e-5 if name == "out" else 1e-4
                assert error <= limit, f"{name} in {dtype}: {error:.1e}, degree {layout.ulysses} of {layout.ranks}"


@pytest.mark.parametrize("kind", [Kind(4, 4), Kind(4, 2)], ids=["causal", "grouped"])
def test_the_error_of_bfloat16_does_not_grow_with_ranks(most_ranks: RankPool, kind: Kind):
    """Chunks of the zigzag have 97 tokens: more blocks, merges and sums than any real run has for its length."""
    ranks = range(most_ranks.world_size)
    shards = zigzag(0, 2 * 97 * len(ranks), ranks)
    hybrids = [Layout(shards, degree) for degree in (1, 2, 4)]
    alone = whole(hybrids[0])
    q, k, v, grad = (x.float() for x in tensors(alone.tokens(0), kind, torch.bfloat16))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = layout_attention(q, k, v, alone)
    right = [x.double() for x in (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))]
    single = l2_errors(attend(alone, kind, torch.bfloat16, None), right)
    answers = most_ranks.run(run_step, hybrids, kind, (torch.bfloat16,), len(ranks), False, False)
    for number, layout in enumerate(hybrids):
        errors = l2_errors(gathered(layout, number, torch.bfloat16, answers), right)
        ratio = {name: several / one for name, several, one in zip(NAMES, errors, single)}
        figures = f"degree {layout.ulysses}, error on {len(ranks)} ranks / on one: {ratio}"
        assert ratio["out"] <= 1.2, figures
        assert max(ratio["dq"], ratio["dk"], ratio["dv"]) <= 1.1, figures


def repeated(layouts: list[Layout], kind: Kind) -> bool:
    """Whether a second run gives the bits of the first."""
    for ranks_per_node, keep in ((2, False), (len(layouts[0].ranks), True)):
        first, second = (
            run_step(layouts, kind, (torch.float32, torch.bfloat16), ranks_per_node, keep, False) for _ in range(2)
        )
        if not all(torch.equal(a, b) for key in first for a, b in zip(first[key], second[key])):
            return False
    return True


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, id=name, marks=[] if name in ("alibi in a window", "three key-value heads") else pytest.mark.nightly
        )
        for name, kind in KINDS.items()
    ],
)
def test_the_same_plan_gives_the_same_bits(ranks4: RankPool, kind: Kind):
    layouts = [Layout(zigzag(0, 301, range(4)), degree) for degree in (1, 2, 4) if HEADS % degree == 0]
    layouts.append(Layout({0: [Segment(0, 0, 5), Segment(1, 4, 9)], 2: [Segment(1, 0, 4)], 3: [Segment(2, 0, 7)]}))
    assert ranks4.run(repeated, layouts, kind) == [True] * 4
