"""Someone who wants another optimizer, LoRA+, or token accuracy and entropy: as typed, what is logged, and what is answered."""

import json
from pathlib import Path
from typing import Any

import pytest

from hf_longctx.cli import main
from hf_longctx.config import load_config
from tests.builders.small_tokenizers import byte_tokenizer
from tests.builders.tiny_models import tiny_llama
from tests.builders.training_runs import documents, fresh_accelerator_state

LENGTHS = [3, 150, 17, 60, 2, 9, 33, 40, 8, 21, 90, 200]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command line in a folder with a model, documents and run.yaml: its exit code, and all that it said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_LONGCTX_CACHE", str(tmp_path / "cache"))
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained("base")
    tiny_llama(vocab_size=len(tokenizer)).save_pretrained("base")
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents(LENGTHS)))
    settings = {
        "model": {"path": "base"},
        "data": {"path": "rows.jsonl"},
        "longctx": {"capacity": "1k", "global_batch_documents": len(LENGTHS)},
        "training": {
            **{"output_dir": "out", "max_steps": 3, "learning_rate": 0.005, "use_cpu": True, "bf16": False},
            **{"report_to": [], "save_strategy": "no", "logging_steps": 1},
        },
    }
    Path("run.yaml").write_text(json.dumps(settings))

    def typed(line: str) -> tuple[int, str]:
        fresh_accelerator_state()
        code = main(line.split())
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    return typed


def logged(name: str) -> list[float]:
    history = json.loads(Path("out/trainer_state.json").read_text())["log_history"]
    return [entry[name] for entry in history if name in entry]


def test_muon_with_its_arguments_and_token_metrics_is_trained_and_goes_on(run: Any):
    typed = "train run.yaml training.optim=muon training.optim_args=momentum=0.9,ns_steps=6 longctx.token_metrics=true"
    code, output = run(f"{typed} training.save_strategy=steps training.save_steps=2")
    assert code == 0, output
    losses = logged("loss")
    assert losses[-1] < losses[0]
    assert len(logged("mean_token_accuracy")) == len(logged("entropy")) == 3
    assert json.loads(Path("out/run.json").read_text())["training"]["optim"] == "muon"
    state = json.loads(Path("out/checkpoint-2/training_state.json").read_text())["optimizer"]
    groups = [group for group in state["groups"] if "momentum" in group and group["params"]]
    assert [(group["momentum"], group["ns_steps"]) for group in groups] == [(0.9, 6)]
    assert not any("embed_tokens" in name or "lm_head" in name or "norm" in name for name in groups[0]["params"])
    code, output = run(f"{typed} training.resume_from_checkpoint=out/checkpoint-2")
    assert code == 0, output
    assert logged("loss") == losses
    code, output = run("train run.yaml training.optim=adamw_torch training.resume_from_checkpoint=out/checkpoint-2")
    assert "was saved by Muon, and this run has AdamW, which cannot go on from its state" in output
    assert code != 0


def test_loraplus_gives_b_its_own_rate(run: Any):
    code, output = run("train run.yaml model.lora.r=2 longctx.loraplus_lr_ratio=16 training.save_strategy=epoch")
    assert code == 0, output
    checkpoint = Path("out/checkpoint-3")
    groups = json.loads((checkpoint / "training_state.json").read_text())["optimizer"]["groups"]
    rates = {group["initial_lr"]: group["params"] for group in groups if group["params"]}
    assert sorted(rates) == [0.005, 0.08]
    assert all("lora_A" in name for name in rates[0.005])
    assert all("lora_B" in name for name in rates[0.08])


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("longctx.loraplus_lr_ratio=16", "longctx.loraplus_lr_ratio: 16 needs model.lora"),
        ("model.lora.loraplus_lr_ratio=16", "is the optimizer's: a key of longctx"),
        ("longctx.loraplus_lr_embedding=1e-5", "longctx.loraplus_lr_embedding: 1e-05 needs loraplus_lr_ratio"),
        (
            "training.optim=muon training.optim_args=steps=3",
            "training.optim_args: 'steps=3' is nothing that Muon takes",
        ),
        ("training.optim=muno", "did you mean 'muon'?"),
        ("training.optim=adamw_8", "did you mean 'adamw_8bit'?"),
        ("training.optim=adamw_8", "must be one of adamw_torch, adamw_torch_fused,"),
        ("longctx.host_offload=true", "longctx.host_offload: true needs sharding zero1, zero2, zero3"),
    ],
)
def test_what_cannot_be_is_answered_with_what_can(typed: str, answer: str, run: Any):
    code, output = run(f"config run.yaml {typed}")
    assert code == 2
    assert answer in output


PACKAGED = ("adamw_bnb_8bit", "paged_adamw_8bit", "paged_lion_32bit", "schedule_free_adamw", "schedule_free_sgd")


@pytest.mark.parametrize("name", PACKAGED)
def test_optimizers_of_other_packages_reach_transformers_unchanged(
    run: Any, monkeypatch: pytest.MonkeyPatch, name: str
):
    """Their packages are not here: what transformers is asked for is looked at."""
    asked = []
    monkeypatch.setattr(
        "hf_longctx.training.refused_optimizers.Trainer.get_optimizer_cls_and_kwargs",
        lambda args, *_: asked.append((args.optim, args.optim_args)),
    )
    given = (f"training.optim={name}", "training.optim_args=weight_lr_power=2.0")
    config = load_config("run.yaml", given)
    assert asked[0] == (name, "weight_lr_power=2.0")
    assert (config.training["optim"], config.training["optim_args"]) == asked[0]
