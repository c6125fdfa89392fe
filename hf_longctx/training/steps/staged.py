"""This process's place in a pipeline: which stages it has, with whom it shares them, and what the stages do together.

Global ranks, for p devices of n ranks each (HDP ranks times tensor parallelism):

    device 0   ranks 0 .. n-1        device 1   ranks n .. 2n-1        ...        one pipeline: i, n + i, 2n + i ...

The ranks of a device hold the same stages, exchange keys and values, and sum their gradients. Between devices go activations
and their gradients (parallel/stage_links.py), once a step the gradient of tied embeddings, which the first stage and the last
both hold, and sums of losses and norms.
"""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from hf_longctx.attention.exchange import Exchange
from hf_longctx.attention.groups import own_group, own_groups
from hf_longctx.data.collator import RankStep
from hf_longctx.models.loss.balance import asks_for_balance, balance_settings
from hf_longctx.models.stages import cut_model, cut_of, refuse_other_cut, residual_dtype
from hf_longctx.models.wrappers import language_model_of
from hf_longctx.parallel.reduction import clip_gradients, local_part, sum_gradients, sum_step
from hf_longctx.parallel.sharding import ShardedModel, begin_alike, shard_over
from hf_longctx.parallel.stage_links import Links
from hf_longctx.parallel.world import World
from hf_longctx.planner.stages.stage_layers import describe_stages, stage_layers, stage_weights
from hf_longctx.planner.stages.stage_order import Schedule
from hf_longctx.supervision.progress import Progress
from hf_longctx.training.measuring.recalibration import Stopwatch
from hf_longctx.training.steps.stage_tasks import StepOfDevice
from hf_longctx.training.steps.task_order import tasks_of
from hf_longctx.training.steps.work import Work


