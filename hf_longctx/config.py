"""YAML file + command-line overrides -> Config, or one ConfigError that shows every mistake at once.

1. The file is composed into YAML nodes, which know their lines: key path -> line, and keys written twice are found.
2. Overrides `section.key=value` (value in YAML) replace what the file says.
3. The sections `model`, `data` and `longctx` are validated by pydantic models that forbid unknown keys (settings/);
   `training` and `model.random_init` against the fields of transformers' own classes; at last the plugin checks what it is
   given by `longctx` and by the environment.
4. All problems are shown together, each in one line: where it stands, the key, the rule, the value, the nearest valid one.

Nothing is loaded but names and types, and nothing is sent between ranks. torch and transformers are imported only in step 3,
so that importing this module is quick.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from hf_longctx.settings import EMBEDDED_DATA, EMBEDDED_MODEL, FILE_KINDS, Config, Section
from hf_longctx.settings.data import is_saved
from hf_longctx.settings.fields import broken_rule, did_you_mean, shown
from hf_longctx.settings.longctx import LongContextPlugin, LongctxConfig, PluginError
from hf_longctx.settings.random_init import check_random_init
from hf_longctx.settings.training import check_training, field_types

__all__ = [
    "EMBEDDED_DATA",
    "EMBEDDED_MODEL",
    "FILE_KINDS",
    "Config",
    "ConfigError",
    "Resolved",
    "load_config",
    "resolve",
]

KeyPath = tuple[str, ...]
Problems = list[tuple[KeyPath, str]]

MERGE = "tag:yaml.org,2002:merge"
YAML_SIGNS = tuple("*&@%`")
"""Signs that plain text in YAML must not begin with, though wildcards and names may."""


class ConfigError(ValueError):
    """Every mistake of one configuration, one line each."""


@dataclass(frozen=True)
class Resolved:
    """A configuration, and where it is from."""

    config: Config
    origin: dict[KeyPath, str]
    """of every value that was given: `line 3`, or `override 'longctx.capacity=4096'`"""


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> Config:
    """Reads `path`, applies `overrides` ("section.key=value", value in YAML; the last one wins) and validates.

    Raises:
        ConfigError: with every problem found: unknown keys, wrong types, missing, repeated and conflicting ones.
    """
    return resolve(path, overrides).config


def resolve(path: str | Path, overrides: Iterable[str] = ()) -> Resolved:
    """Read a configuration as `load_config` does, with the line or override that each value comes from."""
    origin: dict[KeyPath, str] = {}
    problems: Problems = []
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
    sections = dict(_valid_sections(data))
    plugin = _plugin(sections.pop("longctx", None), problems)
    for name, section in sections.items():
        problems += [((name, *key.split(".")), rule) for key, rule in section.problems()]
    if config:
        problems += _broken_across_sections(config, training)
    problems += list(_refused_by_training(config, plugin, training, problems))
    if problems or config is None or plugin is None:
        raise ConfigError("\n  ".join([f"{path}: {len(problems)} problem(s)", *located(problems, origin)]))
    longctx = LongctxConfig(**plugin.given())
    return Resolved(config.model_copy(update={"training": training, "longctx": longctx}), origin)


def _valid_sections(data: dict[str, Any]) -> Iterator[tuple[str, Section]]:
    """Yield the sections that are valid by themselves, also where others are not."""
    for name in ("model", "data", "longctx"):
        with suppress(ValidationError):
            kind: Any = Config.model_fields[name].annotation
            yield name, kind.model_validate(data.get(name))


def _plugin(longctx: Section | None, problems: Problems) -> LongContextPlugin | None:
    """Complete the section `longctx` by the environment, and check it with its profile; None where something is wrong."""
    if longctx is None:
        return None
    try:
        return LongContextPlugin(**longctx.given())
    except PluginError as error:
        problems += [(("longctx", key) if key else ("longctx",), rule) for key, rule in error.problems]
        return None


def _broken_across_sections(config: Config, training: dict[str, Any]) -> Iterator[tuple[KeyPath, str]]:
    """Check the rules that involve more than one section."""
    if training.get("eval_strategy", "no") != "no" and config.data.held_out is None:
        yield (
            ("training", "eval_strategy"),
            f"{training['eval_strategy']!r} needs documents: set data.eval_split, or data.eval_fraction",
        )
    if config.longctx.loraplus_lr_ratio is not None and config.model.lora is None:
        yield (
            ("longctx", "loraplus_lr_ratio"),
            f"{config.longctx.loraplus_lr_ratio:g} needs model.lora: it is how much faster the B of adapters learns than their A",
        )
    if training.get("fp16") and config.model.dtype == "float16":
        yield ("model", "dtype"), "'float16' beside training.fp16: gradients could not be scaled; valid: float32"
    if config.model.path is None:
        need = "model.random_init has no tokenizer: give documents with input_ids"
        for number, source in enumerate(config.data.all_sources):
            where = _source(config, number)
            if source.text_column is not None:
                yield (*where, "text_column"), f"{source.text_column!r} must be tokenised, and {need}"
            elif source.kind not in ("auto", "tokens"):
                yield (*where, "kind"), f"{source.kind!r} must be tokenised, and {need}"


def _refused_by_training(
    config: Config | None, plugin: LongContextPlugin | None, training: dict[str, Any], known: Problems
) -> Iterator[tuple[KeyPath, str]]:
    """Check what training cannot have, as far as a file says it, by the trainer's own checks. Documents are not read; saved ones
    are opened for the names of their columns. Ranks compute on CPUs where the file says so."""
    from hf_longctx.training.refusals import problems
    from hf_longctx.training.request import PLUGIN_FIELDS, Request, stated

    told = {key_path for key_path, _ in known}
    for key, rule in problems(Request(stated(training), plugin, on_cpu=bool(training.get("use_cpu")))):
        key_path = ("longctx" if key in PLUGIN_FIELDS else "training", *key.split("."))
        if key_path not in told:
            yield key_path, rule
    if config is not None:
        yield from _saved_documents(config)


def _source(config: Config, number: int) -> KeyPath:
    return ("data",) if config.data.sources is None else ("data", "sources", str(number))


def _saved_documents(config: Config) -> Iterator[tuple[KeyPath, str]]:
    """Check documents that are trained on where they lie."""
    if not any(isinstance(source.path, str) and is_saved(Path(source.path)) for source in config.data.all_sources):
        return
    from hf_longctx.run_documents import saved_problems

    for number, problem in saved_problems(config.data):
        yield (*_source(config, number), "path"), problem


def located(problems: Problems, origin: dict[KeyPath, str]) -> list[str]:
    """One line per problem, in the order of the file. A missing key has no line of its own: its section's is shown."""
    order = {key_path: position for position, key_path in enumerate(origin)}
    lines = []
    for key_path, message in problems:
        prefixes = [key_path[:length] for length in range(len(key_path), 0, -1)]
        nearest = next((prefix for prefix in prefixes if prefix in origin), None)
        parts = [origin[nearest]] if nearest else []
        parts += [".".join(key_path)] if key_path else []
        lines.append((order[nearest] if nearest else len(order), ": ".join([*parts, message])))
    return [line for _, line in sorted(lines, key=lambda item: item[0])]


