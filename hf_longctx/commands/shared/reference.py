"""The keys of a configuration as a JSON schema for editors, and as the Markdown tables of docs/settings.md.

Both are made of the pydantic models of the sections and the types of transformers.TrainingArguments, so that they say what is
checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hf_longctx.settings import (
    Config,
    DataConfig,
    LongctxConfig,
    LoraSection,
    ModelConfig,
    RopeScalingSection,
    SourceSection,
)
from hf_longctx.settings.data import SourceKeys
from hf_longctx.settings.fields import SIZE, TOKENS_MARK

DIALECT = "https://json-schema.org/draft/2020-12/schema"
TABLES: tuple[tuple[str, Any], ...] = (
    ("model", ModelConfig),
    ("model.lora", LoraSection),
    ("model.rope_scaling", RopeScalingSection),
    ("data", DataConfig),
    ("data.sources", SourceSection),
    ("longctx", LongctxConfig),
)
LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a whole file. An editor completes and checks keys with it:  # yaml-language-server:
    $schema=schema.json"""
    from pydantic import TypeAdapter
    from pydantic.errors import PydanticUserError

    from hf_longctx.settings.training import choices_of, field_types

    made = Config.model_json_schema() | {"$schema": DIALECT, "title": "hf_longctx"}
    settings = made["$defs"]["LongctxConfig"]["properties"]
    for name, setting in settings.items():  # null leaves a setting out, whatever its type
        about = {key: setting.pop(key) for key in ("description", "default", "title") if key in setting}
        kinds = [kind for kind in setting.get("anyOf", [setting]) if kind != {"type": "null"}]
        settings[name] = about | {"anyOf": [*kinds, {"type": "null"}]}
    fields: dict[str, Any] = {}
    for name, kind in field_types().items():
        if names := choices_of(kind):
            fields[name] = {"enum": [*names, False] if "no" in names else names}  # YAML reads no as false
            continue
        try:
            fields[name] = TypeAdapter(kind).json_schema()
        except PydanticUserError:  # a class that is no plain data: a file cannot hold it
            fields[name] = {"type": "null"}
        made["$defs"] |= fields[name].pop("$defs", {})
    training = made["properties"]["training"]
    made["properties"]["training"] = {
        "description": training["description"],
        "anyOf": [{"type": "object", "properties": fields, "additionalProperties": False}, {"type": "null"}],
    }
    return _with_units(made)


def _with_units(schema: Any) -> Any:
    """Let numbers of tokens be written with a unit, as 8K."""
    if isinstance(schema, list):
        return [_with_units(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _with_units(value) for key, value in schema.items() if key != TOKENS_MARK}
    if TOKENS_MARK not in schema:
        return inner
    about = {key: inner.pop(key) for key in ("description", "default", "title") if key in inner}
    return about | {"anyOf": [inner, {"type": "string", "pattern": f"^{SIZE.pattern}$"}]}


def tables() -> str:
    """Markdown: one table for each section."""
    blocks = []
    for name, section in TABLES:
        schema = section.model_json_schema()
        shared = set(SourceKeys.model_fields) if section is SourceSection else set()
        rows = [
            f"| `{key}` | {_values(field, schema)} | {_default(key, section)} | {_cell(field['description'])} |"
            for key, field in schema["properties"].items()
            if key not in shared
        ]
        also = (
            "\n\nAnd all keys of `data` that say how rows become documents, from `name` to `weight`." if shared else ""
        )
        head = f"### `{name}`\n\n{_cell(schema['description'])}\n\n| key | values | default | meaning |\n|---|---|---|---|\n"
        blocks.append(head + "\n".join(rows) + also)
    return "\n\n".join(blocks)


def _default(key: str, section: Any) -> str:
    field = section.model_fields[key]
    if field.is_required():
        return "required"
    if field.default is None:
        return "none"
    shown = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
    return f"`{shown}`"


def _values(field: dict[str, Any], schema: dict[str, Any]) -> str:
    """Types and limits, for people."""
    return _cell(" or ".join(dict.fromkeys(_kinds(field, schema))))


def _kinds(field: dict[str, Any], schema: dict[str, Any]) -> Iterator[str]:
    if "$ref" in field:
        yield "mapping"
    elif "anyOf" in field:
        for alternative in field["anyOf"]:
            yield from _kinds(alternative, schema)
    elif "enum" in field or "const" in field:
        yield ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    elif field.get("type") == "array":
        yield f"list of {' or '.join(_kinds(field['items'], schema))}"
    elif field.get("type") == "object":
        yield "mapping"
    elif field.get("type") == "null":
        yield "null"
    else:
        kind = {"string": "text", "boolean": "true, false"}.get(field.get("type", ""), field.get("type", "anything"))
        limits = [f"{sign} {field[name]:g}" for name, sign in LIMITS.items() if name in field]
        yield " ".join([kind, ", ".join(limits)]).strip()


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
