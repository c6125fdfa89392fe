"""Which model types can be trained: those whose causal language model in transformers is one that `patch_model` knows. Code that
comes with a model may hold any layers: the trainer looks at those. transformers is imported when it is asked."""

import json
from pathlib import Path
from typing import Any

from hf_longctx.hardware.model_sizes import MODEL_TYPES


def refused_family(model_type: Any) -> str | None:
    """Returns why models of a type cannot be trained; None where they can, or where transformers does not know the type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    names = [name for name in MODEL_TYPES if name]
    made = CLASSES.get(str(model_type))
    if model_type in names or made is None or made in [CLASSES[name] for name in names]:
        return None
    return (
        f"{model_type!r} makes a {made}, which has no attention layers that hf_longctx can run over layouts; valid: "
        f"{', '.join(names)}"
    )


def refused_directory(path: str) -> str | None:
    """Returns the same of a directory with config.json; None also where that is not readable, or names code of its own."""
    try:
        config = json.loads((Path(path) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or "auto_map" in config:
        return None
    return refused_family(config.get("model_type"))
