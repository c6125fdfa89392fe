"""Rounds filled one after the other, whose last ones are then dealt anew, or replaced by one or two.

The height of a round is the one at which it does the most work in the time that it takes: never below the least time of the
longest document left, never above its time on the fewest ranks. So the round that must wait for a very long document is also the
one that holds as many other long ones as it can. From some round on, all documents may be dealt to rounds of about one height
instead (dealing.py, unequal_dealing.py): estimates say from which one on, and to how many. The last rounds hold what the others
left.

Interpreted or compiled (planner/compiled.py); integers decide, and a few numbers in float64, the same on every machine. Nothing
is sent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

import numpy as np

from hf_longctx.planner.bound import LARGEST_DOCUMENT, best_sizes, most_ranks
from hf_longctx.planner.compiled import compiled, listed
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.cost.group_times import PlacementContext, group_time
from hf_longctx.planner.placing.bisection import at_least_later
from hf_longctx.planner.placing.rank_shares import proportional_shares
from hf_longctx.planner.placing.rounds.dealing import deal
from hf_longctx.planner.placing.rounds.filling import Kept, fill_best_round, lowest_that_holds_all
from hf_longctx.planner.placing.rounds.levels import estimated, lowest_height
from hf_longctx.planner.placing.rounds.sequence import Documents, fill_rounds, heights_of, waiting_of
from hf_longctx.planner.placing.rounds.unequal_dealing import deal_to_unequal
from hf_longctx.planner.placing.rounds.waiting_documents import Waiting
from hf_longctx.planner.topology import FULL, Topology

HALVINGS = 5
"""How often the ratio of neighbouring heights is halved: 33 heights are tried for a round. With 9, rounds of mixed lengths
end up to 4 % later."""
BESIDE = 4
"""Heights on either side of the best one without a window that are tried with each."""
LAST = 6
"""Rounds at the end that are tried to be replaced by one or two."""
LAST_HALVINGS = 4
"""HALVINGS for the first of two last rounds."""
COUNTS = 3
"""Numbers of rounds to which the same documents may be dealt: the fewest that hold them, and those above."""
FEW_ROUNDS, FEW_HALVINGS = 4, 3
"""Up to so many rounds, more heights are looked at; HALVINGS for them."""
NEAR = 1003
"""Thousandths of an estimate within which rounds may end for no other to be dealt."""
STEPS = 32
"""Share of rounds by which more are looked at next, a 32nd, where 64 or more are too few."""
DEALT = 3
"""Most estimates, the lowest first, of which documents are dealt."""
FEW_DOCUMENTS, DEALT_OF_FEW = 500, 8
"""Documents up to which more estimates are followed where ranks are unequal: they are worse there."""
RAISED = (1000, 1010, 1030, 1060, 1100, 1150, 1250)
"""Thousandths of an estimated height to which documents are dealt; on equal ranks, and of many, until that ends no sooner. An
estimate does not know that whole documents may find no place of their own: 6,927 were to end at 1.238 times the bound, in two
rounds; some lay on others at that height, and three rounds ended at 1.87; a 100th higher, two at 1.244."""
AS_ESTIMATED = 1010
"""Thousandths of an estimate within which documents that are dealt to equal ranks are not dealt to higher rounds."""
NEVER = 2**62
"""Nanoseconds: later than any rounds end."""
HOPELESS = 1020
"""Thousandths of when rounds are to end, that they must end later for no more to be filled, unless dealing is estimated to end in
time. Of 394 that ended a 100th late before the last ones were finished, that is 151; one of these ended in time, by 0.2 %."""
IDLE, RAISED_BEFORE = 50, (1030, 1060, 1100, 1150)
"""Share of the step that ranks are idle in one round, a 50th, for the round before it to be made higher, and by how much, in
thousandths of its height: it may hold what makes the idle one high. 215,907 documents on 3,191 unequal ranks, five of which took
59 s and five 13 s, end 5 % sooner."""
DEALT_DOCUMENTS, RANKS_EACH, DEALT_MEMBERS = 25_000, 5, 20_000
"""Documents up to which they are dealt to unequal ranks, ranks that they may need each, on average, and, where ranks are of many
kinds and a group's time takes long to find, ranks of them all. Of 82 drawn steps, the 18 that gained had up to 22,000 and 4."""


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


