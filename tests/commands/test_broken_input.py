"""What users get wrong beside configurations: models, runs and folders that are damaged or not there. Each is one line that names
it and says what would be valid, with exit code 2 and without a traceback, and it is said before any work is done."""

import errno
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from peft import LoraConfig, get_peft_model

from hf_longctx.cli import main
from hf_longctx.data.embedded.embedded_model import DIRECTORY
from hf_longctx.data.reading.layouts import HUB_SECONDS
from hf_longctx.report.training_runs.run_files import perplexity
from tests.builders.tiny_models import TINY, tiny_llama
from tests.builders.training.run_records import LOG, RECORD, save_weights
from tests.builders.training_runs import documents, fresh_accelerator_state
from tests.worlds.launched import ROOT


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a model, an adapter on it, documents, a configuration and what a run leaves."""
    monkeypatch.chdir(tmp_path)
    tiny_llama().save_pretrained("model")
    adapter = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj"]))
    adapter.peft_config["default"].base_model_name_or_path = "model"
    adapter.save_pretrained("adapter")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents([5, 40, 12])))
    settings = yaml.safe_load((ROOT / "configs" / "tiny.yaml").read_text())
    settings |= {"model": {"path": "model"}, "data": {"path": "rows.jsonl"}}
    settings["training"] |= {"output_dir": "out", "max_steps": 1, "save_strategy": "no"}
    Path("run.yaml").write_text(yaml.safe_dump(settings))
    Path("run").mkdir()
    Path("run/trainer_state.json").write_text(json.dumps({"log_history": LOG}))
    Path("run/run.json").write_text(json.dumps(RECORD))
    return tmp_path


def refused(capsys: Any, *arguments: str) -> str:
    """Return what is said of a command that fails as a user's error."""
    fresh_accelerator_state()
    assert main(arguments) == 2
    message = capsys.readouterr().err.removeprefix("setting up\n")
    assert "Traceback" not in message
    assert message.startswith("error: ")
    assert message.count("\n") == 1, message
    return message


def cut_off(path: str) -> None:
    Path(path).write_bytes(Path(path).read_bytes()[:500])


def unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that nobody hears."""

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert HUB_SECONDS <= 10


EVALUATE = ("evaluate", "--data", "rows.jsonl", "--tasks", "position")


@pytest.mark.parametrize(
    ("damage", "arguments", "parts"),
    [
        (lambda: cut_off("model/model.safetensors"), (*EVALUATE, "model"), ("model/model.safetensors", "cut off")),
        (lambda: cut_off("model/model.safetensors"), (*EVALUATE, "adapter"), ("model/model.safetensors",)),
        (lambda: cut_off("model/model.safetensors"), ("export", "model", "o"), ("model/model.safetensors", "damaged")),
        (lambda: cut_off("model/model.safetensors"), ("merge", "adapter", "o"), ("model/model.safetensors",)),
        (lambda: cut_off("model/model.safetensors"), ("train", "run.yaml"), ("model/model.safetensors", "damaged")),
        (lambda: cut_off("adapter/adapter_model.safetensors"), (*EVALUATE, "adapter"), ("adapter_model.safetensors",)),
        (lambda: cut_off("adapter/adapter_model.safetensors"), ("merge", "adapter", "o"), ("adapter_model.saf",)),
        (lambda: Path("model/model.safetensors").unlink(), ("merge", "adapter", "o"), ("'model'", "--base PATH")),
        (lambda: Path("model/model.safetensors").unlink(), (*EVALUATE, "model"), ("MODEL 'model' cannot be loaded",)),
        (lambda: shutil.rmtree("model"), (*EVALUATE, "adapter"), ("adapter stands on 'model'", "--base")),
        (lambda: Path("adapter/adapter_config.json").write_text("{"), (*EVALUATE, "adapter"), ("adapter_config.json",)),
        (lambda: None, ("generate", "model", "--prompt", "a"), ("MODEL 'model' has no tokenizer", "tokenizer.json")),
        (lambda: None, ("evaluate", "rows.jsonl"), ("rows.jsonl is a file",)),
        (lambda: None, ("evaluate", "a/b/c"), ("'a/b/c' is no folder here", "MODEL is")),
        (lambda: None, ("evaluate", "modell"), ("ConnectionError", "did you mean 'model'?")),
        (lambda: None, ("generate", "org/name", "--prompt", "a"), ("'org/name'", "hf download org/name")),
        (lambda: None, ("export", "model", "o", "--max-file-size", "0GB"), ("'0GB'", "for instance 5GB")),
        (lambda: None, ("export", "model", "o", "--max-file-size", "5"), ("'5'", "KB, MB, GB, TB")),
    ],
)
def test_a_model_that_cannot_be_used_is_named(
    damage: Callable[[], None], arguments: tuple[str, ...], parts: tuple[str, ...], folder, capsys, monkeypatch
):
    unreachable(monkeypatch)
    damage()
    message = refused(capsys, *arguments)
    assert [part for part in parts if part not in message] == [], message
    assert not list(folder.glob("*o")) + list(folder.glob(".o*")), "nothing half-made is left"


@pytest.mark.parametrize(
    "arguments",
    [
        (*EVALUATE, "model", "--output", "rows.jsonl/out"),
        ("prepare", "run.yaml", "--output", "rows.jsonl/out"),
        ("export", "model", "rows.jsonl/out"),
        ("merge", "adapter", "rows.jsonl/out"),
        ("train", "run.yaml", "training.output_dir=rows.jsonl/out"),
        ("init", "llama-7b", "--gpus", "8", "--output", "rows.jsonl/out/x.yaml"),
        ("profile", "--quick", "--output", "rows.jsonl/out/x.json"),
    ],
)
def test_what_cannot_be_written_is_said_before_the_work(arguments: tuple[str, ...], folder, capsys, monkeypatch):
    def worked(*_: Any, **__: Any) -> None:
        raise AssertionError("work began")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", worked)
    monkeypatch.setattr("hf_longctx.training.measuring.rank_profile.profile_model", worked)
    monkeypatch.setattr("hf_longctx.run_documents.prepare", worked)
    message = refused(capsys, *arguments)
    assert "rows.jsonl/out" in message
    assert "rows.jsonl is a file. Give a folder in which you may write" in message


@pytest.mark.parametrize("target", ["nowhere", "out"])
def test_a_link_to_nothing_is_named_before_the_work(target: str, folder, capsys):
    Path("out").symlink_to(target)
    assert f"out is a link to {target}, which is not there. Give a folder" in refused(capsys, "train", "run.yaml")


def test_a_current_directory_that_is_gone_is_said(folder, capsys, monkeypatch):
    gone = folder / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    message = refused(capsys, "train", str(folder / "run.yaml"))
    monkeypatch.chdir(folder)
    assert "the current directory is not there any more: change to one that is" in message


def test_a_cache_that_cannot_be_written_is_named(folder, capsys, monkeypatch):
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "Error writing bytes to file")

    monkeypatch.setattr("hf_longctx.run_documents.prepare", full)
    monkeypatch.setenv("HF_LONGCTX_CACHE", "cache")
    message = refused(capsys, "train", "run.yaml")
    assert "cannot be kept in cache: No space left on device" in message
    assert "HF_LONGCTX_CACHE" in message


def test_a_folder_may_have_to_be_made(folder, capsys):
    assert main([*EVALUATE, "model", "--output", "new/ä b/out"]) == 0
    assert json.loads(Path("new/ä b/out/evaluation.json").read_text())["documents"] == 3


def test_a_model_that_was_trained_on_tokens_is_trained_on_without_a_tokenizer(folder, capsys):
    # As a run from random weights leaves it.
    fresh_accelerator_state()
    assert main(["train", "run.yaml"]) == 0, capsys.readouterr().err
    assert "out: the model, report.html, README.md\n" in capsys.readouterr().out
    Path("texts.jsonl").write_text('{"text": "words"}\n')
    assert "needs a tokenizer" in refused(capsys, "train", "run.yaml", "data.path=texts.jsonl")
    Path("model/tokenizer.json").write_text("{")
    assert "the tokenizer of 'model' cannot be loaded" in refused(capsys, "train", "run.yaml")


def test_tokens_that_the_model_does_not_know_are_refused_by_a_dry_run_too(folder, capsys):
    Path("rows.jsonl").write_text(json.dumps({"input_ids": [1, TINY["vocab_size"]]}) + "\n")
    assert f"must lie in 0 to {TINY['vocab_size'] - 1}" in refused(capsys, "train", "run.yaml", "--dry-run")


@pytest.mark.parametrize(
    "verb",
    [("train", "run.yaml"), ("train", "run.yaml", "--dry-run"), ("profile", "--model", "run.yaml")],
    ids=" ".join,
)
def test_keys_of_a_models_configuration_are_those_of_every_verb(verb: tuple[str, ...], folder, capsys):
    tiny_llama(attention_dropout=0.5).save_pretrained("model")
    capsys.readouterr()  # how far saving is
    if "--dry-run" in verb:
        assert "in YAML model.config.attention_dropout: 0.0" in refused(capsys, *verb)
    settings = yaml.safe_load(Path("run.yaml").read_text())
    settings["model"]["config"] = {"attention_dropout": 0.0, "num_layers": 1}
    Path("run.yaml").write_text(yaml.safe_dump(settings))
    assert main(verb) == 2
    assert "model.config.num_layers: unknown key (value 1)" in capsys.readouterr().err


def test_an_adapter_on_the_embedded_model_finds_it_on_another_machine(folder, capsys, monkeypatch):
    monkeypatch.setenv("HF_LONGCTX_CACHE", str(folder / "cache"))
    shutil.copytree("model", f"cache/{DIRECTORY}")
    path = Path("adapter/adapter_config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": f"/elsewhere/{DIRECTORY}"}))
    assert main([*EVALUATE, "adapter"]) == 0
    assert main(["merge", "adapter", "merged"]) == 0
    assert Path("merged/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("trainer_state.json", "{", "cannot be read"),
        ("trainer_state.json", "[]", "holds a list, not an object"),
        ("trainer_state.json", '{"log_history": 3}', "log_history: "),
        ("trainer_state.json", '{"log_history": [3]}', "log_history.0: "),
        ("trainer_state.json", '{"log_history": [{"step": null}]}', "log_history.0.step: "),
        ("results.json", '{"eval_loss_before": "a"}', "eval_loss_before: "),
        ("evaluation.json", '{"retrieval": [{}]}', "retrieval.0.task: Field required"),
        ("evaluation.json", '{"by_length": [{"from": 0, "to": 9, "tokens": 3}]}', "by_length.0.loss: "),
        ("run.json", "[]", "holds a list"),
        ("run.json", json.dumps(RECORD | {"slowest": [{}]}), "slowest.0.step: "),
        ("run.json", json.dumps(RECORD | {"training": {"steps": 3}}), "training.epochs: "),
        ("run.json", json.dumps(RECORD | {"data": {"documents": 3}}), "data.sources: "),
        ("run.json", json.dumps(RECORD | {"model": 3}), "model: "),
    ],
)
def test_a_file_of_a_run_that_no_run_writes_is_named_with_the_place(name: str, content: str, part: str, folder, capsys):
    (folder / "run" / name).write_text(content)
    message = refused(capsys, "report", "run")
    assert f"run/{name}" in message
    assert part in message


def test_losses_beyond_numbers_and_cards_in_no_encoding(folder, capsys):
    evaluation = {"loss": 900, "by_length": [], "retrieval": []} | save_weights(folder / "run", 0)
    (folder / "run" / "evaluation.json").write_text(json.dumps(evaluation))
    assert main(["report", "run"]) == 0
    card = Path("run/README.md").read_text()
    assert "value: 900" in card
    assert "perplexity\n      value: .inf" not in card
    assert "perplexity inf" in Path("run/report.html").read_text()
    Path("run/README.md").write_bytes(b"\xff\xfe")
    assert main(["report", "run"]) == 0
    assert Path("run/README.md").read_bytes() == b"\xff\xfe", "somebody's own"
    assert perplexity(0.0) == 1.0


def test_a_file_that_ends_too_early_is_an_error_and_no_aborted_dialogue(capsys, monkeypatch):
    def ends(*_: Any) -> None:
        raise EOFError("Compressed file ended before the end-of-stream marker was reached")

    monkeypatch.setattr("hf_longctx.commands.shared.planners.read_planners", ends)
    assert "file ends before it is complete: Compressed" in refused(
        capsys, "plan", "github", "--ranks", "2", "--capacity", "9"
    )


def test_no_number_is_cut_where_a_terminal_is_narrow(capsys, monkeypatch):
    arguments = ["estimate", "llama-7b", "--context", "1M", "--gpus", "64"]
    monkeypatch.setenv("COLUMNS", "200")
    assert main(arguments) == 0
    wide = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(arguments) == 0
    narrow = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert "…" not in narrow
    assert narrow.split() == wide.split()


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "run.yaml"),
        (*EVALUATE, "model"),
        ("generate", "model", "--prompt", "a"),
        ("profile", "--quick", "--cpu"),
    ],
)
def test_more_ranks_than_memory_holds_are_not_started(arguments: tuple[str, ...], folder, capsys, monkeypatch):
    monkeypatch.setattr("subprocess.Popen.__init__", lambda *_, **__: pytest.fail("a process was started"))
    message = refused(capsys, *arguments, "--ranks", "100000")
    assert "--ranks 100000 on processors" in message
    assert re.search(r"100000 take 50,000 of this machine's \d+ GiB. Valid: at most \d+", message)
