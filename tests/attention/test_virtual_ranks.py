"""Virtual ranks: threads of this process give what one rank gives, each with the caller's state and its own random numbers.

Attention is compared in float64 with one rank that holds every document whole: 1e-12 of the largest element, or of 1.
"""

import contextvars
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hf_longctx.attention.engine import layout_attention
from hf_longctx.attention.exchange import Exchange, sum_over_holders
from hf_longctx.attention.virtual_ranks import run_on_virtual_ranks
from hf_longctx.layouts.layout import Layout, Segment, zigzag
from tests.builders.plans.packed_layouts import PACKED
from tests.builders.plans.random_layouts import layouts

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def whole(layout: Layout) -> Layout:
    """The same documents on one rank, in order."""
    return Layout({0: [Segment(doc, 0, length) for doc, length in layout.doc_lengths.items()]})


def rows_of(layout: Layout, rank: int) -> torch.Tensor:
    """Rows of a rank's tokens in the layout's documents laid end to end."""
    first, start = {}, 0
    for doc, length in layout.doc_lengths.items():
        first[doc], start = start, start + length
    return torch.cat([torch.arange(first[s.doc] + s.start, first[s.doc] + s.stop) for s in layout.shard(rank)])


def tensors(layout: Layout) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output, float64 [T, heads, D], of all documents end to end."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(layout.doc_lengths.values())
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(tokens, count, HEAD_DIM, generator=generator, dtype=torch.float64) for count in heads]


def attend(layout: Layout, exchange: Exchange | None, **settings: Any) -> list[torch.Tensor]:
    """out, dq, dk, dv of one rank's rows."""
    rank = 0 if exchange is None else exchange.rank
    if rank not in layout.ranks:
        return []
    q, k, v, grad = (x[rows_of(layout, rank)] for x in tensors(layout))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = layout_attention(*leaves, layout, exchange, **settings)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def check_attention(layout: Layout, world_size: int, ranks_per_node: int | None = None, **settings: Any) -> None:
    keep = settings.pop("keep_last_slice", False)
    expected = attend(whole(layout), None, kernel="reference", **settings)
    results = run_on_virtual_ranks(
        world_size,
        lambda exchange: attend(layout, exchange, keep_last_slice=keep, **settings),
        ranks_per_node=ranks_per_node,
    )
    for rank in layout.ranks:
        for ours, right in zip(results[rank], expected):
            error = (ours - right[rows_of(layout, rank)]).abs().max() / right.abs().max().clamp_min(1.0)
            assert float(error) <= 1e-12, f"rank {rank}: {float(error):.1e}"


