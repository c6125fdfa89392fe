"""Free ranks of a round: those after all that are taken, and gaps that groups leave in nodes.

    node     0              1              2
    taken    A A A B B B . .  C C C C C . . .  | . . . . .        gaps of 2 and of 3 ranks, and the tail
                         gap            gap     tail

A group of at most a node's ranks lies inside a node. Gaps of one width are a list through their first ranks, the newest first, so
that taking and leaving one costs the same however many there are.

Interpreted or compiled (planner/compiled.py); integers only. Nothing is sent.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hf_longctx.planner.compiled import borrowing, compiled, inlined, listed
from hf_longctx.planner.cost.group_times import PlacementContext


class Free(NamedTuple):
    """Ranks of a round that hold nothing yet."""

    tail: Any
    """[1]: all ranks from here on are free, and in no gap."""
    widest: Any
    """[1]: no gap is wider."""
    heads: Any
    """[node + 1]: first rank of the newest gap of each width, -1 if there is none."""
    following: Any
    """[world_size]: by first rank, that of the next gap of the same width."""
    speeds: Any
    capacities: Any


@compiled
def nothing_taken(context: PlacementContext) -> Free:  # pragma: no cover - compiled
    """All ranks of the context, to be filled by `give_all_back`."""
    return Free(
        listed(np.zeros(1, np.int64)),
        listed(np.zeros(1, np.int64)),
        listed(np.empty(context.node + 1, np.int64)),
        listed(np.empty(len(context.speeds), np.int64)),
        listed(context.speeds),
        listed(context.capacities),
    )


@borrowing
@compiled
def give_all_back(free: Free) -> None:  # pragma: no cover - compiled
    """Frees all ranks."""
    free.tail[0], free.widest[0] = 0, 0
    for width in range(len(free.heads)):
        free.heads[width] = -1


@inlined
@borrowing
@compiled
def next_rank(free: Free) -> int:  # pragma: no cover - compiled
    """The rank that `take` gives to a document that stays whole; the number of ranks if there is none."""
    for width in range(1, free.widest[0] + 1):
        if free.heads[width] >= 0:
            return free.heads[width]
    return free.tail[0]


@inlined
@borrowing
@compiled
def take(ranks: int, at: int, free: Free, context: PlacementContext) -> int:  # pragma: no cover - compiled
    """The first of so many ranks in the smallest gap that has them, or else after all others; -1 if there are none.

    ranks: at most those of a node. at: where they must begin if ranks are unequal, -1 if anywhere.
    """
    world_size, node = len(free.speeds), context.node
    width, tail = ranks, free.tail[0]
    while width <= free.widest[0]:
        start = free.heads[width]
        if start >= 0 and (at < 0 or context.uniform or start == at):
            free.heads[width] = free.following[start]
            while free.widest[0] > 0 and free.heads[free.widest[0]] < 0:
                free.widest[0] -= 1
            _leave(start + ranks, width - ranks, free)
            return start
        width += 1
    width = node - tail % node
    if (
        width < ranks or (at > tail and not context.uniform)
    ) and node < world_size:  # the rest of a node where a larger group ended stays a gap
        _leave(tail, min(width, world_size - tail), free)
        tail, width = min(tail + width, world_size), node
    width = ranks if node == world_size else min(width, world_size - tail)
    free.tail[0] = tail
    if tail + ranks > world_size:
        return -1
    free.tail[0] = tail + width
    _leave(tail + ranks, width - ranks, free)
    return tail


@inlined
@borrowing
@compiled
def _leave(start: int, width: int, free: Free) -> None:  # pragma: no cover - compiled
    """Adds a gap."""
    if width > 0:
        free.following[start] = free.heads[width]
        free.heads[width] = start
        free.widest[0] = max(free.widest[0], width)
