"""scripts/train.py as a user starts it: what it leaves behind, and what it says when it cannot start."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.integrations.mxfp4 import FP4_VALUES
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from hf_longctx import LongContextPlugin, LongContextTrainer
from hf_longctx.config import load_config
from hf_longctx.run import run as run_config
from tests.builders.tiny_models import TINY, tiny_general, tiny_llama
from tests.builders.training_runs import MODELS, Rows, arguments, documents, fresh_accelerator_state, step_loss
from tests.worlds.launched import ROOT, Ended, accelerate_launch, run

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
    settings["training"]["bf16"] = False  # the same on every CPU
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return settings | {"file": folder / "config.yaml", "output": folder / "out"}


@pytest.fixture(scope="module")
def trained(config, starts_processes: None) -> Ended:
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


def test_it_says_what_it_does_before_and_after_training(trained):
    phases = ("setting up", "planning the first steps", "evaluating before training", "preparing to train")
    phases += ("evaluating after training", "saving the model", "drawing pictures", "writing the report")
    assert re.findall(rf"^({'|'.join(phases)})$", trained.output, re.MULTILINE) == list(phases)


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


@pytest.mark.nightly
def test_an_fsdp_configuration_of_accelerate_trains_the_same(trained, config, tmp_path):
    # What `accelerate config` writes for FSDP2. The losses are DDP's, and the checkpoint is as plain.
    fsdp = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "state_dict_type": "FULL_STATE_DICT"}
    launch = {
        "distributed_type": "FSDP",
        "num_machines": 1,
        "num_processes": 2,
        "mixed_precision": "no",
        "fsdp_config": {f"fsdp_{name}": value for name, value in fsdp.items()} | {"fsdp_reshard_after_forward": True},
    }
    (tmp_path / "fsdp.yaml").write_text(yaml.safe_dump(launch))
    launcher = ["-m", "accelerate.commands.launch", "--config_file", tmp_path / "fsdp.yaml", "--main_process_port", "0"]
    output = f"training.output_dir={tmp_path / 'out'}"
    ended = run(*launcher, "scripts/train.py", "--config", config["file"], output)
    assert ended.code == 0, ended.output
    manifest = json.loads((tmp_path / "out" / "checkpoint-4" / "manifest.json").read_text())
    assert manifest["sharding"] == "zero3", "FSDP has trained"
    logs = [json.loads((folder / "trainer_state.json").read_text()) for folder in (config["output"], tmp_path / "out")]
    ddp, sharded = ([entry for entry in log["log_history"] if "loss" in entry] for log in logs)
    assert len(sharded) == 4
    for name in ("loss", "grad_norm"):
        assert [entry[name] for entry in sharded] == pytest.approx([entry[name] for entry in ddp], rel=1e-3)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    with torch.no_grad():
        loss = float(step_loss(AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval(), counting(EVAL_LENGTHS)))
    assert loss == pytest.approx(results["eval_loss_after"], rel=1e-5)


def test_it_leaves_pictures_and_a_log(trained, config):
    for name in ("plan.png", "loss.png"):
        picture = (config["output"] / name).read_bytes()
        assert picture.startswith(PNG)
        assert len(picture) > 5000
    log = json.loads((config["output"] / "trainer_state.json").read_text())["log_history"]
    assert len([entry for entry in log if "plan_balance" in entry]) == 4
    assert sum(entry["split_documents"] for entry in log if "plan_balance" in entry) >= 1


def test_experts_published_in_four_bits_are_trained_as_whole_weights(config, tmp_path, monkeypatch):
    # As gpt-oss is published. transformers is told so, and does not decide by the packages that are installed.
    told: list[bool] = []
    validate = Mxfp4HfQuantizer.validate_environment

    def noting(self: Any, *args: Any, **kwargs: Any) -> None:
        told.append(self.quantization_config.dequantize)
        validate(self, *args, **kwargs)

    monkeypatch.setattr(Mxfp4HfQuantizer, "validate_environment", noting)
    values = save_in_four_bits(tiny_general("gpt_oss"), tmp_path / "packed")
    settings = {name: section for name, section in config.items() if name in ("data", "longctx")}
    settings["model"] = {"path": str(tmp_path / "packed"), "dtype": "float32"}
    settings["longctx"] = settings["longctx"] | {"capacity": 256}
    settings["training"] = config["training"] | {"output_dir": str(tmp_path / "out"), "max_steps": 1, "save_steps": 1}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    fresh_accelerator_state()
    run_config(load_config(tmp_path / "config.yaml"))
    assert told == [True]
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-1"):
        saved = load_file(folder / "model.safetensors")
        assert set(saved) == set(tiny_general("gpt_oss").state_dict()), "names that plain transformers finds again"
        for name, value in values.items():
            assert saved[name].dtype == torch.float32
            assert 0 < (saved[name] - value).abs().max() < 0.1, "one step of training away from what was packed"
        assert not hasattr(AutoConfig.from_pretrained(folder), "quantization_config")


def save_in_four_bits(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    """Save a tiny gpt-oss with random experts in MXFP4: 32 values of 4 bits share an exponent. Returns their values by name."""
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    random = torch.Generator().manual_seed(0)
    values = {}
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        packed = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=random).to(torch.uint8)
        exponents = torch.full(packed.shape[:-1], 127 - 4, dtype=torch.uint8)
        weights[f"{name}_blocks"], weights[f"{name}_scales"] = packed, exponents
        halves = torch.stack([packed & 15, packed >> 4], dim=-1).long()  # of a byte, the lower four bits come first
        values[name] = (torch.tensor(FP4_VALUES)[halves] / 2**4).reshape(experts, outputs, inputs).transpose(1, 2)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(settings))
    return values


@pytest.mark.processes
@pytest.mark.nightly
def test_adapters_on_stretched_positions_are_trained_on_two_ranks_as_in_one_process(config, tmp_path):
    base = tiny_llama(max_position_embeddings=64)
    base.save_pretrained(tmp_path / "base")
    tokenizer = Tokenizer(WordLevel({str(number): number for number in range(TINY["vocab_size"])}, unk_token="0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(tmp_path / "base")
    settings = yaml.safe_load((ROOT / "configs" / "lora.yaml").read_text())
    settings["model"] |= {"path": str(tmp_path / "base"), "rope_scaling": {"rope_type": "yarn", "factor": 4}}
    settings["data"]["path"] = config["data"]["path"]
    settings["longctx"] = {"capacity": 120, "global_batch_documents": 6}
    settings["training"] |= {"output_dir": str(tmp_path / "two"), "num_train_epochs": 2, "bf16": False}
    file = tmp_path / "lora.yaml"
    file.write_text(yaml.safe_dump(settings))

    ended = accelerate_launch("scripts/train.py", "--config", file)
    assert ended.code == 0, ended.output
    assert " weights are trained." in ended.output
    fresh_accelerator_state()
    run_config(load_config(file, [f"training.output_dir={tmp_path / 'one'}", "longctx.capacity=240"]))
    losses = {}
    for name in ("one", "two"):
        log = json.loads((tmp_path / name / "trainer_state.json").read_text())["log_history"]
        losses[name] = [(entry["loss"], entry["grad_norm"]) for entry in log if "loss" in entry]
    assert len(losses["two"]) == 4
    for one, two in zip(losses["one"], losses["two"]):
        assert two == pytest.approx(one, rel=1e-4)

    for folder in (tmp_path / "two", tmp_path / "two" / "checkpoint-4"):
        assert not list(folder.glob("model*")), "only adapters are saved"
        stretched = AutoConfig.from_pretrained(folder)
        assert stretched.max_position_embeddings == 256
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", config=stretched)
        results = json.loads((tmp_path / "two" / "results.json").read_text())
        with torch.no_grad():
            before = float(step_loss(plain, counting(EVAL_LENGTHS)))
            after = float(step_loss(PeftModel.from_pretrained(plain, folder).eval(), counting(EVAL_LENGTHS)))
        assert before == pytest.approx(results["eval_loss_before"], rel=1e-5)
        assert after == pytest.approx(results["eval_loss_after"], rel=1e-5)
        assert after < before


def test_frozen_parameters_of_a_configuration_stay(config, tmp_path):
    fresh_accelerator_state()
    changes = ["model.freeze=[model.embed_tokens, '*norm*']", "longctx.capacity=200", f"training.output_dir={tmp_path}"]
    before = run_config(load_config(config["file"], [*changes, "training.max_steps=1", "training.learning_rate=0.0"]))
    fresh_accelerator_state()
    after = run_config(load_config(config["file"], [*changes, "training.max_steps=2"]))
    weights = before.model.state_dict()
    for name, weight in after.model.state_dict().items():
        frozen = "embed_tokens" in name or "norm" in name or "lm_head" in name  # tied to the embeddings
        assert torch.equal(weight, weights[name]) == frozen, name


@pytest.mark.processes
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
            expected, logits = trainer.model.eval()(tokens).logits, plain(tokens).logits
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
        assert not torch.allclose(logits, MODELS[name]().eval()(tokens).logits, atol=1e-2), "training changed something"
