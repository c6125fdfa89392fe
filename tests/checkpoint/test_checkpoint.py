"""What a checkpoint holds, and which one a run goes on from: damage is seen, and passed over or refused."""

import json
import os
import shutil
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, TrainerCallback

from hf_longctx.checkpoint import folder as folders
from hf_longctx.checkpoint.boxes import Box
from hf_longctx.checkpoint.folder import MANIFEST, CheckpointError, Manifest, begin, commit, problem_of
from hf_longctx.checkpoint.pinned import PinnedSlabs
from hf_longctx.checkpoint.rank_messages import Ranks
from hf_longctx.checkpoint.reader import CheckpointReader
from hf_longctx.checkpoint.writer import CheckpointWriter, _Share
from tests.builders.training.saved_runs import STEPS, damaged, resumed, run
from tests.worlds.rank_pool import RankPool

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


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "missing"])
@pytest.mark.parametrize(
    "name", ["model.safetensors", "state-00002-of-00002.safetensors", "trainer_state.json", MANIFEST]
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(name, how, copied, saved):
    damaged(copied / f"checkpoint-{STEPS}" / name, how)
    continued = resumed(copied, saved)
    assert len(continued.held) == 1, "it went on from the checkpoint before"
    assert any(f"checkpoint-{STEPS}" in message and "passed over" in message for message in continued.messages)


def test_two_ranks_see_it_although_each_looks_at_half_of_the_files(copied, saved, ranks2: RankPool):
    for name in ("model.safetensors", "state-00001-of-00002.safetensors", "state-00002-of-00002.safetensors"):
        folder = shutil.copytree(copied, copied.with_name(f"without-{name}"))
        damaged(folder / f"checkpoint-{STEPS}" / name, "flipped")
        for continued in ranks2.run(run, folder, resume=True):
            assert len(continued.held) == 1
            assert continued.series("loss") == pytest.approx(saved[1][0].series("loss"), rel=1e-6)


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


# Which one


def test_leftovers_of_a_crash_go_and_a_checkpoint_that_was_just_being_replaced_comes_back(copied, saved):
    (copied / f"checkpoint-{STEPS}").rename(copied / f".replaced-checkpoint-{STEPS}")
    (copied / ".writing-checkpoint-9").mkdir()
    (copied / ".writing-checkpoint-9" / "model.safetensors").write_bytes(b"half")
    (copied / ".removing-checkpoint-1").mkdir()
    continued = resumed(copied, saved)
    assert not continued.held, "it had been complete"
    assert not [path for path in copied.iterdir() if path.name.startswith(".")]


def test_a_file_with_the_name_of_a_checkpoint_stays_and_is_named(tmp_path):
    taken = tmp_path / "checkpoint-4"
    writing = begin(taken)
    taken.write_text("mine")
    with pytest.raises(CheckpointError, match="checkpoint-4 is a file, where a checkpoint was to be"):
        commit(writing, taken)
    with pytest.raises(CheckpointError, match="checkpoint-4 is a file, where a checkpoint was to be"):
        begin(taken)
    assert taken.read_text() == "mine"


def test_a_manifest_that_is_no_object_is_corrupt(copied):
    (copied / "checkpoint-4" / MANIFEST).write_text("[]")
    with pytest.raises(CheckpointError, match="is corrupt: it holds no JSON object"):
        Manifest.read(copied / "checkpoint-4")


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


def test_a_run_without_its_optimizer_cannot_be_continued(tmp_path):
    run(tmp_path, save_only_model=True, num_train_epochs=1)
    assert problem_of(tmp_path / "checkpoint-3") is None
    with pytest.raises(CheckpointError, match="holds no optimizer"):
        run(tmp_path, resume=str(tmp_path / "checkpoint-3"))


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
    weight = torch.zeros(6, 8)
    CheckpointReader(tmp_path).read_weights({"t": weight})
    assert torch.equal(weight, whole)
    with pytest.raises(
        CheckpointError, match=r"dtype float32, and the model's has .* torch.bfloat16\. .*such a run keeps to"
    ):
        CheckpointReader(tmp_path).read_weights({"t": weight.bfloat16()})


def test_copies_share_slabs_of_pinned_memory_and_are_written_apart(tmp_path):
    """Sizes of Qwen 2.5 7B in float32, a 4,096th of each: embeddings and head, and seven matrices of each of 28 layers."""
    slabs = PinnedSlabs(lambda count: torch.empty(count, dtype=torch.uint8))
    rows = {"q": 3584, "k": 512, "v": 512, "o": 3584, "gate": 18944, "up": 18944, "down": 18944}
    sizes = {"embeddings": 151936 * 7 // 2, "head": 151936 * 7 // 2}
    sizes |= {f"{layer} {name}": many * 7 // 2 for layer in range(28) for name, many in rows.items()}
    copies = {}
    for number, (name, size) in enumerate(sizes.items()):
        source = torch.full((size // 4,), float(number))
        copies[name] = slabs.like(source)
        copies[name].copy_(source)
    copies["step"] = slabs.like(torch.tensor(3.0)).fill_(7.0)
    powers_of_two = sum(1 << (size - 1).bit_length() for size in sizes.values())
    assert powers_of_two > 1.9 * sum(sizes.values())
    assert sum(sizes.values()) < slabs.nbytes < 1.2 * sum(sizes.values())
    save_file(copies, tmp_path / "copies.safetensors")
    written = load_file(tmp_path / "copies.safetensors")
    assert all(torch.equal(written[name], copy) for name, copy in copies.items())
    assert [int(copy[0]) for copy in list(copies.values())[:-1]] == list(range(len(sizes)))
    assert written["step"] == 7.0
    assert written["step"].shape == ()


def test_every_save_copies_on_one_stream_of_its_own(monkeypatch):
    """torch hands out 32 streams in turn: one anew for each save would in time be that of messages."""
    made: list[Any] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.waited, self.ended = [], 0
            made.append((device, self))

        def wait_event(self, event: str) -> None:
            self.waited.append(event)

        def synchronize(self) -> None:
            self.ended += 1

    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    writer = CheckpointWriter(Ranks())
    for number in range(40):
        copies = _Share()
        weights = {"weight": {Box((0,), (2,)): torch.full((2,), float(number))}}
        writer._copy(_Share(weights), copies, {torch.device("cuda", 1): f"save {number}"})
        assert copies.weights["weight"][Box((0,), (2,))].tolist() == [number, number]
    [(device, stream)] = made
    assert device == torch.device("cuda", 1)
    assert current == 40 * [device], "a stream's end goes back to the thread's device, and makes a context there"
    assert stream.waited == [f"save {number}" for number in range(40)]
    assert stream.ended == 40
