"""Mistral over layouts: Llama with a sliding window."""

from transformers.models.mistral import modeling_mistral

from hf_longctx.models.compiled_layers import CompiledLayer
from hf_longctx.models.families.family import Family
from hf_longctx.models.rope import WindowAttention


class LongContextMistralAttention(WindowAttention, modeling_mistral.MistralAttention):  # type: ignore[misc]
    """MistralAttention that runs over a layout when it is given one."""


class MistralDecoderLayer(CompiledLayer, modeling_mistral.MistralDecoderLayer):  # type: ignore[misc]
    """MistralDecoderLayer that is compiled in parts."""


FAMILY = Family(
    attention=modeling_mistral.MistralAttention,
    layout_attention=LongContextMistralAttention,
    decoder_layer=modeling_mistral.MistralDecoderLayer,
    compiled_layer=MistralDecoderLayer,
    cut_model=modeling_mistral.MistralModel,
    liger_norm=modeling_mistral.MistralRMSNorm,
    liger_mlp=modeling_mistral.MistralMLP,
)
