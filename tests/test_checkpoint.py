"""A checkpoint is whole or not there; what is damaged or hostile is refused before anything of it is used."""

import contextlib
import io
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_longctx.training.checkpoint import folder as folders
from hf_longctx.training.checkpoint import lock, writer
from hf_longctx.training.checkpoint.boxes import Box
from hf_longctx.training.checkpoint.folder import MANIFEST, CheckpointError, Manifest, problem_of
from hf_longctx.training.checkpoint.reader import CheckpointReader
from tests.rank_pool import RankPool
from tests.training_runs import Run, documents, train

LENGTHS = [30, 7, 21, 12, 40, 3, 18, 25, 9, 33]
SETTINGS: dict[str, Any] = {"num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1}
PLUGIN: dict[str, Any] = {"capacity": 40, "global_batch_documents": 4, "grace_seconds": 1e6}
"""The processes that these tests send SIGTERM live on."""
STEPS = 6


def run(output: Path, plugin: dict[str, Any] | None = None, resume: Any = None, **settings: Any) -> Run:
    callbacks = settings.pop("callbacks", ())
    given = SETTINGS | {"output_dir": output} | settings
    return train("llama", documents(LENGTHS), PLUGIN | (plugin or {}), given, resume=resume, callbacks=callbacks)


@pytest.fixture(scope="module")
def saved(ranks2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Run]]:
    """The folder of a run of two ranks with a checkpoint of each step, and what both saw."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, ranks2.run(run, folder)


@pytest.fixture
def copied(saved: tuple[Path, list[Run]], tmp_path: Path) -> Path:
    """A copy of that folder, to be damaged."""
    return Path(shutil.copytree(saved[0], tmp_path / "copied"))


def resumed(folder: Path, saved: tuple[Path, list[Run]], **options: Any) -> Run:
    """Resumes in `folder` on one rank, and compares with the run that nothing had happened to."""
    found = run(folder, {"capacity": 80}, resume=options.pop("resume", True), **options)
    expected = saved[1][0]
    assert found.series("loss") == pytest.approx(expected.series("loss"), rel=1e-5)
    torch.testing.assert_close(found.weights, expected.weights, rtol=0, atol=1e-5)
    return found


# What is in a checkpoint


def test_no_file_needs_pickle_and_plain_transformers_reads_the_folder(saved):
    newest = saved[0] / f"checkpoint-{STEPS}"
    assert {path.suffix for path in newest.iterdir()} == {".json", ".safetensors"}
    loaded: Any = AutoModelForCausalLM.from_pretrained(newest, output_loading_info=True)
    model, report = loaded
    assert not any(report.values())
    torch.testing.assert_close(model.state_dict(), saved[1][0].weights, rtol=0, atol=0)


def test_each_thing_is_written_once_and_both_ranks_write_about_half(saved):
    manifest = Manifest.read(saved[0] / f"checkpoint-{STEPS}")
    elements = {
        name: sum(Box(p.offset, p.shape).elements for p in entry.parts) for name, entry in manifest.weights.items()
    }
    assert elements == {name: Box((), entry.shape).elements for name, entry in manifest.weights.items()}
    assert manifest.optimizer is not None
    assert all(len(entry.parts) == 1 for entry in manifest.optimizer.values())
    of_rank = [
        sum(entry.bytes for name, entry in manifest.files.items() if f"-0000{rank}-of" in name) for rank in (1, 2)
    ]
    of_rank[0] += manifest.files["model.safetensors"].bytes
    assert max(of_rank) / min(of_rank) < 1.3


def test_the_hub_token_is_in_no_file(tmp_path):
    run(tmp_path, hub_token="hf_secretsecretsecret", num_train_epochs=1)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(path.name == "training_args.json" for path in files)
    assert not any(b"secretsecret" in path.read_bytes() for path in files)


# Damage


def damaged(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "flipped":
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "missing":
        path.unlink()


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "missing"])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "state-00002-of-00002.safetensors", "trainer_state.json", MANIFEST]
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(name, how, copied, saved):
    damaged(copied / f"checkpoint-{STEPS}" / name, how)
    found = resumed(copied, saved)
    assert len(found.held) == 1, "it went on from the checkpoint before"
    assert any(f"checkpoint-{STEPS}" in message and "passed over" in message for message in found.messages)


def test_two_ranks_see_it_although_each_looks_at_half_of_the_files(copied, saved, ranks2: RankPool):
    for name in ("model.safetensors", "state-00001-of-00002.safetensors", "state-00002-of-00002.safetensors"):
        folder = shutil.copytree(copied, copied.with_name(f"without-{name}"))
        damaged(folder / f"checkpoint-{STEPS}" / name, "flipped")
        for found in ranks2.run(run, folder, resume=True):
            assert len(found.held) == 1
            assert found.series("loss") == pytest.approx(saved[1][0].series("loss"), rel=1e-6)


def test_a_damaged_checkpoint_that_was_asked_for_is_an_error_that_names_another(copied):
    damaged(copied / "checkpoint-4" / "model.safetensors", "flipped")
    with pytest.raises(
        CheckpointError, match=r"checkpoint-4/model.safetensors is corrupt: its sha256 .*Valid: .*checkpoint-6"
    ):
        run(copied, resume=str(copied / "checkpoint-4"))


def test_where_none_is_valid_nothing_begins(copied):
    for number in range(1, STEPS + 1):
        damaged(copied / f"checkpoint-{number}" / MANIFEST, "empty")
    for asked in (True, "auto"):
        with pytest.raises(CheckpointError, match=f"none of the {STEPS} checkpoints .* Remove them to begin anew"):
            run(copied, resume=asked)


def test_without_checkpoints_auto_begins_and_true_does_not(tmp_path):
    with pytest.raises(CheckpointError, match='holds no checkpoint. Valid: resume_from_checkpoint="auto"'):  # noqa: RUF043
        run(tmp_path, resume=True)
    assert len(run(tmp_path, resume="auto", max_steps=2).held) == 2


@given(st.data())
def test_any_byte_of_any_file_counts(saved, tmp_path_factory, data):
    source = saved[0] / "checkpoint-2"
    name = data.draw(st.sampled_from(sorted(path.name for path in source.iterdir())))
    content = bytearray((source / name).read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    folder = tmp_path_factory.mktemp("bytes") / "checkpoint-2"
    folder.mkdir()
    for path in source.iterdir():
        os.link(path, folder / path.name)
    (folder / name).unlink()
    (folder / name).write_bytes(content)
    assert problem_of(source) is None
    assert (problem_of(folder) is not None) or json.loads(content) == json.loads((source / name).read_bytes())


# Hostile checkpoints


class Payload:
    """What a pickle runs when it is loaded."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["PAYLOAD"],)


