"""Certificates of plans of the same documents, side by side: a sentence, bars, a table, and the documents by length.

Everything is text and numbers for page/plan_page.html.j2. Nothing is sent between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_longctx.planner.plan import PlanSummary, StepPlan
from hf_longctx.report.pictures.canvas import short_bytes
from hf_longctx.report.planner_names import OURS, PLANNER_NAMES
from hf_longctx.report.training_runs.times import Times

SHORTEST_BUCKET = 128
"""Tokens; documents up to this length are counted together."""
UNITS = ((3.6e12, "h", 2), (6e10, "min", 10), (1e9, "s", 1), (1e6, "ms", 1), (1e3, "µs", 1), (1, "ns", 0))
"""Nanoseconds, name, and from how many of them on it is used."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """Plans of the same documents, ours first; lists are in their order."""

    plans: Sequence[StepPlan]
    names: list[str]
    summaries: list[PlanSummary]
    kv_bytes_per_token: int | None
    """None: exchanges are counted in tokens."""
    peaks: list[int] | None
    """Bytes on the fullest rank. None: tokens are counted."""
    simulated: list[Times] | None
    """Simulated times of the runs, if there are any."""

    def time(self, ns: float) -> str:
        """Write a time in the unit that suits our plan."""
        ours = self.summaries[0].makespan
        size, unit = next((size, unit) for size, unit, least in UNITS if ours >= least * size)
        return f"{ns / size:.4g} {unit}"

    @property
    def makespans(self) -> list[float]:
        """Simulated ones where there are any, or planned ones."""
        if self.simulated:
            return [times.makespan for times in self.simulated]
        return [summary.makespan for summary in self.summaries]

    def idle_shares(self) -> list[float]:
        """Return the idle shares of the same."""
        if not self.simulated:
            return [summary.idle_share for summary in self.summaries]
        busy = [float((plan.members * (t.stop - t.start)).sum()) for plan, t in zip(self.plans, self.simulated)]
        return [1 - b / (plan.world_size * t.makespan) for b, plan, t in zip(busy, self.plans, self.simulated)]

    def exchange(self, tokens: int) -> str:
        if self.kv_bytes_per_token is None:
            return f"{tokens:,} tokens"
        return short_bytes(tokens * self.kv_bytes_per_token)

    def headline(self) -> str:
        ours = self.summaries[0]
        documents = "1 document" if ours.documents == 1 else f"{ours.documents:,} documents"
        ranks = "1 rank" if ours.world_size == 1 else f"{ours.world_size:,} ranks"
        promise = f"{self.time(ours.makespan)}, {ours.balance:.3f} times what no plan can beat"
        if self.simulated:
            took = f"takes {self.time(self.makespans[0])} in simulation (planned {promise})"
        else:
            took = f"is planned to take {promise}"
        planner = f"{self.names[0]}{', our planner,' if self.plans[0].planner == OURS else ''}"
        sentence = (
            f"{documents} ({ours.tokens:,} tokens) on {ranks}: with {planner} the step {took}, and ranks wait "
            f"{self.idle_shares()[0]:.1%} of that time."
        )
        factors = [makespan / self.makespans[0] for makespan in self.makespans[1:]]
        if not factors:
            return sentence
        others = [f"{factor:.2f} with {name}" for name, factor in zip(self.names[1:], factors)]
        others[0] = others[0].replace(" with ", " times as long with ", 1)
        return f"{sentence} It would take {'; '.join(others)}."

    def planners(self) -> list[dict[str, Any]]:
        """Each plan's planner: its name, what is said of it in small print, its name in code, and whether it is ours."""
        return [
            {
                "name": name,
                "detail": PLANNER_NAMES.get(plan.planner, ("", ""))[1],
                "code": plan.planner,
                "ours": plan.planner == OURS,
            }
            for name, plan in zip(self.names, self.plans)
        ]

    def bars(self) -> list[dict[str, Any]]:
        """Time of the step, what travels, what the fullest rank holds."""
        return [self._time_bars(), self._exchange_bars(), self._held_bars()]

    def _time_bars(self) -> dict[str, Any]:
        waiting = [makespan * share for makespan, share in zip(self.makespans, self.idle_shares())]
        parts = [{"bar": makespan - waits, "idle": waits} for makespan, waits in zip(self.makespans, waiting)]
        texts = [self.time(makespan) for makespan in self.makespans]
        legend = [{"colour": "bar", "text": "ranks computing"}, {"colour": "idle", "text": "ranks waiting"}]
        if self.simulated:  # of a prediction, the bound says nothing about a simulation
            return self._bars("Simulated time of the step", parts, texts, legend)
        legend.append({"dashed": "", "text": "lower bound"})
        return self._bars("Planned time of the step", parts, texts, legend, [s.lower_bound for s in self.summaries])

    def _exchange_bars(self) -> dict[str, Any]:
        parts = [{"bar": s.exchanged_tokens - s.redundant_tokens, "extra": s.redundant_tokens} for s in self.summaries]
        texts = [self.exchange(summary.exchanged_tokens) for summary in self.summaries]
        legend = [
            {"colour": "bar", "text": "on the fewest ranks that fit"},
            {"colour": "extra", "text": "more, for balance"},
        ]
        return self._bars("Keys and values exchanged in forward", parts, texts, legend)

    def _held_bars(self) -> dict[str, Any]:
        if self.peaks:
            texts = [short_bytes(peak) for peak in self.peaks]
            return self._bars("Memory of the fullest rank", [{"bar": peak} for peak in self.peaks], texts, [])
        most = [summary.most_tokens_per_rank for summary in self.summaries]
        return self._bars(
            "Tokens on the fullest rank, at a time",
            [{"bar": tokens} for tokens in most],
            [f"{tokens:,} tokens" for tokens in most],
            [{"dashed": "", "text": "capacity"}],
            [plan.topology.capacity for plan in self.plans],
        )

    def _bars(
        self,
        title: str,
        parts: Sequence[dict[str, Any]],
        texts: list[str],
        legend: list[dict[str, str]],
        ticks: list[int] | None = None,
    ) -> dict[str, Any]:
        """`parts` are colour -> length, one after the other; `ticks` are marked across the bars."""
        top = max(1e-9, *(sum(part.values()) for part in parts), *(ticks or []))
        rows = [
            {
                "planner": planner,
                "parts": [{"colour": colour, "percent": round(100 * size / top, 3)} for colour, size in part.items()],
                "tick": round(100 * ticks[i] / top, 3) if ticks else None,
                "text": text,
            }
            for i, (planner, part, text) in enumerate(zip(self.planners(), parts, texts))
        ]
        return {"title": title, "rows": rows, "legend": legend}

    def table(self) -> list[dict[str, Any]]:
        """Columns; cells are in the order of the plans."""

        def spread(values: tuple[int, float, int]) -> str:
            return f"{values[0]:,} / {values[1]:,g} / {values[2]:,}"

        summaries = self.summaries
        columns = {"planned step": [self.time(s.makespan) for s in summaries]}
        if self.simulated:
            columns["simulated step"] = [self.time(makespan) for makespan in self.makespans]
            columns["simulated idle"] = [f"{share:.1%}" for share in self.idle_shares()]
        columns["times the lower bound"] = [f"{s.balance:.3f}" for s in summaries]
        columns["idle"] = [f"{s.idle_share:.1%}" for s in summaries]
        columns["exchanged"] = [self.exchange(s.exchanged_tokens) for s in summaries]
        columns["of that for balance"] = [self.exchange(s.redundant_tokens) for s in summaries]
        columns["of that between nodes"] = [self.exchange(s.between_nodes_tokens) for s in summaries]
        columns["documents split"] = [f"{s.split_documents:,}" for s in summaries]
        columns["ranks per document *"] = [spread(s.ranks_per_document) for s in summaries]
        columns["micro-batches per rank *"] = [spread(s.micro_batches_per_rank) for s in summaries]
        columns["most tokens on a rank"] = [f"{s.most_tokens_per_rank:,}" for s in summaries]
        if self.peaks:
            columns["most memory on a rank"] = [short_bytes(peak) for peak in self.peaks]
        if any(s.offloaded_tokens for s in summaries):
            columns["tokens offloaded"] = [f"{s.offloaded_tokens:,}" for s in summaries]
        return [{"title": title, "cells": cells} for title, cells in columns.items()]

    def notes(self) -> str:
        modes = sorted({plan.mode for plan in self.plans})
        notes = ["* least / median / most."]
        notes += [f"Mode: {modes[0]}."] if len(modes) == 1 else []
        notes += [
            "The lower bound is the time that no plan of these documents in the same mode can beat.",
            "Exchanged: keys and values that ranks receive from each other in forward; backward sends them again, and "
            "their gradients back. For balance: what would not travel, were every document on the fewest ranks that hold "
            "it. Between nodes: once for each node, where it is passed on inside.",
            "Predicted times leave out the reduction of gradients and the optimizer.",
        ]
        if self.simulated:
            notes.append(
                "A simulated step is counted until its last micro-batch stops; ranks whose micro-batches exchange count as "
                "busy. Bars and timelines show the simulated runs."
            )
        if self.peaks:
            notes.append("Memory is that of weights, gradients, optimizer and the worst moment of a micro-batch.")
        return " ".join(notes)


