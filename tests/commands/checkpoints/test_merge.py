"""`hf-longctx merge`: the merged checkpoint is plain, gives the adapter's logits, and what cannot be merged is said."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from peft import PeftModel, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from hf_longctx.cli import main
from hf_longctx.commands.checkpoints.merging import given_name, merged
from hf_longctx.commands.shared.loading import load_model
from hf_longctx.data.embedded.embedded_model import DIRECTORY
from hf_longctx.models.adapters.peft_adapters import add_lora
from hf_longctx.models.rope_scaling import scale_rope
from hf_longctx.run import TrainedConfig
from tests.builders.tiny_models import tiny_bloom, tiny_llama, tiny_mistral, tiny_mixtral

IDS = torch.arange(60)[None] % 128


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def saved_adapter(folder: Path, base: Any, scaling: dict[str, Any] | None = None) -> tuple[Path, torch.Tensor]:
    """A base in folder/base and an adapter on it that matters in folder/adapter; and the adapter's logits."""
    base.save_pretrained(folder / "base")
    config = AutoConfig.from_pretrained(folder / "base")
    if scaling is not None:
        scale_rope(config, **scaling)
    model = add_lora(AutoModelForCausalLM.from_pretrained(folder / "base", config=config), r=4)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.05)
    model.save_pretrained(folder / "adapter")
    if scaling is not None:
        model.config.save_pretrained(folder / "adapter")
    return folder / "adapter", logits(model)


def test_the_merged_checkpoint_is_plain_and_gives_the_adapters_logits(tmp_path: Path, capsys: Any):
    words = Tokenizer(WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = Whitespace()
    for name, base in (("llama", tiny_llama()), ("mixtral", tiny_mixtral())):
        adapter, expected = saved_adapter(tmp_path / name, base)
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / name / "base")
        output = tmp_path / name / "merged"
        assert main(["merge", str(adapter), str(output)]) == 0
        assert "merged into" in capsys.readouterr().out
        assert not list(output.glob("adapter*"))
        torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(output)), expected, rtol=0, atol=1e-4)
        assert load_file(output / "model.safetensors").keys() == load_file(output / "../base/model.safetensors").keys()
        assert AutoTokenizer.from_pretrained(output)("a a")["input_ids"] == [0, 0]
        plain = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / name / "base"), adapter)
        torch.testing.assert_close(logits(plain), expected, rtol=0, atol=1e-5)
        assert not torch.allclose(logits(base), expected, atol=1e-2), "the adapter matters"


def test_the_embedded_model_is_called_as_a_user_calls_it(tmp_path: Path):
    assert given_name(str(tmp_path / DIRECTORY)) == "embedded:smollm2-135m"
    assert given_name(str(tmp_path / "base")) == str(tmp_path / "base")


