"""The record of a part of the acceptance run: a JSON file that grows with each result, so that nothing measured is lost.

status    "running" until the part ends; then "done", "failed", "out of time" or "not possible here"
why       of the last two, and the error of a part that failed
tables    title and rows (column -> cell, text)
figures   name -> number: what findings.py and the page's pictures read
notes     sentences
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RUNNING, DONE, FAILED, OUT_OF_TIME, NOT_POSSIBLE = "running", "done", "failed", "out of time", "not possible here"
LAST_LINES = 25


class Shown(float):
    """A figure that is never printed as nothing: where a format would leave no digit of it but zeros, its first one is written.

    >>> f"x{Shown(0.0034):.2f}", f"{Shown(0.0034):.0%}", f"{Shown(0.34):.0%}"
    ('x0.003', '0.3%', '34%')
    """

    def __format__(self, form: str) -> str:
        text = super().__format__(form)
        if not self or any(digit in text for digit in "123456789"):
            return text
        return f"{100 * self:.1g}%" if form.endswith("%") else f"{float(self):.1g}"


class NotPossibleError(Exception):
    """This machine lacks what a part needs; the message says what."""


@dataclass
class Record:
    """The record of one part."""

    part: str
    device: str
    """"cuda" or "cpu": where the figures were measured"""
    tiny: bool = False
    """with shapes for a look"""
    status: str = RUNNING
    why: str = ""
    seconds: float = 0.0
    tables: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    last_lines: list[str] = field(default_factory=list)
    """of the output of a part that failed"""

    @property
    def judges(self) -> bool:
        """Whether its figures say anything about GPUs."""
        return self.device == "cuda" and not self.tiny

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """Read a record; None if there is none, or if the disk holds half of one."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Write it whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)


@dataclass
class Bench:
    """Everything a part is given: where it measures, how long it may, and its record."""

    device: Any
    """torch.device"""
    tiny: bool
    """shapes for a look without a GPU"""
    seconds: float
    """that the part may take"""
    path: Path
    """of its record"""
    record: Record
    begun: float = field(default_factory=time.monotonic)

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return bool(self.device.type == "cuda")

    def left(self) -> float:
        """Seconds that the part still has."""
        return self.begun + self.seconds - time.monotonic()

    def table(self, title: str, rows: list[dict[str, str]], figures: dict[str, float] | None = None) -> None:
        """Add rows under a title, and figures, and write the record. Rows under a known title join its table."""
        for row in rows:
            print(f"{title}: " + "; ".join(f"{name} {cell}" for name, cell in row.items()), flush=True)
        known = next((table for table in self.record.tables if table["title"] == title), None)
        if known is None:
            self.record.tables.append({"title": title, "rows": list(rows)})
        else:
            known["rows"] += rows
        self.record.figures |= {name: float(value) for name, value in (figures or {}).items()}
        self._write()

    def note(self, text: str) -> None:
        """Add a sentence."""
        print(text, flush=True)
        self.record.notes.append(text)
        self._write()

    def _write(self) -> None:
        self.record.seconds = time.monotonic() - self.begun
        self.record.write(self.path)
