"""The ranks' meeting at the end of a step: sums, agreement, and what a rank without a gradient does."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState

from hf_longctx.parallel import reduction
from hf_longctx.parallel.reduction import agree_on_plan, all_finite, sum_step
from tests.builders.training_runs import fresh_accelerator_state
from tests.worlds.fifo import in_order_communicators
from tests.worlds.rank_pool import RankPool

CPU = torch.device("cpu")
SHAPES = [(3, 4), (7,), (5, 2), (1,), (2, 3), (0,), (4,)]
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.float32, torch.float32]
HELD: list[Callable[[int], bool]] = [
    lambda rank: True,
    lambda rank: rank == 1,
    lambda rank: True,
    lambda rank: rank != 0,
    lambda rank: False,
    lambda rank: True,
    lambda rank: rank == 0,
]
"""Which ranks have a gradient for each parameter."""


def gradient(index: int, rank: int) -> torch.Tensor:
    values = torch.randint(-8, 9, SHAPES[index], generator=torch.Generator().manual_seed(100 * index + rank))
    return values.to(DTYPES[index])  # whole numbers: sums are exact in every order


def summed(bucket_bytes: int, in_order: bool) -> tuple[list[torch.Tensor | None], torch.Tensor]:
    """The gradients after the reduction, and the statistics."""
    rank = dist.get_rank()
    parameters = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape, dtype in zip(SHAPES, DTYPES)]
    for index, parameter in enumerate(parameters):
        if HELD[index](rank):
            parameter.grad = gradient(index, rank)
    with in_order_communicators() if in_order else nullcontext(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(reduction, "BUCKET_BYTES", bucket_bytes)
        statistics = sum_step(parameters, torch.tensor([rank + 0.5, 2.0**40 * rank], dtype=torch.float64))
    return [parameter.grad for parameter in parameters], statistics


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("bucket_bytes", [1, 60, reduction.BUCKET_BYTES])
@pytest.mark.parametrize("in_order", [False, True])
def test_gradients_are_summed_over_the_ranks_that_have_them(world_size, bucket_bytes, in_order, request):
    pool: RankPool = request.getfixturevalue(f"ranks{world_size}")
    for gradients, statistics in pool.run(summed, bucket_bytes, in_order):
        for index, summed_gradient in enumerate(gradients):
            parts = [gradient(index, rank) for rank in range(world_size) if HELD[index](rank)]
            if not parts:
                assert summed_gradient is None  # as in one process: the optimizer leaves the parameter alone
            else:
                assert summed_gradient is not None
                assert summed_gradient.dtype == DTYPES[index]
                torch.testing.assert_close(summed_gradient, torch.stack(parts).sum(0), rtol=0, atol=0)
        ranks = torch.arange(world_size, dtype=torch.float64)
        torch.testing.assert_close(statistics, torch.stack([ranks + 0.5, 2.0**40 * ranks]).sum(1), rtol=0, atol=0)


def summed_without_any_gradient() -> list[torch.Tensor | None]:
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    sum_step(parameters, torch.zeros(1, dtype=torch.float64))
    return [parameter.grad for parameter in parameters]


def test_a_step_without_any_gradient_keeps_none(ranks2: RankPool):
    assert ranks2.run(summed_without_any_gradient) == [[None] * 3] * 2


def finite_after(values: dict[int, list[float | None]]) -> bool:
    """values: {rank: the gradient of each of its parameters}."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in values[dist.get_rank()]]
    for parameter, value in zip(parameters, values[dist.get_rank()]):
        parameter.grad = None if value is None else torch.tensor([1.0, value])
    return all_finite(parameters, CPU)


@pytest.mark.parametrize(
    ("values", "finite"),
    [
        ({0: [1.0, -3e38], 1: [2.0, None]}, True),
        ({0: [None], 1: [None]}, True),
        ({0: [1.0, 1.0], 1: [1.0, float("nan")]}, False),
        ({0: [float("-inf"), 1.0], 1: [None, None]}, False),
    ],
)
def test_all_ranks_agree_on_what_is_finite(values, finite, ranks2: RankPool):
    assert ranks2.run(finite_after, values) == [finite, finite]


def test_one_process_needs_no_meeting():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.tensor([1.0, float("nan")])
    statistics = torch.tensor([4.0])
    assert sum_step([parameter], statistics) is statistics
    assert not all_finite([parameter], CPU)
    parameter.grad = torch.ones(2)
    assert all_finite([parameter], CPU)
    agree_on_plan(7, CPU)


def summed_as_accelerate_counts(counted: int) -> str:
    fresh_accelerator_state()
    PartialState._shared_state |= {"num_processes": counted}
    try:
        return str(sum_step([], torch.ones(1, dtype=torch.float64)).tolist())
    except ValueError as error:
        return str(error)
    finally:
        fresh_accelerator_state()


def test_ranks_that_accelerate_does_not_count_are_refused(ranks2: RankPool):
    """Two processes without a GPU and without use_cpu are such: gradients would be twice as large."""
    assert ranks2.run(summed_as_accelerate_counts, 2) == ["[2.0]"] * 2
    for message in ranks2.run(summed_as_accelerate_counts, 1):
        assert message.startswith("2 processes were started, and accelerate counts 1")
        assert "use_cpu=True" in message


def agreement(digests: list[int]) -> str:
    """The error, or nothing."""
    try:
        agree_on_plan(digests[dist.get_rank()], CPU)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("digest", [0, -1, 2**63 - 1, -(2**63)])
def test_equal_plans_pass(digest, ranks2: RankPool):
    assert ranks2.run(agreement, [digest] * 2) == ["", ""]


@pytest.mark.parametrize("digests", [[5, 6], [2**63 - 1, -(2**63)], [-1, 0]])
def test_different_plans_are_an_error_on_every_rank_that_shows_both(digests, ranks2: RankPool):
    messages: list[Any] = ranks2.run(agreement, digests)
    for rank, message in enumerate(messages):
        assert f"from {min(digests):#x} to {max(digests):#x}, rank {rank} has {digests[rank]:#x}" in message
        assert "nothing was run" in message


def test_one_different_plan_among_four_is_noticed_by_all(ranks4: RankPool):
    assert all("the ranks planned different steps" in message for message in ranks4.run(agreement, [9, 9, -9, 9]))
