"""YAML file + command-line overrides -> Config, or one ConfigError that shows every mistake at once.

1. The file is composed into YAML nodes, which know their lines: key path -> line, and keys written twice are found.
2. Overrides `section.key=value` (value in YAML) replace what the file says.
3. The sections `model`, `data` and `longctx` are validated by pydantic models that forbid unknown keys; `training` and
   `model.random_init` against the fields of transformers' own classes.
4. All problems are shown together, each with its line (or override), the rule, and the nearest valid spelling.

Nothing is loaded but names and types, and nothing is sent between ranks. transformers is imported only in step 3, so
that importing this module is quick.
"""

import dataclasses
import difflib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from hf_longctx.sections import EMBEDDED_DATA, EMBEDDED_MODEL, FILE_KINDS, Config, DataConfig

__all__ = ["EMBEDDED_DATA", "EMBEDDED_MODEL", "FILE_KINDS", "Config", "ConfigError", "load_config"]

KeyPath = tuple[str, ...]

SEEDS = 2**32
"""Random generators take seeds from 0 up to here."""


class ConfigError(ValueError):
    """Every mistake of one configuration, one line each."""


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Reads `path`, applies `overrides` ("section.key=value", value in YAML; the last one wins) and validates.

    Raises:
        ConfigError: with every problem found: unknown keys, wrong types, missing, repeated and conflicting ones.
    """
    origin: dict[KeyPath, str] = {}
    problems: list[tuple[KeyPath, str]] = []
    data = _read(Path(path), origin, problems)
    for override in overrides:
        _apply_override(override, data, origin, problems)
    config = None
    try:
        config = Config.model_validate(data)
    except ValidationError as error:
        problems += _schema_problems(error)
    training = _check_training(data.get("training"), problems)
    _check_random_init(data.get("model"), problems)
    if config and training.get("eval_strategy", "no") != "no" and config.data.eval_split is None:
        problems.append((("training", "eval_strategy"), "evaluation needs documents: set data.eval_split"))
    with suppress(ValidationError):  # also where another section is wrong
        problems += [
            (("data", key), message) for key, message in DataConfig.model_validate(data.get("data")).problems()
        ]
    if config and config.data.text_column is not None and config.model.path is None:
        problems.append((("data", "text_column"), "model.random_init has no tokenizer: give documents with input_ids"))
    if problems or config is None:
        raise ConfigError("\n  ".join([f"{path}: {len(problems)} problem(s)", *_located(problems, origin)]))
    return config.model_copy(update={"training": training})


def _located(problems: list[tuple[KeyPath, str]], origin: dict[KeyPath, str]) -> list[str]:
    """One line per problem, in the order of the file. A missing key has no line of its own: its section's is shown."""
    order = {key_path: position for position, key_path in enumerate(origin)}
    located = []
    for key_path, message in problems:
        prefixes = [key_path[:length] for length in range(len(key_path), 0, -1)]
        nearest = next((prefix for prefix in prefixes if prefix in origin), None)
        parts = [origin[nearest]] if nearest else []
        parts += [".".join(key_path)] if key_path else []
        located.append((order[nearest] if nearest else len(order), ": ".join([*parts, message])))
    return [line for _, line in sorted(located, key=lambda item: item[0])]


def _read(path: Path, origin: dict[KeyPath, str], problems: list[tuple[KeyPath, str]]) -> dict[str, Any]:
    """The mapping in the file; notes each key's line and the keys that are written twice."""

    def walk(node: yaml.Node, key_path: KeyPath) -> None:
        if not isinstance(node, yaml.MappingNode) or node in walked:
            return
        walked.append(node)
        for key, value in node.value:
            child = (*key_path, str(key.value))
            line = f"line {key.start_mark.line + 1}"
            if child in origin:
                problems.append((child, f"written twice, here and in {line}: keep one"))
            else:
                origin[child] = line
            walk(value, child)

    walked: list[yaml.Node] = []  # anchors may make a node its own descendant
    try:
        loader = yaml.SafeLoader(path.read_bytes())
        data = {}
        if node := loader.get_single_node():
            walk(node, ())
            data = loader.construct_document(node)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist, for instance
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must hold a mapping with the keys {', '.join(Config.model_fields)}, got {data!r}")
    return data


def _apply_override(
    override: str, data: dict[str, Any], origin: dict[KeyPath, str], problems: list[tuple[KeyPath, str]]
) -> None:
    source = f"override {override!r}"
    dotted, equals, text = override.partition("=")
    *parents, last = key_path = tuple(dotted.split("."))
    if not (equals and all(key_path)):
        problems.append(((), f"{source}: must be section.key=value, for instance training.max_steps=10"))
        return
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        problems.append(((), f"{source}: the value is not valid YAML: {getattr(error, 'problem', error)}"))
        return
    for depth, key in enumerate(parents, start=1):
        if data.get(key) is None:
            data[key] = {}
        data = data[key]
        if not isinstance(data, dict):
            problems.append(((), f"{source}: {'.'.join(key_path[:depth])} is {data!r}, which holds no keys"))
            return
    data[last] = value
    for stale in [known for known in origin if known[: len(key_path)] == key_path]:
        del origin[stale]
    origin[key_path] = source