def rewritten(folder: Path, change: Any) -> None:
    """A manifest with another content and the checksum that belongs to it."""
    content = json.loads((folder / MANIFEST).read_text())
    content.pop("checksum")
    change(content)
    (folder / MANIFEST).write_text(json.dumps({"checksum": folders._checksum(content), **content}))


def test_pickles_in_a_checkpoint_are_never_loaded(copied, saved, monkeypatch):
    monkeypatch.setenv("PAYLOAD", str(copied / "payload"))
    for number in range(1, STEPS + 1):
        for name in (
            "optimizer.pt",
            "scheduler.pt",
            "rng_state.pth",
            "rng_state_0.pth",
            "scaler.pt",
            "training_args.bin",
        ):
            (copied / f"checkpoint-{number}" / name).write_bytes(pickle.dumps(Payload()))
    resumed(copied, saved, resume=str(copied / "checkpoint-3"))
    for number in range(1, STEPS + 1):
        shutil.rmtree(copied / f"checkpoint-{number}")
    (copied / "checkpoint-9").mkdir()
    (copied / "checkpoint-9" / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    with pytest.raises(CheckpointError, match=r"holds no manifest.json.*are pickles and are not read"):
        run(copied, resume=str(copied / "checkpoint-9"))
    assert not (copied / "payload").exists()


@pytest.mark.parametrize(
    "name", ["../checkpoint-5/model.safetensors", "/etc/passwd", "sub/model.safetensors", "..", ".hidden"]
)
def test_files_outside_the_folder_are_refused(name, copied):
    folder = copied / f"checkpoint-{STEPS}"

    def in_files(content: Any) -> None:
        content["files"][name] = content["files"].pop("model.safetensors")

    def in_part(content: Any) -> None:
        next(iter(content["weights"].values()))["parts"][0]["file"] = name

    before = (folder / MANIFEST).read_text()
    for change in (in_files, in_part):
        (folder / MANIFEST).write_text(before)
        rewritten(folder, change)
        assert "should match pattern" in str(problem_of(folder))


def test_a_part_in_a_file_that_nobody_checked_is_refused(copied):
    folder = copied / f"checkpoint-{STEPS}"
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    rewritten(
        folder, lambda content: next(iter(content["weights"].values()))["parts"][0].update(file="other.safetensors")
    )
    with pytest.raises(CheckpointError, match="not among the manifest's files"):
        run(copied, resume=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry: entry.update(shape=[10**9, 10**9]), r"has shape \[1000000000, 1000000000\] and dtype float32"),
        (lambda entry: entry.update(dtype="manual_seed"), "is no dtype of torch"),
        (lambda entry: entry["parts"][0].update(shape=[1, 64]), r"has shape \[.*\], and the manifest says \[1, 64\]"),
        (lambda entry: entry.update(parts=[]), "hold 0 of the"),
        (lambda entry: entry["parts"].append(entry["parts"][0]), "elements at"),
    ],
)
def test_absurd_weights_in_a_manifest_are_refused(change, message, copied):
    folder = copied / f"checkpoint-{STEPS}"
    rewritten(folder, lambda content: change(content["weights"]["model.layers.0.self_attn.q_proj.weight"]))
    with pytest.raises(CheckpointError, match=message):
        run(copied, resume=True)


