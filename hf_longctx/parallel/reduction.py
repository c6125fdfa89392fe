"""Collectives of an optimizer step that are not FSDP2's, all on the default process group and never between two exchanges of a
rank.

Ranks run different numbers of micro-batches and meet here once, after their last exchange: gradients are SUMMED,
because every loss is already divided by the label tokens of the whole step. Sent per rank: one small vector, the
gradients once (in buckets, so that the copy of one overlaps the transfer of another), and one number that decides for
all ranks whether the gradients are finite. A rank waits here for one that lives but does not come until the watchdog's or
the default group's patience ends, whichever is shorter: the plugin's stall_timeout_seconds, TrainingArguments' ddp_timeout.
"""

import math
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch.distributed.tensor import DTensor

BUCKET_BYTES = 25 * 2**20
"""Bytes of one all-reduce, which as many small gradients share; a larger one travels alone, from where it is."""


def agree_on_plan(digest: int, device: torch.device, leave: bool = False) -> bool:
    """Makes sure that all ranks run the same plan, and asks whether any of them is to leave.

    Args:
        digest: signed 64-bit fingerprint of this rank's plan.
        leave: whether this rank has been told to end.

    Returns:
        Whether any rank has been: the same on all of them.

    Raises:
        RuntimeError: on every rank, the plans differ, and none is to leave.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return leave
    # The largest digest and the largest complement: ~x = -x - 1 reverses the order without overflowing.
    largest_of = torch.tensor([digest, ~digest, leave], dtype=torch.int64, device=device)
    largest, complement, any_leaves = largest_over_ranks(largest_of).tolist()
    if largest != ~complement and not any_leaves:
        raise RuntimeError(
            f"the ranks planned different steps: digests range from {~complement:#x} to {largest:#x}, rank "
            f"{dist.get_rank()} has {digest:#x}. Every rank must see the same documents in the same "
            "order, the same capacity and cost model, and the same versions of numpy and hf_longctx; nothing was run. In a loop "
            "of your own, leave the data loader out of accelerator.prepare, which would give each rank other batches"
        )
    return bool(any_leaves)


_alike: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Models of this process whose weights all ranks have compared."""


