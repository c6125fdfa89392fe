"""Rules for keys, and a configuration that comes to be of them.

A table maps a key of theirs, or a pattern of keys with `*`, to

    To("training.seed")     it becomes this key of ours, perhaps by a function of its value
    Needless("why")         what it asks for happens here anyway, or nothing needs it
    Without("what")         there is no counterpart, and this is what to do instead
    Refuse("why")           another objective: nothing is written
    a function              of the migration and the value, which sets what it must, and notes it
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

KINDS = ("translated", "needless", "without")


@dataclass(frozen=True)
class To:
    """A key of ours."""

    path: str
    convert: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Needless:
    """Why nothing is to be done."""

    why: str


@dataclass(frozen=True)
class Without:
    """Advice for a key that has no counterpart: what to do instead."""

    instead: str


@dataclass(frozen=True)
class Refuse:
    """Why a configuration cannot be translated."""

    why: str


Rule = To | Needless | Without | Refuse | Callable[["Migration", Any], None]


@dataclass(frozen=True)
class Note:
    """What became of a key."""

    kind: str
    """one of KINDS"""
    key: str
    value: Any
    text: str
    """our key and its value; why; or what to do instead"""


@dataclass
class Migration:
    """A configuration of ours that comes to be, and what became of each key of theirs."""

    given: Mapping[str, Any]
    """theirs"""
    gpus: int = 1
    """processes that share a step: theirs count a batch for each"""
    config: dict[str, Any] = field(default_factory=lambda: {"model": {}, "data": {}, "longctx": {}, "training": {}})
    notes: list[Note] = field(default_factory=list)
    key: str = ""
    """of theirs, whose turn it is"""

    def set(self, path: str, value: Any) -> None:
        """Set a key of ours, and note that the key whose turn it is became it."""
        self.put(path, value)
        self.note("translated", f"{path}: {value}")

    def put(self, path: str, value: Any) -> None:
        """Set a key of ours."""
        *parents, last = path.split(".")
        section = self.config
        for name in parents:
            section = section.setdefault(name, {})
        section[last] = value

    def put_sources(self, sources: list[dict[str, Any]]) -> None:
        """Set where the documents are: keys of `data`, or of `data.sources` where there are several."""
        if len(sources) == 1:
            for key, setting in sources[0].items():
                self.put(f"data.{key}", setting)
        else:
            self.put("data.sources", sources)
        self.note("translated", f"data: {sources[0] if len(sources) == 1 else sources}")

    def get(self, path: str) -> Any:
        """Return a key of ours; None where it is not set."""
        value: Any = self.config
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    def note(self, kind: str, text: str) -> None:
        """Note what became of the key whose turn it is."""
        self.notes.append(Note(kind, self.key, self.given.get(self.key), text))


def apply(table: Mapping[str, Rule], migration: Migration, unknown: Rule) -> None:
    """Go through all keys of theirs, in the order of the table and then in theirs; `unknown` is for keys that no rule names.

    Raises:
        ValueError: keys ask for what is not trained here, all of them with their reasons.
    """
    given = migration.given
    refused = []
    for key, rule in _in_order(table, given, unknown):
        migration.key, value = key, given[key]
        if isinstance(rule, Needless):
            migration.note("needless", rule.why)
        elif _is_off(value):
            migration.note("needless", "off, or empty")
        elif isinstance(rule, To):
            migration.set(rule.path, rule.convert(value))
        elif isinstance(rule, Without):
            migration.note("without", rule.instead)
        elif isinstance(rule, Refuse):
            refused.append(f"{key}: {value!r}: {rule.why}")
        else:
            try:
                rule(migration, value)
            except ValueError as error:
                refused.append(f"{key}: {value!r}: {error}")
    if refused:
        raise ValueError("nothing is written: " + "; ".join(refused))


def rule_of(table: Mapping[str, Rule], key: str) -> Rule | None:
    """Return the rule of a key: its own, or the first pattern's that fits."""
    return table.get(key) or next(
        (rule for name, rule in table.items() if "*" in name and fnmatchcase(key, name)), None
    )


def _in_order(table: Mapping[str, Rule], given: Mapping[str, Any], unknown: Rule) -> Iterator[tuple[str, Rule]]:
    """Yield keys and rules; a rule may read what those before it in the table have set."""
    places = {name: place for place, name in enumerate(table)}
    for key in sorted(given, key=lambda key: places.get(key, len(places))):
        yield key, rule_of(table, key) or unknown


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})


def keys(rule: Rule, names: str) -> dict[str, Rule]:
    """Return one rule for several keys, whose names are apart by spaces."""
    return dict.fromkeys(names.split(), rule)


def as_list(value: Any) -> list[str]:
    """Return names that are a list, or a text with commas."""
    return (
        [str(item) for item in value] if isinstance(value, list) else [item.strip() for item in str(value).split(",")]
    )


def sharding_of(name: Any) -> str:
    """Return the sharding that the name of a DeepSpeed file, or its content, asks for."""
    stage = (name.get("zero_optimization") or {}).get("stage") if isinstance(name, dict) else None
    text = str(name)
    for number in (3, 2, 1):
        if stage == number or (stage is None and any(f"{mark}{number}" in text for mark in ("zero", "z", "stage"))):
            return f"zero{number}"
    return "zero3" if stage is None else "ddp"
