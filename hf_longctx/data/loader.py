"""A DataLoader whose batches are planned optimizer steps.

The sampler yields (epoch, step); the data set turns each into a RankStep: the documents of that global batch, their
plan, this rank's slices. Planning and reading run one step or more ahead: in the loader's worker processes where
there are any, else in a thread. Every rank derives the same global batches and plans from the same lengths; nothing
is sent.
"""

import hashlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import datasets
import numpy as np
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from hf_longctx.data.collator import LengthAwareCollator, RankStep
from hf_longctx.data.length_index import LengthIndex
from hf_longctx.planner import EpochBatches, GlobalBatches, PlanError, StepPlan

EpochStep = tuple[int, int]

AHEAD = 2
"""Steps prepared in advance by the thread. One hides planning and reading; the second absorbs a slow read."""


class PlannedSteps(Dataset[RankStep]):
    """(epoch, step) -> RankStep. Its length is the number of documents, as Trainer's `num_examples` expects.

    Args:
        dataset: `datasets.Dataset` or any indexable data set of mappings with `input_ids` and optionally `labels`.
        index: its lengths; documents that are not usable are left out.
        batches: global batches over the usable documents, in the order of `index.usable`.
        collator: plans and slices.

    Raises:
        PlanError: a document is longer than all ranks together can hold.
    """

    def __init__(self, dataset: Any, index: LengthIndex, batches: GlobalBatches, collator: LengthAwareCollator) -> None:
        _refuse_too_long(index, collator)
        columns = [name for name in ("input_ids", "labels") if name in getattr(dataset, "column_names", ())]
        self.dataset = dataset
        self._dataset = dataset.with_format("numpy", columns) if _is_stored(dataset) else dataset
        self._index, self.batches, self.collator = index, batches, collator
        self._last_epoch: tuple[int, EpochBatches] | None = None
        self._ahead: dict[EpochStep, Future[RankStep]] = {}
        self._thread: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._index.usable)

    def steps(self, epoch: int) -> int:
        """Optimizer steps of an epoch."""
        return len(self._epoch(epoch))

    def plan(self, epoch: int, step: int) -> StepPlan:
        """The plan of one step; nothing is read."""
        return self.collator.plan(self._index.lengths[self.documents(epoch, step)])

    def documents(self, epoch: int, step: int) -> np.ndarray:
        """int64: rows of the data set that make one step's global batch, in the order in which its plan counts them."""
        return self._index.usable[self._epoch(epoch)[step]]

    def __getitem__(self, key: EpochStep) -> RankStep:
        if get_worker_info() is not None:
            return self.prepare(*key)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf_longctx-loader")
        epoch, step = key
        wanted = [(epoch, s) for s in range(step, min(step + 1 + AHEAD, self.steps(epoch)))]
        self._ahead = {k: self._ahead.get(k) or self._thread.submit(self.prepare, *k) for k in wanted}
        return self._ahead.pop(key).result()

    def prepare(self, epoch: int, step: int) -> RankStep:
        """Plans one step and reads this rank's part of it."""
        documents = self.documents(epoch, step)
        lengths, label_tokens = self._index.lengths[documents], self._index.label_tokens[documents]
        planned = self.collator.collate(
            lengths, int(label_tokens.sum()), lambda doc: self._dataset[int(documents[doc])]
        )
        agreed = f"{planned.fingerprint} {self._index.fingerprint} {epoch} {step} {documents.tolist()}"
        digest = hashlib.blake2b(agreed.encode(), digest_size=8).digest()
        return replace(planned, fingerprint=int.from_bytes(digest, "little", signed=True))

    def _epoch(self, epoch: int) -> EpochBatches:
        found = self._last_epoch
        if found is None or found[0] != epoch:
            found = self._last_epoch = (epoch, self.batches.epoch(epoch))
        return found[1]

    def __getstate__(self) -> dict[str, Any]:
        """For worker processes: what is prepared ahead stays here."""
        return self.__dict__ | {"_ahead": {}, "_thread": None}


def _is_stored(dataset: Any) -> bool:
    """Whether rows are what the Arrow table holds; a transform of the user's makes others, and must be left in
    place."""
    return isinstance(dataset, datasets.Dataset) and dataset.format["type"] != "custom"


class StepSampler(Sampler[list[EpochStep]]):
    """Batch sampler of one epoch: [(epoch, 0)], [(epoch, 1)], ..."""

    def __init__(self, steps: PlannedSteps) -> None:
        self._steps = steps
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self._steps.steps(self.epoch)

    def __iter__(self) -> Iterator[list[EpochStep]]:
        return ([(self.epoch, step)] for step in range(len(self)))


class PlannedDataLoader(DataLoader[RankStep]):
    """One RankStep per optimizer step. Keyword arguments are DataLoader's (num_workers, pin_memory, prefetch_factor
    ...)."""

    def __init__(self, steps: PlannedSteps, **kwargs: Any) -> None:
        super().__init__(steps, batch_sampler=StepSampler(steps), collate_fn=_only, **kwargs)

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next iteration runs through."""
        assert isinstance(self.batch_sampler, StepSampler)
        self.batch_sampler.set_epoch(epoch)


def _only(batch: list[RankStep]) -> RankStep:
    return batch[0]


def _refuse_too_long(index: LengthIndex, collator: LengthAwareCollator) -> None:
    longest = int(index.usable[np.argmax(index.lengths[index.usable])])
    length, limit = int(index.lengths[longest]), collator.capacity * collator.world_size
    if length > limit:
        raise PlanError(
            f"document {longest} has {length} tokens, but all ranks together hold {collator.world_size} ranks * "
            f"{collator.capacity} tokens (capacity) = {limit}. Valid: capacity >= {-(-length // collator.world_size)}, "
            f"or >= {-(-length // collator.capacity)} ranks, or a shorter document"
        )