class RoundsBuilder:
    """Documents, longest first, and the rounds that they have so far."""

    def __init__(
        self,
        lengths: np.ndarray,
        footprints: np.ndarray,
        topology: Topology,
        cost: CostModel,
        context: PlacementContext,
        near: int,
    ) -> None:
        """`near`: nanoseconds. Rounds that end by then are not made higher to end sooner."""
        # Documents are found by bisection, which needs footprints that never rise. `own`: what each takes itself.
        own, footprints = footprints, at_least_later(footprints)
        fewest = topology.fewest_ranks(footprints)
        most = 1 if topology.stay_whole else topology.world_size
        best = best_sizes(lengths, fewest, most, cost.coefficients)
        widest = best if topology.stay_whole else most_ranks(lengths, fewest, topology, cost)
        slowest = int(topology.speeds.min())
        # Work on one rank, and on the fewest that hold the document.
        alone, shared = cost.work(lengths, 1), cost.work(lengths, fewest)
        self._topology, self._context, self._near = topology, context, near
        # Between these lies the height of a round whose longest document this is.
        least = -(-cost.work(lengths, best) // best) + cost.micro_batch_ns
        most = -(-cost.work(lengths, fewest) // fewest) + cost.micro_batch_ns
        whole = cost.micro_batch_ns + _whole_round(lengths, topology, cost)
        most = np.maximum(most, whole) * FULL // slowest
        self._documents = Documents(lengths, footprints, own, alone, shared, widest, least, most)
        needed = int(fewest.sum())
        self._may_be_dealt = topology.uniform or (
            len(lengths) <= DEALT_DOCUMENTS
            and needed <= RANKS_EACH * len(lengths)
            and (topology.few_kinds or needed <= DEALT_MEMBERS)
        )
        self._round, self._first_rank, self._size = (np.empty(len(lengths), np.int64) for _ in range(3))
        self._times: list[int] = []

    def rounds(self, reserved: int, windows: Sequence[int]) -> Rounds:
        """Rounds of the first documents, up to `reserved`; the others fill their gaps, and what is left over follows in rounds of
        its own."""
        documents, count, shares = self._documents, len(self._round), np.array(windows, np.int64)
        self._round[:], self._times = -1, []
        for stop in (reserved, count):
            self._fill(stop, shares)
            if stop < count:
                _fill_gaps(
                    stop,
                    documents.lengths,
                    documents.tokens,
                    documents.alone,
                    self._round,
                    len(self._times),
                    self._context,
                    self._first_rank,
                    self._size,
                )
        return self._finished(reserved == count, shares)

    def rounds_unless_late(self, soonest: int) -> Rounds | None:
        """Rounds of all documents, or None where it shows early that they hardly end by `soonest`, nanoseconds."""
        count, no_windows = len(self._round), np.empty(0, np.int64)
        self._round[:], self._times = -1, []
        self._fill(count, no_windows, soonest // 1000 * HOPELESS)
        if (self._round < 0).any():
            if self._soonest_dealt() >= soonest:
                return None
            self._fill(count, no_windows)
        return self._finished(True, no_windows)

    def _finished(self, raises: bool, windows: np.ndarray) -> Rounds:
        """Finish the rounds, and return them. `raises`: those before idle ones may be made higher."""
        filled = self._places()
        self._finish()
        if raises and sum(self._times) > self._near:
            finished = self._places()
            self._put(filled)
            if self._raise_before_idle_round(windows):
                self._finish()
            self._keep_sooner(finished)
        holder, size = self._first_rank.copy(), np.maximum(self._size, 1)
        in_gap = self._size < 1  # written down as the distance of its rank from the first of the micro-batch
        holder[in_gap] -= self._size[in_gap]
        return Rounds(self._round.copy(), self._first_rank.copy(), size, holder, sum(self._times))

    def _fill(self, stop: int, windows: np.ndarray, latest: int = NEVER) -> None:
        """Add rounds with the documents before `stop` that have none, but no more once they must end after `latest`."""
        places, first = (self._round, self._first_rank, self._size), len(self._times)
        ends = fill_rounds(stop, first, HALVINGS, windows, BESIDE, latest, self._documents, self._context, *places)
        self._times += ends.tolist()

    def _soonest_dealt(self) -> int:
        """When rounds of about one height to which all documents are dealt end, about; NEVER if they may not be."""
        levels = self._levels if self._context.uniform else self._unequal_levels
        estimates = levels(np.arange(len(self._round))) if self._may_be_dealt else ()
        return min((end for end, *_ in estimates), default=NEVER)

    def _finish(self) -> None:
        """Put the documents of the last rounds into one or two, or deal them first: what ends sooner."""
        filled = self._places()
        self._replace_last()
        replaced = self._places()
        self._put(filled)
        if self._deal_last():
            self._replace_last()
        self._keep_sooner(replaced)

    def _keep_sooner(self, other: tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]) -> None:
        if sum(self._times) >= sum(other[-1]):
            self._put(other)

    def _raise_before_idle_round(self, windows: np.ndarray) -> bool:
        """Make the round before that in which ranks are idle longest higher, and fill all that follow anew: it may hold what made
        the next one high too. Return whether that ends sooner."""
        speed, work = int(self._topology.speeds.sum()) / FULL, np.zeros(len(self._times), np.int64)
        np.add.at(work, self._round, self._documents.shared)
        idle = np.array(self._times) * speed - work
        kept = int(idle[1:].argmax()) if len(idle) > 1 else 0
        if len(idle) == 1 or idle[kept + 1] * IDLE <= sum(self._times) * speed:
            return False
        before = best = self._places()
        undone = np.flatnonzero(self._round >= kept)
        for raised in RAISED_BEFORE:
            height = before[-1][kept] * raised // 1000
            if not self._filled(undone, height)[1][0].any():
                continue  # a document that ends in less time may not end in more, where groups are rounded to whole nodes
            self._put(before)
            self._round[undone] = -1
            del self._times[kept:]
            self._add(undone, height)
            self._fill(len(self._round), windows)
            if sum(self._times) < sum(best[-1]):
                best = self._places()
        self._put(best)
        return best is not before

    def _places(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]:
        return self._round.copy(), self._first_rank.copy(), self._size.copy(), self._times.copy()

    def _put(self, places: tuple[np.ndarray, np.ndarray, np.ndarray, list[int]]) -> None:
        self._round[:], self._first_rank[:], self._size[:], self._times[:] = places

    def _waiting(self, undone: np.ndarray) -> Waiting:
        return Waiting(*waiting_of(self._documents, undone))

    def _heights(self, longest: int, halvings: int) -> list[int]:
        return heights_of(longest, halvings, self._documents, self._context).tolist()

    def _filled(self, undone: np.ndarray, height: int) -> tuple[int, Kept]:
        """Fill a round of this height, or lower, with these documents; return when it ends, and what it holds."""
        ranks, sizes = np.empty(len(undone), np.int64), np.empty(len(undone), np.int64)
        kept = (np.zeros(len(undone), np.bool_), ranks, sizes)
        heights, no_windows = np.array([height]), np.empty(0, np.int64)
        return int(fill_best_round(heights, no_windows, 0, self._waiting(undone), self._context, kept)), kept

    def _add(self, undone: np.ndarray, height: int) -> np.ndarray:
        """Add a round of this height, or lower; return the documents that are left."""
        end, (placed, ranks, sizes) = self._filled(undone, height)
        assert placed.any(), "the longest document ends within the height"
        done = undone[placed]
        self._round[done], self._first_rank[done] = len(self._times), ranks[placed]
        self._size[done] = sizes[placed]
        self._times.append(end)
        return undone[~placed]

    def _deal_last(self) -> bool:
        """Deal the documents of the last rounds, or of all, to rounds of about one height, and return whether that ends
        sooner."""
        if not self._may_be_dealt:
            return False
        ends = np.append(0, np.cumsum(self._times))
        uniform = self._context.uniform
        levels = self._levels if uniform else self._unequal_levels
        most = DEALT if uniform or len(self._round) > FEW_DOCUMENTS else DEALT_OF_FEW
        soonest: dict[tuple[int, int], tuple[int, int, bool]] = {}
        kept = 0
        while kept < len(self._times):
            for end, rounds, height, even in levels(np.flatnonzero(self._round >= kept)):
                soonest.setdefault((int(ends[kept]) + end, kept), (rounds, height, even))
            kept = max(kept + 1, kept * 3 // 2)
        best, places = int(ends[-1]), None
        for (end, kept), (rounds, height, even) in sorted(soonest.items())[:most]:
            if best * 1000 <= end * NEAR:
                break
            undone = np.flatnonzero(self._round >= kept)
            times, columns = self._dealt(undone, rounds, height, even, end - int(ends[kept]))
            if len(times) and int(ends[kept]) + int(times.sum()) < best:
                best, places = int(ends[kept]) + int(times.sum()), (kept, undone, columns, times.tolist())
        if places is None:
            return False
        kept, undone, (round, first_rank, size), times = places
        self._round[undone], self._first_rank[undone], self._size[undone] = round + kept, first_rank, size
        self._times[kept:] = times
        return True

    def _dealt(
        self, undone: np.ndarray, rounds: int, height: int, even: bool, estimate: int
    ) -> tuple[np.ndarray, Sequence[np.ndarray]]:
        """Deal these documents to so many rounds; return when each ends, none if they find no room, and columns of `deal`.
        `estimate`: nanoseconds that all rounds are expected to take; equal ranks that take no more are as good as can be."""
        documents, context = self._waiting(undone), self._context
        best: tuple[np.ndarray, Sequence[np.ndarray]] = np.empty(0, np.int64), ()
        for raised in RAISED:
            columns = tuple(np.empty(len(undone), np.int64) for _ in range(3))
            higher = height * raised // 1000
            if context.uniform:
                times = deal(rounds, higher, even, documents, context, *columns)
            else:
                times = deal_to_unequal(rounds, higher, documents, context, *columns)
            if len(best[0]) and (not len(times) or times.sum() >= best[0].sum()):
                if context.uniform or len(self._round) > FEW_DOCUMENTS:
                    break
            else:
                best = times, columns
            if context.uniform and len(times) and times.sum() * 1000 <= estimate * AS_ESTIMATED:
                break
        return best

    def _unequal_levels(self, undone: np.ndarray) -> Iterator[tuple[int, int, int, bool]]:
        """Yield the same as `_levels`, of unequal ranks, as if all were busy until their round ends."""
        own, shared = self._documents.tokens, self._documents.shared
        least = int(self._documents.least[undone[0]]) * FULL // int(self._topology.speeds.max())
        work = int(shared[undone].sum()) * FULL // int(self._topology.speeds.sum())
        fewest = -(-int(own[undone].sum()) // self._topology.tokens)
        for rounds in range(fewest, fewest + COUNTS):
            height = max(work // rounds + self._context.micro_batch, least)
            yield rounds * height, rounds, height, False

    def _levels(self, undone: np.ndarray) -> Iterator[tuple[int, int, int, bool]]:
        """Yield when rounds of about one height of these documents would end, about, and how many rounds, of which height, and
        whether groups share nodes evenly."""
        documents, context = self._waiting(undone), self._context
        footprints, own, alone = self._documents.footprints, self._documents.tokens, self._documents.alone
        low, *_, high = self._heights(undone[0], FEW_HALVINGS)
        whole = undone[footprints[undone] <= context.capacity][:1]
        fewest = -(-int(own[undone].sum()) // self._topology.tokens)
        for even in (False, True) if context.node < self._topology.world_size else (False,):
            counted = 0
            for rounds in range(fewest, 2 * fewest + FEW_ROUNDS, max(1, fewest // STEPS)):
                height = int(lowest_height(rounds, low, high, even, documents, context))
                if not height:
                    continue
                heights = [height, *(max(height, int(time) + context.micro_batch) for time in alone[whole])]
                if rounds <= FEW_ROUNDS:
                    heights += [more for more in self._heights(undone[0], FEW_HALVINGS) if more > height]
                for tried in dict.fromkeys(heights):
                    end = estimated(rounds, tried, even, True, documents, context)[1]
                    if end < math.inf:
                        yield int(end), rounds, tried, even
                counted += 1
                if counted == COUNTS:
                    break

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
                undone = self._add(undone, height)
            assert not len(undone)

    def _in_one_or_two(self, undone: np.ndarray, limit: int, now: int) -> Iterator[tuple[int, list[int]]]:
        """Yield when one round of all these documents ends, or two, and the heights of these rounds, where that is within
        `limit`. `now`: how many rounds there are."""
        own, shared = self._documents.tokens, self._documents.shared
        full = -(-int(own[undone].sum()) // self._topology.tokens)
        if full == 1:
            height, end = self._of_all(undone, limit)
            if height:
                yield end, [height]
        if full > 2 or now < 3:  # two cannot hold them, or they are no more than two now
            return
        for first in self._heights(undone[0], LAST_HALVINGS):
            end, (placed, *_) = self._filled(undone, first)
            rest = undone[~placed]
            # Spread evenly over all ranks, the rest would take so long: where that is too long, no second round is searched for.
            least = int(shared[rest].sum()) * FULL // int(self._topology.speeds.sum())
            if 0 < len(rest) < len(undone) and end + least < limit:
                height, last_end = self._of_all(rest, limit - end)
                if height:
                    yield end + last_end, [first, height]

    def _of_all(self, undone: np.ndarray, limit: int) -> tuple[int, int]:
        """The lowest height of a round of all these documents, and when it ends; zeros if that is beyond `limit`."""
        return lowest_that_holds_all(int(self._documents.least[undone[0]]), limit, self._waiting(undone), self._context)


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