@torch.no_grad()
def agree_on_weights(model: torch.nn.Module, device: torch.device) -> None:
    """Makes sure, once for each model, that all ranks hold the same weights: the first, the middle and the last value of each are
    compared. Weights in parts (DTensor) are left out.

    Raises:
        RuntimeError: on every rank, they differ.
    """
    if model in _alike or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    whole = {name: weight for name, weight in model.named_parameters() if not isinstance(weight, DTensor)}
    samples = [
        weight.data.reshape(-1)[[0, weight.numel() // 2, -1]].to(device, torch.float64)
        for weight in whole.values()
        if weight.numel()
    ]
    sample = torch.stack(samples).nan_to_num() if samples else torch.zeros(1, 3, dtype=torch.float64, device=device)
    largest, smallest = largest_over_ranks(torch.stack([sample, -sample]))
    differs = (largest != -smallest).any(dim=1).tolist()
    if any(differs):
        names = [name for name, weight in whole.items() if weight.numel()]
        raise RuntimeError(
            f"the ranks hold different weights: {sum(differs)} of {len(differs)} that were compared, "
            f"{names[differs.index(True)]} among them. Gradients that are summed over ranks would be those of no model; nothing "
            "was run. Valid: the same checkpoint on every rank, or torch.manual_seed with the same seed before the model and its "
            "adapters are made"
        )
    _alike.add(model)


REQUESTS = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")
"""Requests of callbacks, by TrainerControl's names."""


def agree_on_requests(control: Any, memory_mib: int, args: Any) -> int:
    """Make all ranks do what a callback of any rank asked for: one alone would wait for the others. The fullest rank's memory
    travels with it.

    Args:
        control: TrainerControl, changed in place.
        memory_mib: of this rank.
        args: TrainingArguments.

    Returns:
        The fullest rank's memory.
    """
    if args.world_size == 1:
        return memory_mib
    asked = torch.tensor([*(getattr(control, name) for name in REQUESTS), memory_mib], dtype=torch.int32)
    *agreed, fullest = largest_over_ranks(asked.to(args.device)).tolist()
    for name, value in zip(REQUESTS, agreed):
        setattr(control, name, bool(value))
    return fullest


def largest_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """The element-wise maximum over all ranks, in place."""
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return values


def refuse_uncounted_ranks() -> None:
    """Refuse a process group whose ranks accelerate does not count. Where there is no GPU and nobody tells it to compute on
    processors, it makes a group of all processes that a launcher has started, and says to each that there is one.

    Raises:
        ValueError: accelerate counts fewer processes than there are.
    """
    if not dist.is_initialized() or not PartialState._shared_state:
        return
    started, counted = dist.get_world_size(), PartialState().num_processes
    if counted != started:
        raise ValueError(
            f"{started} processes were started, and accelerate counts {counted}: each would train on all documents, and their "
            "gradients would be summed as if they were parts. It counts processes without GPUs only if it is told to compute on "
            "processors. Valid: use_cpu=True in TrainingArguments (training.use_cpu: true in YAML), or ACCELERATE_USE_CPU=true "
            "in the environment"
        )


def sum_step(
    parameters: Iterable[torch.nn.Parameter], statistics: torch.Tensor, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Sums gradients over all ranks, in place, and the statistics.

    A parameter that no rank has a gradient for keeps None, as in one process; one that only some ranks have counts as
    zero on the others (a rank without a micro-batch has none at all).

    Args:
        parameters: those that are trained, in the same order on every rank.
        statistics: float64 [k], this rank's.
        group: ranks that have the same parameters; default: all.

    Returns:
        float64 [k], summed over all ranks.

    Raises:
        ValueError: accelerate counts fewer ranks than there are, so that plans were made for fewer.
        TypeError: a parameter is in parts.
    """
    refuse_uncounted_ranks()
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return statistics
    trained = list(parameters)
    if any(isinstance(parameter, DTensor) for parameter in trained):
        raise TypeError(
            "parameters are in parts (DTensor), whose gradients are not those of all ranks. Valid: those that are whole on each "
            "rank; LongContextTrainer trains what is in parts"
        )
    has_gradient = torch.tensor([p.grad is not None for p in trained], dtype=torch.float64, device=statistics.device)
    if group is None:
        header = torch.cat([statistics, has_gradient])
        dist.all_reduce(header)
        sums, holders = header.split([len(statistics), len(trained)])
    else:
        sums, holders = statistics.clone(), has_gradient
        dist.all_reduce(sums)
        dist.all_reduce(holders, group=group)
    gradients = []
    for parameter, holder_count in zip(trained, holders.tolist()):
        if holder_count:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
    sum_gradients(gradients, group)
    return sums


def sum_gradients(gradients: list[torch.Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Sum gradients over the ranks of a group (default: all), in place. Two buckets are in memory at a time: one is copied while
    the other travels."""
    in_flight: deque[tuple[list[torch.Tensor], torch.Tensor, Any]] = deque()

    def finish_oldest() -> None:
        bucket, flat, work = in_flight.popleft()
        work.wait()
        if len(bucket) == 1 and bucket[0].data_ptr() == flat.data_ptr():
            return
        for gradient, summed in zip(bucket, flat.split([gradient.numel() for gradient in bucket])):
            gradient.copy_(summed.view_as(gradient))

    for bucket in _buckets(gradients):
        if len(in_flight) == 2:
            finish_oldest()
        flat = bucket[0].reshape(-1) if len(bucket) == 1 else torch.cat([gradient.reshape(-1) for gradient in bucket])
        in_flight.append((bucket, flat, dist.all_reduce(flat, group=group, async_op=True)))
    while in_flight:
        finish_oldest()


def _buckets(gradients: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Consecutive gradients of one dtype, of at most BUCKET_BYTES together or one alone."""
    bucket: list[torch.Tensor] = []
    for gradient in gradients:
        full = sum(g.nbytes for g in bucket) + gradient.nbytes > BUCKET_BYTES
        if bucket and (full or gradient.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


def meet(device: torch.device) -> None:
    """Wait for all ranks. accelerate's way takes a process's number on its machine for that of its device, which it is not where
    each process sees one device alone."""
    if dist.is_initialized():
        dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip_gradients(
    parameters: Iterable[torch.nn.Parameter],
    maximum: float,
    copies: int,
    device: torch.device,
    elsewhere: Collection[int] = (),
) -> torch.Tensor:
    """Return the norm of the gradients of the whole model, float32 on `device`, and clip them to `maximum` in place. Collective.

    Gradients may wait in host memory, whose tensors NCCL does not take: one number of each process travels, from `device`.

    Args:
        copies: processes that hold the same parameters, whole or each a part.
        elsewhere: ids of parameters that other processes count.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        local, holders = local_part(parameter.grad), copies
        if isinstance(parameter.grad, DTensor):
            for dimension, placement in enumerate(parameter.grad.placements):
                if not placement.is_replicate():  # packed projections are in parts that is_shard() does not know
                    holders //= parameter.grad.device_mesh.size(dimension)
        gradients.append(local)
        if id(parameter) not in elsewhere:
            norm = torch.linalg.vector_norm(local, dtype=torch.promote_types(local.dtype, torch.float32))
            squares += norm.double().square().to(device) / holders
    if dist.is_initialized():
        dist.all_reduce(squares)
    norm = squares.sqrt()
    factor = float((maximum / (norm + 1e-6)).clamp(max=1.0))
    if factor < 1:
        for local in gradients:
            local.mul_(factor)
    return norm.float()


def all_finite(parameters: Iterable[torch.nn.Parameter], device: torch.device) -> bool:
    """Whether every gradient is finite on every rank; the same answer on all of them."""
    gradients = [local_part(p.grad.detach()) for p in parameters if p.grad is not None]
    some = [gradient for gradient in gradients if gradient.numel()]
    # The largest absolute values, of all in a few kernels and without a copy of any.
    norms = torch._foreach_norm(some, math.inf) if some else ()
    finite = torch.stack([norm.to(device).isfinite() for norm in norms]).all() if norms else torch.tensor(True)
    agreed = finite.to(device=device, dtype=torch.float32)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN)
    return bool(agreed)
