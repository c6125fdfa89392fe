"""LongContextTrainer: documents whole or split, as the plan says; its own plan, or given ones."""

from functools import partial

import numpy as np
from datasets import Dataset
from training_cases import Case

from hf_longctx import LongContextPlugin, LongContextTrainer
from hf_longctx.data.loader import PlannedSteps
from hf_longctx.data.long_documents import Pieces
from hf_longctx.data.step_plans import StepPlans
from hf_longctx.planner import StepPlan
from hf_longctx.planner.cost.adjustment import Adjustment
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


class _GivenPlans(StepPlans):
    """Plans that are given, one for each step of an epoch."""

    def __init__(self, plans: tuple[StepPlan, ...], planned: StepPlans) -> None:
        super().__init__(planned.pieces, planned.batches, planned.planning)
        self._plans = plans

    def plan(self, epoch: int, step: int, adjustment: Adjustment) -> StepPlan:
        return self._plans[step]


class _GivenData(RunData):
    def __init__(self, trainer: LongContextTrainer, batches: GlobalBatches, plans: tuple[StepPlan, ...]) -> None:
        super().__init__(trainer)
        self._batches, self._plans = batches, plans

    def training_batches(self, pieces: Pieces) -> GlobalBatches:
        return self._batches

    def training_steps(self) -> PlannedSteps:
        steps = super().training_steps()
        if self._plans and not isinstance(steps.plans, _GivenPlans):
            steps.plans = _GivenPlans(self._plans, steps.plans)
        return steps


class _GivenStepsTrainer(LongContextTrainer):
    def __init__(self, case: Case, plans: tuple[StepPlan, ...], **kwargs) -> None:
        super().__init__(**kwargs)
        self.run_data = _GivenData(self, _GivenBatches(case), plans)


def ours(case: Case, settings: Settings) -> Way:
    documents = [case.tokens(document) for document in range(len(case.lengths))]
    recalibrate = {"recalibrate_steps": 0} if settings.plans else {}
    plugin = LongContextPlugin(
        capacity=settings.capacity, profile=settings.profile, sharding=settings.sharding, **recalibrate
    )
    return Way(
        partial(_GivenStepsTrainer, case, settings.plans, plugin=plugin),
        Dataset.from_dict({"input_ids": documents, "labels": documents}),
        arguments={"train_sampling_strategy": "random"},
    )


WAYS: dict[str, Prepare] = {"ours": ours}
