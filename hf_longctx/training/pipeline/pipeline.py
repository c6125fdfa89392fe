"""This process's place in a pipeline: which stages it has, with whom it shares them, and what the stages do together.

Global ranks, for p devices of n ranks each (HDP ranks times tensor parallelism):

    device 0   ranks 0 .. n-1        device 1   ranks n .. 2n-1        ...        one pipeline: i, n + i, 2n + i ...

The ranks of a device hold the same stages, exchange keys and values, and sum their gradients. Between devices go activations
and their gradients (links.py), once a step the gradient of tied embeddings, which the first stage and the last both hold,
and sums of losses and norms.
"""

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hf_longctx.attention.exchange import Exchange
from hf_longctx.attention.groups import own_group, own_groups
from hf_longctx.attention.progress import Progress
from hf_longctx.data.collator import RankStep
from hf_longctx.models.stages import cut_model, cut_of, residual_dtype
from hf_longctx.planner.stage_layers import describe_stages, stage_layers, stage_weights
from hf_longctx.planner.stages import Schedule
from hf_longctx.training.pipeline.execution import StepOfDevice
from hf_longctx.training.pipeline.links import Links
from hf_longctx.training.pipeline.order import tasks_of
from hf_longctx.training.recalibration import Stopwatch
from hf_longctx.training.reduction import sum_gradients
from hf_longctx.training.sharding import begin_alike


