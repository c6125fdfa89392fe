"""The ranks that a plan is made for: how many, what each holds, how fast it is, and which of them share a node.

    Topology(world_size=16, capacity=32768, ranks_per_node=8)                           two nodes of 8 equal ranks
    Topology(world_size=16, capacity=32768, ranks_per_node=8, speed=(1000,) * 8 + (600,) * 8, memory=...)      two GPU generations

Degrees are validated here, where they meet. Nothing is sent: every rank builds the same object from the same settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from hf_longctx.planner.stages.causal_chunks import MOST_CHUNKS

Documents = Literal["split", "whole", "alone"]
"""How documents lie on ranks: `split` over as many as suit each; every document `whole` on one rank, several of them packed into
a micro-batch; or whole and `alone` in its micro-batch."""

FULL = 1000
"""Per mille: a rank that is as fast, or holds as much, as the cost model and `capacity` say."""
MOST_KINDS = 8
"""Kinds of ranks, of one speed and memory each, up to which a group's time is found from how many of each it has: quickly, not
rank by rank."""
SPLIT = -1
"""Holder of a document that all ranks of its micro-batch share."""


class PlanError(ValueError):
    """A step cannot be planned, or a plan breaks one of its invariants."""


@dataclass(frozen=True)
class Topology:
    """Ranks here are indices of Hybrid Data Parallelism: with tensor or pipeline parallelism, each stands for several
    processes.

    Raises:
        PlanError: a size below 1, or a list of factors that does not fit the ranks.
    """

    world_size: int
    """Ranks."""
    capacity: int
    """Most tokens that a rank holds in one micro-batch."""
    ranks_per_node: int | None = None
    """Ranks 0 to g-1 share a node, g to 2g-1 the next ... None: all of them share one."""
    ulysses_degree: int = 1
    """Most ranks of a micro-batch among which heads are split: a micro-batch of n ranks uses gcd(n, degree)."""
    speed: tuple[int, ...] | None = None
    """[world_size], per mille of the cost model's speed. None: all 1000."""
    memory: tuple[int, ...] | None = None
    """[world_size], per mille of `capacity` that each rank holds. None: all 1000."""
    stages: int = 1
    """Stages of a pipeline, for which one rank stands (mode "pipeline")."""
    most_chunks: int = MOST_CHUNKS
    """Most chunks in which a document may pass these stages; 1: none does. A document that stays whole passes them in one."""
    documents: Documents = "split"
    """Whether the model lets documents be split. Layers that carry a state from row to row, and hand it to no other rank, need
    `whole`."""

    def __post_init__(self) -> None:
        for name in ("world_size", "capacity", "ulysses_degree", "stages", "most_chunks"):
            value = getattr(self, name)
            if not isinstance(value, (int, np.integer)) or value < 1:
                raise PlanError(f"{name} is {value}; it must be >= 1")
            object.__setattr__(self, name, int(value))
        if self.most_chunks > MOST_CHUNKS:
            raise PlanError(f"most_chunks is {self.most_chunks}; it must be 1 to {MOST_CHUNKS}")
        if self.documents not in get_args(Documents):
            raise PlanError(f"documents is {self.documents!r}; valid: {', '.join(get_args(Documents))}")
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise PlanError(f"ranks_per_node is {self.ranks_per_node}; it must be >= 1, or None for one node")
        for name in ("speed", "memory"):
            factors = getattr(self, name)
            if factors is None:
                continue
            factors = tuple(int(factor) for factor in factors)
            if len(factors) != self.world_size or min(factors) < 1:
                raise PlanError(
                    f"{name} has {len(factors)} factors, the smallest {min(factors, default=None)}; it needs one per rank "
                    f"({self.world_size}), per mille, each >= 1"
                )
            object.__setattr__(self, name, None if set(factors) == {FULL} else factors)
        if self.memory is not None and self.capacities.min() < 1:
            rank = int(self.capacities.argmin())
            raise PlanError(
                f"rank {rank} holds capacity {self.capacity} * memory {self.memory[rank]} / {FULL} = 0 tokens; it needs a "
                f"capacity >= {-(-FULL // self.memory[rank])}"
            )

    @property
    def uniform(self) -> bool:
        """Whether all ranks are equally fast and hold equally much."""
        return self.speed is None and self.memory is None

    @cached_property
    def speeds(self) -> np.ndarray:
        """int64 [world_size], per mille."""
        return np.full(self.world_size, FULL if self.speed is None else self.speed, np.int64)

    @cached_property
    def capacities(self) -> np.ndarray:
        """int64 [world_size], tokens."""
        return self.capacity * np.full(self.world_size, FULL if self.memory is None else self.memory, np.int64) // FULL

    @cached_property
    def kinds(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 [2, kinds]: speed and capacity of the ranks that are alike; int64 [world_size]: the kind of each rank."""
        kinds, kind = np.unique(np.stack([self.speeds, self.capacities]), axis=1, return_inverse=True)
        return kinds, kind.ravel()

    @property
    def few_kinds(self) -> bool:
        """Whether there are at most MOST_KINDS."""
        return self.kinds[0].shape[1] <= MOST_KINDS

    def times(self, work: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """int64: nanoseconds that each of these ranks takes for its work (int64, nanoseconds at speed 1000), rounded up."""
        speeds = self.speeds[rank]
        return work // speeds * FULL - (-(work % speeds) * FULL) // speeds  # work * FULL may exceed 64 bits

    @property
    def tokens(self) -> int:
        """Tokens that all ranks hold together in one micro-batch."""
        return int(self.capacities.sum())

    @property
    def stay_whole(self) -> bool:
        """Whether every document lies on one rank."""
        return self.documents != "split"

    @property
    def longest_document(self) -> int:
        """Tokens of the longest document that can be planned: what all ranks hold together, or, where documents stay whole, the
        rank that holds most."""
        return int(self.capacities.max()) if self.stay_whole else self.tokens

    def refuse_too_long(self, tokens: int, document: str, remedies: str = "") -> None:
        """Raise PlanError, with what would fit, for a document of more tokens than `longest_document`.

        Args:
            document: how to name it, with what it is a part of.
            remedies: further remedies, that begin with ", or".
        """
        limit, ranks, capacity = self.longest_document, self.world_size, self.capacity
        if tokens <= limit:
            return
        if not self.stay_whole:
            factors = "" if self.memory is None else " (times their memory factors)"
            raise PlanError(
                f"{document} has {tokens} tokens; {ranks} ranks x {capacity} tokens of capacity{factors} hold {limit}. It needs "
                f"a capacity >= {-(-tokens * capacity // limit)}, or >= {-(-tokens * ranks // limit)} ranks{remedies}"
            )
        factor = FULL if self.memory is None else max(self.memory)
        room = f"{capacity} tokens (capacity)"
        if self.memory is not None:
            room = f"at most {capacity} tokens (capacity) * {factor} / {FULL} (memory) = {limit}"
        raise PlanError(
            f"{document} has {tokens} tokens, and this model needs every document whole on one rank (documents="
            f"{self.documents!r}), which holds {room}; more ranks do not help. It needs a capacity >= "
            f"{-(-tokens * FULL // factor)}, or documents of at most {limit} tokens{remedies}"
        )

    @property
    def node_size(self) -> int:
        """Ranks of a node."""
        return min(self.ranks_per_node or self.world_size, self.world_size)

    def fewest_ranks(self, lengths: np.ndarray) -> np.ndarray:
        """int64 [documents]: the least number of ranks, those with most memory, that hold a document of so many tokens; more than
        there are where none do."""
        if self.stay_whole:
            return np.where(lengths <= self.longest_document, 1, self.world_size + 1)
        if self.memory is None:
            return -(-lengths // self.capacity)
        return np.searchsorted(np.sort(self.capacities)[::-1].cumsum(), lengths) + 1

    def summed_work(self, times: np.ndarray) -> int:
        """Return the sum of times (int64 [world_size]) by the speed of each rank, per mille; it may exceed 64 bits."""
        if self.speed is None:
            return int(times.sum()) * FULL
        whole, rest = np.divmod(times, FULL)
        return int((whole * self.speeds).sum()) * FULL + int((rest * self.speeds).sum())

    def summed_speed(self, ranks: np.ndarray) -> np.ndarray:
        """int64: per mille of the fastest `ranks` (int64 array) ranks together."""
        return np.sort(self.speeds)[::-1].cumsum()[ranks - 1]
