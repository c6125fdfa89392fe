"""Buffers that messages travel in: how many there are, and that what was in them before is never read."""

import gc
import weakref
from typing import Any

import pytest
import torch

from hf_longctx import Layout, zigzag
from hf_longctx.attention import direct
from hf_longctx.attention.buffers import Buffers
from hf_longctx.attention.engine import layout_attention
from hf_longctx.attention.kernels.accumulate import RowSum
from hf_longctx.attention.virtual_ranks import run_on_virtual_ranks

CPU = torch.device("cpu")


class Schedule:
    """Stands in for one: what is prepared lives as long."""


def test_a_piece_is_used_again_and_one_too_small_is_replaced_with_all_that_refers_to_it():
    buffers, schedule, other = Buffers(), Schedule(), Schedule()
    small, large = buffers.piece(0, 3, torch.float32, CPU), buffers.piece(1, 9, torch.float32, CPU)
    assert (len(small), len(large), buffers.made) == (3, 9, 2)
    assert buffers.piece(0, 2, torch.float32, CPU) is small
    assert buffers.piece(0, 2, torch.bfloat16, CPU).dtype is torch.bfloat16
    made: list[str] = []
    for _ in range(2):
        assert (
            buffers.prepared(schedule, "forward", lambda: made.append("first") or large[:4]).data_ptr()
            == large.data_ptr()
        )
        buffers.prepared(other, "forward", lambda: made.append("second") or ())
        buffers.prepared(other, "backward", lambda: made.append("third") or ())
    assert made == ["first", "second", "third"], "once for each"
    larger = buffers.piece(1, 20, torch.float32, CPU)
    assert (len(larger), buffers.made) == (20, 4)
    buffers.prepared(schedule, "forward", lambda: made.append("again") or ())
    assert made[3:] == ["again"]


def test_memory_is_free_as_soon_as_it_is_replaced_or_its_exchange_is_gone():
    """Views and operations of a message hold its piece; nothing may wait for garbage to be collected."""
    gc.collect()
    gc.disable()
    try:
        buffers, schedules, gone = Buffers(), [Schedule(), Schedule(), Schedule()], []
        for schedule, elements in zip(schedules, (4, 9)):
            piece = buffers.piece(0, elements, torch.float32, CPU)
            buffers.prepared(schedule, "views", lambda piece=piece: [piece[:2], piece])
            gone.append(weakref.ref(piece))
            del piece
        assert gone[0]() is None, "the larger one took its place"
        assert gone[1]() is not None
        of_schedule = weakref.ref(buffers.prepared(schedules[2], "views", lambda: torch.zeros(1)))
        del schedules[2]
        assert of_schedule() is None, "what is prepared for a schedule ends with it"
        del buffers
        assert gone[1]() is None
    finally:
        gc.enable()


def test_an_exchange_without_a_schedule_is_free_at_once():
    """Nothing that is prepared refers to an exchange."""
    gc.collect()
    gc.disable()
    try:
        layout, exchanges = Layout(zigzag(0, 32, range(2))), []

        def layers(exchange: Any) -> None:
            q, k, v = (torch.randn(16, 2, 8, requires_grad=True) for _ in range(3))
            layout_attention(q, k, v, layout, exchange).sum().backward()
            exchanges.append(weakref.ref(exchange.buffers))

        run_on_virtual_ranks(2, layers)
        assert [buffers() for buffers in exchanges] == [None, None]
    finally:
        gc.enable()


def test_a_pass_that_fails_uses_its_buffers_no_more(monkeypatch):
    layout, made = Layout(zigzag(0, 32, range(2))), []

    def fails(*_: Any) -> None:
        raise KeyError("in the middle")

    def layers(exchange: Any) -> None:
        q, k, v = (torch.randn(16, 2, 8) for _ in range(3))
        layout_attention(q, k, v, layout, exchange)
        pieces = exchange.buffers.made
        monkeypatch.setattr(direct, "_local", fails)  # when messages of round 0 are under way
        with pytest.raises(KeyError):
            layout_attention(q, k, v, layout, exchange)
        monkeypatch.undo()
        layout_attention(q, k, v, layout, exchange)
        made.append(exchange.buffers.made - pieces)

    run_on_virtual_ranks(2, layers)
    assert len(made) == 2
    assert all(made)


def test_what_inference_mode_has_made_can_be_written_outside_of_it():
    buffers = Buffers()
    with torch.inference_mode():
        buffers.piece(0, 2, torch.float32, CPU)
    buffers.piece(0, 2, torch.float32, CPU).fill_(1.0)


def test_a_sum_in_a_buffer_does_not_read_what_was_there_nor_keeps_what_is_lent():
    rows = torch.full((5, 1, 2), float("nan"))
    total = RowSum(torch.zeros(1, 1, 2), 5, into=rows)
    total.add(1, 3, torch.ones(2, 1, 2))
    total.add(2, 4, torch.ones(2, 1, 2))
    assert total.total()[:, 0, 0].tolist() == [0, 1, 2, 1, 0]
    assert total.total().data_ptr() == rows.data_ptr()
    lent, own = torch.ones(2, 1, 2), RowSum(torch.zeros(2, 1, 2))
    own.add(0, 2, lent, lent=True)
    lent.fill_(7.0)
    assert own.total()[:, 0, 0].tolist() == [1, 1]


@pytest.mark.parametrize("ranks_per_node", [4, 2])
@pytest.mark.parametrize("keep_last_slice", [False, True])
def test_layers_of_any_number_need_as_many_buffers_as_one(keep_last_slice: bool, ranks_per_node: int):
    # Of four ranks in one node: received and in use, in flight, sent; gradients summed, sent, received.
    layout = Layout(zigzag(0, 512, range(4)))

    def layers(exchange: Any) -> list[int]:
        tokens, made = layout.tokens(exchange.rank), []
        for _ in range(4):
            q, k, v = (torch.randn(tokens, 2, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
            layout_attention(q, k, v, layout, exchange, keep_last_slice=keep_last_slice).sum().backward()
            made.append(exchange.buffers.made)
        return made

    for first, *others in run_on_virtual_ranks(4, layers, ranks_per_node=ranks_per_node):
        assert others == [first] * 3
        assert first <= (6 if ranks_per_node == 4 else 9)
