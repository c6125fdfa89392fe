"""Llama and Mixtral models small enough for a CPU test, the same in every process and in every dtype.

Each parameter is drawn in float32 from a generator of its own, seeded alike, and then cast: no random state of the
caller is read or changed. The scales are chosen so that every part matters to the loss: with transformers' 0.02,
attention over 64 channels is almost uniform and an error in it would drown.
"""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedConfig,
)

TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
}
TINY_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


def tiny_llama(
    dtype: torch.dtype = torch.float32, attn_implementation: str = "sdpa", **overrides: Any
) -> LlamaForCausalLM:
    """A LlamaForCausalLM: 2 layers, hidden 64, 4 heads of 16 over 2 key-value heads, 128 tokens in the vocabulary.

    `overrides` are fields of LlamaConfig.
    """
    return _seeded(LlamaConfig(**(TINY | overrides)), dtype, attn_implementation)


def tiny_mixtral(
    dtype: torch.dtype = torch.float32, attn_implementation: str = "sdpa", **overrides: Any
) -> MixtralForCausalLM:
    """A MixtralForCausalLM of the same sizes with 4 experts, of which a token takes 2.

    `overrides` are fields of MixtralConfig, `experts_implementation` included (float64 needs "eager").
    """
    return _seeded(MixtralConfig(**(TINY | TINY_EXPERTS | overrides)), dtype, attn_implementation)


def _seeded(config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str) -> Any:
    with torch.random.fork_rng():  # transformers initialises the weights that are replaced below
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(drawn * parameter.shape[-1] ** -0.5)  # keeps the size of activations
            else:
                parameter.copy_(0.1 * drawn + (0 if name.endswith("bias") else 1))  # a bias, or the weight of a norm
    return model
