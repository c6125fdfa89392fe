"""Lockstep: every rank runs the same number of rounds, and each round costs its slowest rank.

ZeRO-2, ZeRO-3 and expert parallelism need this: their collectives make all ranks meet in every micro-batch.

rounds.py says how a round of a given height is filled. The height is the one at which the round does the most work in the time
that it takes: never below the least time of the longest document left, never above its time on the fewest ranks. So the round
that must wait for a very long document is also the one that holds as many other long ones as it can. Where that ends late,
rounds are also filled through windows. Then the last rounds, which hold what the others left, may be replaced by one or two.
Ranks that a round leaves empty get no micro-batch in it.

Interpreted or compiled (planner/compiled.py); integers decide, and one ratio of them in float64, the same on every machine (a
division and a comparison, correctly rounded). Nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import pairwise

import numpy as np

from hf_longctx.planner.bound import LARGEST_DOCUMENT, best_sizes, lower_bound, most_ranks
from hf_longctx.planner.compiled import compiled, listed
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.cost.group_times import PlacementContext, group_time, group_times
from hf_longctx.planner.placing.bisection import at_least_later
from hf_longctx.planner.placing.packing import sums
from hf_longctx.planner.placing.rank_shares import proportional_shares
from hf_longctx.planner.placing.rounds import Kept, fill_best_round, lowest_that_holds_all
from hf_longctx.planner.placing.waiting_documents import Waiting, waiting
from hf_longctx.planner.plan import StepPlan
from hf_longctx.planner.topology import FULL, SPLIT, Topology

ALL_AT_ONCE = 2**40
"""No document is so short a share of the capacity."""
RESERVED_BELOW = (ALL_AT_ONCE, 8, 2)
"""Documents shorter than these shares of the capacity wait until all others have their rounds, then fill the gaps; the
best of these plans is taken. Without that, 1000 documents of the GitHub distribution on 64 ranks end 5 % later."""
RESERVED_TOKENS = 50
"""Only if they hold a 50th of all tokens: gaps are as large."""
HALVINGS = 5
"""How often the ratio of neighbouring heights is halved: 33 heights are tried for a round. With 9, rounds of mixed lengths
end up to 4 % later."""
WINDOWS = (990, 980, 960)
"""Per mille of a round's height that groups must take at first (rounds.py), tried where rounds without end late."""
BESIDE = 4
"""Heights on either side of the best one without a window that are tried with each."""
WINDOWS_ABOVE = 1025
"""Thousandths of the lower bound above which windows are tried: with them, planning takes six times as long."""
LAST = 6
"""Rounds at the end that are tried to be replaced by one or two."""
LAST_HALVINGS = 4
"""HALVINGS for the first of two last rounds."""


def plans_in_rounds(
    lengths: np.ndarray,
    tokens: np.ndarray,
    order: np.ndarray,
    topology: Topology,
    cost: CostModel,
    context: PlacementContext,
) -> Iterator[StepPlan]:
    """Yield a plan in rounds, and then perhaps a better one, which takes several times as long to find.

    Args:
        lengths, tokens: int64 [documents], longest first: tokens that a document counts as, and has.
        order: int64 [documents]: their indices in the global batch.
    """
    bound = lower_bound(lengths, topology, cost, "lockstep", tokens)
    for rounds in rounds_tried(lengths, tokens, bound, RESERVED_BELOW, WINDOWS, topology, cost, context):
        yield _build(lengths, tokens, order, rounds, bound, topology, cost, context)


@dataclass(frozen=True, slots=True)
class Rounds:
    """The place of each document, int64 [documents]; counted longest first."""

    round: np.ndarray
    first_rank: np.ndarray
    """Lowest rank of its micro-batch."""
    size: np.ndarray
    """Ranks that it is spread over."""
    holder: np.ndarray
    """The rank that holds it, where that is one."""
    makespan: int


