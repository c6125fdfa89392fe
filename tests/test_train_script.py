"""scripts/train.py as a user starts it: what it leaves behind, and what it says when it cannot start."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_longctx import LongContextPlugin, LongContextTrainer
from tests.launched import ROOT, Ended, accelerate_launch, run
from tests.tiny_models import TINY
from tests.training_runs import MODELS, Rows, arguments, documents, fresh_accelerator_state, step_loss

LENGTHS = [3, 150, 17, 60, 2, 9, 33, 40, 8, 21, 90, 200]
EVAL_LENGTHS = [4, 2, 181, 34]
PNG = b"\x89PNG\r\n"


def counting(lengths: list[int]) -> Rows:
    """Documents that can be learned: each counts on from a number of its own."""
    return [{"input_ids": [(7 * length + i) % TINY["vocab_size"] for i in range(length)]} for length in lengths]


def jsonl(file: Path, rows: Rows) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> dict[str, Any]:
    """configs/tiny.yaml with a vocabulary, documents and a folder of this test."""
    folder = tmp_path_factory.mktemp("script")
    settings = yaml.safe_load((ROOT / "configs" / "tiny.yaml").read_text())
    settings["model"]["random_init"]["vocab_size"] = TINY["vocab_size"]
    settings["data"]["path"] = {
        "train": jsonl(folder / "train.jsonl", counting(LENGTHS)),
        "test": jsonl(folder / "test.jsonl", counting(EVAL_LENGTHS)),
    }
    settings["longctx"] = {"capacity": 100, "global_batch_documents": 6}
    settings["training"] |= {"output_dir": str(folder / "out"), "learning_rate": 1e-2, "max_steps": 4, "save_steps": 2}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return settings | {"file": folder / "config.yaml", "output": folder / "out"}


@pytest.fixture(scope="module")
def trained(config) -> Ended:
    """The run that the tests below look at."""
    ended = accelerate_launch("scripts/train.py", "--config", config["file"])
    assert ended.code == 0, ended.output
    return ended


def test_it_says_what_the_plan_does_and_how_the_loss_went(trained):
    assert "12 documents, 2 optimizer steps an epoch. The first step:" in trained.output
    assert "6 documents (" in trained.output
    assert "on 2 ranks" in trained.output
    assert trained.output.count("micro-batches per rank") == 1, "one rank speaks"
    assert "eval_loss_after" in trained.output
    assert "Traceback" not in trained.output


def test_the_checkpoint_is_a_plain_one_with_the_losses_of_the_run(trained, config):
    results = json.loads((config["output"] / "results.json").read_text())
    assert (results["documents"], results["ranks"]) == (12, 2)
    assert results["eval_loss_after"] < results["eval_loss_before"]
    plain = AutoModelForCausalLM.from_pretrained(config["output"]).eval()
    assert type(plain).__name__ == "LlamaForCausalLM"
    assert plain.config._attn_implementation == "sdpa"
    with torch.no_grad():
        loss = float(step_loss(plain, counting(EVAL_LENGTHS)))
    assert loss == pytest.approx(results["eval_loss_after"], rel=1e-5)
    last = load_file(config["output"] / "checkpoint-4" / "model.safetensors")
    torch.testing.assert_close(load_file(config["output"] / "model.safetensors"), last, rtol=0, atol=0)


def test_it_leaves_pictures_and_a_log(trained, config):
    for name in ("plan.png", "loss.png"):
        picture = (config["output"] / name).read_bytes()
        assert picture.startswith(PNG)
        assert len(picture) > 5000
    log = json.loads((config["output"] / "trainer_state.json").read_text())["log_history"]
    assert len([entry for entry in log if "plan_balance" in entry]) == 4
    assert sum(entry["split_documents"] for entry in log if "plan_balance" in entry) >= 1


def test_mistakes_of_a_configuration_are_said_at_once_without_a_traceback(config, tmp_path):
    output = f"training.output_dir={tmp_path / 'out'}"
    ended = run(
        *(
            "scripts/train.py",
            "--config",
            config["file"],
            "longctx.capacty=7",
            "training.learning_rat=1",
            "data.eval_split=dev",
            output,
        ),
        timeout=60,
    )
    assert ended.code == 1
    assert "3 problem(s)" in ended.output
    for part in ("longctx.capacty", "capacity", "training.learning_rat", "learning_rate", "data.eval_split"):
        assert part in ended.output
    assert "Traceback" not in ended.output
    assert not (tmp_path / "out").exists()


def test_the_saved_model_gives_the_logits_of_the_one_in_memory(tmp_path):
    for name in sorted(MODELS):
        fresh_accelerator_state()
        trainer = LongContextTrainer(
            MODELS[name](),
            arguments(tmp_path, max_steps=3),
            train_dataset=documents(LENGTHS),
            plugin=LongContextPlugin(capacity=200, global_batch_documents=6),
        )
        trainer.train()
        trainer.save_model(str(tmp_path / name))
        plain, tokens = AutoModelForCausalLM.from_pretrained(tmp_path / name).eval(), torch.arange(2, 90).unsqueeze(0)
        with torch.no_grad():
            expected, found = trainer.model.eval()(tokens).logits, plain(tokens).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        assert not torch.allclose(found, MODELS[name]().eval()(tokens).logits, atol=1e-2), "training changed something"
