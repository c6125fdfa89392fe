"""Rules for keys, and a configuration that comes to be of them.

A table maps a key of theirs, or a pattern of keys with `*`, to

    To("training.seed")     it becomes this key of ours, perhaps by a function of its value
    Needless("why")         what it asks for happens here anyway, or nothing needs it
    Without("what")         there is no counterpart, and this is what to do instead
    Refuse("why")           another objective: nothing is written
    a function              of the migration and the value, which sets what it must, and notes it
    Always(function)        a function that is asked for what is off or empty, too

A value that a rule cannot read refuses the file, with the key and the value.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from hf_longctx.settings.training import default_of

KINDS = ("translated", "needless", "without")


def _as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class To:
    """A key of ours."""

    path: str
    convert: Callable[[Any], Any] = _as_it_is


@dataclass(frozen=True)
class Needless:
    """Why nothing is to be done."""

    why: str
    of: tuple[Any, ...] | None = None
    """values that this is true of; None: all"""
    otherwise: "Rule | None" = None
    """rule of other values"""


@dataclass(frozen=True)
class Without:
    """Advice for a key that has no counterpart: what to do instead."""

    instead: str


@dataclass(frozen=True)
class Refuse:
    """Why a configuration cannot be translated."""

    why: str


@dataclass(frozen=True)
class Always:
    """A rule for values that are off or empty, too: there they ask for something."""

    does: Callable[["Migration", Any], None]


class NotTranslated(ValueError):
    """Why a value of theirs cannot be one of ours."""


Rule = To | Needless | Without | Refuse | Always | Callable[["Migration", Any], None]


@dataclass(frozen=True)
class Note:
    """A remark on what became of a key."""

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
    stack: str = "this stack"
    """whose configuration it is"""
    by_default: frozenset[str] = frozenset()
    """keys of `given` that the file leaves out, with the stack's own defaults"""
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
        if before := self.get("data.path") or self.get("data.sources"):
            raise NotTranslated(f"documents come from another key already ({before}): keep one of the two keys")
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

    def number(self, key: str, default: float, convert: Callable[[Any], Any] | None = None) -> Any:
        """Return the number of another key of theirs, whole unless `convert` reads it; `default` where it is left out."""
        value = self.given.get(key)
        try:
            return (convert or whole)(value or default)
        except (ValueError, TypeError, OverflowError):
            raise NotTranslated(f"{key}: {value!r} beside it is no number that {self.stack} takes") from None

    def note(self, kind: str, text: str) -> None:
        """Note what became of the key whose turn it is."""
        text += f" ({self.stack}'s default, left out in the file)" if self.key in self.by_default else ""
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
        try:
            _follow(rule_for(rule, value), migration, value)
        except NotTranslated as error:
            refused.append(f"{key}: {value!r}: {error}")
        except (ValueError, TypeError, AttributeError, KeyError, ArithmeticError):
            refused.append(f"{key}: {value!r}: not a value that {migration.stack} takes")
    if refused:
        raise ValueError("nothing is written: " + "; ".join(refused))


def rule_for(rule: Rule, value: Any) -> Rule:
    """Return the rule that holds for a value: another one where `rule` is needless for some values alone, and not for this."""
    if isinstance(rule, Needless) and rule.of is not None and value is not None and value not in rule.of:
        return rule.otherwise or Without("no such value is known")
    return rule


def _follow(rule: Rule, migration: Migration, value: Any) -> None:
    """Do what a rule says of a value."""
    if isinstance(rule, Always):
        rule.does(migration, value)
    elif isinstance(rule, Needless):
        migration.note("needless", rule.why)
    elif _is_off(value) and not (value is False and _turns_off(rule)):
        migration.note("needless", "off, or empty")
    elif isinstance(rule, To):
        migration.set(rule.path, rule.convert(value))
    elif isinstance(rule, Without):
        migration.note("without", rule.instead)
    elif isinstance(rule, Refuse):
        raise NotTranslated(rule.why)
    else:
        rule(migration, value)


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


def _turns_off(rule: Rule) -> bool:
    """Tell whether false is other than what a field of `training` is where it is left out."""
    if not isinstance(rule, To) or rule.convert is not _as_it_is:
        return False
    section, _, name = rule.path.partition(".")
    return section == "training" and default_of(name) is not False


def keys(rule: Rule, names: str) -> dict[str, Rule]:
    """Return one rule for several keys, whose names are apart by spaces."""
    return dict.fromkeys(names.split(), rule)


def as_list(value: Any) -> list[str]:
    """Return names that are a list, or a text with commas. Raises TypeError for a mapping."""
    if isinstance(value, dict):
        raise TypeError(f"{value} is no list of names")
    return (
        [str(item) for item in value] if isinstance(value, list) else [item.strip() for item in str(value).split(",")]
    )


def whole(value: Any) -> int:
    """Return a whole number, which YAML may have left a text (1e3). Raises ValueError if it is none."""
    number = value if isinstance(value, int) else float(value)
    if number != int(number):
        raise ValueError(f"{value} is no whole number")
    return int(number)
