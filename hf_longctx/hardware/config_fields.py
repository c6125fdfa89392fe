"""Fields of a model's configuration that may have a value for each layer."""

from __future__ import annotations

from typing import Any


def field_values(config: Any, name: str) -> list[Any]:
    """Return the values that a field has in the layers of a model: one where all share it, none where it is absent or None."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # transformers': layers differ, and none is everybody's
        values = [getattr(layer, name, None) for layer in config.per_layer_config]
    else:
        values = list(value) if isinstance(value, list | tuple) else [value]
    return [value for value in values if value is not None]
