"""Charts of what each rank holds and receives, for a page: filled outlines over the ranks, 100 units high.

Up to 64 ranks are a bar each; of more, adjacent ranks share a step, whose highest rank counts, and whose mean is drawn
before it. Charts of several plans share their scale, whose marks are round numbers. Nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_longctx.planner.memory.memory_model import MemoryModel
from hf_longctx.planner.plan import StepPlan
from hf_longctx.report.pictures.axis import ticks, value_marks, whole_numbers
from hf_longctx.report.pictures.canvas import byte_unit, short_bytes
from hf_longctx.report.plans.rank_load import Bins, over_ranks, peak_parts, received_tokens

MOST_BINS = 256
MOST_BARS = 64
"""With more steps than this, no gaps are between them."""


def peak_memory(plan: StepPlan, memory: MemoryModel) -> int:
    """Bytes of the rank that needs most."""
    return max(sum(parts.values()) for parts in peak_parts(plan, memory, over_ranks(plan.peak_tokens, MOST_BINS)))


def token_charts(plans: Sequence[StepPlan]) -> list[dict[str, Any]]:
    """Chart of each plan the most tokens that each rank holds in one micro-batch."""
    top = max(int(max(plan.peak_tokens.max(), plan.topology.capacities.max())) for plan in plans)
    charts = []
    for plan in plans:
        peak, capacity = plan.peak_tokens, plan.topology.capacity
        worst = int(peak.argmax())
        charts.append(
            _chart(
                "Most tokens held at a time",
                over_ranks(peak, MOST_BINS),
                top,
                "tokens",
                f"Rank {worst:,} holds most, {peak[worst]:,}; ranks hold {peak.mean():,.0f} on average. Capacity is "
                f"{capacity:,} tokens{'' if plan.topology.memory is None else ', times the factor of each rank'}.",
                limit=capacity if plan.topology.memory is None else None,
            )
        )
    return charts


def received_charts(plans: Sequence[StepPlan], kv_bytes_per_token: int | None) -> list[dict[str, Any] | None]:
    """Chart of each plan the tokens, or bytes, of keys and values that each rank receives in forward. None if it exchanges
    nothing."""
    per_token = kv_bytes_per_token or 1
    kind = "bytes" if kv_bytes_per_token else "tokens"
    received = [received_tokens(plan) * per_token for plan in plans]
    top = max(float(values.max()) for values in received)
    charts: list[dict[str, Any] | None] = []
    for values in received:
        if not values.any():
            charts.append(None)
            continue
        worst = int(values.argmax())

        def said(count: float) -> str:
            return short_bytes(round(count)) if kv_bytes_per_token else f"{count:,.0f} tokens"

        charts.append(
            _chart(
                "Keys and values received in forward",
                over_ranks(values, MOST_BINS),
                top,
                kind,
                f"Rank {worst:,} receives most, {said(values[worst])}; ranks receive {said(values.mean())} on average.",
            )
        )
    return charts


def memory_charts(plans: Sequence[StepPlan], memory: MemoryModel) -> list[dict[str, Any]]:
    """Chart of each plan the bytes of each rank at its worst moment, by what they are for."""
    peaks = []
    for plan in plans:
        bins = over_ranks(plan.peak_tokens, MOST_BINS)
        peaks.append((bins, peak_parts(plan, memory, bins)))
    marks, top = _scale(max(sum(parts.values()) for _, worst in peaks for parts in worst), "bytes")
    charts = []
    for bins, worst in peaks:
        names = [name for name in worst[0] if any(parts[name] > 0 for parts in worst)]
        totals = [sum(parts.values()) for parts in worst]
        most = int(np.argmax(totals))
        stacked, layers = np.zeros(len(worst)), []
        for name in names:
            above = stacked + [max(0, parts[name]) for parts in worst]
            layers.append({"path": _outline(stacked / top, above / top), "colour": name})
            stacked = above
        where = (
            f"Rank {bins.first[most]:,}" if bins.first[most] == bins.last[most] else f"A rank of {_ranks(bins, most)}"
        )
        series = [["peak", totals, "bytes"], *([name, [parts[name] for parts in worst], "bytes"] for name in names)]
        charts.append(
            {
                "title": "Memory at the worst moment",
                "caption": f"{where} needs most, {short_bytes(totals[most])}.",
                "marks": marks,
                **_along(bins),
                "width": len(worst),
                "layers": layers,
                "limit": None,
                "legend": [{"colour": name, "text": name} for name in names],
                "of_ranks": {"first": bins.first.tolist(), "last": bins.last.tolist(), "series": series},
            }
        )
    return charts


def _chart(title: str, bins: Bins, most: float, kind: str, caption: str, limit: float | None = None) -> dict[str, Any]:
    marks, top = _scale(most, kind)
    zero, highest, mean = np.zeros(len(bins.first)), bins.most / top, bins.mean / top
    together = bool((bins.last > bins.first).any())
    layers = [{"path": _outline(zero, highest), "colour": "bar"}]
    series = [["most" if together else title.lower(), bins.most.round().astype(np.int64).tolist(), kind]]
    legend: list[dict[str, Any]] = []
    if together:
        layers.append({"path": _outline(zero, mean), "colour": "bar-mean"})
        series.append(["mean", bins.mean.round().astype(np.int64).tolist(), kind])
        width = int(bins.last[0] - bins.first[0]) + 1
        legend += [
            {"colour": "bar", "text": f"most of {width:,} adjacent ranks"},
            {"colour": "bar-mean", "text": "mean of them"},
        ]
    if limit is not None:
        legend.append({"across": "", "text": "capacity"})
    return {
        "title": title,
        "caption": caption,
        "marks": marks,
        **_along(bins),
        "width": len(highest),
        "layers": layers,
        "limit": None if limit is None else round(100 * limit / top, 2),
        "legend": legend,
        "of_ranks": {"first": bins.first.tolist(), "last": bins.last.tolist(), "series": series},
    }


def _scale(most: float, kind: str) -> tuple[list[dict[str, Any]], float]:
    """Marks of the vertical axis, from none to round tokens or bytes that are enough, and how many its top is."""
    unit, size = byte_unit(most) if kind == "bytes" else ("", 1)
    marks = ticks(0, most / size)
    return value_marks(marks, unit), marks[-1] * size


def _along(bins: Bins) -> dict[str, Any]:
    """The horizontal axis: ranks, each below the middle of its bar."""
    ranks = whole_numbers(0, int(bins.last[-1]), doubling=True)
    bars = np.searchsorted(bins.last, ranks)
    places = (100 * (bars + 0.5) / len(bins.last)).round(3).tolist()
    return {"along": "rank", "places": [{"at": at, "text": f"{rank:,}"} for at, rank in zip(places, ranks)]}


def _ranks(bins: Bins, i: int) -> str:
    return f"{bins.first[i]:,} to {bins.last[i]:,}"


def _outline(below: np.ndarray, above: np.ndarray) -> str:
    """Draw an SVG path: a bar or step for each bin, from share `below` to share `above` of the height."""
    bins = len(below)
    low, high = (np.round(100 * (1 - share), 2).tolist() for share in (below, above))
    if bins <= MOST_BARS:
        return "".join(
            f"M{i + 0.1:g} {low[i]:g}V{high[i]:g}H{i + 0.9:g}V{low[i]:g}z" for i in range(bins) if high[i] < low[i]
        )
    up = "".join(f"V{high[i]:g}H{i + 1}" for i in range(bins))
    down = "".join(f"V{low[i]:g}H{i}" for i in reversed(range(bins)))
    return f"M0 {low[0]:g}{up}{down}z"
