"""What planning through Ray costs a training run: bytes, the planner's time, and how long ranks wait for a step.

    python benchmarks/remote.py --json benchmarks/results/remote.json --check          # 3 minutes

ByteScale-like systems are criticised for their CPU side: lengths collected, a schedule solved for every step, all of it
coordinated through Ray. Here it is measured. Documents have the lengths of `github` (simulator/lengths.py), 16 of them per
rank and step, and lie in an Arrow file; planner and servers are the actors of data/remote/ on a Ray of this machine; ranks
are clients in threads of this process, each with its own RemoteSteps. Steps are as long as the cost model of a 7B model on
GPUs predicts (planner.GPU), and shares are of that; here ranks sleep for --pace seconds at most, so all else has less time
to hide.

- planner: seconds of the planner for a step, certificate included. It plans ahead, so this is hidden while a step lasts
  longer.
- metadata: bytes of a step's requests, answers and plan, all ranks: pickled, plus what Ray itself sends around a call.
- store: bytes that a step takes of the object store: all tokens and labels, 4 bytes each, and the copies of the plan.
- wait: how long a rank waits for its next step: the median over steps of the rank that waits longest, without the first
  step, for which nothing could be done in advance; and the same with the local loader, where each rank plans and reads.

The projection to 16,384 ranks and 100,000 documents per step measures the planner's time and the time for which its
process is busy with each request of a server, and computes bytes. Each node of 8 ranks has a server.
"""

import argparse
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from datasets import Dataset, load_from_disk
from planner_cases import CAPACITY, RANKS_PER_NODE, cost_models
from report import conclude, parser

from hf_longctx.data.collator import LengthAwareCollator
from hf_longctx.data.length_index import LengthIndex
from hf_longctx.data.loader import PlannedDataLoader, PlannedSteps
from hf_longctx.data.long_documents import Pieces, cut_documents
from hf_longctx.data.remote.client import RemoteSteps
from hf_longctx.data.remote.cluster import connect, disconnect
from hf_longctx.data.remote.planner import Planner
from hf_longctx.data.remote.wire import TOKEN_BYTES
from hf_longctx.data.step_plans import UNADJUSTED, StepPlans
from hf_longctx.planner import GlobalBatches, Topology
from hf_longctx.simulator.lengths import draw

DISTRIBUTION = "github"
DOCUMENTS_PER_RANK = 16
LONGEST = 2**18
"""Tokens, in what is really read; 2^21 in the projection, as in benchmarks/planner.py."""
STEPS = 6
PROJECTED = (100_000, 16_384)
"""Documents of a step, ranks."""
CALL_BYTES = 1500
"""That Ray sends around the arguments and the answer of one call, on top of them: measured on loopback as 1.0 to 1.5 KB in
a thousand calls without arguments (Ray 2.60)."""
REPEATS = 5


@dataclass(frozen=True)
class Costs:
    """Of one step, all ranks."""

    planner_seconds: float
    plan_bytes: int
    metadata_bytes: int
    store_bytes: int
    step_seconds: float
    """as the cost model predicts it"""

    def figures(self) -> dict[str, float]:
        return {
            "planner seconds per step": self.planner_seconds,
            "plan bytes": self.plan_bytes,
            "metadata bytes per step": self.metadata_bytes,
            "object store bytes per step": self.store_bytes,
            "predicted step seconds": self.step_seconds,
            "planner over step": self.planner_seconds / self.step_seconds,
        }


def request_bytes(*arguments: Any) -> int:
    """Count the bytes of a call with these arguments."""
    return len(pickle.dumps(arguments, protocol=5)) + CALL_BYTES


def metadata_bytes(ranks: int, servers: int, plan_bytes: int) -> int:
    """Each rank asks its server, each server asks the planner, and all of them get the plan."""
    order = (0, 10**6, UNADJUSTED)
    return ranks * (request_bytes(*order, ranks) + plan_bytes) + servers * (request_bytes(*order) + plan_bytes)


# On real Ray


