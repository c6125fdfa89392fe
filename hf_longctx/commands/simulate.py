"""`hf-longctx simulate`: what would training cost on a cluster that is not here? A table with each planner side by side; with
--sweep, for many sizes, and a picture.

    hf-longctx simulate --model llama-7b --cluster h100 --gpus 1024 --context 2M --distribution github
    hf-longctx simulate --sweep gpus=256,512,1024 context=256K,512K,1M,2M --output sweep.png

Numbers of tokens may end in K (1024) or M (1024 K). Planning and playing need lengths only; no model is loaded.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hf_longctx.commands.shared.tokens import size_of
from hf_longctx.commands.shared.training_bytes import DTYPE_HELP, TrainedDtype, training_bytes
from hf_longctx.hardware.devices import CLUSTERS
from hf_longctx.hardware.published import ARCHITECTURES

if TYPE_CHECKING:
    import numpy as np
    from rich.table import Table

    from hf_longctx.hardware.devices import Cluster
    from hf_longctx.simulator.sweep import Outcome

AXES = ("gpus", "context")


@dataclass(frozen=True)
class Simulated:
    """Results of planners at one size."""

    devices: int
    context: int
    outcomes: Sequence[Outcome]
    refused: dict[str, ValueError]


def simulate(
    axes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[AXIS=VALUES]...", help="Add axes to --sweep.", hidden=True),
    ] = None,
    model: Annotated[
        str,
        typer.Option(help=f"Train {', '.join(ARCHITECTURES)}; a directory with config.json; a hub id."),
    ] = "llama-7b",
    cluster: Annotated[str, typer.Option(help=f"Use {', '.join(CLUSTERS)}; or a profile's file.")] = "h100",
    attention: Annotated[
        str | None,
        typer.Option(help="Attend by flash_attn_2 or flash_attn_3.", show_default=False),
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="Use so many GPUs or NPUs in all.")] = 64,
    context: Annotated[str, typer.Option(help="Cut documents beyond so many tokens.")] = "256K",
    distribution: Annotated[str, typer.Option(help="Draw lengths, or take DATA as in `plan`.")] = "github",
    tokens: Annotated[str, typer.Option(help="Put at most so many tokens into a step.")] = "32M",
    planner: Annotated[str, typer.Option(help="Use one planner, by its name, or all.")] = "all",
    sharding: Annotated[
        Literal["ddp", "zero1", "zero2", "zero3"],
        typer.Option(help="Shard nothing, optimizer states, gradients too, weights too."),
    ] = "zero1",
    dtype: Annotated[TrainedDtype, typer.Option(help=DTYPE_HELP)] = "auto",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Split heads and MLPs over so many GPUs.")] = 1,
    stages: Annotated[int, typer.Option(min=1, help="Cut layers into a pipeline of so many GPUs.")] = 1,
    schedule: Annotated[Literal["1f1b", "interleaved", "gpipe"], typer.Option(help="Order stages so.")] = "1f1b",
    virtual_stages: Annotated[int, typer.Option(min=1, help="Give a GPU so many stages; from 2 on interleaved.")] = 1,
    capacity: Annotated[str | None, typer.Option(help="Hold so many tokens on a GPU. By default what fits.")] = None,
    recompute: Annotated[
        bool | None,
        typer.Option("--recompute/--no-recompute", help="Run forward again in backward. By default the faster."),
    ] = None,
    nccl: Annotated[
        str | None, typer.Option(help="Limit messages as this NCCL does: 2.28.", show_default=False)
    ] = None,
    loader: Annotated[Literal["remote", "local"], typer.Option(help="Let a node read its share, or all.")] = "remote",
    steps: Annotated[int, typer.Option(min=1, help="Average so many steps.")] = 4,
    seed: Annotated[int, typer.Option(min=0, help="Draw documents and their order by this seed.")] = 0,
    split: Annotated[str, typer.Option(help="Read this split of a data set.")] = "train",
    text_column: Annotated[str | None, typer.Option(help="Read texts from this column. By default text.")] = None,
    sweep: Annotated[
        list[str] | None, typer.Option(metavar="AXIS=VALUES", help="Vary gpus=256,512 or context=256K,2M, or both.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Write the sweep (.png) or a step's timelines (.html)."),
    ] = None,
) -> None:
    """Simulate training on a cluster that need not exist.

    Example: hf-longctx simulate --model llama-7b --gpus 64 --context 256K
    """
    import numpy as np

    from hf_longctx.commands.shared.costs import read_config
    from hf_longctx.commands.shared.planners import read_planners, refuse_beyond_planners
    from hf_longctx.commands.shared.room import read_room
    from hf_longctx.commands.shared.screen import screen
    from hf_longctx.planner.stages.stage_order import Schedule

    values = read_axes([*(sweep or []), *(axes or [])])
    if axes and not sweep:
        raise ValueError(f"{' '.join(axes)} is an axis of --sweep: write --sweep {' '.join(axes)}")
    wanted = ".png" if values else ".html"
    if output is not None and output.suffix != wanted:
        raise ValueError(f"--output {output} must end in {wanted} {'with' if values else 'without'} --sweep")
    names, config, nodes = read_planners(planner), read_config(model), _cluster(cluster, attention)
    room = read_room(cluster, None)
    trained_in = training_bytes(dtype, cluster, room)
    fixed: dict[str, Any] = {
        "sharding": sharding,
        "counted": trained_in.settings,
        "outside": room.gpus_per_node is not None,
        "reserve": room.reserve,
        "tensor_parallel": tensor_parallel,
        "stages": stages,
        "schedule": Schedule(schedule, virtual_stages),
        "capacity": None if capacity is None else size_of(capacity, "--capacity"),
        "recompute": recompute,
        "nccl": None if nccl is None else nccl_version(nccl),
    }
    for devices in values.get("gpus", [gpus]):
        refuse_beyond_planners(("--gpus", devices), ("--capacity", fixed["capacity"]))
    step_tokens = size_of(tokens, "--tokens")
    sizes = list(itertools.product(values.get("gpus", [gpus]), values.get("context", [size_of(context, "--context")])))
    read = {
        longest: _batches(distribution, longest, step_tokens, steps, seed, split, text_column, model)
        for longest in dict.fromkeys(longest for _, longest in sizes)
    }
    console = screen()
    title = f"{model} on {cluster}, {distribution}, {tokens} tokens a step, {sharding}, dtype {trained_in.dtype}"
    title += f", tensor parallel {tensor_parallel}" * (tensor_parallel > 1) + f", {stages} stages" * (stages > 1)
    title += f", {schedule}" * (schedule != "1f1b") + f", attention by {attention}" * (attention is not None)
    console.print(title, style="bold", soft_wrap=True)
    if trained_in.activation != (measured := nodes.speed().activation_bytes):
        console.print(
            f"dtype {trained_in.dtype} counts in memory; speeds and bytes sent are those of {cluster}, in "
            f"{'bfloat16' if measured == 2 else 'float32'}",
            soft_wrap=True,
        )
    for longest, batches in read.items():
        lengths = np.concatenate(batches)
        if 2 * lengths.sum() < step_tokens * steps:
            console.print(
                f"{distribution} has {len(lengths):,} documents of up to {longest:,} tokens, {lengths.sum():,} in all, and "
                f"{step_tokens * steps:,} were asked for: what there is is simulated, in {len(batches):,} step(s), and idle "
                f"ranks count. Valid: --tokens {lengths.sum()} or less",
                soft_wrap=True,
            )
    results, failed = [], {}
    for devices, longest in sizes:
        try:
            results.append(_simulate(config, nodes, devices, longest, fixed, names, read[longest], loader))
        except ValueError as error:
            if len(sizes) == 1:
                raise
            failed[devices, longest] = error
    if not results:
        raise next(iter(failed.values()))
    console.print(sweep_table(results))
    if any(outcome.run.recompute for result in results for outcome in result.outcomes):
        console.print("r: activations are recomputed, which is faster or the only way to fit")
    if stages > 1 and schedule == "gpipe":
        console.print(
            "memory, and the tokens/rank that fit, are those of 1f1b; gpipe holds activations of all micro-batches of a step",
            soft_wrap=True,
        )
    for name in names:
        if without := [result for result in results if name in result.refused]:
            size = f" at {len(without)} of {len(results)} sizes" if len(results) > 1 else ""
            console.print(f"{name}{size}: {without[0].refused[name]}", soft_wrap=True)
    for (devices, longest), reason in failed.items():
        console.print(f"{devices} GPUs, {longest:,} tokens: {reason}", soft_wrap=True)
    if output is not None:
        _write(results, read, output, title, in_picture=bool(values))
        console.print(f"written: {output}", soft_wrap=True)


def nccl_version(text: str) -> tuple[int, int]:
    """Read major and minor of a version. Raises ValueError for another text."""
    match = re.fullmatch(r"(\d+)\.(\d+)(\.\d+)?", text)
    if match is None:
        raise ValueError(f"--nccl {text} is no version; valid: 2.28, 2.30.7")
    return int(match[1]), int(match[2])


def read_axes(given: Sequence[str]) -> dict[str, list[int]]:
    """["gpus=256,512", "context=256K"] -> {"gpus": [256, 512], "context": [262144]}. Raises ValueError, naming what is wrong."""
    values: dict[str, list[int]] = {}
    for text in given:
        name, equals, listed = text.partition("=")
        if name not in AXES or not equals or not listed:
            raise ValueError(f"--sweep {text!r}; valid: {' or '.join(f'{axis}=VALUE,VALUE...' for axis in AXES)}")
        if name in values:
            raise ValueError(f"--sweep has {name} twice; list all its values at once: {name}=VALUE,VALUE...")
        values[name] = [size_of(value, f"--sweep {name}=") for value in listed.split(",")]
    return values


def _cluster(name: str, kernel: str | None) -> Cluster:
    from hf_longctx.hardware.devices import read_cluster

    cluster = read_cluster(name, "--cluster")
    return cluster if kernel is None else cluster.attending_by(kernel)


def _batches(
    distribution: str, longest: int, tokens: int, steps: int, seed: int, split: str, text_column: str | None, model: str
) -> list[np.ndarray]:
    """Lengths of each step's documents."""
    from hf_longctx.commands.shared.documents import Wanted, read_documents
    from hf_longctx.planner import GlobalBatches
    from hf_longctx.simulator.lengths import distribution_name, draw_tokens

    if distribution_name(distribution):  # of each step anew: a step more does not change those before it
        return [draw_tokens(distribution, tokens, seed * 1_000_003 + step, longest) for step in range(steps)]
    source = read_documents(
        distribution,
        Wanted(None, tokens * steps),
        seed=seed,
        longest=longest,
        split=split,
        text_column=text_column,
        model=model,
    )
    lengths = source.pieces("truncate", longest).lengths
    epoch = GlobalBatches(lengths, seed, tokens=tokens).epoch(0)
    return [lengths[batch] for batch in epoch[:steps]]


