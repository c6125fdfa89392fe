"""Trainer's log -> picture: loss of training and of held-out documents over optimizer steps, with the learning rate.

The gradient norm, if it was logged, has a panel of its own below. Entries without a key, or with a value that is not
finite, are left out of that key's curve. Nothing is sent between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_longctx.report.pictures.canvas import BLUE, GREEN, INK, MUTED, VERMILLION, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_MARKERS = 60
"""A longer curve is drawn without a marker for each step."""


def draw_loss(log_history: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws `trainer.state.log_history` into a file. Raises PictureError if matplotlib is not installed."""
    save(loss_figure(log_history), path)


def loss_figure(log_history: Sequence[Mapping[str, Any]]) -> Figure:
    """The picture of `draw_loss`, not yet saved."""
    training, held_out = curve(log_history, "loss"), curve(log_history, "eval_loss")
    learning_rate, grad_norm = curve(log_history, "learning_rate"), curve(log_history, "grad_norm")
    figure = new_figure(6.2 if grad_norm[0] else 4.6)
    if grad_norm[0]:
        ax, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
        _plot(below, grad_norm, VERMILLION, "gradient norm")
        _style(below, "gradient norm")
        below.set_ylim(0, 1.2 * max(grad_norm[1]) or 1.0)
    else:
        ax = below = figure.subplots()

    handles = []
    if learning_rate[0]:
        rates = ax.twinx()
        rates.fill_between(*learning_rate, color=MUTED, alpha=0.13, linewidth=0, label="learning rate (right)")
        rates.set_ylim(0, 1.6 * max(learning_rate[1]) or 1.0)  # leaves the upper part to the losses
        rates.set_ylabel("learning rate", color=MUTED)
        rates.tick_params(colors=MUTED)
        rates.ticklabel_format(axis="y", scilimits=(0, 0))
        rates.spines[["top", "left", "right"]].set_visible(False)
        rates.set_zorder(ax.get_zorder() - 1)
        ax.patch.set_visible(False)
        handles += rates.get_legend_handles_labels()[0]
    if training[0]:
        handles.insert(0, _plot(ax, training, BLUE, "training loss"))
    if held_out[0]:
        handles.insert(1, _plot(ax, held_out, GREEN, "held-out loss", marker="D", linestyle="--", size=7))
        _label_ends(ax, held_out)
    if not training[0] and not held_out[0]:
        ax.text(0.5, 0.5, "no loss was logged", transform=ax.transAxes, ha="center", va="center", color=MUTED)
    ax.margins(y=0.14)
    _style(ax, "loss per token")
    below.set_xlabel("optimizer step")
    if handles:
        figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)
    return figure


def curve(log_history: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and finite values of one logged quantity; a later entry for the same step replaces an earlier one."""
    values: dict[int, float] = {}
    for entry in log_history:
        value, step = entry.get(key), entry.get("step")
        if isinstance(step, int) and isinstance(value, (int, float)) and math.isfinite(value):
            values[step] = float(value)
    steps = sorted(values)
    return steps, [values[step] for step in steps]


def _plot(
    ax: Axes,
    points: tuple[list[int], list[float]],
    colour: str,
    label: str,
    marker: str = "o",
    linestyle: str = "-",
    size: float = 4,
) -> Any:
    few = len(points[0]) <= MOST_MARKERS
    style = {"marker": marker, "markersize": size, "linewidth": 1.6} if few else {"linewidth": 0.9}
    (line,) = ax.plot(*points, color=colour, label=label, linestyle=linestyle, **style)
    return line


def _label_ends(ax: Axes, points: tuple[list[int], list[float]]) -> None:
    """Writes the first and the last held-out loss at their points: the figures that a reader looks for."""
    from matplotlib.patheffects import withStroke

    steps, losses = points
    middle = sum(ax.get_xlim()) / 2
    for end in (0,) if len(steps) == 1 else (0, -1):
        side = "left" if steps[end] < middle else "right"
        text = ax.annotate(
            f"{losses[end]:.3f}",
            (steps[end], losses[end]),
            xytext=(6 if side == "left" else -6, 8),
            textcoords="offset points",
            horizontalalignment=side,
            color=GREEN,
            weight="bold",
        )
        text.set_path_effects([withStroke(linewidth=3, foreground="white")])


def _style(ax: Axes, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    ax.set_ylabel(label, color=INK)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.grid(axis="y", color=MUTED, alpha=0.2)
    ax.spines[["top", "right"]].set_visible(False)
