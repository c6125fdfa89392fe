"""The events of stage_order.py: when each device of each rank begins which task, on integer costs.

A device that is free counts itself in for the next forward and the next backward of its queues. A task for which all ranks
of its micro-batch are counted in, and whose inputs have arrived, can begin: first all forwards, then backwards. All that ends
at one moment is looked at before anything begins.

Interpreted or compiled (planner/compiled.py); integers only. Nothing is sent.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from hf_longctx.planner.compiled import borrowing, compiled, listed
from hf_longctx.planner.topology import FULL

FORWARD, BACKWARD, ARRIVED = 0, 1, 2
"""Kinds of task, which are also what an event ends; ARRIVED + FORWARD or BACKWARD ends the journey of what that needs."""

Candidates = list[list[tuple[int, int]]]
"""Units and stages whose forward, or whose backward, could begin when they were put here."""


class Units(NamedTuple):
    """The u units of m micro-batches with k members."""

    first_member: np.ndarray
    """int64 [m + 1]"""
    rank: np.ndarray
    """int64 [k]"""
    tokens: np.ndarray
    """int64 [k]: what each member holds of its micro-batch, at most its capacity."""
    capacities: np.ndarray
    """int64 [world_size]: tokens."""
    first_unit: np.ndarray
    """int64 [m + 1]: micro-batch i has the units first_unit[i] to first_unit[i + 1]."""
    micro_batch: np.ndarray
    """int64 [u]"""
    costs: np.ndarray
    """int64 [2, u]: nanoseconds of forward and backward in the mean stage."""
    travel: np.ndarray
    """int64 [u]: nanoseconds of activations, or of their gradients, from stage to stage."""


class Queues(NamedTuple):
    """Entries that each rank's devices run, in this order, entry by entry: those of rank 0, then those of rank 1 ..."""

    first_of_rank: np.ndarray
    """int64 [world_size + 1]"""
    unit: np.ndarray
    """int64 [2, entries]: forward, backward."""
    virtual: np.ndarray
    """int64 [2, entries]: which of the device's stages."""
    tokens: np.ndarray
    """int64 [2, entries]: that the rank holds of the micro-batch."""


def queues_of(units: Units, world_size: int, devices: int, virtual: int) -> Queues:
    per_micro_batch = np.diff(units.first_unit) * virtual
    entries = np.bincount(units.rank, np.repeat(per_micro_batch, np.diff(units.first_member)), world_size)
    first_of_rank = np.concatenate([[0], np.cumsum(entries.astype(np.int64))])
    window = np.zeros(len(per_micro_batch), np.int64)
    if virtual > 1:
        window = _windows(units.first_member, units.rank, world_size, devices)
    return Queues(first_of_rank, *_fill_queues(units, window, first_of_rank, virtual))


@compiled
def _windows(
    first_member: np.ndarray, rank: np.ndarray, world_size: int, most: int
) -> np.ndarray:  # pragma: no cover - compiled
    """int64 [m]: windows that ascend with each rank's micro-batches, at most so many of a rank in one; all its ranks agree."""
    window, count = np.zeros(world_size, np.int64), np.zeros(world_size, np.int64)
    windows = np.empty(len(first_member) - 1, np.int64)
    for i in range(len(windows)):
        ranks = rank[first_member[i] : first_member[i + 1]]
        windows[i] = (window[ranks] + (count[ranks] == most)).max()
        for r in ranks:
            count[r] = 1 if windows[i] > window[r] else count[r] + 1
            window[r] = windows[i]
    return windows


