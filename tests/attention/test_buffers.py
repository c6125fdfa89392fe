"""Buffers that messages travel in: how many there are, and that what was in them before is never read."""

import gc
import weakref
from typing import Any

import pytest
import torch

from hf_longctx import Layout, zigzag
from hf_longctx.attention.buffers import Buffers
from hf_longctx.attention.engine import layout_attention
from hf_longctx.attention.kernels.accumulate import RowSum
from hf_longctx.attention.virtual_ranks import run_on_virtual_ranks

CPU = torch.device("cpu")


def test_a_buffer_is_used_again_and_a_larger_one_takes_the_place_of_the_smallest():
    buffers = Buffers()
    small, large = (buffers.take(elements, torch.float32, CPU, room=4) for elements in (3, 9))
    assert (len(small.flat), small.memory.elements, len(large.flat), large.memory.elements) == (3, 4, 9, 9)
    buffers.give_back([small, large])
    assert buffers.take(4, torch.float32, CPU, room=4).memory is small.memory
    assert buffers.take(1, torch.bfloat16, CPU, room=4).flat.dtype is torch.bfloat16
    buffers.give_back([small])
    assert buffers.take(20, torch.float32, CPU, room=20).memory.elements == 20
    assert buffers.take(4, torch.float32, CPU, room=4).memory is large.memory, "the small one made room"
    assert buffers.made == 4


def test_memory_is_free_as_soon_as_it_is_replaced_or_its_exchange_is_gone():
    """Views and operations of a message hold its buffer; nothing may wait for garbage to be collected."""
    gc.collect()
    gc.disable()
    try:
        buffers, gone = Buffers(), []
        for elements in (4, 9):
            buffer = buffers.take(elements, torch.float32, CPU, room=elements)
            buffer.flat.operations["send"] = (buffer.flat, buffer)  # type: ignore[attr-defined]
            gone.append(weakref.ref(buffer.memory.tensor))
            buffers.give_back([buffer])
            del buffer
        assert gone[0]() is None, "the larger one took its place"
        assert gone[1]() is not None
        del buffers
        assert gone[1]() is None
    finally:
        gc.enable()


def test_what_inference_mode_has_made_can_be_written_outside_of_it():
    buffers = Buffers()
    with torch.inference_mode():
        buffers.give_back([buffers.take(2, torch.float32, CPU, room=2)])
    buffers.take(2, torch.float32, CPU, room=2).flat.fill_(1.0)


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
