"""`hf-longctx profile`: how fast is this hardware at a model? Writes the JSON that planner, trainer and simulator read.

    hf-longctx profile --model configs/quickstart.yaml --ranks 2
    torchrun --nproc_per_node 8 -m hf_longctx profile --model meta-llama/Llama-3.1-8B --precision autocast

Started by torchrun or `accelerate launch`, all processes take part; otherwise `--ranks` processes are started here, which
meet on a port that the system picks. What is measured is in training/measuring/rank_profile.py. Heavy imports wait until the
verb runs.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hf_longctx.commands.shared.ranks import cores, gpus, has_launcher, on_cpu, refuse_too_many, start_ranks
from hf_longctx.commands.shared.tokens import token_count

if TYPE_CHECKING:
    from hf_longctx.hardware.profile import Profile
    from hf_longctx.training.measuring.rank_profile import ProfileSettings

RANDOM: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""`--model random`: a Llama small enough for one CPU core."""
SECONDS, QUICK_SECONDS = 120.0, 20.0
LEAST_FITTED, MOST_ERROR = 3, 0.5
"""Micro-batches that speeds are fitted to, and the median error of those that are held out: with fewer, or beyond it, speeds say
nothing of this machine."""


def profile(
    model: Annotated[
        str,
        typer.Option(
            help="Measure a model's directory or hub id (its weights are not read), a YAML file of configs/, or random."
        ),
    ] = "random",
    ranks: Annotated[int, typer.Option(min=1, help="Start so many processes, unless a launcher did.")] = 1,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Give each process so many threads. By default cores / processes.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Write the profile, JSON, to this file.")] = Path("profile.json"),
    quick: Annotated[bool, typer.Option("--quick", help="Take 20 seconds instead of 2 minutes.")] = False,
    longest: Annotated[
        int,
        typer.Option(
            parser=token_count(),
            help="Measure documents up to so many tokens in one process, time and memory allowing.",
        ),
    ] = 131072,
    precision: Annotated[
        str | None,
        typer.Option(
            help="Compute in float32, bfloat16, autocast (bf16=True), or auto: autocast where it is faster. By default as "
            "the YAML file says, else auto."
        ),
    ] = None,
    gradient_checkpointing: Annotated[
        bool | None,
        typer.Option(
            "--gradient-checkpointing/--no-gradient-checkpointing",
            help="Recompute activations in backward. By default as the YAML file says.",
        ),
    ] = None,
    clock: Annotated[
        str | None,
        typer.Option(help="Count wall or CPU time. By default wall, or cpu where there are more threads than cores."),
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Run on processors, even if there is a GPU.")] = False,
) -> None:
    """Measure what planner and simulator need to know of a machine.

    Example: hf-longctx profile --model configs/tiny.yaml --quick
    """
    from hf_longctx.commands.shared.outputs import refuse_no_file
    from hf_longctx.precision import AUTO
    from hf_longctx.training.measuring.rank_profile import ProfileSettings

    refuse_no_file(output, f"--output {output}")
    cpu = cpu or on_cpu()
    launched = has_launcher()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if launched else ranks
    threads = (
        threads or (int(os.environ.get("OMP_NUM_THREADS", "0")) if launched else 0) or max(1, cores() // local_ranks)
    )
    if cpu and not launched:
        refuse_too_many(ranks)
    if not cpu and local_ranks > gpus():
        raise typer.BadParameter(
            f"{local_ranks} processes and {gpus()} GPUs here: start at most {gpus()}, or give --cpu"
        )
    try:
        config, chosen, otherwise = _model(model)
        chosen |= {name: value for name, value in (("precision", precision),) if value is not None}
        undecided = chosen.setdefault("precision", AUTO) == AUTO
        if gradient_checkpointing is not None:
            chosen["gradient_checkpointing"] = gradient_checkpointing
        settings = ProfileSettings(
            **chosen | ({"precision": otherwise} if undecided else {}),
            longest=longest,
            seconds=QUICK_SECONDS if quick else SECONDS,
            clock=_clock(clock, cpu and local_ranks * threads > cores()),
        )
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    if not launched or os.environ["RANK"] == "0":
        print(
            f"measuring: about {settings.seconds:.0f} s, after processes have started; longer where they wait for cores",
            file=sys.stderr,
            flush=True,
        )
    if launched:
        profile = _on_this_rank(config, settings, undecided, threads, cpu)
        if int(os.environ["RANK"]) > 0:
            return
    elif ranks > 1:
        profile = _on_new_ranks(ranks, config, settings, undecided, threads, cpu)
    else:
        profile = _measured(config, settings, undecided, threads, cpu)
    show(profile)
    refuse_meaningless(profile, settings.seconds, quick)
    output.parent.mkdir(parents=True, exist_ok=True)
    profile.save(output)
    print(f"written to {output}; train with LongContextPlugin(profile={str(output)!r}) or HF_LONGCTX_PROFILE={output}")


def show(profile: Profile) -> None:
    """A table of what was measured beside what the fitted speeds predict, and the speeds."""
    from rich.table import Table

    from hf_longctx.commands.shared.screen import screen

    console = screen()
    table = Table("what", "documents", "ranks", "measured", "predicted", "error", box=None, header_style="bold")
    for column in table.columns[2:]:
        column.justify = "right"
    for point, predicted, error in zip(profile.points, profile.predicted_seconds, profile.errors):
        counted = Counter(point.lengths).items()
        documents = ", ".join(f"{count} x {length}" if count > 1 else str(length) for length, count in counted)
        cells = (str(point.ranks), _time(point.seconds), _time(predicted), f"{error:+.1%}")
        table.add_row(point.part.replace("_", "-") + (", held out" if point.held_out else ""), documents, *cells)
    console.print(table)
    for name, value in vars_of(profile.speed).items():
        console.print(f"{name:22} {value:.4g}")
    console.print(f"{'host_bandwidth':22} {profile.host_bandwidth:.4g}")
    console.print(
        f"{profile.world_size} processes on {profile.device}, {profile.threads} threads each, {profile.precision}, seconds of "
        f"{'CPU' if profile.clock == 'cpu' else 'the clock'}: {judged(profile)}"
    )


def judged(profile: Profile) -> str:
    """Say how well the speeds predict micro-batches that they were not fitted to."""
    count, errors = _fit_of(profile)
    fitted = f"fitted to {count} micro-batches"
    if not errors:
        return f"{fitted}, and none was held out: how well the speeds predict others is not known"
    return (
        f"{fitted}; {len(errors)} others, held out, are predicted within {statistics.median(errors):.1%} (median), "
        f"{max(errors):.1%} at worst"
    )


def refuse_meaningless(profile: Profile, seconds: float, quick: bool) -> None:
    """Raise ValueError for speeds that say nothing of this machine.

    Args:
        seconds: that were given to measure.
        quick: whether these were fewer than could be.
    """
    from hf_longctx.training.measuring.rank_profile import LONGEST_SHARE

    count, errors = _fit_of(profile)
    if count >= LEAST_FITTED and (not errors or statistics.median(errors) <= MOST_ERROR):
        return
    longer = "leave --quick out, or " if quick else ""
    raise ValueError(
        f"no profile is written: its speeds are {judged(profile)}. {LEAST_FITTED} micro-batches and a median of {MOST_ERROR:.0%} "
        f"are wanted, and each may take {seconds * LONGEST_SHARE:.2g} s here: {longer}measure a smaller model of the same kind, "
        "with more --threads, or on a machine that does nothing else"
    )


def _fit_of(profile: Profile) -> tuple[int, list[float]]:
    """Count the micro-batches that speeds were fitted to; and how far off they are for each that was held out."""
    pairs = [(abs(error), point) for error, point in zip(profile.errors, profile.points) if point.part == "micro_batch"]
    errors = [float(error) for error, point in pairs if point.held_out]
    return len(pairs) - len(errors), errors


def vars_of(speed: Any) -> dict[str, float]:
    """Field -> value."""
    return {name: getattr(speed, name) for name in speed.__dataclass_fields__}


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def _model(name: str) -> tuple[Any, dict[str, Any], str]:
    """The model's configuration, what a YAML file says of how it is trained, and the precision of its weights."""
    from transformers import AutoConfig

    from hf_longctx.commands.shared.costs import refuse_unreachable
    from hf_longctx.config import EMBEDDED_MODEL, load_config
    from hf_longctx.data.cache import default_cache_dir
    from hf_longctx.data.embedded.embedded_model import prepare_model
    from hf_longctx.precision import AUTO
    from hf_longctx.settings.model_overrides import overridden
    from hf_longctx.settings.training import checkpoints_activations

    chosen: dict[str, Any] = {}
    weights = "float32"
    path: Any = name
    overrides: dict[str, Any] = {}
    sizes = RANDOM if name == "random" else None
    if name.endswith((".yaml", ".yml")):
        config = load_config(name)
        path, sizes, overrides = config.model.path, config.model.random_init, config.model.config or {}
        weights = "bfloat16" if config.model.dtype != "float32" else "float32"
        autocast = config.training.get("bf16") or config.training.get("fp16", False)
        chosen["precision"] = AUTO if autocast == AUTO else "autocast" if autocast else weights
        chosen["gradient_checkpointing"] = checkpoints_activations(config.training)
    if sizes is not None:
        return AutoConfig.for_model(**sizes), chosen, weights
    if path == EMBEDDED_MODEL:
        path = str(prepare_model(default_cache_dir()))
    refuse_unreachable(path)
    return overridden(AutoConfig.from_pretrained(path), overrides, path=path), chosen, weights


def _clock(asked: str | None, crowded: bool) -> Literal["wall", "cpu"]:
    if asked not in (None, "wall", "cpu"):
        raise ValueError(f"clock={asked!r} is unknown; valid: wall, cpu")
    return "cpu" if asked == "cpu" or (asked is None and crowded) else "wall"


def _on_new_ranks(
    ranks: int, config: Any, settings: ProfileSettings, undecided: bool, threads: int, cpu: bool
) -> Profile:
    """Starts processes on this machine; if one fails, the others end."""
    from hf_longctx.hardware.profile import Profile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        start_ranks(_save_on_this_rank, (path, config, settings, undecided, threads, cpu), ranks)
        return Profile.load(path)


def _save_on_this_rank(
    path: Path, config: Any, settings: ProfileSettings, undecided: bool, threads: int, cpu: bool
) -> None:
    profile = _on_this_rank(config, settings, undecided, threads, cpu)
    if os.environ["RANK"] == "0":
        profile.save(path)


def _on_this_rank(config: Any, settings: ProfileSettings, undecided: bool, threads: int, cpu: bool) -> Profile:
    """One of several ranks, whose environment says which."""
    import torch.distributed as dist

    dist.init_process_group("gloo" if cpu else "nccl")
    try:
        profile = _measured(config, settings, undecided, threads, cpu)
        dist.barrier()
        return profile
    finally:
        if sys.exc_info()[0] is None:  # a rank that failed must not wait for the others
            dist.destroy_process_group()


def _measured(config: Any, settings: ProfileSettings, undecided: bool, threads: int, cpu: bool) -> Profile:
    """Says which precision is the faster one here, and measures it if `undecided`, else that of the settings."""
    import torch

    from hf_longctx.commands.shared.ranks import is_first
    from hf_longctx.precision import decide_here, from_first_rank, product_shape
    from hf_longctx.training.measuring.rank_profile import profile_model

    device = torch.device("cpu" if cpu else f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
    if cpu:
        torch.set_num_threads(threads)
    else:
        torch.cuda.set_device(device)
    decision = from_first_rank(lambda: decide_here(device, product_shape(config)))
    if undecided and decision.bf16:
        settings = replace(settings, precision="autocast")
    if is_first():
        print(f"{decision.computes} is the faster one: {decision.reason}; measured: {settings.precision}")
    return profile_model(config, device, settings)
