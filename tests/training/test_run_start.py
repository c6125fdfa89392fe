"""A configuration that is run again: where it goes on, what it says of that, and what it leaves alone."""

import errno
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers.trainer_callback import TrainerState

from hf_longctx import cli
from hf_longctx.config import load_config
from hf_longctx.report.training_runs.run_log import RunLog
from hf_longctx.run import run
from hf_longctx.training.preparation import too_short_for_warmup
from hf_longctx.training.run_start import documents_trained, write_results
from hf_longctx.training.run_state import RunState, recorded
from hf_longctx.training.trainer import LongContextTrainer
from tests.builders.tiny_models import TINY
from tests.builders.training_runs import arguments, documents, fresh_accelerator_state
from tests.worlds.launched import ROOT

LENGTHS = [3, 50, 17, 60, 2, 9, 33, 40, 8, 21, 90, 20]
STEPS_OF_AN_EPOCH = 3


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A run of one epoch's middle, with checkpoints and documents to evaluate on."""
    settings = yaml.safe_load((ROOT / "configs" / "tiny.yaml").read_text())
    settings["model"]["random_init"]["vocab_size"] = TINY["vocab_size"]
    for name, lengths in (("train", LENGTHS), ("test", [4, 2, 18])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents(lengths)))
    settings["data"]["path"] = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "test")}
    settings["longctx"] = {"capacity": 100, "global_batch_documents": 4}
    settings["training"] |= {"output_dir": str(tmp_path / "out"), "max_steps": 2, "save_steps": 1, "bf16": False}
    settings["training"] |= {"resume_from_checkpoint": "auto", "disable_tqdm": True, "eval_strategy": "no"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path / "config.yaml"


def once(file: Path, *changes: str) -> LongContextTrainer:
    fresh_accelerator_state()
    return run(load_config(file, list(changes)))


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


def results(file: Path) -> dict[str, Any]:
    return json.loads((file.parent / "out" / "results.json").read_text())


def test_a_finished_run_leaves_its_files_alone_and_says_so(file, capsys):
    assert STEPS_OF_AN_EPOCH > 2, "in the middle of an epoch, transformers would train one step more"
    once(file)
    before = contents(file.parent / "out")
    capsys.readouterr()
    once(file)
    assert "out is already trained to step 2 of 2: nothing to do" in capsys.readouterr().out
    assert contents(file.parent / "out") == before


def test_an_evaluation_that_fails_after_training_loses_no_model(file, monkeypatch):
    evaluate = LongContextTrainer.evaluate

    def failing(trainer: LongContextTrainer, *args: Any, **kwargs: Any) -> dict[str, float]:
        if trainer.state.global_step:
            raise RuntimeError("no memory for this evaluation")
        return evaluate(trainer, *args, **kwargs)

    monkeypatch.setattr(LongContextTrainer, "evaluate", failing)
    with pytest.raises(RuntimeError, match=r"no memory for this evaluation"):
        once(file, "training.save_strategy=no")
    assert (file.parent / "out" / "model.safetensors").exists()


def test_a_run_that_has_all_its_steps_makes_the_results_that_are_missing(file, capsys):
    once(file)
    whole, out = results(file), file.parent / "out"
    weights = (out / "model.safetensors").read_bytes()
    # As if it had ended before its model was saved.
    (out / "model.safetensors").unlink()
    (out / "results.json").write_text(json.dumps({name: whole[name] for name in whole if name.startswith("eval")}))
    trainer = once(file)
    assert "No step is left to train" in capsys.readouterr().out
    assert not (out / "checkpoint-3").exists()
    assert results(file) == whole
    assert (out / "model.safetensors").read_bytes() == weights
    assert [entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry] == [
        whole["train_loss"]
    ]

    (out / "trainer_state.json").unlink()
    (out / "results.json").unlink()
    once(file)
    assert "train_loss" not in results(file), "which nobody knows any more, and which is not 0"


def test_results_count_what_was_trained_on(file):
    """Each row of 50 and of 60 tokens becomes two pieces of at most 40, and that of 90 three; a step has 4 documents."""
    once(file, "longctx.long_documents=split", "longctx.longest_document=40")
    counted = {name: results(file)[name] for name in ("rows", "documents", "documents_trained", "ranks")}
    assert counted == {"rows": 12, "documents": 16, "documents_trained": 8, "ranks": 1}


def test_documents_of_all_epochs_are_counted(file):
    trainer = once(file)
    steps = trainer.training_steps()
    assert [documents_trained(steps, done) for done in (0, 1, 3, 4, 7)] == [0, 4, 12, 16, 28]


def test_a_resumed_run_says_from_where_and_plans_its_next_step(file, capsys):
    first = once(file)
    before = results(file)["eval_loss_before"]
    first_plan = str(first.training_steps().plan(0, 0).summary())
    capsys.readouterr()
    resumed = once(file, "training.max_steps=4")
    output = capsys.readouterr().out
    folder = file.parent / "out" / "checkpoint-2"
    assert f"Resuming from {folder}: step 2 of 4, saved on 1 rank; now 1 rank\n" in output
    assert f"The next step:\n{resumed.training_steps().plan(0, 2).summary()}" in output
    assert first_plan not in output
    assert results(file)["eval_loss_before"] == before
    assert results(file)["finished_at_step"] == 4


def test_mean_loss_and_time_are_of_all_starts(file, tmp_path):
    """Counts of steps beside them are too."""
    once(file)
    first = recorded(tmp_path / "out" / "checkpoint-2", "seconds")
    assert 0 < first <= RunLog.read(tmp_path / "out").seconds
    resumed = once(file, "training.max_steps=4")
    losses = [entry["loss"] for entry in resumed.state.log_history if "loss" in entry]
    assert len(losses) == 4
    assert results(file)["train_loss"] == pytest.approx(sum(losses) / 4, rel=1e-3)
    second = recorded(tmp_path / "out" / "checkpoint-4", "seconds")
    assert first < second <= RunLog.read(tmp_path / "out").seconds == resumed.run_state.seconds


def test_seconds_are_those_of_training_and_are_not_known_of_a_run_that_did_not_count_them(monkeypatch):
    run: dict[str, Any] = {"global_batch_documents": 4, "global_batch_tokens": None, "seed": 3, "data_fingerprint": "f"}
    now = iter((100.0, 107.0, 110.0))
    monkeypatch.setattr("time.monotonic", lambda: next(now))
    state = RunState(**run)
    assert state.state()["args"]["seconds"] == 0
    state.on_train_begin(None, None, None)
    saved = state.state()
    assert saved["args"]["seconds"] == 7
    state.on_train_end(None, None, None)
    assert state.state()["args"]["seconds"] == 10
    for before, seconds in ((saved["args"], 7), (run, None)):
        resumed = RunState(**run)
        resumed.restore(TrainerState(stateful_callbacks={"RunState": {"args": before}}), {})
        assert resumed.seconds == seconds


def test_a_run_that_is_interrupted_keeps_the_loss_before_it(file, monkeypatch):
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patches:
        patches.setattr(LongContextTrainer, "training_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            once(file)
    kept = results(file)
    assert kept["eval_loss_before"] > 0
    assert "train_loss" not in kept
    assert "finished_at_step" not in kept


def test_results_stay_where_a_full_disk_takes_no_new_ones(tmp_path, monkeypatch):
    def full(self: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write_results(str(tmp_path), {"eval_loss_before": 1.0})
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*results\.json'"):
        write_results(str(tmp_path), {"eval_loss_before": 2.0})
    assert json.loads((tmp_path / "results.json").read_text()) == {"eval_loss_before": 1.0}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_new_run_beside_the_checkpoints_of_an_earlier_one_warns_of_them(file, capsys, caplog):
    anew = "training.resume_from_checkpoint=null"
    once(file, anew)
    assert "earlier run" not in caplog.text
    once(file, anew, "training.max_steps=1")
    warned = "out holds checkpoints of an earlier run (checkpoint-1, checkpoint-2), and this one begins anew there"
    assert warned in caplog.text
    assert "resume_from_checkpoint: auto would take checkpoint-2" in caplog.text
    for override, says in ((anew, True), ("training.resume_from_checkpoint=auto", False)):
        capsys.readouterr()
        assert cli.main(["train", str(file), override, "--dry-run", "--ranks", "1"]) == 0
        assert (warned in capsys.readouterr().out) == says


@pytest.mark.parametrize(
    ("steps", "settings", "part"),
    [
        (
            20,
            {"warmup_steps": 20},
            "20 steps of warm-up, and this run has 20: its learning rate ends at 0.0095, and never",
        ),
        (
            1,
            {"warmup_steps": 0.03},
            "warmup_steps=0.03 makes 1 steps of warm-up, and this run has 1: .* so that no weight changes",
        ),
        (21, {"warmup_steps": 20}, ""),
        (1, {"warmup_steps": 20, "lr_scheduler_type": "constant"}, ""),
        (1, {"warmup_steps": 20, "lr_scheduler_type": "constant_with_warmup"}, "no weight changes"),
        (1, {}, ""),
    ],
)
def test_a_run_that_ends_before_its_learning_rate_has_risen_is_warned_of(steps, settings, part, tmp_path):
    warning = too_short_for_warmup(arguments(tmp_path, learning_rate=0.01, **settings), steps)
    assert re.search(part, warning) if part else warning == ""
