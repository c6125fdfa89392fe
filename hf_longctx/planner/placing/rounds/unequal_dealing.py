"""Documents dealt to several rounds at once where ranks are unequal.

dealing.py forms groups and then lets those of about the same time share a round: its ranks are alike. Here every place, a rank in
one of the rounds, can do what its speed allows within one height that all rounds have:

    rank     0 1 2 3 4 5 | 0 1 2 3 4 5        ranks 0 to 2 are fast, 3 to 5 slow
             A A d B B B | C f h E E i        A, B, C and E are too long for a rank; d, f, h, i and the
             round 0     | round 1            shorter ones stay whole

Documents come longest first. One that the first free rank, or a rank that is begun, still has time for stays whole on the one
that has most time; any other takes the fewest ranks from the first free one on, which is a fast one where ranks are in order of
speed. What finds no place within the height goes to the rank that has most time left of those that are begun, and makes that
round longer.

Interpreted or compiled (planner/compiled.py); integers only. Nothing is sent.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

import numpy as np

from hf_longctx.planner.compiled import borrowing, compiled, listed
from hf_longctx.planner.cost.group_times import PlacementContext, group_time
from hf_longctx.planner.placing.rank_blocks import smallest_group
from hf_longctx.planner.placing.rank_shares import proportional_shares
from hf_longctx.planner.placing.rounds.waiting_documents import Waiting, time_for, work_in


@compiled
def deal_to_unequal(
    rounds: int,
    height: int,
    documents: Waiting,
    context: PlacementContext,
    round_of: np.ndarray,
    first_rank: np.ndarray,
    size: np.ndarray,
) -> np.ndarray:  # pragma: no cover - compiled
    """Deal all documents to so many rounds.

    Args:
        round_of, first_rank, size: as of dealing.py's `deal`.

    Returns:
        int64 [rounds]: when each ends, nanoseconds; empty if a document finds no place, and no rank that is begun has room.
    """
    nothing, world_size, count = np.empty(0, np.int64), len(context.speeds), len(documents.lengths)
    speeds, capacities, node = context.speeds, context.capacities, context.node
    within = work_in(height, speeds) - context.micro_batch
    # By place: work (nanoseconds at speed 1000) and tokens that it has left, and the first rank of its group, -1 without one.
    left, room = np.empty(rounds * world_size, np.int64), np.empty(rounds * world_size, np.int64)
    for begin in range(0, rounds * world_size, world_size):
        left[begin : begin + world_size] = within
        room[begin : begin + world_size] = capacities
    left, room = listed(left), listed(room)
    group_begin = listed(np.full(rounds * world_size, -1))
    ends = np.zeros(rounds, np.int64)
    # Runs of ranks that hold nothing: (first rank, number). Each border of nodes cuts one at most, once in each round.
    runs = rounds
    most_runs = rounds * (world_size // node + 2)
    run_round, run_end = np.empty(most_runs, np.int64), np.full(most_runs, world_size)
    run_round[:rounds] = np.arange(rounds)
    free: Any = [(np.int64(0), np.int64(run)) for run in range(rounds)]
    narrow: Any = [(np.int64(0), np.int64(0), np.int64(0))]  # (first document that may fit, first rank, number)
    narrow.pop()
    begun: Any = [(np.int64(0), np.int64(0))]  # (-work left, place)
    begun.pop()
    full: Any = [(np.int64(0), np.int64(0))]  # (-tokens left, place): too few for the last document
    full.pop()
    likely = 0
    for i in range(count):
        tokens, alone = documents.tokens_before[i + 1] - documents.tokens_before[i], documents.alone[i]
        while len(full) > 0 and -full[0][0] >= tokens:
            place = heappop(full)[1]
            heappush(begun, (-left[place], place))
        while len(begun) > 0 and room[begun[0][1]] < tokens:
            place = heappop(begun)[1]
            heappush(full, (-room[place], place))
        while len(narrow) > 0 and narrow[0][0] <= i:
            _, first, run = heappop(narrow)
            heappush(free, (first, run))
        chosen = np.int64(-1)
        if len(begun) > 0 and -begun[0][0] >= alone:
            chosen = begun[0][1]
        most = -begun[0][0] if chosen >= 0 else np.int64(-1)
        group, first, run = 0, np.int64(0), np.int64(0)
        while len(free) > 0:
            first, run = free[0]
            if within[first] >= alone and capacities[first] >= tokens:
                group = 1 if within[first] > most else 0
                break
            if chosen >= 0:
                break
            group = smallest_group(
                documents.lengths[i],
                documents.footprints[i],
                documents.best[i],
                first,
                run_end[run] - first,
                height,
                likely,
                context,
            )
            rest = node - first % node
            if rest < min(group, node) and node < world_size:  # the rest of a node is a run of its own
                run_round[runs], run_end[runs], run_end[run] = run_round[run], run_end[run], first + rest
                heappush(free, (first + rest, np.int64(runs)))
                runs += 1
                group = 0
                continue
            if group > 0:
                break
            heappop(free)
            heappush(narrow, (_first_that_fits(i, first, run_end[run] - first, height, documents, context), first, run))
        if group == 0 and chosen < 0:
            if len(begun) == 0:
                return nothing
            chosen = begun[0][1]  # the round gets longer
        if group > 1:
            likely = group
            heappop(free)
            round = run_round[run]
            begin = int(round * world_size + first)
            time = group_time(documents.lengths[i], first, group, context)
            ends[round] = max(ends[round], time)
            shares = proportional_shares(tokens, speeds[first : first + group], capacities[first : first + group])
            for member in range(group):
                place = begin + member
                left[place] = work_in(height - time, speeds[first + member])
                room[place] -= shares[member]
                group_begin[place] = first
                if room[place] > 0:
                    heappush(begun, (-left[place], place))
            round_of[i], first_rank[i], size[i] = round, first, group
            if first + group < run_end[run]:
                heappush(free, (first + group, run))
            continue
        if group == 1:
            heappop(free)
            chosen = run_round[run] * world_size + first
            if first + 1 < run_end[run]:
                heappush(free, (first + 1, run))
        else:
            heappop(begun)
        left[chosen] -= alone
        room[chosen] -= tokens
        heappush(begun, (-left[chosen], chosen))
        rank, round = chosen % world_size, chosen // world_size
        ends[round] = max(ends[round], height - time_for(left[chosen], speeds[rank]))
        round_of[i], first_rank[i], size[i] = round, rank, 1
        if group_begin[chosen] >= 0:
            first_rank[i], size[i] = group_begin[chosen], group_begin[chosen] - rank
    return ends


@borrowing
@compiled
def _first_that_fits(
    i: int, first: int, most: int, height: int, documents: Waiting, context: PlacementContext
) -> int:  # pragma: no cover - compiled
    """The first document after `i` that ends in time on ranks of this run."""
    low, high = i + 1, len(documents.lengths)
    while low < high:
        middle = (low + high) // 2
        fits = smallest_group(
            documents.lengths[middle],
            documents.footprints[middle],
            documents.best[middle],
            first,
            most,
            height,
            0,
            context,
        )
        if fits > 0:
            high = middle
        else:
            low = middle + 1
    return low