@compiled
def _fill_queues(
    units: Units, window: np.ndarray, first_of_rank: np.ndarray, virtual: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # pragma: no cover - compiled
    """unit, virtual and tokens of Queues."""
    world_size = len(first_of_rank) - 1
    unit = np.empty((2, first_of_rank[-1]), np.int64)
    stage = np.empty((2, first_of_rank[-1]), np.int64)
    tokens = np.empty((2, first_of_rank[-1]), np.int64)
    members = np.empty(len(units.rank), np.int64)
    for i in range(len(units.first_member) - 1):
        members[units.first_member[i] : units.first_member[i + 1]] = i
    by_rank = np.argsort(units.rank, kind="mergesort")
    at = 0
    for r in range(world_size):
        entry = first_of_rank[r]
        while at < len(by_rank) and units.rank[by_rank[at]] == r:
            end = at
            while (
                end < len(by_rank)
                and units.rank[by_rank[end]] == r
                and window[members[by_rank[end]]] == window[members[by_rank[at]]]
            ):
                end += 1
            for j in range(virtual):
                for member in range(at, end):
                    i = members[by_rank[member]]
                    first, stop = units.first_unit[i], units.first_unit[i + 1]
                    for u in range(first, stop):
                        unit[FORWARD, entry], stage[FORWARD, entry] = u, j
                        unit[BACKWARD, entry], stage[BACKWARD, entry] = first + stop - 1 - u, virtual - 1 - j
                        tokens[:, entry] = units.tokens[by_rank[member]]
                        entry += 1
            at = end
    return unit, stage, tokens


class State(NamedTuple):
    """The task that a device of a rank runs now, and those that wait; one entry for each (rank, device), or (unit, stage), in
    this order, and for each kind before that."""

    running: np.ndarray
    """[world_size * devices]: 0 or 1."""
    begun: np.ndarray
    """int64 [2 * world_size * devices]: entries of each of its queues that have begun."""
    tokens_in_flight: np.ndarray
    """int64 [world_size * devices]: tokens of micro-batches between forward and backward."""
    offered: np.ndarray
    """[2 * world_size * devices]: 1 where the device is counted in `ready` for the next entry of its queue."""
    ready: np.ndarray
    """int64 [2 * u * stages]: devices that could begin this forward or backward now."""
    arrived: np.ndarray
    """[2 * u * stages]: 0 or 1."""


@borrowing
@compiled
def _stage_time(cost: int, weight: int) -> int:  # pragma: no cover - compiled
    """Cost times weight, per mille, rounded down; the product may exceed 64 bits."""
    return cost // FULL * weight + cost % FULL * weight // FULL


@compiled
def play_tasks(
    units: Units,
    queues: Queues,
    costs: np.ndarray,
    stage_weights: np.ndarray,
    most_in_flight: np.ndarray,
    world_size: int,
    devices: int,
    apart: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:  # pragma: no cover - compiled
    """start, begun and stop of Played; how many tasks never began.

    apart: all forwards of a device come before its backwards.
    """
    stages, count, entries = len(stage_weights), len(units.micro_batch), queues.first_of_rank[-1]
    slots, tasks_of_kind = world_size * devices, count * stages
    units = Units(
        listed(units.first_member),
        listed(units.rank),
        units.tokens,
        listed(units.capacities),
        listed(units.first_unit),
        listed(units.micro_batch),
        units.costs,
        listed(units.travel),
    )
    lines = Queues(
        listed(queues.first_of_rank),
        listed(queues.unit.ravel()),
        listed(queues.virtual.ravel()),
        listed(queues.tokens.ravel()),
    )
    state = State(
        listed(np.zeros(slots, np.int64)),
        listed(np.zeros(2 * slots, np.int64)),
        listed(np.zeros(slots, np.int64)),
        listed(np.zeros(2 * slots, np.int64)),
        listed(np.zeros(2 * tasks_of_kind, np.int64)),
        listed(np.zeros(2 * tasks_of_kind, np.int64)),
    )
    cost, weight, most = listed(costs.ravel()), listed(stage_weights), listed(most_in_flight)
    start, begun = np.full((2, count, stages), -1), np.full((2, count, stages), -1)
    stop = np.zeros(len(units.first_unit) - 1, np.int64)
    left = 2 * count * stages
    for u in range(count):
        state.arrived[u * stages] = 1  # forwards of the first stage
    # Tasks that could begin: (unit, stage) of each kind.
    candidates = [[(0, 0)], [(0, 0)]]
    candidates[FORWARD].pop()
    candidates[BACKWARD].pop()
    events = [(0, 0, 0, 0)]
    events.pop()
    now = tasks = 0
    for r in range(world_size):
        for device in range(devices):
            _offer(r, device, units, lines, state, most, stages, apart, candidates)
    while True:
        for kind in (FORWARD, BACKWARD):
            for u, stage in candidates[kind]:
                i, device = units.micro_batch[u], stage % devices
                members = units.rank[units.first_member[i] : units.first_member[i + 1]]
                if state.ready[kind * tasks_of_kind + u * stages + stage] < len(members) or start[kind, u, stage] >= 0:
                    continue
                for r in members:
                    _withdraw(r, device, lines, state, devices, stages)
                    slot = r * devices + device
                    state.running[slot] = 1
                    entry = kind * entries + lines.first_of_rank[r] + state.begun[kind * slots + slot]
                    state.begun[kind * slots + slot] += 1
                    if u == units.first_unit[i]:
                        if kind == FORWARD:
                            state.tokens_in_flight[slot] += lines.tokens[entry]
                        else:
                            state.tokens_in_flight[slot] -= lines.tokens[entry]
                start[kind, u, stage], begun[kind, u, stage] = now, tasks
                tasks += 1
                left -= 1
                heapq.heappush(events, (now + _stage_time(cost[kind * count + u], weight[stage]), kind, u, stage))
            candidates[kind].clear()
        if len(events) == 0:
            break
        now = events[0][0]
        while len(events) > 0 and events[0][0] == now:
            _, what, u, stage = heapq.heappop(events)
            i, device = units.micro_batch[u], stage % devices
            if what >= ARRIVED:
                _arrive(what - ARRIVED, u, stage, units, state, stages, candidates)
                continue
            for r in units.rank[units.first_member[i] : units.first_member[i + 1]]:
                state.running[r * devices + device] = 0
                _offer(r, device, units, lines, state, most, stages, apart, candidates)
            later = now + units.travel[u]
            if what == FORWARD and stage + 1 == stages:
                _arrive(BACKWARD, u, stage, units, state, stages, candidates)
            elif what == FORWARD:
                heapq.heappush(events, (later, ARRIVED + FORWARD, u, stage + 1))
            elif stage > 0:
                heapq.heappush(events, (later, ARRIVED + BACKWARD, u, stage - 1))
            elif u == units.first_unit[i]:
                stop[i] = now
    return start, begun, stop, left


@compiled
def _arrive(
    kind: int, u: int, stage: int, units: Units, state: State, stages: int, candidates: Candidates
) -> None:  # pragma: no cover - compiled
    """Note that all that a task needs is there: it may begin if all of its ranks can."""
    i = units.micro_batch[u]
    task = (kind * len(units.micro_batch) + u) * stages + stage
    state.arrived[task] = 1
    if state.ready[task] == units.first_member[i + 1] - units.first_member[i]:
        candidates[kind].append((u, stage))


@compiled
def _offer(
    r: int,
    device: int,
    units: Units,
    lines: Queues,
    state: State,
    most_in_flight: np.ndarray,
    stages: int,
    apart: bool,
    candidates: Candidates,
) -> None:  # pragma: no cover - compiled
    """A free device of rank r counts itself in for the next forward and backward of its queues."""
    first, end = lines.first_of_rank[r], lines.first_of_rank[r + 1]
    devices, slots, entries = len(most_in_flight), len(state.running), lines.first_of_rank[-1]
    slot = r * devices + device
    for kind in (FORWARD, BACKWARD):
        at = first + state.begun[kind * slots + slot]
        if at == end:
            continue
        at += kind * entries
        u, stage = lines.unit[at], lines.virtual[at] * devices + device
        i = units.micro_batch[u]
        if kind == FORWARD and u == units.first_unit[i]:
            room = most_in_flight[device] * units.capacities[r]
            if state.tokens_in_flight[slot] + lines.tokens[at] > room:
                continue
        if kind == BACKWARD and apart and state.begun[slot] < end - first:
            continue
        state.offered[kind * slots + slot] = 1
        task = (kind * len(units.micro_batch) + u) * stages + stage
        state.ready[task] += 1
        if state.arrived[task] and state.ready[task] == units.first_member[i + 1] - units.first_member[i]:
            candidates[kind].append((u, stage))


@compiled
def _withdraw(
    r: int, device: int, lines: Queues, state: State, devices: int, stages: int
) -> None:  # pragma: no cover - compiled
    """A device that begins a task is no longer free for the next ones of its queues."""
    slots, slot = len(state.running), r * devices + device
    for kind in (FORWARD, BACKWARD):
        if state.offered[kind * slots + slot]:
            state.offered[kind * slots + slot] = 0
            at = kind * lines.first_of_rank[-1] + lines.first_of_rank[r] + state.begun[kind * slots + slot]
            task = kind * (len(state.ready) // 2) + lines.unit[at] * stages + lines.virtual[at] * devices + device
            state.ready[task] -= 1
