"""Someone who begins with `hf-longctx init`, for GPUs or for what is here: what it writes is valid, fits in a dry run, and is the
first way that does."""

import re
from pathlib import Path
from typing import Any

import pytest

from hf_longctx.cli import main
from hf_longctx.commands.init import chosen_way
from hf_longctx.commands.shared.models import transformers_config
from hf_longctx.commands.shared.room import read_room
from hf_longctx.config import load_config
from hf_longctx.hardware.model_sizes import ModelSizes
from hf_longctx.hardware.published import LLAMA_31_8B
from tests.builders.tiny_models import tiny_llama
from tests.builders.training_runs import fresh_accelerator_state


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def output_of(capsys: Any, *arguments: str, code: int = 0) -> str:
    fresh_accelerator_state()
    assert main(list(arguments)) == code, capsys.readouterr()
    shown = capsys.readouterr()
    return shown.err if code == 2 else shown.out


@pytest.mark.parametrize(
    ("model", "options", "ranks", "expected"),
    [
        ("meta-llama/Llama-3.1-8B", ["--gpus", "8"], 8, {"sharding": "zero1", "lora": False}),
        ("llama-7b", ["--gpus", "1", "--context", "32K"], 1, {"sharding": "auto", "lora": True, "rope": 8}),
        ("meta-llama/Llama-3.1-8B", ["--gpus", "32", "--context", "1M"], 32, {"sharding": "zero1", "rope": 128}),
        ("mistral-8x7b", ["--gpus", "64", "--context", "64K"], 64, {"sharding": "zero3", "rope": 2}),
        ("embedded:smollm2-135m", ["--gpus", "1", "--gpu-memory", "16"], 1, {"sharding": "auto", "lora": False}),
    ],
)
def test_what_is_written_is_valid_and_fits(model, options, ranks, expected, capsys):
    shown = output_of(capsys, "init", model, *options, "--output", "new/run.yaml")
    config = load_config("new/run.yaml")
    assert config.longctx.sharding == expected["sharding"]
    assert (config.model.lora is not None) == expected.get("lora", False)
    assert (config.model.rope_scaling and config.model.rope_scaling.factor) == expected.get("rope")
    start = Path("new/run.yaml").read_text().splitlines()[0].removeprefix("# ")
    assert f"train:  {start}" in shown
    dry = next(line for line in shown.splitlines() if "--dry-run" in line).split("hf-longctx ")[1].split()
    planned = output_of(capsys, *dry, "--lengths", "github")
    assert f"\n  {start}\n" in planned
    fits = re.search(r"^fits: ([\d.]+) of the ([\d.]+) GiB", planned, re.MULTILINE)
    predicted = re.search(r"tokens on a GPU at a time: ([\d.]+) of ([\d.]+) GiB", Path("new/run.yaml").read_text())
    assert fits
    assert predicted
    assert float(fits[1]) <= float(predicted[1])
    assert fits[2] == predicted[2]
    assert config.longctx.capacity * ranks >= config.longctx.longest_document


def test_a_model_in_a_directory_and_documents_of_ones_own(capsys):
    tiny_llama().config.save_pretrained("model")
    Path("mine.jsonl").write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [4, 5]}\n')
    output_of(capsys, "init", "model", "--gpus", "1", "--data", "mine.jsonl", "--output", "run.yaml")
    assert load_config("run.yaml").data.path == {"train": ["mine.jsonl"]}
    assert "run.yaml exists" in output_of(capsys, "init", "model", "--gpus", "1", "--output", "run.yaml", code=2)
    assert "'mine.jsonl'" in output_of(
        capsys, "init", "model", "--gpus", "1", "--data", "mime.jsonl", "--output", "b.yaml", code=2
    )
    assert not Path("b.yaml").exists()


def test_processors_are_no_gpus(capsys):
    shown = output_of(capsys, "init", "embedded:smollm2-135m", "--device", "cpu", "--gpus", "2", "--output", "run.yaml")
    assert re.search(r"run\.yaml: .*, [\d,]+ tokens on a process, documents", shown)
    assert "tokens on a process at a time:" in Path("run.yaml").read_text()


