"""The engine across gloo ranks: exact on random layouts, byte counts, repeatable bits.

Tolerances against float64: 1e-12 in float64, 1e-5 on the output and 1e-4 on gradients in float32.
"""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.attention.engine import layout_attention
from hf_longctx.attention.exchange import Exchange, sum_over_holders
from hf_longctx.layouts.exchange_schedule import schedule
from hf_longctx.layouts.layout import Layout, LayoutError, Segment, zigzag
from tests.attention.attention_modes import memory_rows
from tests.attention.kernels.document_attention import HEAD_DIM, HEADS, KV_HEADS, plain, tensors
from tests.builders.plain_scores import exchange_of_this_rank
from tests.builders.plans.random_layouts import steps
from tests.worlds.fifo import in_order_communicators
from tests.worlds.rank_pool import RankPool, worker_state

Results = dict[tuple[int, int], list[torch.Tensor]]
"""(layout, rank) -> out, dq, dk, dv of the rank's rows, in memory order."""


def attend(layouts: list[Layout], dtype: torch.dtype, in_order: bool) -> Results:
    """On one rank: attention over each of its layouts, forward and backward."""
    exchange = exchange_of_this_rank()
    results: Results = {}
    with in_order_communicators() if in_order else nullcontext():
        for number, layout in enumerate(layouts):
            if exchange.rank not in layout.ranks:
                continue
            rows = memory_rows(layout, exchange.rank)
            q, k, v, grad = (x[rows] for x in tensors(sum(layout.doc_lengths.values()), dtype, "cpu"))
            leaves = [x.requires_grad_() for x in (q, k, v)]
            out = layout_attention(*leaves, layout, exchange)
            results[number, exchange.rank] = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    return results


