"""Documents dealt to several rounds at once, so that all ranks of all rounds are busy for about as long.

Rounds that are filled one after the other each hold documents of about one length, since the longest come first, and the ranks
of a round end at different times where whole documents are few on each. Here, documents are dealt to the ranks of all rounds as
to so many more ranks:

    height  +-----------+-----------+        A and B are split, each over as few ranks as end within the height;
            | A A h C D | B B B F g |        the others, longest first, go to the rank that is done soonest and
            | A A e C D | B B B F G |        has tokens left, beside A and B too
            +-----------+-----------+
              round 0     round 1

Groups and ranks of about the same time then share a round, the longest first. Equal ranks only.

Interpreted or compiled (planner/compiled.py); integers only. Nothing is sent.
"""

from __future__ import annotations

from heapq import heappop, heappush, heapreplace
from typing import Any

import numpy as np

from hf_longctx.planner.compiled import borrowing, compiled
from hf_longctx.planner.cost.group_times import PlacementContext, equal_time
from hf_longctx.planner.placing.rounds.gaps import Free, give_all_back, nothing_taken, take
from hf_longctx.planner.placing.rounds.levels import first_whole, group_size
from hf_longctx.planner.placing.rounds.waiting_documents import Waiting

PASSED_OVER = 1000
"""Groups that find no room in what is left of a round, after which it is closed."""


