"""Trains the most used families on gloo ranks, beside a loop over documents with the plain model: same losses, same gradients?

    python benchmarks/most_used.py --check --json benchmarks/results/most_used.json
    python benchmarks/most_used.py --ranks 2 --rotate                               # a sharding for each family, in turn
    python benchmarks/most_used.py --families qwen3 mamba --ranks 4                 # a few

Each family is the tiny copy of its default configuration (float32), trained by LongContextTrainer for two steps on 1, 2 and 4
ranks under ddp, zero1 and zero3; with activation checkpointing where weights or states are sharded. Documents are shorter and
longer than what a rank holds; where a family keeps them whole, the longest just fit. Families with windows are trained twice:
a window is smaller than a document's part on a rank, or larger.

A line for each run: the largest difference of a step's loss, and of its gradient norm, relative to the loop's.
"""

import dataclasses
import functools
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from model_coverage import MOST_USED
from report import conclude, parser

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))

from benchmarks.most_used_cases import (
    CAPACITY,
    DOCUMENTS_OF_A_STEP,
    SEED,
    SHARDINGS,
    STEPS,
    WINDOWS,
    Case,
    model_of,
    rows_of,
    settings,
    tiny,
    trained,
    windows_of,
)
from hf_longctx.planner import GlobalBatches
from tests.builders.training_runs import reference
from tests.worlds.rank_pool import RankPool


@dataclasses.dataclass(frozen=True)
class Line:
    """What came of a case."""

    case: Case
    loss: float = float("nan")
    """Largest difference relative to the loop's"""
    norm: float = float("nan")
    seconds: float = 0.0
    capped: bool = False
    error: str = ""


@functools.cache
def looped(model_type: str, window: int | None, capacity_of: int | None) -> tuple[list[float], list[float]]:
    """Return losses and norms of the loop over documents; `capacity_of`: ranks whose capacity cuts documents, or None."""
    case = Case(model_type, window, capacity_of or 1, "ddp")
    rows = rows_of(case, capacity_of is not None)
    lengths = np.array([len(row["input_ids"]) for row in rows])
    batches = GlobalBatches(lengths, SEED, documents=DOCUMENTS_OF_A_STEP)
    losses, norms, _ = reference(model_of(case), rows, batches, 1, settings(tempfile.gettempdir()))
    return losses[:STEPS], norms[:STEPS]


def run(case: Case, pool: RankPool) -> Line:
    """Train a case on all ranks of a pool, and compare it."""
    begin = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as output:
            runs = pool.run(trained, case, output)
    except Exception as error:
        return Line(case, seconds=time.perf_counter() - begin, error=f"{type(error).__name__}: {error}")
    losses, norms = looped(case.model_type, case.window, case.ranks if runs[0].capped else None)
    return Line(
        case,
        max(_difference(rank_run.losses, losses) for rank_run in runs),
        max(_difference(rank_run.norms, norms) for rank_run in runs),
        time.perf_counter() - begin,
        runs[0].capped,
    )


def _difference(left: Sequence[float], right: Sequence[float]) -> float:
    if len(left) != len(right):
        raise ValueError(f"{len(left)} steps were trained, not {len(right)}")
    return max(abs(ours - other) / abs(other) for ours, other in zip(left, right))


def cases(families: Sequence[str], ranks: Sequence[int], rotate: bool) -> Iterator[Case]:
    """Yield what is trained: every sharding (one process has none), or one for each family in turn."""
    for world_size in ranks:
        shardings = SHARDINGS[:1] if world_size == 1 else SHARDINGS
        for at, model_type in enumerate(families):
            for number, window in enumerate(WINDOWS if windows_of(tiny(model_type, None)) else (None,)):
                turn = at + number + ranks.index(world_size)
                chosen = [shardings[turn % len(shardings)]] if rotate else shardings
                yield from (Case(model_type, window, world_size, sharding) for sharding in chosen)


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "--families", nargs="+", default=MOST_USED, metavar="TYPE", help="train these families (default: all forty)"
    )
    options.add_argument("--ranks", nargs="+", type=int, default=list(CAPACITY), choices=CAPACITY)
    options.add_argument(
        "--rotate", action="store_true", help="take one sharding for each family and number of ranks, in turn"
    )
    arguments = options.parse_args()
    load = os.getloadavg()[0]
    torch.set_num_threads(1)
    pools = {ranks: RankPool(ranks) for ranks in arguments.ranks}
    lines = []
    for case in cases(arguments.families, arguments.ranks, arguments.rotate):
        line = run(case, pools[case.ranks])
        lines.append(line)
        outcome = f"loss {line.loss:.1e}, gradient norm {line.norm:.1e}" if not line.error else line.error
        print(f"{case.name}: {outcome}, {line.seconds:.1f} s", file=sys.stderr, flush=True)
    figures: dict[str, float] = {
        "runs/all": len(lines),
        "runs/failed": sum(bool(line.error) for line in lines),
        "families/all": len({line.case.model_type for line in lines}),
    }
    for line in lines:
        if not line.error:
            figures[f"{line.case.name}/difference of loss"] = line.loss
            figures[f"{line.case.name}/difference of gradient norm"] = line.norm
    table = [
        {
            "family": line.case.model_type,
            "window": str(line.case.window or "-"),
            "ranks": str(line.case.ranks),
            "sharding": line.case.sharding,
            "documents": "whole" if line.capped else "split",
            "loss": f"{line.loss:.1e}",
            "gradient norm": f"{line.norm:.1e}",
            "failure": " ".join(line.error.split())[:200],
        }
        for line in lines
    ]
    return conclude(arguments, table, figures, load)


if __name__ == "__main__":
    sys.exit(main())
