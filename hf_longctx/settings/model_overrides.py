"""`model.config`: what a pretrained model's config.json is to say otherwise, such as the dropout of attention, or whether experts
are balanced by a loss of their own. transformers is imported when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from hf_longctx.settings.fields import did_you_mean, shown

ELSEWHERE = {
    "model_type": "another kind of model has other weights: give its model.path",
    "architectures": "another kind of model has other weights: give its model.path",
    "auto_map": "code that comes with a model runs with model.trust_remote_code: true",
    "dtype": "set model.dtype",
    "torch_dtype": "set model.dtype",
    "quantization_config": "weights of 4 bits are asked for by model.load_in_4bit: true",
    "eos_token_id": "set model.eos_token, which texts and answers end with too",
}
"""Keys that would do nothing here, or half of what they seem to -> what does."""
KEY = "model.config"


def overridden(config: Any, overrides: Mapping[str, Any], *, trust_remote_code: bool = False) -> Any:
    """Return a configuration as it is read from a config.json that says all of `overrides` too.

    Args:
        config: transformers' configuration of a model that is to be loaded.
        overrides: values by key. Those of a mapping, such as a part's configuration, are replaced one by one.

    Raises:
        ValueError: an unknown key, a value that transformers refuses, or one with which the model would have other weights: they
            would be drawn at random, or left out.
    """
    if not overrides:
        return config
    fields = config.to_dict()
    _replace(fields, overrides, KEY, getattr(config, "attribute_map", {}))
    try:
        changed = type(config).from_dict(fields)
    except Exception as error:  # transformers' checks raise many kinds
        raise ValueError(f"{KEY}: transformers refuses it: {' '.join(str(error).split())}") from error
    before, after = (_weights(one, trust_remote_code) for one in (config, changed))
    if before != after:
        raise ValueError(f"{KEY} ({shown(dict(overrides))}): {_difference(before, after)}")
    return changed


def _replace(fields: dict[str, Any], overrides: Mapping[str, Any], inside: str, other_names: Mapping[str, str]) -> None:
    """Put `overrides` into `fields`. `other_names`: names that a family has for keys that all families have."""
    for given, value in overrides.items():
        key, here = other_names.get(given, given), f"{inside}.{given}"
        if key in ELSEWHERE:
            raise ValueError(f"{here} ({shown(value)}): {ELSEWHERE[key]}")
        if key not in fields:
            parts = [name for name, part in fields.items() if isinstance(part, Mapping) and key in part]
            meant = f"; did you mean {f'{inside}.{parts[0]}.{key}'!r}?" if parts else did_you_mean(key, fields)
            raise ValueError(f"{here}: unknown key (value {shown(value)}){meant}")
        if isinstance(fields[key], dict):
            if not isinstance(value, Mapping):
                raise ValueError(f"{here}: must be a mapping, got {shown(value)}")
            _replace(fields[key], value, here, {})
        else:
            fields[key] = value


def _weights(config: Any, trust_remote_code: bool) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight, by name; one that is tied to another has one name."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(deepcopy(config), trust_remote_code=trust_remote_code)
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


def _difference(before: Mapping[str, tuple[int, ...]], after: Mapping[str, tuple[int, ...]]) -> str:
    """Say in which weight a model differs first from one that is saved."""
    for name, shape in before.items():
        if name not in after:
            return f"the saved model has {name}, and this one would have none"
        if after[name] != shape:
            return f"{name} is {list(shape)} in the saved model, and would be {list(after[name])}"
    added = next(name for name in after if name not in before)
    return f"the model would have {added}, which the saved one does not have"