def test_positions_that_the_adapter_was_trained_with_are_merged_too(tmp_path: Path):
    adapter, expected = saved_adapter(tmp_path, tiny_llama(), {"rope_type": "linear", "factor": 4.0})
    assert main(["merge", str(adapter), str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.rope_parameters["factor"] == 4.0
    assert merged.config.max_position_embeddings == 4 * 4096
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-4)


def test_a_text_ends_as_the_adapter_was_trained_to_end_it(tmp_path: Path):
    model = tiny_llama()
    model.generation_config.eos_token_id = [2, 3]
    adapter, _ = saved_adapter(tmp_path, model)
    for end, beside, expected in ((2, None, [2, 3]), (7, None, 7), (7, [7, 5], [7, 5])):
        model.config.eos_token_id = end
        model.config.save_pretrained(adapter)
        if beside:
            GenerationConfig(eos_token_id=beside).save_pretrained(adapter)
        loaded, _ = merged(adapter, None, "auto")
        again = load_model(str(adapter), "auto", torch.device("cpu"))
        assert [model.generation_config.eos_token_id for model in (loaded, again)] == [expected, expected]


def test_what_ends_texts_lies_beside_adapters_that_end_them_otherwise(tmp_path: Path):
    model = add_lora(tiny_llama(), r=2)
    model.generation_config.eos_token_id = 7
    arguments, state = SimpleNamespace(output_dir=tmp_path), SimpleNamespace(is_world_process_zero=True)
    TrainedConfig().on_train_end(arguments, state, None, model=model)
    assert AutoConfig.from_pretrained(tmp_path).vocab_size == 128
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == 7


def test_a_model_without_rotary_positions_whose_adapter_lies_beside_a_configuration(tmp_path: Path):
    model = tiny_bloom()
    adapter, expected = saved_adapter(tmp_path, model)
    model.config.save_pretrained(adapter)
    assert main(["merge", str(adapter), str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=1e-4)


def test_other_keys_of_the_configuration_that_the_adapter_was_trained_with_are_merged_too(tmp_path: Path):
    """Only positions and ends were: a model merged after training without its window had it again."""
    model = tiny_mistral(sliding_window=3)
    adapter, windowed = saved_adapter(tmp_path, model)
    model.config.sliding_window = None
    model.config.save_pretrained(adapter)
    assert main(["merge", str(adapter), str(tmp_path / "merged")]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.sliding_window is None
    evaluated = load_model(str(adapter), "auto", torch.device("cpu"))
    torch.testing.assert_close(logits(merged), logits(evaluated), rtol=0, atol=1e-4)
    assert not torch.allclose(logits(merged), windowed, atol=1e-3), "the window matters"


def test_the_base_may_have_moved_and_the_dtype_is_chosen(tmp_path: Path, capsys: Any):
    adapter, expected = saved_adapter(tmp_path, tiny_llama())
    (tmp_path / "base").rename(tmp_path / "moved")
    arguments = ["merge", str(adapter), str(tmp_path / "merged")]
    assert main(arguments) == 2
    assert "say where the weights are with --base PATH" in " ".join(capsys.readouterr().err.split())
    assert main([*arguments, "--base", str(tmp_path / "moved"), "--dtype", "bfloat16"]) == 0
    weights = load_file(tmp_path / "merged" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    # bfloat16 keeps 8 bits of each weight: 2 layers of it change logits of size 1 by about a hundredth.
    torch.testing.assert_close(logits(merged), expected, rtol=0, atol=0.1)
    assert "no tokenizer" in capsys.readouterr().out


def test_weights_that_are_not_finite_in_the_dtype_are_not_written(tmp_path: Path, capsys: Any):
    base = tiny_llama()
    base.model.norm.weight.data[0] = 1e5
    adapter, _ = saved_adapter(tmp_path, base)
    assert main(["merge", str(adapter), str(tmp_path / "merged"), "--dtype", "float16"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "1 of 64 numbers of model.norm.weight of" in error
    assert "are not finite in torch.float16. Valid: --dtype bfloat16 or float32" in error
    assert not (tmp_path / "merged").exists()


def test_what_cannot_be_merged_is_said(tmp_path: Path, capsys: Any):
    adapter, _ = saved_adapter(tmp_path, tiny_llama())

    def error(*arguments: Any) -> str:
        assert main(["merge", *map(str, arguments)]) == 2
        return " ".join(capsys.readouterr().err.split())

    output = tmp_path / "merged"
    assert "holds no adapter_config.json and no adapter_model.safetensors" in error(tmp_path / "base", output)
    assert "exists and is not an empty directory" in error(adapter, tmp_path / "base")
    tiny_llama(num_hidden_layers=3).save_pretrained(tmp_path / "deeper")
    assert "have no counterpart" in error(adapter, output, "--base", tmp_path / "deeper")
    tiny_llama(num_hidden_layers=1).save_pretrained(tmp_path / "shallower")
    assert "have no counterpart" in error(adapter, output, "--base", tmp_path / "shallower")
    tiny_llama(intermediate_size=128).save_pretrained(tmp_path / "wider")
    assert "does not fit" in error(adapter, output, "--base", tmp_path / "wider")
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    get_peft_model(tiny_llama(), prompt).save_pretrained(tmp_path / "prompt")
    assert "holds virtual tokens (PROMPT_TUNING)" in error(tmp_path / "prompt", output)
    assert not output.exists()
    nameless = get_peft_model(tiny_llama(), add_lora(tiny_llama()).peft_config["default"])
    nameless.save_pretrained(tmp_path / "nameless")
    assert "does not say which weights it stands on: give them with --base PATH" in error(tmp_path / "nameless", output)
