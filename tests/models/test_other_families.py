"""Models that cannot be trained, wherever a run begins: refused by name, before anything else is read of them."""

import json
import re
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BioGptConfig,
    BioGptForCausalLM,
    T5Config,
    TrainingArguments,
)

from hf_longctx import Layout, LongContextPlugin, LongContextTrainer, Segment, patch_model
from hf_longctx.config import ConfigError, resolve
from hf_longctx.settings.families import refused_family
from tests.builders.tiny_models import tiny_general

ENCODER = "transformers has no causal language model of type 't5'; valid: one of its"


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, vocab_size=32).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("given", ["model", "model_init"])
def test_the_trainer_refuses_a_model_that_differs_by_name(given: str, tmp_path: Path):
    """An encoder, whose tokens see later ones."""
    model = BertLMHeadModel(
        BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    )
    with pytest.raises(ValueError, match=r"BertLMHeadModel is not computed exactly over layouts: .*later tokens"):
        LongContextTrainer(
            **({"model": model} if given == "model" else {"model_init": lambda: model}),
            args=TrainingArguments(str(tmp_path), use_cpu=True, max_steps=1, report_to=[]),
            train_dataset=Dataset.from_dict({"input_ids": [[1, 2, 3]]}),
            plugin=LongContextPlugin(capacity=128),
        )


def test_the_command_line_refuses_what_is_no_causal_language_model(encoder: Path, tmp_path: Path):
    """`train`, `train --dry-run` and `config` read the file alike."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"input_ids": [1, 2, 3]}))
    for number, (key, model) in enumerate(
        {"path": {"path": str(encoder)}, "random_init.model_type": {"random_init": {"model_type": "t5"}}}.items()
    ):
        file = tmp_path / f"{number}.yaml"
        file.write_text(json.dumps({"model": model, "data": {"path": str(rows)}, "longctx": {"capacity": 64}}))
        with pytest.raises(ConfigError, match=f"model.{re.escape(key)}: .*{re.escape(ENCODER)}"):
            resolve(file)


def test_types_with_a_causal_language_model_are_supported():
    names = ("llama", "mpt", "internlm3", "qwen2", "mamba", "somebodys_own")
    assert [refused_family(name) for name in names] == [None] * len(names)
    assert ENCODER in str(refused_family("t5"))


def test_layers_that_are_drawn_are_refused():
    """Each rank would skip others, and wait for keys that nobody sends."""
    model = BioGptForCausalLM(
        BioGptConfig(
            **{"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"intermediate_size": 16, "layerdrop": 0.5, "attention_probs_dropout_prob": 0.0},
        )
    )
    with pytest.raises(ValueError, match=r"layerdrop=0.5: each rank would draw the layers that it skips"):
        patch_model(model)


def test_another_attention_set_after_patching_is_refused():
    """Qwen3-Next has layers with a state, too: nothing else would show that its attention layers saw no layout."""
    model = patch_model(tiny_general("qwen3_next"))
    model.set_attn_implementation("sdpa")
    packed = {
        "input_ids": torch.arange(12)[None],
        "layout": Layout({0: [Segment(0, 0, 7), Segment(1, 0, 5)]}),
    }
    with pytest.raises(
        ValueError, match=r"attn_implementation='sdpa' has been set since Qwen3NextForCausalLM was patched"
    ):
        model(**packed)
    assert patch_model(model)(**packed).logits.shape == (1, 12, 128)
