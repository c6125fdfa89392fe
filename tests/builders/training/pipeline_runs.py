"""Training runs in the stages of a pipeline."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from hf_longctx.data.step_plans import Planning
from hf_longctx.planner import StepPlan
from tests.builders.plans.random_plans import cut_in_chunks
from tests.builders.training.sharded_runs import run as run_sharded
from tests.builders.training_runs import Run

FOUR = {"num_hidden_layers": 4}
TIED = FOUR | {"tie_word_embeddings": True}
STEPS = 4
INTERLEAVED = {"pipeline_schedule": "interleaved", "virtual_stages": 2}
GPIPE = {"pipeline_schedule": "gpipe"}
ONE_KERNEL = {"environment": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "in_order": "one at a time"}
"""On devices that run one kernel of NCCL's at a time."""


@contextmanager
def chunked_plans() -> Iterator[None]:
    """Plans whose single documents are in up to three chunks."""
    plan_of = Planning.plan

    def plan(self: Planning, *args: Any) -> StepPlan:
        return cut_in_chunks(plan_of(self, *args))

    Planning.plan = plan  # type: ignore[method-assign]
    try:
        yield
    finally:
        Planning.plan = plan_of  # type: ignore[method-assign]


def run(output: str, *, chunks: bool = False, environment: dict[str, str] | None = None, **options: Any) -> Run:
    with chunked_plans() if chunks else nullcontext(), patch.dict(os.environ, environment or {}):
        return run_sharded(output, **({"build": FOUR, "steps": STEPS, "evaluate": True} | options))
