"""A tiny configuration of a user, for a model that the rule (tiny_config.py) makes none of: its sizes, the model's switches."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_longctx.certificate.field_kinds import Kind, kind_of
from hf_longctx.certificate.kept_certificates import NAMES_ONLY
from hf_longctx.certificate.tiny_config import given_values
from hf_longctx.certificate.tiny_sizes import LABELS


def given_configuration(path: str | Path, config: Any) -> Any:
    """Return the configuration of a model with the fields that a JSON file has, of the same class.

    Raises:
        ValueError: the file is no JSON object, has a field that the model's configuration lacks, changes a switch (a bool, a
            name, whether there is a value at all, the kinds of layers), or the class refuses it.
    """
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} holds a {type(fields).__name__}: a configuration is an object, as in config.json")
    before = config.to_dict()
    try:
        tiny = type(config).from_dict(_merged(given_values(config), fields))
    except Exception as error:  # whatever a class says of its fields
        raise ValueError(f"{path} makes no {type(config).__name__}: {type(error).__name__}: {error}") from error
    if unknown := sorted(set(fields) - set(before)):
        raise ValueError(f"{path} has fields that {type(config).__name__} lacks: {', '.join(unknown)}")
    if changed := list(_changed_switches(before, tiny.to_dict())):
        raise ValueError(
            f"{path} changes what is computed, and its certificate would say nothing of the model: {'; '.join(changed)}. Valid: "
            "other sizes, fewer layers of the same kinds"
        )
    return tiny


def _merged(values: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, value in fields.items():
        inner = values.get(name)
        merged[name] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def _changed_switches(before: dict[str, Any], after: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, value in before.items():
        if name in NAMES_ONLY:
            continue
        new, where = after.get(name), f"{path}{name}"
        if isinstance(value, dict) and isinstance(new, dict) and name not in LABELS:
            yield from _changed_switches(value, new, f"{where}.")
        elif kind_of(name) is not Kind.TOKEN_ID and _switch(value) != _switch(new):
            yield f"{where} is {value!r} in the model, {new!r} here"


def _switch(value: Any) -> Any:
    """Return what of a field's value is no size: lists stand for the kinds of layers in them."""
    if isinstance(value, list | tuple):
        return {_switch(part) for part in value if not isinstance(part, list | dict)}
    return value if value is None or isinstance(value, bool | str) else "a value"
