"""Documents -> this rank's micro-batches of one optimizer step.

Every rank collates the same documents with the same plan and keeps its own segments (step_plans.py says how labels are
shifted). Nothing is sent.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hf_longctx.data.length_index import IGNORE_INDEX, LengthIndex
from hf_longctx.data.step_plans import UNADJUSTED, PlannedStep, Planning, read_shards, signed_hash
from hf_longctx.layouts.layout import Layout, Segment
from hf_longctx.planner import CostModel, Mode, StepPlan, Topology
from hf_longctx.planner.cost.adjustment import Adjustment
from hf_longctx.planner.cost.selective_offload import Offload
from hf_longctx.planner.stages.stage_order import Schedule, StageOrder, stage_order

IDLE_TOKENS = 2
"""Tokens of a micro-batch that only takes part in collectives; no model has to compute with none."""


@dataclass(frozen=True)
class MicroBatch:
    """One layout's tokens on this rank; T is this rank's number of tokens."""

    layout: Layout
    input_ids: torch.Tensor
    """int64 [1, T], in memory order"""
    shift_labels: torch.Tensor
    """int64 [1, T]: the token that each token predicts, -100 where it counts for nothing"""
    offload: int = 0
    """per mille of kept activations that wait in host memory"""
    unit: tuple[int, int] = (-1, 0)
    """its number in the plan, and which chunk of its document it is"""
    label_rows: torch.Tensor | None = None
    """int64 [n]: the tokens that have a label, known on the host; None: whoever needs them looks for them"""
    idle: bool = False
    """whether it is there only to take part in collectives: two tokens of no document, whose loss is zero"""

    def to(self, device: torch.device) -> "MicroBatch":
        return self._with(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "MicroBatch":
        return self._with(torch.Tensor.pin_memory)

    def _with(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "MicroBatch":
        """Copy it with each of its tensors changed."""
        rows = None if self.label_rows is None else change(self.label_rows)
        return replace(self, input_ids=change(self.input_ids), shift_labels=change(self.shift_labels), label_rows=rows)


@dataclass(frozen=True)
class RankStep:
    """One optimizer step of one rank: what the training loop gets as one batch."""

    plan: StepPlan
    """of the whole step, all ranks"""
    micro_batches: tuple[MicroBatch, ...]
    """this rank's, in the order in which it runs them; may be empty. In mode "lockstep" one in each round, idle where the
    plan has none for this rank"""
    num_items: int
    """label tokens of the step, all ranks: what the loss is divided by"""
    num_tokens: int
    """tokens of the step, all ranks"""
    fingerprint: int
    """signed 64-bit hash of what all ranks must agree on before they run: the plan, and where known the rows of the
    data set"""
    position: tuple[int, int] = (0, 0)
    """epoch, and step in the epoch"""
    tasks: tuple[np.ndarray, ...] = ()
    """of a pipeline, [device]: what each device of this rank's pipeline runs, in order (planner/stages/stage_order.py): int64
    [n, 5], kind, micro-batch, chunk, stage, and place in the one order of the tasks of all devices and ranks"""

    @property
    def tokens(self) -> int:
        """tokens that this rank holds in the step"""
        return sum(micro_batch.input_ids.numel() for micro_batch in self.micro_batches if not micro_batch.idle)

    def pin_memory(self) -> "RankStep":
        return replace(self, micro_batches=tuple(micro_batch.pin_memory() for micro_batch in self.micro_batches))


@dataclass(frozen=True)
class LengthAwareCollator:
    """A data collator: the documents of one global batch in, this rank's step out.

    Give it to a DataLoader whose batches are global batches, the same on every rank; `LongContextTrainer` does that
    by itself.

    Raises:
        PlanError: a document is longer than all ranks hold together.
        ValueError, TypeError: what LengthIndex refuses: missing input_ids, labels of another length, no label token.
    """

    topology: Topology
    """the ranks: how many, what each holds, which of them share a node; the same on every rank"""
    cost: CostModel
    """predicts times, which balance the plan; the same on every rank"""
    rank: int = 0
    planner: str = "hdp"
    """one of hf_longctx.planner.PLANNERS"""
    mode: Mode = "async"
    """whether ranks meet after every round (see hf_longctx.planner.hdp)"""
    offload: Offload | None = None
    """what host memory is worth; only planner hdp uses it, where ranks are equal and do not meet in rounds"""
    schedule: Schedule | None = None
    """of a pipeline: steps come with the order of its tasks"""

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> RankStep:
        """Plan and collate a step. Each document is a mapping with `input_ids` and optionally `labels`, equally long."""
        index = LengthIndex.from_dataset(features)
        documents = [features[i] for i in index.usable]
        lengths, label_tokens = index.lengths[index.usable], index.label_tokens[index.usable]
        return self.collate(lengths, label_tokens, documents.__getitem__)

    @property
    def planning(self) -> Planning:
        """Return what all ranks have in common."""
        return Planning(self.topology, self.cost, self.planner, self.mode, self.offload)

    def plan(
        self, lengths: np.ndarray, adjustment: Adjustment = UNADJUSTED, label_tokens: np.ndarray | None = None
    ) -> StepPlan:
        """Plan a global batch with what the run has learned so far.

        lengths, label_tokens: int64 [documents], tokens of each, and those that have a label (None: all)."""
        return self.planning.plan(lengths, adjustment, label_tokens)

    def collate(
        self,
        lengths: np.ndarray,
        label_tokens: np.ndarray,
        read: Callable[[int], Mapping[str, Any]],
        adjustment: Adjustment = UNADJUSTED,
    ) -> RankStep:
        """Plans a step and reads this rank's part of it.

        Args:
            lengths: int64 [documents] of the global batch, in tokens.
            label_tokens: int64 [documents]: how many of them have a label.
            read: document of the global batch -> its row; called only for documents of which this rank holds a part.
            adjustment: of cost model and topology, the same on every rank.
        """
        plan = self.plan(lengths, adjustment, label_tokens)
        layouts = plan.layouts(self.rank)
        columns = read_shards([layout for _, layout in layouts], self.rank, read)
        planned = PlannedStep(plan, int(label_tokens.sum()), int(lengths.sum()), plan.digest())
        return self.ordered(rank_step(planned, layouts, self.rank, *columns))

    def ordered(self, step: RankStep) -> RankStep:
        """Return the step, in a pipeline with the order of its tasks: found ahead, because very many ranks take a while (4,096
        ranks of 4 stages with 100,000 documents: 160 ms on one CPU core)."""
        if self.schedule is None:
            return step
        order = stage_order(step.plan, self.schedule)
        tasks = tuple(placed_tasks(order, self.rank, device) for device in range(order.devices))
        return replace(step, tasks=tasks, fingerprint=signed_hash(f"{step.fingerprint} {self.schedule}"))


def placed_tasks(order: StageOrder, rank: int, device: int) -> np.ndarray:
    """int64 [n, 5]: tasks of a device of a rank as `RankStep.tasks` has them, in order."""
    tasks = order.tasks(rank, device)
    kind, number, chunk, stage = tasks.T
    return np.c_[tasks, order.played.begun[kind, order.units.first_unit[number] + chunk, stage]]


def rank_step(
    planned: PlannedStep,
    layouts: Sequence[tuple[int, Layout]],
    rank: int,
    tokens: np.ndarray,
    labels: np.ndarray,
    position: tuple[int, int] = (0, 0),
) -> RankStep:
    """One rank's step.

    Args:
        planned: the step of all ranks.
        layouts: those of the rank, with their numbers: planned.plan.layouts(rank). Chunks of a document share a number.
        rank: whose step.
        tokens, labels: int64 [T]: what `read_shards` gives for these layouts. Micro-batches are views of them, and of one
            array of the rows with a label: loader processes hand on few storages so.
        position: epoch, and step in the epoch.
    """
    micro_batches: list[MicroBatch] = []
    begins = np.cumsum([0, *(layout.tokens(rank) for _, layout in layouts)])
    labelled = np.flatnonzero(labels[: begins[-1]] != IGNORE_INDEX)
    counts = np.diff(np.searchsorted(labelled, begins))
    rows = torch.from_numpy(labelled - np.repeat(begins[:-1], counts)).split(counts.tolist())
    for (number, layout), begin, stop, label_rows in zip(layouts, begins, begins[1:], rows):
        ids, shifted = (torch.from_numpy(column[begin:stop]).unsqueeze(0) for column in (tokens, labels))
        before = micro_batches[-1].unit if micro_batches else (-1, 0)
        unit = (number, before[1] + 1 if number == before[0] else 0)
        micro_batches.append(MicroBatch(layout, ids, shifted, int(planned.plan.offload[number]), unit, label_rows))
    if planned.plan.mode == "lockstep":
        in_round = {int(planned.plan.round[micro_batch.unit[0]]): micro_batch for micro_batch in micro_batches}
        micro_batches = [in_round.get(round) or idle_micro_batch(rank) for round in range(planned.plan.rounds)]
    return RankStep(
        planned.plan, tuple(micro_batches), planned.num_items, planned.num_tokens, planned.fingerprint, position
    )


def idle_micro_batch(rank: int) -> MicroBatch:
    """Return what a rank runs in a round that has nothing for it: its backward adds zeros to gradients."""
    tokens = torch.zeros((1, IDLE_TOKENS), dtype=torch.int64)
    layout = Layout({rank: (Segment(0, 0, IDLE_TOKENS),)})
    labels = torch.full_like(tokens, IGNORE_INDEX)
    return MicroBatch(layout, tokens, labels, label_rows=tokens[0, :0], idle=True)