KINDS = {
    "causal": {},
    "window": {"window": 7},
    "alibi": {"alibi_slopes": 2.0 ** -torch.arange(1.0, HEADS + 1, dtype=torch.float64)},
    "kept slice": {"keep_last_slice": True},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_attention_over_ranks_equals_one_rank(world_size: int, kind: str):
    check_attention(PACKED[world_size], world_size, **KINDS[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_ulysses_and_relays_equal_one_rank(kind: str):
    check_attention(Layout(PACKED[2].shards, 2), 2, **KINDS[kind])
    check_attention(Layout(PACKED[4].shards, 2), 4, **KINDS[kind])
    check_attention(PACKED[4], 4, ranks_per_node=2, **KINDS[kind])


@settings(max_examples=max(15, settings().max_examples // 10))
@given(layout=layouts(range(4), heads=HEADS), window=st.sampled_from([None, 5]), keep=st.booleans())
def test_any_layout_equals_one_rank(layout: Layout, window: int | None, keep: bool):
    check_attention(layout, 4, window=window, keep_last_slice=keep)


def test_bytes_are_counted_as_on_real_ranks():
    """400 tokens in zigzag over 4 ranks; test_engine.py derives these numbers for gloo ranks: 2 nodes get 4 chunks less each."""
    layout = Layout(zigzag(0, 400, range(4)))

    def traffic(exchange: Exchange) -> tuple[int, int]:
        attend(layout, exchange)
        return exchange.bytes_sent, exchange.bytes_between_nodes

    chunk = 50 * 2 * KV_HEADS * HEAD_DIM * 8
    counted = run_on_virtual_ranks(4, traffic, ranks_per_node=2)
    assert sum(between for _, between in counted) == 3 * (2 + 4) * chunk


def test_every_holder_sums_a_document():
    def summed(exchange: Exchange) -> dict[int, list[int]]:
        values = {doc: torch.tensor([10**exchange.rank]) for doc in {s.doc for s in PACKED[3].shard(exchange.rank)}}
        sum_over_holders(values, PACKED[3], exchange)
        return {doc: value.tolist() for doc, value in values.items()}

    assert run_on_virtual_ranks(3, summed) == [{0: [111], 1: [101]}, {0: [111], 2: [10]}, {0: [111], 1: [101]}]


VARIABLE: contextvars.ContextVar[str] = contextvars.ContextVar("VARIABLE")


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.Tensor.neg else result


def state(exchange: Exchange) -> dict[str, Any]:
    """Return what torch and Python keep for each thread, before and after another rank had a turn in between."""
    other = 1 - exchange.rank
    exchange.start([(torch.ones(2), other)], [(torch.empty(2), other)]).wait()
    return {
        "variable": VARIABLE.get(None),
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": (torch.ones(2, 2) @ torch.ones(2, 2)).dtype,
        "mode": float(torch.ones(()).neg()),
        "multithreading": torch.autograd.is_multithreading_enabled(),
    }


def test_ranks_begin_with_the_callers_state():
    plain = {
        "variable": None,
        "grad": True,
        "inference": False,
        "autocast": torch.float32,
        "mode": -1.0,
        "multithreading": False,
    }
    assert run_on_virtual_ranks(2, state) == [plain] * 2
    token = VARIABLE.set("set")
    try:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Doubling():
            expected = plain | {"variable": "set", "grad": False, "autocast": torch.bfloat16, "mode": -2.0}
            assert run_on_virtual_ranks(2, state) == [expected] * 2
    finally:
        VARIABLE.reset(token)
    with torch.inference_mode():
        assert run_on_virtual_ranks(2, state) == [plain | {"grad": False, "inference": True}] * 2
    assert torch.autograd.is_multithreading_enabled()
    assert torch.overrides._get_current_function_mode_stack() == []


def test_modes_of_dispatch_and_devices_reach_every_rank():
    with FlopCounterMode(display=False) as counter:
        run_on_virtual_ranks(3, lambda exchange: torch.ones(2, 3) @ torch.ones(3, 4))
    assert counter.get_total_flops() == 3 * 2 * 2 * 3 * 4
    with torch.device("meta"):
        assert {x.device.type for x in run_on_virtual_ranks(2, lambda exchange: torch.ones(1))} == {"meta"}
    assert torch.get_default_device() == torch.device("cpu")


def test_each_rank_draws_as_a_process_of_its_own():
    """Recomputation sets and restores the generator: with one for all, ranks would scramble each other's dropout."""

    def run(exchange: Exchange) -> tuple[torch.Tensor, torch.Tensor]:
        def layer(x: torch.Tensor) -> torch.Tensor:
            x = torch.nn.functional.dropout(x)
            receive_and_send(exchange)
            return torch.nn.functional.dropout(x) * x.detach()

        x = torch.ones(50, requires_grad=True)
        checkpoint(layer, x, use_reentrant=False).sum().backward()
        return x.grad, torch.rand(3)

    torch.manual_seed(7)
    alone = run_on_virtual_ranks(1, run)[0]
    ranks = run_on_virtual_ranks(3, run)
    after = torch.rand(3)
    torch.manual_seed(7)
    assert torch.equal(torch.rand(3), after)  # the caller's state is as it was
    for rank in ranks:
        assert all(map(torch.equal, rank, alone))


def receive_and_send(exchange: Exchange) -> None:
    """A ring: to the next rank, from the one before; nothing where there is one rank."""
    if exchange.world_size > 1:
        to, source = (exchange.rank + 1) % exchange.world_size, (exchange.rank - 1) % exchange.world_size
        exchange.start([(torch.ones(2), to)], [(torch.empty(2), source)]).wait()


def test_a_failure_in_backward_is_raised_and_ends_the_backward_of_others():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ArithmeticError("planted in backward")

    layout = PACKED[2]

    def run(exchange: Exchange) -> None:
        q, k, v, _ = (x[rows_of(layout, exchange.rank)].requires_grad_() for x in tensors(layout))
        out = layout_attention(q, k, v, layout, exchange)
        (Fails.apply(out) if exchange.rank == 1 else out).sum().backward()

    with pytest.raises(ArithmeticError, match="planted in backward"):
        run_on_virtual_ranks(2, run)


def test_backward_in_the_thread_that_cuda_ranks_share_is_refused():
    """Pretends that this exchange's device is CUDA: on a CPU backward always runs in the calling thread."""

    class Meets(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, exchange):
            ctx.exchange = exchange
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            ctx.exchange.start([], [])
            return grad, None

    def run(exchange: Exchange) -> str:
        out = Meets.apply(torch.ones(2, requires_grad=True), exchange).sum()
        out.backward(retain_graph=True)
        exchange._world.device = torch.device("cuda", 0)
        try:
            out.backward(retain_graph=True)  # in the rank's own thread: allowed
            with torch.autograd.set_multithreading_enabled(True):
                out.backward()
        except RuntimeError as error:
            return str(error)
        finally:
            exchange._world.device = torch.device("cpu")
        return ""

    assert "runs backward in autograd's thread for cuda:0, which all ranks share" in run_on_virtual_ranks(1, run)[0]
