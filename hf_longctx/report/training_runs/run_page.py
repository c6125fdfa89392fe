"""The directory of a trained run -> `report.html`: one page that needs nothing but a browser, no network and no library.

What it shows, from top to bottom:

    a sentence          how much was trained on, in what time, and what became of the loss
    facts               throughput, balance, memory, what was exchanged
    over steps          curves of all that was logged (report/pictures/line_chart.py)
    slowest steps       timelines of their plans, as on the page of a plan (report/plans/plan_page.py)
    documents           how long they are
    evaluation          what `hf-longctx evaluate` left there, if it has
    configuration, environment

It is made of trainer_state.json, which Trainer writes, and of run.json (run_record.py), results.json and evaluation.json
where they are there. No token, no password and no environment variable is in any of them (hf_longctx/redaction.py). Nothing is
sent.
"""

import base64
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hf_longctx.planner.plan import StepPlan
from hf_longctx.redaction import redacted
from hf_longctx.report.pictures.canvas import short_bytes
from hf_longctx.report.pictures.certificates import bucket_rows
from hf_longctx.report.pictures.evaluation_pictures import PICTURES
from hf_longctx.report.plans.plan_page import MOST_TIMELINE_BYTES, render, time_shares
from hf_longctx.report.plans.rank_charts import received_charts, token_charts
from hf_longctx.report.plans.timeline_columns import packed, timelines_within
from hf_longctx.report.training_runs.run_charts import charts
from hf_longctx.report.training_runs.run_files import perplexity
from hf_longctx.report.training_runs.run_log import RunLog, duration
from hf_longctx.report.training_runs.run_record import plan_of, sources_of
from hf_longctx.report.training_runs.times import Times
from hf_longctx.whole_files import written_whole

logger = logging.getLogger(__name__)

PAGE = "report.html"
PREDICTION_OFF = 2.0
"""Steps that take so many times as long as planned, or as little, are pointed out."""


def write_run_page(directory: str | Path) -> Path:
    """Writes the page into the directory of a run, and returns its path.

    Raises:
        ValueError: no run was trained there, or one of its files cannot be read.
    """
    directory = Path(directory)
    run = RunLog.read(directory)
    if run.left_out:
        logger.warning(f"{directory}: {run.left_out}")
    record = run.record
    slow = [(stored, plan_of(stored["plan"])) for stored in record["slowest"]]
    timelines, sections = _slow_steps(slow, record)
    facts = _facts(run)
    page = {
        "title": record["name"],
        "headline": headline(run),
        "facts": facts,
        "grid": _columns(len(facts)),
        "no_mfu": redacted(record["mfu_left_out"]),
        "charts": charts(run.log),
        "plans": sections,
        "buckets": bucket_rows(record["data"]["by_length"]) if record["data"].get("by_length") else [],
        "evaluation": _evaluation(run.evaluation, directory),
        "left_out": run.left_out,
        "tables": _tables(record),
        "configuration": _as_yaml(record["configuration"]),
        "environment": redacted(record["environment"]),
        "data": timelines,
    }
    path = directory / PAGE
    with written_whole(path) as partial:
        partial.write_text(render("run_page.html.j2", page, styles=["run.css"], scripts=["lines.js"]), encoding="utf-8")
    return path


def headline(run: RunLog) -> str:
    """Say what happened, in a sentence or two."""
    data, losses = run.record["data"], run.held_out_losses
    sentence = f"{run.steps:,} optimizer step{'' if run.steps == 1 else 's'}"
    if data:
        sentence += f" on {data['documents']:,} documents ({data['tokens']:,} tokens, the longest {data['longest']:,})"
    if processes := run.record["parallelism"].get("devices"):
        sentence += f", {processes:,} process{'' if processes == 1 else 'es'}"
        if (stages := run.record["parallelism"].get("pipeline_stages", 1)) > 1:
            sentence += f" in {stages} pipeline stages"
    if run.seconds is not None:
        sentence += f", in {duration(run.seconds)}"
    if len(losses) > 1:
        return f"{sentence}. Held-out loss {losses[0]:.4f} at first, {losses[-1]:.4f} at the end."
    return f"{sentence}. Held-out loss {losses[0]:.4f}." if losses else f"{sentence}."