class Pipeline:
    """Made once, by all processes together.

    Args:
        devices: processes of each pipeline.
        virtual: stages on each of them.
        schedule: name of planner/stages.py.
        tensor_parallel: processes that share the heads of a stage's layers, which follow each other.
        length: tokens of a typical document, by which layers are spread over stages.
        timeout_seconds: how long a wait for another process may take.
        progress: notes where this process is.
    """

    def __init__(
        self,
        devices: int,
        *,
        virtual: int,
        schedule: str,
        tensor_parallel: int,
        length: int,
        timeout_seconds: float,
        progress: Progress,
    ) -> None:
        world_size, rank = dist.get_world_size(), dist.get_rank()
        assert world_size % devices == 0, "refused before"
        self.devices, self.virtual, self._schedule_name = devices, virtual, schedule
        self._length, self._progress = length, progress
        self.ranks = world_size // devices
        """of a device"""
        self.device = rank // self.ranks
        """this process's, from 0"""
        progress.place = f"device {self.device} of {devices} of the pipeline"
        limit = timedelta(seconds=timeout_seconds)
        blocks = [list(range(first, first + self.ranks)) for first in range(0, world_size, self.ranks)]
        self.block = blocks[self.device]
        """global ranks that have the same stages as this one"""
        self.group = own_group(self, blocks, limit)
        """of these"""
        self._replicas = self.group
        """of those that hold the same, in parts or whole"""
        if tensor_parallel > 1:
            same = [block[first::tensor_parallel] for block in blocks for first in range(tensor_parallel)]
            self._replicas = own_group(self, same, limit)
        self._ends = next(iter(own_groups(self, [sorted({*blocks[0], *blocks[-1]})], limit)), None)
        pipelines = list(zip(*blocks))
        self._links = Links(pipelines, ring=virtual > 1, timeout_seconds=timeout_seconds, progress=progress)
        self.schedule: Schedule | None = None
        self._spread = ""
        self.watch: Stopwatch | None = None

    def __str__(self) -> str:
        said = f"{self.devices} stages of {self.ranks} rank(s), {self._schedule_name}"
        return f"{said}; {self._spread}" if self._spread else said

    @property
    def stages(self) -> list[int]:
        """This process's, ascending."""
        return [turn * self.devices + self.device for turn in range(self.virtual)]

    @property
    def bytes_sent(self) -> int:
        return self._links.bytes_sent

    def cut(self, model: Any) -> None:
        """Leaves this process's stages of a patched model, in place; one that is cut stays as it is. From here on `schedule`
        says what each stage costs.

        Raises:
            ValueError: the model has fewer layers than stages, cannot be cut, or was cut in another way.
        """
        cut, config = cut_of(model), model.config
        refuse_other_cut(model, self.devices * self.virtual, self.stages)
        layers = (
            list(cut.stages) if cut is not None else stage_layers(config, self.devices * self.virtual, self._length)
        )
        if cut is None:
            cut_model(model, layers, self.stages)
        weights = tuple(stage_weights(config, layers, self._length))
        self.schedule = Schedule(self._schedule_name, self.virtual, weights)
        self._spread = describe_stages(config, layers, self._length)

    def begin_alike(self, model: torch.nn.Module) -> None:
        """Gives every process the weights of the first of its stages' ranks; tied embeddings are rank 0's."""
        tensors = [*model.parameters(), *model.buffers()]
        begin_alike(tensors, self.block[0], self.group)
        begin_alike(self._tied(model), 0, self._ends)

    def _tied(self, model: Any) -> list[torch.nn.Parameter]:
        """Embeddings that another device holds too; only on the first and the last one."""
        cut = cut_of(model)
        if cut is None or not cut.tied or self.device not in (0, self.devices - 1):
            return []
        bare = model.get_base_model() if hasattr(model, "get_base_model") else model
        return [bare.get_input_embeddings().weight]

    def run(
        self,
        model: Any,
        step: RankStep,
        exchange: Exchange | None,
        device: torch.device,
        *,
        learn: bool,
        router_coefficient: float = 0.0,
        **settings: Any,
    ) -> torch.Tensor:
        """Runs this process's part of a step; arguments and result are StepOfDevice's."""
        assert self.schedule is not None, "the model was not cut"
        self.watch = Stopwatch(device)
        return StepOfDevice(
            model,
            step,
            tasks_of(step.tasks),
            self._links,
            exchange,
            device,
            activation_dtype(model),
            self._progress,
            router_coefficient,
            watch=self.watch,
            **settings,
        ).run(learn)

    def seconds(self) -> tuple[float, float]:
        """Of this process's tasks of the last step: waiting for other devices, and computing."""
        between = self.watch.seconds() if self.watch is not None else []
        return sum(between[::2]), sum(between[1::2])

    def wait_share(self) -> float:
        """Share of the last step's tasks that this process spent waiting for other devices, 0 to 1."""
        waited, computed = self.seconds()
        return round(waited / max(waited + computed, 1e-9), 4)

    def sum_parts(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sums, over the ranks that hold the same, the gradients of weights that tensor parallelism has left in parts. All of
        them have the same ones, or none at all."""
        parts = [each for each in parameters if isinstance(each, DTensor)]
        if dist.get_world_size(self._replicas) == 1 or not parts:
            return
        gradients = []
        for parameter in parts:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(_local(parameter.grad))
        sum_gradients(gradients, self._replicas)

    def sum_tied(self, model: Any) -> None:
        """Adds up the gradients of tied embeddings, which each end has summed over its own ranks."""
        for weight in self._tied(model):
            if not weight.requires_grad:
                continue
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            gradient: torch.Tensor = weight.grad
            if isinstance(weight, DTensor) and isinstance(gradient, DTensor):
                # The first stage looks it up and has its gradient whole, the last in parts.
                weight.grad = gradient = gradient.redistribute(placements=weight.placements)
            mine = _local(gradient).contiguous()
            other = dist.get_rank() + (self.ranks * (self.devices - 1)) * (1 if self.device == 0 else -1)
            theirs = torch.empty_like(mine)
            operations = [
                dist.P2POp(dist.isend, mine, other, self._ends),
                dist.P2POp(dist.irecv, theirs, other, self._ends),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            _local(gradient).add_(theirs)

    def gradient_norm(self, model: Any, maximum: float) -> torch.Tensor:
        """Norm of the gradients of the whole model, before they are clipped to `maximum`, in place."""
        tied = {id(weight) for weight in self._tied(model)} if self.device else set()
        squares = torch.zeros((), dtype=torch.float64, device=self._links.torch_device)
        gradients = []
        for parameter in model.parameters():
            if parameter.grad is None:
                continue
            local, copies = _local(parameter.grad), self.ranks
            if isinstance(parameter.grad, DTensor):
                for dimension, placement in enumerate(parameter.grad.placements):
                    if not placement.is_replicate():  # packed projections are in parts that is_shard() does not know
                        copies //= parameter.grad.device_mesh.size(dimension)
            gradients.append(local)
            if id(parameter) not in tied:
                norm = torch.linalg.vector_norm(local, dtype=torch.promote_types(local.dtype, torch.float32))
                squares += norm.double().square().to(squares.device) / copies
        dist.all_reduce(squares)
        norm = squares.sqrt()
        factor = float((maximum / (norm + 1e-6)).clamp(max=1.0))
        if factor < 1:
            for local in gradients:
                local.mul_(factor)
        return norm.float()


def refuse_other_cut(model: Any, stages: int, own: Sequence[int]) -> None:
    """Raises ValueError for a model of which this process holds other stages, of as many or another number."""
    cut = cut_of(model)
    if cut is not None and (len(cut.stages), list(cut.own)) != (stages, list(own)):
        raise ValueError(
            f"the model was cut into {len(cut.stages)} stages before, of which this process has {list(cut.own)}; this run has "
            f"{stages} and would have {list(own)} here. Valid: the stages that it was cut into, or a whole model loaded from a "
            "checkpoint"
        )


def activation_dtype(model: Any) -> torch.dtype:
    """Of what goes from stage to stage: that of the weights, or in which FSDP2 lets them compute."""
    for module in model.modules():
        policy = getattr(getattr(module, "_get_fsdp_state", lambda: None)(), "_mp_policy", None)
        if policy is not None and policy.param_dtype is not None:
            return policy.param_dtype
    return residual_dtype(model)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
