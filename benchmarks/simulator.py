"""ByteScale's published figures beside the same experiments in our simulator, and how fast the simulator is.

    python benchmarks/simulator.py --json benchmarks/results/simulator.json --check 4          # 3 minutes

What is played, and which of the paper's numbers everything rests on, says hf_longctx/simulator/bytescale.py: one set of
parameters for all cells, 200 steps for each, as in the paper. The columns to the right of `ours` show how far a cell
depends on what the paper leaves open: at most a quarter of the activations in host memory; none; times of single kernels
instead of whole micro-batches. A cell that is off by more than 20 % is explained below the table, and what the explanation
claims is a figure with a target of its own.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from report import conclude, parser, table

from hf_longctx.planner import Topology, plan_step
from hf_longctx.simulator.architectures import ARCHITECTURES
from hf_longctx.simulator.bytescale import (
    GPUS,
    KERNELS,
    LONGEST_CONTEXT,
    SHORTEST_CONTEXT,
    STEP_TOKENS,
    Setting,
    bound,
    throughput,
)
from hf_longctx.simulator.hardware import CLUSTERS
from hf_longctx.simulator.lengths import draw
from hf_longctx.simulator.machine import Machine
from hf_longctx.simulator.play import play

Case = tuple[str, int]
"""Data set and context."""
Speeds = Mapping[Case, Mapping[str, float]]
"""Case -> method -> tokens/s."""
BYTED, GITHUB, GITHUB_SHORT = ("byted", LONGEST_CONTEXT), ("github", LONGEST_CONTEXT), ("github", SHORTEST_CONTEXT)
DOUBLINGS = (LONGEST_CONTEXT // SHORTEST_CONTEXT).bit_length() - 1
STATIC, ALG_1, ALG_1_OFFLOAD, ALG_2, RING, OURS = (
    "static packing",
    "Alg. 1",
    "Alg. 1 + offload",
    "Alg. 2 + offload",
    "ours, ring",
    "ours",
)
CASE_STUDY_SECONDS = {STATIC: 520, ALG_1: 272, ALG_2: 157}
"""Of one step, Byted, 2M: the paper's figure 18."""
VARIANTS = {
    "r <= 0.25": Setting(most_offload=0.25),
    "no offload": Setting(most_offload=0.0),
    "single kernels": Setting(parameters=KERNELS),
}
LARGEST_DIFFERENCE = 0.2


@dataclass(frozen=True)
class Cell:
    """A published figure."""

    name: str
    paper: float
    ours: Callable[[Speeds], float]
    why: str = ""
    """It is off, where it is."""


def speedup(case: Case, method: str) -> Callable[[Speeds], float]:
    return lambda speeds: speeds[case][method] / speeds[case][STATIC]


def lost_per_doubling(method: str) -> Callable[[Speeds], float]:
    return lambda speeds: (speeds[GITHUB_SHORT][method] / speeds[GITHUB][method]) ** (1 / DOUBLINGS)


CELLS = (
    Cell(
        "GitHub 2M, Alg. 2",
        7.89,
        speedup(GITHUB, ALG_2),
        "it hangs on the offload ratio, which the paper does not give: a document of more than 1M tokens takes longer on its "
        "fewest ranks than all else in a step. At r <= 0.25 it is within 20 %",
    ),
    Cell(
        "Byted 2M, Alg. 2",
        4.26,
        speedup(BYTED, ALG_2),
        "perfect balance does not reach 4.26 at the case study's times (bound). The paper's own ablation of this setting ends at "
        "3.89, with its remote loader",
    ),
    Cell(
        "ablation: Alg. 1",
        1.59,
        speedup(BYTED, ALG_1),
        "the paper's case study of the same setting says 520 / 272 = 1.91",
    ),
    Cell(
        "ablation: + offload",
        2.01,
        speedup(BYTED, ALG_1_OFFLOAD),
        "on a document's fewest ranks its exchange hides behind attention already (case study: 1.5 behind 2.8 ms), so fewer "
        "still save nothing and take longer. Without offload it is within 20 %, and so are the seconds of the case study's step",
    ),
    Cell("ablation: + balance", 3.69, speedup(BYTED, ALG_2)),
    Cell("GitHub, lost per doubling, static", 2.0, lost_per_doubling(STATIC)),
    Cell("GitHub, lost per doubling, Alg. 1", 1.23, lost_per_doubling(ALG_1_OFFLOAD)),
    Cell(
        "GitHub, lost per doubling, Alg. 2",
        1.08,
        lost_per_doubling(ALG_2),
        "perfect balance loses more: the attention of longer documents (least possible). The paper's is an average over models "
        "up to 141B, whose attention weighs less",
    ),
)


def measure(setting: Setting, steps: int, *cases: Case) -> Speeds:
    return {case: throughput(setting, *case, steps) for case in cases}


