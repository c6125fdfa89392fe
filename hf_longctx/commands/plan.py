"""`hf-longctx plan`: documents -> a table of what each planner makes of them, and on demand a page to look at.

Planning needs lengths only: no token is sent anywhere, and no model is loaded.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hf_longctx.commands.shared.planners import MICRO_BATCHES
from hf_longctx.commands.shared.tokens import token_count
from hf_longctx.hardware.devices import KNOWN_DEVICES
from hf_longctx.hardware.published import ARCHITECTURES

if TYPE_CHECKING:
    import numpy as np
    from rich.table import Table

    from hf_longctx.data.long_documents import Pieces
    from hf_longctx.planner import CostModel, Mode, Planner, StepPlan, Topology


CUT_LONG = ", or --long-documents truncate, split or drop"
"""Remedy for a document that is too long."""


@dataclass(frozen=True)
class Planned:
    """Plans of the steps by one planner."""

    name: str
    plans: list[StepPlan]
    seconds: float
    """to plan one step, median"""


def plan(
    data: Annotated[
        str,
        typer.Argument(
            help="github, byted, lognormal_pareto, agent_trajectories or verl_1k_16k (distributions of lengths); a file of "
            "lengths (.npy, .txt); or documents, as data.path of a configuration",
            show_default=False,
        ),
    ],
    ranks: Annotated[int, typer.Option(min=1, help="Plan for so many ranks, a GPU each.", show_default=False)],
    capacity: Annotated[
        int, typer.Option(parser=token_count(), help="Hold so many tokens on a rank at once.", show_default=False)
    ],
    model: Annotated[
        str,
        typer.Option(
            help=f"Train {', '.join(ARCHITECTURES)}; a directory with config.json; a hub id; qwen3-8b and the like."
        ),
    ] = "llama-7b",
    device: Annotated[str, typer.Option(help=f"Use {', '.join(KNOWN_DEVICES)}; or a profile's file.")] = "h100",
    documents: Annotated[int | None, typer.Option(min=1, help="Put so many documents into a step.")] = None,
    tokens: Annotated[
        int | None, typer.Option(parser=token_count(), help="Put in so many tokens, else 4 * ranks * capacity.")
    ] = None,
    mode: Annotated[
        Literal["async", "lockstep", "pipeline"],
        typer.Option(help="Let ranks meet at a step's end, let them meet after every round, or make them pipelines."),
    ] = "async",
    planner: Annotated[str, typer.Option(help="Use one planner, by its name, or all.")] = "all",
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Put so many ranks on a machine; else the device's.")
    ] = None,
    stages: Annotated[int, typer.Option(min=1, help="Make a rank a pipeline of so many GPUs.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Plan so many steps, from the first of an epoch.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Draw documents and their order by this seed.")] = 0,
    long_documents: Annotated[
        Literal["error", "truncate", "split", "drop"],
        typer.Option(help="Do this with those beyond --longest-document."),
    ] = "error",
    longest_document: Annotated[
        int | None,
        typer.Option(parser=token_count(2), help="Allow so many tokens each; else what all ranks hold."),
    ] = None,
    split: Annotated[str, typer.Option(help="Read this split of a data set.")] = "train",
    text_column: Annotated[str | None, typer.Option(help="Read texts from this column. By default text.")] = None,
    output: Annotated[Path | None, typer.Option(help="Write plan.html, plan.png and trace.json there.")] = None,
) -> None:
    """Plan optimizer steps with each planner: times, balance, bytes.

    Example: hf-longctx plan github --ranks 64 --capacity 8192 --output plans
    """
    from hf_longctx.commands.shared.costs import counting_notes, read_config, read_device
    from hf_longctx.commands.shared.documents import Wanted, read_documents
    from hf_longctx.commands.shared.planners import read_planners, refuse_beyond_planners
    from hf_longctx.commands.shared.screen import screen
    from hf_longctx.hardware.model_sizes import model_flops
    from hf_longctx.planner import CostModel, GlobalBatches, Topology, planners_for
    from hf_longctx.simulator.lengths import DISTRIBUTIONS, LONGEST, distribution_name

    refuse_beyond_planners(("--ranks", ranks), ("--capacity", capacity))
    names, on, config = read_planners(planner), read_device(device), read_config(model)
    topology = Topology(ranks, capacity, ranks_per_node=ranks_per_node or on.ranks_per_node, stages=stages)
    cost = CostModel.from_config(
        config, on.speed, ranks_per_node=topology.ranks_per_node, world_size=ranks, capacity=capacity
    )
    kv_bytes = model_flops(config).kv_elements * on.speed.activation_bytes
    if documents is not None and tokens is not None:
        raise ValueError(
            f"--documents {documents} and --tokens {tokens} both say how large a step is: give one of them"
        )
    if documents is None and tokens is None:
        tokens = MICRO_BATCHES * topology.tokens
    if stages > 1 and mode != "pipeline":
        raise ValueError(f"--stages {stages} is for --mode pipeline, not {mode}: leave it out, or change the mode")
    longest_allowed = longest_document or topology.tokens
    source = read_documents(
        data,
        Wanted(documents and documents * steps, tokens and tokens * steps),
        seed=seed,
        longest=min(longest_allowed, LONGEST),
        split=split,
        text_column=text_column,
        model=model,
    )
    limit = longest_allowed if longest_document or long_documents != "error" else None
    pieces = source.pieces(long_documents, limit)
    lengths = pieces.lengths
    epoch = GlobalBatches(lengths, seed, documents=documents, tokens=tokens).epoch(0)
    batches = [lengths[batch] for batch in epoch[:steps]]
    too_long = _too_long(pieces, topology, source.name)
    if too_long and topology.longest_document < max(int(batch.max()) for batch in batches):
        raise ValueError(too_long)

    console = screen()
    devices = f"{ranks} x {device}" if stages == 1 else f"{ranks} x {stages} stages, {ranks * stages} x {device}"
    title = f"{source.name}, {model} on {devices}, {capacity:,} tokens per rank, {mode}"
    console.print(title, style="bold", soft_wrap=True)
    console.print(_describe(batches, len(epoch)), soft_wrap=True)
    if too_long:
        console.print(f"{too_long}. It is not among these steps; training refuses it", soft_wrap=True)
    if on.note:
        console.print(on.note, soft_wrap=True)
    for note in counting_notes(config):
        console.print(f"{model}: {note}", soft_wrap=True)
    distribution = distribution_name(data)
    longest = longest_document or int(lengths.max())
    if distribution is not None:  # the run is set up for its longest document, though none of this draw is as long
        longest = min(longest_allowed, DISTRIBUTIONS[distribution].longest)
    planners = planners_for(context=min(longest, topology.tokens))
    results, refused = _plan_all({name: planners[name] for name in names}, batches, topology, cost, mode)
    console.print(_table(results, kv_bytes))
    for name, error in refused.items():
        console.print(f"{name}: {error}", soft_wrap=True)
    if output is not None:
        for path in _write(results, output, batches[0], title, kv_bytes):
            console.print(f"written: {path}", soft_wrap=True)


def _too_long(pieces: Pieces, topology: Topology, name: str) -> str:
    """Say which of all documents, by its row, is longer than all ranks hold, and what would hold it; "": none is."""
    longest = int(pieces.lengths.argmax())
    row = f"row {pieces.document[longest]:,} of {name}"
    try:
        topology.refuse_too_long(
            int(pieces.lengths[longest]), f"a piece of {row}" if pieces.is_part(longest) else row, CUT_LONG
        )
    except ValueError as error:
        return str(error)
    return ""


def _plan_all(
    planners: Mapping[str, Planner], batches: Sequence[np.ndarray], topology: Topology, cost: CostModel, mode: Mode
) -> tuple[list[Planned], dict[str, ValueError]]:
    """Return what each planner made of the steps, and why some did not. Raises the error of the first where none did."""
    results, refused = [], {}
    for name, planner in planners.items():
        try:
            results.append(_plan_steps(name, planner, batches, topology, cost, mode))
        except ValueError as error:
            refused[name] = error
    if not results:
        raise next(iter(refused.values()))
    return results, refused


def _plan_steps(
    name: str, planner: Planner, batches: Sequence[np.ndarray], topology: Topology, cost: CostModel, mode: Mode
) -> Planned:
    from hf_longctx.planner.compiled import uses_machine_code

    def timed(lengths: np.ndarray) -> tuple[StepPlan, float]:
        begin = time.perf_counter()
        return planner(lengths, topology, cost, mode), time.perf_counter() - begin

    steps = [timed(lengths) for lengths in batches]
    if uses_machine_code():  # which the first step compiled, or read from disk: not counted
        steps[0] = timed(batches[0])
    return Planned(name, [plan for plan, _ in steps], statistics.median([seconds for _, seconds in steps]))


def _describe(batches: Sequence[np.ndarray], steps: int) -> str:
    """The documents that are planned, in one line."""
    import numpy as np

    lengths = np.concatenate(batches)
    p50, p99 = np.percentile(lengths, [50, 99]).astype(int)
    return (
        f"{len(lengths):,} documents, {lengths.sum():,} tokens (median {p50:,}, 99 % up to {p99:,}, longest "
        f"{lengths.max():,}) in {len(batches)} of the epoch's {steps} steps"
    )


def _table(results: Sequence[Planned], kv_bytes: int) -> Table:
    """One row per planner: a step on average, predicted; bytes are those of keys and values received in forward."""
    from rich.table import Table

    from hf_longctx.report.pictures.canvas import short_bytes

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in (
        "planner",
        "step",
        "x bound",
        "idle",
        "exchanged",
        "split",
        "ranks/doc",
        "micro-batches",
        "planned in",
    ):
        table.add_column(column, justify="left" if column == "planner" else "right")
    for result in results:
        summaries = [plan.summary() for plan in result.plans]
        makespan = sum(summary.makespan for summary in summaries)
        bound = sum(summary.lower_bound for summary in summaries)
        idle = sum(summary.idle_share * summary.makespan for summary in summaries) / makespan
        exchanged = sum(summary.exchanged_tokens for summary in summaries) * kv_bytes
        micro_batches = [count for summary in summaries for count in summary.micro_batches_per_rank[::2]]
        table.add_row(
            result.name,
            _duration(makespan / len(summaries)),
            f"{makespan / bound:.3f}",
            f"{idle:.1%}",
            short_bytes(exchanged // len(summaries)),
            f"{sum(summary.split_documents for summary in summaries):,}",
            f"1-{max(summary.ranks_per_document[2] for summary in summaries)}",
            f"{min(micro_batches)}-{max(micro_batches)} a rank",
            _duration(result.seconds * 1e9),
        )
    return table


def _duration(nanoseconds: float) -> str:
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if nanoseconds >= size:
            return (
                f"{nanoseconds / size:.3g} {unit}" if nanoseconds < 1000 * size else f"{nanoseconds / size:,.0f} {unit}"
            )
    return f"{nanoseconds / 1e3:.3g} us"


def _write(results: Sequence[Planned], output: Path, lengths: np.ndarray, title: str, kv_bytes: int) -> list[Path]:
    """The page compares planners on the first step; picture and trace are of the first planner."""
    from hf_longctx.report.plans.plan_page import write_page
    from hf_longctx.report.plans.plan_picture import draw_plans
    from hf_longctx.report.plans.trace import write_trace

    output.mkdir(parents=True, exist_ok=True)
    page, picture, trace = (output / name for name in ("plan.html", "plan.png", "trace.json"))
    plans = [result.plans[0] for result in results]
    write_page(plans, page, lengths=lengths, title=title, kv_bytes_per_token=kv_bytes)
    draw_plans(results[0].plans, picture)
    write_trace(results[0].plans[0], trace)
    return [page, picture, trace]
