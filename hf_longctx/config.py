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
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, ValidationInfo, field_validator

EMBEDDED_MODEL = "embedded:smollm2-135m"
EMBEDDED_DATA = "embedded:python-sources"
FILE_KINDS = (".json", ".jsonl", ".parquet")

KeyPath = tuple[str, ...]


class ConfigError(ValueError):
    """Every mistake of one configuration, one line each."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class ModelConfig(Section):
    """Which model is trained: pretrained weights (`path`) or a new, randomly initialised model (`random_init`)."""

    path: str | None = Field(default=None, min_length=1)
    """a directory made by save_pretrained, a hub id, or embedded:smollm2-135m"""
    random_init: dict[str, Any] | None = Field(default=None, validate_default=True)
    """keys of a transformers model configuration, model_type among them"""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """of the weights; training.bf16 adds autocast on top (small updates round away in pure bfloat16)"""
    trust_remote_code: bool = False
    """run Python code that comes with the model"""

    @field_validator("path")
    @classmethod
    def _known_embedded(cls, path: str | None) -> str | None:
        if path and path.startswith("embedded:") and path != EMBEDDED_MODEL:
            raise ValueError(f"the only embedded model is {EMBEDDED_MODEL}, got {path!r}")
        return path

    @field_validator("random_init")
    @classmethod
    def _one_source(cls, random_init: dict[str, Any] | None, info: ValidationInfo) -> dict[str, Any] | None:
        if "path" in info.data and (info.data["path"] is None) == (random_init is None):
            given = "neither" if random_init is None else "both"
            raise ValueError(
                "give exactly one of model.path (pretrained weights) and model.random_init (a new model), "
                f"got {given}; null unsets a key"
            )
        return random_init


class DataConfig(Section):
    """Which documents are trained on and evaluated."""

    train_split: str = "train"
    """the split trained on; files given without a split belong to it"""
    eval_split: str | None = None
    """the held-out split; null: no evaluation"""
    path: str | dict[str, list[str]] = Field(min_length=1)
    """embedded:python-sources, a directory made by save_to_disk, or json, jsonl or parquet files: one, a list, or a
    mapping from split to file(s). Relative to the current directory. Once validated: split -> list of files."""
    text_column: str | None = None
    """tokenised with the model's tokenizer; null: the documents are tokenised (input_ids, optionally labels)"""

    @field_validator("path", mode="before")
    @classmethod
    def _existing(cls, path: Any, info: ValidationInfo) -> str | dict[str, list[str]]:
        if isinstance(path, str) and path and (path == EMBEDDED_DATA or Path(path).is_dir()):
            return path
        if isinstance(path, str) and path.startswith("embedded:"):
            raise ValueError(f"the only embedded data set is {EMBEDDED_DATA}, got {path!r}")
        given = path if isinstance(path, dict) else {info.data.get("train_split", "train"): path}
        by_split = {split: [files] if isinstance(files, str) else files for split, files in given.items()}
        for split, files in by_split.items():
            if not (isinstance(split, str) and isinstance(files, list) and files):
                raise ValueError(f"must be a path, a non-empty list of paths, or split -> path(s), got {path!r}")
            for file in files:
                if not (isinstance(file, str) and Path(file).suffix in FILE_KINDS and Path(file).is_file()):
                    raise ValueError(
                        f"must be {EMBEDDED_DATA}, an existing directory, or existing files that end in "
                        f"{', '.join(FILE_KINDS)}, got {file!r} (relative to {Path.cwd()})"
                    )
        for name in ("train_split", "eval_split"):
            split = info.data.get(name)
            if split is not None and split not in by_split:
                raise ValueError(
                    f"gives no files for data.{name} ({split!r}), only for {', '.join(map(repr, by_split))}"
                )
        return by_split


class LongctxConfig(Section):
    """Documents to ranks: arguments of LongContextPlugin. What is null, the plugin decides (or its environment)."""

    capacity: int = Field(ge=0)
    """tokens that one rank holds in one micro-batch; a document of s tokens is split over s / capacity ranks or more. 0: what
    the device's memory holds"""
    global_batch_documents: int | None = Field(default=None, gt=0)
    """documents per optimizer step, all ranks together"""
    global_batch_tokens: int | None = Field(default=None, gt=0)
    """tokens per optimizer step, all ranks together: a batch is closed before exceeding it"""
    long_documents: Literal["error", "truncate", "split"] | None = None
    """what becomes of documents longer than longest_document: refused, cut off, or made into several documents"""
    longest_document: int | None = Field(default=None, gt=1)
    """tokens; null: what all ranks together hold at first launch"""
    loss_chunk_tokens: int | None = Field(default=None, gt=0)
    """tokens whose logits exist at the same time in the cross-entropy"""
    ulysses_degree: int | None = Field(default=None, gt=0)
    """most ranks among which the heads of a document are split; it must divide the attention heads"""
    keep_last_slice: bool | None = None
    """keep the keys and values received last for backward: one exchange less, for memory"""
    planner: Literal["hdp", "static_cp", "dp_packing", "bytescale_naive", "bytescale_balanced"] | None = None
    """who holds what: ours, or one of the ways it is compared with"""
    kernel: (
        Literal["auto", "flash_attn_3", "flash_attn_4", "flash_attn_2", "cuda_varlen", "cpu_flash", "reference"] | None
    ) = None
    """attention kernel; auto takes the fast one of the device, and never a slow one silently"""
    ranks_per_node: int | None = Field(default=None, gt=0)
    """ranks on each machine, where the launcher does not say"""
    profile: str | None = Field(default=None, min_length=1)
    """file that `hf-longctx profile` wrote on this hardware; null: a preset's speeds"""
    recalibrate_steps: int | None = Field(default=None, ge=0)
    """steps after which ranks agree anew on how long things take, from what was measured; 0: never"""
    exchange_timeout_seconds: float | None = Field(default=None, gt=0, strict=False)
    """how long a rank waits for another that lives but does not come"""

    @field_validator("global_batch_tokens")
    @classmethod
    def _one_batch_size(cls, tokens: int | None, info: ValidationInfo) -> int | None:
        documents = info.data.get("global_batch_documents")
        if tokens is not None and documents is not None:
            raise ValueError(
                f"longctx.global_batch_documents ({documents}) and longctx.global_batch_tokens ({tokens}) both set the "
                "global batch: keep one, and set the other to null"
            )
        return tokens


class Config(Section):
    """A whole run."""

    model: ModelConfig
    """the model to train"""
    data: DataConfig
    """the documents to train on"""
    longctx: LongctxConfig
    """how documents are spread over ranks"""
    training: dict[str, Any] = {}
    """fields of transformers.TrainingArguments"""


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
            if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
                break
            section = annotation
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

    types = get_type_hints(TrainingArguments)
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
    for key in values:
        if key not in valid:
            problems.append(
                ((*key_path, str(key)), _unknown(str(key), valid, f"transformers' {model_type} configuration"))
            )