@pytest.mark.parametrize("in_order", [False, True], ids=["gloo", "in-order"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=max(8, settings().max_examples // 10))
@given(data=st.data())
def test_random_layouts_equal_whole_documents(
    any_ranks: RankPool, dtype: torch.dtype, in_order: bool, data: st.DataObject
):
    layouts = data.draw(steps(any_ranks.world_size))
    tolerances = [1e-12] * 4 if dtype == torch.float64 else [1e-5, 1e-4, 1e-4, 1e-4]
    for answer in any_ranks.run(attend, layouts, dtype, in_order):
        for (number, rank), results in answer.items():
            lengths = list(layouts[number].doc_lengths.values())
            expected = plain(tensors(sum(lengths), dtype, "cpu"), lengths)
            for ours, right, tolerance in zip(results, expected, tolerances):
                error = (
                    ours.double() - right[memory_rows(layouts[number], rank)]
                ).abs().max() / right.abs().max().clamp_min(1.0)
                assert float(error) <= tolerance


def forward_bytes(layout: Layout) -> int:
    """Bytes that one rank sends in a forward pass, float32, 8 query and 8 key/value heads of 64 over 8192 tokens' layout."""
    exchange = exchange_of_this_rank()
    tokens = layout.tokens(exchange.rank)
    before = exchange.bytes_sent
    with torch.no_grad():
        layout_attention(*(torch.ones(tokens, 8, 64) for _ in range(3)), layout, exchange)
    return exchange.bytes_sent - before


def test_short_whole_documents_send_nothing(ranks4: RankPool):
    layout = Layout({rank: [Segment(2 * rank, 0, 300), Segment(2 * rank + 1, 0, 17)] for rank in range(4)})
    assert ranks4.run(forward_bytes, layout) == [0, 0, 0, 0]


def test_one_long_document_sends_at_most_three_quarters_of_a_ring(ranks4: RankPool):
    tokens, ranks = 8192, 4
    row = 2 * 8 * 64 * 4  # keys and values of one token
    ring = ranks * (ranks - 1) * (tokens // ranks) * row  # every rank passes on every slice but one
    sent = ranks4.run(forward_bytes, Layout(zigzag(0, tokens, range(ranks))))
    share = sum(sent) / ring
    assert share <= 0.75, f"{share:.4f} of a ring's bytes; most sent by one rank: {max(sent) / 2**20:.1f} MiB"
    assert max(sent) <= ring // ranks  # and no rank sends more than in a ring


def summed_counts(layout: Layout) -> dict[int, torch.Tensor]:
    exchange = exchange_of_this_rank()
    values = {s.doc: torch.tensor([s.doc, 10**exchange.rank]) for s in layout.shard(exchange.rank)}
    sum_over_holders(values, layout, exchange)
    return values


def test_documents_are_summed_over_the_ranks_that_hold_them(ranks4: RankPool):
    layout = Layout(
        {0: [Segment(0, 0, 2)], 1: [Segment(0, 2, 4), Segment(1, 0, 3)], 2: [Segment(2, 0, 1)], 3: [Segment(0, 4, 5)]}
    )
    counts = [{doc: value.tolist() for doc, value in rank.items()} for rank in ranks4.run(summed_counts, layout)]
    assert counts == [{0: [0, 1011]}, {0: [0, 1011], 1: [1, 10]}, {2: [2, 100]}, {0: [0, 1011]}]


def refusal(layout: Layout, tokens: int) -> str:
    try:
        layout_attention(*(torch.ones(tokens, 2, 16) for _ in range(3)), layout, exchange_of_this_rank())
    except LayoutError as error:
        return str(error)
    return ""


def test_a_layout_of_another_world_is_refused_on_every_rank(ranks2: RankPool):
    layout = Layout({0: [Segment(0, 0, 4)], 1: [Segment(1, 0, 4)], 5: [Segment(2, 0, 4)]})
    for message in ranks2.run(refusal, layout, 4):
        assert "planned for rank 5 too, but there are 2 ranks (0 to 1)" in message


def test_dtypes_that_differ_and_slopes_that_learn_are_refused():
    layout = Layout({0: [Segment(0, 0, 4)]})
    q, k = torch.ones(4, HEADS, HEAD_DIM), torch.ones(4, KV_HEADS, HEAD_DIM)
    with pytest.raises(ValueError, match=r"k torch.float64 on cpu, v torch.float32 on cpu: they must agree"):
        layout_attention(q, k.double(), k, layout)
    with pytest.raises(ValueError, match="alibi_slopes require a gradient, which is not computed"):
        layout_attention(q, k, k, layout, alibi_slopes=torch.ones(HEADS, requires_grad=True))


def groups_refused() -> str:
    try:
        Exchange(groups=[[0, 1, 3], [2]], ranks_per_node=2)
    except ValueError as error:
        return str(error)
    return ""


def ranks_of_a_node(groups: list[list[int]], ranks_per_node: int) -> tuple[int, int, int]:
    exchange = Exchange(groups=groups, ranks_per_node=ranks_per_node)
    return exchange.rank, exchange.world_size, exchange.ranks_per_node


def test_groups_of_an_exchange_know_their_nodes(ranks4: RankPool):
    """Ranks 0 and 1 are one node, 2 and 3 another."""
    assert ranks4.run(ranks_of_a_node, [[0, 2], [1, 3]], 2) == [(0, 2, 1), (0, 2, 1), (1, 2, 1), (1, 2, 1)]
    assert ranks4.run(ranks_of_a_node, [[0, 1], [2, 3]], 2) == [(0, 2, 2), (1, 2, 2), (0, 2, 2), (1, 2, 2)]
    assert ranks4.run(ranks_of_a_node, [[0, 1, 2, 3]], 2) == [(rank, 4, 2) for rank in range(4)]


def test_groups_that_do_not_hold_every_rank_once_are_refused(ranks2: RankPool):
    for message in ranks2.run(groups_refused):
        assert "groups=[[0, 1, 3], [2]] must hold each of the ranks 0 to 1 exactly once" in message


def test_wrong_shapes_are_refused():
    layout = Layout({0: [Segment(0, 0, 4)]})
    q, k = torch.ones(4, HEADS, HEAD_DIM), torch.ones(4, KV_HEADS, HEAD_DIM)
    with pytest.raises(LayoutError, match=r"rank 0 holds 4 tokens of this layout, but q has 3"):
        layout_attention(q[:3], k[:3], k[:3], layout)
    with pytest.raises(ValueError, match=r"4 query heads are no multiple of 3 key/value heads \(4 = 1 \* 3 \+ 1\)"):
        layout_attention(q, torch.ones(4, 3, HEAD_DIM), torch.ones(4, 3, HEAD_DIM), layout)
    with pytest.raises(ValueError, match=r"must be \[4, Hq, D\], \[4, Hkv, D\], \[4, Hkv, Dv\]: 4 tokens of the shard"):
        layout_attention(q, k, k[:, :1], layout)
    with pytest.raises(LayoutError, match=r"spans ranks \[0, 1\]: running it needs an Exchange"):
        layout_attention(q, k, k, Layout(zigzag(0, 8, (0, 1))))


def traffic(layout: Layout, ranks_per_node: int, keep_last_slice: bool) -> tuple[int, int, list[torch.Tensor]]:
    """Bytes that one rank sends forward and backward: all, and between nodes; and the results."""
    exchange = worker_state.setdefault("nodes", {}).get(ranks_per_node)
    if exchange is None:
        exchange = worker_state["nodes"][ranks_per_node] = Exchange(ranks_per_node=ranks_per_node)
    rows = memory_rows(layout, exchange.rank)
    q, k, v, grad = (x[rows] for x in tensors(sum(layout.doc_lengths.values()), torch.float64, "cpu"))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    sent, between = exchange.bytes_sent, exchange.bytes_between_nodes
    out = layout_attention(*leaves, layout, exchange, keep_last_slice=keep_last_slice)
    results = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    return exchange.bytes_sent - sent, exchange.bytes_between_nodes - between, results


def test_a_slice_crosses_to_a_node_once_and_is_relayed_there(ranks4: RankPool):
    """A pretended topology of 2 nodes of 2 ranks, against 4 nodes of 1: the same bytes in all, fewer between nodes.

    400 tokens in zigzag chunks of 50, rank r holds chunks r and 7-r. Rank 2 (chunks 2, 5) needs 0, 1, 3, 4; rank 3 (chunks
    3, 4) needs 0, 1, 2. The second node needs chunks 0 and 1 of the first: 2 cross once, not twice. Rank 0 (0, 7) needs
    2, 5, 3, 4 of the second node, rank 1 (1, 6) too: 4 cross, not 8. Backward sends as many again, and as many gradients.
    """
    layout = Layout(zigzag(0, 400, range(4)))
    chunk = 50 * 2 * KV_HEADS * HEAD_DIM * 8
    relayed, direct = (ranks4.run(traffic, layout, ranks_per_node, False) for ranks_per_node in (2, 1))
    assert sum(between for _, between, _ in relayed) == 3 * (2 + 4) * chunk
    assert sum(between for _, between, _ in direct) == sum(sent for sent, _, _ in direct)
    crossing = 3 * (2 + 2 + 4 + 4) * chunk
    inside = sum(sent for sent, _, _ in direct) - crossing
    assert sum(sent - between for sent, between, _ in relayed) == inside + crossing // 2
    assert sum(sent for sent, _, _ in relayed) == sum(sent for sent, _, _ in direct)
    for (_, _, ours), (_, _, theirs) in zip(relayed, direct):
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ranks_per_node", [1, 2])
def test_the_slice_kept_does_not_travel_again(ranks4: RankPool, ranks_per_node: int):
    layout = Layout(zigzag(0, 400, range(4)))
    kept, again = (ranks4.run(traffic, layout, ranks_per_node, keep) for keep in (True, False))
    last = [
        sum(send.tokens for send in schedule(layout, rank, ranks_per_node=ranks_per_node).rounds[-1].sends)
        for rank in range(4)
    ]
    assert sum(last) > 0
    for rank in range(4):
        assert again[rank][0] - kept[rank][0] == last[rank] * 2 * KV_HEADS * HEAD_DIM * 8
        for a, b in zip(kept[rank][2], again[rank][2]):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def saved_for_backward(layout: Layout, keep_last_slice: bool) -> tuple[int, int]:
    """Bytes that autograd keeps, and bytes of the rank's own q, k, v and out with lse."""
    exchange = exchange_of_this_rank()
    rows = memory_rows(layout, exchange.rank)
    q, k, v, _ = (x[rows] for x in tensors(sum(layout.doc_lengths.values()), torch.float32, "cpu"))
    kept: dict[int, int] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        layout_attention(*(x.requires_grad_() for x in (q, k, v)), layout, exchange, keep_last_slice=keep_last_slice)
    return sum(kept.values()), 2 * q.nbytes + k.nbytes + v.nbytes + q.shape[0] * HEADS * 4


@pytest.mark.parametrize("ulysses", [1, 2, 4])
def test_backward_keeps_local_tensors_only(ranks4: RankPool, ulysses: int):
    """And the last slice, where that is asked for. Ulysses of 4 computes each of the 2 key/value heads on 2 ranks."""
    layout = Layout(zigzag(0, 512, range(4)), ulysses)
    replicated = max(1, ulysses // KV_HEADS)
    for saved, own in ranks4.run(saved_for_backward, layout, False):
        own_kv = 2 * layout.tokens(0) * KV_HEADS * HEAD_DIM * 4
        assert saved == own + (replicated - 1) * own_kv
    if ulysses == 1:
        for rank, (saved, own) in enumerate(ranks4.run(saved_for_backward, layout, True)):
            arrived = sum(receive.tokens for receive in schedule(layout, rank).rounds[-1].receives)
            assert saved - own == arrived * 2 * KV_HEADS * HEAD_DIM * 4 > 0


def sent_for_uneven_heads(ulysses: int) -> int:
    exchange = exchange_of_this_rank()
    layout = Layout(zigzag(0, 400, range(4)), ulysses)
    tokens = layout.tokens(exchange.rank)
    q, k, v = (torch.ones(tokens, heads, HEAD_DIM, requires_grad=True) for heads in (24, 3, 3))
    before = exchange.bytes_sent
    layout_attention(q, k, v, layout, exchange).sum().backward()
    return exchange.bytes_sent - before


def test_heads_shared_unevenly_are_sent_once_between_groups(ranks4: RankPool):
    """24 query heads over 3 key/value heads: at a degree of 2, ranks read heads 0 1 and 1 2. Each row of k and v goes to
    one other rank of its group, head 0 or 2 with head 1; between the groups, as in the direct exchange of 2 ranks, travel
    3 of 4 chunks of 2 heads; backward sends as much as keys and values, and as many gradients."""
    row = HEAD_DIM * 4
    inner_q = 400 * 12 * row  # what of q leaves its rank; the same of out, and of their gradients
    inner_kv = 2 * 400 * 2 * row
    outer_kv = 2 * (3 * 100) * 2 * 2 * row
    assert sum(ranks4.run(sent_for_uneven_heads, 2)) == 4 * inner_q + 2 * inner_kv + 3 * outer_kv


def test_rows_that_lie_apart_in_memory_are_read_rightly():
    layout = Layout({0: [Segment(0, 0, 20), Segment(1, 0, 5)]})
    given = tensors(25, torch.float32, "cpu")
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
    assert apart[0].stride(-1) != 1
    torch.testing.assert_close(layout_attention(*apart[:3], layout), layout_attention(*given[:3], layout))


def test_second_derivatives_are_refused():
    q, k, v, _ = (x.requires_grad_() for x in tensors(8, torch.float64, "cpu"))
    out = layout_attention(q, k, v, Layout({0: [Segment(0, 0, 8)]}), kernel="reference")
    with pytest.raises(RuntimeError, match="create_graph=True: second derivatives of attention"):
        torch.autograd.grad(out.sum(), q, create_graph=True)


def under_autocast(layout: Layout, kernel: str) -> torch.Tensor:
    exchange = exchange_of_this_rank()
    q, k, v, grad = (x[memory_rows(layout, exchange.rank)] for x in tensors(50, torch.float32, "cpu"))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", torch.bfloat16):
        out = layout_attention(*leaves, layout, exchange, kernel=kernel)
    return torch.cat([x.flatten() for x in (out.detach(), *torch.autograd.grad(out, leaves, grad))])


@pytest.mark.parametrize("ulysses", [1, 2])
def test_autocast_does_not_reach_into_a_kernel(ranks2: RankPool, ulysses: int):
    layout = Layout(zigzag(0, 50, range(2)), ulysses)
    for slow, fast in zip(*(ranks2.run(under_autocast, layout, kernel) for kernel in ("reference", "cpu_flash"))):
        torch.testing.assert_close(slow, fast, rtol=1e-5, atol=1e-5)