def simulator_seconds(repeats: int = 5) -> float:
    """Seconds to play 100,000 documents on 16,384 ranks, median."""
    config = ARCHITECTURES["llama-7b"]
    machine = Machine.of(CLUSTERS["h100"], config)
    topology = Topology(16384, 8192, ranks_per_node=machine.ranks_per_node)
    plan = plan_step(draw("github", 100_000, 0), topology, machine.cost(config, topology.world_size))
    play(plan, config, machine)
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        play(plan, config, machine)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def planners_beside(ours: Speeds, bounds: Mapping[Case, float], figures: dict[str, float]) -> str:
    """Speedup of every method over static packing at 2M, and what no plan exceeds."""
    rows = []
    for case in (GITHUB, BYTED):
        speeds = {name: speedup(case, name)(ours) for name in (ALG_1, ALG_1_OFFLOAD, ALG_2, RING, OURS)}
        speeds["bound"] = bounds[case] / ours[case][STATIC]
        figures |= {f"speedup/{case[0]}/{name}": speed for name, speed in speeds.items()}
        for name in (ALG_2, RING):
            figures[f"our planner/{case[0]}/{name} over ours"] = speeds[name] / speeds[OURS]
        rows.append({"speedup over static packing, 2M": case[0]} | {name: f"{s:.2f}" for name, s in speeds.items()})
    figures["our planner/github/ByteScale's 7.89 over ours"] = 7.89 / figures[f"speedup/github/{OURS}"]
    figures["our planner/byted/ByteScale's ablation 3.69 over ours"] = 3.69 / figures[f"speedup/byted/{OURS}"]
    return table(rows)


def steps_beside(ours: Speeds, figures: dict[str, float]) -> str:
    """Seconds of a step of Byted at 2M, beside those of the case study."""
    rows = []
    for name in (STATIC, ALG_1, ALG_2, OURS):
        seconds, paper = STEP_TOKENS / ours[BYTED][name], CASE_STUDY_SECONDS.get(name)
        figures[f"case study/{name}/seconds"] = seconds
        if paper:
            figures[f"case study/{name}/difference"] = abs(seconds / paper - 1)
        rows.append({"seconds of a step": name, "ByteScale": f"{paper or ''}", "ours": f"{seconds:.0f}"})
    return table(rows)


def models_beside(ours: Speeds, steps: int, figures: dict[str, float]) -> str:
    """Throughput lost per doubling of the context, by size of the model."""
    rows = []
    for model in GPUS:
        speeds = ours if model == "llama-7b" else measure(Setting(model), steps, GITHUB_SHORT, GITHUB)
        lost = {name: lost_per_doubling(name)(speeds) for name in (STATIC, ALG_1_OFFLOAD, ALG_2, OURS)}
        gained = {f"{name}, speedup at 2M": speedup(GITHUB, name)(speeds) for name in (ALG_2, OURS)}
        figures |= {f"models/{model}/lost per doubling/{name}": value for name, value in lost.items()}
        rows.append(
            {"lost per doubling, GitHub": model} | {name: f"{value:.2f}" for name, value in (lost | gained).items()}
        )
    return table(rows)


def compared(
    ours: Speeds, variants: Mapping[str, Speeds], bounds: Mapping[Case, float], figures: dict[str, float]
) -> list[dict[str, str]]:
    """The table of cells."""
    rows = []
    for cell in CELLS:
        here, others = cell.ours(ours), {name: cell.ours(speeds) for name, speeds in variants.items()}
        figures |= {f"{cell.name}/{name}": value for name, value in ({"ours": here} | others).items()}
        figures[f"{cell.name}/difference"] = abs(here / cell.paper - 1)
        rows.append(
            {"cell": cell.name, "ByteScale": f"{cell.paper:.2f}", "ours": f"{here:.2f}"}
            | {"difference": f"{here / cell.paper - 1:+.0%}"}
            | {name: f"{value:.2f}" for name, value in others.items()}
        )
    least = (bounds[GITHUB_SHORT] / bounds[GITHUB]) ** (1 / DOUBLINGS)
    figures["explained/7.89, difference at r <= 0.25"] = abs(figures["GitHub 2M, Alg. 2/r <= 0.25"] / 7.89 - 1)
    figures["explained/4.26, bound over it"] = bounds[BYTED] / ours[BYTED][STATIC] / 4.26
    figures["explained/1.59, difference from the case study's 1.91"] = abs(speedup(BYTED, ALG_1)(ours) * 272 / 520 - 1)
    figures["explained/2.01, difference without offload"] = abs(figures["ablation: + offload/no offload"] / 2.01 - 1)
    figures["explained/1.08 over the least possible"] = 1.08 / least
    figures["least possible loss per doubling"] = least
    return rows


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--steps", type=int, default=200, metavar="N", help="of each experiment (200)")
    return made.parse_args()


def main() -> int:
    options, load_before = arguments(), os.getloadavg()[0]
    steps = options.steps
    cases = (BYTED, GITHUB, GITHUB_SHORT)
    ours = measure(Setting(), steps, *cases)
    variants = {name: measure(setting, steps, *cases) for name, setting in VARIANTS.items()}
    bounds = {case: bound(Setting(), *case, steps) for case in cases}
    figures: dict[str, float] = {}
    print(planners_beside(ours, bounds, figures) + "\n\n" + steps_beside(ours, figures) + "\n")
    print(models_beside(ours, steps, figures) + "\n")
    rows = compared(ours, variants, bounds, figures)
    played = figures["simulator/seconds for 100,000 documents on 16,384 ranks"] = simulator_seconds()
    status = conclude(options, rows, figures, load_before, steps=steps)
    print(f"\nleast possible loss per doubling: {figures['least possible loss per doubling']:.2f}")
    for cell in CELLS:
        if figures[f"{cell.name}/difference"] > LARGEST_DIFFERENCE:
            print(f"{cell.name}, {cell.paper}: {cell.why or 'not explained'}")
    print(f"100,000 documents on 16,384 ranks are played in {played:.2f} s")
    return status


if __name__ == "__main__":
    sys.exit(main())
