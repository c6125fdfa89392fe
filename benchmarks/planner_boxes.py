"""A lower bound on makespans that counts which documents find room side by side: those that need more than half of all ranks run
one after the other.

It follows from scales (dual feasible functions). f maps [0, 1] to itself, and sum f(x) <= 1 for all x of which
sum x <= 1. In a plan of R ranks that ends at tau, a document i runs on d_i >= D_i ranks for T_i = T(s_i, d_i) <= tau, and

    sum_i  f(d_i / R) * g(T_i / tau)  <=  1                                    for all scales f and g

Proof. Give each document the length g(T_i / tau), and let it begin when all documents that ended before it began in the plan
have ended: such a chain has sum T <= tau, so now all end by 1. What overlaps now did not run one after the other, hence
overlapped in the plan, all of it at one time (intervals), so sum d <= R and sum f(d / R) <= 1 at any time. Integrate.

So where  sum_i min over d >= D_i with T(s_i, d) <= tau of f(d / R) * g(T(s_i, d) / tau)  exceeds 1 for some f and g, no plan
ends by tau. With f(x) = g(x) = x it is the work of all documents on ranks that end in time. The other scales are

    staircase(k)   floor((k+1) * x) / k, and x where (k+1) * x is an integer: of parts above 1/(k+1), k fit side by side
    middle(e)      0 below e, x from e to 1-e, 1 above: what leaves less than e free fills it
    mirror(e)      floor(x/e) / floor(1/e) below a half, 1/2 there, 1 - mirror(1-x) above: what is left beside the one of more
                   than a half is counted in parts of e

On ranks of unequal speed, T is that on the d fastest ranks, which no others beat, however many tokens each of them holds.

`in_nodes` asks for a bound on plans that keep to nodes, as ours of many documents do: a group lies inside a node or on whole
nodes, since one that has a single rank on a node brings in by itself what a whole node shares, which no cost model here counts.
The same proof holds in each node, of N ranks: with N for R, a document on whole nodes counts as 1 in each of them, and the sum
over all documents is at most the number of nodes. A last node of r < N ranks counts as f(r / N), as does what a group has of it:
no ranks of which sum d <= r have more, since these scales never fall below the sum of parts. Groups that end on the last rank
all have that last node, so that they run one after the other: the sum stays a bound if it counts that node several times
(LAST_NODE), in them and in all. Sizes of groups are those of
placing/rank_blocks.py: up to a node, its multiples, those that end on the last rank, and, for a document that does not end
in time on as many whole nodes as hold it, the fewest ranks that do.

Source of the scales and the proof for boxes: Fekete and Schepers, "New classes of fast lower bounds for bin packing problems",
Mathematical Programming 91 (2001), and "A general framework for bounds for higher-dimensional orthogonal packing
problems", Mathematical Methods of Operations Research 60 (2004); mirror(e): Carlier, Clautiaux and Moukrim, "New reduction
procedures and lower bounds for the two-dimensional bin packing problem with fixed orientation", Computers & Operations
Research 34 (2007).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hf_longctx.planner import CostModel, Topology, lower_bound
from hf_longctx.planner.bound import best_sizes, unit_bits
from hf_longctx.planner.topology import FULL

PRECISION = 2000
"""The bound is found to 1/2000."""
STAIRCASES = (*range(1, 17), 20, 24, 32, 48, 64)
"""k: with a hundred, what is left over is a percent."""
MIDDLES = (1 / 2, 1 / 3, 1 / 4, 1 / 6, 1 / 10)
MIRRORS, NARROWEST = 8, 1 / 6
"""Widths of documents, from a sixth to a half of the ranks, of which each is an e of mirror(e): those of most work."""
LAST_NODE = (2, 4, 8, 16, 32)
"""Times that a last node of fewer ranks is counted too, where f(x) = x."""
SAME_LENGTH = 0.02
"""Documents whose lengths differ by less may count as the shortest of them."""
CLASSES = 300
"""At least so many classes of length, with as much work each, where there are as many lengths."""
DENSE_SIZES = 300
"""Up to which every size of group is looked at; above it, every 300th part more."""
ROUNDING = 1e-9
"""Of a share."""
HALVINGS = 40
"""Of an interval that holds a time on unequal ranks."""


class Scale(Protocol):
    """A dual feasible function."""

    def __call__(self, share: np.ndarray) -> np.ndarray:
        """Scale float64 shares, 0 to 1."""
        ...


@dataclass(frozen=True)
class Identity:
    """f(x) = x."""

    def __call__(self, share: np.ndarray) -> np.ndarray:
        """Return the shares."""
        return share


@dataclass(frozen=True)
class Staircase:
    """staircase(k) of the module's docstring."""

    k: int

    def __call__(self, share: np.ndarray) -> np.ndarray:
        """Scale."""
        steps = share * (self.k + 1)
        nearest = np.round(steps)
        return np.where(np.abs(steps - nearest) < ROUNDING, nearest / (self.k + 1), np.floor(steps) / self.k)