def test_an_absurd_state_takes_no_memory(copied):
    folder = copied / f"checkpoint-{STEPS}"

    def change(content: Any) -> None:
        entry = content["optimizer"]["step/model.norm.weight"]
        entry["shape"] = entry["parts"][0]["shape"] = [10**9, 10**6]
        entry["parts"][0]["offset"] = [0, 0]

    rewritten(folder, change)
    with pytest.raises(CheckpointError, match=r"has shape \(\), not \[1000000000, 1000000\]"):
        run(copied, resume=True)


@pytest.mark.parametrize("header", [2**40, 2**63 - 1, 50])
def test_an_absurd_header_is_refused(header, copied):
    folder = copied / f"checkpoint-{STEPS}"
    path = folder / "model.safetensors"
    path.write_bytes(header.to_bytes(8, "little") + path.read_bytes()[8:])
    rewritten(folder, lambda content: content["files"].update({path.name: folders.file_entry(path).model_dump()}))
    assert problem_of(folder) is None, "its checksum is right"
    with pytest.raises(CheckpointError, match=r"model.safetensors cannot be read"):
        run(copied, resume=True)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "null", "{}", '{"checksum": 1}', "\x00", "9" * 10_000])
def test_a_manifest_that_is_none_is_refused(text, copied):
    (copied / f"checkpoint-{STEPS}" / MANIFEST).write_text(text)
    assert "manifest.json" in str(problem_of(copied / f"checkpoint-{STEPS}"))


def test_weights_of_another_model_are_refused(copied):
    with pytest.raises(CheckpointError, match=r"holds \d+ weights, and the model trains or holds \d+: it lacks"):
        train("mixtral", documents(LENGTHS), PLUGIN | {"capacity": 80}, SETTINGS | {"output_dir": copied}, resume=True)  # type: ignore[arg-type]


# Writing


