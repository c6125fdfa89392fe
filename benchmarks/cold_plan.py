"""The first plan on a machine that has no compiled code yet: how long does a run wait for it?

    python benchmarks/cold_plan.py --check first-plan                    # 4 minutes
    python benchmarks/cold_plan.py --cases "9 on 2" --processes 1   # a quick look

One process, then four side by side, all with the same empty NUMBA_CACHE_DIR, import the planner and make their first plan, with
all that a training step asks of it: check value, predicted times, certificate, a rank's layouts, and in a pipeline the order of
its stages. Up to 1,000 documents on 64 ranks it should run interpreted, within a second; 100,000 on 16,384 are compiled, each
function by one of the four, who says so in one line. CPU seconds are those of a process, of all its threads: a busy machine
disturbs them little, while four processes on two cores take twice the wall-clock time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

CASES: Mapping[str, tuple[int, int, str]] = {
    "9 on 2, async": (9, 2, "async"),
    "1000 on 64, async": (1000, 64, "async"),
    "1000 on 64, lockstep": (1000, 64, "lockstep"),
    "1000 on 64, pipeline": (1000, 64, "pipeline"),
    "100000 on 16384, async": (100_000, 16_384, "async"),
}
"""Name -> documents, ranks, mode."""
PROCESSES = (1, 4)
CAPACITY, STAGES, RANKS_PER_NODE = 8192, 4, 8
ANNOUNCED = "compiling the planner"
"""What a process says that compiles."""


def first_plan(case: str) -> dict[str, Any]:
    """Make the first plan of this process, and say what it took."""
    began, wall = time.process_time(), time.perf_counter()
    import numpy as np

    from hf_longctx.planner import CostModel, Topology, plan_step
    from hf_longctx.planner.stages.stage_order import stage_order
    from hf_longctx.simulator.lengths import DISTRIBUTIONS, UNIFORMS

    imported = time.process_time() - began
    documents, ranks, mode = CASES[case]
    lengths = DISTRIBUTIONS["lognormal_pareto"].lengths(np.random.default_rng(0).random((documents, UNIFORMS)))
    stages = STAGES if mode == "pipeline" else 1
    topology = Topology(ranks, CAPACITY, ranks_per_node=RANKS_PER_NODE, stages=stages)
    cost = CostModel(
        attention_ps=1200,
        linear_ps=60_000_000,
        inside_ps=40_000,
        between_ps=160_000,
        message_ns=8000,
        document_ns=30_000,
        micro_batch_ns=400_000,
        attention_half_tokens=900,
        ranks_per_node=RANKS_PER_NODE,
    )
    plan = plan_step(np.minimum(lengths, topology.tokens), topology, cost, mode)
    digest, _ = plan.digest(), (plan.summary(), plan.timeline(), plan.layouts(0))
    if mode == "pipeline":
        stage_order(plan)
    machine_code = sys.modules.get("hf_longctx.planner.machine_code")
    return {
        "import CPU": imported,
        "CPU": time.process_time() - began - imported,
        "wall": time.perf_counter() - wall,
        "digest": digest,
        "compiled": dict(machine_code.compiled_here) if machine_code is not None else {},
    }


def measure(
    cases: Iterable[str] = tuple(CASES), processes: Iterable[int] = PROCESSES
) -> tuple[list[dict[str, str]], dict[str, float]]:
    """Rows of the table, and figures. Raises RuntimeError if a process fails, or plans other than those beside it."""
    rows, figures = [], {}
    for case in cases:
        for count in processes:
            with tempfile.TemporaryDirectory() as empty:
                results, lines = _side_by_side(case, count, empty)
            compiled: Counter[str] = Counter()
            for result in results:
                compiled.update(result["compiled"])
            measured = {
                "CPU seconds": max(result["CPU"] for result in results),
                "wall seconds": max(result["wall"] for result in results),
                "functions compiled": len(compiled),
                "times that one was compiled": max(compiled.values(), default=0),
                "lines about it": sum(ANNOUNCED in line for line in lines),
            }
            name = f"{count} process{'es' * (count > 1)}"
            rows.append({"plan": case, "started": name} | {key: f"{value:.3g}" for key, value in measured.items()})
            figures |= {f"{case}/{name}/{key}": float(value) for key, value in measured.items()}
    return rows, figures


def _side_by_side(case: str, count: int, cache: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return what each process says of its plan, and all lines on standard error."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_DISABLE_JIT"}
    environment |= {"NUMBA_CACHE_DIR": cache, "PYTHONPATH": path}
    command = [sys.executable, __file__, "--first-plan", case]
    started = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    outputs = [process.communicate() for process in started]
    for process, (_, errors) in zip(started, outputs):
        if process.returncode:
            raise RuntimeError(f"planning {case} ended with {process.returncode}:\n{errors}")
    results = [json.loads(output) for output, _ in outputs]
    if len({result["digest"] for result in results}) > 1:
        raise RuntimeError(f"processes side by side planned {case} differently: {[r['digest'] for r in results]}")
    return results, [line for _, errors in outputs for line in errors.splitlines()]


def main() -> int:
    from report import conclude, parser

    options: argparse.ArgumentParser = parser(__doc__)
    options.add_argument(
        "--cases", nargs="+", default=list(CASES), help=f"run the cases that begin so: {'; '.join(CASES)}"
    )
    options.add_argument(
        "--processes",
        nargs="+",
        type=int,
        default=list(PROCESSES),
        help="start so many processes at once (default: %(default)s)",
    )
    arguments = options.parse_args()
    cases = [case for case in CASES if case.startswith(tuple(arguments.cases))]
    if not cases:
        options.error(f"--cases {arguments.cases} begins none of: {'; '.join(CASES)}")
    if min(arguments.processes) < 1:
        options.error(f"--processes {arguments.processes} must be at least 1 each")
    load = os.getloadavg()[0]
    rows, figures = measure(cases, arguments.processes)
    return conclude(arguments, rows, figures, load)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--first-plan"]:
        print(json.dumps(first_plan(sys.argv[2])))
        sys.exit(0)
    sys.exit(main())
