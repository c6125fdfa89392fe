"""StepPlan -> what a browser needs to draw its timeline and to name every document in it, in few bytes.

Columns of small integers, split into planes of bytes (all lowest bytes, then all second ones ...), compressed together
and written in base64: 100,000 documents on 16,384 ranks are 0.6 MB. Rows are ranks, or every second, fourth ... rank where
a plan would take more than its room; micro-batches that none of these runs are left out.

Nothing is sent between ranks. page/timeline.js reads what is written here.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_longctx.planner.plan import StepPlan
from hf_longctx.report.plans.rank_load import members_of_whole
from hf_longctx.report.training_runs.times import Times

TICKS = 1 << 24
"""Steps into which a plan's time is divided: three bytes."""


def packed(columns: dict[str, np.ndarray]) -> dict[str, Any]:
    """JSON-able: names, counts and widths of the columns (integers >= 0), and their bytes."""
    fields, planes = [], []
    for name, column in columns.items():
        width = max(1, (int(column.max(initial=0)).bit_length() + 7) // 8)
        fields.append([name, len(column), width])
        planes.append(column.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :width].T.tobytes())
    return {"fields": fields, "data": base64.b64encode(zlib.compress(b"".join(planes), 9)).decode()}


def timeline_columns(plan: StepPlan, times: Times, every: int) -> dict[str, Any]:
    """JSON-able: micro-batches, their ranks and documents, of every so many ranks from rank 0 on."""
    whole, member_of_whole = members_of_whole(plan)
    micro_batch = np.repeat(np.arange(len(plan.cost)), plan.members)

    shown = plan.rank % every == 0
    kept = np.bincount(micro_batch[shown], minlength=len(plan.cost)) > 0
    place = np.cumsum(shown) - 1  # of a shown member among those shown
    first_place = np.concatenate([[0], np.cumsum(np.bincount(micro_batch[shown], minlength=len(plan.cost)))])
    row = plan.rank[shown] // every
    step = np.diff(row, prepend=0) - 1  # 0 where a rank follows its neighbour
    opens = np.diff(micro_batch[shown], prepend=-1) != 0
    step[opens] = row[opens]

    # Position of the holder among the shown members of its micro-batch, from 1; 0: split.
    holder = np.zeros(len(plan.doc), np.int64)
    holder[whole] = 1 + place[member_of_whole] - first_place[micro_batch[member_of_whole]]
    listed = kept[plan.micro_batch_of_document]
    listed[whole] &= shown[member_of_whole]
    ticks = TICKS / times.makespan
    begins = np.minimum(np.round(times.start * ticks), TICKS - 1).astype(np.int64)
    ends = np.minimum(np.round(times.stop * ticks), TICKS - 1).astype(np.int64)
    columns = {
        "start": begins[kept],
        "duration": np.maximum(ends - begins, 0)[kept],
        "ranks": plan.members[kept],
        "members": np.diff(first_place)[kept],
        "documents": np.bincount(plan.micro_batch_of_document[listed], minlength=len(plan.cost))[kept],
        "step": step,
        "tokens": plan.member_tokens[shown],
        "doc": plan.doc[listed],
        "holder": holder[listed],
    }
    return {
        "rows": -(-plan.world_size // every),
        "every": every,
        "tick": 1 / ticks,
        "makespan": times.makespan,
        **packed(columns),
    }


def timelines_within(plans: Sequence[StepPlan], times: Sequence[Times], most_bytes: int) -> list[dict[str, Any]]:
    """`timeline_columns` of each plan, all of whose ranks are shown if together they take at most so many bytes.

    If not, plans after the first, the largest of them first, show every second rank, every fourth ...; then the first.
    """
    every = [1] * len(plans)
    timelines = [timeline_columns(plan, time, 1) for plan, time in zip(plans, times)]
    sizes = [len(columns["data"]) for columns in timelines]
    while sum(sizes) > most_bytes:
        thinnable = [i for i in range(len(plans)) if every[i] < plans[i].world_size]
        if not thinnable:
            break
        others = [i for i in thinnable if i and sizes[i] > most_bytes // (4 * len(plans))]
        i = max(others or thinnable, key=lambda i: sizes[i])
        every[i] *= 2
        timelines[i] = timeline_columns(plans[i], times[i], every[i])
        sizes[i] = len(timelines[i]["data"])
    return timelines
