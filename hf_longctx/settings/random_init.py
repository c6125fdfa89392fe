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
    valid = kind().to_dict()
    misspelt = [str(key) for key in values if key not in valid]
    for key in misspelt:
        problem(key, unknown(key, valid, f"transformers' {model_type} configuration"))
    if misspelt:
        return
    try:
        config = kind(**{key: value for key, value in values.items() if key != "model_type"})
    except Exception as error:  # transformers' checks raise many kinds
        problem("", f"transformers refuses it: {' '.join(str(error).split())}")
        return
    for rule in _impossible_sizes(config):
        problem("", rule)


def _impossible_sizes(config: Any) -> Iterator[str]:
    """Yield what transformers lets pass and no model can be made of, or run."""

    def size(name: str) -> int:
        return getattr(config, name, None) or 0

    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        if hasattr(config, name) and size(name) < 1:
            yield f"{name} must be at least 1, got {size(name)}"
            return
    heads, kv_heads = size("num_attention_heads"), size("num_key_value_heads")
    if not size("head_dim") and size("hidden_size") % heads:
        whole, rest = divmod(size("hidden_size"), heads)
        yield f"hidden_size must be a multiple of num_attention_heads: {size('hidden_size')} = {whole} * {heads} + {rest}"
    if kv_heads and heads % kv_heads:
        yield f"num_key_value_heads={kv_heads} must divide num_attention_heads={heads}"
    if size("num_local_experts") and size("num_experts_per_tok") > size("num_local_experts"):
        yield f"num_experts_per_tok={config.num_experts_per_tok} is more than num_local_experts={config.num_local_experts}"
