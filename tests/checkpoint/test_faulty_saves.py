"""Disks that are full, folders that ranks or jobs do not share as they should, and SIGTERM, while a run saves."""

import ast
import contextlib
import inspect
import io
import multiprocessing
import os
import re
import resource
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from transformers import Trainer, TrainerCallback

from hf_longctx.checkpoint import lock, writer
from hf_longctx.checkpoint.checkpoints import Checkpoints
from hf_longctx.checkpoint.folder import CheckpointError, problem_of, remove_leftovers
from hf_longctx.settings.longctx import LongContextPlugin
from hf_longctx.supervision.progress import Progress
from tests.builders.training.saved_runs import LENGTHS, PLUGIN, SETTINGS, STEPS, Limited, Terminates, resumed, run
from tests.builders.training_runs import Run, documents, train
from tests.worlds.fork_server import fork
from tests.worlds.rank_pool import RankPool


def full_disk(output: Path, steps: range, rank: int | None = None) -> tuple[list[str], list[float], str]:
    limited = [Limited(steps)] if rank in (None, int(os.environ.get("RANK", 0))) else []
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # a rank's is a file too, and others have filled it
            trained = run(output, {"async_save": False}, callbacks=limited)
        return trained.messages, trained.series("failed_saves"), ""
    except CheckpointError as error:
        return [], [], str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_a_disk_that_is_full_for_a_while_costs_those_checkpoints_only(ranks2: RankPool, tmp_path):
    for messages, failed, error in ranks2.run(full_disk, tmp_path, range(3, 5), rank=1):
        assert not error
        assert failed == [0, 0, 0, 1, 2, 2]
        lines = [message for message in messages if "could not be written" in message]
        assert len(lines) == 2
        assert all("rank 1: " in message and "File too large" in message for message in lines)
        assert "The newest checkpoint is" in lines[0]
        assert "checkpoint-2" in lines[0]
    assert [step for step in range(1, 7) if problem_of(tmp_path / f"checkpoint-{step}") is None] == [1, 2, 5, 6]
    assert {path.name for path in tmp_path.iterdir()} == {f"checkpoint-{step}" for step in (1, 2, 5, 6)}


def test_a_disk_that_stays_full_ends_training_with_an_error(ranks2: RankPool, tmp_path):
    for _, _, error in ranks2.run(full_disk, tmp_path, range(3, 100)):
        assert "its last checkpoint could not be written: rank 0: " in error
        assert "resume from the newest checkpoint there" in error
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-1", "checkpoint-2"}