@dataclass(frozen=True)
class Middle:
    """middle(e) of the module's docstring; an edge itself counts as the lesser side of it."""

    edge: float

    def __call__(self, share: np.ndarray) -> np.ndarray:
        """Scale."""
        between = np.where(share > self.edge + ROUNDING, share, 0.0)
        return np.where(share > 1 - self.edge + ROUNDING, 1.0, between)


@dataclass(frozen=True)
class Mirror:
    """mirror(e) of the module's docstring; `part` is e, at most a half."""

    part: float

    def __call__(self, share: np.ndarray) -> np.ndarray:
        """Scale."""
        part = self.part * (1 - ROUNDING)  # so that what is e counts as e
        below = np.floor(np.minimum(share, 1 - share) / part) / np.floor(1 / part)
        scaled = np.where(share > 0.5, 1 - below, below)
        return np.where(np.abs(share - 0.5) < ROUNDING, 0.5, scaled)


SCALES: tuple[Scale, ...] = (Identity(), *map(Staircase, STAIRCASES), *map(Middle, MIDDLES))


def box_bound(
    lengths: np.ndarray, topology: Topology, cost: CostModel, *, in_nodes: bool = False, enough: float = math.inf
) -> int:
    """Nanoseconds, at least those of planner/bound.py in mode "async", and no more than any plan takes whose split documents
    have a micro-batch each; `lengths` as there: int64 [documents], tokens, longest first.

    Args:
        in_nodes: count on groups that keep to nodes; ranks must be equal.
        enough: if the bound is greater, this is returned, which is found sooner.
    """
    bits = unit_bits(lengths, topology, cost)
    least = lower_bound(lengths, topology, cost)
    boxes = _Boxes(lengths, topology, cost.in_units(bits), in_nodes)
    if enough < math.inf and boxes.exceed(enough / 2**bits):
        return max(least, math.ceil(enough))
    low, high = float(least >> bits), min(2.0 * (least >> bits), enough / 2**bits)
    while boxes.exceed(high):
        low, high = high, 2 * high
    while high - low > low / PRECISION:
        middle = (low + high) / 2
        low, high = (middle, high) if boxes.exceed(middle) else (low, middle)
    return max(least, int(low) << bits)


@dataclass(frozen=True)
class _Widths:
    """Widths of boxes by every scale f, one scale after the other, and in each, one class after the other."""

    width: np.ndarray
    """float64 [all different widths of the boxes of a class]"""
    box: np.ndarray
    """int64, as `width`: the quickest box that is so wide."""
    begin: np.ndarray
    """int64 [scales * classes]: where the widths of each scale and class begin."""
    nodes: list[float]
    """[scales]: what all ranks count as."""


