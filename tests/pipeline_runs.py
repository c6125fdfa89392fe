"""Training runs in the stages of a pipeline."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from hf_longctx.data.step_plans import Planning
from hf_longctx.planner import StepPlan
from tests.sharded_runs import run as run_sharded
from tests.training_runs import Run

FOUR = {"num_hidden_layers": 4}
TIED = FOUR | {"tie_word_embeddings": True}
STEPS = 4
INTERLEAVED = {"pipeline_schedule": "interleaved", "virtual_stages": 2}
GPIPE = {"pipeline_schedule": "gpipe"}


@contextmanager
def chunked_plans() -> Iterator[None]:
    """Plans whose single documents are in up to three chunks."""
    plan_of = Planning.plan

    def plan(self: Planning, *args: Any) -> StepPlan:
        made = plan_of(self, *args)
        chunks = made.chunks.copy()
        for i in range(len(chunks)):
            first, after = made.first_document[i : i + 2]
            if after - first == 1:
                chunks[i] = min(3, max(1, made.length[first] // made.members[i] // 2))
        return dataclasses.replace(made, chunks=chunks)

    Planning.plan = plan  # type: ignore[method-assign]
    try:
        yield
    finally:
        Planning.plan = plan_of  # type: ignore[method-assign]


def run(output: str, *, chunks: bool = False, **options: Any) -> Run:
    with chunked_plans() if chunks else nullcontext():
        return run_sharded(output, **({"build": FOUR, "steps": STEPS, "evaluate": True} | options))
