"""Selective offload: a document on fewer ranks than hold its activations, part of which wait in host memory.

With a fraction r of the activations of the middle layers in host memory, a rank that holds t tokens needs room for
t*(1 - share*r). The transfer costs nothing while it hides behind compute, so a document may use r only up to

    r * transfer * t  <=  T(s, d) / 3         (a third is forward, a quarter where layers are recomputed; bandwidth with all
                                               ranks of a node transferring at once)
    r * t             <=  host_tokens         (a rank's part of its node's memory)

Fewer ranks help where they exchange less than they would; they also make a document longer. So offload is used where it
saves at least 1 % of a document's work, and never for a document that could decide when the step ends.

Source: ByteScale (arXiv 2502.21231), section 5: D(s) = ceil((2*Act(s) + (1-r)(l-2)*Act(s)) / (l*Act(C))).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.topology import FULL, PlanError, Topology

FORWARD = 3
"""Forward is a third of forward and backward. ByteScale's own times (64K tokens: 5.08 s up to r = 0.5, 6.49 s at r = 1)
have their knee where the transfer is as long as forward."""
LEAST_GAIN = 0.01
"""A document is put on fewer ranks if that saves so much of its work: half the error of a good profile."""
SLOWEST_PS = 2.0**50
"""Picoseconds per token, 19 minutes, behind which any transfer hides."""
CRITICAL = 2
"""A document that would take more than 1/2 of the lower bound on its fewer ranks keeps all of them."""


@dataclass(frozen=True, slots=True)
class Offload:
    """The worth of host memory to a rank. MemoryModel and Cluster know these numbers."""

    share: int
    """Per mille of a token's activations that may leave the device: (l - 2) / l of l layers' inputs, in ByteScale."""
    transfer_ps: int
    """Picoseconds to move them to the host, per token, with all ranks of the node transferring; moving them back takes as
    long, during backward, which is twice as long as forward."""
    host_tokens: int
    """Tokens whose offloaded activations fit into a rank's part of host memory at the same time."""
    forwards: int = FORWARD
    """How many times as long as forward both passes take: one time more where backward begins with forward once more."""

    def __post_init__(self) -> None:
        if not 0 < self.share < FULL:
            raise PlanError(f"Offload.share is {self.share}; it must be 1 to {FULL - 1} per mille of the activations")
        if self.transfer_ps < 1 or self.host_tokens < 0:
            raise PlanError(
                f"Offload.transfer_ps is {self.transfer_ps} and host_tokens {self.host_tokens}; they must be >= 1 and >= 0"
            )

    def most_tokens(self, capacity: int, per_token_ps: np.ndarray) -> np.ndarray:
        """int64: tokens that a rank holds of documents that take so many picoseconds per token on it."""
        ratio = np.minimum(per_token_ps * FULL // (self.forwards * self.transfer_ps), FULL)
        on_device = capacity * FULL * FULL // (FULL * FULL - self.share * ratio)
        return np.minimum(on_device, capacity + self.share * self.host_tokens // FULL)

    def ratio(self, tokens: np.ndarray, capacity: int) -> np.ndarray:
        """int64, per mille: the smallest r with which ranks of this capacity hold so many tokens, 0 where they do anyway."""
        over = np.maximum(tokens - capacity, 0)
        return -(-over * FULL * FULL // (self.share * np.maximum(tokens, 1)))


def room_needed(
    lengths: np.ndarray,
    tokens: np.ndarray,
    topology: Topology,
    cost: CostModel,
    bound: int,
    offload: Offload,
    least_gain: float = LEAST_GAIN,
) -> np.ndarray:
    """int64 [documents]: tokens of capacity that the group of each document must have; all its tokens without offload.

    Args:
        lengths, tokens: int64 [documents]: tokens that each counts as, and has.
        least_gain: the share of its work that offload must save of each.
    """
    capacity = topology.capacity
    fewest = -(-tokens // capacity)
    # A rank's time per token hardly depends on the group, so that of one rank stands for all.
    work = cost.work(lengths, 1)
    if cost.unit_bits:  # units are too coarse for a token's time
        per_token_ps = np.minimum(work / tokens * (1000.0 * 2.0**cost.unit_bits), SLOWEST_PS).astype(np.int64)
    else:
        per_token_ps = work // tokens * 1000
    reach = offload.most_tokens(capacity, per_token_ps)
    fewer = -(-tokens // reach)
    less, more = cost.work(lengths, fewer), cost.work(lengths, fewest)
    helps = (fewer < fewest) & (less < more * (1 - least_gain)) & (-(-less // fewer) <= bound // CRITICAL)
    return np.where(helps, fewer * capacity, tokens)
