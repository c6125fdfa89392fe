"""Simulated runs of many sizes -> picture: tokens per second, and the share of the devices' FLOP/s that is used, by planner.

Of devices and context, the one with more values runs along the horizontal axis; each value of the other has a column of
panels. A size that a planner cannot run leaves a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_longctx.report.pictures.canvas import BLUE, GREEN, INK, MUTED, VERMILLION, new_figure, save
from hf_longctx.report.planner_names import OURS, PLANNER_NAMES, planner_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ORANGE, PURPLE, SKY = "#E69F00", "#CC79A7", "#56B4E9"
COLOURS = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, INK)
"""Colours of planners, in the order of their names in report/planner_names.py; of others, in the order in which they come."""
MARKERS = "osD^vPX"


@dataclass(frozen=True, slots=True)
class Point:
    """One planner at one size."""

    devices: int
    context: int
    planner: str
    tokens_per_second: float
    mfu: float
    """0 to 1"""


def draw_sweep(points: Sequence[Point], path: Path, title: str) -> None:
    """Draws the points into a file. Raises PictureError if matplotlib is not installed."""
    save(sweep_figure(points, title), path)


def sweep_figure(points: Sequence[Point], title: str) -> Figure:
    """The picture of `draw_sweep`, not yet saved."""
    devices = sorted({point.devices for point in points})
    contexts = sorted({point.context for point in points})
    along_devices = len(devices) >= len(contexts)
    across, others = (devices, contexts) if along_devices else (contexts, devices)
    drawn = {point.planner: None for point in points}
    places = list(dict.fromkeys(PLANNER_NAMES) | drawn)
    figure = new_figure(6.4)
    figure.suptitle(title, color=INK)
    panels = figure.subplots(2, len(others), sharex=True, sharey="row", squeeze=False)
    for column, other in enumerate(others):
        for place, planner in enumerate(places):
            if planner not in drawn:
                continue
            mine = sorted(
                (
                    (point.devices, point) if along_devices else (point.context, point)
                    for point in points
                    if point.planner == planner and other == (point.context if along_devices else point.devices)
                ),
                key=lambda pair: pair[0],
            )
            sizes = [size for size, _ in mine]
            width = 2.8 if planner == OURS else 1.4
            style: dict[str, Any] = {"color": COLOURS[place % len(COLOURS)], "marker": MARKERS[place % len(MARKERS)]}
            style |= {
                "markersize": 5,
                "linewidth": width,
                "label": planner_name(planner) + " (ours)" * (planner == OURS),
            }
            panels[0, column].plot(sizes, [point.tokens_per_second for _, point in mine], **style)
            panels[1, column].plot(sizes, [100 * point.mfu for _, point in mine], **style)
        panels[0, column].set_title(_size(other) + (" tokens of context" if along_devices else " devices"), fontsize=10)
        panels[1, column].set_xlabel("devices" if along_devices else "tokens of context")
        for panel in panels[:, column]:
            _style(panel, across)
    _plain_logarithm(panels[0, 0])
    panels[0, 0].set_ylabel("tokens per second", color=INK)
    panels[1, 0].set_ylabel("MFU, %", color=INK)
    panels[1, 0].set_ylim(bottom=0)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 3), frameon=False)
    return figure


def _plain_logarithm(panel: Axes) -> None:
    """Make the vertical axis logarithmic, with numbers as people write them at 1, 2, 3 and 5 times powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    panel.set_yscale("log")
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.yaxis.set_minor_locator(NullLocator())


def _style(panel: Axes, across: Sequence[int]) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_locator(FixedLocator(list(across)))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xticklabels([_size(value) for value in across])
    panel.grid(color=MUTED, alpha=0.2)
    panel.spines[["top", "right"]].set_visible(False)


def _size(value: int) -> str:
    """256K and 2M for powers of two as contexts are named, else the number."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if value % size == 0 and value >= 2**13:
            return f"{value // size}{unit}"
    return f"{value}"
