"""What every benchmark ends with: one table of ratios, a JSON file, and a check against targets.toml.

A benchmark measures *figures*: name -> number, names being paths such as "one document/4 ranks/ours/error out". Targets
name figures by patterns (`*` matches anything, as in file names).
"""

import argparse
import fnmatch
import itertools
import json
import math
import os
import shlex
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

TARGETS = Path(__file__).with_name("targets.toml")


@dataclass(frozen=True)
class Target:
    """A bound, or two, on every figure that a pattern matches."""

    topic: str
    """what it checks, as in `--check noise`"""
    benchmark: str
    figure: str
    at_most: float = math.inf
    at_least: float = -math.inf

    def __str__(self) -> str:
        bounds = [f"at most {self.at_most:g}"] * math.isfinite(self.at_most)
        bounds += [f"at least {self.at_least:g}"] * math.isfinite(self.at_least)
        return f"target: {', '.join(bounds)} ({self.topic})"

    def missed(self, figures: Mapping[str, float]) -> list[str]:
        """Each matching figure that is out of bounds; and the pattern itself where nothing matches: not measured is
        missed."""
        matching = sorted(fnmatch.filter(figures, self.figure))
        if not matching:
            return [f"{self.figure}: not measured in this run, {self}"]
        return [
            f"{name} is {figures[name]:.4g}, {self}"
            for name in matching
            if not self.at_least <= figures[name] <= self.at_most
        ]


def load_targets(path: Path = TARGETS) -> tuple[list[Target], set[str]]:
    """All targets, and the topics whose targets are to be met by now."""
    content = tomllib.loads(path.read_text())
    return [Target(**target) for target in content["target"]], set(content["reached"])


def missed(benchmark: str, figures: Mapping[str, float], topics: Iterable[str] = ()) -> list[str]:
    """Return what this run of a benchmark misses, of the topics reached and of `topics`."""
    targets, reached = load_targets()
    checked = reached | set(topics)
    return [
        line
        for target in targets
        if target.benchmark == benchmark and target.topic in checked
        for line in target.missed(figures)
    ]


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows of equal columns as a Markdown table, aligned for a terminal too: columns of numbers to the right."""
    columns = list(rows[0])
    width = {column: max(len(column), *(len(row[column]) for row in rows)) for column in columns}
    right = {c for c in columns if all(row[c][:1] in "-0123456789" for row in rows)}
    ruler = {c: "-" * (width[c] - 1) + ":" if c in right else "-" * width[c] for c in columns}
    return "\n".join(
        "| " + " | ".join(f"{row[c]:{'>' if c in right else '<'}{width[c]}}" for c in columns) + " |"
        for row in [dict(zip(columns, columns)), ruler, *rows]
    )


def sections(rows: Sequence[Mapping[str, str]], column: str) -> str:
    """A table for each run of rows with the same value in `column`, under that value."""
    return "\n\n".join(
        f"{title}\n\n" + table([{name: cell for name, cell in row.items() if name != column} for row in group])
        for title, group in itertools.groupby(rows, key=lambda row: row[column])
    )


def parser(description: str | None) -> argparse.ArgumentParser:
    """--json and --check; a benchmark adds its own."""
    topics = sorted({target.topic for target in load_targets()[0]})
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured, and how")
    made.add_argument(
        "--check",
        nargs="*",
        choices=topics,
        metavar="TOPIC",
        help="exit with 1 and name each figure that misses its target in targets.toml, of the topics reached and of these: "
        + ", ".join(topics),
    )
    return made


def conclude(
    arguments: argparse.Namespace,
    rows: Sequence[Mapping[str, str]],
    figures: Mapping[str, float],
    load_before: float,
    section: str | None = None,
    also: Sequence[str] = (),
    **more: Any,
) -> int:
    """Prints the table, writes the JSON (with `more`), checks targets; returns the exit status.

    Args:
        load_before: load average of the last minute when the benchmark began: was the machine quiet?
        section: a column whose values become headings, each with a table of its rows; None for one table.
        also: other benchmarks that this run measured, and whose targets it checks too.
    """
    print(table(rows) if section is None else sections(rows, section))
    if arguments.json:
        content = {"command": _command(), "machine": _machine(load_before), "figures": dict(figures)} | more
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    if arguments.check is None:
        return 0
    measured = (Path(sys.argv[0]).stem, *also)
    lines = [line for benchmark in measured for line in missed(benchmark, figures, arguments.check)]
    for line in lines:
        print(f"MISSED  {line}", file=sys.stderr)
    return 1 if lines else 0


def _command() -> str:
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def _machine(load_before: float) -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "load average of the last minute, before and after": [load_before, os.getloadavg()[0]],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": sys.version.split()[0],
    }