@contextmanager
def stored_documents(lengths: np.ndarray) -> Iterator[Dataset]:
    """Documents of these lengths in a file, memory-mapped."""
    values = np.random.default_rng(0).integers(0, 32_000, int(lengths.sum()), dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    table = pa.table({"input_ids": pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))})
    with tempfile.TemporaryDirectory() as folder:
        Dataset(table).save_to_disk(folder)
        del values, table
        yield load_from_disk(folder)


def clients(dataset: Dataset, pieces: Pieces, ranks: int, servers: int) -> list[RemoteSteps]:
    batches = GlobalBatches(pieces.lengths, 0, documents=DOCUMENTS_PER_RANK * ranks)
    topology = Topology(ranks, CAPACITY.get(ranks, 8192), ranks_per_node=RANKS_PER_NODE)
    collators = [LengthAwareCollator(topology, cost_models()["rich"], rank) for rank in range(ranks)]
    names: dict[str, Any] = {"job": "benchmark", "name": f"{ranks} ranks", "servers": servers}
    return [RemoteSteps(dataset, pieces, batches, collator, **names) for collator in collators]


def waits_of(steps: Sequence[PlannedSteps], step_seconds: float, threads: ThreadPoolExecutor) -> list[float]:
    """[steps - 1]: seconds that the rank waited that waited longest, in an epoch whose steps last so long."""
    iterators = [iter(PlannedDataLoader(source)) for source in steps]

    def waited(iterator: Iterator[Any]) -> float:
        started = time.perf_counter()
        next(iterator)
        return time.perf_counter() - started

    waits = []
    for step in range(steps[0].steps(0)):
        longest = max(threads.map(waited, iterators))
        if step:
            waits.append(longest)
        time.sleep(step_seconds)
    return waits


def measured(ranks: int, servers: int, pace: float) -> dict[str, float]:
    """Figures of one number of clients."""
    capacity = CAPACITY.get(ranks, 8192)
    lengths = draw(DISTRIBUTION, DOCUMENTS_PER_RANK * ranks * STEPS, longest=min(LONGEST, ranks * capacity), seed=0)
    with stored_documents(lengths) as dataset, ThreadPoolExecutor(ranks) as threads:
        pieces = cut_documents(dataset, LengthIndex.from_dataset(dataset))
        steps = clients(dataset, pieces, ranks, servers)
        try:
            first = steps[0].plan(0, 0)
            packed = ray.get(ray.get(steps[0]._planner.plan.remote(*steps[0].order(0, 0)))[0])
            plan_bytes = len(pickle.dumps(packed, protocol=5))
            before = steps[0].planner_report()
            step_seconds = (first.summary().makespan + steps[0].collator.cost.step_ns) / 1e9
            lasts = min(step_seconds, pace)
            waits = waits_of(steps, lasts, threads)
            after = steps[0].planner_report()
            served = {source._served_by: source.server_report() for source in steps}
        finally:
            for source in steps:
                source.close()
        local = [PlannedSteps(source.dataset, source.pieces, source.batches, source.collator) for source in steps]
        local_waits = waits_of(local, lasts, threads)
    part_bytes = sum(report.part_bytes for report in served.values()) // STEPS
    assert part_bytes == int(lengths.sum()) * TOKEN_BYTES // STEPS
    costs = Costs(
        planner_seconds=(after.seconds - before.seconds) / (after.planned - before.planned),
        plan_bytes=plan_bytes,
        metadata_bytes=metadata_bytes(ranks, servers, plan_bytes),
        store_bytes=part_bytes + (1 + ranks) * plan_bytes,
        step_seconds=step_seconds,
    )
    wait = statistics.median(waits)
    return costs.figures() | {
        "wait seconds": wait,
        "wait over step": wait / step_seconds,
        "wait seconds, local loader": statistics.median(local_waits),
    }


# Projected