def test_the_first_way_that_fits_is_taken():
    room = read_room("h100", None)
    assert [
        (way.sharding, way.offload, way.lora)
        for ranks, context, lora in ((64, 2**17, None), (8, 2**17, None), (1, 2**15, None), (8, 2**17, True))
        if (way := chosen_way(LLAMA_31_8B, room, ranks, context, lora))
    ] == [("zero1", 0.0, False), ("zero1", 0.0, False), ("ddp", 0.0, True), ("ddp", 0.0, True)]
    assert chosen_way(LLAMA_31_8B, room, 1, 2**15, False) is None


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (
            ["llama-70b", "--gpus", "1"],
            ["documents of 4,096 tokens do not fit: 1 x h100 hold at most 0 tokens", "--gpus"],
        ),
        (["llama-7b", "--gpus", "8", "--context", "64M"], ["do not fit", "Valid: --context ", "or --gpus "]),
        (["llama-7b", "--gpus", "1", "--full"], ["Valid: ", "--lora"]),
        (["llama-30b", "--gpus", "8"], ["no hub has its weights"]),
        (["llama-7b", "--gpus", "9"], ["--gpus 9 are no whole machines of --gpus-per-node 8"]),
        (["llama-7b", "--gpus", "8", "--context", "long"], ["--context 'long' is no number of tokens"]),
        (["no/such", "--gpus", "8"], ["no/such"]),
    ],
)
def test_what_cannot_be_written(options, parts, capsys):
    message = output_of(capsys, "init", *options, "--output", "run.yaml", code=2)
    assert all(part in message for part in parts), message
    assert not Path("run.yaml").exists()


def test_published_sizes_are_those_of_the_models():
    """Parameters as the models' cards give them, in units of 1e9."""
    from hf_longctx.commands.shared.models import published_sizes
    from hf_longctx.settings.model import EMBEDDED_MODEL

    counts = {
        "meta-llama/Llama-3.1-8B": 8.03,
        "meta-llama/Llama-3.1-70B": 70.55,
        "mistralai/Mistral-7B-v0.3": 7.25,
        "mistralai/Mixtral-8x7B-v0.1": 46.70,
        "mistralai/Mixtral-8x22B-v0.1": 140.63,
        EMBEDDED_MODEL: 0.1345,
    }
    for name, billions in counts.items():
        config = transformers_config(published_sizes(name))
        assert ModelSizes.of(config, 1).parameters / 1e9 == pytest.approx(billions, rel=2e-3), name


def test_a_long_path_with_spaces_is_a_line_of_its_own(capsys):
    folder = " ".join(["läßt sich schwer merken"] * 5)
    tiny_llama().config.save_pretrained(folder)
    rows = Path(folder, "rows.jsonl")
    rows.write_text('{"input_ids": [1, 2, 3]}\n')
    output_of(capsys, "init", folder, "--data", str(rows), "--device", "cpu", "--gpus", "1", "--output", "run.yaml")
    config = load_config("run.yaml")
    assert (config.model.path, config.data.path) == (folder, {"train": [str(rows)]})
    assert f"path: {folder}\n" in Path("run.yaml").read_text(encoding="utf-8")


def test_without_options_it_is_for_this_machine_and_named_after_the_model(capsys, monkeypatch):
    tiny_llama().config.save_pretrained("Tiny-Llama 2")
    Path("rows.jsonl").write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [4, 5]}\n')
    shown = output_of(capsys, "init", "Tiny-Llama 2", "--data", "rows.jsonl")
    assert "this machine: its processors, for it has no GPU" in shown
    assert "tokens: 2 documents, p50 3 tokens, p99 3, longest 3" in shown
    config = load_config("tiny-llama-2.yaml")
    assert (config.training["use_cpu"], config.data.kind) == (True, "tokens")
    assert config.longctx.global_batch_tokens == 3  # those of the longest, so that few documents make several steps

    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda _: "NVIDIA H200")
    shown = output_of(capsys, "init", "llama-7b", "--output", "gpus.yaml")
    assert "this machine: 4 x NVIDIA H200" in shown
    assert "on 4 x h200" in Path("gpus.yaml").read_text()
    shown = output_of(
        capsys, "init", "llama-7b", "--gpus", "2", "--device", "cpu", "--gpu-memory", "64", "--output", "cpus.yaml"
    )
    assert load_config("cpus.yaml").training["use_cpu"]


@pytest.mark.parametrize(
    ("row", "part"),
    [
        ('{"body": "a"}', "has the columns body; lengths take the tokenizer"),
        ('{"input_ids": ["a"]}', "cannot be trained on as it is: "),
        ("\x00", "as it is: none of its rows can be read: rows.jsonl, line 1: is not JSON"),
        ("", "as it is: it holds no row"),
    ],
)
def test_data_that_cannot_be_looked_at_are_said_and_do_not_stop_it(row, part, capsys):
    tiny_llama().config.save_pretrained("model")
    Path("rows.jsonl").write_text(row + "\n")
    assert part in output_of(capsys, "init", "model", "--data", "rows.jsonl", "--output", "run.yaml")
    assert load_config("run.yaml").data.kind == "auto"


def test_a_memory_that_is_none_is_refused_by_the_option_s_name(capsys):
    assert main(["init", "llama-7b", "--gpu-memory", "nan", "--output", "run.yaml"]) == 2
    assert "error: --gpu-memory nan must be positive and finite, in GiB" in capsys.readouterr().err
