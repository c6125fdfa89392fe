"""Runs one device's part of a planned step: the forwards and backwards of its stages, in the order that the plan gives them.

    forward    receive activations | compute the stage | send activations on
    backward   receive gradients   | autograd          | send the gradients of what was received

A unit is a micro-batch, or one chunk of a long document. Each has one autograd graph per stage, held from its forward to its
backward. Ranks that share a unit exchange keys and values inside it, all in the same stage at the same place of the order.

Mixture of experts. The balance loss of a document is linear in the router's probabilities once it is known how many tokens each
expert got in all layers (models/families/mixtral.py). So counts travel forward with the activations, their totals backward with
the gradients, and each stage adds its own part of the loss.

T tokens of this rank in a unit, H hidden size, D documents of this rank in a unit, E experts.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from hf_longctx.attention.earlier import EarlierChunks
from hf_longctx.attention.exchange import Exchange, sum_over_holders
from hf_longctx.data.collator import MicroBatch, RankStep, idle_micro_batch
from hf_longctx.models.families.mixtral import RouterSums, balance_loss, router_sums
from hf_longctx.models.stages import StageInput, StageOutput, cut_of
from hf_longctx.parallel.sharding import ShardedModel
from hf_longctx.parallel.stage_links import Links, Message
from hf_longctx.planner.stages.stage_order import BACKWARD, FORWARD
from hf_longctx.supervision.progress import Progress
from hf_longctx.training.measuring.recalibration import Stopwatch
from hf_longctx.training.memory.activations import ActivationMemory
from hf_longctx.training.memory.out_of_memory import explained
from hf_longctx.training.steps.task_order import Task, Unit


@dataclass
class _Running:
    """A unit in a stage, between forward and backward."""

    received: torch.Tensor | None
    """[1, T, H], a leaf; None in the first stage"""
    output: torch.Tensor
    """[1, T, H], or the loss in the last stage"""
    router: RouterSums | None
    """of the stage's layers"""


