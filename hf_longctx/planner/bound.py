"""The makespan that no plan can beat, however its documents are split and ordered.

    LB = max( sum_i work(s_i, D_i) / R,   max_i min_{D_i <= d <= R} T(s_i, d) )        D_i = ceil(s_i / C)

The first term shares all work evenly over the ranks; work never falls as d grows, so the fewest ranks give the
least. The second is the document that takes longest on the ranks that suit it best: always the longest one.
"""

from __future__ import annotations

import numpy as np

from hf_longctx.planner.cost import CostModel

LARGEST_WORK = 2**62


def lower_bound(lengths: np.ndarray, world_size: int, capacity: int, cost: CostModel) -> int:
    """Nanoseconds; `lengths` is int64 [documents], in tokens, none longer than world_size * capacity.

    Raises ValueError when the predicted work does not fit 64-bit integers.
    """
    longest = int(lengths.max())
    fewest_ranks = -(-lengths // capacity)
    # Python's integers (object arrays), then floats: neither wraps around as the int64 sum below would.
    if (
        max(cost.attention_ps, cost.linear_ps, cost.exchange_ps) * longest >= LARGEST_WORK
        or cost.work(np.array([longest], object), world_size)[0] >= LARGEST_WORK
        or cost.work(lengths, fewest_ranks).astype(np.float64).sum() >= LARGEST_WORK
    ):
        raise ValueError(
            f"the predicted work of {len(lengths)} documents, the longest of {longest} tokens, exceeds 2^62 ns with "
            f"{cost}; use smaller coefficients (only their ratios shape a plan) or a smaller global batch"
        )
    shared = -(-int(cost.work(lengths, fewest_ranks).sum()) // world_size)
    group_sizes = np.arange(-(-longest // capacity), world_size + 1, dtype=np.int64)
    return max(shared, int(cost.time(longest, group_sizes).min()))
