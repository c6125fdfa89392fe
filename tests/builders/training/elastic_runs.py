"""Runs that stop and go on elsewhere, leg by leg, compared with an undisturbed run."""

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from hf_longctx.checkpoint import written_shares
from tests.builders.training.sharded_runs import LENGTHS, run
from tests.builders.training_runs import Run, assembled, documents
from tests.worlds.rank_pool import RankPool

STEPS = 10
"""Two for each leg of the longest travel."""
CLOSE = 1e-5
"""Relative, of losses in float32."""


class StopsAfter(TrainerCallback):
    """Asks training to stop after a step, when it has been saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self.step


def leg(output: str, *, stop: int, file_bytes: int = 2**30, **options: Any) -> Run:
    """Trains on this rank until a step, from the newest checkpoint if there is one."""
    before, written_shares.MODEL_FILE_BYTES = written_shares.MODEL_FILE_BYTES, file_bytes
    try:
        saving = {"resume": "auto", "save_strategy": "steps", "save_steps": 2}
        return run(output, callbacks=[StopsAfter(stop)], **saving, **({"steps": STEPS} | options))
    finally:
        written_shares.MODEL_FILE_BYTES = before


def travel(legs: list[tuple[RankPool, dict[str, Any]]], expected: Run, output: Path) -> list[Run]:
    """Runs the legs, equally many steps each, and compares what they say and held with an undisturbed run."""
    steps: list[list[list[int]]] = []
    runs: list[Run] = []
    for number, (pool, options) in enumerate(legs, 1):
        stop = STEPS * number // len(legs) // 2 * 2 if number < len(legs) else STEPS
        runs = pool.run(leg, str(output), stop=stop, **options)
        groups = runs[: len(runs) // options.get("stages", 1) : (options.get("mesh") or {}).get("tp_size", 1)]
        steps += [assembled(step) for step in zip(*(trained.held for trained in groups), strict=True)]
        for trained in runs:
            assert trained.series("loss") == pytest.approx(expected.series("loss")[:stop], rel=CLOSE)
            assert trained.series("grad_norm") == pytest.approx(expected.series("grad_norm")[:stop], rel=1e-4)
            assert trained.series("learning_rate") == expected.series("learning_rate")[:stop]
    assert steps == [assembled([step]) for step in expected.held]
    learned = [row for row in documents(LENGTHS, labels=True) if any(label != -100 for label in row["labels"][1:])]
    first_epoch = [document for step in steps[: -(-len(learned) // 4)] for document in step]
    assert sorted(first_epoch) == sorted(row["input_ids"] for row in learned), "each document once"
    return runs
