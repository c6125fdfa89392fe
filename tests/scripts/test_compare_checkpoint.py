"""scripts/compare_checkpoint.py: the standard error of a fall, what is refused, and that it needs nothing of this package."""

import ast
import json
import math
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict
from transformers import AutoModelForCausalLM

from tests.builders.tiny_models import TINY, tiny_llama
from tests.worlds.launched import ROOT, run
from tests.worlds.patience import PATIENCE

SCRIPT = ROOT / "scripts" / "compare_checkpoint.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_it_imports_nothing_of_this_package():
    tree = ast.parse(SCRIPT.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "transformers" in names
    assert not [name for name in names if name.startswith("hf_longctx")]


def test_the_fall_is_per_token_and_its_error_that_of_resampled_documents(script):
    """With many documents the standard error is the spread of the fall over sets of documents drawn with replacement."""
    random = np.random.default_rng(0)
    predicted = random.integers(50, 500, 400)
    before = random.normal(2.5, 0.5, 400)
    after = before - random.normal(0.1, 0.05, 400) * 500 / predicted**0.5 / 20
    fall = script["fall"](before.tolist(), after.tolist(), predicted.tolist())
    assert fall.before == pytest.approx(np.average(before, weights=predicted))
    assert fall.difference == pytest.approx(np.average(before - after, weights=predicted))
    drawn = random.integers(0, 400, (4000, 400))
    falls = ((before - after) * predicted)[drawn].sum(1) / predicted[drawn].sum(1)
    assert fall.standard_error == pytest.approx(falls.std(), rel=0.05)


def test_documents_that_fall_alike_have_no_error_and_a_single_one_has_none_to_speak_of(script):
    assert script["fall"]([3.0, 2.0], [2.5, 1.5], [10, 90]).standard_error == pytest.approx(0.0, abs=1e-12)
    alone = script["fall"]([3.0], [2.5], [10])
    assert math.isnan(alone.standard_error)
    assert "did not fall by more than its standard error" in script["problem"](alone, {}, 1e-3)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ({}, None),
        ({"eval_loss_before": 2.5004, "eval_loss_after": 2.4004}, None),
        (
            {"eval_loss_before": 2.5, "eval_loss_after": 2.38},
            "eval_loss_after 2.3800, and plain transformers finds 2.4000",
        ),
        ({"eval_loss_before": math.nan}, "eval_loss_before nan"),
    ],
)
def test_losses_must_be_those_of_the_run(script, run, message):
    problem = script["problem"](script["Fall"](2.5, 2.4, 0.05), run, 1e-3)
    assert problem is None if message is None else message in problem


@pytest.mark.parametrize(
    ("autocast", "weights", "half"),
    [
        (None, "float32", None),
        (None, "bfloat16", "bfloat16"),
        (None, "float16", "float16"),
        ("bfloat16", "float32", "bfloat16"),
        ("float16", "bfloat16", "float16"),
    ],
)
def test_a_run_computes_in_half_precision_by_autocast_or_by_its_weights(script, autocast, weights, half):
    assert script["half_precision"]({"training": {"autocast": autocast}, "model": {"dtype": weights}}) == half


@pytest.mark.parametrize(("after", "error"), [(2.45, 0.05), (2.6, 0.01), (2.5, 0.0)])
def test_a_fall_within_its_error_is_refused(script, after, error):
    assert "did not fall" in script["problem"](script["Fall"](2.5, after, error), {}, 1e-3)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Path:
    """Two checkpoints, of which the second has learned the documents, and these."""
    folder = tmp_path_factory.mktemp("checkpoints")
    model = tiny_llama(dtype=torch.float32)
    model.save_pretrained(folder / "before")
    rows = [[(3 * step + row) % TINY["vocab_size"] for step in range(40 + row)] for row in range(6)]
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for row in 5 * rows:
        model(input_ids=torch.tensor([row]), labels=torch.tensor([row])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "after")
    DatasetDict(test=Dataset.from_dict({"input_ids": [*rows, [1]]})).save_to_disk(folder / "documents")
    return folder


@pytest.mark.processes
def test_it_compares_two_checkpoints_as_a_program(checkpoints):
    """Losses are those of each document alone, in what the run computed in; a document of one token predicts nothing."""

    def losses_in(half: bool) -> dict[str, float]:
        losses = {}
        for name in ("before", "after"):
            model = AutoModelForCausalLM.from_pretrained(checkpoints / name).eval()
            rows = Dataset.load_from_disk(str(checkpoints / "documents" / "test"))["input_ids"][:6]
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=half):
                row_losses = [
                    float(model(input_ids=torch.tensor([row]), labels=torch.tensor([row])).loss) for row in rows
                ]
            losses[f"eval_loss_{name}"] = float(np.average(row_losses, weights=[len(row) - 1 for row in rows]))
        return losses

    losses = losses_in(half=False)
    (checkpoints / "after" / "results.json").write_text(json.dumps(losses))
    command = [sys.executable, SCRIPT, "before", "after", "--documents", "documents"]
    done = subprocess.run(command, cwd=checkpoints, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
    before, after = losses.values()
    assert (
        f"plain transformers in float32: {before:.4f} before, {after:.4f} after; a fall of {before - after:.4f}"
        in done.stdout
    )
    assert "over 6 documents" in done.stdout
    assert "\x1b" not in done.stdout

    losses = losses_in(half=True)
    (checkpoints / "after" / "results.json").write_text(
        json.dumps(losses | {"eval_loss_after": losses["eval_loss_after"] + 0.1})
    )
    (checkpoints / "after" / "run.json").write_text(json.dumps({"training": {"autocast": "bfloat16"}}))
    done = run(SCRIPT, *(checkpoints / name for name in ("before", "after")), "--documents", checkpoints / "documents")
    assert done.code == 1
    assert f"in bfloat16: {losses['eval_loss_before']:.4f} before" in done.output
    assert "they differ by 0.1000, and 0.02 is allowed" in done.output
