"""All messages of a step, played by the strictest rules that NCCL may have, for up to 512 ranks.

    python benchmarks/replay.py --json benchmarks/results/replay.json --check message-order      # half an hour beside other work
    python benchmarks/replay.py --ranks 8                                               # a few seconds

Every rank's own engine runs the micro-batches of a plan with a kernel without arithmetic; its exchange writes down what it would
start; the collectives of FSDP2, tensor and expert parallelism are written down between (tests/worlds/replay.py). Stages of a
pipeline run their tasks through links that write down too (tests/worlds/replay_stages.py). Batches are played in order on each
group; one after another on all of a rank, as where making a connection blocks the host; and one at a time on a device: not
asked of stages whose receives are posted early, as they are where devices run several kernels.
"""

import os
import sys
import time
from pathlib import Path

from report import conclude, parser

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))

import torch

from tests.worlds.replay import RULES, Case, match, stuck
from tests.worlds.replay_stages import record

VARIANTS = {
    "direct": {},
    "ulysses 4": {"ulysses": 4},
    "window": {"window": 96},
    "last slice kept": {"keep_last_slice": True},
    "attention kept": {"recomputes": False},
    "in rounds, with FSDP2": {"in_rounds": True},
    "tensor parallel 4": {"tensor_parallel": 4, "ranks_per_node": 2},
    "in rounds, with FSDP2 and experts": {"in_rounds": True, "experts": True},
    "4 stages": {"stages": 4},
    "4 stages in order": {"stages": 4, "links_in_order": True},
    "2 stages of 2, heads shared by 2, in order": {
        **{"stages": 2, "virtual": 2, "tensor_parallel": 2, "ranks_per_node": 4, "links_in_order": True}
    },
}
LARGE = ("direct", "ulysses 4", "4 stages in order", "2 stages of 2, heads shared by 2, in order")
RANKS = {8: VARIANTS, 64: VARIANTS, 256: {name: VARIANTS[name] for name in LARGE}}
RANKS[512] = {name: VARIANTS[name] for name in LARGE[2:3]}
"""Processes -> what is played of them."""
COLUMNS = dict.fromkeys(("batches", "messages without another end", *(f"stuck, {rule}" for rule in RULES)), "not asked")


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "--ranks", nargs="+", type=int, default=list(RANKS), help="replay so many ranks (default: %(default)s)"
    )
    arguments = options.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    rows, figures = [], dict[str, float]()
    for ranks in arguments.ranks:
        for name, settings in RANKS.get(ranks, VARIANTS).items():
            began = time.monotonic()
            share = settings.get("stages", 1) * settings.get("tensor_parallel", 1)
            by_rank = record(Case(ranks // share, **settings))
            case = f"{ranks} ranks, {name}"
            figures[f"{case}/batches"] = sum(map(len, by_rank))
            figures[f"{case}/messages without another end"] = match(by_rank)
            for rule in RULES[:2] if settings.get("stages") and not settings.get("links_in_order") else RULES:
                figures[f"{case}/stuck, {rule}"] = sum(stuck(by_rank, rule).values())
            measured = {key.rpartition("/")[2]: value for key, value in figures.items() if key.startswith(f"{case}/")}
            rows.append({"step": case} | COLUMNS | {key: str(int(value)) for key, value in measured.items()})
            print(f"{case}: {measured}, {time.monotonic() - began:.0f} s", flush=True)
    return conclude(arguments, rows, figures, load)


if __name__ == "__main__":
    sys.exit(main())
