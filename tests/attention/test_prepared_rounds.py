"""What the host does for a round, after the first layer: nothing is prepared again, and few operations are issued. Exactness
is held by test_engine.py, the order of messages by test_replay.py, buffers by test_buffers.py."""

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_longctx import Layout, Segment, zigzag
from hf_longctx.attention.engine import layout_attention
from hf_longctx.attention.kernels import KERNELS
from hf_longctx.attention.prepared_rounds import _within
from hf_longctx.layouts.exchange_schedule import schedule
from tests.worlds.replay import Case, WithoutArithmetic, WrittenDown

RANKS, RANK, TOKENS = 16, 5, 16


class Prepared(WrittenDown):
    """Counts batches that are prepared."""

    count = 0

    def prepare(self, *messages: Any, **options: Any) -> Any:
        self.count += 1
        return super().prepare(*messages, **options)


class Counted(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def layer(layout: Layout, exchange: Prepared, keep_last_slice: bool = False) -> None:
    KERNELS.setdefault(WithoutArithmetic.name, WithoutArithmetic())
    q, k, v = (torch.zeros(layout.tokens(RANK), heads, 8, requires_grad=True) for heads in (4, 2, 2))
    options: Any = {"kernel": WithoutArithmetic.name, "keep_last_slice": keep_last_slice}
    layout_attention(q, k, v, layout, exchange, **options).backward(torch.zeros_like(q))


@pytest.mark.parametrize("ranks_per_node", [4, RANKS])
@pytest.mark.parametrize("keep_last_slice", [False, True])
def test_layers_after_the_first_prepare_nothing(keep_last_slice: bool, ranks_per_node: int):
    layout = Layout(zigzag(0, RANKS * TOKENS, range(RANKS)))
    exchange = Prepared(Case(RANKS, ranks_per_node), RANK)
    counts = []
    for _ in range(4):
        layer(layout, exchange, keep_last_slice)
        counts.append(exchange.count)
    assert counts[0] > RANKS
    # What is kept until backward arrives in tensors of its own: that one batch is made each time.
    again = [after - before for before, after in pairwise(counts[1:])]
    assert again == [int(keep_last_slice)] * 2
    batches = len(exchange.batches) // 4
    assert [batch.sends for batch in exchange.batches[:batches]] == [
        batch.sends for batch in exchange.batches[-batches:]
    ]


def test_a_round_issues_few_operations():
    """Views are of rows that leave, keys and values, in both passes, and of sums of gradients that come back. Queries are cut
    out once for all rounds, and the log-sum-exp of backward is copied once."""
    layout = Layout(zigzag(0, RANKS * TOKENS, range(RANKS)))
    exchange = Prepared(Case(RANKS, RANKS), RANK)
    layer(layout, exchange), layer(layout, exchange)
    with Counted() as counted:
        layer(layout, exchange)
    rounds = RANKS - 1
    assert counted.operations["lerp_"] == counted.operations["sigmoid_"] == rounds
    assert counted.operations["clone"] <= 1
    assert counted.operations["slice"] <= 6 * rounds + 20
    assert counted.operations.total() <= 28 * rounds


def test_rows_of_blocks_are_cut_out_only_where_they_are_one_run():
    # Rank 1 of a zigzag sees all of rank 0's first part from both of its parts, and its last part from none.
    layout = Layout(zigzag(0, 32, range(2)))
    [first] = schedule(layout, 1).rounds[0].receives
    rows, blocks = _within(first.blocks)
    assert rows == (first.blocks[0].q_start, first.blocks[-1].q_stop)
    assert blocks[0].q_start == 0
    assert blocks.in_flight == first.blocks.in_flight
    assert _within(first.blocks)[1] is blocks, "once"
    # Documents 0 and 2 are shared, document 1 between them is whole: its rows see nothing of the other rank.
    shared = {0: [Segment(0, 0, 4), Segment(2, 0, 4)], 1: [Segment(0, 4, 8), Segment(1, 0, 4), Segment(2, 4, 8)]}
    [apart] = schedule(Layout(shared), 1).rounds[0].receives
    assert _within(apart.blocks) == ((), apart.blocks)