def _schema_problems(error: ValidationError) -> list[tuple[KeyPath, str]]:
    """pydantic's errors in our words. A key reported as a misspelling of another explains that the other is missing."""
    problems, missing = [], {}
    misspelled: set[KeyPath] = set()
    for detail in error.errors(include_url=False):
        key_path = tuple(str(part) for part in detail["loc"])
        section: type[BaseModel] = Config
        for part in key_path[:-1]:
            annotation = section.model_fields[part].annotation if part in section.model_fields else None
            kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
            inner = next((kind for kind in kinds if issubclass(kind, BaseModel)), None)
            if inner is None:
                break
            section = inner
        if detail["type"] == "extra_forbidden":
            problems.append((key_path, _unknown(key_path[-1], section.model_fields)))
            misspelled.add((*key_path[:-1], _nearest(key_path[-1], section.model_fields) or ""))
        elif detail["type"] == "missing":
            missing[key_path] = f"missing: {' '.join((section.model_fields[key_path[-1]].description or '').split())}"
        elif detail["type"] == "value_error":
            problems.append((key_path, str(detail["ctx"]["error"])))
        elif detail["type"] in ("model_type", "model_attributes_type"):
            problems.append((key_path, f"must be a mapping, got {detail['input']!r}"))
        else:
            problems.append((key_path, _wrong_value(detail["msg"], detail["input"])))
    return problems + [(key_path, message) for key_path, message in missing.items() if key_path not in misspelled]


def _wrong_value(rule: str, value: Any) -> str:
    return f"{rule.replace('Input should', 'must', 1)}, got {value!r}"


def _nearest(key: str, valid: Iterable[str]) -> str | None:
    return next(iter(difflib.get_close_matches(key, list(valid), n=1)), None)


def _unknown(key: str, valid: Iterable[str], owner: str | None = None) -> str:
    """`owner` documents the valid keys where they are too many to be listed."""
    if nearest := _nearest(key, valid):
        return f"unknown key; did you mean {nearest!r}?"
    return f"unknown key; valid are {f'the fields of {owner}' if owner else ', '.join(valid)}"


def _check_training(values: Any, problems: list[tuple[KeyPath, str]]) -> dict[str, Any]:
    """`values` in the types of TrainingArguments' fields: YAML reads 2e-4 as text and `no` as false."""
    if not isinstance(values, dict) or not values:
        return {}
    from transformers import TrainingArguments

    # Trainer's own type is text, and what people write is `true`: the newest checkpoint.
    types = get_type_hints(TrainingArguments) | {"resume_from_checkpoint": bool | str | None}
    fields = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    checked = {}
    for key, value in values.items():
        key_path = ("training", str(key))
        if key not in fields:
            problems.append((key_path, _unknown(str(key), fields, "transformers.TrainingArguments")))
            continue
        choices = [kind for kind in get_args(types[key]) if isinstance(kind, type) and issubclass(kind, Enum)]
        if choices and value is False:
            value = "no"
        adapter = TypeAdapter(choices[0] if choices else types[key])
        try:
            result = adapter.validate_python(value)
        except ValidationError as error:
            rule = " or ".join(dict.fromkeys(detail["msg"] for detail in error.errors()))
            problems.append((key_path, _wrong_value(rule, value)))
            continue
        if isinstance(value, bool) and not isinstance(result, bool):
            problems.append((key_path, _wrong_value("must be a number", value)))
            continue
        if key in ("seed", "data_seed") and isinstance(result, int) and not 0 <= result < SEEDS:
            problems.append((key_path, _wrong_value(f"must be from 0 to {SEEDS - 1}", value)))
            continue
        checked[key] = result.value if isinstance(result, Enum) else result
    return checked


def _check_random_init(model: Any, problems: list[tuple[KeyPath, str]]) -> None:
    """transformers keeps unknown configuration keys without a word: a misspelt size would train another model."""
    values = model.get("random_init") if isinstance(model, dict) else None
    if not isinstance(values, dict):
        return
    from transformers import CONFIG_MAPPING

    key_path = ("model", "random_init")
    model_type = str(values.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        nearest = _nearest(model_type, CONFIG_MAPPING)
        hint = f"did you mean {nearest!r}?" if nearest else "for instance 'llama' or 'mixtral'"
        message = f"must be a model type of transformers, got {values.get('model_type')!r}; {hint}"
        problems.append(((*key_path, "model_type"), message))
        return
    valid = CONFIG_MAPPING[model_type]().to_dict()
    unknown = [str(key) for key in values if key not in valid]
    for key in unknown:
        problems.append(((*key_path, key), _unknown(key, valid, f"transformers' {model_type} configuration")))
    if unknown:
        return
    try:
        config = CONFIG_MAPPING[model_type](**{key: value for key, value in values.items() if key != "model_type"})
    except Exception as error:  # transformers' checks raise many kinds
        problems.append((key_path, f"transformers refuses it: {' '.join(str(error).split())}"))
        return
    problems += [(key_path, message) for message in _impossible_sizes(config)]


def _impossible_sizes(config: Any) -> Iterator[str]:
    """What transformers lets pass and no model can be made of, or run."""

    def size(name: str) -> int:
        return getattr(config, name, None) or 0

    for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        if size(name) < 1:
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
