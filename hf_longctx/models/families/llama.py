"""Llama over layouts."""

from transformers.models.llama.modeling_llama import LlamaAttention

from hf_longctx.models.rope import RopeAttention


class LongContextLlamaAttention(RopeAttention, LlamaAttention):  # type: ignore[misc]
    """LlamaAttention that runs over a layout when it is given one."""
