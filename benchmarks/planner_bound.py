"""A lower bound that a plan can come closer to than to planner/bound.py's: documents on groups that end in time, and whole ones.

planner/bound.py counts every document's work on the fewest ranks that hold it. Where the longest document takes longer than the
bound on these, no plan can leave it there, and more ranks mean more work. In a plan that ends at tau every document has
a group of which T(s, d) + micro-batch <= tau, hence at least d(tau) ranks, and work never falls as d grows:

    LB = the least tau with   sum_i work(s_i, d_i(tau)) + spread(tau) + micro_batch * (tokens / C)  <=  R * tau

Nor can all documents stay on their d(tau) ranks where these are few: 9 equal documents on 8 ranks take twice as long as
one, or some of them are spread over more ranks. Of documents with T > tau / (k+1) on their d(tau) ranks, a rank has a part of
k at most, R * k parts in all. What is more must be spread over d(tau) + 1 ranks or more; spread(tau) is the least work
that this adds, of any k, counting the cheapest documents and of the last of them only what is needed.

That is for equal ranks. On any ranks, documents must find room side by side too (planner_boxes.py). So what a plan exceeds
planner/bound.py's bound by has two parts: what any plan must, and what this one does. Mode "async" (and so "lockstep", whose
plans are no shorter).
"""

import math

import numpy as np
from planner_boxes import box_bound

from hf_longctx.planner import CostModel, Topology, lower_bound
from hf_longctx.planner.bound import best_sizes, unit_bits

PRECISION = 5000
"""The bound is found to 1/5000."""
PARTS = (*range(1, 17), 20, 24, 32, 48, 64, 96)
"""k: most parts of documents that a rank has room for. With a hundred, what is left over is a percent."""


def reachable_bound(
    lengths: np.ndarray, topology: Topology, cost: CostModel, *, in_nodes: bool = False, enough: float = math.inf
) -> int:
    """Nanoseconds, at least those of planner/bound.py; `lengths` as there: int64 [documents], tokens, longest first. No plan
    whose split documents have a micro-batch each ends sooner.

    Args:
        in_nodes: bound only plans whose groups keep to nodes (planner_boxes.py).
        enough: if the bound is greater, this is returned, which is found sooner.
    """
    if not topology.uniform:
        return box_bound(lengths, topology, cost, enough=enough)
    bound = spread_bound(lengths, topology, cost)
    for within in (False, True) if in_nodes and topology.node_size < topology.world_size else (False,):
        if bound < enough:
            bound = max(bound, box_bound(lengths, topology, cost, in_nodes=within, enough=enough))
    return bound


def spread_bound(lengths: np.ndarray, topology: Topology, cost: CostModel) -> int:
    """Nanoseconds, as the module's docstring has it."""
    bits = unit_bits(lengths, topology, cost)
    cost = cost.in_units(bits)  # times below are in units of 2^bits nanoseconds
    fewest = topology.fewest_ranks(lengths)
    best = best_sizes(lengths, fewest, topology.world_size, cost.coefficients)
    packing = cost.micro_batch_ns * int(lengths.sum()) // topology.capacity

    def possible(end: int) -> bool:
        low, high = fewest, best
        if (cost.time(lengths, high) + cost.micro_batch_ns > end).any():
            return False
        while (low < high).any():  # T falls from `fewest` to `best`
            middle = (low + high) // 2
            in_time = cost.time(lengths, middle) + cost.micro_batch_ns <= end
            low, high = np.where(in_time, low, np.minimum(middle + 1, high)), np.where(in_time, middle, high)
        room = end * topology.world_size - int(cost.work(lengths, high).sum()) - packing
        return room >= 0 and _work_of_spreading(lengths, high, end - cost.micro_batch_ns, topology, cost) <= room

    low = lower_bound(lengths, topology, cost)
    high = 2 * low
    while not possible(high):
        high *= 2
    while high - low > low // PRECISION + 1:
        middle = (low + high) // 2
        low, high = (low, middle) if possible(middle) else (middle, high)
    return low << bits


def _work_of_spreading(lengths: np.ndarray, sizes: np.ndarray, end: int, topology: Topology, cost: CostModel) -> int:
    """Nanoseconds of work that any plan adds whose ranks compute for `end`: `sizes` (int64 [documents]) are the fewest ranks on
    which each document ends in time."""
    times = cost.time(lengths, sizes)
    by_time = np.argsort(-times, kind="stable")
    ends = np.cumsum(sizes[by_time])
    falling = -times[by_time]
    too_many = {}  # documents that begin by_time -> parts of them that have no room
    for parts in PARTS:
        several = int(np.searchsorted(falling, -(end // (parts + 1)), side="left"))  # T > end / (parts + 1)
        if several and (excess := int(ends[several - 1]) - parts * topology.world_size) > 0:
            too_many.setdefault(several, excess)  # the fewest parts leave the most over
    if not too_many:
        return 0
    added = cost.work(lengths, sizes + 1) - cost.work(lengths, sizes)
    cheapest = np.argsort(added / sizes, kind="stable")
    place = np.empty_like(by_time)
    place[by_time] = np.arange(len(by_time))
    return max(
        _cheapest(added, sizes, cheapest[place[cheapest] < several], parts) for several, parts in too_many.items()
    )


def _cheapest(added: np.ndarray, sizes: np.ndarray, documents: np.ndarray, parts: int) -> int:
    """Nanoseconds that it adds, at least, to spread documents of so many parts; `documents`: the cheapest first."""
    ends = np.cumsum(sizes[documents])
    last = int(np.searchsorted(ends, parts))
    whole = int(added[documents[:last]].sum())
    left = parts - (int(ends[last - 1]) if last else 0)
    return whole + int(added[documents[last]]) * left // int(sizes[documents[last]])
