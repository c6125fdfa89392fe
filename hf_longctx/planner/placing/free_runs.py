"""Runs of ranks that are free at the same time, as heaps in flat arrays: what niches.py takes ranks from.

A run says when its units are free (`height`, nanoseconds), how many they are (`width`), and the first ranks of the first and the
last one (`head`, `tail`), from one of which `following` leads to the other. These are int64 arrays for all domains together; the
runs of a domain lie at `root` and behind it, the one that is free first at `root`.

Domains wait in a heap of their own, `queue`, whose keys are when each has free ranks.

Interpreted or compiled (planner/compiled.py); integers only. Nothing is sent.
"""

from __future__ import annotations

import numpy as np

from hf_longctx.planner.compiled import borrowing, compiled


@borrowing
@compiled
def is_free_with_next(root: int, runs: int, height: np.ndarray) -> bool:  # pragma: no cover - compiled
    """Whether the first of so many runs of a heap is free at the same time as another."""
    return (runs > 1 and height[root + 1] == height[root]) or (runs > 2 and height[root + 2] == height[root])


@borrowing
@compiled
def join_next(
    root: int,
    runs: int,
    height: np.ndarray,
    width: np.ndarray,
    head: np.ndarray,
    tail: np.ndarray,
    following: np.ndarray,
) -> None:  # pragma: no cover - compiled
    """Let the first of so many runs of a heap wait for the next one: both are one from then on, its own units first."""
    first, last, units = head[root], tail[root], width[root]
    remove_first(root, runs - 1, height, width, head, tail)
    following[last] = head[root]
    head[root] = first
    width[root] += units


@borrowing
@compiled
def remove_first(
    root: int, others: int, height: np.ndarray, width: np.ndarray, head: np.ndarray, tail: np.ndarray
) -> None:  # pragma: no cover - compiled
    """Take the first run, at `root`, out of a heap, which has so many others."""
    last = root + others
    free_at, units, first, newest = height[last], width[last], head[last], tail[last]
    place = 0
    while 2 * place + 1 < others:
        child = 2 * place + 1
        if child + 1 < others and height[root + child + 1] < height[root + child]:
            child += 1
        if height[root + child] >= free_at:
            break
        height[root + place], width[root + place] = height[root + child], width[root + child]
        head[root + place], tail[root + place] = head[root + child], tail[root + child]
        place = child
    height[root + place], width[root + place], head[root + place], tail[root + place] = free_at, units, first, newest


@borrowing
@compiled
def sift_up(
    root: int, others: int, height: np.ndarray, width: np.ndarray, head: np.ndarray, tail: np.ndarray
) -> None:  # pragma: no cover - compiled
    """Let the last run of a heap at `root`, behind so many others, find its place."""
    place = others
    while place > 0 and height[root + place] < height[root + (place - 1) // 2]:
        child, parent = root + place, root + (place - 1) // 2
        height[child], height[parent] = height[parent], height[child]
        width[child], width[parent] = width[parent], width[child]
        head[child], head[parent] = head[parent], head[child]
        tail[child], tail[parent] = tail[parent], tail[child]
        place = (place - 1) // 2


@borrowing
@compiled
def heapify(queue: np.ndarray, key: np.ndarray, entries: int) -> None:  # pragma: no cover - compiled
    """Make the first entries of a queue a heap: of indices into `key`, the one of the least key first, of equals the lower."""
    for place in range(entries // 2 - 1, -1, -1):
        sink(queue, key, place, entries)


@borrowing
@compiled
def sink(queue: np.ndarray, key: np.ndarray, place: int, entries: int) -> None:  # pragma: no cover - compiled
    """Let the entry at `place` of a heap, see `heapify`, sink to where those above it are less."""
    entry = queue[place]
    while 2 * place + 1 < entries:
        child = 2 * place + 1
        least = queue[child]
        if child + 1 < entries:
            other = queue[child + 1]
            if key[other] < key[least] or (key[other] == key[least] and other < least):
                child, least = child + 1, other
        if key[entry] < key[least] or (key[entry] == key[least] and entry < least):
            break
        queue[place] = least
        place = child
    queue[place] = entry


@borrowing
@compiled
def put(entry: int, queue: np.ndarray, key: np.ndarray, entries: int) -> int:  # pragma: no cover - compiled
    """Put an entry into a heap, see `heapify`, that has so many; return how many it has then."""
    place = entries
    while place > 0:
        parent = queue[(place - 1) // 2]
        if key[parent] < key[entry] or (key[parent] == key[entry] and parent < entry):
            break
        queue[place] = parent
        place = (place - 1) // 2
    queue[place] = entry
    return entries + 1


@borrowing
@compiled
def take_first(queue: np.ndarray, key: np.ndarray, entries: int) -> int:  # pragma: no cover - compiled
    """Take the first entry out of a heap, see `heapify`, that has so many; return how many are left."""
    queue[0] = queue[entries - 1]
    sink(queue, key, 0, entries - 1)
    return entries - 1
