"""Loads and receives of each rank of a plan: the numbers behind the pictures of single ranks.

A split document lies in zigzag over the ranks of its micro-batch: of n ranks, rank i holds chunks i and 2n-1-i. Its last
query needs every key before it, so under direct exchange it receives all but what it holds and what lies behind that:

    4 ranks, 8 chunks:     rank 0 holds 0 7, receives 1 2 3 4 5 6        rank 2 holds 2 5, receives 0 1 3 4
                           rank 1 holds 1 6, receives 0 2 3 4 5          rank 3 holds 3 4, receives 0 1 2

In a ring everybody receives everything. Nothing is sent here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hf_longctx.planner.memory.memory_model import MemoryModel
from hf_longctx.planner.plan import StepPlan
from hf_longctx.planner.topology import SPLIT


@dataclass(frozen=True, slots=True)
class Bins:
    """A quantity of every rank, put together over runs of adjacent ranks; [bins] each."""

    first: np.ndarray
    """int64: first rank of each bin."""
    last: np.ndarray
    """int64"""
    most: np.ndarray
    mean: np.ndarray
    """float64"""


def members_of_whole(plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
    """int64 [whole documents] each: rows of the plan's document columns that lie on one rank, and the member (row of
    `plan.rank`) that holds each."""
    micro_batch = plan.micro_batch_of_document
    whole = np.flatnonzero((plan.holder != SPLIT) | (plan.members[micro_batch] == 1))
    micro_batch = micro_batch[whole]
    first = plan.first_member[micro_batch]
    holder = np.where(plan.holder[whole] == SPLIT, plan.rank[first], plan.holder[whole])
    # Ranks ascend in each micro-batch, so (micro-batch, rank) ascends over all members.
    keys = np.repeat(np.arange(len(plan.cost)), plan.members) * plan.world_size + plan.rank
    return whole, np.searchsorted(keys, micro_batch * plan.world_size + holder)


def received_tokens(plan: StepPlan) -> np.ndarray:
    """float64 [world_size]: tokens whose keys and values each rank receives in forward, all micro-batches.

    Where a micro-batch splits several documents, their chunks are taken together, which rounds by less than a token for
    each document and rank.
    """
    whole, member = members_of_whole(plan)
    split = plan.member_tokens - np.bincount(member, plan.length[whole], len(plan.rank))
    micro_batch = np.repeat(np.arange(len(plan.cost)), plan.members)
    received = np.bincount(micro_batch, split)[micro_batch] - split
    if plan.exchange == "direct":
        second = split - split // 2
        before = np.cumsum(second) - second
        behind = before - before[plan.first_member[:-1]][micro_batch]  # second chunks of the ranks before it
        received = np.where(split > 0, received - behind, 0)
    return np.bincount(plan.rank, received, plan.world_size)


def over_ranks(values: np.ndarray, most_bins: int) -> Bins:
    """A quantity [world_size] in at most so many bins of as many ranks, the last of what is left."""
    width = -(-len(values) // most_bins)
    first = np.arange(0, len(values), width)
    last = np.minimum(first + width, len(values)) - 1
    mean = np.add.reduceat(values.astype(np.float64), first) / (last - first + 1)
    return Bins(first, last, np.maximum.reduceat(values, first), mean)


def peak_parts(plan: StepPlan, memory: MemoryModel, bins: Bins) -> list[dict[str, int]]:
    """Return for each bin name -> bytes of the rank that needs most; they add up to its peak."""
    worst: list[dict[str, int]] = [{} for _ in bins.first]
    for offload, peak_tokens in _peak_tokens_by_offload(plan):
        most = np.maximum.reduceat(peak_tokens, bins.first).tolist()
        for i, tokens in enumerate(most):
            if tokens:
                worst[i] = max(worst[i], memory.parts(tokens, offload), key=lambda parts: sum(parts.values()))
    return [parts or memory.parts(0) for parts in worst]


def _peak_tokens_by_offload(plan: StepPlan) -> Iterator[tuple[int, np.ndarray]]:
    """Each offload ratio of the plan, and the most tokens that each rank holds under it (int64 [world_size])."""
    offload = np.repeat(plan.offload, plan.members)
    for ratio in np.unique(offload).tolist():
        mine = offload == ratio
        peak = np.zeros(plan.world_size, np.int64)
        np.maximum.at(peak, plan.rank[mine], plan.member_tokens[mine])
        yield ratio, peak
