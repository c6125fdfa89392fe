"""`model.random_init`: keys of transformers' own model configurations, which keep unknown keys without a word, so that a
misspelt size would train another model; and sizes of which no model can be made. transformers is imported when it is checked."""

from collections.abc import Callable, Iterator
from typing import Any

from hf_longctx.settings.families import refused_family
from hf_longctx.settings.fields import did_you_mean, shown


def check_random_init(
    values: dict[str, Any], problem: Callable[[str, str], None], unknown: Callable[[str, Any, str], str]
) -> None:
    """Calls `problem` with the key ("" for all) and the rule of each mistake; `unknown` words what is said of a key that there
    is not, with the keys that there are, and whose they are."""
    from transformers import CONFIG_MAPPING

    model_type = values.get("model_type")
    if str(model_type) not in CONFIG_MAPPING:
        hint = did_you_mean(model_type, CONFIG_MAPPING) or "; for instance 'llama' or 'mixtral'"
        problem("model_type", f"must be a model type of transformers, got {shown(model_type)}{hint}")
        return
    if (reason := refused_family(model_type)) is not None:
        problem("model_type", reason)
        return
    kind = CONFIG_MAPPING[str(model_type)]
    try:
        valid = kind().to_dict()
        misspelt = [str(key) for key in values if key not in valid]
        for key in misspelt:
            problem(key, unknown(key, valid, f"transformers' {model_type} configuration"))
        if misspelt:
            return
        config = kind(**{key: value for key, value in values.items() if key != "model_type"})
    except Exception as error:  # transformers' checks raise many kinds
        problem("", f"transformers refuses it: {' '.join(str(error).split())}")
        return
    for rule in _impossible_sizes(config):
        problem("", rule)


def _impossible_sizes(config: Any) -> Iterator[str]:
    """Yield what transformers lets pass and no model can be made of, or run. A family without attention has no heads, and one
    whose layers differ no number of them."""
    text = config.get_text_config(decoder=True)  # of a model that reads images or sound too, the language model

    def size(name: str) -> int | None:
        try:
            value = getattr(text, name, None)
        except RuntimeError:  # transformers': layers differ
            return None
        return value if isinstance(value, int) else None

    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        if (value := size(name)) is not None and value < 1:
            yield f"{name} must be at least 1, got {value}"
            return
    heads, kv_heads, hidden = map(size, ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    own_size = size("head_dim") or size("attention_head_size")
    if heads and hidden and not own_size and hidden % heads:
        whole, rest = divmod(hidden, heads)
        yield f"hidden_size must be a multiple of num_attention_heads: {hidden} = {whole} * {heads} + {rest}"
    if heads and kv_heads and heads % kv_heads:
        yield f"num_key_value_heads={kv_heads} must divide num_attention_heads={heads}"
    experts, chosen = map(size, ("num_local_experts", "num_experts_per_tok"))
    if experts and chosen and chosen > experts:
        yield f"num_experts_per_tok={chosen} is more than num_local_experts={experts}"
