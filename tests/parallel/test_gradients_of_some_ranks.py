"""Weights that have a gradient on some ranks only, as where a document is too short for a layer to pool its tokens: FSDP2 sums
them as in one process, and a weight that no rank has used has none."""

from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from hf_longctx.parallel.sharding import ShardedModel
from hf_longctx.planner.memory.state_bytes import Sharding
from hf_longctx.supervision.progress import Progress
from hf_longctx.training.steps.plain import PlainSteps
from tests.worlds.rank_pool import RankPool

ROUNDS = [[torch.full((4, 8), 1.0), torch.full((2, 8), 2.0)], [torch.full((2, 8), 3.0), torch.full((3, 8), 4.0)]]
"""[round][rank]: what comes in. The first layer pools on rank 0 in the first round and on rank 1 in the last, the second layer on
rank 0 alone."""


class PoolingLayer(torch.nn.Module):
    """Pools some tokens at a time, where there are so many; `never` is for other inputs."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.always, self.pooled, self.never = (torch.nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = hidden + self.always(hidden)
        return out + self.pooled(hidden[: self.tokens].mean(0)) if len(hidden) >= self.tokens else out


def model_of_two_layers() -> Any:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), PoolingLayer(3), PoolingLayer(4))
    with torch.no_grad():
        for number, weight in enumerate(model.parameters(), 1):
            weight.copy_(torch.arange(64).view(8, 8).remainder(number + 4) / 40)
    return model


def gradients_of_a_rank(sharding: Sharding, dtype: torch.dtype) -> tuple[list[torch.Tensor | None], list[float]]:
    rank, model = torch.distributed.get_rank(), model_of_two_layers()
    half = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    policy = MixedPrecisionPolicy() if dtype == torch.float32 else half
    for layer in model[1:]:
        fully_shard(layer, mp_policy=policy)
    sharded = ShardedModel(fully_shard(model, mp_policy=policy), sharding)
    steps = PlainSteps(2, None, torch.device("cpu"), 0.0, Progress())
    sharded.gather()
    for number, inputs in enumerate(ROUNDS, 1):
        sharded.before_micro_batch(last=number == len(ROUNDS))
        model(inputs[rank]).square().sum().backward()
    sums = steps.sum_gradients(model, list(model.parameters()), torch.tensor([1.0, rank]).double(), sharded)
    gradients = [None if weight.grad is None else weight.grad.full_tensor() for weight in model.parameters()]
    return gradients, sums.tolist()


def sums_of_one_process(dtype: torch.dtype) -> list[torch.Tensor | None]:
    """Return the gradients of all inputs, each computed in this dtype, summed in float32."""
    sums: list[torch.Tensor | None] = [None] * 7
    for hidden in (hidden for inputs in ROUNDS for hidden in inputs):
        model = model_of_two_layers().to(dtype)
        model(hidden.to(dtype)).square().sum().backward()
        for number, weight in enumerate(model.parameters()):
            if weight.grad is not None:
                summed = sums[number]
                sums[number] = weight.grad.float() + (0 if summed is None else summed)
    return sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3"])
def test_they_are_those_of_one_process(ranks2: RankPool, sharding: Sharding, dtype: torch.dtype):
    expected = sums_of_one_process(dtype)
    assert [gradient is None for gradient in expected] == [False, False, False, True, False, False, True]
    for gradients, sums in ranks2.run(gradients_of_a_rank, sharding, dtype):
        assert sums == [2.0, 1.0]
        for gradient, plain in zip(gradients, expected, strict=True):
            assert (gradient is None) == (plain is None)
            if plain is not None:
                torch.testing.assert_close(gradient, plain, rtol=1e-5, atol=0)
