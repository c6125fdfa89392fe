"""Planned steps where every process holds all layers: micro-batches one after another (training/execution.py)."""

import itertools
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from hf_longctx.attention.exchange import Exchange
from hf_longctx.data.collator import RankStep
from hf_longctx.models.loss.balance import has_field
from hf_longctx.models.stages import refuse_other_cut
from hf_longctx.parallel.reduction import clip_gradients, sum_step
from hf_longctx.parallel.sharding import ShardedModel, begin_alike, name_layers, refuse_mixed_dtypes
from hf_longctx.planner.stages.stage_order import Schedule
from hf_longctx.supervision.progress import Progress
from hf_longctx.training.execution import run_micro_batches
from hf_longctx.training.steps.work import Work


class PlainSteps:
    """Runs a rank's micro-batches.

    Args:
        processes: in all.
        exchange: of the ranks that documents are spread over; None where there is one.
        device: where this process computes.
        offload: share of what is kept for backward that waits in host memory at least, 0 to 1.
        progress: notes where this process is.
    """

    schedule: Schedule | None = None
    times_ranks = True

    def __init__(
        self, processes: int, exchange: Exchange | None, device: torch.device, offload: float, progress: Progress
    ) -> None:
        self._processes, self._several = processes, processes > 1
        self._in_host_memory = False
        """whether gradients wait there, which torch would sum over NCCL"""
        self._exchange, self._device, self._offload, self._progress = exchange, device, offload, progress

    @property
    def bytes_sent(self) -> int:
        return 0 if self._exchange is None else self._exchange.bytes_sent

    def refuse_other_cut(self, model: Any) -> None:
        refuse_other_cut(model, 1, [0])

    def cut(self, model: Any) -> None:
        """Leave all of it."""

    def begin_alike(self, model: Any) -> None:
        if self._several:
            begin_alike(itertools.chain(model.parameters(), model.buffers()), self._device)

    def begin_trained_alike(self, trained: list[torch.nn.Parameter]) -> None:
        if self._several:
            begin_alike(trained, self._device)

    def shard(self, model: Any, fsdp_plugin: Any) -> None:
        """Leave it to accelerate, which is told the layers that are there. It takes parts of each rank's own weights, which are
        made alike first, unless it loads them from rank 0 itself."""
        self._in_host_memory = isinstance(fsdp_plugin.cpu_offload, CPUOffloadPolicy)
        if not fsdp_plugin.cpu_ram_efficient_loading:
            self.begin_alike(model)
        name_layers(model, fsdp_plugin)
        refuse_mixed_dtypes(model, fsdp_plugin)

    def run(self, model: Any, step: RankStep, work: Work) -> torch.Tensor:
        arguments = dict(work.arguments)
        if not work.router_loss and has_field(model.config):
            arguments["output_router_logits"] = False
        return run_micro_batches(
            model,
            step,
            self._exchange,
            self._device,
            work.backward,
            work.mark,
            work.sharded,
            work.memory,
            self._offload if work.learns else 0.0,
            self._progress,
            result=work.result,
            agreed=True,
            **arguments,
        )

    def sum_gradients(
        self, model: Any, trained: list[torch.nn.Parameter], statistics: torch.Tensor, sharded: ShardedModel | None
    ) -> torch.Tensor:
        # What is in parts, FSDP2 has summed; the rest is the same on all ranks, adapters on a model in parts among it.
        whole, parts = (
            [parameter for parameter in trained if isinstance(parameter, DTensor) == in_parts]
            for in_parts in (False, True)
        )
        uses = [] if sharded is None else sharded.taken_uses(parts)
        sums = sum_step(
            whole, torch.cat([statistics, torch.tensor(uses, dtype=statistics.dtype, device=statistics.device)])
        )
        sums, ranks_of = sums[: len(statistics)], sums[len(statistics) :]
        if not all(uses):  # else the host would wait for the device in each step
            for parameter, ranks in zip(parts, ranks_of.tolist()):
                if not ranks:
                    parameter.grad = None
        return sums

    def gradient_norm(self, model: Any, maximum: float) -> torch.Tensor | None:
        if not self._in_host_memory:
            return None
        return clip_gradients(model.parameters(), maximum, self._processes, self._device)

    def describe(self) -> dict[str, float]:
        return {}
