"""StepPlan -> trace for Perfetto (ui.perfetto.dev) and chrome://tracing: a process for each node, a thread for each rank.

    node 0   rank 0  | 32,768 tokens over 4 ranks     |  6 documents  |
                       `-> flow to the next rank that shares the document
             rank 1  | 32,768 tokens over 4 ranks     |     | 2 documents |
    node 1   rank 2  ...

A slice is one micro-batch on one rank; its arguments say which documents it holds. Arrows lead through the ranks that share
a document. Times are those of the plan, of a simulator or of a measured run. Nothing is sent.

Format: "Trace Event Format" of the Chromium project, JSON object form; times in microseconds.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from hf_longctx.planner.plan import StepPlan
from hf_longctx.report.plans.rank_load import members_of_whole
from hf_longctx.report.training_runs.times import Run, Times

RUN = 8
"""Adjacent ranks written together where nodes are larger than what is written."""
MOST_NAMED = 20
"""Documents that the arguments of a slice name; of more, it says how many there are."""


def write_trace(plan: StepPlan, path: Path, most_ranks: int = 256, run: Run | None = None) -> None:
    """Writes the trace, compressed if `path` ends in ".gz" (Perfetto reads both). Missing directories are made.

    Args:
        most_ranks: of a plan with more ranks, at most this many are written: whole nodes, evenly spread.
        run: start and stop of each micro-batch in seconds. None: as the plan predicts.

    Raises:
        ValueError: `most_ranks` is below 1, or `run` is not of this plan.
    """
    if most_ranks < 1:
        raise ValueError(f"most_ranks={most_ranks} must be at least 1")
    shown = written_ranks(plan.world_size, plan.topology.node_size, most_ranks)
    events = _events(plan, Times.of(plan, run), shown)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".gz":
        # Without a name or time of its own in the file: the same plan gives the same bytes.
        with (
            open(path, "wb") as raw,
            gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as packed,
        ):
            _write(events, packed)
    else:
        with open(path, "wb") as plain:
            _write(events, plain)


def written_ranks(world_size: int, node: int, most_ranks: int) -> np.ndarray:
    """int64: all ranks, or whole nodes of them, evenly spread; where a node alone is too many, runs of 8."""
    if world_size <= most_ranks:
        return np.arange(world_size)
    run = node if node <= most_ranks else min(RUN, most_ranks)
    runs = -(-world_size // run)
    chosen = np.linspace(0, runs - 1, most_ranks // run).round().astype(np.int64)
    ranks = (chosen[:, None] * run + np.arange(run)).ravel()
    return ranks[ranks < world_size]


def _write(events: Iterator[dict[str, Any]], file: IO[bytes] | gzip.GzipFile) -> None:
    file.write(b'{"displayTimeUnit": "ms", "traceEvents": [')
    for i, event in enumerate(events):
        file.write((",\n" if i else "\n").encode() + json.dumps(event).encode())
    file.write(b"\n]}\n")


def _events(plan: StepPlan, times: Times, shown: np.ndarray) -> Iterator[dict[str, Any]]:
    node = plan.topology.node_size

    def where(rank: int) -> dict[str, int]:
        return {
            "pid": rank // node + 1,
            "tid": rank + 1,
        }  # process 0 and thread 0 are the idle ones of an operating system

    named = -1
    for rank in shown.tolist():
        if rank // node != named:
            named = rank // node
            yield {"ph": "M", "name": "process_name", "args": {"name": f"node {named}"}, **where(rank)}
            yield {"ph": "M", "name": "process_sort_index", "args": {"sort_index": named}, **where(rank)}
        yield {"ph": "M", "name": "thread_name", "args": {"name": f"rank {rank}"}, **where(rank)}
        yield {"ph": "M", "name": "thread_sort_index", "args": {"sort_index": rank}, **where(rank)}

    whole, member_of_whole = members_of_whole(plan)
    is_whole = np.zeros(len(plan.doc), bool)
    is_whole[whole] = True
    by_member = whole[np.argsort(member_of_whole, kind="stable")]
    first_of_member = np.searchsorted(np.sort(member_of_whole), np.arange(len(plan.rank) + 1))
    is_shown = np.zeros(plan.world_size, bool)
    is_shown[shown] = True
    written = is_shown[plan.rank]
    begins, ends = times.start / 1e3, times.stop / 1e3
    for i in range(len(plan.cost)):
        low, high = int(plan.first_member[i]), int(plan.first_member[i + 1])
        members = (low + np.flatnonzero(written[low:high])).tolist()
        if not members:
            continue
        rows = np.arange(plan.first_document[i], plan.first_document[i + 1])
        split = rows[~is_whole[rows]]
        begin, duration = float(begins[i]), float(ends[i] - begins[i])
        for place, m in enumerate(members):
            rank = int(plan.rank[m])
            mine = by_member[first_of_member[m] : first_of_member[m + 1]]
            arguments: dict[str, Any] = {
                "micro_batch": i,
                "tokens_on_this_rank": int(plan.member_tokens[m]),
                "ranks": high - low,
                "predicted_ms": int(plan.cost[i]) / 1e6,
            }
            if len(split):
                arguments["split_documents"] = _named(plan, split)
            if len(mine):
                arguments["whole_documents"] = _named(plan, mine)
            if plan.mode == "lockstep":
                arguments["round"] = int(plan.round[i])
            if plan.offload[i]:
                arguments["offload_per_mille"] = int(plan.offload[i])
            name = _title(plan, split, mine, high - low)
            category = "split" if len(split) else "whole"
            yield {
                "ph": "X",
                "name": name,
                "cat": category,
                "ts": begin,
                "dur": duration,
                **where(rank),
                "args": arguments,
            }
            if len(split) and len(members) > 1:
                # One after the other within the slices, because an arrow leads from earlier to later.
                phase = "s" if place == 0 else "f" if place == len(members) - 1 else "t"
                at = begin + duration * (place + 1) / (len(members) + 1)
                flow = {"ph": phase, "name": "shared document", "cat": "shared", "id": i, "ts": at, **where(rank)}
                yield flow | ({} if phase == "s" else {"bp": "e"})


def _title(plan: StepPlan, split: np.ndarray, whole: np.ndarray, ranks: int) -> str:
    shown = split if len(split) else whole
    tokens = f"{int(plan.length[shown].sum()):,} tokens"
    what = tokens if len(shown) == 1 else f"{len(shown):,} documents, {tokens}"
    return f"{what} over {ranks:,} ranks" if len(split) else what


def _named(plan: StepPlan, rows: np.ndarray) -> str:
    named = [f"{doc} ({length:,})" for doc, length in zip(plan.doc[rows[:MOST_NAMED]], plan.length[rows[:MOST_NAMED]])]
    more = [f"and {len(rows) - MOST_NAMED:,} more"] if len(rows) > MOST_NAMED else []
    return ", ".join(named + more)
