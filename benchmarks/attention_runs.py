"""Runs every implementation of every case on this rank, and takes down what it took.

All of a case run in the same processes, one after the other. First each runs twice: to warm up, and to count bytes,
compare with float64 and find the peak of memory. Then come the timed rounds: each runs every implementation once,
starting with another one each time. A case that is too long for that runs once, all of it measured in this one run.
"""

import importlib
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attention_cases import Case
from attention_peers import CannotRun, Prepared, World
from peak_memory import peak_bytes_of
from traffic import Traffic

from hf_longctx.attention.exchange import Exchange

BENCHMARKS = Path(__file__).resolve().parent
PEER_FOLDERS = (BENCHMARKS / "stand_ins", BENCHMARKS.parent / ".cache" / "peers")
"""The stand-in for flash-attn, and what scripts/setup_bench.sh keeps out of .venv; on the path of ranks only."""

IMPLEMENTATIONS = {
    "ours": "ours",
    "ring_flash": "ring-flash-attn",
    "usp": "yunchang",
    "torch_cp": "torch context_parallel",
    "deepspeed_ulysses": "DeepSpeed",
}
"""Module of attention_peers -> the name that stands for it where its package is missing."""

ONE_PROCESS = "one process"

Run = Callable[[], tuple[int, tuple[torch.Tensor, ...]]]
"""Forward and backward: bytes sent by the forward pass; output and gradients of q, k, v."""


@dataclass
class Measured:
    """One implementation of one case, on one rank."""

    forward_bytes: int
    bytes: int
    """forward and backward"""
    peak_bytes: int
    """held at once beyond this rank's part of the inputs; the output and the gradients count"""
    errors: list[float]
    """of out, dq, dk, dv"""
    thread_seconds: list[float] = field(default_factory=list)
    process_seconds: list[float] = field(default_factory=list)


def measure(wanted: list[Case], references: str, repeats: list[int]) -> list[dict[str, Measured | str]]:
    """On each rank: for every case, what each implementation took, or why it cannot do it.

    Args:
        references: directory with NAME.pt of each case.
        repeats: timed runs of each case; 0 to time the only run.
    """
    warnings.simplefilter("ignore", FutureWarning)  # peers call functions that torch has renamed
    world = World(dist.get_rank(), dist.get_world_size(), Exchange())
    with Traffic() as traffic:
        sys.path[:0] = [str(folder) for folder in PEER_FOLDERS]
        prepares = _implementations()
        return [
            _measure_case(case, torch.load(f"{references}/{case.name}.pt", mmap=True), prepares, world, traffic, count)
            for case, count in zip(wanted, repeats)
        ]


def _implementations() -> dict[str, Any]:
    """Name -> prepare, or why the module does not import."""
    implementations: dict[str, Any] = {}
    for module, name in IMPLEMENTATIONS.items():
        try:
            implementations |= importlib.import_module(f"attention_peers.{module}").IMPLEMENTATIONS
        except ImportError as error:
            implementations[name] = f"not installed ({error}): bash scripts/setup_bench.sh"
    return implementations


def _measure_case(
    case: Case,
    reference: tuple[torch.Tensor, ...],
    prepares: dict[str, Any],
    world: World,
    traffic: Traffic,
    repeats: int,
) -> dict[str, Measured | str]:
    results: dict[str, Measured | str] = {}
    runs: dict[str, Run] = {}
    for name, prepare in prepares.items():
        try:
            if isinstance(prepare, str):
                raise CannotRun(prepare)
            runs[name], results[name] = _first_run(case, prepare(case, world), reference, traffic, repeats > 0)
        except CannotRun as reason:
            results[name] = str(reason)
        except Exception as error:
            if name.startswith("ours"):
                raise
            results[name] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        dist.barrier()
    if world.rank == 0:
        alone = Prepared(lambda x: x, case.attend)
        runs[ONE_PROCESS], results[ONE_PROCESS] = _first_run(case, alone, reference, traffic, repeats > 0)
    names = [*prepares, ONE_PROCESS]
    for repeat in range(repeats):
        first = repeat * len(names) // repeats
        for name in names[first:] + names[:first]:
            dist.barrier()
            if name in runs:
                measured = results[name]
                assert isinstance(measured, Measured)
                _timed(runs[name], measured)
    return results


def _first_run(
    case: Case, prepared: Prepared, reference: tuple[torch.Tensor, ...], traffic: Traffic, warm_up: bool
) -> tuple[Run, Measured]:
    """A run to repeat, and what it sent, held and got wrong; its time too, if there was no warm-up before it."""
    *qkv, grad_out = (prepared.shard(x).detach().clone() for x in case.inputs())
    for x in qkv:
        x.requires_grad_()

    def run() -> tuple[int, tuple[torch.Tensor, ...]]:
        before = traffic.sent
        out = prepared.attend(*qkv)
        forward_bytes = traffic.sent - before
        return forward_bytes, (out.detach(), *torch.autograd.grad(out, qkv, grad_out))

    if warm_up:
        run()
    measured = Measured(0, 0, 0, [])
    before = traffic.sent
    measured.peak_bytes, (measured.forward_bytes, results) = peak_bytes_of(lambda: _timed(run, measured))
    measured.bytes = traffic.sent - before
    measured.errors = [
        float((got.double() - prepared.shard(exact)).abs().max()) for got, exact in zip(results, reference)
    ]
    if warm_up:
        measured.thread_seconds.clear()
        measured.process_seconds.clear()
    return run, measured


def _timed(run: Run, measured: Measured) -> tuple[int, tuple[torch.Tensor, ...]]:
    thread, process = time.thread_time(), time.process_time()
    returned = run()
    measured.thread_seconds.append(time.thread_time() - thread)
    measured.process_seconds.append(time.process_time() - process)
    return returned
