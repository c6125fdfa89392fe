"""All messages of a step, played by the strictest rules that NCCL may have, for up to 256 ranks.

    python benchmarks/replay.py --json benchmarks/results/replay.json --check message-order      # 10 minutes
    python benchmarks/replay.py --ranks 16 32                                           # a few seconds

Every rank's own engine runs the micro-batches of a plan with a kernel without arithmetic; its exchange writes down what it would
start, and the collectives of FSDP2, tensor and expert parallelism are written down between (tests/replay.py). What is played:
batches in order on each group, and one at a time on all of a rank, as where making a connection blocks the host.
"""

import os
import sys
import time
from pathlib import Path

from report import conclude, parser

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))

import torch

from tests.replay import Case, match, recorded, stuck

VARIANTS = {
    "direct": {},
    "ulysses 4": {"ulysses": 4},
    "window": {"window": 96},
    "last slice kept": {"keep_last_slice": True},
    "attention kept": {"recomputes": False},
    "in rounds, with FSDP2": {"in_rounds": True},
    "tensor parallel 4": {"tensor_parallel": 4, "ranks_per_node": 2},
    "in rounds, with FSDP2 and experts": {"in_rounds": True, "experts": True},
}
RANKS = {16: VARIANTS, 64: VARIANTS, 256: {name: VARIANTS[name] for name in ("direct", "ulysses 4")}}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--ranks", nargs="+", type=int, default=list(RANKS), help="default: %(default)s")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    rows, figures = [], dict[str, float]()
    for ranks in arguments.ranks:
        for name, settings in RANKS.get(ranks, VARIANTS).items():
            began = time.monotonic()
            by_rank = recorded(Case(ranks, **settings))
            case = f"{ranks} ranks, {name}"
            figures[f"{case}/batches"] = sum(map(len, by_rank))
            figures[f"{case}/messages without another end"] = match(by_rank)
            figures[f"{case}/stuck in order"] = sum(stuck(by_rank, one_at_a_time=False).values())
            figures[f"{case}/stuck one at a time"] = sum(stuck(by_rank, one_at_a_time=True).values())
            measured = {key.rpartition("/")[2]: value for key, value in figures.items() if key.startswith(f"{case}/")}
            rows.append({"step": case} | {key: str(int(value)) for key, value in measured.items()})
            print(f"{case}: {measured}, {time.monotonic() - began:.0f} s", flush=True)
    return conclude(arguments, rows, figures, load)


if __name__ == "__main__":
    sys.exit(main())
