"""Short documents that wait until all others have their rounds, and then fill what those leave.

Interpreted or compiled (planner/compiled.py); integers only. Nothing is sent.
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace

import numpy as np

from hf_longctx.planner.compiled import compiled, listed
from hf_longctx.planner.cost.group_times import PlacementContext, group_time
from hf_longctx.planner.placing.rank_shares import proportional_shares


@compiled
def fill_gaps(
    begin: int,
    lengths: np.ndarray,
    tokens: np.ndarray,
    alone: np.ndarray,
    round_of: np.ndarray,
    rounds: int,
    context: PlacementContext,
    first_rank: np.ndarray,
    size: np.ndarray,
) -> None:  # pragma: no cover - compiled
    """Puts documents from `begin` on, longest first, where a rank has most time left before its round ends.

    Such a document's size is minus the distance of its rank from the first of its micro-batch. Ranks without a
    micro-batch in a round are left out: a round of its own would need them too.
    """
    world_size = len(context.speeds)
    # A slot is a rank in a round: round * world_size + rank.
    ends = np.zeros(rounds * world_size, np.int64)
    room = np.zeros(rounds * world_size, np.int64)
    starts = np.full(rounds * world_size, -1)
    heights = np.zeros(rounds, np.int64)
    for i in range(begin):
        first = round_of[i] * world_size + first_rank[i]
        ranks = slice(first_rank[i], first_rank[i] + size[i])
        if size[i] == 1:
            if starts[first] < 0:
                ends[first] = context.micro_batch * 1000 // context.speeds[first_rank[i]] + 1
                room[first] = context.capacities[first_rank[i]]
            ends[first] += alone[i] * 1000 // context.speeds[first_rank[i]] + 1
            room[first] -= tokens[i]
        else:
            time = group_time(lengths[i], first_rank[i], size[i], context)
            ends[first : first + size[i]] = time
            if context.uniform:
                room[first : first + size[i]] = context.capacities[0] - -(-tokens[i] // size[i])
            else:
                shares = proportional_shares(tokens[i], context.speeds[ranks], context.capacities[ranks])
                room[first : first + size[i]] = context.capacities[ranks] - shares
        starts[first : first + size[i]] = first_rank[i]
        heights[round_of[i]] = max(heights[round_of[i]], ends[first])
    ends, heights, room, starts = listed(ends), listed(heights), listed(room), listed(starts)
    tokens, alone, speeds = listed(tokens), listed(alone), listed(context.speeds)
    # A heap by ends - heights, which is negative: most time left first. Times are rounded up by 1, so that no round grows.
    gaps = [
        (ends[slot] - heights[slot // world_size], np.int64(slot))
        for slot in range(len(ends))
        if starts[slot] >= 0 and room[slot] > 0 and ends[slot] < heights[slot // world_size]
    ]
    heapify(gaps)
    for i in range(begin, len(tokens)):
        while len(gaps):
            left, slot = gaps[0]
            rank = slot % world_size
            time = alone[i] * 1000 // speeds[rank] + 1
            if tokens[i] > room[slot]:
                heappop(gaps)  # shorter documents may find other gaps
                continue
            if time <= -left:
                room[slot] -= tokens[i]
                heapreplace(gaps, (left + time, slot))
                round_of[i], first_rank[i] = slot // world_size, starts[slot]
                size[i] = starts[slot] - rank
            break  # placed; or, on equal ranks, too long for any other gap as well
