"""Attention across ranks: ours and the real peers, side by side, on gloo ranks of this machine.

    python benchmarks/attention.py --json benchmarks/results/attention.json --check
    python benchmarks/attention.py --tokens 1920 --repeats 1          # a quick look

Every implementation computes the same cases (causal within documents, forward and backward, float32, one computing
thread per rank) in the same processes. Repetitions are interleaved: each round runs every implementation once, starting
with another one each time; medians are reported. Compared are

- time: CPU seconds of the computing thread, on the slowest rank, over *the limit*: what one process needs for the whole
  case with one call of torch's attention per document, divided by the ranks. 1.00 is perfect;
- CPU seconds of all ranks and all their threads, communication included, over that one process;
- bytes sent (traffic.py), over those of a zigzag ring, which passes all keys and values on ranks - 1 times;
- the largest absolute difference from a float64 reference, inputs being standard normal.
"""

import importlib
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from attention_cases import Case, cases
from attention_peers import CannotRun, Prepared, World
from ranks import on_ranks
from report import conclude, parser
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

RINGS = ("ring-flash-attn zigzag", "yunchang ring", "torch context_parallel ring")

WRONG = 1e-2
"""A gradient that is off by more is not a matter of rounding. Both ring packages turn a buffer into float32 to keep it
and then write the next block's gradients into the buffer: right in bfloat16, where that copies, and wrong in float32,
where it does not. Their times are not affected."""

ONE_PROCESS = "one process"


@dataclass
class Measured:
    """One implementation of one case, on one rank."""

    forward_bytes: int
    bytes: int
    """forward and backward"""
    errors: list[float]
    """of out, dq, dk, dv"""
    thread_seconds: list[float] = field(default_factory=list)
    process_seconds: list[float] = field(default_factory=list)


def measure(wanted: list[Case], references: str, repeats: int) -> list[dict[str, Measured | str]]:
    """On each rank: for every case, what each implementation took, or why it cannot do it."""
    warnings.simplefilter("ignore", FutureWarning)  # peers call functions that torch has renamed
    world = World(dist.get_rank(), dist.get_world_size(), Exchange())
    with Traffic() as traffic:
        sys.path[:0] = [str(folder) for folder in PEER_FOLDERS]
        prepares = _implementations()
        return [
            _measure_case(case, torch.load(f"{references}/{case.name}.pt"), prepares, world, traffic, repeats)
            for case in wanted
        ]


def _implementations() -> dict[str, Any]:
    """Name -> prepare, or why the module does not import."""
    found: dict[str, Any] = {}
    for module, name in IMPLEMENTATIONS.items():
        try:
            found |= importlib.import_module(f"attention_peers.{module}").IMPLEMENTATIONS
        except ImportError as error:
            found[name] = f"not installed ({error}): bash scripts/setup_bench.sh"
    return found


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
            prepared = prepare(case, world)
            runs[name], results[name] = _warm_up(case, prepared, reference, traffic)
        except CannotRun as reason:
            results[name] = str(reason)
        except Exception as error:
            if name == "ours":
                raise
            results[name] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        dist.barrier()
    if world.rank == 0:
        alone = Prepared(lambda x: x, case.attend)
        runs[ONE_PROCESS], results[ONE_PROCESS] = _warm_up(case, alone, reference, traffic)
    names = [*prepares, ONE_PROCESS]
    for repeat in range(repeats):
        first = repeat * len(names) // repeats
        for name in names[first:] + names[:first]:
            dist.barrier()
            if name in runs:
                measured = results[name]
                assert isinstance(measured, Measured)
                thread, process = time.thread_time(), time.process_time()
                runs[name]()
                measured.thread_seconds.append(time.thread_time() - thread)
                measured.process_seconds.append(time.process_time() - process)
    return results


Run = Callable[[], tuple[int, tuple[torch.Tensor, ...]]]
"""Forward and backward: bytes sent by the forward pass; output and gradients of q, k, v."""


def _warm_up(
    case: Case, prepared: Prepared, reference: tuple[torch.Tensor, ...], traffic: Traffic
) -> tuple[Run, Measured]:
    """A run to repeat, and what its first execution sent and got wrong."""
    *qkv, grad_out = (prepared.shard(x).detach().clone() for x in case.inputs())
    for x in qkv:
        x.requires_grad_()

    def run() -> tuple[int, tuple[torch.Tensor, ...]]:
        before = traffic.sent
        out = prepared.attend(*qkv)
        forward_bytes = traffic.sent - before
        return forward_bytes, (out.detach(), *torch.autograd.grad(out, qkv, grad_out))

    before = traffic.sent
    forward_bytes, results = run()
    sent = traffic.sent - before
    errors = [float((got.double() - prepared.shard(exact)).abs().max()) for got, exact in zip(results, reference)]
    return run, Measured(forward_bytes, sent, errors)