def best_rounds(
    lengths: np.ndarray,
    footprints: np.ndarray,
    bound: int,
    reserved_below: Sequence[int],
    windows: Sequence[int],
    topology: Topology,
    cost: CostModel,
    context: PlacementContext,
) -> Rounds:
    """Return the last, which is the best, of `rounds_tried`."""
    *_, best = rounds_tried(lengths, footprints, bound, reserved_below, windows, topology, cost, context)
    return best


def rounds_tried(
    lengths: np.ndarray,
    footprints: np.ndarray,
    bound: int,
    reserved_below: Sequence[int],
    windows: Sequence[int],
    topology: Topology,
    cost: CostModel,
    context: PlacementContext,
) -> Iterator[Rounds]:
    """Yield the best rounds without windows; then, where those end late and ranks are equal, the better of them and of rounds
    through windows.

    Args:
        lengths, footprints: int64 [documents], longest first: tokens that a document counts as, and those that its group must
            have room for.
        bound: nanoseconds. Plans that come near are good enough.
        reserved_below: shares of the capacity, as RESERVED_BELOW.
        windows: as WINDOWS; they are tried with the best of these shares.
    """
    builder = _Builder(lengths, footprints, topology, cost, context)
    tokens, capacity = np.append(0, np.cumsum(footprints)), int(topology.capacities.min())
    # Lengths fall, their negatives ascend: the first document that is no longer than the share. None is, of ALL_AT_ONCE.
    stops = [int(np.searchsorted(-lengths, -(capacity // share))) for share in reserved_below]
    # Where documents from there on hold little, or are all, nothing waits; equal stops make one plan.
    few = [stop == 0 or (tokens[-1] - tokens[stop]) * RESERVED_TOKENS < tokens[-1] for stop in stops]
    stops = [len(lengths) if nothing else stop for stop, nothing in zip(stops, few)]
    tried = {stop: builder.rounds(stop, ()) for stop in dict.fromkeys(stops)}
    best_stop = min(tried, key=lambda stop: tried[stop].makespan)
    best = tried[best_stop]
    yield best
    if windows and context.uniform and best.makespan * 1000 > bound * WINDOWS_ABOVE:
        yield min(best, builder.rounds(best_stop, windows), key=lambda rounds: rounds.makespan)


class _Builder:
    """Documents, longest first, and the rounds that they have so far."""

    def __init__(
        self,
        lengths: np.ndarray,
        footprints: np.ndarray,
        topology: Topology,
        cost: CostModel,
        context: PlacementContext,
    ) -> None:
        # Documents are found by bisection, which needs footprints that never rise. `own`: what each takes itself.
        own, footprints = footprints, at_least_later(footprints)
        fewest = topology.fewest_ranks(footprints)
        most = 1 if topology.stay_whole else topology.world_size
        best = best_sizes(lengths, fewest, most, cost.coefficients)
        widest = best if topology.stay_whole else most_ranks(lengths, fewest, topology, cost)
        slowest = int(topology.speeds.min())
        # Work on one rank, and on the fewest that hold the document.
        alone, shared = cost.work(lengths, 1), cost.work(lengths, fewest)
        self._columns = (lengths, footprints, own, alone, shared, widest)
        self._topology, self._context = topology, context
        # Between these lies the height of a round whose longest document this is: its time on the ranks that suit it best; its
        # time on the fewest, or that of a rank full of whole documents.
        self._least = -(-cost.work(lengths, best) // best) + cost.micro_batch_ns
        most = -(-cost.work(lengths, fewest) // fewest) + cost.micro_batch_ns
        whole = cost.micro_batch_ns + _whole_round(lengths, topology, cost)
        self._most = np.maximum(most, whole) * FULL // slowest
        self._round, self._first_rank, self._size = (np.empty(len(lengths), np.int64) for _ in range(3))
        self._times: list[int] = []

    def rounds(self, reserved: int, windows: Sequence[int]) -> Rounds:
        """Rounds of the first documents, up to `reserved`; the others fill their gaps, and what is left over follows in rounds of
        its own."""
        lengths, _, own, alone, *_ = self._columns
        count = len(lengths)
        self._round[:], self._times = -1, []
        for stop in (reserved, count):
            undone = np.flatnonzero(self._round[:stop] < 0)
            while len(undone):
                undone = self._add(undone, self._heights(undone[0], HALVINGS), windows)
            if stop < count:
                _fill_gaps(
                    stop,
                    lengths,
                    own,
                    alone,
                    self._round,
                    len(self._times),
                    self._context,
                    self._first_rank,
                    self._size,
                )
        self._replace_last()
        holder, size = self._first_rank.copy(), np.maximum(self._size, 1)
        in_gap = self._size < 1  # written down as the distance of its rank from the first of the micro-batch
        holder[in_gap] -= self._size[in_gap]
        return Rounds(self._round.copy(), self._first_rank.copy(), size, holder, sum(self._times))

    def _waiting(self, undone: np.ndarray) -> Waiting:
        return waiting(*(column[undone] for column in self._columns))

    def _heights(self, longest: int, halvings: int) -> np.ndarray:
        """Heights that a round of this longest document may have, ascending: geometric means in integers, as powers of floats
        differ between machines."""
        lengths, footprints, *_ = self._columns
        # From rank 0 on, more ranks than the fewest may be needed, and more exchange may take longer.
        fewest = int(np.searchsorted(self._context.before, footprints[longest]))
        low = int(self._least[longest])
        high = max(int(self._most[longest]), int(group_time(lengths[longest], 0, fewest, self._context)))
        heights = [low, max(low, high)]
        for _ in range(halvings):
            heights = sorted(heights + [math.isqrt(a * b) for a, b in pairwise(heights)])
        return np.array(heights)

    def _filled(self, undone: np.ndarray, heights: np.ndarray, windows: Sequence[int]) -> tuple[int, Kept]:
        """Fill the best round of these documents; return when it ends, and what it holds."""
        ranks, sizes = np.empty(len(undone), np.int64), np.empty(len(undone), np.int64)
        kept = (np.zeros(len(undone), np.bool_), ranks, sizes)
        shares = np.array(windows, np.int64)
        return int(fill_best_round(heights, shares, BESIDE, self._waiting(undone), self._context, kept)), kept

    def _add(self, undone: np.ndarray, heights: np.ndarray, windows: Sequence[int] = ()) -> np.ndarray:
        """Adds the best round of one of these heights; returns the documents that are left."""
        end, (placed, ranks, sizes) = self._filled(undone, heights, windows)
        assert placed.any(), "the fewest ranks that hold the longest document are within the heights"
        done = undone[placed]
        self._round[done], self._first_rank[done] = len(self._times), ranks[placed]
        self._size[done] = sizes[placed]
        self._times.append(end)
        return undone[~placed]

    def _replace_last(self) -> None:
        """Put the documents of the last rounds into one, or two, where that ends sooner: rounds that are filled as well as can be
        may leave too little for a full one."""
        ends = np.append(0, np.cumsum(self._times))
        best, best_kept, best_heights = int(ends[-1]), len(self._times), [0]
        # ends[kept]: when the rounds that stay end.
        for kept in range(len(self._times) - 1, max(-1, len(self._times) - 1 - LAST), -1):
            undone = np.flatnonzero(self._round >= kept)
            for end, heights in self._in_one_or_two(undone, best - int(ends[kept]), len(self._times) - kept):
                if ends[kept] + end < best:
                    best, best_kept, best_heights = int(ends[kept]) + end, kept, heights
        if best_kept < len(self._times):
            undone = np.flatnonzero(self._round >= best_kept)
            del self._times[best_kept:]
            for height in best_heights:
                undone = self._add(undone, np.array([height]))
            assert not len(undone)

    def _in_one_or_two(self, undone: np.ndarray, limit: int, now: int) -> Iterator[tuple[int, list[int]]]:
        """Yield when one round of all these documents ends, or two, and the heights of these rounds, where that is within
        `limit`. `now`: how many rounds there are."""
        _, _, own, _, shared, _ = self._columns
        full = -(-int(own[undone].sum()) // self._topology.tokens)
        if full == 1:
            height, end = self._of_all(undone, limit)
            if height:
                yield end, [height]
        if full > 2 or now < 3:  # two cannot hold them, or they are no more than two now
            return
        for first in self._heights(undone[0], LAST_HALVINGS):
            end, (placed, *_) = self._filled(undone, np.array([first]), ())
            rest = undone[~placed]
            # Spread evenly over all ranks, the rest would take so long: where that is too long, no second round is searched for.
            least = int(shared[rest].sum()) * FULL // int(self._topology.speeds.sum())
            if 0 < len(rest) < len(undone) and end + least < limit:
                height, last_end = self._of_all(rest, limit - end)
                if height:
                    yield end + last_end, [int(first), height]

    def _of_all(self, undone: np.ndarray, limit: int) -> tuple[int, int]:
        """The lowest height of a round of all these documents, and when it ends; zeros if that is beyond `limit`."""
        return lowest_that_holds_all(int(self._least[undone[0]]), limit, self._waiting(undone), self._context)


def _whole_round(lengths: np.ndarray, topology: Topology, cost: CostModel) -> int:
    """Nanoseconds of the costliest documents that one rank holds whole, at most LARGEST_DOCUMENT."""
    capacity = int(topology.capacities.max())
    longest = lengths[lengths <= capacity][:1]
    if not len(longest):
        return 0
    # A token costs most in the longest document, since attention grows with its square.
    return min(int(cost.time(int(longest[0]), 1)) * -(-capacity // int(longest[0])), LARGEST_DOCUMENT)


@compiled
def _fill_gaps(
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


def _build(
    lengths: np.ndarray,
    tokens: np.ndarray,
    order: np.ndarray,
    rounds: Rounds,
    bound: int,
    topology: Topology,
    cost: CostModel,
    context: PlacementContext,
) -> StepPlan:
    """Documents whose micro-batch begins on the same rank in the same round share it."""
    places, micro_batch = np.unique(rounds.round * topology.world_size + rounds.first_rank, return_inverse=True)
    split = rounds.size > 1
    members = np.ones(len(places), np.int64)
    members[micro_batch[split]] = rounds.size[split]
    first_member = np.concatenate([[0], np.cumsum(members)])
    begins = places % topology.world_size
    # Ranks of one micro-batch after the other: 3 from rank 3 on, then 1 from rank 0 on, are [3, 3, 3, -3] + [0, 1, 2, 3].
    rank = np.repeat(begins - first_member[:-1], members) + np.arange(first_member[-1])

    # A member is as long busy as its share of a split document and its whole documents take; the slowest counts.
    member = first_member[micro_batch] + rounds.holder - begins[micro_batch]
    whole_times = sums(member[~split], cost.time(lengths[~split], 1), len(rank))
    shared = np.full(len(places), cost.micro_batch_ns)
    shared[micro_batch[split]] = group_times(lengths[split], rounds.first_rank[split], rounds.size[split], context)
    alone = np.repeat(members == 1, members)
    times = np.repeat(shared, members) + whole_times
    own = -(-whole_times * FULL // topology.speeds[rank])
    times = np.where(alone, -(-times * FULL // topology.speeds[rank]), np.repeat(shared, members) + own)
    document = np.lexsort([order, micro_batch])
    return StepPlan(
        topology=topology,
        first_member=first_member,
        rank=rank,
        first_document=np.searchsorted(micro_batch[document], np.arange(len(places) + 1)),
        doc=order[document],
        length=tokens[document],
        holder=np.where(split, SPLIT, rounds.holder)[document],
        cost=np.maximum.reduceat(times, first_member[:-1]),
        lower_bound=bound,
        offload=np.zeros(len(places), np.int64),
        round=places // topology.world_size,
        mode="lockstep",
    )
