"""Fields of a model's configuration that may have a value for each layer, or another name in some families."""

from __future__ import annotations

from typing import Any

HEADS = ("decoder_attention_heads", "num_attention_heads", "n_heads", "n_head")
"""Names of how many query heads attention has. A BART's num_attention_heads are its encoder's."""
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads")
"""Names of how many heads keys and values have, where these are fewer."""


def field_values(config: Any, name: str) -> list[Any]:
    """Return the values that a field has in the layers of a model: one where all share it, none where it is absent or None."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # transformers': layers differ, and none is everybody's
        values = [getattr(layer, name, None) for layer in config.per_layer_config]
    else:
        values = list(value) if isinstance(value, list | tuple) else [value]
    return [value for value in values if value is not None]


def language_model(config: Any) -> Any:
    """Return the part of a configuration that is the language model's: all, unless the model also reads images or sound."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def head_counts(config: Any) -> list[tuple[int, int]]:
    """Return the query heads and the key/value heads of attention: one pair where all layers have as many, else a pair for each
    layer; none where no field says how many."""
    text = language_model(config)
    heads = _counts(text, HEADS)
    kv_heads = [1] if _is_multi_query(text) else _counts(text, KEY_VALUE_HEADS)
    if not kv_heads and (inner := getattr(text, "attn_config", None)) is not None:  # DBRX
        kv_heads = _counts(inner, KEY_VALUE_HEADS)
    kv_heads = kv_heads or heads
    layers = max(len(heads), len(kv_heads)) if heads else 0
    query_of_layer, key_of_layer = (values * layers if len(values) == 1 else values for values in (heads, kv_heads))
    return [(query, min(key, query)) for query, key in zip(query_of_layer, key_of_layer)]


def _is_multi_query(text: Any) -> bool:
    """Tell whether all query heads share one head of keys and values: GPTBigCode, and the first Falcons."""
    return bool(getattr(text, "multi_query", False)) and not getattr(text, "new_decoder_architecture", False)


def _counts(config: Any, names: tuple[str, ...]) -> list[int]:
    """Return the values of the first of these fields that counts something."""
    for name in names:
        if counts := [value for value in field_values(config, name) if isinstance(value, int) and value > 0]:
            return counts
    return []
