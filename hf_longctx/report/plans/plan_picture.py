"""StepPlan -> picture: ranks from top to bottom, planned time from left to right.

    rank 0  | 5,012 tokens over 2 ranks | 6 documents |//|     coloured: one document on several ranks, one block over
    rank 1  |                           | 9 documents    |               the ranks that stand next to each other
                                                               grey:     whole documents, packed; no communication
                                                               hatched:  a rank waits

A block is one micro-batch on a run of adjacent ranks, so a picture of 1,024 ranks has few more blocks than
micro-batches. A label is drawn where it fits, the most detailed one that does. Where a rank is less than two pixels high,
blocks become pixels, each of the mean colour of what its ranks do in its time. Nothing is sent between ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hf_longctx.planner.plan import StepPlan
from hf_longctx.planner.topology import SPLIT
from hf_longctx.report.pictures.canvas import (
    DOTS_PER_INCH,
    INK,
    MUTED,
    PALE,
    VERMILLION,
    new_figure,
    save,
    short_tokens,
    time_unit,
)
from hf_longctx.report.pictures.raster import covered
from hf_longctx.report.plans.rank_load import members_of_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

LABEL_POINTS = 8.0
LUMINANCE = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in brightness (ITU-R BT.601)."""
RASTER_POINTS = 2 * 72 / DOTS_PER_INCH
"""Height of a rank below which blocks are drawn as pixels."""
EDGED_POINTS = 5.0
"""Height of a block among pixels from which it has an edge."""
RASTER_PIXELS = (900, 1400)
"""Lines and columns; about those of a panel of six inches."""
GAMMA = 2.2
"""Exponent of a screen: light is its value to this power."""
MOST_RANKS_NAMED = 16
"""With more ranks than this the axis names every second, fourth, eighth ... one."""


@dataclass(frozen=True, slots=True)
class Block:
    """One micro-batch on adjacent ranks that share a document, or on one rank that shares none."""

    first_rank: int
    last_rank: int
    start: int
    stop: int
    """Predicted nanoseconds since the beginning of the step."""
    split_tokens: int
    """Length of the longest document shared with other ranks; 0 if there is none."""
    split_ranks: int
    """Ranks that share it, 0 if there is none; more than the block's where they do not all stand next to each other."""
    split_documents: int
    """Documents that the block's ranks share with each other or with ranks elsewhere."""
    documents: int
    tokens: int
    """Held by the block's ranks."""

    def labels(self) -> Iterator[str]:
        """Yield labels of the block, the most detailed first."""
        if self.split_documents > 1:
            tokens = self.tokens
            yield f"{self.documents} documents over {self.split_ranks} ranks"
            yield f"{self.documents} documents\nover {self.split_ranks} ranks"
            yield f"{self.documents} docs\n{short_tokens(tokens)}"
        elif self.split_documents:
            tokens = self.split_tokens
            yield f"{tokens:,} tokens over {self.split_ranks} ranks"
            yield f"{tokens:,} tokens\nover {self.split_ranks} ranks"
            yield f"{tokens:,} tokens"
        else:
            tokens = self.tokens
            noun = "document" if self.documents == 1 else "documents"
            yield f"{self.documents} {noun}, {tokens:,} tokens"
            yield f"{self.documents} {noun}\n{tokens:,} tokens"
            yield f"{self.documents} {noun[:3]}{noun[8:]}\n{short_tokens(tokens)}"
        yield short_tokens(tokens)


def draw_plans(plans: Sequence[StepPlan], path: Path, first_step: int = 1) -> None:
    """Draws consecutive optimizer steps below each other, on one time axis; `first_step` is the number of the first.

    Raises PictureError if matplotlib is not installed.
    """
    save(plans_figure(plans, first_step), path)


def plans_figure(plans: Sequence[StepPlan], first_step: int = 1) -> Figure:
    """The picture of `draw_plans`, not yet saved."""
    if not plans:
        raise ValueError("there is no plan to draw: plans is empty")
    ranks = max(plan.world_size for plan in plans)
    panel_inches = min(0.55 + 0.42 * ranks, 6.0 if len(plans) == 1 else 3.2)
    figure = new_figure(1.1 + (panel_inches + 0.35) * len(plans))
    axes = list(figure.subplots(len(plans), 1, sharex=True, squeeze=False)[:, 0])

    steps = [blocks_of(plan) for plan in plans]
    last = max(max(plan.lower_bound, *(block.stop for block in blocks)) for plan, blocks in zip(plans, steps))
    unit, nanoseconds = time_unit(last)
    split_lengths = {block.split_tokens for blocks in steps for block in blocks if block.split_ranks}
    colours = _length_colours(split_lengths)
    row_points = 72 * panel_inches / ranks
    for number, (ax, plan, blocks) in enumerate(zip(axes, plans, steps), start=first_step):
        _draw_blocks(ax, plan, blocks, nanoseconds, colours, row_points)
        _draw_titles(ax, plan, f"Step {number}:  " if len(plans) > 1 else "")
    axes[-1].set_xlabel(f"planned time ({unit})")
    axes[-1].set_xlim(0, 1.01 * last / nanoseconds)
    handles = _legend(colours if split_lengths else None)
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    if len(split_lengths) > 1:
        bar = figure.colorbar(
            colours, ax=axes, pad=0.015, aspect=30, fraction=0.03, format=lambda n, _: _exactly(round(n))
        )
        bar.set_label("tokens of a split document")
        bar.outline.set_visible(False)
        bar.set_ticks(_round_lengths(min(split_lengths), max(split_lengths)))
        bar.minorticks_off()

    figure.draw_without_rendering()  # fixes the axes' size, which decides the labels that fit
    for ax, blocks in zip(axes, steps):
        _label_blocks(ax, blocks, nanoseconds, colours)
    return figure


