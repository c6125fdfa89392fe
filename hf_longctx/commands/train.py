"""`hf-longctx train`: fine-tunes a model as a YAML file says.

Under a launcher (torchrun, accelerate launch) this process is the rank that the launcher says. Otherwise it starts its ranks
itself: one for each GPU of this machine, or --ranks of them. Where ranks fail, the first of them says why
(preflight/launching.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_longctx.commands.shared.overrides import Overrides

if TYPE_CHECKING:
    from hf_longctx.settings import Config


def train(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(help="YAML file, see configs/.", show_default=False)],
    overrides: Overrides = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Start so many processes. By default one per GPU here.", show_default=False),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show plan, memory and commands; start nothing.")] = False,
    trace: Annotated[
        bool, typer.Option("--trace", help="Run a dry run's fullest micro-batch too, on tensors without memory.")
    ] = False,
    nodes: Annotated[int, typer.Option(min=1, help="Plan a dry run for so many machines.")] = 1,
    device: Annotated[
        str | None, typer.Option(help="Plan a dry run for a device, as `estimate` has it. Default: what is here.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option(help="Plan a dry run for GPUs of so many GiB.", show_default=False)
    ] = None,
    lengths: Annotated[
        str | None, typer.Option(help="Plan a dry run of these documents, as `plan` takes DATA. Default: the file's.")
    ] = None,
) -> None:
    """Fine-tune a model as a YAML file says, here or under a launcher.

    Example: hf-longctx train configs/tiny.yaml --ranks 2
    """
    from hf_longctx.commands.preflight.launching import end_with_launcher, one_voice, start_program
    from hf_longctx.commands.shared.costs import refuse_unreachable
    from hf_longctx.commands.shared.outputs import refuse_unwritable
    from hf_longctx.commands.shared.ranks import gpus, has_launcher
    from hf_longctx.config import load_config

    given = list(overrides or [])
    end_with_launcher()
    with one_voice():
        chosen = load_config(config, given)
        asked = {"--trace": trace, "--nodes": nodes > 1, "--device": device, "--memory": memory, "--lengths": lengths}
        wrong = [name for name, value in asked.items() if value and not dry_run]
        if wrong:
            raise ValueError(
                f"{wrong[0]} is for --dry-run, whose output says how each node is started: add it, or leave {wrong[0]} out"
            )
        on_cpu = bool(chosen.training.get("use_cpu"))
        if dry_run:
            from hf_longctx.commands.preflight.dry_run import dry_run as show

            here = ranks or nodes * max(1, 0 if on_cpu else gpus())
            show(
                str(config),
                chosen,
                given,
                ranks=here,
                nodes=nodes,
                device=device,
                memory=memory,
                lengths=lengths,
                trace=trace,
            )
            return
        _refuse_ranks(ranks, on_cpu)
        refuse_unwritable(_output(chosen), f"training.output_dir {_output(chosen)}")
        if chosen.model.path is not None:
            refuse_unreachable(chosen.model.path)
        wanted = 1 if has_launcher() else ranks or max(1, 0 if on_cpu else gpus())
        if wanted == 1:
            _train(chosen)
            return
    before = ["--traceback"] if getattr(context.obj, "traceback", False) else []
    code = start_program(wanted, [*before, "train", str(config), *given])
    if code:
        raise typer.Exit(code)


def _output(chosen: Config) -> Path:
    """The run's directory; where none is given, transformers' own choice."""
    return Path(chosen.training.get("output_dir") or "trainer_output").expanduser()


def _train(chosen: Config) -> None:
    """Train as one of the ranks. The rank that speaks for all says at the end where everything is."""
    from transformers.utils import logging

    from hf_longctx.commands.shared.loading import readable_weights
    from hf_longctx.commands.shared.ranks import is_first
    from hf_longctx.report.training_runs.model_card import CARD
    from hf_longctx.report.training_runs.run_page import PAGE
    from hf_longctx.run import run

    if not is_first():
        logging.disable_progress_bar()  # bars of several ranks would be drawn over each other
    with readable_weights(chosen.model.path):
        run(chosen)
    if is_first():
        kind = "the adapter" if chosen.model.lora else "the model"
        beside = [name for name in (PAGE, CARD) if (_output(chosen) / name).is_file()]
        print(", ".join([f"{_output(chosen)}: {kind}", *beside]))


def _refuse_ranks(ranks: int | None, on_cpu: bool) -> None:
    """Raises ValueError for a number of ranks that there cannot be here."""
    from hf_longctx.commands.shared.ranks import gpus, has_launcher, refuse_too_many

    if ranks is None:
        return
    if has_launcher() and ranks != int(os.environ["WORLD_SIZE"]):
        raise ValueError(
            f"--ranks {ranks}, and the launcher has started WORLD_SIZE={os.environ['WORLD_SIZE']}: leave --ranks out"
        )
    if has_launcher():
        return
    if on_cpu or not gpus():
        refuse_too_many(ranks)
    elif ranks > max(1, gpus()):
        raise ValueError(f"--ranks {ranks} on {gpus()} GPUs: start at most {gpus()}, or give training.use_cpu=true")
