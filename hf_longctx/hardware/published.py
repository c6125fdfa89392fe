"""Published sizes of well-known models, with the field names of Hugging Face configurations: what CostModel and MemoryModel count
where no configuration can be read, because a model is gated on its hub or there is no network. Llama, Mistral and Mixtral are
counted by formulas, the others from the modules that transformers makes of these fields (model_sizes.py).

The 7B model of ByteScale's case study exchanges as much as 8 key/value heads would (devices.py): it is
`replace(ARCHITECTURES["llama-7b"], num_key_value_heads=8)`. No torch, and no transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


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


@dataclass(frozen=True)
class Published:
    """A family without a formula: the fields of its configuration that are not transformers' defaults."""

    model_type: str
    fields: Mapping[str, Any]


LLAMA_3_VOCABULARY = 128256
LLAMA_31_CONTEXT = 131072
LLAMA_31_8B = Architecture(4096, 14336, 32, 32, 8, LLAMA_3_VOCABULARY, LLAMA_31_CONTEXT)
LLAMA_31_70B = Architecture(8192, 28672, 80, 64, 8, LLAMA_3_VOCABULARY, LLAMA_31_CONTEXT)
LLAMA_31_405B = Architecture(16384, 53248, 126, 128, 8, LLAMA_3_VOCABULARY, LLAMA_31_CONTEXT)
MISTRAL_7B = Architecture(4096, 14336, 32, 32, 8, 32768, 32768, model_type="mistral")
LLAMA_32_1B = Architecture(2048, 8192, 16, 32, 8, LLAMA_3_VOCABULARY, LLAMA_31_CONTEXT, tie_word_embeddings=True)
LLAMA_32_3B = Architecture(3072, 8192, 28, 24, 8, LLAMA_3_VOCABULARY, LLAMA_31_CONTEXT, tie_word_embeddings=True)
SMOLLM2_135M = Architecture(576, 1536, 30, 9, 3, 49152, 8192, tie_word_embeddings=True)
SMOLLM2_360M = Architecture(960, 2560, 32, 15, 5, 49152, 8192, tie_word_embeddings=True)
SMOLLM2_17B = Architecture(2048, 8192, 24, 32, 32, 49152, 8192, tie_word_embeddings=True)

FIELDS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def _sized(model_type: str, *sizes: int, context: int, **fields: Any) -> Published:
    """Fields of a family, those of FIELDS first."""
    return Published(model_type, dict(zip(FIELDS, sizes)) | {"max_position_embeddings": context} | fields)


def _qwen3(*sizes: int, tied: bool = False, context: int = 40960) -> Published:
    return _sized("qwen3", *sizes, context=context, head_dim=128, vocab_size=151936, tie_word_embeddings=tied)


def _qwen3_moe(*sizes: int, expert: int, context: int = 40960) -> Published:
    """A Qwen3 mixture of 128 experts, of which a token takes 8; `expert`: the width of one."""
    experts = {"moe_intermediate_size": expert, "num_experts": 128, "num_experts_per_tok": 8}
    return _sized(
        "qwen3_moe", *sizes, context=context, head_dim=128, vocab_size=151936, tie_word_embeddings=False, **experts
    )


def _qwen25(*sizes: int, context: int = 131072, vocabulary: int = 152064, tied: bool = False) -> Published:
    return _sized("qwen2", *sizes, context=context, vocab_size=vocabulary, tie_word_embeddings=tied)


def _mistral(*sizes: int, context: int) -> Published:
    """A Mistral whose heads are narrower than its hidden size over their number, without a window."""
    narrow = {"head_dim": 128, "sliding_window": None, "vocab_size": 131072, "tie_word_embeddings": False}
    return _sized("mistral", *sizes, context=context, **narrow)


def _olmo2(*sizes: int) -> Published:
    return _sized("olmo2", *sizes, context=4096, vocab_size=100352, tie_word_embeddings=False)


def _gemma2(*sizes: int, head_dim: int) -> Published:
    return _sized("gemma2", *sizes, context=8192, head_dim=head_dim, sliding_window=4096, vocab_size=256000)


def _gemma3(*sizes: int, context: int = 131072, **fields: Any) -> Published:
    """Gemma 3's language model, without the tower for images that 4B and larger have."""
    return _sized("gemma3_text", *sizes, context=context, **{"sliding_window": 1024, "vocab_size": 262208} | fields)


