"""Training runs that others have published, and what the simulator and the memory model answer for the same set-ups.

    python benchmarks/published_runs.py                       # a minute
    python benchmarks/published_runs.py --json published.json

Each set-up says what its source says of it: model, GPUs, parallelism, lengths, recomputation. Where a source is silent, the
choice stands in RUNS with its reason. No speed of hardware/devices.py was fitted to published numbers: these are the presets
that planner and trainer use.

Fixed for all: activations and weights of two bytes, FSDP2 as sharding zero3, one micro-batch for each group and step unless
the source accumulates, and no loading. torchtitan's GPUs ran at 500 W, at a peak between that of an H100 SXM and an H100 NVL, as
its page says: LOW_POWER is the middle. FLOAT8 is how much faster its table 1 trains in float8 what is mostly matrix products.

The inputs stood in a commit of their own before the published numbers. Where an answer is off by more than 20 %, the last column
says how fast the term that explains it would have to be for the answer to be right: products (all that is linear in the tokens,
norms, rotations and the loss among them) or attention, as a share of the published peak. No fit follows from that: the sources
do not say how their seconds divide.
"""

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from bytescale_replay import LONGEST_CONTEXT, Setting, replay
from report import conclude, parser

from hf_longctx.commands.shared.costs import read_config
from hf_longctx.hardware.devices import CLUSTERS
from hf_longctx.hardware.kernel_bytes import flash_2
from hf_longctx.planner import PLANNERS, Topology
from hf_longctx.planner.baselines.static_cp import plan_static_cp
from hf_longctx.planner.memory.memory_model import MemoryModel
from hf_longctx.simulator.lengths import draw_tokens
from hf_longctx.simulator.machine import Machine
from hf_longctx.simulator.play import Simulation, play

FLOAT8 = 8532 / 6667
"""Times the speed of bfloat16, of all that is linear in the tokens."""
LOW_POWER = (835 + 989) / 2 / 989
"""Of the preset's peak: H100 NVL and SXM, dense bfloat16 TFLOP/s (NVIDIA's data sheets)."""
HALF_AGAIN = 6 / 7
"""Speed of products where every second one of forward is computed again: 3.5 for 3."""
GIB = 2**30
RATIO_STEPS = 8
"""Steps that a ratio of two planners is averaged over."""


NEAR = 0.2
"""Largest difference that needs no explanation."""
Term = Literal["linear", "attention"]


