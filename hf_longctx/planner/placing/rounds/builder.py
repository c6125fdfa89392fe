"""Rounds filled one after the other, whose last ones are then dealt anew, or replaced by one or two.

The height of a round is the one at which it does the most work in the time that it takes: never below the least time of the
longest document left, never above its time on the fewest ranks. So the round that must wait for a very long document is also the
one that holds as many other long ones as it can. From some round on, all documents may be dealt to rounds of about one height
instead (dealer.py): estimates say from which one on, and to how many. The last rounds hold what the others
left.

Interpreted or compiled (planner/compiled.py); integers decide, and a few numbers in float64, the same on every machine. Nothing
is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hf_longctx.planner.bound import LARGEST_DOCUMENT, best_sizes, most_ranks
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.cost.group_times import PlacementContext
from hf_longctx.planner.placing.bisection import at_least_later
from hf_longctx.planner.placing.rounds.dealer import FEW_DOCUMENTS, Dealer, Estimate
from hf_longctx.planner.placing.rounds.filling import Kept, fill_best_round
from hf_longctx.planner.placing.rounds.gap_filling import fill_gaps
from hf_longctx.planner.placing.rounds.sequence import Documents, fill_one_or_two, fill_rounds, waiting_of
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
NEAR = 1003
"""Thousandths of an estimate within which rounds may end for no other to be dealt."""
NEVER = 2**62
"""Nanoseconds: later than any rounds end."""
HOPELESS = 1020
"""Thousandths of when rounds are to end, that they must end later for no more to be filled, unless dealing is estimated to end in
time. Of 394 that ended a 100th late before the last ones were finished, that is 151; one of these ended in time, by 0.2 %."""
IDLE, RAISED_BEFORE = 50, (1030, 1060, 1100, 1150)
"""Share of the step that ranks are idle in one round, a 50th, for the round before it to be made higher, and by how much, in
thousandths of its height: it may hold what makes the idle one high. 215,907 documents on 3,191 unequal ranks, five of which took
59 s and five 13 s, end 5 % sooner."""


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
        self._dealer = Dealer(self._documents, int(fewest.sum()), topology, context)
        self._round, self._first_rank, self._size = (np.empty(len(lengths), np.int64) for _ in range(3))
        self._times: list[int] = []
        self._latest = NEVER  # of `_latest_for`

    def rounds(self, reserved: int, windows: Sequence[int], soonest: int) -> Rounds:
        """Rounds of the first documents, up to `reserved`; the others fill their gaps, and what is left over follows in rounds of
        its own.

        `soonest`: nanoseconds. What is not estimated to make rounds end about then is left out.
        """
        documents, count, shares = self._documents, len(self._round), np.array(windows, np.int64)
        self._round[:], self._times, self._latest = -1, [], self._latest_for(soonest)
        for stop in (reserved, count):
            self._fill(stop, shares)
            if stop < count:
                fill_gaps(
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
        self._round[:], self._times, self._latest = -1, [], self._latest_for(soonest)
        self._fill(count, no_windows, soonest * HOPELESS // 1000)
        if (self._round < 0).any():
            if self._soonest_dealt() >= soonest:
                return None
            self._fill(count, no_windows)
        return self._finished(True, no_windows)

    def _latest_for(self, soonest: int) -> int:
        """Nanoseconds: rounds that end later are not finished. Those of few documents always are, which takes little time."""
        return soonest * NEAR // 1000 if len(self._round) > FEW_DOCUMENTS else NEVER

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
        estimates = self._dealer.estimates(np.arange(len(self._round)))
        return min((estimate.end for estimate in estimates), default=NEVER)

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
        waiting = self._waiting(undone)
        for raised in RAISED_BEFORE:
            height = before[-1][kept] * raised // 1000
            if not self._filled(waiting, height)[1][0].any():
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

    def _filled(self, documents: Waiting, height: int) -> tuple[int, Kept]:
        """Fill a round of this height, or lower, with these documents; return when it ends, and what it holds."""
        count = len(documents.lengths)
        kept = (np.zeros(count, np.bool_), np.empty(count, np.int64), np.empty(count, np.int64))
        heights, no_windows = np.array([height]), np.empty(0, np.int64)
        return int(fill_best_round(heights, no_windows, 0, documents, self._context, kept)[0]), kept

    def _add(self, undone: np.ndarray, height: int) -> np.ndarray:
        """Add a round of this height, or lower; return the documents that are left."""
        end, (placed, ranks, sizes) = self._filled(self._waiting(undone), height)
        assert placed.any(), "the longest document ends within the height"
        done = undone[placed]
        self._round[done], self._first_rank[done] = len(self._times), ranks[placed]
        self._size[done] = sizes[placed]
        self._times.append(end)
        return undone[~placed]

    def _deal_last(self) -> bool:
        """Deal the documents of the last rounds, or of all, to rounds of about one height, and return whether that ends
        sooner."""
        ends = np.append(0, np.cumsum(self._times))
        best, places = min(int(ends[-1]), self._latest), None
        for end, kept, estimate in self._lowest_estimates(ends):
            if best * 1000 <= end * NEAR:
                break
            undone, begin = np.flatnonzero(self._round >= kept), int(ends[kept])
            times, columns = self._dealer.dealt(undone, estimate)
            if len(times) and begin + int(times.sum()) < best:
                best, places = begin + int(times.sum()), (kept, undone, columns, times.tolist())
        if places is None:
            return False
        kept, undone, (round, first_rank, size), times = places
        self._round[undone], self._first_rank[undone], self._size[undone] = round + kept, first_rank, size
        self._times[kept:] = times
        return True

    def _lowest_estimates(self, ends: np.ndarray) -> list[tuple[int, int, Estimate]]:
        """Return the lowest estimates of when all rounds end, how many rounds stay for that, and to what the others' documents
        are dealt. `ends`: nanoseconds, when as many rounds end as have this index."""
        lowest: dict[tuple[int, int], Estimate] = {}
        highest, kept = min(int(ends[-1]), self._latest) * 1000 // NEAR, 0
        while kept < len(self._times):
            undone, begin = np.flatnonzero(self._round >= kept), int(ends[kept])
            # Where all ranks, busy to the end, would take longer than the estimates that are followed, none is made.
            if begin + self._spread_evenly(undone) <= highest:
                for estimate in self._dealer.estimates(undone):
                    lowest.setdefault((begin + estimate.end, kept), estimate)
                lowest = dict(sorted(lowest.items())[: self._dealer.most_estimates])
                if len(lowest) == self._dealer.most_estimates:
                    highest = min(highest, max(lowest)[0])
            kept = max(kept + 1, kept * 3 // 2)
        return [(end, kept, estimate) for (end, kept), estimate in lowest.items()]

    def _spread_evenly(self, undone: np.ndarray) -> int:
        """Nanoseconds that these documents would take at least, evenly on all ranks."""
        return int(self._documents.shared[undone].sum()) * FULL // int(self._topology.speeds.sum())

    def _replace_last(self) -> None:
        """Put the documents of the last rounds into one, or two, where that ends sooner: rounds that are filled as well as can be
        may leave too little for a full one."""
        ends = np.append(0, np.cumsum(self._times))
        best, best_kept, best_heights = min(int(ends[-1]), self._latest), len(self._times), [0]
        # ends[kept]: when the rounds that stay end.
        for kept in range(len(self._times) - 1, max(-1, len(self._times) - 1 - LAST), -1):
            undone = np.flatnonzero(self._round >= kept)
            if ends[kept] + self._spread_evenly(undone) >= best:
                continue
            end, heights = self._in_one_or_two(undone, best - int(ends[kept]), len(self._times) - kept)
            if heights and ends[kept] + end < best:
                best, best_kept, best_heights = int(ends[kept]) + end, kept, heights
        if best_kept < len(self._times):
            undone = np.flatnonzero(self._round >= best_kept)
            del self._times[best_kept:]
            for height in best_heights:
                undone = self._add(undone, height)
            assert not len(undone)

    def _in_one_or_two(self, undone: np.ndarray, limit: int, now: int) -> tuple[int, list[int]]:
        """When one round of all these documents ends, or two, whichever ends sooner, and the heights of these rounds; none where
        that is beyond `limit`. `now`: how many rounds there are."""
        full = -(-int(self._documents.tokens[undone].sum()) // self._topology.tokens)
        two = full <= 2 and now >= 3  # they hold them, and are fewer than there are now
        if full > 1 and not two:
            return 0, []
        end, *heights = fill_one_or_two(undone, full == 1, two, limit, LAST_HALVINGS, self._documents, self._context)
        return end, [height for height in heights if height]


def _whole_round(lengths: np.ndarray, topology: Topology, cost: CostModel) -> int:
    """Nanoseconds of the costliest documents that one rank holds whole, at most LARGEST_DOCUMENT."""
    capacity = int(topology.capacities.max())
    longest = lengths[lengths <= capacity][:1]
    if not len(longest):
        return 0
    # A token costs most in the longest document, since attention grows with its square.
    return min(int(cost.time(int(longest[0]), 1)) * -(-capacity // int(longest[0])), LARGEST_DOCUMENT)
