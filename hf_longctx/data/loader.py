"""A DataLoader whose batches are planned optimizer steps.

The sampler yields (epoch, step) and what the run has learned about its costs by then; the data set turns each into a
RankStep: the documents of that global batch (or the pieces of those that are too long: long_documents.py), their plan,
this rank's slices. Planning and reading run one step or more ahead: in the loader's worker processes where there are
any, else in a thread. Every rank derives the same global batches and plans from the same lengths; nothing is sent.
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from hf_longctx.data.collator import LengthAwareCollator, RankStep
from hf_longctx.data.long_documents import Pieces, other_policies, read_piece
from hf_longctx.planner import EpochBatches, GlobalBatches, PlanError, StepPlan
from hf_longctx.planner.adjustment import Adjustment, Adjustments

EpochStep = tuple[int, int]
Order = tuple[int, int, Adjustment]
"""Epoch, step, and what it is planned with: a worker process would not hear of it otherwise."""

AHEAD = 2
"""Steps prepared in advance by the thread. One hides planning and reading; the second absorbs a slow read."""


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

    def __init__(self, dataset: Any, pieces: Pieces, batches: GlobalBatches, collator: LengthAwareCollator) -> None:
        _refuse_too_long(pieces, collator)
        self.dataset, self.pieces = dataset, pieces
        self.batches, self.collator = batches, collator
        self.adjustments = Adjustments()
        self._last_epoch: tuple[int, EpochBatches] | None = None
        self._ahead: dict[EpochStep, Future[RankStep]] = {}
        self._thread: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self.pieces)

    def steps(self, epoch: int) -> int:
        """Optimizer steps of an epoch."""
        return len(self._epoch(epoch))

    def plan(self, epoch: int, step: int) -> StepPlan:
        """The plan of one step; nothing is read."""
        return self.collator.plan(self.pieces.lengths[self._epoch(epoch)[step]], self.adjustments.at(epoch, step))

    def documents(self, epoch: int, step: int) -> np.ndarray:
        """int64: rows of the data set that make one step's global batch, in the order in which its plan counts them; a
        row that is split stands once for each of its pieces."""
        return self.pieces.document[self._epoch(epoch)[step]]

    def order(self, epoch: int, step: int) -> Order:
        """What to ask for, to be called in the main process, where adjustments are known."""
        return epoch, step, self.adjustments.at(epoch, step)

    def __getitem__(self, order: Order) -> RankStep:
        if get_worker_info() is not None:
            return self.prepare(*order)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf_longctx-loader")
        epoch, step, _ = order
        wanted = [(epoch, s) for s in range(step, min(step + 1 + AHEAD, self.steps(epoch)))]
        self._ahead = {k: self._ahead.get(k) or self._thread.submit(self.prepare, *self.order(*k)) for k in wanted}
        return self._ahead.pop((epoch, step)).result()

    def prepare(self, epoch: int, step: int, adjustment: Adjustment) -> RankStep:
        """Plans one step and reads this rank's part of it."""
        batch, pieces = self._epoch(epoch)[step], self.pieces
        planned = self.collator.collate(
            pieces.lengths[batch],
            int(pieces.label_tokens[batch].sum()),
            lambda doc: read_piece(self.dataset, pieces, int(batch[doc])),
            adjustment,
        )
        rows, starts = pieces.document[batch].tolist(), pieces.start[batch].tolist()
        agreed = f"{planned.fingerprint} {pieces.index.fingerprint} {epoch} {step} {rows} {starts}"
        digest = hashlib.blake2b(agreed.encode(), digest_size=8).digest()
        fingerprint = int.from_bytes(digest, "little", signed=True)
        return replace(planned, fingerprint=fingerprint, position=(epoch, step))

    def _epoch(self, epoch: int) -> EpochBatches:
        found = self._last_epoch
        if found is None or found[0] != epoch:
            found = self._last_epoch = (epoch, self.batches.epoch(epoch))
        return found[1]

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes: what is prepared ahead stays here."""
        return self.__dict__ | {"_ahead": {}, "_thread": None}


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
    ...)."""

    def __init__(self, steps: PlannedSteps, **kwargs: Any) -> None:
        super().__init__(steps, batch_sampler=StepSampler(steps), collate_fn=_only, **kwargs)

    @property
    def ahead(self) -> int:
        """Steps that are asked for in advance: order k is made out when step k - ahead is fetched."""
        return self.num_workers * (self.prefetch_factor or 0) if self.num_workers else AHEAD

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next iteration runs through."""
        assert isinstance(self.batch_sampler, StepSampler)
        self.batch_sampler.set_epoch(epoch)


def _only(batch: list[RankStep]) -> RankStep:
    return batch[0]


def _refuse_too_long(pieces: Pieces, collator: LengthAwareCollator) -> None:
    longest = int(pieces.lengths.argmax())
    topology = collator.topology
    length, limit = int(pieces.lengths[longest]), topology.tokens
    if length <= limit:
        return
    raise PlanError(
        f"{'a piece of ' if pieces.is_part(longest) else ''}document {pieces.document[longest]} has {length} tokens, but all "
        f"ranks together hold {topology.world_size} ranks * {topology.capacity} tokens (capacity) = {limit}. Valid: capacity "
        f">= {-(-length // topology.world_size)}, or >= {-(-length // topology.capacity)} ranks, or "
        + (
            f"a shorter document, or {other_policies(length, limit)}"
            if pieces.policy == "error"
            else f"longest_document <= {limit} instead of {pieces.limit}, in a new run: a resumed run keeps its own"
        )
    )