class _Boxes:
    """The documents of a step as boxes of ranks and time, of which each can be had in several sizes."""

    def __init__(self, lengths: np.ndarray, topology: Topology, cost: CostModel, in_nodes: bool) -> None:
        assert topology.uniform or not in_nodes, "unequal ranks are planned in other orders, across nodes"
        self.ranks = topology.world_size
        self.node = topology.node_size if in_nodes else self.ranks
        self.packing = cost.micro_batch_ns * int(lengths.sum()) / int(topology.capacities.max())
        self.lengths, longest, self.count = _classes(lengths, topology, cost)
        fewest = topology.fewest_ranks(self.lengths)
        self.scales = (*SCALES, *self._mirrors(fewest % self.node / self.node, cost.work(self.lengths, fewest)))
        most = np.minimum(self.lengths, self.ranks)
        if topology.uniform:  # with more, T rises
            most = best_sizes(self.lengths, fewest, self.ranks, cost.coefficients)
        widest = np.minimum(-(-most // self.node) * self.node, self.ranks)  # on whole nodes, though slower
        first, last = _size_ranges(int(fewest.min()), int(widest.max()))
        column = self.lengths[:, None]
        smallest, largest = (np.clip(sizes, fewest[:, None], most[:, None]) for sizes in (first, last))
        if topology.uniform:
            time = cost.time(column, largest).astype(np.float64)
        else:
            time = cost.work(column, smallest) / column * _slowest(column, largest, topology)
        time[(last < fewest[:, None]) | (first > widest[:, None])] = math.inf
        to_last = self._end_on_last_rank(first, last)
        time[:, ~(self._keep_to_nodes(first, last) | to_last)] = math.inf
        useful = _useful(time, to_last)
        document, size = np.nonzero(useful)
        self.begin = np.flatnonzero(np.append(True, np.diff(document) > 0))
        """int64 [classes]: the first of its boxes in the arrays that follow."""
        self.time, self.first = time[useful], np.maximum(first[size], fewest[document])
        """[boxes]: groups of a range of sizes count as of the first that holds the document, and take the time of the last."""
        self.share = self.first / self.ranks
        """Of all ranks."""
        self.launched = self.time + np.where(self.first > 1, cost.micro_batch_ns, 0)
        """With the micro-batch of its own that a split document has."""
        self.widths = self._widths(document, to_last[size])
        hold_longest = topology.fewest_ranks(longest)
        whole = np.minimum(-(-hold_longest // self.node) * self.node, self.ranks)
        self.on_nodes = np.where(hold_longest > self.node, cost.time(longest, whole) + cost.micro_batch_ns, 0)
        """On as many whole nodes as hold the longest of a class, which it takes if it ends in time there; 0: it fits into one."""
        self.across = cost.time(self.lengths, fewest) + cost.micro_batch_ns
        """On the fewest ranks, in parts of nodes, which it takes otherwise."""
        self.across_nodes = np.maximum(fewest // self.node - 1, 0)
        """Whole nodes that such a group has at least, wherever it begins."""
        self.across_work = cost.time(self.lengths, fewest) * fewest / self.ranks

    def _mirrors(self, shares: np.ndarray, work: np.ndarray) -> Iterator[Mirror]:
        """Yield scales for the widths that documents of most work have; `work`: nanoseconds of one document of each class."""
        widths, of_width = np.unique(shares, return_inverse=True)
        total = np.bincount(of_width, work.astype(np.float64) * self.count)
        total[(widths < NARROWEST) | (widths > 1 / 2)] = 0
        for width in np.argsort(-total)[:MIRRORS]:
            if total[width] > 0:
                yield Mirror(float(widths[width]))

    def _keep_to_nodes(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """bool [sizes]: whether a range of sizes has one that lies inside a node, or on whole nodes."""
        return (first <= self.node) | (last // self.node * self.node >= first)

    def _end_on_last_rank(self, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """bool [sizes]: whether it has one of whole nodes and a last node of fewer ranks, and none of the others."""
        rest = self.ranks % self.node
        ends = (rest > 0) & ((last - rest) // self.node * self.node + rest >= first)
        return ends & ~self._keep_to_nodes(first, last)

    def _widths(self, document: np.ndarray, to_last: np.ndarray) -> _Widths:
        """Scale the widths of all boxes by every f; `document`: int64 [boxes], their classes; `to_last`: bool [boxes], whether
        they end on the last rank."""
        last = self.ranks % self.node / self.node
        times_last = [(f, 1) for f in self.scales]
        if to_last.any():
            times_last += [(self.scales[0], times) for times in LAST_NODE]
        widths, boxes, begins, nodes = [], [], [], []
        before = 0
        for f, times in times_last:
            more = (times - 1) * float(f(np.array(last)))
            width = self.first // self.node + f(self.first % self.node / self.node) + more * to_last
            differs = (np.diff(document) > 0) | (width[1:] != width[:-1])
            alike = np.append(0, np.cumsum(differs))
            # Of boxes of a class that count alike, the quickest is so for every end and g: they keep the order of times.
            quickest = np.lexsort((self.launched, alike))[np.flatnonzero(np.append(True, differs))]
            widths.append(width[quickest])
            boxes.append(quickest)
            begins.append(before + alike[self.begin])
            before += len(quickest)
            nodes.append(float(self.ranks // self.node + f(np.array(last))) + more)
        return _Widths(np.concatenate(widths), np.concatenate(boxes), np.concatenate(begins), nodes)

    @np.errstate(invalid="ignore")
    def exceed(self, end: float) -> bool:
        """Whether no plan ends by then, in units of the cost model."""
        part = self.launched / end - 2 * ROUNDING
        in_time = part <= 1
        across = np.where(self.on_nodes > end, self.across / end - 2 * ROUNDING, math.inf)
        across[across > 1] = math.inf
        if not (np.logical_or.reduceat(in_time, self.begin) | np.isfinite(across)).all():
            return True
        work = np.minimum.reduceat(np.where(in_time, self.time / end * self.share, math.inf), self.begin)
        work = np.minimum(work, np.where(np.isfinite(across), self.across_work / end, math.inf))
        if work @ self.count + self.packing / (end * self.ranks) > 1 + ROUNDING:
            return True
        part[~in_time] = math.inf
        return any(area > 1 + ROUNDING for area in self._areas(part, across))

    def _areas(self, part: np.ndarray, across: np.ndarray) -> Iterator[float]:
        """The left side of the module's docstring for every f and g, or less; `part` and `across`: T over the end, infinite where
        above 1."""
        widths = self.widths
        for g in SCALES:
            area = widths.width * _scaled(g, part)[widths.box]
            least = np.fmin.reduceat(area, widths.begin)  # no width times infinity is no number
            areas = np.fmin(least.reshape(-1, len(self.count)), _scaled(g, across) * self.across_nodes)
            for area, count in zip(areas, widths.nodes):
                yield float(area @ self.count) / count


def _useful(time: np.ndarray, to_last: np.ndarray) -> np.ndarray:
    """bool [classes, sizes]: whether no smaller group of the class ends as soon, of those that need not end on the last rank.

    Where a smaller one does, the larger counts as no less by any scale: no bound changes without it, and a hundredth of the boxes
    is left. Of a class that has no time at all, one is.
    """
    soonest = np.minimum.accumulate(np.where(to_last, math.inf, time), axis=1)
    useful = np.isfinite(time)
    useful[:, 1:] &= time[:, 1:] < soonest[:, :-1]
    useful[:, 0] |= ~useful.any(axis=1)
    return useful


def _scaled(g: Scale, part: np.ndarray) -> np.ndarray:
    """Scale what is finite; rounding may have left it a little below 0."""
    finite = np.isfinite(part)
    return np.where(finite, g(np.where(finite, np.maximum(part, 0.0), 0.0)), math.inf)


def _classes(lengths: np.ndarray, topology: Topology, cost: CostModel) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Shortest length, longest, and number of documents of each class, int64. Shorter ones have less work on as many ranks."""
    ascending = lengths[::-1]
    work = np.cumsum(cost.work(ascending, topology.fewest_ranks(ascending)).astype(np.float64))
    kind = np.stack([np.log(ascending) // SAME_LENGTH, work * CLASSES // work[-1]])
    begins = np.flatnonzero(np.append(True, (kind[:, 1:] != kind[:, :-1]).any(axis=0) & (np.diff(ascending) > 0)))
    ends = np.append(begins[1:], len(lengths))
    return ascending[begins], ascending[ends - 1], ends - begins


def _size_ranges(least: int, most: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last size of each range of sizes from `least` to `most`, int64."""
    first = []
    size = least
    while size <= most:
        first.append(size)
        size += 1 + size // DENSE_SIZES
    return np.array(first), np.append(np.array(first[1:], np.int64) - 1, most)


def _slowest(lengths: np.ndarray, sizes: np.ndarray, topology: Topology) -> np.ndarray:
    """Tokens over speed (1 is a full one) of the slowest of so many of the fastest ranks, where each holds as many as suit its
    speed, but not more than its capacity: float64 [documents, sizes], as `sizes`; `lengths` [documents, 1]."""
    speeds = np.sort(topology.speeds)[::-1] / FULL
    capacity = int(topology.capacities.max())
    summed = np.append(0.0, np.cumsum(speeds))
    low, high = lengths / summed[sizes], np.full(sizes.shape, capacity / speeds[-1])
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        full = np.minimum(np.searchsorted(-speeds, -capacity / middle, side="right"), sizes)
        enough = full * capacity + middle * (summed[sizes] - summed[full]) >= lengths
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return low
