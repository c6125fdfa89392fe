"""Parts of all sections: their base class, numbers as YAML reads them, the words of broken rules, the nearest valid
spelling."""

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema

EXPONENT = re.compile(r"[-+]?\d+[eE][-+]?\d+")
"""A number that YAML 1.1 takes for text, for want of a dot: 1e-4."""
SHOWN = 100
"""Characters of a value in a message."""


Problem = tuple[str, str]
"""A key ("": none), and the rule that its value breaks."""


class Section(BaseModel):
    """A part of a YAML file: keys that nobody knows are errors, and a number in quotes is no number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    def problems(self) -> Iterator[Problem]:
        """Key (dotted) and rule of what does not go together, all of it."""
        return iter(())

    def given(self) -> dict[str, Any]:
        """Return what was given, without defaults."""
        return {name: getattr(self, name) for name in sorted(self.model_fields_set)}


def _as_number(given: Any) -> Any:
    return float(given) if isinstance(given, str) and EXPONENT.fullmatch(given) else given


Number = Annotated[float, BeforeValidator(_as_number), Field(allow_inf_nan=False)]


THOUSANDS = {"K": 2**10, "M": 2**20}
"""Units of numbers of tokens."""
SIZE = re.compile(r"(\d+)([kKmM])")
"""A number of tokens with a unit: 8K is 8192, 1M is 1048576."""
TOKENS_MARK = "x-tokens"
"""Marks fields of the JSON schema that take such text too."""


def as_tokens(given: Any) -> Any:
    """Return the number that 8K, 8k or 1M stands for; anything else as it is."""
    size = SIZE.fullmatch(given) if isinstance(given, str) else None
    return int(size[1]) * THOUSANDS[size[2].upper()] if size else given


MOST_TOKENS = 2**40
"""More than any corpus of one run has; sums over a million ranks of so many are still numbers of 64 bits."""
Tokens = Annotated[int, BeforeValidator(as_tokens), Field(json_schema_extra={TOKENS_MARK: True}, le=MOST_TOKENS)]
"""A number of tokens, which may be written with a unit."""


def as_names(given: Any) -> Any:
    """Return the names in a text with commas; anything else as it is."""
    return [name.strip() for name in given.split(",")] if isinstance(given, str) and given.strip(" ,") else given


_NAMES: dict[str, Any] = {"anyOf": [{"type": "array", "items": {"type": "string"}, "minItems": 1}, {"type": "string"}]}
Names = Annotated[list[str], BeforeValidator(as_names), Field(min_length=1), WithJsonSchema(_NAMES)]
"""Names: a list, or a text with commas."""


def broken_rule(detail: Mapping[str, Any], known: Iterable[str] = ()) -> str:
    """Word one error of pydantic: the rule, the value, and what was probably meant; `known`: keys that there are."""
    given = detail["input"]
    if detail["type"] == "extra_forbidden":
        return f"unknown (value {shown(given)}){did_you_mean(detail['loc'][-1], known)}"
    if detail["type"] == "value_error":
        return str(detail["ctx"]["error"])
    if detail["type"] in ("model_type", "model_attributes_type"):
        return f"must be a mapping, got {shown(given)}"
    rule = detail["msg"].replace("Input should", "must", 1)
    choices = re.findall(r"'([^']+)'", detail["msg"]) if detail["type"] == "literal_error" else ()
    glued = given is None and ":" in str(detail["loc"][-1])  # YAML reads {a:5} as the key "a:5" without a value
    hint = "; YAML needs a space after the colon" if glued else did_you_mean(given, choices)
    return f"{rule}, got {shown(given)}{hint}{_as_integer(given, rule)}"


def broken_rules(error: ValidationError) -> str:
    """Word all errors of pydantic in one line: what the checks of a section say, and pydantic's own rules."""
    return "; ".join(str(problem["ctx"]["error"]) if "ctx" in problem else problem["msg"] for problem in error.errors())


def _as_integer(given: Any, rule: str) -> str:
    """Say what was meant by "4096", or by 32K where no tokens are counted."""
    number = re.fullmatch(r"(\d+)([kKmM]?)", given) if isinstance(given, str) and "integer" in rule else None
    return f"; did you mean {int(number[1]) * THOUSANDS.get(number[2].upper(), 1)}?" if number else ""


def shown(value: Any) -> str:
    """`value` in one line of a message."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


OTHER_NAMES = {"rank": "r", "lora_r": "r", "lora_rank": "r"}
"""Names that other trainers have for keys, where the nearest spelling is another key."""


def did_you_mean(given: Any, valid: Iterable[str]) -> str:
    """ "; did you mean ...?" of the nearest valid spelling, or nothing where none is near."""
    if not isinstance(given, str):
        return ""
    names = list(valid)
    longer = [name for name in names if len(given) > 2 and name.startswith(given.lower())]
    known = [name for name in names if name == OTHER_NAMES.get(given.lower())]
    near = [*known, *longer, *difflib.get_close_matches(given.lower(), names, n=1)]
    return f"; did you mean {near[0]!r}?" if near else ""


def is_misspelt(given: str, valid: Iterable[str]) -> bool:
    """Tell whether a model's name is a valid one but for a letter or two, and so need not be asked of the hub: old names there
    have no organisation either, but more than that of a family (gpt2-medium)."""
    near = difflib.get_close_matches(given.lower(), valid, n=1, cutoff=0.8)
    return bool(near) and not given.lower().startswith(f"{near[0]}-")


def beside(path: str) -> str:
    """ "; did you mean ...?" of what is called nearly so, in the folder in which there is no such `path`."""
    home = os.path.expanduser(path)
    if home != path and os.path.exists(home):
        return f"; did you mean {home!r}?"
    folder = Path(path).parent
    try:
        names = os.listdir(folder)
    except OSError:
        return ""
    near = difflib.get_close_matches(Path(path).name, set(names) - {Path(path).name}, n=1)
    return f"; did you mean {str(folder / near[0])!r}?" if near else ""
