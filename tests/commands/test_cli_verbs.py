"""Every verb: help that fits a screen and ends with an example, and the example itself, run where its files are."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from peft import LoraConfig, get_peft_model

from hf_longctx import cli
from hf_longctx.commands import profile as profile_verb
from hf_longctx.settings import EMBEDDED_MODEL
from tests.builders.tiny_embedded import write_embedded
from tests.builders.tiny_models import TINY, tiny_llama
from tests.builders.training_runs import fresh_accelerator_state
from tests.worlds.launched import ROOT
from tests.worlds.patience import PATIENCE

VERBS = {verb.__name__: verb for verb in cli.VERBS}
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
QUICK: dict[str, list[str]] = {
    "profile": ["--longest", "128", "--cpu", "--threads", "1"],
    "simulate": ["--tokens", "1M", "--steps", "1", "--planner", "hdp"],
    "evaluate": ["--data", "texts.jsonl", "--trials", "1"],
    "doctor": ["--cpu"],
}
"""Options that the test adds to an example, so that it is quick."""
CODES = {"doctor": (0, 1)}
"""Exit codes that are right; doctor's 1 says that this machine has a problem."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what examples name: configs/ on small data, a model with a tokenizer, an adapter."""
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(ROOT / "configs", folder / "configs")
    tokenizer = write_embedded(folder / "cache")
    adapter = get_peft_model(tiny_llama(vocab_size=len(tokenizer)), LoraConfig(r=2, target_modules=["q_proj"]))
    adapter.peft_config["default"].base_model_name_or_path = EMBEDDED_MODEL
    adapter.save_pretrained(folder / "runs" / "lora")
    rows = [{"input_ids": [i % TINY["vocab_size"] for i in range(length)]} for length in (3, 50, 20, 90, 7, 30)]
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = (ROOT / "README.md").read_text()
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text[i : i + 2000]}) + "\n" for i in range(0, 8000, 2000))
    )
    tiny = folder / "configs" / "tiny.yaml"
    settings = yaml.safe_load(tiny.read_text())
    settings["model"]["random_init"]["vocab_size"] = TINY["vocab_size"]
    settings["data"] = {"path": "documents.jsonl"}
    tiny.write_text(yaml.safe_dump(settings))
    return folder


@pytest.fixture(scope="module")
def trained(folder: Path, starts_processes: None) -> subprocess.CompletedProcess[str]:
    """train's example, in a process of its own; what it leaves is what other examples begin with."""
    ran = subprocess.run(
        [sys.executable, "-m", *shlex.split(cli.example(cli.train).replace("hf-longctx", "hf_longctx", 1))],
        cwd=folder,
        env=os.environ | ENVIRONMENT | {"HF_LONGCTX_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert ran.returncode == 0, ran.stderr
    shutil.copytree(folder / "runs" / "tiny", folder / "runs" / "quickstart")
    return ran


@pytest.mark.parametrize("name", ["", *VERBS])
def test_help_fits_a_screen_and_ends_with_an_example(name: str, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    assert cli.main([name, "--help"] if name else ["--help"]) == 0
    lines = capsys.readouterr().out.rstrip("\n").splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 40, f"{len(lines)} lines"
    shown = " ".join(" ".join(lines).split())
    assert shown.endswith(f"Example: {cli.example(VERBS[name or 'train'])}")
    if not name:
        assert all(f" {verb} " in shown for verb in VERBS)


def test_training_starts_its_ranks_and_says_what_it_does(trained: subprocess.CompletedProcess[str], folder: Path):
    assert "on 2 ranks" in trained.stdout
    assert "Traceback" not in trained.stderr
    assert json.loads((folder / "runs" / "tiny" / "results.json").read_text())["ranks"] == 2


@pytest.mark.parametrize("name", [name for name in VERBS if name != "train"])
@pytest.mark.usefixtures("trained")
def test_the_example_runs(name: str, folder: Path, monkeypatch, capsys):
    program, *arguments = shlex.split(cli.example(VERBS[name]))
    assert (program, arguments[0]) == ("hf-longctx", name)
    monkeypatch.chdir(folder)
    for variable, value in (ENVIRONMENT | {"HF_LONGCTX_CACHE": str(folder / "cache")}).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(profile_verb, "QUICK_SECONDS", 0.5)
    # How well this machine is measured while others use it.
    monkeypatch.setattr(profile_verb, "refuse_meaningless", lambda *measured: None)
    fresh_accelerator_state()
    code = cli.main([*arguments, *QUICK.get(name, [])])
    shown = capsys.readouterr()
    assert code in CODES.get(name, (0,)), shown
    assert "Traceback" not in shown.err
    if "--output" in arguments:
        assert (folder / arguments[arguments.index("--output") + 1]).exists()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("typed", "completed"), [("hf-longctx tr", "train"), ("hf-longctx train a.yaml longctx.cap", "longctx.capacity=")]
)
def test_the_shell_completes(typed: str, completed: str):
    words = typed.split()
    environment = os.environ | {
        "_HF_LONGCTX_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(words) - 1),
    }
    ran = subprocess.run(
        [sys.executable, "-m", "hf_longctx"],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert completed in ran.stdout.split(), ran
