"""Steps to plan, drawn at random from families of lengths and clusters, each from its seed alone.

    ranks                1 to 16,384, log-uniform; every third draw the next prime below
    capacity             512 to 131,072 tokens, log-uniform
    ranks per node       1 to 72, or no nodes
    documents            0.5 to 100 for each rank, log-uniform; as many as have a million members on their fewest ranks
    median               1/20 to 20 times the capacity, log-uniform
    sigma                0 to 3, of a lognormal; clipped to 4M tokens, and to what all ranks hold
    outliers             in every other draw: 0.01 % to 30 % of documents, each between the median and the longest there may be
    message_seconds      3e-5 or 5e-4 for each message of each layer: what links alone take, and the preset's
    speeds               every seventh draw: two generations of ranks, neighbours that differ, or each its own
    offload              every tenth draw, with equal ranks

The model is llama-7b with 8 key-value heads on the GPU preset, as in planner.py.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from hf_longctx.hardware.published import ARCHITECTURES
from hf_longctx.planner import GPU, CostModel, Topology
from hf_longctx.planner.cost.selective_offload import Offload

MODEL = replace(ARCHITECTURES["llama-7b"], num_key_value_heads=8)
MESSAGE_SECONDS = (3e-5, 5e-4)
MOST_RANKS = 2**14
MOST_MEMBERS = 1_000_000
"""Of all documents on the fewest ranks that hold them."""
LONGEST = 2**22
NODES = (None, 1, 2, 4, 8, 8, 8, 16, 24, 36, 72)


@dataclass(frozen=True)
class DrawnStep:
    """Documents of a step, and what they are planned for."""

    name: str
    lengths: np.ndarray
    """int64 [documents], tokens"""
    topology: Topology
    cost: CostModel
    offload: Offload | None = None

    @property
    def ordered(self) -> np.ndarray:
        """The lengths, longest first."""
        return np.sort(self.lengths)[::-1]

    def __str__(self) -> str:
        topology = self.topology
        unequal = "" if topology.uniform else ", unequal"
        return (
            f"{self.name}: {len(self.lengths):,} documents, median {int(np.median(self.lengths)):,}, longest "
            f"{self.lengths.max():,}, on {topology.world_size:,} x {topology.capacity:,}, nodes of "
            f"{topology.ranks_per_node}{unequal}{', offload' if self.offload else ''}, messages of {self.cost.message_ns:,} ns"
        )


@cache
def cost_of(message_seconds: float, ranks_per_node: int | None) -> CostModel:
    """The costs of MODEL on the GPU preset with this latency of a message."""
    return CostModel.from_config(MODEL, replace(GPU, message_seconds=message_seconds), ranks_per_node=ranks_per_node)


def drawn(seed: int, most_ranks: int = MOST_RANKS) -> DrawnStep:
    """Draw a step; `most_ranks` makes small ones for tests."""
    rng = np.random.default_rng(seed)
    ranks = max(1, round(log_uniform(rng, 1, most_ranks)))
    if seed % 3 == 0:
        ranks = prime_below(ranks)
    capacity = round(log_uniform(rng, 512, 131_072))
    nodes = NODES[rng.integers(len(NODES))]
    documents = max(1, round(ranks * log_uniform(rng, 0.5, 100)))
    speed = draw_speeds(rng, ranks) if seed % 7 == 0 else None
    cost = cost_of(MESSAGE_SECONDS[rng.integers(2)], nodes)
    lengths = draw_lengths(rng, documents, capacity, min(LONGEST, ranks * capacity))
    offload = (
        Offload(900, round(log_uniform(rng, 10**6, 10**9)), 8 * capacity) if seed % 10 == 5 and not speed else None
    )
    topology = Topology(ranks, capacity, ranks_per_node=nodes, speed=speed)
    fits = int(np.searchsorted(np.cumsum(topology.fewest_ranks(lengths)), MOST_MEMBERS, side="right"))
    return DrawnStep(f"seed {seed}", lengths[: max(1, fits)], topology, cost, offload)


def draw_lengths(rng: np.random.Generator, documents: int, capacity: int, longest: int) -> np.ndarray:
    """int64 [documents], tokens: a lognormal and outliers, as the module's docstring says."""
    median, sigma = capacity * log_uniform(rng, 1 / 20, 20), rng.uniform(0, 3)
    lengths = median * np.exp(sigma * rng.standard_normal(documents))
    if rng.random() < 0.5:
        outlies = rng.random(documents) < log_uniform(rng, 1e-4, 0.3)
        low = min(median, longest)
        lengths[outlies] = low * (longest / low) ** rng.random(int(outlies.sum()))
    return np.clip(lengths, 1, longest).astype(np.int64)


def draw_speeds(rng: np.random.Generator, ranks: int) -> tuple[int, ...]:
    """Speeds of all ranks, per mille."""
    slow = int(rng.integers(300, 950))
    rank = np.arange(ranks)
    families = (
        np.where(rank < ranks // 2, 1000, slow),
        np.where(rank % 2 == 0, 1000, slow),
        rng.integers(slow, 1001, ranks),
    )
    return tuple(families[rng.integers(len(families))].tolist())


def log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    """A number of which every factor is as likely as any other."""
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def prime_below(number: int) -> int:
    """The largest prime up to `number`, or 1."""
    return next((n for n in range(number, 1, -1) if all(n % divisor for divisor in range(2, math.isqrt(n) + 1))), 1)