def projected() -> dict[str, float]:
    """Figures of PROJECTED: the planner's time is measured, bytes are computed."""
    documents, ranks = PROJECTED
    lengths = draw(DISTRIBUTION, documents * 2, longest=2**21, seed=0)
    index = LengthIndex(lengths, lengths - 1)
    pieces = cut_documents(None, index)
    topology, cost = Topology(ranks, 8192, ranks_per_node=RANKS_PER_NODE), cost_models()["rich"]
    plans = StepPlans(
        pieces, GlobalBatches(lengths, 0, documents=documents), LengthAwareCollator(topology, cost).planning
    )
    times, plan_bytes = [], 0
    for repeat in range(REPEATS + 1):  # the first one compiles
        planner = Planner(plans, 1)
        [reference] = planner.plan(0, repeat % 2, UNADJUSTED)
        times.append(planner.report().seconds)
        plan_bytes = max(plan_bytes, len(pickle.dumps(ray.get(reference), protocol=5)))
    servers = ranks // RANKS_PER_NODE
    plan = plans.plan(0, 0, UNADJUSTED)
    tokens = int(lengths.sum()) // 2
    costs = Costs(
        planner_seconds=statistics.median(times[1:]),
        plan_bytes=plan_bytes,
        metadata_bytes=metadata_bytes(ranks, servers, plan_bytes),
        store_bytes=tokens * TOKEN_BYTES + (1 + servers + ranks) * plan_bytes,
        step_seconds=(plan.summary().makespan + cost.step_ns) / 1e9,
    )
    requests = servers * request_seconds(plans)
    return costs.figures() | {
        "seconds of the planner for all servers' requests": requests,
        "all of the planner over step": (costs.planner_seconds + requests) / costs.step_seconds,
        "metadata bytes per rank and second": costs.metadata_bytes / ranks / costs.step_seconds,
        "store bytes per rank and second": costs.store_bytes / ranks / costs.step_seconds,
    }


def request_seconds(plans: StepPlans, calls: int = 500) -> float:
    """Return that the planner's process is busy with a request for a plan that it has made already."""
    actor: Any = ray.remote(Planner).options(num_cpus=0).remote(ray.put(plans), 1)
    ray.get(actor.plan.remote(0, 0, UNADJUSTED))
    pid = ray.get(actor.report.remote()).process
    before = cpu_seconds(pid)
    ray.get([actor.plan.remote(0, 0, UNADJUSTED) for _ in range(calls)])
    spent = cpu_seconds(pid) - before
    ray.kill(actor)
    return spent / calls


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, all of its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def row(name: str, figures: dict[str, float]) -> dict[str, str]:
    def cell(figure: str, form: str, unit: float = 1.0) -> str:
        return format(figures[figure] / unit, form) if figure in figures else ""

    return {
        "ranks": name,
        "planner ms": cell("planner seconds per step", ".1f", 1e-3),
        "plan KB": cell("plan bytes", ".1f", 1e3),
        "metadata MB": cell("metadata bytes per step", ".2f", 1e6),
        "store MB": cell("object store bytes per step", ".1f", 1e6),
        "predicted step s": cell("predicted step seconds", ".2f"),
        "planner / step": cell("planner over step", ".2%"),
        "wait ms": cell("wait seconds", ".1f", 1e-3),
        "wait / step": cell("wait over step", ".2%"),
        "local wait ms": cell("wait seconds, local loader", ".1f", 1e-3),
    }


def main() -> int:
    arguments = _arguments()
    load = os.getloadavg()[0]
    rows: list[dict[str, str]] = []
    figures: dict[str, float] = {}

    def add(name: str, values: dict[str, float]) -> None:
        rows.append(row(name, values))
        figures.update({f"{name}/{figure}": value for figure, value in values.items()})

    connect()
    try:
        for ranks in arguments.ranks:
            print(f"{ranks} ranks ...", file=sys.stderr)
            add(f"{ranks} ranks", measured(ranks, min(arguments.servers, ranks), arguments.pace))
        print("projection ...", file=sys.stderr)
        add(f"{PROJECTED[1]} ranks, projected", projected())
    finally:
        disconnect()
    return conclude(arguments, rows, figures, load)


def _arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument(
        "--ranks", nargs="+", type=int, default=[1, 4, 16, 64], help="load for so many ranks (default: %(default)s)"
    )
    options.add_argument("--servers", type=int, default=2, help="start so many document servers (default: %(default)s)")
    options.add_argument(
        "--pace", type=float, default=2.0, help="let a step last so many seconds at most (default: %(default)s)"
    )
    arguments = options.parse_args()
    if min(*arguments.ranks, arguments.servers) < 1 or arguments.pace <= 0:
        options.error("--ranks and --servers must be at least 1, --pace positive")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