QWEN3_30B = (2048, 6144, 48, 32, 4)
QWEN3_4B = (2560, 9728, 36, 32, 8)
QWEN3_2507_CONTEXT = 262144
QWEN3_NEXT_80B = Published(
    "qwen3_next", {"num_hidden_layers": 48, "max_position_embeddings": 262144, "tie_word_embeddings": False}
)
"""transformers' defaults are this model's other sizes."""
GPT_OSS = {
    "head_dim": 64,
    "vocab_size": 201088,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "tie_word_embeddings": False,
}
GLM_45_AIR = _sized(
    *("glm4_moe", 4096, 10944, 46, 96, 8),
    context=131072,
    head_dim=128,
    vocab_size=151552,
    moe_intermediate_size=1408,
    n_routed_experts=128,
    n_shared_experts=1,
    num_experts_per_tok=8,
    first_k_dense_replace=1,
    attention_bias=True,
    use_qk_norm=False,
    tie_word_embeddings=False,
)
GLM_45 = _sized(
    *("glm4_moe", 5120, 12288, 92, 96, 8),
    context=131072,
    head_dim=128,
    vocab_size=151552,
    moe_intermediate_size=1536,
    n_routed_experts=160,
    n_shared_experts=1,
    num_experts_per_tok=8,
    first_k_dense_replace=3,
    attention_bias=True,
    use_qk_norm=True,
    tie_word_embeddings=False,
)
DEEPSEEK_V3 = _sized(
    *("deepseek_v3", 7168, 18432, 61, 128, 128),
    context=163840,
    vocab_size=129280,
    moe_intermediate_size=2048,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    first_k_dense_replace=3,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    tie_word_embeddings=False,
)
"""Without the layer that predicts a second token, which transformers does not make."""

