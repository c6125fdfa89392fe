"""`hf-longctx export`: any checkpoint becomes a plain folder with the same weights; what is damaged or none is said."""

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hf_longctx.checkpoint.folder import CheckpointError
from hf_longctx.commands import export as command
from hf_longctx.commands.checkpoints.checkpoint_weights import cast, refuse_not_finite
from hf_longctx.commands.export import export, refuse_lost
from hf_longctx.models.adapters.peft_adapters import add_lora
from tests.builders.small_tokenizers import byte_tokenizer, word_tokenizer
from tests.builders.tiny_models import tiny_bloom, tiny_llama, tiny_mistral, tiny_mixtral, tiny_mpt
from tests.builders.training.saved_runs import damaged
from tests.builders.training_runs import documents, train
from tests.builders.transformers_versions import TRANSFORMERS

IDS = torch.arange(60)[None] % 128
TRAINING = ("state-*", "training_state.json", "trainer_state.json", "training_args.json", "manifest.json")


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    weights: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        weights |= load_file(file)
    return weights


def test_a_checkpoint_becomes_a_plain_model(saved: Any, tmp_path: Path, capsys: Any):
    # Of a run of two ranks: its output directory stands for its newest checkpoint.
    output, (run, _) = saved
    checkpoint = tmp_path / "run" / "checkpoint-6"
    shutil.copytree(output / "checkpoint-6", checkpoint)
    export(tmp_path / "run", tmp_path / "plain")
    assert f"model of {checkpoint}" in capsys.readouterr().out
    assert not [path for pattern in TRAINING for path in (tmp_path / "plain").glob(pattern)]
    assert (tmp_path / "plain" / "generation_config.json").is_file()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert exported.dtype == torch.float32
    for folder in (checkpoint, tmp_path / "plain"):  # for whoever serves it
        modes = {path.stat().st_mode for path in folder.iterdir() if path.is_file()}
        assert modes == {(folder / "config.json").stat().st_mode}, folder
    weights = exported.state_dict()
    assert {name: tensor for name, tensor in run.weights.items() if not torch.equal(tensor, weights[name])} == {}
    assert torch.equal(logits(exported), logits(AutoModelForCausalLM.from_pretrained(checkpoint)))


def test_weights_are_cast_and_split_and_the_tokenizer_comes_along(tmp_path: Path, capsys: Any):
    model = tiny_llama(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "saved")
    word_tokenizer().save_pretrained(tmp_path / "saved")
    export(tmp_path / "saved", tmp_path / "plain", dtype="bfloat16", max_file_size="30KB")
    files = sorted((tmp_path / "plain").glob("*.safetensors"))
    assert len(files) > 3
    largest = max(tensor.numel() for tensor in model.parameters()) * 2
    assert max(file.stat().st_size for file in files) <= max(30_000, largest) + 2_000, "the header of a file"
    assert largest < 30_000
    assert "larger than" not in capsys.readouterr().err
    export(tmp_path / "saved", tmp_path / "small", dtype="bfloat16", max_file_size="1KB")
    warned = capsys.readouterr().err
    assert warned.startswith("one weight alone is larger than --max-file-size 1KB: model-0")
    assert f".safetensors ({largest:,} bytes)" in warned
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert exported.dtype == torch.bfloat16
    for name, tensor in model.to(torch.bfloat16).state_dict().items():
        assert torch.equal(exported.state_dict()[name], tensor), name
    assert json.loads((tmp_path / "plain" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoTokenizer.from_pretrained(tmp_path / "plain")("w5 w6")["input_ids"] == [5, 6]
    export(tmp_path / "plain", tmp_path / "again", dtype="float32")
    again = weights_of(tmp_path / "again")
    assert {tensor.dtype for tensor in again.values()} == {torch.float32}
    assert again.keys() == weights_of(tmp_path / "plain").keys()


WRITES_GGUF = pytest.mark.skipif(TRANSFORMERS < (5, 18), reason="with this transformers no GGUF file is written")


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"file_format": "gguf"}, marks=WRITES_GGUF)], ids=["folder", "gguf"]
)
def test_numbers_that_a_dtype_does_not_reach_are_refused(options: dict[str, Any], tmp_path: Path):
    model = tiny_llama(vocab_size=300)
    model.model.layers[0].mlp.gate_proj.weight.data[0, :2] = torch.tensor([1e5, -1e6])
    model.save_pretrained(tmp_path / "saved")
    byte_tokenizer(merges=[("t", "h")]).save_pretrained(tmp_path / "saved")
    larger = (
        r"^2 of \d+ numbers of model\.layers\.0\.mlp\.gate_proj\.weight are larger than torch\.float16 holds\. Valid: "
    )
    with pytest.raises(ValueError, match=larger):
        export(tmp_path / "saved", tmp_path / "out", dtype="float16", **options)
    assert not (tmp_path / "out").exists()
    export(tmp_path / "saved", tmp_path / "out", dtype="bfloat16", **options)


