"""evaluation.json -> pictures: loss by position and by length of documents, and a heat map of what was found in long texts.

Both take the JSON as `hf-longctx evaluate` writes it (docs/evaluation.md), in which any part may be missing; with `against`, the
other model's results are drawn beside. Nothing is sent between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_longctx.report.pictures.canvas import BLUE, INK, MUTED, VERMILLION, PictureError, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = {
    "losses.png": ("loss by position and by length", ("by_position", "by_length")),
    "retrieval.png": ("what was found in long texts", ("retrieval",)),
}
"""Pictures beside evaluation.json -> what each shows, and the keys that it is drawn of, if one of them is there."""
DARK = 0.55
"""Share found below which a cell of the heat map is so dark that its text is white."""


def draw_evaluation(evaluation: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draws PICTURES, as far as there is something to draw, in the place of those of an earlier evaluation. Returns what was
    written.

    Raises:
        PictureError: matplotlib is not installed.
    """
    for name in PICTURES:
        (folder / name).unlink(missing_ok=True)
    written = []
    for (name, (_, keys)), figure in zip(PICTURES.items(), (losses_figure, retrieval_figure), strict=True):
        if any(map(evaluation.get, keys)):
            save(figure(evaluation), folder / name)
            written.append(folder / name)
    return written


def losses_figure(evaluation: Mapping[str, Any]) -> Figure:
    """Loss by position on the left, by length of document on the right. Raises PictureError: there is neither."""
    kinds = [
        (evaluation[key], label, key)
        for key, label in (("by_position", "position in the document"), ("by_length", "length of the document"))
        if evaluation.get(key)
    ]
    if not kinds:
        raise PictureError("the evaluation holds no losses: neither by_position nor by_length")
    figure = new_figure(4.4)
    panels = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for panel, (_, label, key) in zip(panels, kinds):
        for number, (name, result) in enumerate(_models(evaluation)):
            if result.get(key):
                _curves(panel, result[key], name, (BLUE, VERMILLION)[number])
        edges = sorted({bucket["to"] for _, result in _models(evaluation) for bucket in result.get(key) or []})
        _style(panel, edges, f"{label}, up to so many tokens")
    panels[0].set_ylabel("loss, nats per token", color=INK)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    return figure


def retrieval_figure(evaluation: Mapping[str, Any]) -> Figure:
    """A heat map for each task (and model): the share of trials whose answer was found, by length and depth. Raises
    PictureError: there are none."""
    models = [(name, result["retrieval"]) for name, result in _models(evaluation) if result.get("retrieval")]
    if not models:
        raise PictureError("the evaluation holds no retrieval")
    tasks = list(dict.fromkeys(cell["task"] for _, cells in models for cell in cells))
    depths = sorted({cell["depth"] for _, cells in models for cell in cells})
    figure = new_figure(max(2.6, 1.5 + 0.32 * len(depths)) * len(models))
    panels = figure.subplots(len(models), len(tasks), squeeze=False)
    for row, (name, cells) in zip(panels, models):
        for panel, task in zip(row, tasks):
            _heat_map(panel, [cell for cell in cells if cell["task"] == task])
            panel.set_title(task if len(models) == 1 else f"{task}, {name}", fontsize=10, color=INK)
    return figure


def _models(evaluation: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Name and results: of the model, and of the one it was compared with."""
    results = [evaluation, *([evaluation["against"]] if evaluation.get("against") else [])]
    return [(str(result.get("model", ("model", "other model")[at])), result) for at, result in enumerate(results)]


def _curves(panel: Axes, buckets: Sequence[Mapping[str, Any]], name: str, colour: str) -> None:
    sizes = [bucket["to"] for bucket in buckets]
    style: dict[str, Any] = {"color": colour, "marker": "o", "markersize": 5, "linewidth": 1.6}
    panel.plot(sizes, [bucket["loss"] for bucket in buckets], label=name, **style)
    near = [(bucket["to"], bucket["near_loss"]) for bucket in buckets if "near_loss" in bucket]
    if near:
        panel.plot(*zip(*near), color=colour, linestyle="--", linewidth=1.2, label=f"{name}, near context only")


def _heat_map(panel: Axes, cells: Sequence[Mapping[str, Any]]) -> None:
    import numpy as np

    lengths, depths = (sorted({cell[key] for cell in cells}) for key in ("length", "depth"))
    shares = np.full((len(depths), len(lengths)), np.nan)
    for cell in cells:
        if not cell["trials"]:  # such as a length that no text was made of
            continue
        share = cell["found"] / cell["trials"]
        at = depths.index(cell["depth"]), lengths.index(cell["length"])
        shares[at] = share
        colour = "white" if share < DARK else INK
        panel.text(at[1], at[0], f"{share:.0%}", ha="center", va="center", color=colour, fontsize=9)
    panel.imshow(shares, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    panel.set_xticks(range(len(lengths)), [_size(length) for length in lengths])
    panel.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    panel.set_xlabel("tokens of the text", color=INK)
    panel.set_ylabel("depth of the needle", color=INK)
    panel.set_xticks(np.arange(1, len(lengths)) - 0.5, minor=True)
    panel.set_yticks(np.arange(1, len(depths)) - 0.5, minor=True)
    panel.grid(which="minor", color="white", linewidth=2)  # one cell ends, the next begins
    panel.tick_params(length=0, which="both")
    panel.spines[:].set_visible(False)


def _style(panel: Axes, edges: Sequence[int], label: str) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    panel.set_xscale("log", base=2)
    panel.xaxis.set_major_locator(FixedLocator(list(edges)))
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xticklabels([_size(edge) for edge in edges])
    panel.set_xlabel(label, color=INK)
    panel.grid(axis="y", color=MUTED, alpha=0.2)
    panel.spines[["top", "right"]].set_visible(False)


def _size(tokens: int) -> str:
    """512, 8K and 2M, as contexts are named; any other number as it is."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if tokens >= size and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens}"
