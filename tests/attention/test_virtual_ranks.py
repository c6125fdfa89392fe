"""Virtual ranks: threads of this process give what one rank gives, fail like ranks, and do not hang.

Attention is compared in float64 with one rank that holds every document whole: 1e-12 of the largest element, or of 1. Models are
compared with plain transformers on each document alone: 1e-10 of a parameter's largest gradient.
"""

import contextvars
import functools
import itertools
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from hf_longctx import patch_model, prefill, score
from hf_longctx.attention.engine import layout_attention
from hf_longctx.attention.exchange import Exchange, sum_over_holders
from hf_longctx.attention.replicas import add_gradients, replicate
from hf_longctx.attention.virtual_ranks import DeadlockError, run_on_virtual_ranks
from hf_longctx.layouts.layout import Layout, Segment, zigzag
from tests.builders.plain_reference import reference_loss
from tests.builders.plans.random_layouts import layouts
from tests.builders.tiny_models import FAMILIES, tiny_general

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
PACKED = {
    1: Layout({0: [Segment(0, 20, 37), Segment(1, 0, 9), Segment(0, 0, 20)]}),
    2: Layout(
        {0: [Segment(0, 30, 41), Segment(1, 0, 9), Segment(0, 0, 12)], 1: [Segment(2, 0, 5), Segment(0, 12, 30)]}
    ),
    3: Layout(
        {
            0: [Segment(1, 0, 6), Segment(0, 0, 9)],
            1: [Segment(0, 25, 40), Segment(2, 0, 1)],
            2: [Segment(0, 9, 25), Segment(1, 6, 11)],
        }
    ),
    4: Layout(
        {
            0: [Segment(0, 0, 5), Segment(0, 40, 48), Segment(1, 0, 13)],
            1: [Segment(0, 33, 40), Segment(0, 5, 12), Segment(2, 0, 3)],
            2: [Segment(2, 3, 21), Segment(0, 12, 20)],
            3: [Segment(0, 20, 33), Segment(3, 0, 7)],
        }
    ),
}
"""Ranks -> packed, split and permuted documents over as many."""
WHOLE = Layout({0: [Segment(1, 0, 9), Segment(2, 0, 5)], 1: [Segment(0, 0, 41)]})
"""The documents of two ranks, for layers with a state."""


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


def documents_of(layout: Layout) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(input_ids [T], labels [T]) of each document."""
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 128, (length,), generator=generator) for length in layout.doc_lengths.values()]
    return [
        (document, document.masked_fill(torch.rand(len(document), generator=generator) < 0.2, -100)) for document in ids
    ]


def loss_of(model: Any, layout: Layout, exchange: Exchange, documents: Any) -> torch.Tensor:
    """This rank's part of the loss of one step."""
    shard = layout.shard(exchange.rank)
    following = {s.doc: torch.cat([documents[s.doc][1][1:], torch.tensor([-100])]) for s in shard}
    return model(
        input_ids=torch.cat([documents[s.doc][0][s.start : s.stop] for s in shard])[None],
        shift_labels=torch.cat([following[s.doc][s.start : s.stop] for s in shard])[None],
        layout=layout,
        exchange=exchange,
        num_items_in_batch=sum(int((labels[1:] != -100).sum()) for _, labels in documents),
        num_tokens_in_batch=sum(len(ids) for ids, _ in documents),
    ).loss


def in_another_thread(loss: torch.Tensor) -> None:
    """Backward where CUDA has it: in a thread without this one's context variables."""
    failure: list[BaseException] = []

    def run() -> None:
        try:
            loss.backward()
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failure:
        raise failure[0]


CHECKPOINTING: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "non-reentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
}


