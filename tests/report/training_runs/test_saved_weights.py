"""Weights are told from others by their content; what was evaluated with others is not shown as a run's own."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_longctx.report.pictures.evaluation_pictures import PICTURES, draw_evaluation
from hf_longctx.report.training_runs.model_card import write_model_card
from hf_longctx.report.training_runs.run_log import RunLog
from hf_longctx.report.training_runs.run_page import write_run_page
from hf_longctx.report.training_runs.saved_weights import weights_hash
from tests.builders.training.run_records import LOG, RECORD, save_weights

BUCKET = {"from": 256, "to": 1024, "documents": 2, "tokens": 800, "loss": 2.5, "near_loss": 2.75}
CELL = {"task": "passkey", "length": 256, "depth": 0.5, "trials": 4, "found": 3}


def test_weights_are_told_apart_by_their_content_alone(tmp_path):
    weights = {"a": torch.zeros(5000), "b": torch.arange(7), "c": torch.zeros(0)}

    def hashed(name: str, **files: dict[str, torch.Tensor]) -> str | None:
        (tmp_path / name).mkdir()
        for file, content in files.items():
            save_file(content, tmp_path / name / f"{file}.safetensors", metadata={"format": "pt", "made by": name})
        return weights_hash(tmp_path / name)

    whole = hashed("whole", model=weights)
    assert whole is not None
    assert hashed("copy", model=weights, optimizer={"a": torch.ones(1)}) == whole
    os.utime(tmp_path / "copy" / "model.safetensors", (0, 0))
    assert weights_hash(tmp_path / "copy") == whole
    parts = {
        "model-00001-of-00002": {"a": weights["a"]},
        "model-00002-of-00002": {"b": weights["b"], "c": weights["c"]},
    }
    assert hashed("parts", **parts) == whole
    assert hashed("trained", model=weights | {"b": weights["b"] + 1}) != whole
    assert hashed("other type", model=weights | {"a": weights["a"].half()}) != whole
    assert hashed("adapter", adapter_model={"a": weights["a"]}) not in (None, whole)


def test_files_that_are_none_of_weights_have_no_hash(tmp_path):
    assert weights_hash(tmp_path) is weights_hash(tmp_path / "nowhere") is None
    for content in (b"", b"\xff" * 100, b"\x02" + bytes(7) + b"[]", b"\x09" + bytes(7) + b'{"a": {}}'):
        (tmp_path / "model.safetensors").write_bytes(content)
        assert weights_hash(tmp_path) is None


def run_with(folder: Path, **evaluation: object) -> str:
    """Write the page and the card of a run with an evaluation of a loss of 2.5 beside it; return both."""
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": LOG}))
    (folder / "run.json").write_text(json.dumps(RECORD))
    content = {"model": "m", "loss": 2.5, "by_length": [BUCKET], **evaluation}
    (folder / "evaluation.json").write_text(json.dumps(content))
    write_model_card(folder)
    return (folder / "README.md").read_text() + write_run_page(folder).read_text()


@pytest.mark.parametrize(
    ("own", "others", "reason"),
    [
        (1, True, "it is of other weights than those beside it"),
        (1, False, "it does not say which weights it is of"),
        (None, True, "no weights are beside it"),
    ],
)
def test_an_evaluation_that_is_not_of_the_runs_weights_is_left_out(own, others, reason, tmp_path, caplog):
    """Another training into the same directory leaves such a one, and so has an earlier version."""
    evaluation = save_weights(tmp_path, 0) if others else {}
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    if own is not None:
        save_weights(tmp_path, own)
    shown = run_with(tmp_path, **evaluation)
    assert "2.5000" not in shown
    assert "<h2>Evaluation</h2>" not in shown
    assert "value: 2.5" not in shown
    assert f"evaluation.json is left out: {reason}." in shown
    assert reason in caplog.text


def test_an_evaluation_of_the_runs_weights_is_shown(tmp_path, caplog):
    shown = run_with(tmp_path, **save_weights(tmp_path, 1))
    assert "| 256 to 1,024 | 800 | 2.5000 |" in shown
    assert "<h2>Evaluation</h2>" in shown
    assert "value: 2.5" in shown
    assert "left out" not in shown + caplog.text
    assert RunLog.read(tmp_path).left_out == ""


def test_pictures_are_of_the_evaluation_beside_them(tmp_path):
    """Another evaluation of fewer tasks takes pictures of an earlier one away, and those that stay all the same are not shown."""
    assert [path.name for path in draw_evaluation({"by_length": [BUCKET], "retrieval": [CELL]}, tmp_path)] == list(
        PICTURES
    )
    weights = save_weights(tmp_path, 1)
    pictures = re.compile(r'<img src="data:image/png;base64,[^"]+" alt="([^"]+)"')
    assert pictures.findall(run_with(tmp_path, retrieval=[CELL], **weights)) == [text for text, _ in PICTURES.values()]
    assert pictures.findall(run_with(tmp_path, **weights)) == ["loss by position and by length"]
    (tmp_path / "own.png").write_bytes(b"")
    assert draw_evaluation({"retrieval": [CELL]}, tmp_path) == [tmp_path / "retrieval.png"]
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["own.png", "retrieval.png"]


def test_a_cell_without_trials_stays_empty(tmp_path):
    assert draw_evaluation({"retrieval": [CELL, CELL | {"depth": 1.0, "trials": 0, "found": 0}]}, tmp_path)
