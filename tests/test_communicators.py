"""Which groups an exchange makes, with what options, and which of its messages take them."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hf_longctx.attention import communicators
from hf_longctx.attention.communicators import BETWEEN, BETWEEN_GRADIENTS, CHANNELS_INSIDE, INSIDE, LANES
from hf_longctx.attention.exchange import Exchange
from tests.rank_pool import RankPool


def made(ranks_per_node: int, groups: list[list[int]] | None = None) -> dict[str, list[int]]:
    exchange = Exchange(60.0, ranks_per_node=ranks_per_node, groups=groups)
    return {lane: dist.get_process_group_ranks(group) for lane, group in exchange._communicators.groups.items()}


def test_one_node_has_one_group_and_nodes_of_one_rank_have_none_inside(ranks4: RankPool):
    everyone = [0, 1, 2, 3]
    assert ranks4.run(made, 4) == [{INSIDE: everyone}] * 4
    assert ranks4.run(made, 1) == [{BETWEEN: everyone, BETWEEN_GRADIENTS: everyone}] * 4
    by_node = [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert ranks4.run(made, 2) == [
        {INSIDE: inside, BETWEEN: everyone, BETWEEN_GRADIENTS: everyone} for inside in by_node
    ]


def test_with_tensor_parallelism_each_exchange_has_its_own(ranks4: RankPool):
    ranks = [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert ranks4.run(made, 4, [[0, 2], [1, 3]]) == [{INSIDE: each} for each in ranks]
    assert ranks4.run(made, 2, [[0, 2], [1, 3]]) == [{BETWEEN: each, BETWEEN_GRADIENTS: each} for each in ranks]


def lanes_taken() -> list[tuple[str, int, int]]:
    """(lane, sends, receives) of each batch that rank 0 starts, and bytes that are counted as going to another node."""
    exchange = Exchange(60.0, ranks_per_node=2)
    taken: list[tuple[str, int, int]] = []
    begin = exchange._begin

    def noted(sends: Any, receives: Any, lane: str) -> Any:
        taken.append((lane, len(sends), len(receives)))
        return begin(sends, receives, lane)

    exchange._begin = noted  # type: ignore[method-assign]
    for gradients in (False, True):
        others = [rank for rank in range(4) if rank != exchange.rank]
        arriving = [torch.zeros(2) for _ in others]
        own = torch.full((2,), float(exchange.rank))
        exchange.start([(own, rank) for rank in others], list(zip(arriving, others)), gradients=gradients).wait()
        assert [float(tensor[0]) for tensor in arriving] == others
    return [*taken, ("bytes", exchange.bytes_sent, exchange.bytes_between_nodes)]


def test_messages_inside_a_node_begin_before_those_between_nodes(ranks4: RankPool):
    for rank in ranks4.run(lanes_taken):
        assert rank == [(INSIDE, 1, 1), (BETWEEN, 2, 2), (INSIDE, 1, 1), (BETWEEN_GRADIENTS, 2, 2), ("bytes", 48, 32)]


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl", "gloo"])
def test_nccl_gives_messages_priority_and_few_channels_inside_a_node(backend: str, lane: str, monkeypatch):
    options = SimpleNamespace(config=SimpleNamespace(max_ctas=None), high=None)

    def make(is_high_priority_stream: bool) -> Any:
        options.high = is_high_priority_stream
        return options

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=make), raising=False)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    given = communicators._options(lane)
    if backend == "gloo":
        assert given is None
    else:
        assert given is options
        assert options.high is True
        assert options.config.max_ctas == (CHANNELS_INSIDE if lane == INSIDE else None)