def read_yaml(path: Path, origin: dict[KeyPath, str], problems: Problems) -> Any:
    """Read what the file holds; notes each key's line in `origin`, and in `problems` the keys that are written twice.

    Raises:
        ConfigError: it cannot be read, or is not valid YAML.
    """

    def walk(node: yaml.Node, key_path: KeyPath) -> None:
        if not isinstance(node, yaml.CollectionNode) or node in walked:
            return
        walked.append(node)
        if isinstance(node, yaml.SequenceNode):
            for index, value in enumerate(node.value):
                origin[*key_path, str(index)] = f"line {value.start_mark.line + 1}"
                walk(value, (*key_path, str(index)))
            return
        for key, value in node.value:
            child = (*key_path, str(key.value))
            if key.tag == MERGE:
                continue
            line = f"line {key.start_mark.line + 1}"
            if child in origin:
                problems.append((child, f"written twice, here and in {line}: keep one"))
            else:
                origin[child] = line
            walk(value, child)
        for key, value in node.value:
            for source in [value, *value.value] if key.tag == MERGE else ():  # <<: *one, or <<: [*one, *other]
                for inner, _ in source.value if isinstance(source, yaml.MappingNode) else ():
                    origin.setdefault((*key_path, str(inner.value)), f"line {inner.start_mark.line + 1}")

    walked: list[yaml.Node] = []  # anchors may make a node its own descendant
    try:
        loader = yaml.SafeLoader(path.read_bytes())
        node = loader.get_single_node()
        if node is None:
            return {}
        walk(node, ())
        return loader.construct_document(node)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist, for instance
        mark = getattr(error, "problem_mark", None)
        where = f"{path}: line {mark.line + 1}" if mark else f"{path}"
        raise ConfigError(f"{where}: not valid YAML: {' '.join(_yaml_rule(error).split())}") from error


