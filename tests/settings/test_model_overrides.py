"""`model.config`: a configuration as if its config.json said more, and what is refused of it."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, MixtralConfig, Qwen3Config

from hf_longctx.models.general import refuse_random_attention
from hf_longctx.run import _model
from hf_longctx.settings import ModelConfig
from hf_longctx.settings.model_overrides import overridden

GPT2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 32}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
MIXTRAL = SIZES | {"num_hidden_layers": 1, "num_local_experts": 2}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A model with dropout in its attention, as GPT-2 is published."""
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**GPT2, bos_token_id=1, eos_token_id=1)).save_pretrained(tmp_path)
    return tmp_path


def test_is_read_as_if_the_file_said_so(saved: Path):
    changed = overridden(AutoConfig.from_pretrained(saved), {"attn_pdrop": 0, "resid_pdrop": "1e-1"}, path=str(saved))
    edited = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps(edited | {"attn_pdrop": 0.0, "resid_pdrop": 0.1}))
    assert changed.to_dict() == AutoConfig.from_pretrained(saved).to_dict()


def test_what_is_derived_of_a_key_is_derived_anew(tmp_path: Path):
    config = Qwen3Config(**SIZES, num_hidden_layers=2)
    written = {name: value for name, value in config.to_dict().items() if name != "layer_types"}
    (tmp_path / "config.json").write_text(json.dumps(written))
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    read = AutoConfig.from_pretrained(tmp_path)
    changed = overridden(read, window, path=str(tmp_path))
    assert changed.layer_types == ["full_attention", "sliding_attention"]
    assert read.layer_types == ["full_attention"] * 2
    (tmp_path / "config.json").write_text(json.dumps(written | window))
    assert changed.to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict()


def test_parts_and_mappings_keep_their_other_values():
    config = MixtralConfig(**MIXTRAL, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6})
    keys = {"rope_parameters": {"rope_theta": 5e5, "beta_fast": 16}, "output_router_logits": True}
    changed = overridden(config, keys)
    assert changed.rope_parameters == {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5, "beta_fast": 16}
    assert changed.output_router_logits
    assert not config.output_router_logits


def test_a_familys_other_names_are_known(saved: Path):
    with pytest.raises(
        ValueError, match=r"transformer\.wpe\.weight is \[32, 16\] in the saved model, and would be \[64"
    ):
        overridden(AutoConfig.from_pretrained(saved), {"max_position_embeddings": 64})


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        ({"attn_drop": 0}, r"model\.config\.attn_drop: unknown key \(value 0\); did you mean 'attn_pdrop'\?"),
        ({"n_layer": 2}, r"the model would have transformer\.h\.1\..* which the saved one does not have"),
        ({"n_layer": 0}, r"the saved model has transformer\.h\.0\..* and this one would have none"),
        ({"tie_word_embeddings": False}, r"the model would have lm_head\.weight, which the saved one does not have"),
        ({"attn_pdrop": "none"}, r"transformers refuses it: .*attn_pdrop"),
        ({"dtype": "bfloat16"}, r"model\.config\.dtype \('bfloat16'\): set model\.dtype"),
        ({"model_type": "llama"}, r"another kind of model has other weights: give its model\.path"),
        ({"eos_token_id": 2}, r"set model\.eos_token"),
        ({"rope_scaling": {"factor": 2}}, r"set model\.rope_scaling, or keys of model\.config\.rope_parameters"),
        ({"activation_function": "nope"}, r"transformers refuses it: KeyError: 'nope'"),
    ],
)
def test_what_would_be_lost_or_drawn_is_refused(saved: Path, overrides: dict[str, object], rule: str):
    with pytest.raises(ValueError, match=rule):
        overridden(AutoConfig.from_pretrained(saved), overrides)


def test_a_key_of_a_part_is_found():
    config = AutoConfig.for_model("gemma3")
    with pytest.raises(ValueError, match=r"did you mean 'model\.config\.text_config\.attention_dropout'\?"):
        overridden(config, {"attention_dropout": 0.0})
    with pytest.raises(ValueError, match=r"model\.config\.text_config: must be a mapping, got 3"):
        overridden(config, {"text_config": 3})


def test_a_key_that_a_refusal_names_is_the_one_of_the_language_model():
    """Emu3 has a part for images whose attention drops too; its key was the hint, and the refusal named none."""
    config = AutoConfig.for_model("emu3")
    assert config.get_text_config(decoder=True).attention_dropout > 0
    with pytest.raises(ValueError, match=r"model\.config\.text_config\.attention_dropout: 0\.0"):
        refuse_random_attention(config)
    with pytest.raises(ValueError, match=r"did you mean 'model\.config\.text_config\.attention_dropout'"):
        overridden(config, {"attention_dropout": 0.0})


def test_a_run_loads_the_saved_weights_with_it(saved: Path):
    chosen = ModelConfig(path=str(saved), config={"attn_pdrop": 0.0})
    longctx = SimpleNamespace(pipeline_stages=1)
    model = _model(SimpleNamespace(model=chosen, longctx=longctx), str(saved), {"dtype": torch.float32}, None)
    assert model.config.attn_pdrop == 0
    assert model.transformer.h[0].attn.attn_dropout.p == 0
    plain = AutoModelForCausalLM.from_pretrained(saved)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), plain.parameters(), strict=True))


def test_a_new_model_has_keys_of_its_own():
    chosen = ModelConfig(random_init={"model_type": "gpt2"}, config={"attn_pdrop": 0.0})
    assert list(chosen.problems()) == [
        ("config", "{'attn_pdrop': 0.0} is for model.path: give all keys of a new model to model.random_init")
    ]
