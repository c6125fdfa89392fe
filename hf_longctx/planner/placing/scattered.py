"""Groups whose ranks need not be adjacent: in niches (niches.py), or in windows of whole nodes (windows.py).

Their ranks are listed, document by document, where those of other groups follow from the first one. Between nodes it does not
matter which of them a group has, and inside of one not which of its ranks. Nothing is sent.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np

from hf_longctx.planner.compiled import compiled, listed
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.cost.group_times import PlacementContext, group_times
from hf_longctx.planner.placing.bisection import Large, largest_room
from hf_longctx.planner.placing.niche_sizes import least_works
from hf_longctx.planner.placing.niches import place_in_niches
from hf_longctx.planner.placing.windows import place_in_windows
from hf_longctx.planner.topology import Topology

MEMBERS = 3
"""Times the fewest ranks of all documents together that groups may have."""


class ScatteredGroups:
    """Groups of documents, longest first, as they were placed last.

    Args:
        large: the documents.
        bound: nanoseconds; a document that takes longer on a node needs several.
    """

    def __init__(
        self, large: Large, bound: int, topology: Topology, cost: CostModel, context: PlacementContext
    ) -> None:
        self._large, self._context, world_size = large, context, topology.world_size
        together = math.lcm(context.node, context.multiple)
        self._unit = together if together <= world_size else context.node
        """Ranks that documents on several nodes take together."""
        on_node = cost.time(large.lengths, np.minimum(context.node, large.best))
        self.on_nodes = end_of((large.footprints > largest_room(context.node, context)) | (on_node > bound))
        """How many of the documents need several nodes."""
        self._on_all = end_of(large.footprints > context.before[world_size // self._unit * self._unit])
        most = int(topology.fewest_ranks(large.footprints).sum()) * MEMBERS + world_size
        self._member = np.empty(min(most, len(large.footprints) * world_size), np.int64)
        self._first_member = np.full(len(large.footprints), -1)  # where the ranks of each begin; -1: they are adjacent

    @cached_property
    def _least_work(self) -> np.ndarray:
        """int64 [documents], as `place_in_niches` takes it; zeros where ranks are unequal."""
        large, context = self._large, self._context
        return np.asarray(least_works(large, context)) if context.uniform else np.zeros(len(large.lengths), np.int64)

    def in_windows(self, target: int, sizes: np.ndarray, starts: np.ndarray, loads: np.ndarray) -> bool:
        """Place the documents that need several nodes so that they end by `target`, and return whether that could be.

        Args:
            sizes, starts: int64 [documents], filled: ranks of each document, and when it begins.
            loads: int64 [world_size], filled: when each rank has done its documents.
        """
        self.forget()
        context, placed = self._context, slice(self.on_nodes)
        columns = (column[placed] for column in (self._large.lengths, self._large.footprints, self._large.best))
        listed = (self._member, self._first_member[placed])
        if not context.uniform or self._on_all > self.on_nodes or self._over_all_ranks(sizes, starts, loads) < 0:
            return False
        arguments = (self._on_all, target, self._unit, context, sizes[placed], starts[placed], loads)
        return int(place_in_windows(*columns, *arguments, *listed)) >= 0

    def in_niches(
        self, target: int, latest: int, even: bool, sizes: np.ndarray, starts: np.ndarray, loads: np.ndarray
    ) -> bool:
        """Place all documents in niches, as `in_windows` does those of several nodes. `latest`: up to which they may end later
        than the target where no niche is left for them. `even`: as many documents of one size as a niche holds share all of
        it."""
        self.forget()
        world_size, unit, node = len(loads), self._unit, self._context.node
        on_nodes = max(self._on_all, self.on_nodes)
        members = self._over_all_ranks(sizes, starts, loads)
        for begin, end, domain, together in (
            (self._on_all, on_nodes, -(-world_size // unit) * unit, unit),
            (on_nodes, len(sizes), min(node, world_size), 1),
        ):
            if members >= 0 and begin < end:
                ways = (begin, end, domain, together, target, latest, even, self._context)
                filled = (sizes, starts, loads, self._member, self._first_member)
                members = int(place_in_niches(self._large, self._least_work, *ways, *filled, members))
        return members >= 0

    def forget(self) -> None:
        """Say of no document that its ranks are listed here."""
        self._first_member[:] = -1

    def members(
        self, order: np.ndarray, first_member: np.ndarray, first_rank: np.ndarray, sizes: np.ndarray
    ) -> np.ndarray:
        """Return int64: the ranks of all documents, one after the other, ascending for each.

        Args:
            order: int64 [documents]: the documents in the order that is asked for; so are all columns.
            first_member: int64 [documents + 1]: where the ranks of each begin.
            first_rank, sizes: int64 [documents]: ranks of those that are not listed here.
        """
        columns = first_member, first_rank, sizes, self._first_member[order], self._member
        return np.asarray(_members(*columns))

    def _over_all_ranks(self, sizes: np.ndarray, starts: np.ndarray, loads: np.ndarray) -> int:
        """Place the documents that need all ranks, one after the other; returns the end of what is listed, -1 if that is too
        much."""
        world_size, count = len(loads), self._on_all
        if count * world_size > len(self._member):
            return -1
        first = np.arange(count) * world_size
        self._first_member[:count], sizes[:count] = first, world_size
        times = group_times(self._large.lengths[:count], np.zeros(count, np.int64), sizes[:count], self._context)
        ends = np.cumsum(times)
        starts[:count] = ends - times
        self._member[: count * world_size] = np.tile(np.arange(world_size), count)
        loads[:] = ends[-1] if count else 0
        return count * world_size


def end_of(chosen: np.ndarray) -> int:
    """Return one past the last entry that is true, 0 if none is."""
    return int(np.flatnonzero(chosen)[-1]) + 1 if chosen.any() else 0


@compiled
def _members(
    first_member: np.ndarray, first_rank: np.ndarray, sizes: np.ndarray, listed_at: np.ndarray, listed_ranks: np.ndarray
) -> np.ndarray:  # pragma: no cover - compiled
    """int64: the ranks of documents, see `ScatteredGroups.members`, one after the other: so many of `listed_ranks` from
    `listed_at` on (int64 [documents]), or from `first_rank` on where that is less than 0."""
    ranks = np.empty(first_member[-1], np.int64)
    first_member, sizes, listed_at = listed(first_member), listed(sizes), listed(listed_at)
    for i in range(len(sizes)):
        begin, end, at = first_member[i], first_member[i + 1], listed_at[i]
        if at >= 0:
            ranks[begin:end] = listed_ranks[at : at + sizes[i]]
        else:
            ranks[begin:end] = np.arange(first_rank[i], first_rank[i] + sizes[i])
    return ranks
