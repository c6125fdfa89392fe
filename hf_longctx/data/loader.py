"""A DataLoader whose batches are planned optimizer steps.

The sampler yields (epoch, step) and what the run has learned about its costs by then; the data set turns each into a
RankStep: the documents of that global batch (or the pieces of those that are too long: long_documents.py), their plan,
this rank's slices. Planning and reading run one step or more ahead: in the loader's worker processes where there are
any, else in a thread. Every rank derives the same global batches and plans from the same lengths; nothing is sent.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from hf_longctx.data.ahead import Ahead
from hf_longctx.data.collator import LengthAwareCollator, RankStep, rank_step
from hf_longctx.data.long_documents import Pieces
from hf_longctx.data.step_plans import StepPlans
from hf_longctx.planner import GlobalBatches, StepPlan
from hf_longctx.planner.cost.adjustment import Adjustment, Adjustments

Order = tuple[int, int, Adjustment]
"""Epoch, step, and what it is planned with: a worker process would not hear of it otherwise."""

AHEAD = 2
"""Steps prepared in advance by the thread. One hides planning and reading; the second absorbs a slow read."""
LOOK_SECONDS = 0.2
"""How often who waits for a step asks whether it is still wanted."""


class NotWanted(Exception):
    """Raised in place of a step that is not prepared yet, where the program was told to end."""


class PlannedSteps(Dataset[RankStep]):
    """(epoch, step, adjustment) -> RankStep. Its length is the number of pieces, as Trainer's `num_examples` expects.

    Args:
        dataset: `datasets.Dataset` or any indexable data set of mappings with `input_ids` and optionally `labels`.
        pieces: the documents, or parts of them, that are trained on.
        batches: global batches over the pieces, in their order.
        collator: plans and slices.

    Raises:
        PlanError: a piece is longer than all ranks together can hold.
    """

    in_workers = True
    """Whether worker processes can prepare steps."""

    def __init__(self, dataset: Any, pieces: Pieces, batches: GlobalBatches, collator: LengthAwareCollator) -> None:
        self.dataset, self.pieces, self.batches = dataset, pieces, batches
        self.collator = collator
        self.adjustments = Adjustments()
        self.ahead = AHEAD
        """Steps that are prepared in advance where there are no worker processes."""
        self.told_to_end: Callable[[], bool] | None = None
        """Whether nobody wants further steps: then a step that is not prepared yet raises NotWanted."""
        self._prepared: dict[Order, Future[RankStep]] = {}
        self._threads: Ahead | None = None

    @property
    def collator(self) -> LengthAwareCollator:
        return self._collator

    @collator.setter
    def collator(self, collator: LengthAwareCollator) -> None:
        self._collator, self.plans = collator, StepPlans(self.pieces, self.batches, collator.planning)

    def __len__(self) -> int:
        return len(self.pieces)

    def steps(self, epoch: int) -> int:
        """Optimizer steps of an epoch."""
        return len(self.plans.epoch(epoch))

    def plan(self, epoch: int, step: int) -> StepPlan:
        """The plan of one step; nothing is read."""
        return self.plans.plan(*self.order(epoch, step))

    def documents(self, epoch: int, step: int) -> np.ndarray:
        """int64: rows of the data set that make one step's global batch, in the order in which its plan counts them; a
        row that is split stands once for each of its pieces."""
        return self.pieces.document[self.plans.epoch(epoch)[step]]

    def order(self, epoch: int, step: int) -> Order:
        """Return what to ask for, to be called in the main process, where adjustments are known."""
        return epoch, step, self.adjustments.at(epoch, step)

    def __getitem__(self, order: Order) -> RankStep:
        if get_worker_info() is not None:
            return self.prepare(*order)
        if self._threads is None:
            self._threads = self._new_threads()
        epoch, step, _ = order
        following = range(step + 1, min(step + 1 + self.ahead, self.steps(epoch)))
        wanted = [order, *(self.order(epoch, later_step) for later_step in following)]
        for request in self._prepared.keys() - set(wanted):
            self._prepared.pop(request).cancel()
        for request in wanted:
            if request not in self._prepared:
                self._prepared[request] = self._threads.submit(self.prepare, *request)
        step_ahead = self._prepared.pop(order)
        if (told_to_end := self.told_to_end) is not None:
            while wait([step_ahead], LOOK_SECONDS).not_done:
                if told_to_end():
                    raise NotWanted
        return step_ahead.result()

    def prepare(self, epoch: int, step: int, adjustment: Adjustment) -> RankStep:
        """Plans one step and reads this rank's part of it."""
        rank = self.collator.rank
        planned = self.plans.planned(epoch, step, adjustment)
        layouts = planned.plan.layouts(rank)
        columns = self.plans.read(self.dataset, epoch, step, [layout for _, layout in layouts], rank)
        return self.collator.ordered(rank_step(planned, layouts, rank, *columns, (epoch, step)))

    def _new_threads(self) -> Ahead:
        return Ahead(1, "hf_longctx-loader")

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is prepared ahead: it stays in this process, not in its workers."""
        return self.__dict__ | {"_prepared": {}, "_threads": None, "told_to_end": None}


class StepSampler(Sampler[list[Order]]):
    """Batch sampler of one epoch: the orders of its steps, each made out when it is asked for."""

    def __init__(self, steps: PlannedSteps) -> None:
        self._steps = steps
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self._steps.steps(self.epoch)

    def __iter__(self) -> Iterator[list[Order]]:
        return ([self._steps.order(self.epoch, step)] for step in range(len(self)))


class PlannedDataLoader(DataLoader[RankStep]):
    """One RankStep per optimizer step. Keyword arguments are DataLoader's (num_workers, pin_memory, prefetch_factor
    ...).

    Raises:
        ValueError: worker processes are wanted of steps that none can prepare.
    """

    def __init__(self, steps: PlannedSteps, **kwargs: Any) -> None:
        if (workers := kwargs.get("num_workers", 0)) and not steps.in_workers:
            raise ValueError(
                f"num_workers is {workers}, but document servers prepare the steps. Valid: 0, and more document servers"
            )
        super().__init__(steps, batch_sampler=StepSampler(steps), collate_fn=_only, **kwargs)

    @property
    def ahead(self) -> int:
        """Steps that are asked for in advance: order k is made out when step k - ahead is fetched."""
        assert isinstance(self.dataset, PlannedSteps)
        return self.num_workers * (self.prefetch_factor or 0) if self.num_workers else self.dataset.ahead

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch that the next iteration runs through."""
        assert isinstance(self.batch_sampler, StepSampler)
        self.batch_sampler.set_epoch(epoch)


def _only(batch: list[RankStep]) -> RankStep:
    return batch[0]
