"""Weights that have a gradient on some ranks only, as where a document is too short for a layer to pool its tokens: FSDP2 sums
them as in one process, and a weight that no rank has used has none."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, fully_shard

from hf_longctx.parallel.sharding import ShardedModel
from hf_longctx.planner.memory.state_bytes import Sharding
from hf_longctx.supervision.progress import Progress
from hf_longctx.training.steps.plain import PlainSteps
from tests.worlds.rank_pool import RankPool

ROUNDS = [[torch.full((3, 8), 1.0), torch.full((2, 8), 2.0)], [torch.full((2, 8), 3.0), torch.full((1, 8), 4.0)]]
"""[round][rank]: what comes in."""

pytestmark = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="this torch cannot sum such gradients"
)


class PoolingLayer(torch.nn.Module):
    """Pools three tokens at a time, where there are so many; `never` is for other inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.pooled, self.never = (torch.nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = hidden + self.always(hidden)
        return out + self.pooled(hidden[:3].mean(0)) if len(hidden) >= 3 else out


def model_of_two_layers() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), PoolingLayer(), PoolingLayer())
    with torch.no_grad():
        for number, weight in enumerate(model.parameters(), 1):
            weight.copy_(torch.arange(64).view(8, 8).remainder(number + 4) / 40)
    return model


def gradients_of_a_rank(sharding: Sharding) -> tuple[list[torch.Tensor | None], list[float]]:
    rank, model = torch.distributed.get_rank(), model_of_two_layers()
    for layer in model[1:]:
        fully_shard(layer)
    sharded = ShardedModel(fully_shard(model), sharding)
    steps = PlainSteps(2, None, torch.device("cpu"), 0.0, Progress())
    sharded.gather()
    for number, inputs in enumerate(ROUNDS, 1):
        sharded.before_micro_batch(last=number == len(ROUNDS))
        model(inputs[rank]).square().sum().backward()
    sums = steps.sum_gradients(model, list(model.parameters()), torch.tensor([1.0, rank]).double(), sharded)
    gradients = [None if weight.grad is None else weight.grad.full_tensor() for weight in model.parameters()]
    return gradients, sums.tolist()


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3"])
def test_they_are_those_of_one_process(ranks2: RankPool, sharding: Sharding):
    model = model_of_two_layers()
    for inputs in ROUNDS:
        for hidden in inputs:
            model(hidden).square().sum().backward()
    expected = [weight.grad for weight in model.parameters()]
    assert [gradient is None for gradient in expected] == [False, False, False, True, False, False, True]
    for gradients, sums in ranks2.run(gradients_of_a_rank, sharding):
        assert sums == [2.0, 1.0]
        for gradient, plain in zip(gradients, expected, strict=True):
            assert (gradient is None) == (plain is None)
            if plain is not None:
                torch.testing.assert_close(gradient, plain, rtol=1e-5, atol=0)