def test_only_the_last_are_kept(tmp_path):
    run(tmp_path, save_total_limit=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-5", "checkpoint-6"]


def test_a_save_in_the_background_holds_what_a_blocking_one_holds(saved, ranks2: RankPool, tmp_path):
    ranks2.run(run, tmp_path, {"async_save": False})
    for step in (1, STEPS):
        for path in sorted((tmp_path / f"checkpoint-{step}").glob("*.safetensors")):
            found, expected = load_file(path), load_file(saved[0] / f"checkpoint-{step}" / path.name)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


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


class Limited(TrainerCallback):
    """Lets this process write no more than small files during some steps: a disk that is full for a while."""

    def __init__(self, steps: range) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        soft = 20_000 if state.global_step in self.steps else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def full_disk(output: Path, steps: range, rank: int | None = None) -> tuple[list[str], list[float], str]:
    limited = [Limited(steps)] if rank in (None, int(os.environ.get("RANK", 0))) else []
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # a rank's is a file too, and others have filled it
            found = run(output, {"async_save": False}, callbacks=limited)
        return found.messages, found.series("failed_saves"), ""
    except CheckpointError as error:
        return [], [], str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_a_disk_that_is_full_for_a_while_costs_those_checkpoints_only(ranks2: RankPool, tmp_path):
    for messages, failed, error in ranks2.run(full_disk, tmp_path, range(3, 5), rank=1):
        assert not error
        assert failed == [0, 0, 0, 1, 2, 2]
        said = [message for message in messages if "could not be written" in message]
        assert len(said) == 2
        assert all("rank 1: " in message and "File too large" in message for message in said)
        assert "The newest checkpoint is" in said[0]
        assert "checkpoint-2" in said[0]
    assert [step for step in range(1, 7) if problem_of(tmp_path / f"checkpoint-{step}") is None] == [1, 2, 5, 6]
    assert {path.name for path in tmp_path.iterdir()} == {f"checkpoint-{step}" for step in (1, 2, 5, 6)}


def test_a_disk_that_stays_full_ends_training_with_an_error(ranks2: RankPool, tmp_path):
    for _, _, error in ranks2.run(full_disk, tmp_path, range(3, 100)):
        assert "its last checkpoint could not be written: rank 0: " in error
        assert "resume from the newest checkpoint there" in error
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-1", "checkpoint-2"}


def apart(output: Path) -> tuple[str, list[str]]:
    before, writer.VISIBLE_SECONDS = writer.VISIBLE_SECONDS, 0.2
    own = output / os.environ["RANK"]
    try:
        run(own, num_train_epochs=1)
    except CheckpointError as error:
        return str(error), [path.name for path in own.iterdir()]
    finally:
        writer.VISIBLE_SECONDS = before
    return "", []


def test_ranks_that_do_not_see_the_same_folder_are_told_so(ranks2: RankPool, tmp_path):
    for message, left in ranks2.run(apart, tmp_path):
        assert "rank 0 does not see it after 0.2 s: all ranks must see the same output_dir" in message
        assert not left


class Terminates(TrainerCallback):
    """Sends this process SIGTERM in a step."""

    def __init__(self, step: int, rank: int) -> None:
        self.step, self.rank = step, rank

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step and args.process_index == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)


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


def test_leftovers_of_a_crash_go_and_a_checkpoint_that_was_just_being_replaced_comes_back(copied, saved):
    (copied / f"checkpoint-{STEPS}").rename(copied / f".replaced-checkpoint-{STEPS}")
    (copied / ".writing-checkpoint-9").mkdir()
    (copied / ".writing-checkpoint-9" / "model.safetensors").write_bytes(b"half")
    (copied / ".removing-checkpoint-1").mkdir()
    found = resumed(copied, saved)
    assert not found.held, "it had been complete"
    assert not [path for path in copied.iterdir() if path.name.startswith(".")]