PUBLISHED: dict[str, Architecture | Published] = {
    "meta-llama/Llama-2-7b-hf": ARCHITECTURES["llama-7b"],
    "meta-llama/Llama-2-13b-hf": ARCHITECTURES["llama-13b"],
    "meta-llama/Llama-2-70b-hf": ARCHITECTURES["llama-70b"],
    "meta-llama/Llama-3.1-8B": LLAMA_31_8B,
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_31_8B,
    "meta-llama/Llama-3.1-70B": LLAMA_31_70B,
    "meta-llama/Llama-3.1-70B-Instruct": LLAMA_31_70B,
    "meta-llama/Llama-3.1-405B": LLAMA_31_405B,
    "meta-llama/Llama-3.2-1B": LLAMA_32_1B,
    "meta-llama/Llama-3.2-1B-Instruct": LLAMA_32_1B,
    "meta-llama/Llama-3.2-3B": LLAMA_32_3B,
    "meta-llama/Llama-3.2-3B-Instruct": LLAMA_32_3B,
    "meta-llama/Llama-3.3-70B-Instruct": LLAMA_31_70B,
    "mistralai/Mistral-7B-v0.3": MISTRAL_7B,
    "mistralai/Mistral-7B-Instruct-v0.3": MISTRAL_7B,
    "mistralai/Mixtral-8x7B-v0.1": ARCHITECTURES["mistral-8x7b"],
    "mistralai/Mixtral-8x7B-Instruct-v0.1": ARCHITECTURES["mistral-8x7b"],
    "mistralai/Mixtral-8x22B-v0.1": ARCHITECTURES["mistral-8x22b"],
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16, 8, tied=True),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 6144, 28, 16, 8, tied=True),
    "Qwen/Qwen3-4B": _qwen3(*QWEN3_4B, tied=True),
    "Qwen/Qwen3-4B-Instruct-2507": _qwen3(*QWEN3_4B, tied=True, context=QWEN3_2507_CONTEXT),
    "Qwen/Qwen3-8B": _qwen3(4096, 12288, 36, 32, 8),
    "Qwen/Qwen3-14B": _qwen3(5120, 17408, 40, 40, 8),
    "Qwen/Qwen3-32B": _qwen3(5120, 25600, 64, 64, 8),
    "Qwen/Qwen3-30B-A3B": _qwen3_moe(*QWEN3_30B, expert=768),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": _qwen3_moe(*QWEN3_30B, expert=768, context=QWEN3_2507_CONTEXT),
    "Qwen/Qwen3-235B-A22B": _qwen3_moe(4096, 12288, 94, 64, 4, expert=1536),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": QWEN3_NEXT_80B,
    "Qwen/Qwen2.5-0.5B": _qwen25(896, 4864, 24, 14, 2, context=32768, vocabulary=151936, tied=True),
    "Qwen/Qwen2.5-1.5B": _qwen25(1536, 8960, 28, 12, 2, vocabulary=151936, tied=True),
    "Qwen/Qwen2.5-3B": _qwen25(2048, 11008, 36, 16, 2, context=32768, vocabulary=151936, tied=True),
    "Qwen/Qwen2.5-7B": _qwen25(3584, 18944, 28, 28, 4),
    "Qwen/Qwen2.5-14B": _qwen25(5120, 13824, 48, 40, 8),
    "Qwen/Qwen2.5-32B": _qwen25(5120, 27648, 64, 40, 8),
    "Qwen/Qwen2.5-72B": _qwen25(8192, 29568, 80, 64, 8),
    "google/gemma-2-2b": _gemma2(2304, 9216, 26, 8, 4, head_dim=256),
    "google/gemma-2-9b": _gemma2(3584, 14336, 42, 16, 8, head_dim=256),
    "google/gemma-2-27b": _gemma2(4608, 36864, 46, 32, 16, head_dim=128),
    "google/gemma-3-1b-pt": _gemma3(
        *(1152, 6912, 26, 4, 1), context=32768, head_dim=256, vocab_size=262144, sliding_window=512
    ),
    "google/gemma-3-4b-pt": _gemma3(2560, 10240, 34, 8, 4, head_dim=256),
    "google/gemma-3-12b-pt": _gemma3(3840, 15360, 48, 16, 8, head_dim=256),
    "google/gemma-3-27b-pt": _gemma3(5376, 21504, 62, 32, 16, head_dim=128),
    "openai/gpt-oss-20b": _sized("gpt_oss", 2880, 2880, 24, 64, 8, context=131072, num_local_experts=32, **GPT_OSS),
    "openai/gpt-oss-120b": _sized("gpt_oss", 2880, 2880, 36, 64, 8, context=131072, num_local_experts=128, **GPT_OSS),
    "zai-org/GLM-4-32B-0414": _sized(
        *("glm4", 6144, 23040, 61, 48, 2), context=32768, vocab_size=151552, attention_bias=False
    ),
    "zai-org/GLM-4.5-Air": GLM_45_AIR,
    "zai-org/GLM-4.5": GLM_45,
    "allenai/OLMo-2-0425-1B": _olmo2(2048, 8192, 16, 16, 16),
    "allenai/OLMo-2-1124-7B": _olmo2(4096, 11008, 32, 32, 32),
    "allenai/OLMo-2-1124-13B": _olmo2(5120, 13824, 40, 40, 40),
    "allenai/OLMo-2-0325-32B": _olmo2(5120, 27648, 64, 40, 8),
    "mistralai/Mistral-Nemo-Base-2407": _mistral(5120, 14336, 40, 32, 8, context=131072),
    "mistralai/Mistral-Small-24B-Base-2501": _mistral(5120, 32768, 40, 32, 8, context=32768),
    "ByteDance-Seed/Seed-OSS-36B-Base": _sized(
        *("seed_oss", 5120, 27648, 64, 80, 8), context=524288, vocab_size=155136, tie_word_embeddings=False
    ),
    "HuggingFaceTB/SmolLM2-135M": SMOLLM2_135M,
    "HuggingFaceTB/SmolLM2-360M": SMOLLM2_360M,
    "HuggingFaceTB/SmolLM2-1.7B": SMOLLM2_17B,
    "HuggingFaceTB/SmolLM3-3B": _sized(
        *("smollm3", 2048, 11008, 36, 16, 4), context=65536, vocab_size=128256, tie_word_embeddings=True
    ),
    "microsoft/phi-4": _sized(
        *("phi3", 5120, 17920, 40, 40, 10), context=16384, vocab_size=100352, tie_word_embeddings=False
    ),
    "deepseek-ai/DeepSeek-V3": DEEPSEEK_V3,
    "deepseek-ai/DeepSeek-R1": DEEPSEEK_V3,
}
"""Hub id -> sizes."""


def hub_id(name: str) -> str:
    """Return the hub id of a published model, which may be named without its organisation; any other name as it is."""
    ids = [known for known in PUBLISHED if known.rpartition("/")[2].lower() == name.lower()]
    return ids[0] if ids and name not in PUBLISHED else name
