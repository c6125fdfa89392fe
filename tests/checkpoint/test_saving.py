"""Saving while training goes on: what is copied is what was there, what fails is said and undone, what is kept."""

import gc
import json
import os
import signal
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME

from hf_longctx import LongContextPlugin, LongContextTrainer
from hf_longctx.checkpoint import folder as folders
from hf_longctx.checkpoint.folder import CheckpointError, Manifest, problem_of
from hf_longctx.checkpoint.rank_messages import Ranks
from hf_longctx.checkpoint.reader import CheckpointReader
from hf_longctx.checkpoint.state import as_json, merged
from hf_longctx.checkpoint.writer import CheckpointWriter, Contents
from hf_longctx.data.loader import PlannedSteps
from tests.builders.tiny_models import tiny_llama
from tests.builders.training.saved_runs import LENGTHS, PLUGIN, SETTINGS, STEPS, Limited, Terminates, run
from tests.builders.training_runs import arguments, documents, fresh_accelerator_state, train
from tests.worlds.patience import wait_until
from tests.worlds.rank_pool import RankPool

EVALUATED = 3
"""Documents of evaluations."""
EVERY_STEP: dict[str, Any] = {"num_train_epochs": 1, "save_strategy": "steps", "save_steps": 1}


def trainer_of(output: Path, model: Any = None, **options: Any) -> LongContextTrainer:
    fresh_accelerator_state()
    settings = EVERY_STEP | options.pop("settings", {})
    return LongContextTrainer(
        model=model,
        args=arguments(output, **settings),
        train_dataset=Dataset.from_list(documents(LENGTHS)),
        eval_dataset=Dataset.from_list(documents(LENGTHS[:EVALUATED])),
        plugin=LongContextPlugin(**(PLUGIN | {"capacity": 80} | options.pop("plugin", {}))),
        **options,
    )


# What is kept


