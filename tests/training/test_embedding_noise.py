"""NEFTune's noise is the same under any plan: in one process with other capacities, on 2 and 4 ranks, with activation
checkpointing, and in stages of a pipeline. Measured in float32: losses differ by rounding."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_longctx.training.embedding_noise import uniform_noise
from hf_longctx.training.run_state import RunState
from tests.builders.training_runs import Run, documents, train
from tests.worlds.rank_pool import RankPool

LENGTHS = [5, 40, 17, 60, 9, 30, 22, 51]
ALPHA = 5.0


def noisy(
    output: str, capacity: int, alpha: float | None = ALPHA, *, stages: int = 1, checkpointing: bool = False
) -> Run:
    plugin = {"capacity": capacity, "global_batch_documents": 4, "pipeline_stages": stages}
    settings = {"output_dir": output, "num_train_epochs": 1, "neftune_noise_alpha": alpha}
    return train("llama", documents(LENGTHS), plugin, settings | {"gradient_checkpointing": checkpointing})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One process that holds every document whole, and all of a batch in one micro-batch."""
    return noisy(str(tmp_path_factory.mktemp("one")), 240)


def assert_alike(run: Run, whole: Run) -> None:
    torch.testing.assert_close(run.series("loss"), whole.series("loss"), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(run.series("grad_norm"), whole.series("grad_norm"), rtol=1e-5, atol=1e-5)


def test_noise_does_not_depend_on_micro_batches_or_checkpointing_and_is_there(whole: Run, tmp_path: Path):
    assert_alike(noisy(str(tmp_path), 64, checkpointing=True), whole)
    without = noisy(str(tmp_path), 64, None)
    first, quiet = whole.series("loss")[0], without.series("loss")[0]
    assert abs(first - quiet) > 1e-3


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        ("ranks2", {"capacity": 32}),
        ("ranks2", {"capacity": 64, "stages": 2}),
        ("ranks4", {"capacity": 16, "checkpointing": True}),
    ],
    ids=str,
)
def test_noise_is_the_same_on_several_ranks(
    ranks: str, options: dict[str, Any], whole: Run, tmp_path: Path, request: pytest.FixtureRequest
):
    pool: RankPool = request.getfixturevalue(ranks)
    assert_alike(pool.run(noisy, str(tmp_path), **options)[0], whole)


def test_noise_is_uniform_and_of_the_size_that_the_paper_has():
    tokens = torch.arange(2000)
    length, hidden = 100, 64
    size = ALPHA / (length * hidden) ** 0.5
    noise = uniform_noise(tokens, torch.full((2000,), size), hidden)
    assert noise.abs().max() <= size
    assert abs(noise.mean() / size) < 0.01  # 128,000 draws: the mean's deviation is 0.0016
    assert noise.var() / size**2 == pytest.approx(1 / 3, rel=0.02)
    below = torch.corrcoef(torch.stack([noise[:-1].flatten(), noise[1:].flatten()]))[0, 1]
    beside = torch.corrcoef(torch.stack([noise[:, :-1].flatten(), noise[:, 1:].flatten()]))[0, 1]
    assert max(abs(below), abs(beside)) < 0.02
    torch.testing.assert_close(uniform_noise(tokens[7:9], torch.full((2,), size), hidden), noise[7:9], rtol=0, atol=0)


def test_a_run_is_told_once_that_its_checkpoint_is_older_than_this_noise(tmp_path: Path, monkeypatch):
    def state_of_before(self: RunState) -> Any:
        return {"args": {k: v for k, v in asdict(self).items() if k != "data_version"}, "attributes": {}}

    def told(steps: int, alpha: float | None = ALPHA) -> int:
        settings = {"output_dir": str(tmp_path), "max_steps": steps, "save_strategy": "steps", "save_steps": 1}
        resume = str(tmp_path / f"checkpoint-{steps - 1}") if steps > 1 else None
        plugin = {"capacity": 64, "global_batch_documents": 2}
        run = train("llama", documents(LENGTHS), plugin, settings | {"neftune_noise_alpha": alpha}, resume=resume)
        return sum("other noise than it began with" in message for message in run.messages)

    with monkeypatch.context() as patched:
        patched.setattr(RunState, "state", state_of_before)
        assert told(1) == 0
    assert [told(2, None), told(2), told(3)] == [0, 1, 0]