def apart(output: Path, later: bool) -> tuple[str, list[str]]:
    before, writer.VISIBLE_SECONDS = writer.VISIBLE_SECONDS, 0.2
    mine = output / os.environ["RANK"]

    class Lost(TrainerCallback):
        """Takes the folder away that all saw when training began."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                args.output_dir = str(mine)

    try:
        run(output if later else mine, callbacks=[Lost()] if later else [], num_train_epochs=1)
    except CheckpointError as error:
        return str(error), [path.name for path in mine.rglob("*")]
    finally:
        writer.VISIBLE_SECONDS = before
    return "", []


def test_ranks_that_do_not_see_the_same_folder_do_not_begin(ranks2: RankPool, tmp_path):
    for message, left in ranks2.run(apart, tmp_path, False):
        assert f"1 of 2 do not see after 0.2 s what rank 0 writes into {tmp_path / '0'} on " in message
        assert f": rank 1 ({tmp_path / '1'} on " in message
        assert "save_strategy='no'" in message
        assert not left


def test_ranks_that_no_longer_see_the_same_folder_are_told_so(ranks2: RankPool, tmp_path):
    for message, left in ranks2.run(apart, tmp_path, True):
        assert "rank 0 does not see it after 0.2 s: all ranks must see the same output_dir" in message
        assert not left


def terminated(output: Path, rank: int, **settings: Any) -> Any:
    try:
        run(output, callbacks=[Terminates(2, rank)], **settings)
    except SystemExit as leaving:
        return leaving.code
    return None


def test_sigterm_on_one_rank_saves_and_ends_all(saved, ranks2: RankPool, tmp_path):
    assert ranks2.run(terminated, tmp_path, rank=1, save_steps=50) == [143, 143]
    assert {path.name for path in tmp_path.iterdir()} <= {"checkpoint-2", "checkpoint-3"}
    resumed(tmp_path, saved, save_steps=50)


def test_sigterm_where_nothing_is_saved(ranks2: RankPool, tmp_path):
    assert ranks2.run(terminated, tmp_path, rank=0, save_strategy="no") == [143, 143]
    assert not list(tmp_path.iterdir())


def hold(folder: Path, connection: Connection) -> None:
    """Another job, which has begun to train into a folder."""
    with lock.locked(folder):
        connection.send("held")
        time.sleep(60)


@pytest.mark.processes
def test_two_jobs_in_one_folder_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "SECONDS", 0.3)
    ours, theirs = multiprocessing.Pipe()
    other = fork(hold, (tmp_path, theirs), "another job")
    theirs.close()
    assert ours.recv() == "held"
    with pytest.raises(CheckpointError, match=f"process {other.pid} on .* trains into .*set another output_dir"):
        run(tmp_path, num_train_epochs=1)
    other.kill()
    other.join()
    assert len(run(tmp_path, num_train_epochs=1).held) == 3, "a lock ends with its process"
    assert not (tmp_path / lock.LOCK).exists()


@pytest.mark.parametrize(
    ("left", "asked", "valid", "early"),
    [
        ("checkpoint-4", None, "resume_from_checkpoint='auto'", False),
        ("checkpoint-4", None, "resume_from_checkpoint='auto'", True),
        ("checkpoint-4", "auto", None, False),
        ("model.safetensors", None, "another output_dir; or start it again", False),
        ("model.safetensors", "auto", "another output_dir; or start it again", False),
    ],
)
def test_a_job_that_begins_anew_never_overwrites_what_another_left_for_which_it_waited(
    left, asked, valid, early, tmp_path, monkeypatch
):
    def another_writes() -> None:
        (tmp_path / left).mkdir()
        (tmp_path / left / "trainer_state.json").touch()

    def another_ends(seconds: float) -> None:
        if not early:
            another_writes()
        monkeypatch.setattr(lock, "_lock", lambda file, path: True)

    if early:
        another_writes()
    monkeypatch.setattr(lock, "_lock", lambda file, path: False)
    monkeypatch.setattr(lock.time, "sleep", another_ends)
    refused = pytest.raises(CheckpointError, match=rf"while this one waited for it, and there are {left}: .*{valid}")
    with refused if valid else contextlib.nullcontext(), lock.locked(tmp_path, asked):
        pass
    assert [path.name for path in tmp_path.iterdir()] == [left]


def test_a_run_holds_its_folder_once_for_all_that_it_writes(tmp_path):
    arguments = SimpleNamespace(output_dir=tmp_path, save_strategy="no")
    checkpoints = Checkpoints(
        SimpleNamespace(progress=Progress(), plugin=LongContextPlugin(capacity=8), args=arguments)
    )
    with checkpoints.alone_in_output_dir(None, writes=True):
        with checkpoints.alone_in_output_dir(None):
            assert (tmp_path / lock.LOCK).exists()
        assert (tmp_path / lock.LOCK).exists()
    assert not (tmp_path / lock.LOCK).exists()


def test_a_disk_that_is_full_before_training_is_said_with_its_folder(tmp_path):
    (tmp_path / lock.LOCK).symlink_to("/dev/full")
    message = re.escape(f"cannot be written into output_dir={str(tmp_path)!r}")
    with pytest.raises(CheckpointError, match=message), lock.locked(tmp_path):
        pass


def test_of_a_checkpoint_that_is_a_link_the_link_is_removed(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / ".removing-checkpoint-4").symlink_to(elsewhere)
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [elsewhere]


def test_a_push_during_training_passes_over_the_lock(tmp_path):
    with lock.locked(tmp_path):
        names = [path.name for path in tmp_path.iterdir()]
        assert len(names) == 1
        source = inspect.getsource(Trainer._push_from_checkpoint)
        match = re.search(r"ignore_patterns=\[(\"[^\"]+\")", source)
        assert match is not None
        assert list(filter_repo_objects(names, ignore_patterns=[ast.literal_eval(match[1])])) == []


EVALUATED: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "lr_scheduler_kwargs": {"patience": 0},
    "learning_rate": 0.5,
    "save_steps": 1,
}


class TerminatesInEvaluation(TrainerCallback):
    """Sends this process SIGTERM in the middle of the evaluation after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


def evaluated(output: Path, *callbacks: TrainerCallback) -> Run:
    held_out = documents([5, 3] * (len(LENGTHS) * 20))  # of more than one step
    settings = SETTINGS | EVALUATED | {"output_dir": output}
    rows = documents(LENGTHS)[:10]
    return train("llama", rows, PLUGIN, settings, eval_rows=held_out, resume="auto", callbacks=callbacks)


@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.nightly), STEPS])
def test_sigterm_in_an_evaluation_changes_nothing(step, tmp_path):
    expected = evaluated(tmp_path / "whole")
    with pytest.raises(SystemExit):
        evaluated(tmp_path / "left", TerminatesInEvaluation(step))
    trained = evaluated(tmp_path / "left")
    for name in ("loss", "learning_rate", "eval_loss"):
        assert trained.series(name) == pytest.approx(expected.series(name), rel=1e-5), name
    torch.testing.assert_close(trained.weights, expected.weights, rtol=0, atol=1e-5)
