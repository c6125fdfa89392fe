"""Micro-batches are whole: what the least number of them costs that no plan does without.

A rank that computes anything starts one micro-batch, so n ranks, of speeds V together, take (work + n * micro_batch) / V at
least: the least over the n fastest is a bound.

On R equal ranks of C tokens, more than k*R*C tokens leave some rank with k+1 micro-batches. Those with k or fewer, n of them,
hold n*k*C tokens at most, and these no more work than the densest tokens of the step, D(n*k*C). The others do the rest:

    LB = min over n of  (k+1) * micro_batch + (work - D(n*k*C)) / (R - n)

117 % of what all ranks hold takes two micro-batches on each of them, not 1.17, unless some tokens take much longer than others.
Nothing is sent.
"""

from __future__ import annotations

import numpy as np

from hf_longctx.planner.topology import FULL, Topology

LITTLE = 5_000
"""Micro-batches that a bound is as long as, at least, for their number not to matter: below a 5000th, no plan is judged."""
ROUNDED = 1 + 1e-12
"""More than a product of three floats loses."""


def bound_of_launches(work: np.ndarray, tokens: np.ndarray, micro_batch: int, topology: Topology) -> int:
    """Return a makespan that no plan goes below: nanoseconds, or units of the cost model.

    Args:
        work, tokens: int64 [documents], in any order: nanoseconds of all ranks together, without micro-batches, on the fewest
            that hold the document; and tokens that it has.
        micro_batch: nanoseconds of one, on a rank of speed 1000.
    """
    total = int(work.sum())
    if micro_batch * LITTLE * int(topology.speeds.sum()) < total * FULL:
        return 0
    ranks, capacity = topology.world_size, topology.capacity
    if topology.uniform:
        bound = total // ranks + micro_batch  # fewer ranks take longer
    else:
        fastest = np.cumsum(np.sort(topology.speeds)[::-1]).tolist()
        bound = min((total + used * micro_batch) * FULL // speed for used, speed in enumerate(fastest, 1))
    fewest = (int(tokens.sum()) - 1) // topology.tokens  # k: all ranks with so many do not hold all tokens
    if fewest == 0 or not topology.uniform:
        return bound
    by_density = np.argsort(-(work / tokens), kind="stable")
    work, tokens = work[by_density], tokens[by_density]
    ends, done = np.cumsum(tokens), np.cumsum(work)
    few = np.arange(ranks)  # n
    room = few * (fewest * capacity)
    last = np.searchsorted(ends, room)  # of the densest documents, the one that they hold in part
    # In floats, as the product may exceed 64 bits, and rounded up: the same on every machine.
    part = np.ceil((room - (ends - tokens)[last]) / tokens[last] * work[last] * ROUNDED).astype(np.int64)
    densest = (done - work)[last] + np.minimum(part, work[last])
    return max(bound, int(((fewest + 1) * micro_batch + (total - densest) // (ranks - few)).min()))