def blocks_of(plan: StepPlan) -> list[Block]:
    """The blocks of a plan, ordered by micro-batch and rank."""
    timeline = plan.timeline()
    micro_batches, members = len(plan.cost), plan.members
    micro_batch = np.repeat(np.arange(micro_batches), members)
    split = (plan.holder == SPLIT) & (members > 1)[plan.micro_batch_of_document]
    splits = np.bincount(plan.micro_batch_of_document[split], minlength=micro_batches)
    longest = np.zeros(micro_batches, np.int64)
    np.maximum.at(longest, plan.micro_batch_of_document[split], plan.length[split])
    whole = np.bincount(members_of_whole(plan)[1], minlength=len(plan.rank))

    # Adjacent ranks that share a document are one block.
    joins = np.zeros(len(plan.rank), bool)
    joins[1:] = (np.diff(micro_batch) == 0) & (np.diff(plan.rank) == 1) & (splits > 0)[micro_batch[1:]]
    block = np.cumsum(~joins) - 1
    first, last = np.flatnonzero(~joins), np.flatnonzero(np.append(~joins[1:], True))
    of = micro_batch[first]
    columns = (
        plan.rank[first],
        plan.rank[last],
        timeline.start[of],
        timeline.stop[of],
        longest[of],
        np.where(splits > 0, np.minimum(members, longest), 0)[of],
        splits[of],
        np.bincount(block, whole).astype(np.int64) + splits[of],
        np.bincount(block, plan.member_tokens).astype(np.int64),
    )
    return [Block(*row) for row in zip(*(column.tolist() for column in columns))]


def _length_colours(split_lengths: set[int]) -> ScalarMappable:
    """Length of a split document -> colour, longer is darker; viridis is legible to colour-blind people and in grey."""
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, LogNorm

    shortest, longest = min(split_lengths, default=1), max(split_lengths, default=1)
    viridis = ListedColormap(colormaps["viridis"](np.linspace(0.78, 0.22, 256)))
    limits = (shortest, longest) if shortest < longest else (shortest / 2, shortest * 2)
    return ScalarMappable(LogNorm(*limits), viridis)


