"""Which groups an exchange makes, with what options, and which of its messages take them."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from hf_longctx import patch_model, score
from hf_longctx.attention import communicators, groups
from hf_longctx.attention.communicators import BETWEEN, BETWEEN_GRADIENTS, INSIDE
from hf_longctx.attention.exchange import Exchange
from hf_longctx.hardware.nccl import EXCHANGE_CHANNELS
from hf_longctx.parallel.stage_links import Links
from hf_longctx.supervision.progress import Progress
from tests.builders.tiny_models import tiny_llama
from tests.worlds.rank_pool import RankPool


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
    assert ranks4.run(made, 4, [[0, 2], [1, 3]]) == [{INSIDE: group} for group in ranks]
    assert ranks4.run(made, 2, [[0, 2], [1, 3]]) == [{BETWEEN: group, BETWEEN_GRADIENTS: group} for group in ranks]


def met(ranks_per_node: int, meet_all: bool, groups: list[list[int]] | None = None) -> dict[str, list[list[list[int]]]]:
    """Lane -> of each batch that is exchanged while an exchange is made, to whom and from whom."""
    lanes: dict[str, list[list[list[int]]]] = {}
    kept: list[tuple[Any, list[list[int]]]] = []
    exchanged = communicators._exchanged

    def noted(group: Any, to: list[int], source: list[int]) -> None:
        kept.append((group, [list(to), list(source)]))
        exchanged(group, to, source)

    communicators._exchanged = noted
    try:
        exchange = Exchange(60.0, ranks_per_node=ranks_per_node, groups=groups, meet_all=meet_all)
    finally:
        communicators._exchanged = exchanged
    for lane, group in exchange._communicators.groups.items():
        lanes[lane] = [ends for of, ends in kept if of is group]
    return lanes


def test_ranks_of_a_node_meet_when_groups_are_made(ranks4: RankPool):
    assert ranks4.run(met, 4, False)[1] == {INSIDE: [[[0, 2, 3], [0, 2, 3]]]}
    assert ranks4.run(met, 2, False)[1] == {INSIDE: [[[0], [0]]], BETWEEN: [], BETWEEN_GRADIENTS: []}


def test_ranks_of_several_nodes_meet_in_turn_where_that_is_asked_for(ranks4: RankPool):
    turns = [[[2], []], [[3], [3]], [[], [2]]]  # of rank 1, whose node is 0 and 1
    assert ranks4.run(met, 2, True)[1] == {INSIDE: [[[0], [0]]], BETWEEN: turns, BETWEEN_GRADIENTS: turns}
    assert ranks4.run(met, 2, True, [[0, 2], [1, 3]])[3] == {BETWEEN: [[[1], [1]]], BETWEEN_GRADIENTS: [[[1], [1]]]}


def lanes_taken() -> list[tuple[str, int, int]]:
    """(lane, sends, receives) of each batch that rank 0 starts, and bytes that are counted as going to another node."""
    exchange = Exchange(60.0, ranks_per_node=2)
    taken: list[tuple[str, int, int]] = []
    begin = exchange._begin

    def noted(operations: list[dist.P2POp], lane: str) -> Any:
        taken.append(
            (lane, *(sum(operation.op is kind for operation in operations) for kind in (dist.isend, dist.irecv)))
        )
        return begin(operations, lane)

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


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl", "gloo"])
def test_nccl_gives_messages_priority_and_few_channels(backend: str, monkeypatch):
    options = SimpleNamespace(config=SimpleNamespace(max_ctas=None), high=None)

    def make(is_high_priority_stream: bool) -> Any:
        options.high = is_high_priority_stream
        return options

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=make), raising=False)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    given = communicators.message_options()
    if backend == "gloo":
        assert given is None
    else:
        assert given is options
        assert options.high is True
        assert options.config.max_ctas == EXCHANGE_CHANNELS


class LinkOptions:
    """NCCL's options of one group, as it makes them."""

    def __init__(self, is_high_priority_stream: bool) -> None:
        self.config, self.high = SimpleNamespace(max_ctas=None), is_high_priority_stream


def links_of_a_pipeline() -> list[tuple[Any, ...]]:
    """Return, of each group that a pipeline of four makes, its options: those of NCCL, which gloo is not given."""
    asked: list[Any] = []
    new_group = dist.new_group

    def noted(ranks: list[int], *, pg_options: Any, **settings: Any) -> Any:
        asked.append(pg_options)
        return new_group(ranks, **settings)

    made = SimpleNamespace(Options=LinkOptions)
    with (
        patch.object(dist, "new_group", noted),
        patch.object(dist, "ProcessGroupNCCL", made, create=True),
        patch.object(communicators.dist, "get_backend", lambda *group: "gloo" if group else "nccl"),
        patch.object(groups, "_free_forgotten", lambda: None),
    ):
        Links([[0, 1, 2, 3]], ring=False, timeout_seconds=60.0, progress=Progress())
    assert len({id(options) for options in asked}) == len(asked), "each group writes its name into its own"
    return [(options.config.max_ctas, options.high) for options in asked]


def test_links_of_stages_have_few_channels(ranks4: RankPool):
    """Each edge and direction has a group; a receive is posted long before its message comes."""
    assert ranks4.run(links_of_a_pipeline) == [[(4, False)] * 6] * 4


def collected() -> tuple[list[float], float, int]:
    """Return what an all-gather and a broadcast bring, and the point-to-point messages of a score."""
    exchange = Exchange(60.0, ranks_per_node=2)
    parts = exchange.all_gather(torch.tensor([float(exchange.rank)]))
    told = torch.tensor([float(exchange.rank)])
    exchange.broadcast(told, 3)
    batches: list[Any] = []
    begin = exchange._begin
    exchange._begin = lambda *batch: (batches.append(batch), begin(*batch))[1]  # type: ignore[method-assign]
    model = patch_model(tiny_llama())
    scores = score(
        model, [torch.arange(40), torch.arange(9)], exchange=exchange, capacity=12
    )  # so that the long one is split
    assert [len(log_probabilities) for log_probabilities in scores] == [39, 8]
    attention = sum(len(operations) for operations, _ in batches)
    return [float(part) for part in parts], float(told), attention


def test_inference_connects_no_rank_with_all_others(ranks4: RankPool):
    """Scores and agreements travel in collectives: of messages there are only those of attention, of two layers."""
    for parts, told, messages in ranks4.run(collected):
        assert parts == [0, 1, 2, 3]
        assert told == 3
        assert 0 < messages <= 2 * 2 * 3
