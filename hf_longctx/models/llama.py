"""Llama over layouts."""

from transformers.models.llama.modeling_llama import LlamaAttention

from hf_longctx.models.attention import LayoutAttention


class LongContextLlamaAttention(LayoutAttention, LlamaAttention):  # type: ignore[misc]
    """LlamaAttention that runs over a layout when it is given one."""
