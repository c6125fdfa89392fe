"""Looks through the wrappers that adapters put around a model."""

from typing import Any


def language_model_of(model: Any) -> Any:
    """Return the causal language model itself, also of one inside a PEFT wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