def length_buckets(lengths: np.ndarray) -> list[dict[str, int]]:
    """Documents and tokens by length (int64 [documents], tokens): up to 128 tokens, then doubling.

    A bucket's documents are longer than `from` and at most `to` tokens long.
    """
    place = _places(lengths)
    documents, tokens = np.bincount(place), np.bincount(place, lengths).astype(np.int64)
    return [
        {
            "from": SHORTEST_BUCKET << (i - 1) if i else 0,
            "to": SHORTEST_BUCKET << i,
            "documents": int(documents[i]),
            "tokens": int(tokens[i]),
        }
        for i in range(int(place.min()), len(documents))
    ]


def bucket_rows(buckets: Sequence[Mapping[str, int]]) -> list[dict[str, Any]]:
    """Turn what `length_buckets` gives into rows of a table, with bars as long as what they stand for."""
    counts = {name: np.array([bucket[name] for bucket in buckets]) for name in ("documents", "tokens")}
    percents = {name: 100 * column / column.max() for name, column in counts.items()}
    return [
        {
            "name": f"to {_short(bucket['to'])}"
            if not bucket["from"]
            else f"{_short(bucket['from'])} to {_short(bucket['to'])}",
            "documents": bucket["documents"],
            "documents_percent": round(float(percents["documents"][i]), 2),
            "tokens": bucket["tokens"],
            "tokens_percent": round(float(percents["tokens"][i]), 2),
            "share": float(bucket["tokens"] / counts["tokens"].sum()),
        }
        for i, bucket in enumerate(buckets)
    ]


def buckets(lengths: np.ndarray, plan: StepPlan) -> list[dict[str, Any]]:
    """Documents of a plan and their tokens by length, and over how many ranks they are spread."""
    ranks = np.empty(len(lengths), np.int64)
    ranks[plan.doc] = plan.ranks_of_document
    place = _places(lengths)
    rows = bucket_rows(length_buckets(lengths))
    for i, row in enumerate(rows, int(place.min())):
        mine = ranks[place == i]
        spread = f"{mine.min():,}" if len(mine) and mine.min() == mine.max() else ""
        row["ranks"] = spread or (f"{mine.min():,} to {mine.max():,}" if len(mine) else "")
    return rows


def _places(lengths: np.ndarray) -> np.ndarray:
    """int64 [documents]: which bucket each is in."""
    return np.ceil(np.log2(np.maximum(lengths, SHORTEST_BUCKET) / SHORTEST_BUCKET)).astype(np.int64)


def _short(tokens: int) -> str:
    """K is 1,024 tokens."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if tokens >= size:
            return f"{tokens // size}{unit}"
    return str(tokens)