@compiled
def deal(
    rounds: int,
    height: int,
    even: bool,
    documents: Waiting,
    context: PlacementContext,
    round_of: np.ndarray,
    first_rank: np.ndarray,
    size: np.ndarray,
) -> np.ndarray:  # pragma: no cover - compiled
    """Deal all documents to so many rounds, or a few more where groups do not fit into nodes side by side.

    Args:
        even: whether groups share nodes evenly.
        round_of, first_rank, size: int64 [documents], filled: the round of each, the first rank of its micro-batch, and how many
            ranks it is split over. Of a whole document beside a split one: minus the distance of its rank from the first.

    Returns:
        int64 [rounds]: when each ends, nanoseconds; empty if documents find no room.
    """
    nothing, world_size, count = np.empty(0, np.int64), len(context.speeds), len(documents.lengths)
    whole = first_whole(height, documents, context)
    sizes, likely = np.empty(whole, np.int64), 0
    for i in range(whole):
        likely = group_size(i, height, even, likely, documents, context)
        if likely == 0:
            return nothing
        sizes[i] = likely
    # Places are ranks of rounds, as yet without a number: those of groups, one group after the other, then all others.
    first_place = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes)))
    places, split = rounds * world_size, first_place[whole]
    if split > places:
        return nothing
    loads, room = np.full(places, context.micro_batch), np.full(places, context.capacity)
    for i in range(whole):
        loads[first_place[i] : first_place[i + 1]] = equal_time(documents.lengths[i], sizes[i], context)
        room[first_place[i] : first_place[i + 1]] -= -(-documents.footprints[i] // sizes[i])
    place_of = np.empty(count, np.int64)
    if not _deal_whole(whole, documents, loads, room, place_of):
        return nothing
    used = np.zeros(places, np.bool_)
    used[:split] = True
    used[place_of[whole:]] = True
    # A unit is what lies in one round: a group, or a single place.
    times, ranks = np.zeros(whole + places - split, np.int64), np.ones(whole + places - split, np.int64)
    for i in range(whole):
        times[i], ranks[i] = loads[first_place[i] : first_place[i + 1]].max(), sizes[i]
    times[whole:] = np.where(used[split:], loads[split:], 0)
    round_of_unit, first_of_unit = np.full(len(times), -1), np.full(len(times), -1)
    ends = _share_rounds(times, ranks, context, round_of_unit, first_of_unit)
    round_of[:whole], first_rank[:whole], size[:whole] = round_of_unit[:whole], first_of_unit[:whole], sizes
    group_of = np.empty(split, np.int64)
    for i in range(whole):
        group_of[first_place[i] : first_place[i + 1]] = i
    for i in range(whole, count):
        place = place_of[i]
        unit = group_of[place] if place < split else place - split + whole
        round_of[i], first_rank[i] = round_of_unit[unit], first_of_unit[unit]
        size[i] = first_place[unit] - place if place < split else 1
    return ends


@compiled
def _deal_whole(
    begin: int, documents: Waiting, loads: np.ndarray, room: np.ndarray, place_of: np.ndarray
) -> bool:  # pragma: no cover - compiled
    """Give documents from `begin` on, longest first, the place that is done soonest of those that have tokens left; False if one
    has none.

    Args:
        loads, room: int64 [places], changed: nanoseconds until each is done, and tokens that it has left.
        place_of: int64 [documents], filled from `begin` on.
    """
    order = np.argsort(loads, kind="mergesort")
    soonest: Any = [(loads[place], place) for place in order]  # a sorted list is a heap
    # Places without room for one document may have room for a later one, which is shorter: the most room first.
    full: Any = [(np.int64(0), np.int64(0))]
    full.pop()
    for i in range(begin, len(documents.lengths)):
        tokens = documents.footprints[i]
        while len(full) > 0 and -full[0][0] >= tokens:
            place = heappop(full)[1]
            heappush(soonest, (loads[place], place))
        while len(soonest) > 0 and room[soonest[0][1]] < tokens:
            place = heappop(soonest)[1]
            heappush(full, (-room[place], place))
        if len(soonest) == 0:
            return False
        place = soonest[0][1]
        place_of[i] = place
        loads[place] += documents.alone[i]
        room[place] -= tokens
        heapreplace(soonest, (loads[place], place))
    return True


@compiled
def _share_rounds(
    times: np.ndarray, ranks: np.ndarray, context: PlacementContext, round_of: np.ndarray, first_rank: np.ndarray
) -> np.ndarray:  # pragma: no cover - compiled
    """Let units of about the same time share rounds, the longest first; returns int64 [rounds]: when each ends.

    Args:
        times, ranks: int64 [units]: nanoseconds, 0 for nothing, and how many ranks each needs.
        round_of, first_rank: int64 [units], -1 each; filled.
    """
    units, world_size = len(times), len(context.speeds)
    # Units without a round are a list, by falling time; its head is no unit.
    following, head = np.full(units + 1, -1), units
    last = head
    for unit in np.argsort(-times, kind="mergesort"):
        if times[unit] == 0:
            break
        following[last] = unit
        last = unit
    free = nothing_taken(context)
    chosen = np.empty(world_size, np.int64)
    ends: Any = [np.int64(0)]
    ends.pop()
    while following[head] >= 0:
        give_all_back(free)
        left, passed, taken, end = world_size, 0, 0, 0
        unit = following[head]
        while unit >= 0 and left > 0 and passed < PASSED_OVER:
            total, count = 0, 0
            while unit >= 0 and total < left and passed < PASSED_OVER:
                if ranks[unit] <= left - total:
                    chosen[count] = unit
                    count += 1
                    total += ranks[unit]
                else:
                    passed += 1
                unit = following[unit]
            chosen[:count] = chosen[:count][np.argsort(-ranks[chosen[:count]], kind="mergesort")]
            _take_ranks(count, chosen, ranks, len(ends), free, context, round_of, first_rank)
            for index in range(count):
                one = chosen[index]
                if round_of[one] >= 0:
                    left -= ranks[one]
                    taken += 1
                    end = max(end, times[one])
                else:
                    passed += 1
        ends.append(end)
        before, unit = head, following[head]
        while taken > 0:  # those that have a round now leave the list
            if round_of[unit] >= 0:
                following[before] = following[unit]
                taken -= 1
            else:
                before = unit
            unit = following[unit]
    return np.array(ends)


@borrowing
@compiled
def _take_ranks(
    count: int,
    chosen: np.ndarray,
    ranks: np.ndarray,
    round: int,
    free: Free,
    context: PlacementContext,
    round_of: np.ndarray,
    first_rank: np.ndarray,
) -> None:  # pragma: no cover - compiled
    """Give the first `count` of the chosen units, the widest first, ranks in a round, as far as they fit in there."""
    world_size, node = len(context.speeds), context.node
    for index in range(count):
        unit = chosen[index]
        if ranks[unit] > node or node == world_size:
            start = free.tail[0]
            if start + ranks[unit] > world_size or (start % node > 0 and node < world_size):
                continue
            free.tail[0] = start + ranks[unit]
        else:
            start = take(ranks[unit], -1, free, context)
            if start < 0:
                continue
        round_of[unit], first_rank[unit] = round, start
