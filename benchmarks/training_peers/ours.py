"""LongContextTrainer: documents whole or split, as the plan says."""

from functools import partial

import numpy as np
from datasets import Dataset
from training_cases import Case

from hf_longctx import LongContextPlugin, LongContextTrainer
from hf_longctx.data.long_documents import Pieces
from hf_longctx.planner.global_batch import EpochBatches, GlobalBatches
from hf_longctx.training.run_data import RunData
from training_peers import Prepare, Settings, Way


class _GivenBatches(GlobalBatches):
    """Global batches that are those of a case, in each epoch."""

    def __init__(self, case: Case) -> None:
        super().__init__(np.array(case.lengths), case.seed, documents=1)
        bounds = np.cumsum([0, *(len(step) for step in case.steps)])
        self._epoch = EpochBatches(np.concatenate(case.steps), bounds)

    def epoch(self, epoch: int) -> EpochBatches:
        return self._epoch


class _GivenData(RunData):
    def __init__(self, trainer: LongContextTrainer, batches: GlobalBatches) -> None:
        super().__init__(trainer)
        self._batches = batches

    def training_batches(self, pieces: Pieces) -> GlobalBatches:
        return self._batches


class _GivenStepsTrainer(LongContextTrainer):
    def __init__(self, case: Case, **kwargs) -> None:
        super().__init__(**kwargs)
        self.run_data = _GivenData(self, _GivenBatches(case))


def ours(case: Case, settings: Settings) -> Way:
    documents = [case.tokens(document) for document in range(len(case.lengths))]
    plugin = LongContextPlugin(capacity=settings.capacity, profile=settings.profile)
    return Way(
        partial(_GivenStepsTrainer, case, plugin=plugin),
        Dataset.from_dict({"input_ids": documents, "labels": documents}),
        arguments={"train_sampling_strategy": "random"},
    )


WAYS: dict[str, Prepare] = {"ours": ours}
