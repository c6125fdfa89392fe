"""The in-order communicators hang where NCCL would hang, and only there, and compute what plain gloo computes."""

import time
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

from tests.worlds.fifo import InOrderWork, in_order_communicators
from tests.worlds.rank_pool import RankFailure, RankPool

LAYERS = 6
DEADLOCK = 5.0
"""Seconds after which a two-rank step, which takes some milliseconds, is called deadlocked."""


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def complete(work: dist.Work | None) -> None:
    """Wait for an operation that this rank takes part in."""
    assert work is not None
    work.wait()


def swap(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return what the other one of two ranks holds: the stand-in for an attention exchange."""
    peer = 1 - dist.get_rank()
    received = torch.empty_like(tensor)
    send = dist.P2POp(dist.isend, tensor.contiguous(), peer, group)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, received, peer, group), send]):
        work.wait()
    return received


class AddPeer(torch.autograd.Function):
    """x + the peer's x; its backward is an exchange too."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x + swap(x, group)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad + swap(grad, ctx.group), None


class Layered(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, group: dist.ProcessGroup, shared: bool) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
            x = AddPeer.apply(x, group) if shared else 2 * x
        return x.sum()


def train_step(in_order: bool, own_group: bool, reduce_at_end: bool) -> list[torch.Tensor]:
    """Two DDP steps, in which rank 0 runs [shared] and rank 1 runs [shared, its own]. Returns the averaged gradients.

    If not `reduce_at_end`, DDP reduces during the backward of the last micro-batch of each rank: on rank 0 between the
    exchanges of the shared one, on rank 1 after them. (From the second step on: in the first it has one bucket only.)
    """
    group = dist.new_group() if own_group else world()
    with in_order_communicators() if in_order else nullcontext():
        model = DistributedDataParallel(Layered(), bucket_cap_mb=0.1, broadcast_buffers=False)
        micro_batches = [True] if dist.get_rank() == 0 else [True, False]
        for _ in range(2):
            model.zero_grad()
            for index, shared in enumerate(micro_batches):
                last = index == len(micro_batches) - 1
                with model.no_sync() if reduce_at_end or not last else nullcontext():
                    model(torch.full((4, 256), 0.01 * (1 + dist.get_rank())), group, shared).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        if reduce_at_end:
            for gradient in gradients:
                dist.all_reduce(gradient)
                gradient /= dist.get_world_size()
        return gradients


def reduce_between_exchanges(in_order: bool) -> torch.Tensor:
    """The same without a model: both ranks use one group, in different orders."""
    values = torch.arange(2.0) + dist.get_rank()
    total = values.clone()
    with in_order_communicators() if in_order else nullcontext():
        if dist.get_rank() == 0:
            work = dist.all_reduce(total, async_op=True)
            received = swap(values, world())
        else:
            received = swap(values, world())
            work = dist.all_reduce(total, async_op=True)
        work.wait()
    return total + received


def every_operation(in_order: bool) -> list[torch.Tensor | list]:
    """The results of each kind of communication, on two groups at once."""
    rank, size = dist.get_rank(), dist.get_world_size()
    other = dist.new_group()
    values = torch.arange(2.0 * size) + 10 * rank
    results: list[torch.Tensor | list] = []
    with in_order_communicators() if in_order else nullcontext():
        works = []
        for group in (world(), other):
            total = values.clone()
            works.append(dist.all_reduce(total, group=group, async_op=True))
            assert isinstance(works[-1], InOrderWork) == in_order
            results.append(total)
        for work in works:
            work.wait()
        torch.testing.assert_close(works[0].get_future().wait()[0], results[0])

        root = values.clone()
        dist.broadcast(root, src=1)
        lists = [torch.empty_like(values) for _ in range(size)]
        dist.all_gather(lists, values)
        gathered = torch.empty(size * len(values))
        dist.all_gather_into_tensor(gathered, values)
        scattered = torch.empty(2)
        dist.reduce_scatter_tensor(scattered, values)
        swapped = torch.empty_like(values)
        dist.all_to_all_single(swapped, values)
        reduced = values.clone()
        dist.reduce(reduced, dst=0)
        dist.barrier()
        objects: list = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        results += [root, *lists, gathered, scattered, swapped, reduced if rank == 0 else values, objects]

        if rank == 0:
            dist.send(values, dst=1)
            complete(dist.isend(values + 1, dst=1))
        elif rank == 1:
            received, second = torch.empty_like(values), torch.empty_like(values)
            assert dist.recv(received) == 0  # from any source
            complete(dist.irecv(second, src=0))
            results += [received, second]

        results.append(functional.all_reduce(values, "sum", other) + 0)
        results.append(functional.all_gather_tensor(values, 0, other) + 0)
    return results


def queued_functional_collective_waits_its_turn() -> bool:
    """Rank 0 issues it behind a receive whose message comes late: whether that had been sent when it was complete."""
    store = dist.distributed_c10d._get_default_store()
    store.delete_key("sent")
    dist.barrier()
    with in_order_communicators():
        if dist.get_rank() == 0:
            dist.irecv(torch.empty(1), src=1)
        else:
            time.sleep(1.0)
            store.set("sent", "yes")
            dist.send(torch.ones(1), dst=0)
        functional.all_reduce(torch.ones(1), "sum", world())
        return store.check(["sent"])


def groups_do_not_wait_for_each_other(one_at_a_time: bool) -> torch.Tensor:
    other = dist.new_group()
    late = torch.zeros(1)
    with in_order_communicators(one_at_a_time=one_at_a_time):
        if dist.get_rank() == 0:
            work = dist.irecv(late, src=1)  # stuck until rank 1 sends, after the all-reduce on the other group
            dist.all_reduce(torch.ones(1), group=other)
            complete(work)
        else:
            dist.all_reduce(torch.ones(1), group=other)
            late.fill_(7.0)
            dist.send(late, dst=0)
    return late


def refused_operation() -> tuple[str, torch.Tensor]:
    """The error of an operation that gloo refuses, and what the group computes afterwards."""
    with in_order_communicators():
        work = dist.all_reduce(torch.ones(1), op=dist.ReduceOp.BAND, async_op=True)
        with pytest.raises(RuntimeError) as failure:
            work.wait()
        total = torch.ones(1)
        dist.all_reduce(total)
    return str(failure.value), total


def test_reduction_between_exchanges_passes_on_gloo_and_deadlocks_in_order(ranks2: RankPool):
    for total in ranks2.run(reduce_between_exchanges, False):
        assert torch.isfinite(total).all()
    with pytest.raises(RankFailure, match=r"ranks \[0, 1\] of 2 did not answer") as failure:
        ranks2.run(reduce_between_exchanges, True, timeout=DEADLOCK)
    report = str(failure.value)
    assert "in-order group '0' has not completed allreduce(float32[2]" in report
    assert "in-order group '0' has not completed batch of irecv(float32[2], peer 0), isend(float32[2]" in report


def test_ddp_reducing_in_backward_passes_on_gloo_and_deadlocks_in_order(ranks2: RankPool):
    ranks2.run(train_step, in_order=False, own_group=False, reduce_at_end=False)
    with pytest.raises(RankFailure, match=r"ranks \[0, 1\] of 2 did not answer") as failure:
        ranks2.run(train_step, in_order=True, own_group=False, reduce_at_end=False, timeout=DEADLOCK)
    assert "has not completed allreduce(" in str(failure.value)


def test_own_group_and_reduction_at_the_end_pass_in_order_with_the_gradients_of_gloo(ranks2: RankPool):
    gloo = ranks2.run(train_step, in_order=False, own_group=True, reduce_at_end=True)
    in_order = ranks2.run(train_step, in_order=True, own_group=True, reduce_at_end=True)
    torch.testing.assert_close(in_order, gloo, rtol=0, atol=0)


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 4])
def test_every_operation_gives_what_gloo_gives(world_size: int, request: pytest.FixtureRequest):
    pool = request.getfixturevalue(f"ranks{world_size}")
    gloo, in_order = pool.run(every_operation, False), pool.run(every_operation, True)
    torch.testing.assert_close(in_order, gloo, rtol=0, atol=0)


def test_functional_collectives_take_their_turn(ranks2: RankPool):
    assert ranks2.run(queued_functional_collective_waits_its_turn) == [True, True]


def test_groups_do_not_wait_for_each_other(ranks2: RankPool):
    assert [late.item() for late in ranks2.run(groups_do_not_wait_for_each_other, False)] == [7.0, 7.0]


def test_groups_wait_for_each_other_where_a_device_runs_one_kernel(ranks2: RankPool):
    with pytest.raises(RankFailure, match=r"ranks \[0, 1\] of 2 did not answer") as failure:
        ranks2.run(groups_do_not_wait_for_each_other, True, timeout=2.0)
    assert "in-order group 'of the device' has not completed recv(float32[1]" in str(failure.value)


def test_an_operation_that_fails_raises_from_wait_and_the_queue_goes_on(ranks2: RankPool):
    for message, total in ranks2.run(refused_operation):
        assert "BAND" in message
        assert total.item() == 2
