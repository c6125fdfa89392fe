"""The ratios of benchmarks/attention.py as a picture: for each case a band of marks, one for each implementation.

Colour tells whose implementation it is, the mark how it splits attention. Panels show time, bytes and memory, blocks
of rows the number of ranks. Further to the left is better everywhere. What lies beyond a panel's edge is drawn at the
edge, with its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from attention_figures import Found, is_ours

from hf_longctx.report.pictures.canvas import BLUE, GREEN, INK, MUTED, VERMILLION, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = {
    "slowest rank over the limit": ("time of the slowest rank over\none process / ranks (line: 1)", 1.0, (0.92, 5.0)),
    "bytes over a zigzag ring's": ("bytes sent over\na zigzag ring's (line: 3/4)", 0.75, (-0.06, 1.35)),
    "peak memory over the limit": (
        "peak memory of the worst rank over\none process / ranks (line: 1)",
        1.0,
        (0.4, 5.6),
    ),
}
"""Figure -> title, where a line is drawn, and the range shown. Time is on a logarithmic axis."""

PACKAGES = {
    "ours": (BLUE, -0.28),
    "ring-flash-attn": (VERMILLION, -0.08),
    "yunchang": ("#E69F00", 0.07),
    "torch context_parallel": (GREEN, 0.22),
    "DeepSpeed": ("#CC79A7", 0.37),
}
"""How names of implementations begin -> colour, and place in the band of a case, from its middle downwards."""

MARKS = {
    "ring (ours: direct exchange)": ("o", ()),
    "Ulysses": ("s", ("Ulysses",)),
    "Ulysses inside a ring": ("D", ("Ulysses 2 x",)),
    "all-gather": ("^", ("all-gather", "llama3")),
}
"""Way of splitting -> mark, and what names of implementations contain; of those that fit, the last."""


def draw(results: Found, path: Path) -> None:
    """Draws all results into a file. Raises PictureError if matplotlib is not installed."""
    save(picture(results), path)


def picture(results: Found) -> Figure:
    """The picture of `draw`, not yet saved."""
    cases = list(dict.fromkeys(case for case, _, _ in results))
    rank_counts = sorted({ranks for _, ranks, _ in results})
    figure = new_figure(1.9 + (0.42 * len(cases) + 0.3) * len(rank_counts))
    grid = figure.subplots(len(rank_counts), len(PANELS), sharex="col", sharey=True, squeeze=False)
    for axes, ranks in zip(grid, rank_counts):
        for ax, (name, (title, line, limits)) in zip(axes, PANELS.items()):
            _style(ax, cases, line, limits)
            for index, case in enumerate(cases):
                summaries = {label: results[key] for key in results for label in key[2:] if key[:2] == (case, ranks)}
                _band(ax, index, {label: s[name] for label, s in summaries.items() if isinstance(s, dict)}, limits)
            if name.startswith("slowest"):
                ax.set_xscale("log")
                ax.set_xticks([1, 1.5, 2, 3, 4, 5], ["1", "1.5", "2", "3", "4", "5"])
                ax.set_xticks([], minor=True)
            if ranks == rank_counts[0]:
                ax.set_title(title, fontsize=9.5, color=INK)
        axes[0].set_ylabel(f"{ranks} ranks", fontsize=11, fontweight="bold", color=INK)
    figure.suptitle("Attention across ranks: further to the left is better", fontsize=12, color=INK)
    _legend(figure)
    return figure


def _style(ax: Axes, cases: list[str], line: float, limits: tuple[float, float]) -> None:
    ax.set_xlim(*limits)
    ax.set_ylim(len(cases) - 0.5, -0.5)
    ax.set_yticks(range(len(cases)), cases, fontsize=9, color=INK)
    ax.tick_params(axis="both", length=0)
    ax.tick_params(axis="x", labelsize=8, colors=MUTED)
    ax.spines[:].set_visible(False)
    ax.axvline(line, color=INK, linewidth=0.9, linestyle=(0, (4, 2)), zorder=1)
    for index in range(0, len(cases), 2):
        ax.axhspan(index - 0.5, index + 0.5, color="#F3F3F3", zorder=0)


def _band(ax: Axes, index: int, values: Mapping[str, float], limits: tuple[float, float]) -> None:
    """The marks of one case; `values`: implementation -> its ratio."""
    for implementation, value in values.items():
        colour, place = next(PACKAGES[package] for package in PACKAGES if implementation.startswith(package))
        mark = [mark for mark, parts in MARKS.values() if not parts or any(part in implementation for part in parts)][
            -1
        ]
        shown = min(value, limits[1])
        size = 46 if is_ours(implementation) else 26
        y = index + place
        ax.scatter(
            shown, y, size, colour, marker=mark, alpha=0.85, linewidths=0.6, edgecolors="white", clip_on=False, zorder=3
        )
        if value > shown:
            ax.annotate(
                f"{value:.1f}", (shown, y), (-5, 0), textcoords="offset points", ha="right", va="center", fontsize=7
            )
    if values and all(map(is_ours, values)):
        ax.text(
            limits[1], index + 0.2, "no peer can", ha="right", va="center", fontsize=7.5, color=MUTED, style="italic"
        )


def _legend(figure: Figure) -> None:
    from matplotlib.lines import Line2D

    entries = [(package, "s", colour) for package, (colour, _) in PACKAGES.items()]
    entries += [(way, mark, MUTED) for way, (mark, _) in MARKS.items()]
    handles = [
        Line2D([], [], linestyle="", marker=mark, color=colour, label=label, markersize=6)
        for label, mark, colour in entries
    ]
    packages, ways = handles[: len(PACKAGES)], handles[len(PACKAGES) :]
    columns = [handle for column in zip_longest(packages, ways) for handle in column if handle]
    figure.legend(handles=columns, loc="outside lower center", ncols=len(packages), frameon=False, fontsize=8.5)
