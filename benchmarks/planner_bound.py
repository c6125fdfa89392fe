"""A lower bound that a plan can come closer to than to bound.py's: documents on groups that end in time.

bound.py counts every document's work on the fewest ranks that hold it. Where the longest document takes longer than the
bound on these, no plan can leave it there, and more ranks mean more work. In a plan that ends at tau every document has
a group of which T(s, d) + micro-batch <= tau, hence at least d(tau) ranks, and work never falls as d grows:

    LB = the least tau with   sum_i work(s_i, d_i(tau)) + micro_batch * (tokens / C)  <=  R * tau

So what a plan exceeds bound.py's bound by has two parts: what any plan must, and what this one does. Equal ranks, mode
"async".
"""

import numpy as np

from hf_longctx.planner import CostModel, Topology, lower_bound
from hf_longctx.planner.bound import best_sizes

PRECISION = 5000
"""The bound is found to 1/5000."""


def reachable_bound(lengths: np.ndarray, topology: Topology, cost: CostModel) -> int:
    """Nanoseconds, at least those of bound.py; `lengths` as there: int64 [documents], tokens, longest first."""
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
        return int(cost.work(lengths, high).sum()) + packing <= end * topology.world_size

    low = lower_bound(lengths, topology, cost)
    high = 2 * low
    while not possible(high):
        high *= 2
    while high - low > low // PRECISION + 1:
        middle = (low + high) // 2
        low, high = (low, middle) if possible(middle) else (middle, high)
    return low
