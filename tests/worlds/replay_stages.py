"""What the processes of a pipeline start in a step, for replay.py: each runs its own tasks of the plan's order
(training/steps/stage_tasks.py) through its own links, of which every message is written down.

The process of device d and rank r at place t of those that share the rank's heads is number (d * ranks + r) * degree + t. Its
stages are two layers of attention without arithmetic, each with the sums of tensor parallelism behind it. Written down besides:
the gathers of zero1 before the first task and its sums after the last, over the ranks of a device, and the sum of losses and
norms over all.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from hf_longctx.attention.engine import layout_attention
from hf_longctx.attention.kernels import KERNELS
from hf_longctx.data.collator import placed_tasks, rank_step
from hf_longctx.data.step_plans import PlannedStep
from hf_longctx.models.stages import Cut, StageInput, StageOutput
from hf_longctx.parallel.stage_links import Links, Way
from hf_longctx.planner.stages.stage_order import Schedule, stage_order
from hf_longctx.training.steps.stage_tasks import StepOfDevice
from hf_longctx.training.steps.task_order import tasks_of
from tests.builders.plans.random_plans import cut_in_chunks
from tests.worlds.replay import (
    HEAD_DIM,
    HEADS,
    HEADS_SHARED,
    KV_HEADS,
    LAYERS,
    SHARDS,
    Batch,
    Case,
    WithoutArithmetic,
    WrittenDown,
    planned,
    recorded,
)

EVERYONE = "everyone"
"""The group of sums over all processes."""


class WrittenLinks(Links):
    """The links of one process, which send nothing; they write into the list of its exchange."""

    def __init__(self, case: Case, exchange: WrittenDown, device: int) -> None:
        of_device = case.ranks * case.tensor_parallel
        pipeline = range(exchange.process % of_device, of_device * case.stages, of_device)
        self._take_place(pipeline, device, case.virtual > 1, case.links_in_order, exchange.progress)
        self._exchange = exchange

    def _begin(self, sends: bool, tensor: torch.Tensor, way: Way) -> "Waited":
        message = [(self._peer(way[0]), tensor.nbytes)]
        lane = f"edge {way[0]}, {'gradients' if way[1] else 'activations'}"
        batch = Batch(self._exchange.process, lane, message if sends else [], [] if sends else message, beside=True)
        self._exchange.batches.append(batch)
        return Waited(batch, self._exchange.batches)


class Waited:
    """The work of one message, whose wait is written down."""

    def __init__(self, batch: Batch, batches: list[Batch]) -> None:
        self._batch, self._batches = batch, batches

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        self._batches.append(Batch(self._batch.rank, "wait", [], [], waits_for=self._batch))


class SummedOverHeads(torch.autograd.Function):
    """x, and a sum of tensor parallelism forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, exchange: WrittenDown) -> torch.Tensor:
        ctx.exchange = exchange
        exchange.meet(HEADS_SHARED)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        ctx.exchange.meet(HEADS_SHARED)
        return gradient, None


def staged_model(case: Case, device: int) -> Callable[..., StageOutput]:
    """Return what stands for a cut model on a device: called as one, it runs attention alone."""
    own = tuple(range(device, case.stages * case.virtual, case.stages))
    stages = tuple(range(LAYERS * stage, LAYERS * (stage + 1)) for stage in range(case.stages * case.virtual))

    def layer(hidden: torch.Tensor, layout: Any, exchange: WrittenDown) -> torch.Tensor:
        rows = hidden.view(-1, HEADS, HEAD_DIM)
        # Keys and values of a document's earlier chunks are there already.
        context = rows.new_zeros(layout.context_tokens(exchange.rank), KV_HEADS, HEAD_DIM)
        keys = torch.cat([rows[:, :KV_HEADS], context])
        attended = layout_attention(rows, keys, keys, layout, exchange, kernel=WithoutArithmetic.name)
        return SummedOverHeads.apply(attended.reshape(hidden.shape), exchange)

    def run(*, stage: StageInput, layout: Any, exchange: WrittenDown, **_: Any) -> StageOutput:
        tokens, hidden = layout.tokens(exchange.rank), stage.hidden
        if hidden is None:
            hidden = torch.zeros((1, tokens, HEADS * HEAD_DIM), requires_grad=True)
        for _ in range(LAYERS):
            if case.recomputes:
                hidden = checkpoint(layer, hidden, layout, exchange, use_reentrant=False)
            else:
                hidden = layer(hidden, layout, exchange)
        last = stage.stage == len(stages) - 1
        return StageOutput(None if last else hidden, hidden.sum() if last else None)

    run.longctx_cut = Cut(stages, own, {}, ())  # type: ignore[attr-defined]
    run.config = SimpleNamespace(hidden_size=HEADS * HEAD_DIM)  # type: ignore[attr-defined]
    return run


def record(case: Case) -> list[list[Batch]]:
    """By process, what it starts in a step: of stages, or of ranks that hold all layers."""
    return recorded_stages(case) if case.stages > 1 else recorded(case)


def recorded_stages(case: Case) -> list[list[Batch]]:
    """By process, what it starts in a step of a pipeline."""
    KERNELS[WithoutArithmetic.name] = WithoutArithmetic()
    plan = cut_in_chunks(planned(case, "pipeline"))
    schedule = Schedule("interleaved" if case.virtual > 1 else "1f1b", case.virtual)
    order, step = stage_order(plan, schedule), PlannedStep(plan, 1, 1, 0)
    by_process: dict[int, list[Batch]] = {}
    for rank in range(case.ranks):
        layouts = plan.layouts(rank)
        tokens = np.zeros(sum(layout.tokens(rank) for _, layout in layouts), np.int64)
        of_rank = rank_step(step, layouts, rank, tokens, tokens)
        tasks = tasks_of([placed_tasks(order, rank, device) for device in range(case.stages)])
        for device in range(case.stages):
            for place in range(case.tensor_parallel):
                exchange = WrittenDown(case, rank, place, device)
                _run(case, exchange, of_rank, tasks, device)
                by_process[exchange.process] = exchange.batches
    return [by_process[process] for process in sorted(by_process)]


def _run(case: Case, exchange: WrittenDown, step: Any, tasks: Sequence[Any], device: int) -> None:
    """A step of one process."""
    for _ in range(LAYERS):
        exchange.meet(SHARDS)  # gathers weights
    StepOfDevice(
        *(staged_model(case, device), step, tasks, WrittenLinks(case, exchange, device), exchange),
        *(torch.device("cpu"), torch.float32, exchange.progress),
    ).run(learn=True)
    for _ in range(LAYERS):
        exchange.meet(SHARDS)  # sums gradients
    others = [
        (process, 0)
        for process in range(case.stages * case.ranks * case.tensor_parallel)
        if process != exchange.process
    ]
    exchange.batches.append(Batch(exchange.process, EVERYONE, others, others))
