"""What a search of a minute finds for a step of equal ranks, as something to hold plans to where no bound is close.

It looks for how many ranks each long document gets, and in which order documents take the ranks that are free first; the plan's
own sizes and order are where it begins. Simulated annealing: a random document gets another size, or another place in the
order, and what is longer by x is kept with a probability of exp(-x / temperature), which falls to nothing.

It is let off more than a plan: documents that take less than SHORT of the bound are a fluid that fills all gaps; the ranks of a
group lie anywhere, and exchange as if they shared nodes; micro-batches of whole documents cost nothing. So no plan need be as
short as what it finds, but a plan that is nearly as short is hard to improve.
"""

import math
import time
from heapq import heappop, heappush

import numba
import numpy as np
from drawn_steps import DrawnStep

from hf_longctx.planner import StepPlan, lower_bound
from hf_longctx.planner.bound import best_sizes

SHORT = 1 / 300
"""Of the lower bound, on one rank."""
TRIES = 50
"""Changes between looks at the clock."""
HOT, COLD = 0.02, 1e-5
"""Temperatures at begin and end, of the lower bound."""


def searched(step: DrawnStep, plan: StepPlan, seconds: float = 60.0) -> float:
    """Nanoseconds of the shortest schedule that is found within `seconds`; ranks must be equal, and nothing offloaded."""
    cost, topology, lengths = step.cost, step.topology, step.ordered
    bound = lower_bound(lengths, topology, cost)
    alone, fewest = cost.time(lengths, 1), topology.fewest_ranks(lengths)
    placed = int(np.count_nonzero((fewest > 1) | (alone > bound * SHORT)))
    fluid = float(alone[placed:].sum())
    lengths, fewest = lengths[:placed], fewest[:placed]
    best = best_sizes(lengths, fewest, topology.world_size, cost.coefficients)
    order_of_lengths = np.argsort(-plan.length, kind="stable")[:placed]
    micro_batch = plan.micro_batch_of_document[order_of_lengths]
    sizes = plan.ranks_of_document[order_of_lengths].astype(np.int64)
    order = np.argsort(plan.timeline().start[micro_batch], kind="stable")
    # Times on all sizes that may be asked for: from the fewest to the best.
    first = np.concatenate([[0], np.cumsum(best - fewest + 1)])
    document = np.repeat(np.arange(placed), best - fewest + 1)
    size_of = np.arange(first[-1]) - first[document] + fewest[document]
    times = (cost.time(lengths[document], size_of) + np.where(size_of > 1, cost.micro_batch_ns, 0)).astype(np.float64)
    sizes = np.clip(sizes, fewest, best)
    longest_first = np.argsort(-times[first[:-1]], kind="stable")
    shortest = math.inf
    for begin in (order, longest_first):
        state = (sizes.copy(), begin.copy())
        shortest = min(
            shortest, _anneal(*state, fewest, best, first, times, fluid, topology.world_size, bound, seconds / 2)
        )
    return shortest


def _anneal(
    sizes: np.ndarray,
    order: np.ndarray,
    fewest: np.ndarray,
    best: np.ndarray,
    first: np.ndarray,
    times: np.ndarray,
    fluid: float,
    ranks: int,
    bound: int,
    seconds: float,
) -> float:
    _change(sizes, order, fewest, best, first, times, fluid, ranks, 0.0, 0, math.inf, 0)  # compiles
    least = current = _end(sizes, order, fewest, first, times, fluid, ranks)
    begin, seed = time.perf_counter(), 0
    while (passed := (time.perf_counter() - begin) / seconds) < 1:
        seed += 1
        temperature = bound * HOT * (COLD / HOT) ** passed
        current, shortest = _change(
            sizes, order, fewest, best, first, times, fluid, ranks, temperature, TRIES, current, seed
        )
        least = min(least, shortest)
    return least


@numba.njit(cache=True)
def _change(sizes, order, fewest, best, first, times, fluid, ranks, temperature, tries, current, seed):  # type: ignore[no-untyped-def]
    """Try so many changes; returns the end of what is kept, and the earliest end that was seen."""
    np.random.seed(seed)
    shortest = current
    for _ in range(tries):
        i, j, size = np.random.randint(len(order)), -1, -1
        document = order[i]
        if np.random.random() < 0.5 and best[document] > fewest[document]:
            size = sizes[document]
            step = max(1, int(size * 0.3 * np.random.random()))
            wanted = size + step if np.random.random() < 0.5 else size - step
            sizes[document] = min(max(wanted, fewest[document]), best[document])
        else:
            j = np.random.randint(len(order))
            order[i], order[j] = order[j], order[i]
        end = _end(sizes, order, fewest, first, times, fluid, ranks)
        shortest = min(shortest, end)
        if end <= current or np.random.random() < np.exp(-(end - current) / max(temperature, 1e-9)):
            current = end
        elif size >= 0:
            sizes[document] = size
        else:
            order[i], order[j] = order[j], order[i]
    return current, shortest


@numba.njit(cache=True)
def _end(sizes, order, fewest, first, times, fluid, ranks):  # type: ignore[no-untyped-def]
    """When the last rank is done, if each document takes the ranks that are free first, and the fluid fills what is left."""
    free = [(0.0, ranks)]  # (when, how many ranks)
    busy, last = fluid, 0.0
    for document in order:
        size = sizes[document]
        spent = times[first[document] + size - fewest[document]]
        wanted, begin = size, 0.0
        while wanted > 0:
            begin, count = heappop(free)
            if count > wanted:
                heappush(free, (begin, count - wanted))
                count = wanted
            wanted -= count
        end = begin + spent
        heappush(free, (end, size))
        busy += spent * size
        last = max(last, end)
    return max(last, busy / ranks)
