"""Sizes of any model in the record of its run."""

from types import SimpleNamespace
from typing import Any

import torch
from transformers import Gemma3Config, LlamaConfig, MambaConfig

from hf_longctx.report.training_runs.run_record import _model


def test_models_without_heads_and_with_several_are_recorded():
    """A Mamba has no heads, layers of one model may differ in theirs, and text may lie inside another configuration."""
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=12, num_key_value_heads=4, head_dim=8, hidden_size=96)
    config.per_layer_config = {1: {"num_attention_heads": 8, "num_key_value_heads": 2}}
    mamba = MambaConfig(hidden_size=16, num_hidden_layers=2, vocab_size=32)
    inside = Gemma3Config(text_config={"hidden_size": 32, "num_hidden_layers": 3, "head_dim": 4})

    def recorded(config: Any) -> dict[str, Any]:
        return _model(SimpleNamespace(config=config, dtype=torch.float32), {}, None)

    several = recorded(config)
    assert (several["num_attention_heads"], several["hidden_size"]) == ([12, 8], 96)
    assert several["kv_elements_per_token"] == 2 * 2 * 4 * 8
    assert (recorded(mamba)["hidden_size"], recorded(mamba)["kv_elements_per_token"]) == (16, None)
    assert (recorded(inside)["num_hidden_layers"], recorded(inside)["hidden_size"]) == (3, 32)
