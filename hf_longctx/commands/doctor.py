"""`hf-longctx doctor`: does everything fit together on this machine, and what to do where it does not.

It looks at versions, devices, kernels, variables, limits and disks (preflight/health.py), and measures how fast ranks send to
each other (preflight/links.py): two new ranks or one for each GPU, or under a launcher those that it started, on all its
machines.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hf_longctx.commands.preflight.health import Finding

COLOURS = {"ok": "green", "note": "", "warning": "yellow", "problem": "red"}


def doctor(
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Start so many processes to measure links; 1: none. By default one per GPU, or 2.",
            show_default=False,
        ),
    ] = None,
    cpu: Annotated[bool, typer.Option("--cpu", help="Measure between processors, even if there is a GPU.")] = False,
) -> None:
    """Check this machine: versions, kernels, devices, links between processes, settings; with remedies.

    Example: hf-longctx doctor --ranks 2
    """
    from rich.text import Text

    from hf_longctx.attention.kernels.report import kernel_report
    from hf_longctx.commands.preflight import health
    from hf_longctx.commands.shared.ranks import cores, is_first, on_cpu
    from hf_longctx.commands.shared.screen import screen
    from hf_longctx.settings.gpu_environment import cuda_driver

    cpu = cpu or on_cpu()
    if _several() and not is_first():
        _links(None, cpu)  # takes part, and says nothing
        return
    console, levels = screen(), []

    def show(title: str, findings: Iterable[Finding]) -> None:
        console.print(title, style="bold")
        for finding in findings:
            levels.append(finding.level)
            console.print(Text.assemble("  ", (f"{finding.level:<8}", COLOURS[finding.level]), finding.text))
            if finding.remedy and finding.level != "ok":
                console.print(f"          -> {finding.remedy}")

    show("Versions", health.versions())
    show("Devices", health.devices())
    show(
        "Environment",
        health.environment(os.environ, cuda=not cpu, processors=cores(), driver=None if cpu else cuda_driver()),
    )
    show("Limits", health.limits())
    show("Disks", health.disks())
    show("Links between processes", _links(ranks, cpu))
    console.print(kernel_report())
    bad, doubtful = levels.count("problem"), levels.count("warning")
    console.print(f"{bad} problem(s), {doubtful} warning(s)", style="bold")
    if bad:
        raise typer.Exit(1)


def _several() -> bool:
    """Whether a launcher has started ranks that can meet."""
    from hf_longctx.commands.shared.ranks import launched

    return launched() and "MASTER_ADDR" in os.environ


def _links(ranks: int | None, cpu: bool) -> list[Finding]:
    """Return what was measured between the launcher's ranks, or between new ones."""
    from hf_longctx.commands.preflight.health import Finding
    from hf_longctx.commands.preflight.links import judged, measure, read_links
    from hf_longctx.commands.shared.ranks import gpus, has_launcher, is_first, on_ranks

    wanted = int(os.environ["WORLD_SIZE"]) if _several() else ranks or (2 if cpu else gpus())
    if wanted == 1 or has_launcher() != _several():
        return [Finding("note", "not measured: one process alone sends to nobody")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "links.json"
        try:
            on_ranks(measure, path, ranks=wanted, cpu=cpu)
        except Exception as error:  # of any backend
            lines = str(error).strip().splitlines() or [type(error).__name__]
            return [
                Finding(
                    "problem",
                    f"{wanted} processes could not meet or send: {lines[-1]}",
                    "the host name must resolve to a card of this machine (getent hosts $(hostname)); GLOO_SOCKET_IFNAME and "
                    "NCCL_SOCKET_IFNAME name the card; firewalls must let processes through",
                )
            ]
        return list(judged(read_links(path), _device(cpu))) if is_first() else []


def _device(cpu: bool) -> str:
    import torch

    return "cpu" if cpu else torch.cuda.get_device_name(0)