@dataclass(frozen=True)
class Training:
    """Documents of one length on groups of one size."""

    model: str
    gpus: int
    length: int
    """Tokens of each document."""
    documents: int
    """Of a step, all GPUs."""
    degree: int = 1
    """GPUs of context parallelism."""
    tensor_parallel: int = 1
    each: int = 1
    """Documents of a micro-batch, on each group."""
    recompute: bool = False
    linear: float = 1.0
    """Speed of matrix products over the preset's."""
    attention: float = 1.0
    """Speed of attention over the preset's."""
    peak: float = 1.0
    """Speed of products and attention over the preset's."""
    cluster: str = "h100"
    in_seconds: bool = False
    """Whether the answer is seconds of a step, not tokens/s of a GPU."""

    def play(self) -> Simulation:
        """Play one step."""
        config = read_config(self.model)
        machine = Machine.of(CLUSTERS[self.cluster], config, tensor_parallel=self.tensor_parallel)
        speed = replace(
            machine.speed,
            linear_flops=machine.speed.linear_flops * self.linear * self.peak,
            attention_flops=machine.speed.attention_flops * self.attention * self.peak,
        )
        machine = replace(machine, speed=speed, planned_speed=speed)
        ranks = self.gpus // self.tensor_parallel
        topology = Topology(ranks, -(-self.length * self.each // self.degree), ranks_per_node=machine.ranks_per_node)
        lengths = np.full(self.documents, self.length)
        plan = plan_static_cp(
            lengths, topology, machine.cost(config, ranks), "lockstep", context=self.length * self.each
        )
        return play(plan, config, machine, sharding="zero3", recompute=self.recompute)

    def __call__(self) -> float:
        """Tokens/s of each GPU, or seconds of a step."""
        played = self.play()
        return played.seconds if self.in_seconds else played.tokens_per_second / self.gpus

    def share_for(self, published: float, term: Term) -> float:
        """Share of the published peak at which products or attention would have to run for this answer."""
        low, high = 0.1, 4.0  # times the preset's speed
        while high - low > 1e-3:
            middle = (low + high) / 2
            answer = replace(self, **{term: middle * getattr(self, term)})()
            too_slow = answer > published if self.in_seconds else answer < published
            low, high = (middle, high) if too_slow else (low, middle)
        cluster = CLUSTERS[self.cluster]
        return high * (cluster.linear_share if term == "linear" else cluster.attention_share)


def memory_of_a_million_tokens() -> float:
    """GiB of a GPU: Qwen3-8B on 8 GPUs, zero3, all bfloat16, checkpoints in host memory, loss in chunks of 256 rows."""
    model = MemoryModel.from_config(
        read_config("Qwen/Qwen3-8B"),
        sharding="zero3",
        world_size=8,
        checkpointing=True,
        loss_chunk_tokens=256,
        optimizer_bytes=4,
        accumulating=False,
    )
    return model.peak(2**20 // 8, 1000) / GIB


def longest_of_tiles() -> float:
    """Count tokens that fit on one GPU: Llama 3.1 8B, weights, gradients, optimizer and checkpoints in host memory, MLPs in
    tiles of as many tokens as the residual stream is wide, loss in chunks."""
    config = read_config(LLAMA_8B)
    model = MemoryModel.from_config(
        config,
        sharding="zero3",
        optimizer_on_host=True,
        checkpointing=True,
        mlp_tile_tokens=config.hidden_size,
        accumulating=False,
        workspace=flash_2,
    )
    return model.capacity(CLUSTERS["h100"].device_bytes, reserve=0.0, offload=1000)


def longest_of_one_billion() -> float:
    """Count tokens that fit on one GPU of 79 GiB: Gemma 3 1B, all bfloat16, checkpointed, loss in chunks of 256 rows."""
    model = MemoryModel.from_config(
        read_config("google/gemma-3-1b-pt"),
        checkpointing=True,
        loss_chunk_tokens=256,
        optimizer_bytes=4,
        accumulating=False,
        workspace=flash_2,
    )
    return model.capacity(79 * GIB, reserve=0.0)


def faster_than_static(faster: str, distribution: str, gpus: int, capacity: int, context: int) -> float:
    """Speed of a planner over that of static context parallelism of one degree for the longest document."""
    config = read_config("Qwen/Qwen3-8B")
    machine = Machine.of(CLUSTERS["h100"], config)
    topology, cost = Topology(gpus, capacity, ranks_per_node=8), machine.cost(config, gpus)
    static = partial(plan_static_cp, context=context)
    seconds = {faster: 0.0, "static": 0.0}
    for seed in range(RATIO_STEPS):
        lengths = draw_tokens(distribution, 4 * gpus * capacity, seed, context)
        for name, planner in ((faster, PLANNERS[faster]), ("static", static)):
            plan = planner(lengths, topology, cost, "lockstep")
            seconds[name] += play(plan, config, machine, sharding="zero3").seconds
    return seconds["static"] / seconds[faster]


def bytescale_over_static() -> float:
    """Seconds of a step of ByteScale's case study: static packing over its balanced plan with the remote loader."""
    replayed = replay(Setting(), "byted", LONGEST_CONTEXT, RATIO_STEPS)
    return replayed["static packing"].busy_seconds / replayed["+ balance"].busy_seconds


LLAMA_8B, LLAMA_70B = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"


@dataclass(frozen=True)
class Run:
    """A published run: where it stands, and how it is answered here."""

    name: str
    unit: str
    source: str
    answer: Callable[[], float]
    chosen: str
    """Of what the source leaves open."""
    published: float = math.nan
    term: Term | None = None
    """What explains a miss, of a Training."""
    otherwise: str = ""
    """What explains a miss of anything else."""


TORCHTITAN = "torchtitan, docs: performance of Llama 3.1, H100 (December 2024)"
SELECTIVE = "selective checkpointing keeps attention and every second product; 500 W"
IN_FLOAT8 = "float8 as much faster as in table 1; 500 W"

RUNS = (
    Run(
        "Llama 3.1 8B, 8 GPUs, 16 x 8K, FSDP, compiled",
        "tokens/s of a GPU",
        f"{TORCHTITAN}, table 1",
        Training(LLAMA_8B, 8, 8192, 16, each=2, linear=HALF_AGAIN, peak=LOW_POWER),
        SELECTIVE,
        6667,
        "linear",
    ),
    Run(
        "Llama 3.1 8B, 128 GPUs, 256 x 8K, FSDP, compiled",
        "tokens/s of a GPU",
        f"{TORCHTITAN}, table 3",
        Training(LLAMA_8B, 128, 8192, 256, each=2, linear=HALF_AGAIN, peak=LOW_POWER),
        SELECTIVE,
        6514,
        "linear",
    ),
    *(
        Run(
            f"Llama 3.1 8B, 8 GPUs, {length // 1024}K, groups of {degree}, float8",
            "tokens/s of a GPU",
            f"{TORCHTITAN}, table 2",
            Training(LLAMA_8B, 8, length, 8 // degree, degree, recompute=True, linear=FLOAT8, peak=LOW_POWER),
            IN_FLOAT8,
            published,
            "linear" if degree == 1 else "attention",
        )
        for length, degree, published in ((32768, 1, 3890), (65536, 2, 2540), (131072, 4, 1071), (262144, 8, 548))
    ),
    Run(
        "Llama 3.1 70B, 256 GPUs, 512 x 8K, FSDP, tensor parallel 8, float8",
        "tokens/s of a GPU",
        f"{TORCHTITAN}, table 4",
        Training(LLAMA_70B, 256, 8192, 512, tensor_parallel=8, each=16, recompute=True, linear=FLOAT8, peak=LOW_POWER),
        IN_FLOAT8,
        829,
        "linear",
    ),
    Run(
        "Llama 3 70B, 64 GPUs, 128 x 8K, groups of 2, FSDP",
        "seconds of a step",
        "NeMo Automodel, docs: performance summary, DGX H100, bfloat16 (April 2026)",
        Training(LLAMA_70B, 64, 8192, 128, 2, recompute=True, in_seconds=True),
        "4 micro-batches, as its accumulation says; recomputed, since 80 layers of 4K tokens would not fit beside the states",
        18.9,
        "linear",
    ),
    Run(
        "Qwen3-8B, 8 GPUs, one document of 1M",
        "seconds of a step",
        "TRL, docs: training beyond 1M tokens (1.13)",
        Training("Qwen/Qwen3-8B", 8, 2**20, 1, 8, recompute=True, in_seconds=True),
        "checkpoints in host memory travel while attention runs",
        380,
        "attention",
    ),
    Run(
        "Qwen3-8B, 8 GPUs, one document of 1M, memory",
        "GiB of a GPU",
        "TRL, release notes of 1.13",
        memory_of_a_million_tokens,
        "AdamW in bfloat16, 4 bytes a parameter",
        56.2e9 / GIB,
    ),
    Run(
        "Llama 3.1 8B, one GPU, longest document",
        "tokens",
        "DeepSpeed ALST, recipe of ArcticTraining for one H100 (arXiv 2506.13996)",
        longest_of_tiles,
        "flash-attention 2, as its recipe says; none of the memory stays free",
        500_000,
    ),
    Run(
        "gemma-3-1b, one GPU of 79 GiB, longest document",
        "tokens",
        "TRL (the figure's page was not found again)",
        longest_of_one_billion,
        "full fine-tuning with checkpointing, AdamW in bfloat16; flash-attention 2",
        107_520,
        otherwise="its set-up is not known; masks of all pairs for windows under sdpa would be 11 GiB each at that length",
    ),
    Run(
        "1K to 16K tokens: dynamic context parallelism over static",
        "times as fast",
        "verl, release notes of 0.9",
        partial(faster_than_static, "dynamic_cp", "verl_1k_16k", 64, 4096, 16384),
        "Qwen3-8B, 64 GPUs, 4K tokens of capacity, so that the longest needs 4 GPUs",
        1.61,
        otherwise="the source gives neither model, GPUs nor the degree of static groups",
    ),
    Run(
        "7B, 1,024 GPUs, Byted, 2M: static packing over ByteScale's balance",
        "times as long",
        "ByteScale (arXiv 2502.21231), figure 18",
        bytescale_over_static,
        "benchmarks/bytescale_replay.py says what is taken from the paper",
        520 / 157,
    ),
)


def measured() -> tuple[list[dict[str, str]], dict[str, float]]:
    """Rows of a table, and figures by name."""
    rows, figures = [], {}
    for run in RUNS:
        answer = run.answer()
        ratio = answer / run.published
        figures |= {f"{run.name}/ours": answer, f"{run.name}/ours over published": ratio}
        row = {
            "run": run.name,
            "unit": run.unit,
            "published": f"{run.published:.4g}",
            "ours": f"{answer:.4g}",
            "ours / published": f"{ratio:.2f}",
            "right if": "",
        }
        if abs(ratio - 1) > NEAR:
            row["right if"] = run.otherwise
            if isinstance(run.answer, Training) and run.term is not None:
                share = run.answer.share_for(run.published, run.term)
                figures[f"{run.name}/share of the peak of {run.term}"] = share
                cluster = CLUSTERS[run.answer.cluster]
                now = cluster.linear_share if run.term == "linear" else cluster.attention_share
                what = "products" if run.term == "linear" else "attention"
                row["right if"] = f"{what} ran at {share:.0%} of the peak, not {now:.0%}"
        rows.append(row)
    near = sum(abs(figures[f"{run.name}/ours over published"] - 1) <= NEAR for run in RUNS)
    figures["answers within 20 %"] = near
    return rows, figures


def main() -> int:
    options: Any = parser(__doc__)
    arguments = options.parse_args()
    load = os.getloadavg()[0]
    rows, figures = measured()
    return conclude(arguments, rows, figures, load)


if __name__ == "__main__":
    sys.exit(main())
