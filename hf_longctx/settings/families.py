"""Model types that transformers makes causal language models of: no others can be trained. Whether one of these is computed
exactly over layouts, its certificate says when a run begins. transformers is imported when it is asked."""

import json
from pathlib import Path
from typing import Any


def refused_family(model_type: Any) -> str | None:
    """Returns why models of a type cannot be trained; None where they can, or where transformers does not know the type."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

    if str(model_type) not in CONFIG_MAPPING or str(model_type) in CLASSES:
        return None
    return f"transformers has no causal language model of type {model_type!r}; valid: one of its {len(CLASSES)} types that has"


def refused_directory(path: str) -> str | None:
    """Returns the same of a directory with config.json; None also where that is not readable, or names code of its own."""
    try:
        config = json.loads((Path(path) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict) or "auto_map" in config:
        return None
    return refused_family(config.get("model_type"))
