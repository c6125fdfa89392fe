"""Places the large documents of a step: ways to do so, tried for one makespan after another.

Large are documents that may be split: those that some rank cannot hold, and those that take much of the step. The ways:

- blocks of adjacent ranks (rank_blocks.py), possibly on shelves (shelves.py);
- niches: ranks that are free first, and the longest documents that fit there (niches.py);
- blocks, or windows of whole nodes (windows.py), for what needs more than a node, and each node divided among the others
  (bisection.py);
- any ranks that are free first, where there are few (least_loaded.py).

All other documents stay whole and go to the ranks that are done first (packing.py). Nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from hf_longctx.planner.bound import most_ranks
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.cost.group_times import PlacementContext, group_times
from hf_longctx.planner.placing.assembly import Placement, likely_makespan
from hf_longctx.planner.placing.bisection import (
    block_width,
    deal_out,
    large_documents,
    largest_room,
    place_by_bisection,
)
from hf_longctx.planner.placing.least_loaded import place_in_holes, place_on_least_loaded
from hf_longctx.planner.placing.packing import spread_whole, sums
from hf_longctx.planner.placing.rank_blocks import place_in_blocks
from hf_longctx.planner.placing.scattered import ScatteredGroups, end_of
from hf_longctx.planner.placing.shelves import Shelves
from hf_longctx.planner.stages.chunked_placement import best_counted_sizes, with_micro_batches
from hf_longctx.planner.topology import FULL, Topology

TARGETS = (
    *(1000, 1002, 1005, 1008, 1010, 1013, 1016, 1020, 1030, 1050, 1080, 1120),
    *(1200, 1350, 1600, 2000, 3000, 5000, 8000, 16000),
)
"""Makespans aimed at, in thousandths of the lower bound."""
BLOCKS_FIRST = 3
"""How many of them are tried with blocks alone before anything else, where there are many ranks."""
NEAR = 1010
"""Thousandths of the lower bound up to which bisection is not tried there, nor blocks again, nor rounds or other orders of
unequal ranks anywhere: of 429 drawn steps, all these gained at most 0.4 % below that."""
FEW = 20_000
"""Large documents up to which shelves are tried even if each document fits into a node."""
ENOUGH = 1006
"""Thousandths of the lower bound at which niches end their search there; each further try takes as long as the first."""
MANY, MANY_NEAR = 20_000, 1050
"""With more documents, blocks are not tried again up to this: they gained nothing for 52 of 52 steps, in up to 40 ms each."""
ACROSS_NODES = 1005
"""Thousandths of the lower bound up to which groups of several nodes' ranks stay blocks."""
WIDE = (0, 1, 2, 3, 4, 6, 8)
"""How many of the longest documents go over all ranks, tried for each target on few ranks. With 0 alone, 1000 documents
of 32 to 2M tokens on 64 ranks end at up to 1.32 times the lower bound; with these, at 1.003."""
GOOD_ENOUGH = 1002
"""Thousandths of the lower bound at which the search ends: far below the error of any cost model."""
TOGETHER = 1002
"""Thousandths by which the ends of two placements differ that end together. True times differ by more from predicted ones."""
CLEARLY_LESS = 990
"""Thousandths of what another placement sends that are worth ending later. Otherwise 0.15 % of the time went for 0.1 % of it."""
LATEST = 1030
"""Thousandths of a target up to which documents in niches may end later. Groups that were to end by the target take more ranks
than they need for a much later one: 10,000 documents of the GitHub distribution on 1,024 ranks ended 25 % after it, and 1.6 %
after the next."""
HARDLY_LATE = 1010
"""Thousandths of a target up to which large documents may end for wide ones to stay where they are: in another way, those end no
sooner than the target either."""
NO_GAIN = 1001
"""Thousandths: documents are not spread again where even perfect balance would gain less than this."""
LARGE_SHARE = 20
"""A document that takes more than 1/20 of the lower bound on one rank may be split even if it fits there. For 6 documents
on 4 ranks, 1/10 ends 0.4 % later on average; 1/40 gains 0.3 % and splits 10 % more documents."""
LITTLE = 200
"""Divisor of the step: where all others together take less than 1/200 of it, one that takes more than 1/1000 is large too: 3
documents of 1/20 each, on ranks that are done at nearly the same time, would make it end 1/20 later."""
LARGE_BESIDE_LITTLE = 1000
"""See LITTLE."""
WORST = 2**62
"""Nanoseconds: more than any makespan."""
THOROUGH = 50_000
"""Ranks times large documents up to which any ranks are tried as a group: about 1 ms for each try."""
Place = Callable[[int, Placement | None], Placement | None]
"""Places all documents so that they end by a target, if it can: (target, best so far) -> the better one."""


