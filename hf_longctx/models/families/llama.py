"""Llama over layouts."""

from transformers.models.llama import modeling_llama

from hf_longctx.models.compiled_layers import CompiledLayer
from hf_longctx.models.families.family import Family
from hf_longctx.models.rope import RopeAttention


class LongContextLlamaAttention(RopeAttention, modeling_llama.LlamaAttention):  # type: ignore[misc]
    """LlamaAttention that runs over a layout when it is given one."""


class LlamaDecoderLayer(CompiledLayer, modeling_llama.LlamaDecoderLayer):  # type: ignore[misc]
    """LlamaDecoderLayer that is compiled in parts."""


FAMILY = Family(
    attention=modeling_llama.LlamaAttention,
    layout_attention=LongContextLlamaAttention,
    decoder_layer=modeling_llama.LlamaDecoderLayer,
    compiled_layer=LlamaDecoderLayer,
    cut_model=modeling_llama.LlamaModel,
    liger_norm=modeling_llama.LlamaRMSNorm,
    liger_mlp=modeling_llama.LlamaMLP,
)
