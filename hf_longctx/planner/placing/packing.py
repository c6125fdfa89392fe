"""Whole documents: on which rank each of them lies, and in which micro-batch.

Documents come longest first. Each goes to the rank that would be done with it soonest; then the documents of a rank are
packed into micro-batches of at most its capacity, either best fit, for few micro-batches, or evenly, for a pipeline,
which waits for its longest one.

Interpreted or compiled (planner/compiled.py); integers only. Nothing is sent.
"""

from __future__ import annotations

import numpy as np

from hf_longctx.planner.compiled import compiled, listed

OPEN_PACKS = 64
"""Micro-batches of a rank that are tried for a document. Those before them are nearly full, as documents mostly get shorter: they
come by falling time, and one with fewer labels may have more tokens."""

HEAPS_TOGETHER = 16
"""Neighbours in speed: 65,800 documents on 1,217 ranks of 214 speeds are spread in 57 ms, and in 155 without."""

FINEST = 8
"""Even micro-batches hold an eighth of a rank's tokens or more, on average: matrix products of few tokens are slow, and a
cost model knows only their launches."""


@compiled
def spread_whole(times: np.ndarray, loads: np.ndarray, speeds: np.ndarray) -> np.ndarray:  # pragma: no cover - compiled
    """Rank of each document, int64 [documents]; adds to `loads` (int64 [world_size], nanoseconds).

    times: int64 [documents], nanoseconds at speed 1000, longest first. speeds: int64 [world_size], per mille.

    Ranks of equal speed wait in one heap, the least loaded on top; ties go to the lower rank. An entry is load and rank
    in one integer, and has four children: half the time of a heap of pairs with two. Of HEAPS_TOGETHER heaps, none is looked
    at where the least load of all and the speed of the fastest would not do.
    """
    world_size = len(loads)
    if len(times) == 0:
        return np.empty(0, np.int64)
    bits = 1
    while 1 << bits < world_size:
        bits += 1
    # Loads that would leave no bits for the rank are counted in larger units.
    highest = loads.max() // 2 + times.sum() // speeds.sum() * 1000 + times[0] * 1000 // speeds.min()  # half of it
    coarse = 0
    while highest >> coarse >= 1 << (60 - bits):
        coarse += 1
    by_speed = np.argsort(-speeds, kind="mergesort")
    opens = np.flatnonzero(np.append(True, np.diff(speeds[by_speed]) != 0))
    sizes = np.diff(np.append(opens, world_size))
    first = opens + 4 * np.arange(len(opens))  # four entries after each heap are never chosen
    heap_speed = speeds[by_speed[opens]]
    never = np.iinfo(np.int64).max
    entries = np.full(world_size + 4 * len(opens), never)
    for heap in range(len(opens)):
        for i in range(sizes[heap]):
            rank = by_speed[opens[heap] + i]
            entries[first[heap] + i] = (loads[rank] >> coarse << bits) | rank
        entries[first[heap] : first[heap] + sizes[heap]].sort()
    rank_of = (1 << bits) - 1
    chosen = np.empty(len(times), np.int64)
    times, busy, entries = listed(times), listed(loads), listed(entries)
    heaps = len(first)
    lowest = np.full(-(-heaps // HEAPS_TOGETHER), never)
    for heap in range(heaps):
        lowest[heap // HEAPS_TOGETHER] = min(lowest[heap // HEAPS_TOGETHER], entries[first[heap]])
    first, sizes, heap_speed, lowest = listed(first), listed(sizes), listed(heap_speed), listed(lowest)
    for i in range(len(times)):
        best, raised = 0, never
        for several in range(len(lowest)):
            begin, end = several * HEAPS_TOGETHER, min((several + 1) * HEAPS_TOGETHER, heaps)
            # The first of these heaps is that of the fastest ranks.
            if (
                heaps > HEAPS_TOGETHER
                and lowest[several] + (times[i] * 1000 // heap_speed[begin] >> coarse << bits) >= raised
            ):
                continue
            for heap in range(begin, end):
                done = entries[first[heap]] + (times[i] * 1000 // heap_speed[heap] >> coarse << bits)
                if done < raised:
                    best, raised = heap, done
        begin, size = first[best], sizes[best]
        rank = entries[begin] & rank_of
        chosen[i] = rank
        busy[rank] += times[i] * 1000 // heap_speed[best]
        place = 0
        while 4 * place + 1 < size:  # the raised entry sinks to its place
            child = begin + 4 * place + 1
            least = child
            for other in range(child + 1, child + 4):
                if entries[other] < entries[least]:
                    least = other
            if entries[least] >= raised:
                break
            entries[begin + place] = entries[least]
            place = least - begin
        entries[begin + place] = raised
        if heaps > HEAPS_TOGETHER:
            several = best // HEAPS_TOGETHER
            lowest[several] = never
            for heap in range(several * HEAPS_TOGETHER, min((several + 1) * HEAPS_TOGETHER, heaps)):
                lowest[several] = min(lowest[several], entries[first[heap]])
    loads[:] = busy
    return chosen


@compiled
def pack(
    place: np.ndarray,
    lengths: np.ndarray,
    times: np.ndarray,
    capacity: np.ndarray,
    chunks: np.ndarray,
    room_in_time: int,
    even: bool,
) -> tuple[np.ndarray, int]:  # pragma: no cover - compiled
    """Micro-batch of each document, numbered from 0 in the order of `place`, and their number.

    Args:
        place: int64 [documents], ascending: documents of one place share a rank, and what they run before.
        lengths, times: int64 [documents]: tokens and nanoseconds, by falling time within each place.
        capacity: int64 [documents]: most tokens in a micro-batch of the document's rank.
        chunks: int64 [documents]: one that runs in several is a micro-batch by itself.
        room_in_time: nanoseconds that an even micro-batch should not exceed.
        even: equal times matter, not only few micro-batches.
    """
    micro_batch_of = np.empty(len(lengths), np.int64)
    # Even packs may stay empty, where offload lets each document exceed the capacity: as many as documents.
    room, filled = listed(np.zeros(2 * len(lengths), np.int64)), listed(np.zeros(2 * len(lengths), np.int64))
    place, lengths, times = listed(place), listed(lengths), listed(times)
    capacity, chunks = listed(capacity), listed(chunks)
    count = begin = 0
    while begin < len(lengths):
        end, tokens, time, documents = begin, 0, 0, 0
        while end < len(lengths) and place[end] == place[begin]:
            if chunks[end] == 1:
                tokens += lengths[end]
                time += times[end]
                documents += 1
            end += 1
        first = count
        if even:
            fewest = -(-tokens // capacity[begin])
            for _ in range(min(max(fewest, min(-(-time // room_in_time), FINEST * fewest)), documents)):
                room[count], filled[count] = capacity[begin], 0
                count += 1
        for i in range(begin, end):
            if chunks[i] > 1:
                room[count], filled[count], micro_batch_of[i] = 0, times[i], count
                count += 1
                continue
            best = -1
            for candidate in range(first if even else max(first, count - OPEN_PACKS), count):
                if room[candidate] < lengths[i]:
                    continue
                if best < 0 or (filled[candidate] < filled[best] if even else room[candidate] < room[best]):
                    best = candidate
            if best < 0:
                best = count
                room[count], filled[count] = capacity[begin], 0
                count += 1
            room[best] -= lengths[i]
            filled[best] += times[i]
            micro_batch_of[i] = best
        if even:  # fewer documents than micro-batches leave some empty
            kept = first
            renamed = np.empty(count - first, np.int64)
            for candidate in range(first, count):
                renamed[candidate - first] = kept
                if filled[candidate] > 0:
                    kept += 1
            for i in range(begin, end):
                micro_batch_of[i] = renamed[micro_batch_of[i] - first]
            count = kept
        begin = end
    return micro_batch_of, count


@compiled
def first_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:  # pragma: no cover - compiled
    """int64 [documents]: the first pack, counted from 0, that has room for each document; none is longer than `capacity`.

    A binary tree knows the most room of any pack in each of its halves: logarithmic time per document.
    """
    leaves = 1
    while leaves < len(lengths):
        leaves *= 2
    most_room = np.full(2 * leaves, capacity)
    pack_of = np.empty(len(lengths), np.int64)
    for i in range(len(lengths)):
        node = 1
        while node < leaves:
            node *= 2
            if most_room[node] < lengths[i]:
                node += 1
        pack_of[i] = node - leaves
        most_room[node] -= lengths[i]
        while node > 1:
            node //= 2
            most_room[node] = max(most_room[2 * node], most_room[2 * node + 1])
    return pack_of


@compiled
def grouped(group: np.ndarray, groups: int) -> tuple[np.ndarray, np.ndarray]:  # pragma: no cover - compiled
    """(order, first): order[first[g]:first[g + 1]] are the members of group g, ascending. A stable sort by counting."""
    first = np.zeros(groups + 1, np.int64)
    group = listed(group)
    for i in range(len(group)):
        first[group[i] + 1] += 1
    for i in range(groups):
        first[i + 1] += first[i]
    order = np.empty(len(group), np.int64)
    free = first[:-1].copy()
    for i in range(len(group)):
        order[free[group[i]]] = i
        free[group[i]] += 1
    return order, first


@compiled
def sums(group: np.ndarray, values: np.ndarray, groups: int) -> np.ndarray:  # pragma: no cover - compiled
    """int64 [groups]: sum of the values of each group."""
    total = np.zeros(groups, np.int64)
    group = listed(group)
    for i in range(len(group)):
        total[group[i]] += values[i]
    return total


def joined_rows(first: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 [chosen + 1] and int64: where the entries of each chosen row begin if they follow each other, and which they are;
    those of row i are first[i] to first[i + 1]."""
    counts = first[chosen + 1] - first[chosen]
    begins = np.append(0, np.cumsum(counts))
    return begins, np.arange(begins[-1]) + np.repeat(first[chosen] - begins[:-1], counts)