def _round_lengths(shortest: int, longest: int) -> list[int]:
    """List at most six powers of two between two lengths; the two themselves where there is no more than one."""
    powers = [2**n for n in range(shortest.bit_length() - 1, longest.bit_length()) if shortest <= 2**n <= longest]
    return powers[:: -(-len(powers) // 6)] if len(powers) > 1 else [shortest, longest]


def _exactly(tokens: int) -> str:
    """Write a length with all its digits, or as 8K where it is a power of two."""
    return f"{tokens:,}" if tokens & (tokens - 1) else short_tokens(tokens)


def _faces(blocks: list[Block], colours: ScalarMappable) -> np.ndarray:
    """Each block's colour, RGBA [blocks, 4]."""
    tokens = np.array([block.split_tokens for block in blocks])
    return np.where(tokens[:, None] > 0, colours.to_rgba(np.maximum(tokens, 1)), PALE)


def _draw_blocks(
    ax: Axes, plan: StepPlan, blocks: list[Block], nanoseconds: float, colours: ScalarMappable, row_points: float
) -> None:
    from matplotlib.collections import PolyCollection
    from matplotlib.patches import Rectangle

    makespan = max(block.stop for block in blocks) / nanoseconds
    ax.add_patch(Rectangle((0, -0.5), makespan, plan.world_size, facecolor="white", edgecolor=PALE, hatch="////", lw=0))
    faces = _faces(blocks, colours)
    if row_points < RASTER_POINTS:
        _draw_pixels(ax, plan, blocks, nanoseconds, faces)
        # Edges alone, of the blocks that are high enough to have some.
        blocks = [block for block in blocks if row_points * (block.last_rank + 1 - block.first_rank) > EDGED_POINTS]
        faces = np.zeros((len(blocks), 4))
    corners, widths = [], []
    for block in blocks:
        left, right = block.start / nanoseconds, block.stop / nanoseconds
        top, bottom = block.first_rank - 0.5, block.last_rank + 0.5
        corners.append([(left, top), (left, bottom), (right, bottom), (right, top)])
        # Where a rank is a few pixels high, wide white edges would be all that is left of it.
        widths.append(min(1.0, 0.12 * row_points * (bottom - top)))
    ax.add_collection(PolyCollection(corners, facecolors=faces, edgecolors="white", linewidths=widths, zorder=1.6))
    ax.axvline(plan.lower_bound / nanoseconds, color=VERMILLION, linestyle="--", linewidth=1.2)


def _draw_pixels(ax: Axes, plan: StepPlan, blocks: list[Block], nanoseconds: float, faces: np.ndarray) -> None:
    lines, columns = min(RASTER_PIXELS[0], plan.world_size), RASTER_PIXELS[1]
    makespan = max(block.stop for block in blocks)
    edges = [(block.first_rank, block.last_rank + 1, block.start, block.stop) for block in blocks]
    per_pixel = [lines / plan.world_size] * 2 + [columns / makespan] * 2
    light = np.hstack([faces[:, :3] ** GAMMA, faces[:, 3:]])  # colours mix as light does
    pixels = covered(np.array(edges) * per_pixel, light, lines, columns)
    busy = pixels[..., 3:]
    pixels[..., :3] = np.clip(pixels[..., :3] / np.maximum(busy, 1e-9), 0, 1) ** (1 / GAMMA)
    extent = (0, makespan / nanoseconds, plan.world_size - 0.5, -0.5)
    # Transparent where ranks wait, which shows the hatching behind.
    ax.imshow(np.clip(pixels, 0, 1), extent=extent, aspect="auto", interpolation="antialiased", zorder=1.5)


def _draw_titles(ax: Axes, plan: StepPlan, prefix: str) -> None:
    from matplotlib.ticker import MultipleLocator

    summary = plan.summary()
    documents = f"{summary.documents:,} documents" if summary.documents > 1 else "1 document"
    ranks = f"{plan.world_size:,} ranks" if plan.world_size > 1 else "1 rank"
    ax.set_title(f"{prefix}{documents}, {summary.tokens:,} tokens on {ranks}", loc="left", fontsize=10, color=INK)
    balance = f"{summary.balance:.3f} \N{MULTIPLICATION SIGN} lower bound, {summary.idle_share:.1%} idle"
    ax.set_title(balance, loc="right", fontsize=9, color=MUTED)
    ax.set_ylim(plan.world_size - 0.5, -0.5)
    between = 1
    while plan.world_size > MOST_RANKS_NAMED * between:
        between *= 2
    ax.yaxis.set_major_locator(MultipleLocator(between))
    ax.set_ylabel("rank")
    ax.tick_params(axis="y", length=0)
    ax.spines[["top", "right", "left"]].set_visible(False)


def _legend(colours: ScalarMappable | None) -> list:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    split = [] if colours is None else [Patch(facecolor=colours.cmap(0.5), label="document split over several ranks")]
    return [
        *split,
        Patch(facecolor=PALE, label="whole documents on one rank"),
        Patch(facecolor="white", edgecolor=PALE, hatch="////", label="idle"),
        Line2D([], [], color=VERMILLION, linestyle="--", linewidth=1.2, label="lower bound"),
    ]


def _label_blocks(ax: Axes, blocks: list[Block], nanoseconds: float, colours: ScalarMappable) -> None:
    """Writes each block's most detailed label that fits, upright if need be."""
    from matplotlib.patheffects import withStroke

    pixels = LABEL_POINTS * DOTS_PER_INCH / 72
    line, character = 1.35 * pixels, 0.62 * pixels  # mean advance of matplotlib's DejaVu Sans, rounded up
    extent = ax.get_window_extent()
    per_time = extent.width / (ax.get_xlim()[1] - ax.get_xlim()[0]) / nanoseconds
    per_rank = extent.height / abs(ax.get_ylim()[1] - ax.get_ylim()[0])
    for block, face in zip(blocks, _faces(blocks, colours)):
        width, height = (block.stop - block.start) * per_time, (block.last_rank + 1 - block.first_rank) * per_rank
        for rotation, along, across in ((0, width, height), (90, height, width)):
            fitting = (
                label
                for label in block.labels()
                if (max(map(len, label.split("\n"))) + 1) * character <= along
                and (label.count("\n") + 1) * line <= across
            )
            if label := next(fitting, None):
                x, y = (block.start + block.stop) / 2 / nanoseconds, (block.first_rank + block.last_rank) / 2
                text = ax.text(x, y, label, ha="center", va="center", rotation=rotation, size=LABEL_POINTS)
                text.set_color("white" if np.dot(face[:3], LUMINANCE) < 0.5 else INK)
                text.set_path_effects(
                    [withStroke(linewidth=2, foreground=tuple(face))]
                )  # over the line of the lower bound
                break
