"""A pipeline of p stages for every rank: when each stage runs forward and backward of each micro-batch.

One forward, one backward (1F1B): stage s holds at most p - s micro-batches between their forward and their backward, and
prefers a backward where it has one. A stage takes micro-batches in the rank's order, forward and backward; one that
several ranks share runs on the same stage of all of them at the same time.

    p = 2, micro-batches 0, 1, 2:     stage 0   F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
                                      stage 1   .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .

No deadlock: the last stage holds one micro-batch, whose backward can run at once, so the last stage always becomes free;
then the stage before it can send on all that it holds, and so on to the first. Because all ranks follow one global order
of micro-batches, the first of those that wait is the next of all its ranks.

Compiled with numba. Events of the same time come in the order of micro-batches, then stages.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from hf_longctx.planner.compiled import compiled

FORWARD, BACKWARD, ARRIVED = 0, 1, 2
"""What an event ends: a forward, a backward, or (ARRIVED + either) the journey of what it needs."""

Events = list[tuple[float, int, int, int]]
"""A heap of (seconds, micro-batch, stage, what)."""


class Pipelines(NamedTuple):
    """What runs where, and what has begun."""

    first_member: np.ndarray
    """int64 [m + 1]"""
    rank: np.ndarray
    """int64 [k]"""
    queue: np.ndarray
    """int64 [k]: micro-batches of rank 0 in its order, then those of rank 1 ..."""
    first_of_rank: np.ndarray
    """int64 [world_size + 1]: where each rank's begin."""
    seconds: np.ndarray
    """[2, m]: forward and backward on one stage."""
    start: np.ndarray
    """[m]: of forward in the first stage."""
    begun: np.ndarray
    """int64 [2, world_size, stages]: forwards and backwards that have begun."""
    running: np.ndarray
    """bool [world_size, stages]"""
    arrived: np.ndarray
    """bool [2, m, stages]: whether what forward or backward needs is there."""


def play_stages(
    first_member: np.ndarray, rank: np.ndarray, world_size: int, stages: int, seconds: np.ndarray, travel: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float]:
    """start [m], of forward in the first stage; stop [m], of backward in it; when all has ended.

    Args:
        first_member, rank: of StepPlan.
        seconds: [2, m], of forward and of backward on one stage.
        travel: [m], seconds of activations, or of their gradients, from stage to stage.
    """
    micro_batches = len(first_member) - 1
    by_rank = np.argsort(rank, kind="stable")
    pipelines = Pipelines(
        first_member=first_member,
        rank=rank,
        queue=np.repeat(np.arange(micro_batches), np.diff(first_member))[by_rank],
        first_of_rank=np.searchsorted(rank[by_rank], np.arange(world_size + 1)),
        seconds=seconds,
        start=np.full(micro_batches, np.inf),
        begun=np.zeros((2, world_size, stages), np.int64),
        running=np.zeros((world_size, stages), np.bool_),
        arrived=np.zeros((2, micro_batches, stages), np.bool_),
    )
    stop, end = _play(pipelines, travel)
    assert np.isfinite(stop).all(), "micro-batches wait for each other: their ranks do not run them in one global order"
    return pipelines.start, stop, end


@compiled
def _play(pipelines: Pipelines, travel: np.ndarray) -> tuple[np.ndarray, float]:  # pragma: no cover - compiled
    first_member, rank, running, arrived = pipelines.first_member, pipelines.rank, pipelines.running, pipelines.arrived
    world_size, stages = running.shape
    stop = np.full(len(travel), np.inf)
    events = [(0.0, 0, 0, 0)]
    events.pop()
    now = end = 0.0
    arrived[FORWARD, :, 0] = True
    for r in range(world_size):
        _begin(r, 0, now, pipelines, events)
    while len(events) > 0:
        now, i, stage, what = heapq.heappop(events)
        if what >= ARRIVED:
            arrived[what - ARRIVED, i, stage] = True
            _begin(rank[first_member[i]], stage, now, pipelines, events)
            continue
        end = max(end, now)
        for j in range(first_member[i], first_member[i + 1]):
            running[rank[j], stage] = False
        if what == FORWARD and stage + 1 == stages:
            arrived[BACKWARD, i, stage] = True
        elif what == FORWARD:
            heapq.heappush(events, (now + travel[i], i, stage + 1, ARRIVED + FORWARD))
        elif stage > 0:
            heapq.heappush(events, (now + travel[i], i, stage - 1, ARRIVED + BACKWARD))
        else:
            stop[i] = now
        for j in range(first_member[i], first_member[i + 1]):
            _begin(rank[j], stage, now, pipelines, events)
    return stop, end


@compiled
def _begin(r: int, stage: int, now: float, pipelines: Pipelines, events: Events) -> None:  # pragma: no cover - compiled
    """This stage of rank r begins what it can, if anything: its next backward, else its next forward."""
    if pipelines.running[r, stage]:
        return
    for kind in (BACKWARD, FORWARD):
        at = pipelines.first_of_rank[r] + pipelines.begun[kind, r, stage]
        if at < pipelines.first_of_rank[r + 1] and _can_begin(kind, pipelines.queue[at], stage, pipelines):
            i = pipelines.queue[at]
            for j in range(pipelines.first_member[i], pipelines.first_member[i + 1]):
                pipelines.running[pipelines.rank[j], stage] = True
                pipelines.begun[kind, pipelines.rank[j], stage] += 1
            if kind == FORWARD and stage == 0:
                pipelines.start[i] = now
            heapq.heappush(events, (now + pipelines.seconds[kind, i], i, stage, kind))
            return


@compiled
def _can_begin(kind: int, i: int, stage: int, pipelines: Pipelines) -> bool:  # pragma: no cover - compiled
    """Whether micro-batch i is the next of all its ranks, which are all free, and what it needs has arrived."""
    if not pipelines.arrived[kind, i, stage]:
        return False
    stages = pipelines.running.shape[1]
    for j in range(pipelines.first_member[i], pipelines.first_member[i + 1]):
        r = pipelines.rank[j]
        forwards, backwards = pipelines.begun[FORWARD, r, stage], pipelines.begun[BACKWARD, r, stage]
        at = pipelines.first_of_rank[r] + (forwards if kind == FORWARD else backwards)
        if pipelines.running[r, stage] or at == pipelines.first_of_rank[r + 1] or pipelines.queue[at] != i:
            return False
        if kind == FORWARD and forwards - backwards >= stages - stage:
            return False
    return True
