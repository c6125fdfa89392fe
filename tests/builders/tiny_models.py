"""Models of every family that can run over a layout, small enough for a CPU test, the same in every process and in every dtype.

Each parameter is drawn in float32 from a generator of its own, seeded alike, and then cast: no random state of the
caller is read or changed. The scales are chosen so that every part matters to the loss: with transformers' 0.02,
attention over 64 channels is almost uniform and an error in it would drown.
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    MptConfig,
    MptForCausalLM,
    OpenAIGPTConfig,
    PreTrainedConfig,
    ProphetNetConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

TINY: dict[str, Any] = {
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


def tiny_mistral(
    dtype: torch.dtype = torch.float32, attn_implementation: str = "sdpa", **overrides: Any
) -> MistralForCausalLM:
    """A MistralForCausalLM of the same sizes, whose queries see 7 tokens. `overrides` are fields of MistralConfig."""
    return _seeded(MistralConfig(**(TINY | {"sliding_window": 7} | overrides)), dtype, attn_implementation)


def tiny_bloom(
    dtype: torch.dtype = torch.float32, attn_implementation: str = "eager", **overrides: Any
) -> BloomForCausalLM:
    """A BloomForCausalLM: 2 layers, hidden 64, 4 heads of 16, 128 tokens in the vocabulary, embeddings tied.

    `overrides` are fields of BloomConfig. The slopes of up to 8 heads are powers of two, so that transformers' float32
    bias is exact.
    """
    sizes = {"vocab_size": 128, "hidden_size": 64, "n_layer": 2, "n_head": 4}
    return _seeded(BloomConfig(**(sizes | overrides)), dtype, attn_implementation)


def tiny_mpt(
    dtype: torch.dtype = torch.float32, attn_implementation: str = "eager", **overrides: Any
) -> MptForCausalLM:
    """An MptForCausalLM of the same sizes. `overrides` are fields of MptConfig."""
    sizes = {"vocab_size": 128, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 4096}
    return _seeded(MptConfig(**(sizes | overrides)), dtype, attn_implementation)


GENERAL: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "qwen3": (Qwen3Config, {}),
    "gpt_oss": (
        GptOssConfig,
        TINY_EXPERTS | {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma2": (Gemma2Config, {"sliding_window": 7, "query_pre_attn_scalar": 16}),
    "gemma3_text": (
        Gemma3TextConfig,
        {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 16},
    ),
    "deepseek_v3": (
        DeepseekV3Config,
        {
            **{"num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "n_routed_experts": 4, "n_group": 1},
            **{
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 16,
                "v_head_dim": 16,
                "topk_group": 1,
                "num_experts_per_tok": 2,
            },
            **{"moe_intermediate_size": 32, "first_k_dense_replace": 1, "head_dim": 8},
        },
    ),
    "qwen3_next": (
        Qwen3NextConfig,
        {
            **{"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4},
            **{"linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "num_experts": 4},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        },
    ),
}
"""Families whose attention classes are transformers' own -> their configuration, and its fields beside TINY: windows, sinks, soft
caps, heads whose values are narrower, experts, and layers with a state."""


def tiny_general(family: str, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A model of GENERAL. `overrides` are fields of its configuration."""
    kind, fields = GENERAL[family]
    # Padding is no token of the documents, and the eager experts are those of every dtype.
    config = kind(**(TINY | {"pad_token_id": None, "experts_implementation": "eager"} | fields | overrides))
    return _seeded(config, dtype, "eager")


RUN_ALONE: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "bart": (
        BartConfig,
        {"d_model": 64, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 96, "dropout": 0.0},
    ),
    "openai-gpt": (
        OpenAIGPTConfig,
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "prophetnet": (
        ProphetNetConfig,
        {
            **{"hidden_size": 64, "num_decoder_layers": 1, "num_decoder_attention_heads": 4, "decoder_ffn_dim": 96},
            **{"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "is_decoder": True},
        },
    ),
}
"""Families whose documents run one to a micro-batch, with the plain model -> their configuration and its fields: decoders that
number rows, one without checkpointing, and one whose logits come of its whole forward alone."""


def tiny_alone(family: str, **overrides: Any) -> Any:
    """A model of RUN_ALONE. `overrides` are fields of its configuration."""
    kind, fields = RUN_ALONE[family]
    return _seeded(kind(**({"vocab_size": 128, "pad_token_id": 0} | fields | overrides)), torch.float32, "eager")


FAMILIES: dict[str, Callable[..., Any]] = {
    "llama": tiny_llama,
    "mistral": tiny_mistral,
    "mixtral": partial(
        tiny_mixtral, experts_implementation="eager", output_router_logits=True, router_aux_loss_coef=0.1
    ),
    "mixtral-window": partial(tiny_mixtral, experts_implementation="eager", sliding_window=5),
    "bloom": tiny_bloom,
    "bloom-6-heads": partial(tiny_bloom, hidden_size=96, n_head=6),
    "mpt": tiny_mpt,
    "mpt-6-heads": partial(tiny_mpt, d_model=96, n_heads=6),
}
"""What differs over a layout -> a model of it in a dtype, float64 included."""


_made: dict[tuple[str, torch.dtype, str], Any] = {}


def _seeded(config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str) -> Any:
    """Returns a copy of what was made before of the same configuration: copying takes less than half of making."""
    key = f"{type(config)} {vars(config)}", dtype, attn_implementation
    if key not in _made:
        _made[key] = _new(config, dtype, attn_implementation)
    return copy.deepcopy(_made[key])


def _new(config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str) -> Any:
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
