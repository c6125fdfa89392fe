"""Published sizes of well-known models, with the field names of Hugging Face configurations: what CostModel and MemoryModel count
where no configuration can be read, because a model is gated on its hub or there is no network.

The 7B model of ByteScale's case study exchanges as much as 8 key/value heads would (devices.py): it is
`replace(ARCHITECTURES["llama-7b"], num_key_value_heads=8)`. No torch, and no transformers.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """Fields as in transformers' LlamaConfig and MixtralConfig."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int
    num_local_experts: int | None = None
    num_experts_per_tok: int | None = None
    model_type: str = "llama"
    tie_word_embeddings: bool = False
    sliding_window: int | None = None

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


ARCHITECTURES: dict[str, Architecture] = {
    "llama-7b": Architecture(4096, 11008, 32, 32, 32, 32000, 4096),
    "llama-13b": Architecture(5120, 13824, 40, 40, 40, 32000, 4096),
    "llama-30b": Architecture(6656, 17920, 60, 52, 52, 32000, 2048),
    "llama-70b": Architecture(8192, 28672, 80, 64, 8, 32000, 4096),
    "mistral-8x7b": Architecture(4096, 14336, 32, 32, 8, 32000, 32768, 8, 2, "mixtral"),
    "mistral-8x22b": Architecture(6144, 16384, 56, 48, 8, 32768, 65536, 8, 2, "mixtral"),
}
"""Llama 2 7B, 13B and 70B, Llama 1 30B, Mixtral 8x7B and 8x22B, from the configurations published with them."""

LLAMA_3_VOCABULARY = 128256
LLAMA_31_CONTEXT = 131072
LLAMA_31_8B = Architecture(4096, 14336, 32, 32, 8, LLAMA_3_VOCABULARY, LLAMA_31_CONTEXT)
LLAMA_31_70B = Architecture(8192, 28672, 80, 64, 8, LLAMA_3_VOCABULARY, LLAMA_31_CONTEXT)
MISTRAL_7B = Architecture(4096, 14336, 32, 32, 8, 32768, 32768, model_type="mistral")
SMOLLM2_135M = Architecture(576, 1536, 30, 9, 3, 49152, 8192, tie_word_embeddings=True)

PUBLISHED: dict[str, Architecture] = {
    "meta-llama/Llama-2-7b-hf": ARCHITECTURES["llama-7b"],
    "meta-llama/Llama-2-13b-hf": ARCHITECTURES["llama-13b"],
    "meta-llama/Llama-2-70b-hf": ARCHITECTURES["llama-70b"],
    "meta-llama/Llama-3.1-8B": LLAMA_31_8B,
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_31_8B,
    "meta-llama/Llama-3.1-70B": LLAMA_31_70B,
    "meta-llama/Llama-3.1-70B-Instruct": LLAMA_31_70B,
    "meta-llama/Llama-3.3-70B-Instruct": LLAMA_31_70B,
    "mistralai/Mistral-7B-v0.3": MISTRAL_7B,
    "mistralai/Mistral-7B-Instruct-v0.3": MISTRAL_7B,
    "mistralai/Mixtral-8x7B-v0.1": ARCHITECTURES["mistral-8x7b"],
    "mistralai/Mixtral-8x7B-Instruct-v0.1": ARCHITECTURES["mistral-8x7b"],
    "mistralai/Mixtral-8x22B-v0.1": ARCHITECTURES["mistral-8x22b"],
}
"""Hub id -> sizes."""
