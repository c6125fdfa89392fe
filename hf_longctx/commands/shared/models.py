"""Models by their published sizes alone, which dry runs, estimates and `init` need, also as configurations of transformers."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from hf_longctx.hardware.model_sizes import ALL_SLIDING
from hf_longctx.hardware.published import LLAMA_3_VOCABULARY, PUBLISHED, SMOLLM2_135M, Architecture, Published
from hf_longctx.settings.model import EMBEDDED_MODEL

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


def published_sizes(model: str) -> Architecture | Published | None:
    """Return the sizes of a hub's model, unless a directory of this name is here, or of the embedded one, which need not be
    fetched for them."""
    return SMOLLM2_135M if model == EMBEDDED_MODEL else None if Path(model).is_dir() else PUBLISHED.get(model)


def transformers_config(sizes: Architecture | Published) -> Any:
    """The same sizes as a configuration of transformers, of which a model can be made."""
    from transformers import AutoConfig

    if isinstance(sizes, Published):
        return AutoConfig.for_model(sizes.model_type, **sizes.fields)
    fields = {name: value for name, value in asdict(sizes).items() if value is not None} | {"head_dim": sizes.head_dim}
    if sizes.model_type in ALL_SLIDING:
        fields["sliding_window"] = sizes.sliding_window  # or transformers would take its own default for none
    theta = ROPE_THETA.get(sizes.model_type, 10000.0)
    fields["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    if sizes.vocab_size == LLAMA_3_VOCABULARY:
        fields["rope_parameters"] = dict(LLAMA_31_ROPE)
    return AutoConfig.for_model(fields.pop("model_type"), **fields)