def _read(path: Path, origin: dict[KeyPath, str], problems: Problems) -> dict[str, Any]:
    """Read the mapping in the file, as `read_yaml` does."""
    data = read_yaml(path, origin, problems)
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: must hold a mapping with the keys {', '.join(Config.model_fields)}, got {shown(data)}"
        )
    return data


def _yaml_rule(error: Exception) -> str:
    parts = (getattr(error, "problem", None), getattr(error, "context", None))
    return ", ".join(filter(None, parts)) or str(error)


def _apply_override(override: str, data: dict[str, Any], origin: dict[KeyPath, str], problems: Problems) -> None:
    source = f"override {override!r}"
    dotted, equals, text = override.partition("=")
    *parents, last = key_path = tuple(dotted.split("."))
    if not (equals and all(key_path)):
        quoted = "" if equals else "; a value with spaces or wildcards stands in quotes: 'data.path=[a.txt, b.txt]'"
        problems.append(((), f"{source}: must be section.key=value, for instance training.max_steps=10{quoted}"))
        return
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:
        quoted = f"; write a text that begins so in quotes: '{dotted}=\"{text}\"'" if text[:1] in YAML_SIGNS else ""
        problems.append(((), f"{source}: the value is not valid YAML: {_yaml_rule(error)}{quoted}"))
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

    def note(value: Any, key_path: KeyPath) -> None:
        origin[key_path] = source
        for key, inner in value.items() if isinstance(value, dict) else ():
            note(inner, (*key_path, str(key)))

    note(value, key_path)


def _schema_problems(error: ValidationError) -> Problems:
    """pydantic's errors in our words. A key reported as a misspelling of another explains that the other is missing."""
    problems, missing = [], {}
    misspelled: set[KeyPath] = set()
    for detail in error.errors(include_url=False):
        key_path = tuple(str(part) for part in detail["loc"])
        fields = _section_at(key_path[:-1]).model_fields
        given = detail["input"]
        if detail["type"] == "extra_forbidden":
            near = re.search(r"did you mean '(.*)'", did_you_mean(key_path[-1], fields))
            problems.append((key_path, _unknown(key_path, given, fields)))
            misspelled.add((*key_path[:-1], near[1] if near else ""))
        elif detail["type"] == "missing":
            missing[key_path] = f"missing: {' '.join((fields[key_path[-1]].description or '').split())}"
        else:
            problems.append((key_path, broken_rule(detail)))
    if misspelled & {("model", "path"), ("model", "random_init")}:  # one of them is there, and says so itself
        problems = [problem for problem in problems if problem[0] != ("model", "random_init")]
    return problems + [(key_path, message) for key_path, message in missing.items() if key_path not in misspelled]


def _section_at(key_path: KeyPath) -> type[BaseModel]:
    """The model that checks what stands at a path; numbers in it are places in a list."""
    section: type[BaseModel] = Config
    for part in key_path:
        inner = _model_in(section.model_fields[part].annotation) if part in section.model_fields else None
        section = inner or section
    return section


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if inside := get_args(annotation):
        return next(filter(None, map(_model_in, inside)), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _unknown(key_path: KeyPath, given: Any, valid: Iterable[str], owner: str | None = None) -> str:
    """Return the message about an unknown key, with the valid ones, or with the `owner` that documents them if there are many."""
    key, valid = key_path[-1], list(valid)
    problem = f"unknown key (value {shown(given)})"
    if near := did_you_mean(key, valid):
        return problem + near
    homes = {name: _section_at((name,)).model_fields for name in ("model", "data", "longctx")}
    homes |= {"training": field_types()} if owner is None else {}
    if home := next((name for name, keys in homes.items() if key in keys and name != key_path[0]), None):
        return f"{problem}; it belongs to the section {home}: did you mean '{home}.{key}'?"
    return f"{problem}; valid are {f'the fields of {owner}' if owner else ', '.join(valid)}"


def _check_training(values: Any, problems: Problems) -> dict[str, Any]:
    if not isinstance(values, dict) or not values:
        return {}
    return check_training(
        {str(key): value for key, value in values.items()},
        lambda key, rule: problems.append((("training", key), rule)),
        lambda key, valid: _unknown(("training", key), values.get(key), valid, "transformers.TrainingArguments"),
    )


def _check_random_init(model: Any, problems: Problems) -> None:
    values = model.get("random_init") if isinstance(model, dict) else None
    if not isinstance(values, dict):
        return
    here = ("model", "random_init")
    check_random_init(
        values,
        lambda key, rule: problems.append(((*here, key) if key else here, rule)),
        lambda key, valid, owner: _unknown((*here, key), values.get(key), valid, owner),
    )
