"""What all sections are made of: their base class, numbers as YAML reads them, names of files, the nearest valid spelling."""

import difflib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

EXPONENT = re.compile(r"[-+]?\d+[eE][-+]?\d+")
"""A number that YAML 1.1 takes for text, for want of a dot: 1e-4."""
SHOWN = 100
"""Characters of a value in a message."""


class Section(BaseModel):
    """A part of a YAML file: keys that nobody knows are errors, and a number in quotes is no number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    def problems(self) -> Iterator[tuple[str, str]]:
        """Key (dotted) and rule of what does not go together, all of it."""
        return iter(())


def _as_number(given: Any) -> Any:
    return float(given) if isinstance(given, str) and EXPONENT.fullmatch(given) else given


Number = Annotated[float, BeforeValidator(_as_number), Field(allow_inf_nan=False)]


def shown(value: Any) -> str:
    """`value` in one line of a message."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def did_you_mean(given: Any, valid: Iterable[str]) -> str:
    """ "; did you mean ...?" of the nearest valid spelling, or nothing where none is near."""
    if not isinstance(given, str):
        return ""
    names = list(valid)
    longer = [name for name in names if len(given) > 2 and name.startswith(given.lower())]
    near = [*longer, *difflib.get_close_matches(given.lower(), names, n=1)]
    return f"; did you mean {near[0]!r}?" if near else ""


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
    near = difflib.get_close_matches(Path(path).name, names, n=1)
    return f"; did you mean {str(folder / near[0])!r}?" if near else ""
