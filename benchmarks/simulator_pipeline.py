"""Pipelines in the simulator: what chunks gain, what each schedule gains, and ByteScale's PP-balance beside ours.

    python benchmarks/simulator_pipeline.py --json benchmarks/results/simulator_pipeline.json --check        # 2 minutes

Chunks: documents of ByteScale's Byted, on 2,048 ranks of 4 stages, planned with and without chunks, played with the planner's
order of stages; every figure is the played time of micro-batches over the bound of the same cost model that leaves chunks'
exchange and the pipeline's way out (shared / R of planner/bound.py), so that it is the same for all columns.

PP-balance: ByteScale's two largest models over static packing, GitHub at 2M tokens. The paper does not say how many tokens a
step of these has, nor how the models are spread: 4 stages here, and steps of 32M tokens, as for 7B, and of 256M; then 2 and 8
stages, and 8x22B with the experts of each layer on 8 ranks.
"""

import argparse
import os
import statistics
import sys
import time
from dataclasses import replace

import numpy as np
from bytescale_replay import LONGEST_CONTEXT, STEP_TOKENS, Setting, architecture, replay
from report import conclude, parser

from hf_longctx.hardware.devices import CLUSTERS
from hf_longctx.hardware.published import ARCHITECTURES
from hf_longctx.planner import CostModel, StepPlan, Topology, lower_bound, plan_step
from hf_longctx.planner.stages.stage_order import Schedule
from hf_longctx.simulator.lengths import draw
from hf_longctx.simulator.machine import Machine
from hf_longctx.simulator.play import play

RANKS, STAGES, CAPACITY = 2048, 4, 8192
COUNTS = (20_000, 50_000, 100_000)
SCHEDULES = {
    "1f1b": Schedule(),
    "interleaved, 2 stages a device": Schedule("interleaved", 2),
    "gpipe": Schedule("gpipe"),
}
PAPER = {"llama-70b": 4.28, "mistral-8x22b": 3.42}
"""GitHub at 2M, over static packing."""


def shared_seconds(lengths: np.ndarray, topology: Topology, cost: CostModel) -> float:
    """Return the seconds of perfectly even ranks whose stages never wait."""
    return lower_bound(np.sort(lengths)[::-1], topology, cost.scaled(*[1 / topology.stages] * 3)) / 1e9


def chunks(seeds: int, figures: dict[str, float]) -> list[dict[str, str]]:
    """Each distribution and number of documents: with and without chunks, by schedule, mean of the seeds."""
    config = architecture("llama-7b")
    machine = Machine.of(CLUSTERS["a100"], config)
    cost = machine.cost(config, RANKS)
    topology = Topology(RANKS, CAPACITY, ranks_per_node=machine.ranks_per_node, stages=STAGES)
    rows = []
    for dataset, count in [*(("byted", count) for count in COUNTS), ("github", 100_000), ("lognormal_pareto", 100_000)]:
        ratios: dict[str, list[float]] = {}
        for seed in range(seeds):
            lengths = draw(dataset, count, seed)
            least = shared_seconds(lengths, topology, cost)

            def over_bound(plan: StepPlan, schedule: Schedule, least: float = least) -> float:
                return play(plan, config, machine, schedule=schedule).parts["micro-batches"] / least

            whole = plan_step(lengths, replace(topology, most_chunks=1), cost, "pipeline")
            ratios.setdefault("without chunks", []).append(over_bound(whole, Schedule()))
            plan_step(lengths, topology, cost, "pipeline")  # compiles
            begin = time.process_time()
            plan = plan_step(lengths, topology, cost, "pipeline")
            ratios.setdefault("planning seconds", []).append(time.process_time() - begin)
            for name, schedule in SCHEDULES.items():
                ratios.setdefault(name, []).append(over_bound(plan, schedule))
            ratios.setdefault("bound", []).append(plan.lower_bound / 1e9 / least)
        row = {"documents on 2,048 ranks x 4 stages": f"{dataset}, {count:,}"}
        for name, values in ratios.items():
            mean = figures[f"chunks/{dataset}, {count} documents/{name}"] = statistics.mean(values)
            row[name] = f"{mean:.3f}"
        rows.append(row)
        print(row, flush=True)
    return rows


def balance(steps: int, figures: dict[str, float]) -> list[dict[str, str]]:
    """Speedup over static packing."""
    rows = []
    for model, paper in PAPER.items():
        spread = [(stages, 8 * STEP_TOKENS, 1) for stages in (2, STAGES, 8)]
        experts = ARCHITECTURES[model].num_local_experts
        settings = [(STAGES, STEP_TOKENS, 1), *spread, *[(*pipeline[:2], experts) for pipeline in spread if experts]]
        for stages, tokens, ranks in settings:
            setting = Setting(model, stages=stages, step_tokens=tokens, most_offload=0.25, expert_ranks=ranks)
            replayed = replay(setting, "github", LONGEST_CONTEXT, steps)
            static = replayed["static packing"].tokens_per_second
            where = f"{stages} stages" + f", experts on {ranks} ranks" * (ranks > 1)
            row = {"GitHub 2M": f"{model}, {where}, steps of {tokens >> 20}M", "ByteScale": f"{paper:.2f}"}
            for name in ("Alg. 1", "+ balance", "+ remote loader", "ours"):
                speedup = replayed[name].tokens_per_second / static
                figures[f"PP-balance/{model}/{where}/{tokens >> 20}M tokens/{name}"] = speedup
                row[name] = f"{speedup:.2f}"
            rows.append(row)
            print(row, flush=True)
    return rows


def arguments() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument(
        "--seeds", type=int, default=3, metavar="N", help="draw so many global batches of each number of documents (3)"
    )
    made.add_argument(
        "--steps", type=int, default=5, metavar="N", help="average so many steps of each of ByteScale's experiments (5)"
    )
    return made.parse_args()


def main() -> int:
    options, load_before = arguments(), os.getloadavg()[0]
    figures: dict[str, float] = {}
    rows = [{"part": "chunks"} | row for row in chunks(options.seeds, figures)]
    rows += [{"part": "PP-balance"} | row for row in balance(options.steps, figures)]
    return conclude(options, rows, figures, load_before, "part", seeds=options.seeds, steps=options.steps)


if __name__ == "__main__":
    sys.exit(main())