def test_the_one_just_written_is_kept_although_others_have_later_steps(tmp_path):
    """A run that was begun anew, or went back, in a folder of one that had come further."""
    run(tmp_path, num_train_epochs=2)
    run(tmp_path, max_steps=2, save_total_limit=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2"]


def test_those_written_first_go_whatever_their_steps_but_not_the_best(tmp_path):
    for serial, step in enumerate([9, 2, 7, 8, 1, 3], 1):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        manifest = Manifest(
            step=step, serial=serial, world_size=1, sharding="ddp", files={}, weights={}, optimizer=None
        )
        (folder / folders.MANIFEST).write_text(manifest.text())
    assert [folders.step_of(path) for path in folders.checkpoints(tmp_path)] == [3, 1, 8, 7, 2, 9]
    folders.rotate(tmp_path / "checkpoint-3", 3, str(tmp_path / "checkpoint-2"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
    folders.rotate(tmp_path / "checkpoint-3", 1, str(tmp_path / "checkpoint-2"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3"]


def test_what_cannot_be_removed_is_said_and_what_is_protected_elsewhere_takes_no_place(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        folder = tmp_path / "new" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        manifest = Manifest(step=step, serial=step, world_size=1, sharding="ddp", files={}, weights={}, optimizer=None)
        (folder / folders.MANIFEST).write_text(manifest.text())
    written, best = tmp_path / "new" / "checkpoint-3", str(tmp_path / "old" / "checkpoint-9")
    folders.rotate(written, 3, best)
    assert len(list(written.parent.iterdir())) == 3

    def refused(path: Path, target: Path) -> None:
        raise PermissionError(f"{path.name} is not yours")

    with monkeypatch.context() as context:
        context.setattr(Path, "rename", refused)
        with pytest.raises(CheckpointError, match=r"2: 1 checkpoints cannot be removed \(checkpoint-1 is"):
            folders.rotate(written, 2, best)
    folders.rotate(written, 2, best)
    assert sorted(path.name for path in written.parent.iterdir()) == ["checkpoint-2", "checkpoint-3"]


def test_what_a_callback_left_before_a_crash_is_no_checkpoint(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / "mine.txt").write_text("1")
    assert len(run(tmp_path, resume="auto", max_steps=2).held) == 2
    assert problem_of(tmp_path / "checkpoint-1") is None
    assert (tmp_path / "checkpoint-1" / "mine.txt").exists()


def test_a_checkpoint_of_another_trainer_is_replaced_as_a_whole(tmp_path):
    """Plain transformers takes an adapter, or one file of weights, before an index of several."""
    (tmp_path / "checkpoint-1").mkdir()
    for name in (TRAINER_STATE_NAME, "adapter_config.json", "optimizer.pt"):
        (tmp_path / "checkpoint-1" / name).write_text("{}")
    run(tmp_path, max_steps=1)
    assert problem_of(tmp_path / "checkpoint-1") is None
    assert not {"adapter_config.json", "optimizer.pt"} & {path.name for path in (tmp_path / "checkpoint-1").iterdir()}


def test_a_best_checkpoint_that_could_not_be_written_is_not_the_best(tmp_path):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    settings = EVERY_STEP | best | {"eval_strategy": "steps", "eval_steps": 1, "output_dir": tmp_path}
    plugin = PLUGIN | {"capacity": 80, "async_save": False}
    rows = documents(LENGTHS)
    trained = train("llama", rows, plugin, settings, eval_rows=rows[:3], callbacks=[Limited(range(1, 2))])
    assert max(trained.series("eval_loss")[:3]) == trained.series("eval_loss")[0], "the first was the best"
    assert trained.series("failed_saves") == [0, 1, 1]
    torch.testing.assert_close(trained.weights, load_file(tmp_path / "checkpoint-3" / "model.safetensors"))


# What is written


def test_only_the_last_are_kept(tmp_path):
    run(tmp_path, save_total_limit=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-5", "checkpoint-6"]


def test_a_save_in_the_background_holds_what_a_blocking_one_holds(saved, ranks2: RankPool, tmp_path):
    ranks2.run(run, tmp_path, {"async_save": False})
    for step in (1, STEPS):
        for path in sorted((tmp_path / f"checkpoint-{step}").glob("*.safetensors")):
            weights, expected = load_file(path), load_file(saved[0] / f"checkpoint-{step}" / path.name)
            torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def test_the_dtype_that_a_saved_configuration_says_is_that_of_its_weights(ranks2: RankPool, tmp_path):
    """FSDP2 has gathered bfloat16 weights for the next step, where a file is written after it has begun."""
    ranks2.run(run, tmp_path, {"sharding": "zero1"}, bf16=True, num_train_epochs=1)
    for step in (1, 2, 3):
        checkpoint = tmp_path / f"checkpoint-{step}"
        assert json.loads((checkpoint / "config.json").read_text())["dtype"] == "float32"
        assert {weight.dtype for weight in load_file(checkpoint / "model.safetensors").values()} == {torch.float32}


class Writes(TrainerCallback):
    """Leaves a file of its own beside what was saved, as people's callbacks do."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        folder.mkdir(exist_ok=True)
        (folder / "mine.txt").write_text(f"{state.global_step}")


@pytest.mark.parametrize("in_background", [True, False])
def test_files_that_callbacks_add_stay(in_background, tmp_path):
    run(tmp_path, {"async_save": in_background}, callbacks=[Writes()], num_train_epochs=1)
    for step in (1, 2, 3):
        assert (tmp_path / f"checkpoint-{step}" / "mine.txt").read_text() == f"{step}"
        assert problem_of(tmp_path / f"checkpoint-{step}") is None


def test_the_best_model_is_loaded_at_the_end(ranks2: RankPool, tmp_path):
    settings = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "eval_strategy": "steps",
        "eval_steps": 1,
    }
    runs = ranks2.run(best, tmp_path, {**settings, "save_total_limit": 1, "learning_rate": 0.5})
    for losses, weights, kept in runs:
        number = min(range(len(losses)), key=losses.__getitem__) + 1
        assert f"checkpoint-{number}" in kept
        torch.testing.assert_close(weights, load_file(tmp_path / f"checkpoint-{number}" / "model.safetensors"))


def best(output: Path, settings: dict[str, Any]) -> Any:
    rows = documents(LENGTHS)
    trained = train("llama", rows, PLUGIN, SETTINGS | settings | {"output_dir": output}, eval_rows=rows[:3])
    return trained.series("eval_loss"), trained.weights, sorted(path.name for path in output.iterdir())


# What is copied


class Halved(torch.optim.SGD):
    """As schedule-free optimizers do, it trains other weights than it evaluates."""

    trains = True

    def train(self) -> None:
        self._scale(2.0, self.trains)
        self.trains = True

    def eval(self) -> None:
        self._scale(0.5, not self.trains)
        self.trains = False

    def _scale(self, factor: float, already: bool) -> None:
        with torch.no_grad():
            for weight in (
                [] if already else (parameter for group in self.param_groups for parameter in group["params"])
            ):
                weight *= factor


class SlowlyCopied(CheckpointWriter):
    """Whose device takes its time."""

    def _copy(self, *arguments: Any) -> None:
        time.sleep(0.3)
        super()._copy(*arguments)


class SlowTrainer(LongContextTrainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.checkpoints.make_writer = lambda: SlowlyCopied(self.checkpoints.ranks, self.plugin.async_save)


def test_weights_that_change_for_evaluation_change_after_they_were_copied(tmp_path):
    saved = []
    for in_background in (True, False):
        model, output = tiny_llama(), tmp_path / str(in_background)
        fresh_accelerator_state()
        trainer = SlowTrainer(
            model=model,
            args=arguments(output, **EVERY_STEP, eval_strategy="epoch"),
            train_dataset=Dataset.from_list(documents(LENGTHS)),
            eval_dataset=Dataset.from_list(documents(LENGTHS[:EVALUATED])),
            plugin=LongContextPlugin(**(PLUGIN | {"capacity": 80, "async_save": in_background})),
            optimizers=(Halved(model.parameters(), 0.1), None),
        )
        trainer.train()
        saved.append(load_file(output / "checkpoint-3" / "model.safetensors"))
    torch.testing.assert_close(*saved, rtol=0, atol=0)


def copied_on(device: str) -> Contents:
    weight = torch.ones(4, 4)
    state = torch.ones(4, 4, device=device)
    return Contents(1, 1, "ddp", {"weight": weight}, {"exp_avg/weight": ("weight", state)}, b"{}", {}, lambda *_: None)


def uncopied(output: Path) -> list[str | None]:
    """Rank 1 keeps the state, and cannot copy it at first: a meta tensor has no content."""
    ranks = Ranks()
    writer = CheckpointWriter(ranks)
    failures = []
    for device in ("meta", "cpu"):
        writer.save(copied_on(device if ranks.rank == 1 else "cpu"), output / "checkpoint-1")
        writer.copied()
        writer.wait()
        failures.append(writer.failure)
    return failures


def test_a_rank_that_cannot_copy_fails_the_save_on_all_and_the_next_one_is_tried(ranks2: RankPool, tmp_path):
    for first, second in ranks2.run(uncopied, tmp_path):
        assert first is not None
        assert first.startswith("rank 1: NotImplementedError: Cannot copy out of meta tensor")
        assert second is None
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    reader = CheckpointReader(tmp_path / "checkpoint-1")
    assert reader.manifest.optimizer is not None
    state = reader.read_state("exp_avg/weight", reader.manifest.optimizer["exp_avg/weight"], torch.zeros(4, 4))
    assert torch.equal(state, torch.ones(4, 4))


# What is said before the first step


def test_what_cannot_be_saved_is_said_before_the_first_step(tmp_path):
    model = tiny_llama()
    model.generation_config.update(do_sample=False, temperature=0.5)
    trainer = trainer_of(tmp_path, model)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint of this run could be saved: ValueError: Gen.*\n.*temperature"
    ):
        trainer.train()
    assert trainer.state.global_step == 0

    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2])
    trainer = trainer_of(tmp_path, model, optimizers=(optimizer, schedule))
    with pytest.raises(CheckpointError, match="the schedule's state is a Counter whose keys are not text"):
        trainer.train()


def test_state_that_json_has_not_is_refused():
    assert as_json({"a": (1, torch.tensor(2.5), None)}, "x") == {"a": [1, 2.5, None]}
    with pytest.raises(CheckpointError, match="the schedule is a set, which JSON has not"):
        as_json({"a": {1}}, "the schedule")


# One trainer, several times


def with_adapters() -> Any:
    model = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    model.add_adapter("still", LoraConfig(r=2, target_modules=["v_proj"]))
    return model


def test_other_weights_may_be_trained_when_train_is_called_again(tmp_path):
    model = with_adapters()
    trainer = trainer_of(tmp_path, model)
    trainer.train()
    first = Manifest.read(tmp_path / "checkpoint-3").weights
    assert not (tmp_path / "checkpoint-3" / "still").exists(), "it is not trained"
    head = model.get_base_model().lm_head.weight
    head.requires_grad_(True)
    trainer.optimizer = None
    trainer.train()
    second = Manifest.read(tmp_path / "checkpoint-3").weights
    assert second.keys() - first.keys() == {name for name, weight in model.named_parameters() if weight is head}


def test_a_trainer_that_is_done_is_forgotten(tmp_path):
    trainer = trainer_of(tmp_path, tiny_llama())
    trainer.train()
    model = weakref.ref(trainer.model)
    del trainer
    gc.collect()
    assert model() is None


class Searched(LongContextTrainer):
    """Makes its accelerator again in `train`, as each trial of a hyperparameter search does."""

    def _hp_search_setup(self, trial: Any) -> None:
        super()._hp_search_setup(trial)
        self.create_accelerator_and_postprocess()


def test_sigterm_in_a_trial_of_a_hyperparameter_search_is_noticed(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as leaving:
        train(
            "llama",
            documents(LENGTHS),
            PLUGIN | {"capacity": 80},
            EVERY_STEP | {"save_steps": 50, "output_dir": tmp_path},
            trainer_class=Searched,
            callbacks=[Terminates(1, 0)],
        )
    assert leaving.value.code == 143
    assert problem_of(tmp_path / "checkpoint-1") is None
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("evaluates", [False, True])
def test_sigterm_while_a_step_is_waited_for_saves_and_ends(evaluates, tmp_path, monkeypatch):
    """Compiling the planner takes longer than launchers wait: 30 s."""
    prepare, released = PlannedSteps.prepare, threading.Event()
    waiting = 2 if evaluates else 3, "loading data"

    def stands_still(steps: PlannedSteps, epoch: int, step: int, adjustment: Any) -> Any:
        if len(steps) == (EVALUATED if evaluates else len(LENGTHS)) and step == (0 if evaluates else 2):
            assert wait_until(lambda: (trainer.progress.step, trainer.progress.activity) == waiting)
            os.kill(os.getpid(), signal.SIGTERM)
            released.wait()
        return prepare(steps, epoch, step, adjustment)

    monkeypatch.setattr(PlannedSteps, "prepare", stands_still)
    settings = {"save_steps": 50, "eval_strategy": "steps", "eval_steps": 2}
    trainer = trainer_of(tmp_path, tiny_llama(), settings=settings, plugin={"global_batch_documents": 2})
    try:
        with pytest.raises(SystemExit) as leaving:
            trainer.train()
    finally:
        released.set()
    assert leaving.value.code == 143
    assert problem_of(tmp_path / "checkpoint-2") is None
    assert trainer.run_state.evaluation_due is evaluates


def test_groups_of_stages_are_joined_by_their_settings():
    # The first stage has tied embeddings beside weights in parts, and no norms; the last one has both in one group each.
    def group(decay: float, *names: str) -> dict[str, Any]:
        return {"weight_decay": decay, "params": list(names)}

    groups = (
        [group(0.1, "0.q"), group(0.1, "embed")],
        [group(0.1, "1.q", "embed"), group(0.0, "1.norm")],
    )
    kept = [{"kind": "AdamW", "tensors": [], "groups": of_stage, "values": {}} for of_stage in groups]
    schedules = [{"last_epoch": 3, "base_lrs": [1.0, 2.0]}, {"last_epoch": 3, "base_lrs": [1.0, 4.0]}]
    optimizer, schedule = merged(kept, schedules)
    assert optimizer["groups"] == [group(0.1, "0.q", "1.q"), group(0.1, "embed"), group(0.0, "1.norm")]
    assert schedule == {"last_epoch": 3, "base_lrs": [1.0, 2.0, 4.0]}
    assert kept[0]["groups"][0]["params"] == ["0.q"], "what was given stays"