def _simulate(
    config: Any,
    cluster: Cluster,
    devices: int,
    context: int,
    fixed: dict[str, Any],
    names: Sequence[str],
    batches: Sequence[np.ndarray],
    loader: str,
) -> Simulated:
    from hf_longctx.simulator.machine import Loader
    from hf_longctx.simulator.sweep import runs, simulate_planners

    choices = runs(config=config, cluster=cluster, devices=devices, context=context, **fixed)
    outcomes, refused = simulate_planners(choices, batches, names, Loader(remote=loader == "remote"))
    return Simulated(devices, context, outcomes, refused)


def sweep_table(results: Sequence[Simulated]) -> Table:
    """One row per size and planner; a step on average."""
    from rich.table import Table

    from hf_longctx.report.pictures.canvas import short_bytes

    table = Table(box=None, header_style="bold", pad_edge=False)
    left = ("GPUs", "planner")
    for column in (
        *(
            "GPUs",
            "context",
            "planner",
            "tokens/s",
            "x static",
            "MFU",
            "step",
            "idle",
            "exposed",
            "tokens/rank",
            "memory",
        ),
        *("inside nodes", "between"),
    ):
        table.add_column(column, justify="left" if column in left else "right")
    for result in results:
        static = next(
            (outcome.tokens_per_second for outcome in result.outcomes if outcome.planner == "static_cp"), None
        )
        for i, outcome in enumerate(result.outcomes):
            speed = outcome.tokens_per_second
            table.add_row(
                *((f"{result.devices}", f"{result.context:,}") if i == 0 else ("", "")),
                outcome.planner,
                f"{round(speed):,}",
                f"{speed / static:.2f}" if static else "-",
                f"{outcome.mfu:.1%}",
                f"{outcome.seconds:.3g} s",
                f"{outcome.idle_share:z.1%}",
                f"{outcome.exposed_share:z.1%}",
                f"{outcome.run.tokens_per_rank:,}{' r' if outcome.run.recompute else '  '}",
                short_bytes(outcome.memory),
                short_bytes(round(outcome.bytes_of("inside"))),
                short_bytes(round(outcome.bytes_of("between"))),
                end_section=i + 1 == len(result.outcomes),
            )
    return table


def _write(
    results: Sequence[Simulated], read: dict[int, list[np.ndarray]], output: Path, title: str, *, in_picture: bool
) -> None:
    if in_picture:
        from hf_longctx.report.pictures.sweep_picture import Point, draw_sweep

        points = [
            Point(result.devices, result.context, outcome.planner, outcome.tokens_per_second, outcome.mfu)
            for result in results
            for outcome in result.outcomes
        ]
        draw_sweep(points, output, title)
        return
    from hf_longctx.hardware.model_sizes import model_flops
    from hf_longctx.report.plans.plan_page import write_page

    (only,) = results
    output.parent.mkdir(parents=True, exist_ok=True)
    write_page(
        [outcome.plans[0] for outcome in only.outcomes],
        output,
        lengths=read[only.context][0],
        title=title,
        kv_bytes_per_token=model_flops(only.outcomes[0].run.config).kv_elements * 2,
        simulations=[outcome.played[0] for outcome in only.outcomes],
    )
