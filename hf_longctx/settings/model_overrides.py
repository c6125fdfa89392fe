"""`model.config`: what a pretrained model's config.json is to say otherwise, such as the dropout of attention, or whether experts
are balanced by a loss of their own. transformers is imported when it is used."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from hf_longctx.settings.fields import EXPONENT, did_you_mean, shown

ELSEWHERE = {
    "model_type": "another kind of model has other weights: give its model.path",
    "architectures": "another kind of model has other weights: give its model.path",
    "auto_map": "code that comes with a model runs with model.trust_remote_code: true",
    "dtype": "set model.dtype",
    "torch_dtype": "set model.dtype",
    "quantization_config": "weights of 4 bits are asked for by model.load_in_4bit: true",
    "rope_scaling": "set model.rope_scaling, or keys of model.config.rope_parameters",
    "eos_token_id": "set model.eos_token, which texts and answers end with too",
}
"""Keys that are refused here -> the setting to use instead."""
KEY = "model.config"


def overridden(
    config: Any, overrides: Mapping[str, Any], *, path: str | None = None, trust_remote_code: bool = False
) -> Any:
    """Return a configuration as it would be read from a config.json that said all of `overrides` too.

    Args:
        config: transformers' configuration of a model that is to be loaded.
        overrides: values by key. Those of a mapping, such as a part's configuration, are replaced one by one.
        path: where it was read from. What transformers derives of other keys, such as the kinds of layers, is derived anew,
            unless the file says it; None: all of `config` counts as said.

    Raises:
        ValueError: an unknown key, a value that transformers refuses, or one with which the model would have other weights: they
            would be drawn at random, or left out.
    """
    if not overrides:
        return config
    fields, known = _said(config, path), config.to_dict()
    _replace(fields, overrides, known, config, KEY)
    try:
        changed = type(config).from_dict(fields)
        for name in ("_name_or_path", "_commit_hash"):  # weights and code are of the same revision
            if hasattr(config, name):
                setattr(changed, name, getattr(config, name))
        before, after = (_weights(one, trust_remote_code) for one in (config, changed))
    except Exception as error:  # transformers' checks raise many kinds
        raise ValueError(
            f"{KEY} ({shown(dict(overrides))}): transformers refuses it: {type(error).__name__}: {' '.join(str(error).split())}"
        ) from error
    if before != after:
        raise ValueError(f"{KEY} ({shown(dict(overrides))}): {_difference(before, after)}")
    return changed


def _said(config: Any, path: str | None) -> dict[str, Any]:
    """Return what config.json says; all fields where that is not what `config` was read from."""
    from transformers import PreTrainedConfig

    if path is not None:
        fields, _ = PreTrainedConfig.get_config_dict(path)
        if type(config).from_dict(deepcopy(fields)).to_dict() == config.to_dict() | {"_name_or_path": ""}:
            return dict(fields)
    return dict(config.to_dict())


def _replace(
    fields: dict[str, Any], overrides: Mapping[str, Any], known: Mapping[str, Any], config: Any, inside: str
) -> None:
    """Put `overrides` into what a file says.

    Args:
        known: all fields that there are, with their values; those of a mapping that is no part's configuration may be new.
        config: the part that these are fields of; None: they are entries of a mapping.
    """
    aliases = getattr(config, "attribute_map", {})
    for given, value in overrides.items():
        key, here = aliases.get(given, given), f"{inside}.{given}"
        if config is not None and key in ELSEWHERE:
            raise ValueError(f"{here} ({shown(value)}): {ELSEWHERE[key]}")
        if config is not None and key not in known:
            raise ValueError(f"{here}: unknown key (value {shown(value)}){_meant(key, known, config, inside)}")
        present = known.get(key)
        if isinstance(present, Mapping) and value is not None:
            if not isinstance(value, Mapping):
                raise ValueError(f"{here}: must be a mapping, got {shown(value)}")
            part = getattr(config, key, None)
            # What a file leaves out of a part is its class's default; a mapping, such as that of rotary positions, is one whole.
            fields[key] = dict(fields.get(key) or (present if isinstance(part, Mapping) or part is None else {}))
            _replace(fields[key], value, present, None if isinstance(part, Mapping) else part, here)
        else:
            fields[key] = _as_number(value, present)


def _as_number(value: Any, present: Any) -> Any:
    """Return a number for what YAML 1.1 takes for text, 1e-3, and a float where there was one."""
    if isinstance(value, str) and not isinstance(present, str) and EXPONENT.fullmatch(value):
        return float(value)
    return float(value) if isinstance(present, float) and type(value) is int else value


def _meant(key: str, known: Mapping[str, Any], config: Any, inside: str) -> str:
    """Say where a key is that is none of these: in the language model first, or in another part."""
    text = config.get_text_config(decoder=True)
    parts = [name for name, part in known.items() if isinstance(part, Mapping) and key in part]
    parts.sort(key=lambda name: getattr(config, name, None) is not text)
    return f"; did you mean {f'{inside}.{parts[0]}.{key}'!r}?" if parts else did_you_mean(key, known)


def _weights(config: Any, trust_remote_code: bool) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight and saved buffer, by name; one that is tied to another has one name."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(deepcopy(config), trust_remote_code=trust_remote_code)
    weights = dict(model.named_parameters())
    every_name = dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: buffer for name, buffer in model.state_dict().items() if name not in every_name}
    return {name: tuple(tensor.shape) for name, tensor in (weights | buffers).items()}


def _difference(before: Mapping[str, tuple[int, ...]], after: Mapping[str, tuple[int, ...]]) -> str:
    """Say in which weight a model differs first from one that is saved."""
    for name, shape in before.items():
        if name not in after:
            return f"the saved model has {name}, and this one would have none"
        if after[name] != shape:
            return f"{name} is {list(shape)} in the saved model, and would be {list(after[name])}"
    added = next(name for name in after if name not in before)
    return f"the model would have {added}, which the saved one does not have"
