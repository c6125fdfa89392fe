"""The makespans that no plan can beat where every document lies whole on one rank, beside those of bound.py.

A class is the documents that only ranks of some memory hold, with these ranks, R of them; all documents and all ranks are a class
too. Each class says:

    work      these ranks together take its documents' time, and the longest of them takes the fastest of these ranks
    count     of its k*R + 1 longest documents, one rank holds k + 1: at the least the k + 1 shortest of them
    waits     in a pipeline of p stages a rank takes the time of all its micro-batches and p - 1 times that of the longest.
              By T, a rank whose longest document takes m does T - (p-1)*m of work. Ranks that are filled with the longest
              documents first, one rank after another, do as much as they can; if something is left over, T is too short
    rounds    in lockstep, of documents that cannot share a micro-batch (longer than half of what any rank holds; all of them
              where each is alone), a round holds R: the k-th costliest costs at least the (k-1)*R + 1st of them, of any class

A micro-batch brings its own time: one for each document that is alone, else for each full capacity, and for each
document that cannot share one.

Unequal speeds: each document takes as long as on the fastest rank of its class. Nothing is sent.
"""

from __future__ import annotations

import numpy as np

from hf_longctx.planner.compiled import compiled
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.topology import FULL, Topology

MOST_CLASSES = 16
"""Most classes of ranks, by memory, that are looked at: any of them is a bound."""
PRECISION = 500
"""The bound of waits is found to a 500th."""


def bound_of_whole(times: np.ndarray, tokens: np.ndarray, topology: Topology, cost: CostModel, mode: str) -> int:
    """Return a makespan that no plan of whole documents goes below: nanoseconds (units of the cost model), at least 1.

    Args:
        times: int64 [documents], on one rank, without a micro-batch.
        tokens: int64 [documents] that each holds; in any order.
    """
    alone, micro_batch, largest = topology.documents == "alone", cost.micro_batch_ns, topology.longest_document
    waiting = topology.stages - 1 if mode == "pipeline" else 0
    times, launch = (times + micro_batch, 0) if alone else (times, micro_batch)
    bounds, rounds = [1], np.zeros(0, np.int64)
    for capacity, next_lower in _classes(topology):
        ranks, documents = topology.capacities >= capacity, tokens > next_lower
        count, speed, fastest = int(ranks.sum()), int(topology.speeds[ranks].sum()), int(topology.speeds[ranks].max())
        ordered = np.sort(times[documents])[::-1]
        if not len(ordered):
            continue
        before = np.append(0, np.cumsum(ordered))
        apart = documents & (alone | (2 * tokens > largest))
        packed = launch * max(int(tokens[documents].sum()) // largest, int(apart.sum()))
        bounds.append((int(before[-1]) + packed) * FULL // speed)
        bounds.append((int(ordered[0]) + launch) * (1 + waiting) * FULL // fastest)
        last = np.arange(count, len(ordered), count)  # k*R: the k*R + 1st longest
        if len(last):
            least = before[last + 1] - before[last - last // count] + launch + waiting * (ordered[last] + launch)
            bounds.append(int(least.max()) * FULL // fastest)
        if waiting:
            bounds.append(_bound_of_waits(ordered, before, waiting, launch, fastest, count, max(bounds)))
        if mode == "lockstep":
            costliest = (np.sort(times[apart])[::-1][::count] + launch) * FULL // fastest
            both = min(len(costliest), len(rounds))
            longer = costliest if len(costliest) > both else rounds
            rounds = np.append(np.maximum(costliest[:both], rounds[:both]), longer[both:])
            bounds.append(int(rounds.sum()))
    return max(bounds)


def _classes(topology: Topology) -> list[tuple[int, int]]:
    """Capacities of ranks, and the next lower one of each, 0 below the least: documents of more tokens need such ranks."""
    kinds = np.unique(topology.capacities)
    chosen = np.unique(np.linspace(0, len(kinds) - 1, min(len(kinds), MOST_CLASSES)).astype(np.int64))
    lower = np.append(0, kinds[:-1])
    return list(zip(kinds[chosen].tolist(), lower[chosen].tolist()))


def _bound_of_waits(
    times: np.ndarray, before: np.ndarray, waiting: int, launch: int, speed: int, ranks: int, low: int
) -> int:
    """Return nanoseconds that ranks of a pipeline take at least.

    Args:
        times, before: int64 [documents], longest first, and [documents + 1], the sum of those before each.
        waiting: how many times a rank waits for its longest document.
        launch: nanoseconds that its micro-batch takes more.
        speed: per mille, of each of so many ranks.
        low: nanoseconds that are known to be needed.
    """
    high = low
    while not _do_all_work(high * speed // FULL, times, before, waiting, launch, ranks):
        low, high = high, 2 * high
    while high - low > low // PRECISION + 1:
        middle = (low + high) // 2
        if _do_all_work(middle * speed // FULL, times, before, waiting, launch, ranks):
            high = middle
        else:
            low = middle
    return low


@compiled
def _do_all_work(
    target: int, times: np.ndarray, before: np.ndarray, waiting: int, launch: int, ranks: int
) -> bool:  # pragma: no cover - compiled
    """Whether ranks that are filled with the longest documents first can do all work by `target`, nanoseconds at speed 1000."""
    done, i = 0, 0
    for _ in range(ranks):
        room = target - waiting * (times[i] + launch)
        if room < times[i]:
            return False
        done += room
        i = np.searchsorted(before, done, side="right") - 1
        if i >= len(times):
            return True
    return False
