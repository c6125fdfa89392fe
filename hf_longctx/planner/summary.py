"""A plan's certificate, in numbers and in words. Nothing is sent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlanSummary:
    """A plan's certificate: what a person wants to know about it; str() says it in four lines."""

    planner: str
    mode: str
    world_size: int
    stages: int
    """Devices of a pipeline that each rank stands for."""
    documents: int
    tokens: int
    split_documents: int
    """Documents held by more than one rank."""
    ranks_per_document: tuple[int, float, int]
    """Minimum, median, maximum."""
    micro_batches_per_rank: tuple[int, float, int]
    """Minimum, median, maximum."""
    makespan: int
    """Predicted nanoseconds of the step, gradient reduction and optimizer left out."""
    lower_bound: int
    """Nanoseconds that no plan of these documents in this mode can beat (bound.py)."""
    idle_share: float
    """Share of all ranks' time spent waiting, 0 to 1."""
    exchanged_tokens: int
    """Tokens whose keys and values a rank receives from another in forward, all ranks (zigzag: 3/4 of all but its own)."""
    redundant_tokens: int
    """How many of these would not be exchanged, were every document on the fewest ranks that hold it."""
    between_nodes_tokens: int
    """How many of these cross from node to node: once per node that needs them, where they are relayed."""
    most_tokens_per_rank: int
    """Most tokens that any rank holds in one micro-batch."""
    offloaded_tokens: int
    """Tokens whose activations wait in host memory, all micro-batches."""

    @property
    def balance(self) -> float:
        """Makespan divided by the lower bound: 1 is perfect."""
        return self.makespan / self.lower_bound

    def __str__(self) -> str:
        def spread(values: tuple[int, float, int]) -> str:
            return f"{values[0]} to {values[2]}, median {values[1]:g}"

        redundant = self.redundant_tokens / self.exchanged_tokens if self.exchanged_tokens else 0.0
        return (
            f"{self.documents} documents ({self.split_documents} split), {self.tokens} tokens on "
            f"{self.world_size} ranks{f' of {self.stages} stages each' if self.stages > 1 else ''}\n"
            f"ranks per document: {spread(self.ranks_per_document)}; "
            f"micro-batches per rank: {spread(self.micro_batches_per_rank)}\n"
            f"planned: step of {self.makespan / 1e9:.3g} s, {self.balance:.3f} times the lower bound, "
            f"ranks idle {self.idle_share:.1%}\n"
            f"keys and values of {self.exchanged_tokens} tokens exchanged ({redundant:.1%} for balance), at most "
            f"{self.most_tokens_per_rank} tokens on a rank at a time"
        )
