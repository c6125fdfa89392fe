"""Sizes of models whose configurations cannot always be read: gated on their hub, or there is no network.

A dry run, an estimate and `init` need sizes only. From the configurations published with the models.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_longctx.sections.model import EMBEDDED_MODEL
from hf_longctx.simulator.architectures import ARCHITECTURES, Architecture

LLAMA_3_VOCABULARY = 128256
LLAMA_31_CONTEXT = 131072
LLAMA_31_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
ROPE_THETA = {"mistral": 1000000.0, "mixtral": 1000000.0}
"""By family; Llama's is 10000."""
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
    EMBEDDED_MODEL: SMOLLM2_135M,
}
"""Hub id (or the embedded model, which need not be fetched for its sizes) -> sizes."""


def published_sizes(model: str) -> Architecture | None:
    """Of a hub's model, unless a directory of this name is here."""
    return None if Path(model).is_dir() else PUBLISHED.get(model)


def transformers_config(sizes: Architecture) -> Any:
    """The same sizes as a configuration of transformers, of which a model can be made."""
    from transformers import AutoConfig

    fields = {name: value for name, value in asdict(sizes).items() if value is not None} | {"head_dim": sizes.head_dim}
    theta = ROPE_THETA.get(sizes.model_type, 10000.0)
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    if sizes.vocab_size == LLAMA_3_VOCABULARY:
        fields["rope_parameters"] = dict(LLAMA_31_ROPE)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)
