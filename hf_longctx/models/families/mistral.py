"""Mistral over layouts: Llama with a sliding window."""

from transformers.models.mistral.modeling_mistral import MistralAttention

from hf_longctx.models.rope import WindowAttention


class LongContextMistralAttention(WindowAttention, MistralAttention):  # type: ignore[misc]
    """MistralAttention that runs over a layout when it is given one."""
