"""What the micro-batches of a step return is up to whoever runs them: plain steps and stages alike (training/steps/work.py)."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_longctx.training import trainer as trainer_module
from hf_longctx.training.steps.work import Work
from tests.rank_pool import RankPool
from tests.training_runs import Run, documents, train

LENGTHS = (9, 30, 5, 17)


def twice_the_loss(output: Any) -> Any:
    return 2 * output.loss


def run(folder: str, stages: int, doubled: bool) -> Run:
    """One step."""
    plugin = {"capacity": 40, "global_batch_documents": len(LENGTHS), "pipeline_stages": stages}
    with pytest.MonkeyPatch.context() as patch:
        if doubled:
            patch.setattr(trainer_module, "Work", partial(Work, result=twice_the_loss))
        return train("llama", documents(LENGTHS), plugin, {"output_dir": folder, "max_steps": 1, "max_grad_norm": 0.0})


@pytest.mark.parametrize("stages", [1, 2])
def test_another_result_is_summed_and_differentiated_in_its_place(stages: int, ranks2: RankPool, tmp_path: Path):
    plain, doubled = (
        ranks2.run(run, str(tmp_path / str(twice)), stages, twice)[0].seen_by_callback[0] for twice in (False, True)
    )
    assert doubled["loss"] == pytest.approx(2 * plain["loss"], rel=1e-5)
    assert doubled["grad_norm"] == pytest.approx(2 * plain["grad_norm"], rel=1e-5)