def summarise(case: Case, ranks: int, measured: list[dict[str, Measured | str]]) -> dict[str, dict[str, float] | str]:
    """Implementation -> its figures over all ranks, or why it cannot do the case."""
    alone = measured[0].pop(ONE_PROCESS)
    assert isinstance(alone, Measured)
    limit = statistics.median(alone.thread_seconds) / ranks
    ring_bytes = (ranks - 1) * case.kv_bytes
    summaries: dict[str, dict[str, float] | str] = {}
    for name, first in measured[0].items():
        each: list[Any] = [on_rank[name] for on_rank in measured]
        if isinstance(first, str) or any(isinstance(one, str) for one in each):
            summaries[name] = next(one for one in each if isinstance(one, str))
            continue
        slowest = max(statistics.median(one.thread_seconds) for one in each)
        total = sum(statistics.median(one.process_seconds) for one in each)
        summaries[name] = {
            "slowest rank, CPU seconds": slowest,
            "slowest rank over the limit": slowest / limit,
            "CPU of all ranks over one process": total / limit / ranks,
            "forward bytes over a zigzag ring's": sum(one.forward_bytes for one in each) / ring_bytes,
            "bytes, all ranks": sum(one.bytes for one in each),
            "bytes, busiest rank": max(one.bytes for one in each),
            "error of out": max(one.errors[0] for one in each),
            "error of gradients": max(max(one.errors[1:]) for one in each),
        }
    _compare_with_peers(summaries)
    return summaries


def _compare_with_peers(summaries: dict[str, dict[str, float] | str]) -> None:
    """Adds to ours what it is of the best ring, and of the best peer."""
    ours = summaries["ours"]
    peers = {name: each for name, each in summaries.items() if name != "ours" and isinstance(each, dict)}
    rings = [each for name, each in peers.items() if name in RINGS]
    if not isinstance(ours, dict):
        return
    for label, figure, others in (
        ("CPU of all ranks over the best ring's", "CPU of all ranks over one process", rings),
        ("bytes over the best ring's", "bytes, all ranks", rings),
        ("bytes over the best peer's", "bytes, all ranks", list(peers.values())),
    ):
        if others:
            ours[label] = ours[figure] / min(each[figure] for each in others)


def row(case: Case, ranks: int, name: str, summary: dict[str, float] | str) -> dict[str, str]:
    """A row of the table."""
    cells = {"case": case.name, "ranks": str(ranks), "implementation": name}
    columns = {
        "slowest rank / limit": ("slowest rank over the limit", "{:.2f}"),
        "CPU of all / one process": ("CPU of all ranks over one process", "{:.2f}"),
        "forward bytes / zigzag ring": ("forward bytes over a zigzag ring's", "{:.2f}"),
        "MiB sent, all ranks": ("bytes, all ranks", "{:.0f}"),
        "busiest": ("bytes, busiest rank", "{:.0f}"),
        "error out": ("error of out", "{:.0e}"),
        "gradients": ("error of gradients", "{:.0e}"),
    }
    if isinstance(summary, str):
        return cells | dict.fromkeys(columns, "-") | {"remark": f"cannot: {summary}"}
    for column, (figure, form) in columns.items():
        cells[column] = form.format(summary[figure] / 2**20 if figure.startswith("bytes") else summary[figure])
    return cells | {"remark": "" if summary["error of gradients"] < WRONG else "wrong gradients in float32"}


def main() -> int:
    arguments_parser = parser(__doc__)
    arguments_parser.add_argument("--tokens", type=int, default=8192, help="of each case (default: %(default)s)")
    arguments_parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="default: 2 4")
    arguments_parser.add_argument("--repeats", type=int, default=5, help="medians of so many (default: %(default)s)")
    arguments = arguments_parser.parse_args()
    load = os.getloadavg()[0]
    wanted = cases(arguments.tokens)
    rows: list[dict[str, str]] = []
    figures: dict[str, float] = {}
    unable: list[str] = []
    with tempfile.TemporaryDirectory() as references:
        for case in wanted:
            torch.save(case.reference(), f"{references}/{case.name}.pt")
        for ranks in arguments.ranks:
            measured = on_ranks(measure, ranks, wanted, references, arguments.repeats)
            for index, case in enumerate(wanted):
                for name, summary in summarise(case, ranks, [each[index] for each in measured]).items():
                    place = f"{case.name}/{ranks} ranks/{name}"
                    rows.append(row(case, ranks, name, summary))
                    if isinstance(summary, str):
                        unable.append(f"{place}: {summary}")
                    else:
                        figures |= {f"{place}/{figure}": value for figure, value in summary.items()}
    rows.sort(key=lambda each: [case.name for case in wanted].index(each["case"]))
    return conclude(arguments, rows, figures, load, cannot=unable)


if __name__ == "__main__":
    sys.exit(main())