def _facts(run: RunLog) -> list[dict[str, Any]]:
    """Name, value, a word on it, and whether it is an alarm; medians of what was logged."""
    record, losses = run.record, run.held_out_losses
    devices = record["parallelism"].get("devices") or 1
    facts: list[dict[str, Any]] = []

    def fact(name: str, value: str, note: str, *, alarm: bool = False) -> None:
        facts.append({"name": name, "value": value, "note": note, "alarm": alarm})

    def usual(name: str, key: str, show: Callable[[float], str], note: str = "median") -> None:
        if (value := run.usual(key)) is not None:
            fact(name, show(value), note)

    if losses:
        first = f"{losses[0]:.4f} at first" if len(losses) > 1 else ""
        fact("held-out loss", f"{losses[-1]:.4f}", first, alarm=losses[-1] > losses[0])
    speed = run.usual("tokens_per_second") or 0
    usual("tokens per second", "tokens_per_second", "{:,.0f}".format, f"median; {speed / devices:,.0f} a rank")
    usual("MFU", "mfu", "{:.1%}".format)
    usual("planned: times the lower bound", "plan_balance", "{:.3f}".format, "median; 1 is perfect")
    usual("planned: ranks idle", "plan_idle", "{:.1%}".format)
    usual("stages wait", "stage_wait", "{:.1%}".format, "median, rank 0, measured")
    if (error := run.usual("prediction_error")) is not None:
        off = not 1 / PREDICTION_OFF <= 1 + error <= PREDICTION_OFF
        fact("measured / planned", f"{1 + error:.2f}", "median, seconds of a step; 1 is as planned", alarm=off)
    usual("exchanged a step", "exchanged_mib", lambda mib: short_bytes(round(mib * 2**20)), "median, all ranks")
    if peaks := run.logged("peak_memory_gib"):
        fact("peak memory", f"{max(peaks):.2f} GiB", "fullest rank")
    if (longest := record["data"].get("longest")) is not None:
        fact("longest document", f"{longest:,}", "tokens")
    for name, key, note in (
        ("skipped steps", "skipped_steps", "their gradients were not finite"),
        ("failed saves", "failed_saves", "checkpoints that could not be written"),
    ):
        if (count := max(run.logged(key), default=0)) > 0:
            fact(name, f"{count:,.0f}", note, alarm=True)
    return facts


def _columns(tiles: int) -> dict[str, int]:
    """Columns of a grid that so many tiles fill: three to five, and how many of them the first tile takes."""
    columns = min(tiles, 5) if tiles < 6 else min((4, 5, 3), key=lambda columns: -tiles % columns)
    return {"columns": columns or 1, "wide": 1 + (-tiles % columns if tiles else 0), "wide_of_two": 1 + tiles % 2}


