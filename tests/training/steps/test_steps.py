"""Plain steps and stages alike: what micro-batches return is up to whoever runs them, and a trial of a search runs on the ranks
of the one before."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from hf_longctx import LongContextPlugin, LongContextTrainer
from hf_longctx.training import trainer as trainer_module
from hf_longctx.training.steps.work import Work
from tests.builders.tiny_models import tiny_llama
from tests.builders.training_runs import Run, arguments, documents, fresh_accelerator_state, train
from tests.worlds.rank_pool import RankPool

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


def two_trials(folder: str, stages: int) -> list[tuple[float, int, Any, Any]]:
    """The loss of each trial, the documents of its global batch, and who runs its steps."""
    fresh_accelerator_state()
    trainer = LongContextTrainer(
        model_init=lambda: tiny_llama(),
        args=arguments(folder, max_steps=1, per_device_train_batch_size=1, gradient_accumulation_steps=2),
        train_dataset=Dataset.from_list(documents(LENGTHS)),
        plugin=LongContextPlugin(capacity=40, pipeline_stages=stages),
    )
    seen = []
    for trial in range(2):
        if trial:
            trainer.create_accelerator_and_postprocess()  # as Trainer does before each trial of a search
        loss = trainer.train().training_loss
        seen.append((loss, trainer.run_state.global_batch_documents, id(trainer.steps), id(trainer.exchange)))
    return seen


@pytest.mark.parametrize("stages", [1, 2])
def test_a_trial_runs_on_the_ranks_of_the_one_before(stages: int, ranks2: RankPool, tmp_path: Path):
    for first, second in ranks2.run(two_trials, str(tmp_path), stages):
        assert first == second
        assert first[1] == 2 * (2 // stages)