@pytest.mark.parametrize(
    ("family", "checkpointing"),
    # Reentrant checkpointing cuts the router's logits off from their graph, on any number of ranks.
    [
        *itertools.product(("llama", "qwen3", "qwen3_next"), ("non-reentrant", "reentrant")),
        *(("llama", "plain"), ("mixtral", "plain"), ("mixtral", "non-reentrant")),
    ],
)
def test_models_on_two_ranks_equal_plain_documents(family: str, checkpointing: str):
    """Llama, and Mixtral with its router loss, as our classes; Qwen3 by its masks, and Qwen3-Next with states. Layers are
    recomputed, and backward runs in another thread, as it does on CUDA: no context variable says there what ran."""
    layout = WHOLE if family == "qwen3_next" else PACKED[2]
    documents = documents_of(layout)
    make = FAMILIES.get(family) or functools.partial(tiny_general, family)
    plain = make(torch.float64)
    plain.set_attn_implementation("sdpa")  # eager attention has its softmax in float32
    right = reference_loss(plain, documents, stock=False)
    right.backward()
    model = patch_model(make(torch.float64)).train()
    if CHECKPOINTING[checkpointing] is not None:
        model.gradient_checkpointing_enable(CHECKPOINTING[checkpointing])
        model.enable_input_require_grads()  # reentrant checkpointing begins with a tensor that learns
    copies = replicate(model, 2)

    def step(exchange: Exchange) -> torch.Tensor:
        loss = loss_of(copies[exchange.rank], layout, exchange, documents)
        loss.backward() if checkpointing == "plain" else in_another_thread(loss)
        return loss.detach()

    loss = sum(run_on_virtual_ranks(2, step))
    add_gradients(model, copies)
    rounding = 1e-7 if family == "qwen3_next" else 1e-10  # its states are float32
    assert abs(float(loss - right.detach())) <= 1e-2 * rounding * float(right.detach())
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        error = (ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max()
        assert float(error) <= rounding, f"{name}: {float(error):.1e}"


def test_replicas_share_weights_and_nothing_else():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model.append(torch.nn.Linear(2, 2, bias=False))
    model[2].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    copies = replicate(model, 2)
    for rank, replica in enumerate(copies):
        assert replica[2].weight is replica[0].weight
        assert replica[0].weight.data_ptr() == model[0].weight.data_ptr()
        replica(torch.full((3, 2), float(rank + 1))).sum().backward()
        replica[0].weight.grad = torch.full((2, 2), float(rank + 1))
    assert float(model[1].num_batches_tracked) == 0
    assert float(copies[0][1].num_batches_tracked) == 1
    model[0].weight.grad = torch.ones(2, 2)
    add_gradients(model, copies)
    assert model[0].weight.grad.tolist() == [[4.0, 4.0], [4.0, 4.0]]
    assert model[0].bias.grad is None
    assert copies[0][0].weight.grad is None


def test_parameters_whose_memory_cannot_be_shared_are_refused():
    class Quantised(torch.nn.Parameter):
        pass

    model = torch.nn.Linear(2, 2)
    model.weight = Quantised(torch.ones(2, 2))
    with pytest.raises(ValueError, match="weight is a Quantised, whose memory copies cannot share"):
        replicate(model, 2)


def test_scores_and_a_prompt_over_ranks():
    """Return what else takes an exchange: log-probabilities and a cache equal those of one process."""
    model = patch_model(FAMILIES["llama"](torch.float64))
    documents = [ids for ids, _ in documents_of(PACKED[2])]

    def run(exchange: Exchange | None) -> tuple[Any, Any]:
        logits, _ = prefill(model, documents[0], exchange=exchange)
        return score(model, documents, exchange=exchange, capacity=32 if exchange else None), logits

    alone = run(None)
    for scores, logits in run_on_virtual_ranks(2, run):
        for ours, right in zip(scores, alone[0], strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(logits, alone[1], rtol=1e-10, atol=1e-10)


def test_every_holder_sums_a_document():
    def summed(exchange: Exchange) -> dict[int, list[int]]:
        values = {doc: torch.tensor([10**exchange.rank]) for doc in {s.doc for s in PACKED[3].shard(exchange.rank)}}
        sum_over_holders(values, PACKED[3], exchange)
        return {doc: value.tolist() for doc, value in values.items()}

    assert run_on_virtual_ranks(3, summed) == [{0: [111], 1: [101]}, {0: [111], 2: [10]}, {0: [111], 1: [101]}]


def send(exchange: Exchange, value: float, to: int) -> Any:
    return exchange.start([(torch.full((2,), value), to)], [])


def receive(exchange: Exchange, source: int, **settings: Any) -> torch.Tensor:
    arrived = torch.empty(2)
    exchange.start([], [(arrived, source)], **settings).wait()
    return arrived


def test_a_buffer_may_be_written_once_its_send_is_complete():
    def run(exchange: Exchange) -> list[float]:
        if exchange.rank == 0:
            buffer = torch.zeros(2)
            for value in (1.0, 2.0, 3.0):
                buffer.fill_(value)
                exchange.start([(buffer, 1)], []).wait()
            return []
        return [float(receive(exchange, 0)[0]) for _ in range(3)]

    assert run_on_virtual_ranks(2, run)[1] == [1.0, 2.0, 3.0]


def test_the_first_failure_is_raised_and_the_others_leave():
    left = []

    def run(exchange: Exchange) -> None:
        try:
            if exchange.rank == 1:
                raise KeyError("planted")
            receive(exchange, 1)
        finally:
            left.append(exchange.rank)

    with pytest.raises(KeyError, match="planted") as raised:
        run_on_virtual_ranks(3, run)
    assert raised.value.__notes__ == ["This was raised on virtual rank 1 of 3."]
    assert sorted(left) == [0, 1]  # rank 2 had not begun
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("virtual rank")]


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


def test_a_deadlock_is_named_at_once():
    def run(exchange: Exchange) -> None:
        if exchange.rank < 2:
            receive(exchange, 1 - exchange.rank, gradients=exchange.rank == 1)

    with pytest.raises(DeadlockError) as raised:
        run_on_virtual_ranks(3, run, ranks_per_node=1)
    assert str(raised.value) == (
        "no virtual rank can go on: rank 0 waits to receive float32 [2] from rank 1; "
        "rank 1 waits to receive float32 [2] (gradients) from rank 0; rank 2 ended"
    )


def test_a_send_waits_for_its_receive():
    """Two ranks that both send first, each in a batch of its own, meet on gloo's small messages only by luck."""

    def run(exchange: Exchange) -> torch.Tensor:
        send(exchange, 1.0, 1 - exchange.rank).wait()
        return receive(exchange, 1 - exchange.rank)

    with pytest.raises(DeadlockError, match=r"rank 0 waits to send float32 \[2\] to rank 1; rank 1 waits to send"):
        run_on_virtual_ranks(2, run)


def test_operations_of_one_direction_run_in_order():
    """Rank 0 sends to 1, then to 2; rank 2 must hear from it before it sends to 1, for which 1 waits first: NCCL hangs."""

    def run(exchange: Exchange) -> None:
        if exchange.rank == 0:
            pending = [send(exchange, 1.0, 1), send(exchange, 2.0, 2)]
            for operation in reversed(pending):
                operation.wait()
        elif exchange.rank == 1:
            receive(exchange, 2)
            receive(exchange, 0)
        else:
            receive(exchange, 0)
            send(exchange, 3.0, 1).wait()

    with pytest.raises(
        DeadlockError, match=r"rank 0 waits to send .* to rank 1, which it started before what it waits for"
    ):
        run_on_virtual_ranks(3, run)


def test_the_two_directions_between_nodes_do_not_wait_for_each_other():
    """Inside a node they share a group, in which a rank's messages run in order."""

    def run(exchange: Exchange) -> list[float]:
        if exchange.rank == 0:
            forward = torch.empty(2)
            pending = exchange.start([], [(forward, 1)])
            gradients = receive(exchange, 1, gradients=True)
            pending.wait()
            return [float(forward[0]), float(gradients[0])]
        exchange.start([(torch.full((2,), 5.0), 0)], [], gradients=True).wait()
        send(exchange, 4.0, 0).wait()
        return []

    assert run_on_virtual_ranks(2, run, ranks_per_node=1)[0] == [4.0, 5.0]
    with pytest.raises(DeadlockError, match=r"which it started before what it waits for"):
        crossed_inside_a_node()


def crossed_inside_a_node() -> None:
    """Rank 0 starts to receive keys and then waits for gradients; rank 1 sends these first, of another size."""

    def run(exchange: Exchange) -> None:
        if exchange.rank == 0:
            exchange.start([], [(torch.empty(2), 2)])
            receive(exchange, 1, gradients=True)
        elif exchange.rank == 1:
            exchange.start([(torch.full((2,), 5.0), 0)], [], gradients=True).wait()
            send(exchange, 4.0, 2).wait()
        else:
            receive(exchange, 1)
            send(exchange, 4.0, 0).wait()

    run_on_virtual_ranks(3, run)


def test_messages_left_behind_are_named():
    def run(exchange: Exchange) -> None:
        if exchange.rank == 0:
            send(exchange, 1.0, 1)

    with pytest.raises(RuntimeError, match=r"left messages behind: rank 0 still had to send float32 \[2\] to rank 1"):
        run_on_virtual_ranks(2, run)


@pytest.mark.parametrize(
    ("operations", "match"),
    [
        (lambda rank: ([(torch.ones(3), 1)], []), r"rank 0 sends float32 \[3\] where rank 1 expects float32 \[2\]"),
        (lambda rank: ([(torch.ones(2).double(), 1)], []), r"sends float64 \[2\] where rank 1 expects float32"),
        (lambda rank: ([(torch.ones(2), 0)], []), r"rank 0 exchanges a message with rank 0; valid are .* \[1\]"),
        (lambda rank: ([(torch.ones(2), 2)], []), "rank 0 exchanges a message with rank 2"),
        (lambda rank: ([(torch.ones(2, 2).t(), 1)], []), "must be contiguous and on cpu"),
        (lambda rank: ([(torch.ones(2, device="meta"), 1)], []), "must be contiguous and on cpu"),
    ],
)
def test_messages_that_cannot_travel_are_refused(operations: Any, match: str):
    def run(exchange: Exchange) -> None:
        exchange.start(*operations(0)).wait() if exchange.rank == 0 else receive(exchange, 0)

    with pytest.raises(ValueError, match=match):
        run_on_virtual_ranks(2, run)


def test_worlds_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="world_size=0: there is at least one virtual rank"):
        run_on_virtual_ranks(0, print)
    with pytest.raises(ValueError, match="ranks_per_node=0: a node has at least one rank"):
        run_on_virtual_ranks(2, print, ranks_per_node=0)


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