def _slow_steps(
    slow: Sequence[tuple[Mapping[str, Any], StepPlan]], record: Mapping[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return what the scripts draw of the plans, and what is written beside them."""
    plans = [plan for _, plan in slow]
    if not plans:
        return {"horizon": 1.0, "plans": []}, []
    times = [Times.of(plan) for plan in plans]
    timelines = timelines_within(plans, times, MOST_TIMELINE_BYTES)
    for (stored, plan), timeline in zip(slow, timelines):
        lengths = np.zeros(int(plan.doc.max()) + 1, np.int64)
        lengths[plan.doc] = plan.length
        rows = np.array(stored.get("rows", []), np.int64)
        timeline["documents"] = packed({"length": lengths} | ({"row": rows} if len(rows) == len(lengths) else {}))
    half = record["training"].get("autocast") or record["model"].get("dtype") != "float32"
    elements = record["model"].get("kv_elements_per_token")
    received = received_charts(plans, elements and elements * (2 if half else 4))
    sections = []
    for number, (stored, plan) in enumerate(slow):
        of_ranks = [token_charts(plans)[number], received[number]]
        longest, summary, every = stored["longest"], plan.summary(), timelines[number]["every"]
        where = f"on {longest['ranks']:,} ranks" if longest["ranks"] > 1 else "whole, on one rank"
        sections.append(
            {
                "number": number,
                "name": f"Step {stored['step']:,}",
                "detail": "",
                "ours": False,
                "says": f"took {duration(stored['seconds'])}; planned were {duration(summary.makespan / 1e9)}, "
                f"{summary.balance:.3f} times the lower bound. Its slowest document: row {longest['row']:,} of the data set, "
                f"{longest['tokens']:,} tokens, {where}",
                "lower_bound": plan.lower_bound,
                "legend": [*time_shares(plan, times[number]), {"dashed": "", "text": "lower bound"}],
                "shown": f"One of {every} ranks is shown; numbers are of all {plan.world_size:,}." if every > 1 else "",
                "charts": [chart for chart in of_ranks if chart],
            }
        )
    horizon = 1.005 * max(max(time.makespan, plan.lower_bound) for time, plan in zip(times, plans))
    return {"horizon": horizon, "plans": timelines}, sections


def _evaluation(evaluation: Mapping[str, Any], directory: Path) -> dict[str, Any] | None:
    """Tables of evaluation.json and the pictures beside it; None where there is none."""
    if not evaluation:
        return None

    def losses(parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [
            {
                "name": f"{bucket['from']:,} to {bucket['to']:,}",
                "tokens": f"{bucket['tokens']:,}",
                "loss": f"{bucket['loss']:.4f}",
                "perplexity": f"{perplexity(bucket['loss']):,.4g}",
            }
            for bucket in parts
        ]

    tasks = []
    for task in dict.fromkeys(trial["task"] for trial in evaluation.get("retrieval", [])):
        of_task = [trial for trial in evaluation["retrieval"] if trial["task"] == task]
        lengths = sorted({trial["length"] for trial in of_task})
        cells = {(trial["depth"], trial["length"]): trial for trial in of_task}
        rows = [
            {"depth": f"{depth:.0%}", "cells": [_cell(cells.get((depth, length))) for length in lengths]}
            for depth in sorted({trial["depth"] for trial in of_task})
        ]
        tasks.append({"name": task, "lengths": [f"{length:,}" for length in lengths], "rows": rows})
    overview = [
        f"{evaluation[name]:,} {name}" for name in ("documents", "tokens") if isinstance(evaluation.get(name), int)
    ]
    if isinstance(evaluation.get("loss"), (int, float)):
        overview.append(f"loss {evaluation['loss']:.4f}, perplexity {perplexity(evaluation['loss']):,.4g}")
    return {
        "says": ", ".join(overview),
        "by_position": losses(evaluation.get("by_position", [])),
        "by_length": losses(evaluation.get("by_length", [])),
        "tasks": tasks,
        "pictures": [
            {"text": text, "data": base64.b64encode((directory / name).read_bytes()).decode()}
            for name, (text, sections) in PICTURES.items()
            if any(map(evaluation.get, sections)) and (directory / name).is_file()
        ],
    }


def _cell(trial: Mapping[str, Any] | None) -> dict[str, Any]:
    if trial is None or not trial["trials"]:
        return {"found": 0, "text": ""}
    share = trial["found"] / trial["trials"]
    return {"found": round(100 * share), "text": f"{share:.0%}", "title": f"{trial['found']} of {trial['trials']}"}


def _tables(record: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Title -> name -> value, of what is known."""
    model, data, parallelism = record["model"], record["data"], record["parallelism"]
    shown = {
        "Model": {
            "architecture": model.get("architecture"),
            "from": model.get("base"),
            "weights": model.get("parameters"),
            "of these trained": model.get("trained_parameters"),
            "dtype": model.get("dtype"),
            "adapter": _words(model.get("adapter")),
            "positions": model.get("max_position_embeddings"),
            "rotary positions": _words(model.get("rope")),
            "certificate": model.get("certificate"),
        },
        "Data": {
            "sources": sources_of(data) or None,
            "rows": data.get("rows"),
            "documents": data.get("documents"),
            "tokens": data.get("tokens"),
            "p50, p90, p99": ", ".join(f"{data[percentile]:,}" for percentile in ("p50", "p90", "p99"))
            if data
            else None,
            "longest": data.get("longest"),
        },
        "Parallelism": {name.replace("_", " "): value for name, value in parallelism.items()},
        "Training": {name.replace("_", " "): value for name, value in record["training"].items()},
    }
    tables = {
        title: {name: _shown(value) for name, value in redacted(rows).items() if value is not None}
        for title, rows in shown.items()
    }
    return {title: rows for title, rows in tables.items() if rows}


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}" if isinstance(value, float) else str(value)


def _words(values: Mapping[str, Any] | None) -> str | None:
    return ", ".join(f"{name} {value}" for name, value in values.items() if value is not None) if values else None


def _as_yaml(configuration: Mapping[str, Any] | None) -> str | None:
    return yaml.safe_dump(redacted(configuration), sort_keys=False, width=100) if configuration else None