class StagedSteps:
    """Runs a process's stages of a pipeline. All processes make theirs together.

    Args:
        world: how processes are arranged; its stages are the processes of each pipeline.
        exchange: of the ranks that have the same stages; None where there is one.
        compute: where this process computes.
        virtual: stages on each process of a pipeline.
        schedule: name of planner/stages/stage_order.py.
        offload: share of what is kept for backward that waits in host memory at least, 0 to 1.
        length: tokens of a typical document, by which layers are spread over stages.
        timeout_seconds: how long a wait for another process may take.
        progress: notes where this process is.
    """

    times_ranks = False  # the times of a stage's tasks say little of a plan's micro-batches

    def __init__(
        self,
        world: World,
        exchange: Exchange | None,
        compute: torch.device,
        *,
        virtual: int,
        schedule: str,
        offload: float,
        length: int,
        timeout_seconds: float,
        progress: Progress,
    ) -> None:
        self._world, self._virtual, self._schedule_name = world, virtual, schedule
        self._length, self._offload, self._progress = length, offload, progress
        self._exchange, self._compute = exchange, compute
        self._place = world.stage_of(dist.get_rank())
        """of this process in its pipeline, from 0"""
        progress.place = f"device {self._place} of {world.stages} of the pipeline"
        limit = timedelta(seconds=timeout_seconds)
        blocks = world.stage_groups
        self._block = blocks[self._place]
        """global ranks that have the same stages as this one"""
        self._group = own_group(self, blocks, limit)
        """of these"""
        self._replicas = self._group
        """of those that hold the same, in parts or whole"""
        if world.tensor_parallel > 1:
            self._replicas = own_group(self, world.exchange_groups, limit)
        self._ends = next(iter(own_groups(self, [sorted({*blocks[0], *blocks[-1]})], limit)), None)
        self._links = Links(world.pipelines, ring=virtual > 1, timeout_seconds=timeout_seconds, progress=progress)
        self.schedule: Schedule | None = None
        self._spread = ""
        self.watch: Stopwatch | None = None

    def __str__(self) -> str:
        description = f"{self._world.stages} stages of {self._world.processes_of_stage} rank(s), {self._schedule_name}"
        return f"{description}; {self._spread}" if self._spread else description

    @property
    def stages(self) -> list[int]:
        """List the stages of this process, ascending."""
        return [turn * self._world.stages + self._place for turn in range(self._virtual)]

    @property
    def bytes_sent(self) -> int:
        return self._links.bytes_sent + (0 if self._exchange is None else self._exchange.bytes_sent)

    def refuse_other_cut(self, model: Any) -> None:
        refuse_other_cut(model, self._world.stages * self._virtual, self.stages)

    def cut(self, model: Any) -> None:
        """Leave this process's stages of a patched model, in place; one that is cut stays as it is. From here on `schedule`
        says what each stage costs.

        Raises:
            ValueError: the model has fewer layers than stages, or cannot be cut.
        """
        cut, config = cut_of(model), model.config
        layers = (
            list(cut.stages)
            if cut is not None
            else stage_layers(config, self._world.stages * self._virtual, self._length)
        )
        if cut is None:
            cut_model(model, layers, self.stages)
        weights = tuple(stage_weights(config, layers, self._length))
        self.schedule = Schedule(self._schedule_name, self._virtual, weights)
        self._spread = describe_stages(config, layers, self._length)

    def begin_alike(self, model: torch.nn.Module) -> None:
        """Give every process the weights of the first of its stages' ranks; tied embeddings are rank 0's."""
        tensors = [*model.parameters(), *model.buffers()]
        begin_alike(tensors, self._compute, self._block[0], self._group)
        begin_alike(self._tied(model), self._compute, 0, self._ends)

    def begin_trained_alike(self, trained: list[torch.nn.Parameter]) -> None:
        begin_alike(trained, self._compute, self._block[0], self._group)

    def shard(self, model: Any, fsdp_plugin: Any) -> None:
        """Shard over the processes of this stage by FSDP2: accelerate would shard over all."""
        self.begin_alike(model)
        shard_over(model, self._group, fsdp_plugin)

    def _tied(self, model: Any) -> list[torch.nn.Parameter]:
        """List the parameters of embeddings that another device holds too; only the first and the last one have any."""
        cut = cut_of(model)
        if cut is None or not cut.tied or self._place not in (0, self._world.stages - 1):
            return []
        bare = language_model_of(model)
        embeddings = dict(bare.get_input_embeddings().named_parameters())
        return [embeddings[name] for name in cut.tied]

    def run(self, model: Any, step: RankStep, work: Work) -> torch.Tensor:
        assert self.schedule is not None, "the model was not cut"
        self.watch = Stopwatch(self._compute)
        return StepOfDevice(
            model,
            step,
            tasks_of(step.tasks),
            self._links,
            self._exchange,
            self._compute,
            activation_dtype(model),
            self._progress,
            router_coefficient=_router_coefficient(model) if work.router_loss else 0.0,
            memory=work.memory,
            offload=self._offload if work.learns else 0.0,
            result=work.result,
            arguments=work.arguments,
            sharded=work.sharded,
            watch=self.watch,
        ).run(work.learns)

    def seconds(self) -> tuple[float, float]:
        """Return the seconds that the tasks of the last step waited for other devices, and those that they computed."""
        between = self.watch.seconds() if self.watch is not None else []
        return sum(between[::2]), sum(between[1::2])

    def wait_share(self) -> float:
        """Return the share of the last step's tasks that this process spent waiting for other devices, 0 to 1."""
        waited, computed = self.seconds()
        return round(waited / max(waited + computed, 1e-9), 4)

    def describe(self) -> dict[str, float]:
        return {"stage_wait": self.wait_share()}

    def sum_gradients(
        self, model: Any, trained: list[torch.nn.Parameter], statistics: torch.Tensor, sharded: ShardedModel | None
    ) -> torch.Tensor:
        whole = [parameter for parameter in trained if not isinstance(parameter, DTensor)]
        sums = sum_step(whole, statistics, self._group)
        if sharded is None:
            self._sum_parts(trained)
        self._sum_tied(model)
        return sums

    def _sum_parts(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Sum, over the ranks that hold the same, the gradients of weights that tensor parallelism has left in parts. All of
        them have the same ones, or none at all."""
        parts = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
        if dist.get_world_size(self._replicas) == 1 or not parts:
            return
        gradients = []
        for parameter in parts:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(local_part(parameter.grad))
        sum_gradients(gradients, self._replicas)

    def _sum_tied(self, model: Any) -> None:
        """Add up the gradients of tied embeddings, which each end has summed over its own ranks."""
        for weight in self._tied(model):
            if not weight.requires_grad:
                continue
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            gradient: torch.Tensor = weight.grad
            if isinstance(weight, DTensor) and isinstance(gradient, DTensor):
                # The first stage looks it up and has its gradient whole, the last in parts.
                weight.grad = gradient = gradient.redistribute(placements=weight.placements)
            own = local_part(gradient)
            mine = own.contiguous().to(self._links.torch_device)  # it may wait in host memory
            first, *_, last = next(line for line in self._world.pipelines if dist.get_rank() in line)
            other = last if self._place == 0 else first
            theirs = torch.empty_like(mine)
            operations = [
                dist.P2POp(dist.isend, mine, other, self._ends),
                dist.P2POp(dist.irecv, theirs, other, self._ends),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            own.add_(theirs.to(own.device))

    def gradient_norm(self, model: Any, maximum: float) -> torch.Tensor:
        """Return the norm of the gradients of the whole model, and clip them to `maximum` in place."""
        tied = {id(weight) for weight in self._tied(model)} if self._place else set()
        copies, device = self._world.processes_of_stage, self._links.torch_device
        return clip_gradients(model.parameters(), maximum, copies, device, elsewhere=tied)


def _router_coefficient(model: Any) -> float:
    """Return the weight of the balance loss; 0: the model has none."""
    return balance_settings(model)[0] or 0.0 if asks_for_balance(model) else 0.0


def activation_dtype(model: Any) -> torch.dtype:
    """Return the dtype of what goes from stage to stage: the weights', or the one in which FSDP2 lets them compute."""
    for module in model.modules():
        policy = getattr(getattr(module, "_get_fsdp_state", lambda: None)(), "_mp_policy", None)
        if policy is not None and policy.param_dtype is not None:
            return policy.param_dtype
    return residual_dtype(model)