def test_two_jobs_in_one_folder_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "SECONDS", 0.3)
    program = (
        "import sys, time; from pathlib import Path; from hf_longctx.training.checkpoint.lock import locked\n"
        "with locked(Path(sys.argv[1])):\n    print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=f"process {other.pid} on .* trains into .*set another output_dir"):
            run(tmp_path, num_train_epochs=1)
        other.kill()
    assert len(run(tmp_path, num_train_epochs=1).held) == 3, "a lock ends with its process"
    assert not (tmp_path / ".lock").exists()


def test_a_run_that_goes_back_is_the_one_that_auto_goes_on_with(copied):
    with pytest.raises(KeyboardInterrupt):
        run(copied, resume=str(copied / "checkpoint-2"), callbacks=[Interrupts(4)])
    assert len(run(copied, resume="auto").held) == 2, "steps 5 and 6, although there was a checkpoint-6"


class Interrupts(TrainerCallback):
    """Ctrl-C after a step was saved."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def test_another_optimizer_is_refused(copied):
    with pytest.raises(CheckpointError, match="was saved by AdamW, and this run has SGD"):
        run(copied, resume=True, optim="sgd")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update(global_step=5), "is of step 5, and the weights beside it of step 6"),
        (lambda state: state.update(global_step=10**9), "is of step 1000000000, and"),
        (lambda state: state.update(unknown=1), "is none of Trainer's"),
    ],
)
def test_the_state_of_another_step_is_refused(change, message, copied):
    folder = copied / f"checkpoint-{STEPS}"
    path = folder / "trainer_state.json"
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))
    rewritten(folder, lambda content: content["files"].update({path.name: folders.file_entry(path).model_dump()}))
    with pytest.raises(CheckpointError, match=message):
        run(copied, resume=str(folder))


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
    rows = documents(LENGTHS * 40)  # two steps of evaluation
    settings = SETTINGS | EVALUATED | {"output_dir": output}
    return train("llama", rows[:10], PLUGIN, settings, eval_rows=rows, resume="auto", callbacks=callbacks)


@pytest.mark.parametrize("step", [3, STEPS])
def test_sigterm_in_an_evaluation_changes_nothing(step, tmp_path):
    expected = evaluated(tmp_path / "whole")
    with pytest.raises(SystemExit):
        evaluated(tmp_path / "left", TerminatesInEvaluation(step))
    found = evaluated(tmp_path / "left")
    for name in ("loss", "learning_rate", "eval_loss"):
        assert found.series(name) == pytest.approx(expected.series(name), rel=1e-5), name
    torch.testing.assert_close(found.weights, expected.weights, rtol=0, atol=1e-5)


def test_a_run_without_its_optimizer_cannot_be_continued(tmp_path):
    run(tmp_path, save_only_model=True, num_train_epochs=1)
    assert problem_of(tmp_path / "checkpoint-3") is None
    with pytest.raises(CheckpointError, match="holds no optimizer"):
        run(tmp_path, resume=str(tmp_path / "checkpoint-3"))


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
    found = train("llama", rows, PLUGIN, SETTINGS | settings | {"output_dir": output}, eval_rows=rows[:3])
    return found.series("eval_loss"), found.weights, sorted(path.name for path in output.iterdir())


def test_a_reader_reads_boxes_of_any_cut(tmp_path):
    """A tensor that was written in four parts, read in other boxes."""
    whole = torch.arange(48.0).reshape(6, 8)
    parts = []
    for number, (rows, columns) in enumerate([((0, 2), (0, 8)), ((2, 6), (0, 3)), ((2, 6), (3, 5)), ((2, 6), (5, 8))]):
        save_file({"t": whole[slice(*rows), slice(*columns)].contiguous()}, tmp_path / f"{number}.safetensors")
        shape = rows[1] - rows[0], columns[1] - columns[0]
        parts.append({"file": f"{number}.safetensors", "key": "t", "offset": (rows[0], columns[0]), "shape": shape})
    entry = {"dtype": "float32", "shape": (6, 8), "parts": parts}
    files = {f"{number}.safetensors": folders.file_entry(tmp_path / f"{number}.safetensors") for number in range(4)}
    manifest = Manifest(
        step=1, serial=1, world_size=4, sharding="ddp", files=files, weights={"t": entry}, optimizer=None
    )  # type: ignore[dict-item, arg-type]
    (tmp_path / MANIFEST).write_text(manifest.text())
    found = torch.zeros(6, 8)
    CheckpointReader(tmp_path).read_weights({"t": found})
    assert torch.equal(found, whole)