class Search:
    """The documents of a step, and where they lie in what has been tried last.

    Args:
        lengths, tokens, room, times: int64 [documents], longest first: tokens that a document counts as; those that it has or
            more, never rising; those that its group must have room for; and nanoseconds on one rank.
        bound: nanoseconds; what is aimed at are multiples of it.
        packs: how many micro-batches of short documents there are for a thousand that would be full.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        tokens: np.ndarray,
        room: np.ndarray,
        times: np.ndarray,
        topology: Topology,
        cost: CostModel,
        bound: int,
        context: PlacementContext,
        packs: int = 1000,
    ) -> None:
        world_size = topology.world_size
        self.topology, self.bound, self.context = topology, bound, context
        self.large = large = _how_many_are_large(tokens, times, topology, bound)
        split, footprints = lengths[:large], room[:large]
        best_size = most_ranks(split, topology.fewest_ranks(footprints), topology, cost)
        if context.stages > 1:
            best_size = best_counted_sizes(split, topology.fewest_ranks(footprints), best_size, context)
        # A whole document brings its share of a micro-batch, so that ranks with many small ones are not underestimated.
        alone = with_micro_batches(lengths, tokens, times, context, packs)
        self.small_times, self.small_tokens = alone[large:], tokens[large:]
        self.total_small, self.total_speed = int(self.small_times.sum()), int(topology.speeds.sum())
        # With little else to fill gaps with, blocks end too unevenly.
        self.blocks_first = self.total_small >= bound * self.total_speed // FULL // LITTLE
        self.documents = large_documents(split, footprints, best_size, alone[:large], topology, cost, context)
        self.room = footprints
        self.first_rank, self.sizes = np.empty(large, np.int64), np.empty(large, np.int64)
        self.loads, self.starts = np.empty(world_size, np.int64), np.empty(large, np.int64)

        self.thorough, self.many = world_size * large <= THOROUGH, len(lengths) > MANY
        self.soonest = WORST  # the least makespan of all that has been placed; the best is chosen by more than that
        self.least_likely = WORST  # the same of `Placement.likely`

        self.block_ranks = block_width(context.node)
        too_wide = (footprints > largest_room(self.block_ranks, context)) | (
            cost.time(split, np.minimum(self.block_ranks, best_size)) > bound
        )
        self.wide = end_of(too_wide)
        self.scattered = ScatteredGroups(self.documents, bound, topology, cost, context)
        self.blocks = Shelves(split, footprints, best_size, context, large if large <= FEW else self.wide)
        wide = slice(self.wide)
        self.blocks_of_wide = Shelves(split[wide], footprints[wide], best_size[wide], context, self.wide)

    def best(self) -> Placement:
        """Place all documents so that the step ends soon; returns the best placement that is found."""
        best: Placement | None = None
        context, bound = self.context, self.bound
        if context.stages > 1:  # what documents cost in a pipeline, neither bisection nor niches know
            best = self._halving((self.in_blocks, self.on_any_ranks))
        elif self.thorough:
            best = self._lowest(self.in_all_ways, 1, best, GOOD_ENOUGH)
        else:
            for target in self._targets()[:BLOCKS_FIRST] if self.blocks_first else ():
                if not self._met(best, target):
                    best = self.in_blocks(target, best, evenly=(False,))
            best = self._lowest(self.in_niches, 1, best, ENOUGH, LATEST)
            best = self._lowest(self.bisected, 1, best, NEAR)
            best = self._lowest(self.in_blocks, BLOCKS_FIRST, best, MANY_NEAR if self.many else NEAR)
        # Blocks that are not cut at the borders of nodes always fit in the end.
        documents, target = self.documents, bound * TARGETS[-1] // 1000
        uncut = context._replace(node=self.topology.world_size)
        shelves = Shelves(documents.lengths, documents.footprints, documents.best, uncut, self.large)
        while best is None:
            target *= 2
            best = self.in_blocks(target, best, shelves)
        return best

    def in_blocks(
        self,
        target: int,
        best: Placement | None,
        blocks: Shelves | None = None,
        evenly: Sequence[bool] = (False, True),
    ) -> Placement | None:
        """The better one of `best` and blocks that end by `target`, if there are any."""
        for even in evenly:
            if (blocks or self.blocks).first_that_fits(target, even, self.first_rank, self.sizes, self.loads):
                self.scattered.forget()
                best = self._spread(None, best)
            if self._met(best, target):
                break
        return best

    def bisected(self, target: int, best: Placement | None) -> Placement | None:
        """The better one of `best` and nodes that are divided among the documents that fit into one."""
        for _ in self._wide_ones(target):
            dealt, roots = deal_out(self.wide, self.block_ranks, self.documents, self.loads, self.context)
            if dealt:
                place_by_bisection(
                    self.documents, roots, target, self.context, self.first_rank, self.sizes, self.starts, self.loads
                )
                end = int(self.loads.max())
                best = self._spread(self.starts, best)
                if end * 1000 <= target * HARDLY_LATE:
                    break
        return best

    def _wide_ones(self, target: int) -> Iterator[None]:
        """Place the documents that are too wide for bisection in one way after another, as far as they end by `target`."""
        wide, documents, scattered = self.wide, self.documents, self.scattered
        placed = False
        if scattered.on_nodes and scattered.in_windows(target, self.sizes, self.starts, self.loads):
            self.starts[: scattered.on_nodes] -= WORST  # before all others
            self.starts[scattered.on_nodes : wide] = -1
            columns = *(column[:wide] for column in documents[:3]), self.blocks_of_wide.work_from
            if scattered.on_nodes == wide or place_in_blocks(
                *columns, scattered.on_nodes, target, False, self.context, self.first_rank, self.sizes, self.loads
            ):
                placed = True
                yield
        scattered.forget()
        for even in (False, True) if wide else (False,):
            if not (placed and even) and self.blocks_of_wide.first_that_fits(
                target, even, self.first_rank[:wide], self.sizes[:wide], self.loads
            ):
                self.starts[:wide] = -1
                placed = True
                yield

    def in_niches(self, target: int, best: Placement | None) -> Placement | None:
        """The better one of `best` and the longest documents that fit placed where ranks are free first."""
        for even in (False, True):
            latest = target * LATEST // 1000
            if best is not None:
                latest = max(target, min(latest, best.makespan - 1))
            if self.scattered.in_niches(target, latest, even, self.sizes, self.starts, self.loads):
                best = self._spread(self.starts, best, in_place=True)
            if self._met(best, target if self.thorough else max(target, self.bound * ENOUGH // 1000)):
                break
        return best

    def in_all_ways(self, target: int, best: Placement | None) -> Placement | None:
        """The better one of `best` and the first of all ways that ends by `target`."""
        for place in (self.in_blocks, self.in_niches, self.bisected, self.on_any_ranks):
            if not self._met(best, target):
                best = place(target, best)
        return best

    def on_any_ranks(self, target: int, best: Placement | None) -> Placement | None:
        """The better one of `best` and groups of ranks that need not be adjacent."""
        # Such ranks may lie on many nodes, which costs what no estimate counts: then only where blocks are far off.
        world_size, bound = self.topology.world_size, self.bound
        near = (
            best is not None and self.topology.node_size < world_size and best.makespan * 1000 <= bound * ACROSS_NODES
        )
        if near or world_size * self.large > THOROUGH:
            return best
        for widest in WIDE:
            if widest <= self.large:
                limit = WORST if best is None else best.makespan
                candidate = self._on_least_loaded(widest, target, limit)
                best = best if candidate is None else self._better(best, candidate)
        return best

    def _spread(self, starts: np.ndarray | None, best: Placement | None, in_place: bool = False) -> Placement | None:
        """The better one of `best` and what has just been placed; `starts` decide in which order groups run. `in_place`: large
        documents on one rank run before the groups that follow on it, not after all."""
        loads, sizes = self.loads, self.sizes
        mean = (self._busy() + self.total_small) * FULL // self.total_speed
        sent = int((self.documents.lengths * (sizes - 1)).sum())
        least = likely_makespan(max(mean * NO_GAIN // 1000, int(loads.max())), mean)
        if best is not None and not self._is_better(least, sent, best):
            return best
        rank = spread_whole(self.small_times, loads, self.context.speeds)
        order = np.arange(self.large) if starts is None else np.argsort(starts, kind="stable")
        first_member = np.concatenate([[0], np.cumsum(sizes[order])])
        member = self.scattered.members(order, first_member, self.first_rank[order], sizes[order])
        self.soonest = min(self.soonest, int(loads.max()))
        after_all = np.full(len(rank), self.large) if in_place and (sizes == 1).any() else None
        return self._better(best, Placement(order, first_member, member, rank, after_all, int(loads.max()), mean, sent))

    def _better(self, best: Placement | None, candidate: Placement) -> Placement:
        self.least_likely = min(self.least_likely, candidate.likely)
        return candidate if best is None or self._is_better(candidate.likely, candidate.sent, best) else best

    def _is_better(self, likely: int, sent: int, best: Placement) -> bool:
        """Whether a placement that is likely to end so soon, and sends so much, is better than the best so far: of those that
        end with the soonest, the one that sends clearly less."""
        together = min(self.least_likely, likely) * TOGETHER // 1000
        less, more = sorted((sent, best.sent))
        if max(likely, best.likely) <= together and less * 1000 < more * CLEARLY_LESS:
            return sent < best.sent
        return likely < best.likely

    def _busy(self) -> int:
        """Nanoseconds of all ranks together, at speed 1000, in large documents; where ranks are equal, without what they wait."""
        if not self.topology.uniform:
            return self.topology.summed_work(self.loads) // FULL
        alone = self.sizes == 1
        lengths, sizes = self.documents.lengths[~alone], self.sizes[~alone]
        split = int((group_times(lengths, np.zeros_like(sizes), sizes, self.context) * sizes).sum())
        return split + int(self.documents.alone[alone].sum())

    def _targets(self) -> list[int]:
        return [self.bound * thousandths // 1000 for thousandths in TARGETS]

    def _met(self, best: Placement | None, target: int) -> bool:
        return best is not None and self.soonest <= max(target, self.bound * GOOD_ENOUGH // 1000)

    def _lowest(
        self, place: Place, first: int, best: Placement | None, enough: int, reach: int = 1000
    ) -> Placement | None:
        """Return the best that is placed for the lowest target that is met, as if all above it were met too.

        Where nothing is placed yet, TARGETS[first] is tried, then those above it, in ever longer steps, or those out of reach;
        where something is, `first` does not matter. Then comes the highest target clearly below what has been found: only where
        that is met, lower ones are tried. None is tried twice.

        Args:
            enough: thousandths of the bound at which the search ends.
            reach: thousandths of a target up to which a try for it finds what ends later.
        """
        targets, probe, step, tried = self._targets(), first, 1, set()
        while best is None and probe < len(targets):
            best, missed = place(targets[probe], best), targets[probe]
            tried.add(probe)
            probe = max(probe + 1, min(probe + step, len(targets) - 1))
            if reach == 1000:
                step += 1
            while probe < len(targets) - 1 and targets[probe] * 1000 <= missed * reach:
                probe += 1
        if best is None:
            return None
        low, high = 0, self._clearly_below(targets)
        probe = high - 1
        while low < high and probe not in tried and not self._met(best, self.bound * enough // 1000):
            best = place(targets[probe], best)
            if self._met(best, targets[probe] * TOGETHER // 1000):
                high = self._clearly_below(targets)
            elif probe == high - 1:
                break
            else:
                low = probe + 1
            probe = (low + high) // 2
        return best

    def _clearly_below(self, targets: list[int]) -> int:
        """How many targets, which ascend, are clearly below all that has been placed."""
        return sum(target * TOGETHER < self.soonest * 1000 for target in targets)

    def _halving(self, ways: Sequence[Place]) -> Placement | None:
        """Halve all targets, with several ways for each: a pipeline's bound leaves waiting out, so the first are missed."""
        best: Placement | None = None
        targets = self._targets()
        low, high = 0, len(targets)
        while low < high:
            middle = (low + high) // 2
            for place in ways:
                if not self._met(best, targets[middle]):
                    best = place(targets[middle], best)
            low, high = (low, middle) if self._met(best, targets[middle]) else (middle + 1, high)
        return best

    def _on_least_loaded(self, wide: int, target: int, limit: int) -> Placement | None:
        """Large documents on any ranks that are free first, the `wide` longest of them over all ranks, and small ones in the
        holes before groups; None if that must take until `limit` or longer."""
        large, topology, context = self.large, self.topology, self.context
        world_size, small_times, split = topology.world_size, self.small_times, self.documents.lengths
        first_member, member = np.empty(large + 1, np.int64), np.empty(large * world_size, np.int64)
        loads = np.empty(world_size, np.int64)
        holes = np.empty((large * world_size, 3), np.int64)
        work_from = self.blocks.work_from
        count = place_on_least_loaded(
            split, self.room, work_from, wide, target, limit, context, first_member, member, loads, holes
        )
        if count < 0:
            return None
        holes = holes[:count]
        longest_first = np.lexsort((holes[:, 2], holes[:, 1], holes[:, 0]))[::-1]
        rank, before = place_in_holes(holes[longest_first], small_times, self.small_tokens, context)
        rest = np.flatnonzero(rank < 0)
        before[rest] = large
        # Even if all ranks ended together: each document's time on its rank is rounded down.
        even = topology.summed_work(loads) + int(small_times[rest].sum()) * FULL
        if (even - len(rest) * int(topology.speeds.max())) // self.total_speed >= limit:
            return None
        rank[rest] = spread_whole(small_times[rest], loads, context.speeds)
        # Before that, `even` held holes as they were.
        busy = even + (self.total_small - int(small_times[rest].sum())) * FULL
        busy -= topology.summed_work(sums(holes[:, 1].copy(), holes[:, 0].copy(), world_size))
        member = member[: first_member[-1]]
        self.soonest = min(self.soonest, int(loads.max()))
        sent = int((split * (np.diff(first_member) - 1)).sum())
        return Placement(
            np.arange(large), first_member, member, rank, before, int(loads.max()), busy // self.total_speed, sent
        )


def _how_many_are_large(tokens: np.ndarray, times: np.ndarray, topology: Topology, bound: int) -> int:
    """Count the documents, longest first, that may be split."""
    too_long = tokens > topology.capacities.min()
    large = int(np.count_nonzero(too_long | (times > bound // LARGE_SHARE)))
    if int(times[large:].sum()) < bound * int(topology.speeds.sum()) // FULL // LITTLE:
        # Too little to fill with what the large ones leave free: where each of them ends matters.
        large = int(np.count_nonzero(too_long | (times > bound // LARGE_BESIDE_LITTLE)))
    return large
