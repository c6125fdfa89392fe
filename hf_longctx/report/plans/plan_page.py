"""StepPlans of one global batch -> one HTML page that needs nothing but a browser: no network, no fonts, no libraries.

What it shows, from top to bottom:

    a sentence         how long the step takes, and how far that is from what no plan can beat
    planners           time, waiting, what travels and what is held, as bars and as a table with one row per plan
    documents          how many of which length, and how many tokens those are
    ranks over time    of each plan a timeline to look into, down to single documents (page/timeline.js), and what each
                       rank holds and receives

Numbers, bars and charts are written here and are there without scripts; timelines alone are drawn by the browser.
Templates, style and scripts lie in page/. Nothing is sent between ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from hf_longctx.planner.memory.memory_model import MemoryModel
from hf_longctx.planner.plan import StepPlan
from hf_longctx.report.pictures.certificates import Certificates, buckets
from hf_longctx.report.planner_names import plan_names
from hf_longctx.report.plans.rank_charts import memory_charts, peak_memory, received_charts, token_charts
from hf_longctx.report.plans.timeline_columns import packed, timelines_within
from hf_longctx.report.training_runs.times import Run, Times

MOST_TIMELINE_BYTES = 2_200_000
"""Bytes of all timelines together: with lengths and markup, a page of 100,000 documents stays below 3 MB."""
FIRST_OF_GROUP = (1, 2, 3, 5, 9, 17, 65, 257)
"""Fewest ranks of each group of documents that share a colour; as in page/columns.js."""


def write_page(
    plans: Sequence[StepPlan],
    path: Path,
    *,
    lengths: np.ndarray,
    title: str,
    kv_bytes_per_token: int | None = None,
    memory: MemoryModel | None = None,
    simulations: Sequence[Run] | None = None,
) -> None:
    """Writes one page about plans of the same documents, ours first and those it is compared with after it.

    Args:
        plans: at least one.
        path: of the page; missing directories are made.
        lengths: integers [documents], tokens of each document of the global batch.
        kv_bytes_per_token: bytes of the keys and values of one token in all layers. None: exchanges are counted in tokens.
        memory: says how many bytes so many tokens take on a rank. None: tokens are shown.
        simulations: a run of each plan, which its timeline then shows. None: what the plan predicts.

    Raises:
        ValueError: no plan, a plan of other documents, or a run of another plan.
    """
    lengths = np.asarray(lengths, np.int64)
    _refuse_others(plans, lengths, simulations)
    runs = simulations if simulations is not None else [None] * len(plans)
    times = [Times.of(plan, run) for plan, run in zip(plans, runs)]
    timelines = timelines_within(plans, times, MOST_TIMELINE_BYTES)
    certificates = Certificates(
        plans=plans,
        names=plan_names(plans),
        summaries=[plan.summary() for plan in plans],
        kv_bytes_per_token=kv_bytes_per_token,
        peaks=[peak_memory(plan, memory) for plan in plans] if memory else None,
        simulated=times if simulations else None,
    )
    sections = _sections(certificates, times, timelines)
    for section, *charts in zip(
        sections,
        token_charts(plans),
        received_charts(plans, kv_bytes_per_token),
        memory_charts(plans, memory) if memory else [None] * len(plans),
    ):
        section["charts"] = [chart for chart in charts if chart]
    bounds = [] if simulations else [plan.lower_bound for plan in plans]
    page = {
        "title": title,
        "headline": certificates.headline(),
        "comparisons": certificates.bars(),
        "columns": certificates.table(),
        "notes": certificates.notes(),
        "buckets": buckets(lengths, plans[0]),
        "plans": sections,
        "data": {
            "horizon": 1.005 * max([*(time.makespan for time in times), *bounds]),
            "documents": packed({"length": lengths}),
            "plans": timelines,
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render("plan_page.html.j2", page), encoding="utf-8")


def _refuse_others(plans: Sequence[StepPlan], lengths: np.ndarray, simulations: Sequence[Run] | None) -> None:
    if not plans:
        raise ValueError("there is no plan to show: plans is empty")
    if simulations is not None and len(simulations) != len(plans):
        raise ValueError(f"{len(simulations)} simulations for {len(plans)} plans; there must be one for each plan")
    for plan in plans:
        if len(plan.doc) != len(lengths) or not np.array_equal(
            plan.length, lengths[np.minimum(plan.doc, len(lengths) - 1)]
        ):
            raise ValueError(
                f"the plan of {plan.planner!r} holds {len(plan.doc)} documents of {int(plan.length.sum())} tokens, and lengths "
                f"has {len(lengths)} of {int(lengths.sum())}: a page shows plans of the documents in lengths"
            )


def render(template: str, page: Mapping[str, Any], styles: Sequence[str] = (), scripts: Sequence[str] = ()) -> str:
    """A page from a template in page/, with the style and the scripts of timelines, and its own after and before these."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hf_longctx.report", "page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    assert environment.loader is not None

    def sources(*names: str) -> Markup:
        return Markup("\n").join(Markup(environment.loader.get_source(environment, name)[0]) for name in names)  # type: ignore[union-attr]

    css = sources("page.css", *styles)
    script = sources("columns.js", "timeline.js", *scripts, "interaction.js")
    return environment.get_template(template).render(page, css=css, script=script)


def _sections(certificates: Certificates, times: list[Times], timelines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sections = []
    rows = zip(certificates.plans, certificates.summaries, timelines, certificates.planners())
    for number, (plan, summary, timeline, planner) in enumerate(rows):
        took = f"simulated {certificates.time(times[number].makespan)}, " if certificates.simulated else ""
        every = timeline["every"]
        bound = [] if certificates.simulated else [{"dashed": "", "text": "lower bound"}]
        sections.append(
            {
                "number": number,
                **planner,
                "says": f"{took}planned {certificates.time(summary.makespan)}, {summary.balance:.3f} times the lower bound",
                "lower_bound": None if certificates.simulated else plan.lower_bound,
                "legend": time_shares(plan, times[number]) + bound,
                "shown": f"One of {every} ranks is shown; numbers are of all {plan.world_size:,}." if every > 1 else "",
            }
        )
    return sections


def time_shares(plan: StepPlan, times: Times) -> list[dict[str, Any]]:
    """Legend of a timeline: groups of ranks that occur, and the share of all ranks' time that each takes."""
    split = np.zeros(len(plan.cost), bool)
    split[plan.micro_batch_of_document[plan.ranks_of_document > 1]] = True
    group = np.searchsorted(FIRST_OF_GROUP, np.where(split, plan.members, 1), side="right") - 1
    busy = np.bincount(group, plan.members * (times.stop - times.start), len(FIRST_OF_GROUP))
    share = busy / (plan.world_size * times.makespan)
    entries: list[dict[str, Any]] = []
    for i, first in enumerate(FIRST_OF_GROUP):
        if share[i] > 0:
            last = FIRST_OF_GROUP[i + 1] - 1 if i + 1 < len(FIRST_OF_GROUP) else None
            ranks = f"{first}" if last == first else f"{first} or more" if last is None else f"{first} to {last}"
            noun = "whole, on one rank" if first == 1 else f"{ranks} ranks"
            entries.append({"colour": f"g{i}", "text": f"{noun}: {share[i]:.1%}"})
    entries.append({"colour": "idle", "text": f"idle: {max(0.0, 1 - share.sum()):.1%}"})
    return entries
