"""Curves over optimizer steps -> charts of a page: paths 100 units wide and high, ticks, and the numbers under the pointer.

Paths are stretched to the width of the page, text is not: marks and names are placed in per cent beside them. A curve of more
than MOST_POINTS steps shows means of as many adjacent ones as bring it below. Nothing is sent.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hf_longctx.report.pictures.axis import ticks, value_marks, whole_numbers

MOST_POINTS = 400
MOST_DOTS = 60
"""A curve of no more points is drawn with a dot at each."""


@dataclass(frozen=True)
class Curve:
    """One quantity."""

    name: str
    colour: str
    """of page/page.css and page/run.css"""
    points: Sequence[tuple[int, float]]
    """(optimizer step, finite value), by step"""
    dashed: bool = False


def curve_of(
    log: Sequence[Mapping[str, Any]], key: str, name: str, colour: str, *, factor: float = 1.0, dashed: bool = False
) -> Curve:
    """A logged quantity; a later entry for the same step replaces an earlier one, and what is not finite is left out."""
    values: dict[int, float] = {}
    for entry in log:
        value, step = entry.get(key), entry.get("step")
        if isinstance(step, int) and isinstance(value, (int, float)) and math.isfinite(value):
            values[step] = factor * value
    return Curve(name, colour, sorted(values.items()), dashed)


def line_chart(
    title: str,
    curves: Sequence[Curve],
    show: Callable[[float], str],
    *,
    unit: str = "",
    caption: str = "",
    least: float | None = None,
) -> dict[str, Any] | None:
    """Return what page/run_page.html.j2 draws; None without any point.

    Args:
        curves: those without a point are left out.
        show: a value in words, under the pointer.
        unit: of the marks.
        least: the axis begins at or below it; None: a little below the smallest value.
    """
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return None
    shown = [_thinned(curve.points) for curve in curves]
    values = [value for points in shown for _, value in points]
    marks = ticks(min([*values, *([] if least is None else [least])]), max(values))
    steps = [step for points in shown for step, _ in points]
    first, last = min(steps), max(steps)
    low, high = marks[0], marks[-1]
    lines = []
    for curve, points in zip(curves, shown):
        at = [
            (100 * (step - first) / max(1, last - first), 100 * (high - value) / (high - low)) for step, value in points
        ]
        path = "".join(f"{'L' if i else 'M'}{x:.2f} {y:.2f}" for i, (x, y) in enumerate(at))
        dots = "".join(f"M{x:.2f} {y:.2f}h0" for x, y in at) if len(at) <= MOST_DOTS else ""
        lines.append({"path": path, "dots": dots, "colour": curve.colour, "dashed": curve.dashed})
    every = sorted({step for points in shown for step, _ in points})
    series = [
        [curve.name, [show(value_at[step]) if step in value_at else None for step in every]]
        for curve, points in zip(curves, shown)
        for value_at in [dict(points)]
    ]
    return {
        "title": title,
        "caption": caption,
        "lines": lines,
        "marks": value_marks(marks, unit),
        "places": [
            {"at": round(100 * (step - first) / max(1, last - first), 3), "text": f"{step:,}"}
            for step in whole_numbers(first, last)
        ],
        "along": "optimizer step",
        "legend": [{"colour": curve.colour, "text": curve.name} for curve in curves],
        "values": {"steps": every, "series": series},
    }


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Reduce points to MOST_POINTS at most: means of adjacent ones, each at the last step of its run, so that the end stays."""
    width = -(-len(points) // MOST_POINTS)
    if width == 1:
        return list(points)
    runs = [points[i : i + width] for i in range(0, len(points), width)]
    return [(run[-1][0], sum(value for _, value in run) / len(run)) for run in runs]