@dataclass
class StepOfDevice:
    """One step of the stages of this process.

    Args:
        model: cut (models/stages.py), called as a whole.
        step: what this rank of the plan runs.
        tasks: [device] of this pipeline, in order.
        links: to the devices before and after.
        exchange: of the ranks that have the same stages; None where there is one.
        device: where this process computes.
        dtype: of activations between stages.
        progress: notes where this process is.
        router_coefficient: of the balance loss; 0: there is none.
        memory: what is kept between a forward and its backward, and where.
        offload: share of it that waits in host memory at least, 0 to 1.
        result: takes from the last stage's output what is summed up and differentiated, a scalar.
        arguments: further ones of the last stage's forwards.
        sharded: the stages under FSDP2, whose collectives this step times.
        watch: is marked at the beginning, and of each task when it begins to compute, and when it is done.
    """

    model: Any
    step: RankStep
    tasks: Sequence[Sequence[Task]]
    links: Links
    exchange: Exchange | None
    device: torch.device
    dtype: torch.dtype
    progress: Progress
    router_coefficient: float = 0.0
    memory: ActivationMemory | None = None
    offload: float = 0.0
    result: Callable[[Any], torch.Tensor] = attrgetter("loss")
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sharded: ShardedModel | None = None
    watch: Stopwatch | None = None

    _units: dict[Unit, MicroBatch] = field(init=False)
    _lengths: dict[int, dict[int, int]] = field(init=False, default_factory=dict)
    """micro-batch -> document -> tokens"""
    _running: dict[tuple[Unit, int], _Running] = field(init=False, default_factory=dict)
    _earlier: dict[int, EarlierChunks] = field(init=False, default_factory=dict)
    _assigned: dict[int, torch.Tensor] = field(init=False, default_factory=dict)
    """micro-batch -> int64 [D, E], in the last stage: of its chunks so far, then of all ranks and chunks"""

    def __post_init__(self) -> None:
        cut = cut_of(self.model)
        assert cut is not None, "the model is whole"
        self._last = len(cut.stages) - 1
        self._rank = self.exchange.rank if self.exchange is not None else 0
        self._units = {batch.unit: batch for batch in self.step.micro_batches}
        self._chunks = Counter(number for number, _ in self._units)
        for (number, _), micro_batch in self._units.items():  # the last chunk knows the whole document
            self._lengths[number] = dict(micro_batch.layout.doc_lengths)
        self._total = torch.zeros((), dtype=torch.float64, device=self.device)

    def run(self, learn: bool) -> torch.Tensor:
        """Run the forwards of a step, and its backwards if it shall `learn`.

        Returns:
            float64 scalar: this process's part of the loss of the step; the sum over all processes is the loss.

        Raises:
            torch.OutOfMemoryError: a unit does not fit into memory; says which, and what to change.
        """
        tasks = [task for task in self.tasks[self.links.device] if learn or task.kind == FORWARD]
        self._expect(learn)
        if self.sharded is not None:
            self.progress.begin("gathering weights", collective=True)
            self.sharded.gather()
            self.sharded.before_micro_batch(last=False)
        self.progress.begin("computing")
        self._mark()
        left = Counter(task.unit[0] for task in tasks)
        for at, task in enumerate(tasks, 1):
            self.progress.begin_micro_batch(at, len(tasks))
            self.links.reach(task.place)
            micro_batch = self._units[task.unit]
            with self._explained(micro_batch), torch.set_grad_enabled(learn):
                if task.kind == FORWARD:
                    following = tasks[at][:3] if at < len(tasks) else None
                    self._forward(task, micro_batch, learn, waits=following != (BACKWARD, task.unit, task.stage))
                elif task.kind == BACKWARD:
                    self.progress.begin_backward()
                    self._backward(task)
            self._mark()
            left[task.unit[0]] -= 1
            if not left[task.unit[0]]:
                self._earlier.pop(task.unit[0], None)
                self._assigned.pop(task.unit[0], None)
        assert not self._running, "a forward had no backward"
        self.progress.wait_for(())
        self.links.finish()
        if self.sharded is not None and learn:
            self.sharded.before_micro_batch(last=True)
            self._run_idle(self.sharded)
        elif self.sharded is not None:
            self.sharded.release()
        if self.memory is not None:
            self.memory.host.forget()
        return self._total

    def _explained(self, micro_batch: MicroBatch) -> contextlib.AbstractContextManager[None]:
        topology, share = self.step.plan.topology, self._offloaded(micro_batch)
        return explained(
            self.model, micro_batch.layout, self._rank, topology, self.progress, self.device, self.sharded, share
        )

    def _offloaded(self, micro_batch: MicroBatch) -> float:
        return max(micro_batch.offload / 1000, self.offload)

    def _mark(self) -> None:
        if self.watch is not None:
            self.watch.mark()

    def _run_idle(self, sharded: ShardedModel) -> None:
        """Send two tokens of no document through all stages of this process, so that their backward carries the accumulated
        gradients through FSDP2's reduction. Nothing goes to other devices."""
        idle = idle_micro_batch(self._rank).to(self.device)
        labels = {"shift_labels": idle.shift_labels, "label_rows": idle.label_rows, "num_items_in_batch": 1}
        cut = cut_of(self.model)
        assert cut is not None
        shape = (1, idle.layout.tokens(self._rank), self.model.config.hidden_size)
        hidden = torch.zeros(shape, dtype=self.dtype, device=self.device, requires_grad=True)
        result = hidden.sum()
        for stage in cut.own:
            first = stage == 0
            out: StageOutput = self.model(
                layout=idle.layout,
                exchange=self.exchange,
                stage=StageInput(stage, idle.input_ids if first else None, None if first else hidden),
                **(labels if stage == self._last else {}),
            )
            if out.hidden is not None:
                hidden, result = out.hidden, out.hidden.sum()
            if stage == self._last:
                result = self.result(out)
        if result.requires_grad:
            torch.autograd.backward(0 * result)
        else:  # all of it is frozen, and no backward holds weights in parts again
            sharded.release()

    # What comes from other devices

    def _expect(self, learn: bool) -> None:
        devices, here = self.links.devices, self.links.device
        before, after = self.tasks[(here - 1) % devices], self.tasks[(here + 1) % devices]
        forward = [task for task in before if task.kind == FORWARD and task.stage < self._last]
        self.links.expect((self._message(task, task.stage + 1) for task in forward), backward=False)
        if learn:
            backward = [task for task in after if task.kind == BACKWARD and task.stage > 0]
            self.links.expect((self._message(task, task.stage - 1) for task in backward), backward=True)

    def _message(self, sender: Task, stage: int) -> Message:
        """Activations that a stage gets from a task, or gradients: both are of the same shapes."""
        config, layout = self.model.config, self._units[sender.unit].layout
        parts: list[Any] = [((1, layout.tokens(self._rank), config.hidden_size), self.dtype)]
        if self.router_coefficient:
            documents = len({segment.doc for segment in layout.shard(self._rank)})
            parts.append(((documents, config.num_local_experts), torch.int64))
        return Message((sender.unit, stage), tuple(parts), sender.place)

    # Tasks

    def _forward(self, task: Task, micro_batch: MicroBatch, learn: bool, waits: bool) -> None:
        micro_batch = micro_batch.to(self.device)
        number, layout = task.unit[0], micro_batch.layout
        received, counts = None, None
        if task.stage > 0:
            received, *more = self.links.receive((task.unit, task.stage), backward=False)
            received = received.to(self.device).requires_grad_(learn)
            counts = more[0] if more else None
        self._mark()
        arguments: dict[str, Any] = {}
        if self._chunks[number] > 1:
            arguments["earlier"] = self._earlier.setdefault(number, EarlierChunks())
        if task.stage == self._last:
            arguments |= {
                "shift_labels": micro_batch.shift_labels,
                "label_rows": micro_batch.label_rows,
                "num_items_in_batch": self.step.num_items,
                "doc_lengths": self._lengths[number],
                **self.arguments,
            }
        kept: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.memory is not None and learn:
            kept = self.memory.forward(layout, self._rank, self._offloaded(micro_batch))
        with kept:
            out: StageOutput = self.model(
                layout=layout,
                exchange=self.exchange,
                stage=StageInput(
                    task.stage,
                    micro_batch.input_ids if task.stage == 0 else None,
                    received,
                    router=bool(self.router_coefficient),
                    waits=waits,
                ),
                **arguments,
            )
        router = self._counted(task, out, counts)
        if out.hidden is not None:
            sent = [out.hidden.detach().to(self.dtype)]
            self.links.send([*sent, *([router.assignments] if router is not None else [])], backward=False)
        output = out.hidden
        if task.stage == self._last:
            output = self.result(out)
            self._total += output.detach()
        if learn:
            assert output is not None
            self._running[task.unit, task.stage] = _Running(received, output, router)

    def _counted(self, task: Task, out: StageOutput, counts: torch.Tensor | None) -> RouterSums | None:
        """Sums over this stage, with the assignments of those before it."""
        if not self.router_coefficient:
            return None
        layout, number = self._units[task.unit].layout, task.unit[0]
        sums = router_sums(out.router_logits, self.model.config.num_experts_per_tok, layout, self._rank)
        if counts is not None:
            sums.assignments.add_(counts.to(self.device))
        if task.stage == self._last:
            assigned = self._assigned.get(number)
            self._assigned[number] = sums.assignments.clone() if assigned is None else assigned.add_(sums.assignments)
            if task.unit[1] == self._chunks[number] - 1:
                sum_over_holders(dict(zip(sums.documents, self._assigned[number])), layout, self.exchange)
        return sums

    def _backward(self, task: Task) -> None:
        running = self._running.pop((task.unit, task.stage))
        gradient: torch.Tensor | None = None
        totals = self._assigned.get(task.unit[0])
        if task.stage < self._last:
            gradient, *more = self.links.receive((task.unit, task.stage), backward=True)
            gradient = gradient.to(self.device, running.output.dtype)
            totals = more[0].to(self.device) if more else None
        self._mark()
        roots = [(running.output, gradient)]
        if running.router is not None and totals is not None:
            roots.append((self._balance(task.unit[0], running.router, totals), None))
        learned = [pair for pair in roots if pair[0].requires_grad]  # nothing, where the first stage is frozen
        if learned:
            torch.autograd.backward([root for root, _ in learned], [gradient for _, gradient in learned])
        if running.received is not None:
            assert running.received.grad is not None
            sent = [running.received.grad.to(self.dtype), *([totals] if totals is not None else [])]
            self.links.send(sent, backward=True)

    def _balance(self, number: int, router: RouterSums, totals: torch.Tensor) -> torch.Tensor:
        """This stage's part of the balance loss of a unit's tokens."""
        lengths = [self._lengths[number][doc] for doc in router.documents]
        layers = self.model.config.num_hidden_layers
        loss = balance_loss(totals, router.probabilities, lengths, layers, self.step.num_tokens)
        loss = self.router_coefficient * loss
        self._total += loss.detach()
        return loss