def test_a_number_beyond_bfloat16_asks_for_float32():
    with pytest.raises(
        ValueError, match=r"^1 of 2 numbers of w are larger than torch\.bfloat16 holds\. Valid: --dtype float32"
    ):
        cast("w", torch.tensor([1.0, torch.finfo(torch.float32).max]), torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_weights_of_eight_bits_are_cast_and_taken(dtype: torch.dtype):
    weight = torch.tensor([1.0, -2.0]).to(dtype)
    assert cast("w", weight, torch.bfloat16).tolist() == [1, -2]
    model = torch.nn.Module()
    model.register_parameter("w", torch.nn.Parameter(weight, requires_grad=False))
    refuse_not_finite(model, "eight bits")
    refuse_not_finite(model.to("meta"), "none")


def test_memory_holds_one_file_and_one_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return what is read is dropped before the next is read; a file is written when it is full."""
    tiny_mixtral(num_hidden_layers=4).save_pretrained(tmp_path / "saved")
    sizes: list[int] = []
    most = 0
    read, save = command.CheckpointWeights.read, command._save

    def counted(self: Any, name: str) -> torch.Tensor:
        nonlocal most
        tensor = read(self, name)
        sizes.append(tensor.nbytes)
        most = max(most, sum(sizes))
        return tensor

    def saved(tensors: dict[str, torch.Tensor], path: Path) -> None:
        assert sum(weight.untyped_storage().nbytes() for weight in tensors.values()) <= 100_000, (
            "no part keeps the whole"
        )
        save(tensors, path)
        sizes.clear()

    monkeypatch.setattr(command.CheckpointWeights, "read", counted)
    monkeypatch.setattr(command, "_save", saved)
    export(tmp_path / "saved", tmp_path / "plain", max_file_size="100KB")
    total = sum(tensor.nbytes for tensor in weights_of(tmp_path / "saved").values())
    assert most < 250_000 < total / 2


@pytest.mark.parametrize("family", ["mixtral", "mistral", "bloom", "mpt"])
def test_every_family_is_exported_under_its_published_names(family: str, tmp_path: Path):
    """A checkpoint of training has the names and the stacked experts of the model in memory."""
    make = {"mixtral": tiny_mixtral, "mistral": tiny_mistral, "bloom": tiny_bloom, "mpt": tiny_mpt}[family]
    settings = {"output_dir": tmp_path / "run", "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    train(family, documents([20, 30]), {"capacity": 60, "global_batch_documents": 2}, settings)
    checkpoint = tmp_path / "run" / "checkpoint-1"
    export(checkpoint, tmp_path / "plain")
    trained = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "plain")), logits(trained))
    make().save_pretrained(tmp_path / "published")
    assert weights_of(tmp_path / "plain").keys() == weights_of(tmp_path / "published").keys()
    assert any(".experts.3.w1." in name for name in weights_of(tmp_path / "plain")) == (family == "mixtral")


def test_weights_that_are_published_as_one_are_exported_whole(tmp_path: Path):
    """A checkpoint of hrm_text has query, key, value and gate apart, and is published with all of them in one weight."""
    config = AutoConfig.for_model(
        "hrm_text", vocab_size=128, hidden_size=32, intermediate_size=64, num_layers_per_stack=1, num_attention_heads=4
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "published")
    config.save_pretrained(tmp_path / "checkpoint")
    save_file(model.state_dict(), tmp_path / "checkpoint" / "model.safetensors", metadata={"format": "pt"})
    export(tmp_path / "checkpoint", tmp_path / "plain", max_file_size="20KB")
    assert len(list((tmp_path / "plain").glob("*.safetensors"))) > 1
    expected, exported = (weights_of(tmp_path / name) for name in ("published", "plain"))
    assert any("gqkv" in name for name in expected)
    assert expected.keys() == exported.keys()
    assert [name for name in expected if not torch.equal(expected[name], exported[name])] == []


def test_weights_whose_numbers_would_be_lost_are_refused():
    weight = torch.empty(2, 3, device="meta")
    with pytest.raises(ValueError, match=r"^a, b and c would both be published as d$"):
        refuse_lost({"c": weight}, {"d": weight}, {"d": ("a", "b")})
    with pytest.raises(ValueError, match=r"^a, b hold 12 numbers, and what is published of them \(d\) would hold 6$"):
        refuse_lost({"a": weight, "b": weight}, {"d": weight}, {})


def test_adapters_stay_adapters_or_are_merged(tmp_path: Path):
    tiny_llama().save_pretrained(tmp_path / "base")
    word_tokenizer().save_pretrained(tmp_path / "base")
    model = add_lora(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), r=2)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(tmp_path / "adapter")
    word_tokenizer().save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "trainer_state.json").write_text("{}")
    expected = logits(model)

    export(tmp_path / "adapter", tmp_path / "plain")
    assert not (tmp_path / "plain" / "trainer_state.json").exists()
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "plain")
    torch.testing.assert_close(logits(loaded), expected, rtol=0, atol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "plain")("w5")["input_ids"] == [5]

    export(tmp_path / "adapter", tmp_path / "cast", dtype="bfloat16")
    kept, cast = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("adapter", "cast"))
    assert {name: tensor for name, tensor in cast.items() if not torch.equal(tensor, kept[name].bfloat16())} == {}
    assert cast.keys() == kept.keys()

    export(tmp_path / "adapter", tmp_path / "merged", merge=True)
    torch.testing.assert_close(
        logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), expected, rtol=0, atol=1e-4
    )


def test_what_cannot_be_exported_is_said(copied: Path, tmp_path: Path):
    newest = copied / "checkpoint-6"
    damaged(newest / "model.safetensors", "flipped")
    with pytest.raises(CheckpointError, match=r"model.safetensors is corrupt.*: this checkpoint cannot be exported"):
        export(newest, tmp_path / "plain")
    assert not (tmp_path / "plain").exists()
    tiny_llama().save_pretrained(tmp_path / "model")
    (tmp_path / "pickle").mkdir()
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "pickle")
    (tmp_path / "pickle" / "pytorch_model.bin").write_bytes(b"")
    (tmp_path / "quantised").mkdir()
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "quantised" / "config.json").write_text(json.dumps(config))
    plain = tmp_path / "plain"
    for source, output, options, message in (
        ("nothing", plain, {}, "nothing is no directory"),
        ("model", tmp_path / "model", {}, "exists and is not an empty directory"),
        ("model", plain, {"merge": True}, "--merge, but .* holds no adapter"),
        ("model", plain, {"base": "x"}, "--base, but .* holds no adapter"),
        (
            "pickle",
            plain,
            {},
            r"holds no weights in safetensors .* only pytorch_model.bin, pickles, which are not read",
        ),
        (
            "quantised",
            plain,
            {"dtype": "float32"},
            "quantised weights, which cannot be cast: --dtype auto, got float32",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            export(tmp_path / source, output, **options)  # type: ignore[arg-type]
        assert not plain.exists()
    # A run whose newest checkpoint is damaged stands for the one before.
    for number in range(1, 5):
        shutil.rmtree(copied / f"checkpoint-{number}")
    for path in copied.iterdir():
        if path.is_file():
            path.unlink()
    export(copied, plain)
    before = AutoModelForCausalLM.from_pretrained(copied / "checkpoint-5")
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(plain)), logits(before))


@pytest.mark.skipif(TRANSFORMERS >= (5, 18), reason="tests/commands/checkpoints/test_gguf_file.py")
def test_gguf_is_refused_where_its_tokenizer_is_read_otherwise(tmp_path: Path):
    tiny_llama().save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"--format gguf needs transformers>=5\.18"):
        export(tmp_path / "saved", tmp_path / "out", file_format="gguf")


def test_the_extra_is_named_before_anything_is_read_where_gguf_is_missing(tmp_path: Path, monkeypatch: Any):
    tiny_llama().save_pretrained(tmp_path / "saved")
    monkeypatch.setitem(sys.modules, "gguf", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    with pytest.raises(ImportError, match=r"pip install 'hf_longctx\[gguf\]'"):
        export(tmp_path / "saved", tmp_path / "out", file_format="gguf")
    assert not (tmp_path / "out").exists()
