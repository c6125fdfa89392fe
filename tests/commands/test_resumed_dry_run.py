"""`hf-longctx train --dry-run` of a run that is resumed: where it would go on from, and what training refuses there."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_longctx.cli import main
from tests.builders.training_runs import documents, fresh_accelerator_state
from tests.worlds.launched import ROOT

LENGTHS = [3, 150, 17, 60, 2, 9, 33, 40, 8, 21, 90, 200]


def said(capsys: Any, file: Path, *settings: str, code: int = 0) -> str:
    fresh_accelerator_state()
    assert main(["train", str(file), *settings]) == code
    printed = capsys.readouterr()
    return printed.err if code else printed.out


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A configuration that resumes by itself, trained for two steps."""
    folder = tmp_path_factory.mktemp("trained")
    rows = documents(LENGTHS)
    (folder / "documents.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "others.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1:]))
    settings = yaml.safe_load((ROOT / "configs" / "tiny.yaml").read_text())
    settings["data"] = {"path": str(folder / "documents.jsonl")}
    settings["longctx"] = {"capacity": 250, "global_batch_documents": 3}
    settings["training"] |= {"output_dir": str(folder / "out"), "max_steps": 2, "save_steps": 1, "bf16": False}
    settings["training"] |= {"save_strategy": "steps", "resume_from_checkpoint": "auto", "use_cpu": True}
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    fresh_accelerator_state()
    assert main(["train", str(folder / "run.yaml")]) == 0
    return folder


@pytest.fixture
def file(trained: Path, tmp_path: Path) -> Path:
    """The same with an output directory of its own, and six steps to train."""
    settings = yaml.safe_load((trained / "run.yaml").read_text())
    shutil.copytree(trained / "out", tmp_path / "out")
    settings["training"] |= {"output_dir": str(tmp_path / "out"), "max_steps": 6}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path / "run.yaml"


def test_a_dry_run_says_which_checkpoint_training_would_go_on_from(file: Path, capsys: Any):
    assert "would go on from checkpoint-2, saved on 1 rank (" in said(capsys, file, "--dry-run", "--ranks", "2")
    (file.parent / "out" / "checkpoint-2" / "model.safetensors").write_text("")
    assert "would go on from checkpoint-1, " in said(capsys, file, "--dry-run")
    assert "resume  " not in said(capsys, file, "training.resume_from_checkpoint=null", "--dry-run")
    anew = said(capsys, file, f"training.output_dir={file.parent}", "--dry-run")
    assert "would begin anew: " in anew


def test_a_checkpoint_s_batches_are_planned_where_none_are_asked_for(file: Path, capsys: Any):
    """Trainer's batch size sets those of a new run alone."""
    text = said(capsys, file, "longctx.global_batch_documents=null", "--dry-run", "--ranks", "3")
    assert "4 optimizer steps an epoch" in text


def test_documents_that_are_drawn_are_not_compared(file: Path, capsys: Any):
    assert "would go on from checkpoint-2" in said(capsys, file, "--dry-run", "--lengths", "github")


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (["longctx.global_batch_documents=4"], "but the checkpoint was made with {'global_batch_documents': 3}"),
        (["longctx.long_documents=split"], "but the checkpoint was made with {'long_documents': 'error'}"),
        (["data.path=others.jsonl"], "the checkpoint was made on documents with fingerprint"),
        (["training.bf16=true"], "but the checkpoint was trained with bf16=False"),
        (["training.resume_from_checkpoint=out/checkpoint-7"], "checkpoint-7"),
        (["training.resume_from_checkpoint=true", "training.output_dir=."], "holds no checkpoint"),
    ],
)
def test_a_dry_run_refuses_what_training_refuses_to_go_on_with(
    settings: list[str], part: str, file: Path, trained: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(file.parent)
    (file.parent / "others.jsonl").write_text((trained / "others.jsonl").read_text())
    dry = said(capsys, file, *settings, "--dry-run", code=2)
    assert part in dry
    assert dry.splitlines()[-1] == said(capsys, file, *settings, code=2).splitlines()[-1]
