"""When micro-batches run, predicted: on the costs of a plan alone, each begins as soon as all of its ranks are free.

In a pipeline, forward and backward pass a stage together here, as one: a quick estimate of what stages/stage_order.py plays in
full. Interpreted or compiled (compiled.py); integers only. Nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_longctx.planner.compiled import compiled, listed


@dataclass(frozen=True, eq=False, slots=True)
class Timeline:
    """When each micro-batch runs, predicted: it starts as soon as all of its ranks are free. Nanoseconds."""

    start: np.ndarray
    """int64 [micro-batches]. In a pipeline, in its first stage."""
    stop: np.ndarray
    """int64 [micro-batches]."""
    rank_busy: np.ndarray
    """int64 [world_size]: time that a rank computes, waiting excluded."""
    makespan: int
    """When the last micro-batch stops, in a pipeline in its last stage."""


@compiled
def play_costs(
    first_member: np.ndarray,
    rank: np.ndarray,
    cost: np.ndarray,
    round: np.ndarray,
    chunks: np.ndarray,
    world_size: int,
    lockstep: bool,
    stages: int,
) -> tuple[np.ndarray, np.ndarray, int]:  # pragma: no cover - compiled
    """start [m] and busy [world_size] in the first stage, and the makespan.

    A chunk enters a stage when it has left the one before and its ranks are free there. For ranks that share nothing, p
    stages take the sum of their micro-batches and p-1 times the longest chunk.
    """
    busy = np.zeros(world_size, np.int64)
    start = np.empty(len(cost), np.int64)
    first_chunk = np.concatenate((np.zeros(1, np.int64), np.cumsum(chunks)))
    left = listed(np.zeros(first_chunk[-1], np.int64))  # when each chunk left the stage before
    first_chunk, first_member, rank = listed(first_chunk), listed(first_member), listed(rank)
    cost, round, chunks = listed(cost), listed(round), listed(chunks)
    end = 0  # when the last micro-batch so far ends
    for stage in range(stages):
        free = listed(np.zeros(world_size, np.int64))
        met = 0  # when the ranks met last
        for i in range(len(cost)):
            if lockstep and i > 0 and round[i] != round[i - 1]:
                met = end
            begin = max(met, left[first_chunk[i]])
            for j in range(first_member[i], first_member[i + 1]):
                begin = max(begin, free[rank[j]])
            if chunks[i] == 1:  # nearly all of them: without divisions
                stop = begin + cost[i]
                left[first_chunk[i]] = stop
            else:
                stop = begin
                base, rest = cost[i] // chunks[i], cost[i] % chunks[i]
                for chunk in range(chunks[i]):
                    stop = max(stop, left[first_chunk[i] + chunk])
                    stop += base + rest * (chunk + 1) // chunks[i] - rest * chunk // chunks[i]
                    left[first_chunk[i] + chunk] = stop
            for j in range(first_member[i], first_member[i + 1]):
                free[rank[j]] = stop
            end = max(end, stop)
            if stage == 0:
                start[i] = begin
                for j in range(first_member[i], first_member[i + 1]):
                    busy[rank[j]] += cost[i]
    return start, busy, end
