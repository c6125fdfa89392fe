"""Global batches and costs that planners are measured on: three distributions in three sizes, two cost models of a 7B model."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from drawn_steps import MODEL

from hf_longctx.planner import GPU, CostModel, Mode, Topology
from hf_longctx.simulator.lengths import draw

RANKS_PER_NODE = 8
STAGES = 4
MIXTURES = ["github", "byted", "lognormal_pareto"]
"""Distributions whose long tails every planner and scheduler is measured on. Agent trajectories are in any_lengths.py."""
CAPACITY = {64: 32768}
"""Tokens per rank, by the number of ranks; 8192 for all others."""
SIZES = ["1000x64", "10000x1024", "100000x16384"]
"""Documents x ranks."""


def cost_models() -> dict[str, CostModel]:
    """Return the cost models `rich` and `plain` of planner.py's docstring."""
    rich = CostModel.from_config(MODEL, GPU, ranks_per_node=RANKS_PER_NODE)
    a = rich.attention_ps
    plain = CostModel(attention_ps=a, linear_ps=24576 * a, inside_ps=4388 * a, document_ns=rich.document_ns)
    return {"rich": rich, "plain": plain}


@dataclass(frozen=True)
class Case:
    """A global batch to plan."""

    distribution: str
    documents: int
    ranks: int
    seed: int = 0

    @property
    def capacity(self) -> int:
        return CAPACITY.get(self.ranks, 8192)

    @property
    def lengths(self) -> np.ndarray:
        return draw(self.distribution, self.documents, seed=self.seed, longest=min(2**21, self.ranks * self.capacity))

    def topology(self, mode: Mode = "async") -> Topology:
        stages = STAGES if mode == "pipeline" else 1
        return Topology(self.ranks, self.capacity, ranks_per_node=RANKS_PER_NODE, stages=stages)

    def __str__(self) -> str:
        return f"{self.distribution}/{self.documents} documents on {self.ranks} ranks"


def cases(sizes: Iterable[str], distributions: Iterable[str]) -> list[Case]:
    """Return a case of each distribution in each size. Raises ValueError for a size that is not documents x ranks."""
    distributions, chosen = list(distributions), []
    for size in sizes:
        documents, _, ranks = size.partition("x")
        if not (documents.isdigit() and ranks.isdigit() and int(documents) and int(ranks)):
            raise ValueError(f"{size} must be documents x ranks, such as 1000x64")
        chosen += [Case(distribution, int(documents), int(ranks)) for distribution in distributions]
    return chosen
