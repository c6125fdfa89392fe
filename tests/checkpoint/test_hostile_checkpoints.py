"""What is hostile in a checkpoint is refused before anything of it is used."""

import json
import os
import pickle
import shutil
from typing import Any

import pytest

from hf_longctx.checkpoint import folder as folders
from hf_longctx.checkpoint.folder import MANIFEST, CheckpointError, problem_of
from tests.builders.training.saved_runs import LENGTHS, PLUGIN, SETTINGS, STEPS, resumed, rewritten, run
from tests.builders.training_runs import documents, train


class Payload:
    """What a pickle runs when it is loaded."""

    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["PAYLOAD"],)


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
