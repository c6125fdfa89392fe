"""Whole documents: plans for models that cannot spread a document over ranks, since layers carry a state from row to row.

    rank 0  | A A A A A A A | d d e |       A to h lie on one rank each; d and e share a micro-batch of at most its capacity,
    rank 1  | B B B B B | c c c f h |       and so do c, f and h; nobody waits for anybody before the step's end

1. Longest first, each document goes to the rank that is done with it soonest, of those that have memory for it. The rank that
   ends last then gives a document to another rank, or exchanges two, while that makes it end sooner.
2. The documents of a rank are packed into micro-batches of at most its capacity, or each is one of its own
   (`Topology.documents == "alone"`). In a pipeline a rank waits p - 1 times for its longest micro-batch, so few ranks should hold
   the long documents: longest first, each goes to the first rank that still ends before a target, and the lowest target that
   is met counts. Packs are even.
3. In mode `lockstep` a round costs its slowest rank, so micro-batches of nearly the same time share one. They are filled as
   rounds/lockstep.py does, where no group may have a second rank; and by first fit, sorted by time and dealt to the ranks, the
   longest to the fastest, those first that few ranks have memory for. The better one is taken. Alone and on equal ranks, this is
   the best there is.

Costs are integers; where documents are exchanged, products and quotients of floats decide, the same on every machine. Nothing is
sent.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hf_longctx.planner.bound import lower_bound
from hf_longctx.planner.compiled import compiled, listed
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.cost.group_times import placement_context
from hf_longctx.planner.placing.packing import first_fit, grouped, pack, spread_whole, sums
from hf_longctx.planner.placing.rounds.lockstep import RESERVED_BELOW, WINDOWS, best_rounds
from hf_longctx.planner.plan import Mode, StepPlan
from hf_longctx.planner.stages.chunked_placement import UNITS
from hf_longctx.planner.topology import FULL, Topology

GOOD_ENOUGH = 1.002
"""Times the lower bound at which nothing is exchanged any more, as in search.py."""
PRECISION = 1000
"""A target is found to a 1000th."""
MOST_PAIRS = 2**21
"""Pairs of documents that are looked at for exchanges in all, each of the rank that ends last with each other one. 10,000
documents on 1,024 ranks end at 1.0032 times the bound with so many, and at 1.0031 with twice as many."""


def plan_whole(
    lengths: np.ndarray, tokens: np.ndarray, order: np.ndarray, topology: Topology, cost: CostModel, mode: Mode
) -> StepPlan:
    """Plan documents of which none is split.

    Args:
        lengths, tokens: int64 [documents], longest first: tokens that a document counts as, and has; at most
            `topology.longest_document`.
        order: int64 [documents]: their indices in the global batch.
    """
    step = _Whole(lengths, tokens, order, topology, cost, mode)
    if mode == "lockstep":
        return step.in_rounds()
    return step.in_pipeline() if mode == "pipeline" else step.async_()


class _Whole:
    """The documents of a step, longest first, and what they are planned for."""

    def __init__(
        self,
        lengths: np.ndarray,
        tokens: np.ndarray,
        order: np.ndarray,
        topology: Topology,
        cost: CostModel,
        mode: Mode,
    ) -> None:
        self.lengths, self.tokens, self.order = lengths, tokens, order
        self.topology, self.cost, self.mode = topology, cost, mode
        self.alone = topology.documents == "alone"
        self.times = cost.time(lengths, 1)
        self.bound = lower_bound(lengths, topology, cost, mode, tokens)

    def async_(self) -> StepPlan:
        """Balance the sum of each rank's times."""
        if self.alone:
            return self._of_packs(np.arange(len(self.times)))
        times = self.times + self.cost.micro_batch_ns * self.tokens // self.topology.capacity
        rank = self._spread(times, self.tokens)
        plan = self._packed(rank)
        if not self._late(plan):
            return plan
        plan = self._sooner(plan, self._packed(exchanged(rank, times, self.tokens, self.bound, self.topology)))
        return self._sooner(plan, self._of_packs(self._filled()))

    def in_pipeline(self) -> StepPlan:
        """Balance times together with what each rank waits for its longest micro-batch; the best of several lengths of
        micro-batches."""
        waits, launch = self.topology.stages - 1, self.cost.micro_batch_ns
        if self.alone:
            return self._of_packs(np.arange(len(self.times)), waits)
        plan = self._of_packs(self._filled(), waits)
        mean = max(1, int(self.times.sum()) * FULL // int(self.topology.speeds.sum()))
        for share in UNITS if waits else (1,):
            unit = max(1, mean // share)
            room = max(unit - launch, launch, 1)  # as pipeline.room_in_time has it
            times = self.times + np.maximum(launch * self.tokens // self.topology.capacity, launch * self.times // room)
            if waits:
                rank = self._by_target(times, self.tokens, waits * np.maximum(self.times + launch - unit, 0))
            else:
                rank = self._spread(times, self.tokens)
            plan = self._sooner(plan, self._packed(rank, room))
        return plan

    def in_rounds(self) -> StepPlan:
        """Let micro-batches of nearly the same time share a round."""
        plan = self._dealt(np.arange(len(self.times)) if self.alone else self._filled())
        if self.alone or not self._late(plan):
            return plan
        least = int(self.topology.capacities.min())
        if int(self.tokens.max()) > least:
            return plan
        # As if all ranks held as little as the one that holds least: rounds/filling.py takes ranks as they come.
        topology = replace(self.topology, capacity=least, memory=None)
        context = placement_context(topology, self.cost)
        rounds = best_rounds(
            self.lengths, self.tokens, self.bound, RESERVED_BELOW, WINDOWS, topology, self.cost, context
        )
        places, micro_batch = np.unique(rounds.round * topology.world_size + rounds.holder, return_inverse=True)
        rank, round = places % topology.world_size, places // topology.world_size
        return self._sooner(plan, self._built(micro_batch, rank, round))

    def _of_packs(self, micro_batch: np.ndarray, waits: int = 0) -> StepPlan:
        """Balance micro-batches over ranks. micro_batch: int64 [documents]; waits: as many times its longest one a rank waits."""
        times, tokens = self._summed(micro_batch)
        by_time = np.argsort(-times, kind="stable")
        times, tokens = times[by_time], tokens[by_time]
        ranks_by_time = self._by_target(times, tokens, waits * times) if waits else self._spread(times, tokens)
        rank = np.empty_like(ranks_by_time)
        rank[by_time] = ranks_by_time
        plan = self._built(micro_batch, rank, np.zeros_like(rank))
        if waits == 0 and self._late(plan):
            rank[by_time] = exchanged(ranks_by_time, times, tokens, self.bound, self.topology)
            plan = self._sooner(plan, self._built(micro_batch, rank, np.zeros_like(rank)))
        return plan

    def _summed(self, micro_batch: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """int64 [micro-batches] each: nanoseconds, and tokens."""
        count = int(micro_batch.max()) + 1
        return sums(micro_batch, self.times, count) + self.cost.micro_batch_ns, sums(micro_batch, self.tokens, count)

    def _by_target(self, times: np.ndarray, tokens: np.ndarray, first: np.ndarray) -> np.ndarray:
        """int64: the rank of each, longest first, so that the ranks end soon, where a rank's first one takes `first` more.

        Args:
            times, tokens, first: int64, nanoseconds at speed 1000, tokens, nanoseconds.
        """
        topology = self.topology
        ranks = np.lexsort([-topology.speeds, -topology.capacities])
        speeds = topology.speeds[ranks]
        eligible = np.searchsorted(-topology.capacities[ranks], -tokens, side="right")
        low, high, places = self.bound, self.bound, np.empty_like(times)
        trial = np.empty_like(times)
        while not fit_by(high, times, first, eligible, speeds, places):
            low, high = high, 2 * high
        while high - low > low // PRECISION + 1:
            middle = (low + high) // 2
            if fit_by(middle, times, first, eligible, speeds, trial):
                high, places, trial = middle, trial, places
            else:
                low = middle
        return ranks[places]

    def _spread(self, times: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """int64: the rank that is done with each soonest, longest first."""
        topology = self.topology
        if topology.memory is None:
            return spread_whole(times, np.zeros(topology.world_size, np.int64), topology.speeds)
        kinds = np.stack([topology.speeds, topology.capacities])
        (speeds, capacities), kind = np.unique(kinds, axis=1, return_inverse=True)
        ranks, begins = grouped(kind.ravel(), len(speeds))
        loads = np.zeros(topology.world_size, np.int64)
        return spread_where_they_fit(times, tokens, begins, speeds, capacities, ranks, loads)

    def _packed(self, rank: np.ndarray, room: int = 0) -> StepPlan:
        """The plan of documents on these ranks (int64 [documents]), in few micro-batches. `room`: nanoseconds that one should not
        exceed, and they are even; 0: any."""
        by_rank = np.argsort(rank, kind="stable")
        place, tokens, times = rank[by_rank], self.tokens[by_rank], self.times[by_rank]
        capacities, whole = self.topology.capacities[place], np.ones(len(rank), np.int64)
        packed, count = pack(place, tokens, times, capacities, whole, max(room, 1), room > 0)
        micro_batch, of = np.empty(len(rank), np.int64), np.empty(count, np.int64)
        micro_batch[by_rank], of[packed] = packed, place
        return self._built(micro_batch, of, np.zeros(count, np.int64))

    def _filled(self) -> np.ndarray:
        """int64 [documents]: few micro-batches, of at most the least memory of a rank that holds their longest document."""
        kinds = np.unique(self.topology.capacities)
        by_tokens = np.argsort(-self.tokens, kind="stable")
        kind = np.searchsorted(kinds, self.tokens[by_tokens])
        micro_batch, packs = np.empty(len(kind), np.int64), 0
        for number in np.unique(kind).tolist():
            documents = by_tokens[kind == number]
            micro_batch[documents] = packs + first_fit(self.tokens[documents], int(kinds[number]))
            packs = int(micro_batch[documents].max()) + 1
        return micro_batch

    def _dealt(self, micro_batch: np.ndarray) -> StepPlan:
        """Deal micro-batches to ranks round by round, by falling time; ranks of most memory first take those that need it."""
        times, tokens = self._summed(micro_batch)
        kinds, kind_of_rank = np.unique(self.topology.capacities, return_inverse=True)
        kind, by_time = np.searchsorted(kinds, tokens), np.argsort(-times, kind="stable")
        ranks = np.lexsort([-self.topology.speeds, -kind_of_rank])
        rank, round = np.empty(len(times), np.int64), np.empty(len(times), np.int64)
        if len(kinds) == 1:
            rank[by_time], round[by_time] = np.resize(ranks, len(times)), np.arange(len(times)) // len(ranks)
            return self._built(micro_batch, rank, round)
        queues = [by_time[kind[by_time] == number][::-1].tolist() for number in range(len(kinds))]
        turn, left, kinds_of = 0, len(times), kind_of_rank.tolist()
        while left:
            for this in ranks.tolist():
                queue = next((queues[number] for number in range(kinds_of[this], -1, -1) if queues[number]), None)
                if queue:
                    taken = queue.pop()
                    rank[taken], round[taken], left = this, turn, left - 1
            turn += 1
        return self._built(micro_batch, rank, round)

    def _late(self, plan: StepPlan) -> bool:
        return plan.timeline().makespan > self.bound * GOOD_ENOUGH

    def _sooner(self, plan: StepPlan, other: StepPlan) -> StepPlan:
        return other if other.timeline().makespan < plan.timeline().makespan else plan

    def _built(self, micro_batch: np.ndarray, rank: np.ndarray, round: np.ndarray) -> StepPlan:
        """The plan of micro-batches of one rank each.

        Args:
            micro_batch: int64 [documents]; none is empty.
            rank, round: int64 [micro-batches].
        """
        count, topology = len(rank), self.topology
        times, _ = self._summed(micro_batch)
        # By round, then by rank, and on a rank as they were numbered.
        by_round = np.lexsort([rank, round])
        place = np.empty(count, np.int64)
        place[by_round] = np.arange(count)
        of_document, length = np.empty(len(self.order), np.int64), np.empty(len(self.order), np.int64)
        of_document[self.order], length[self.order] = place[micro_batch], self.tokens
        document, first_document = grouped(of_document, count)
        rank = rank[by_round]
        return StepPlan(
            topology=topology,
            first_member=np.arange(count + 1),
            rank=rank,
            first_document=first_document,
            doc=document,
            length=length[document],
            holder=rank[of_document[document]],
            cost=topology.times(times[by_round], rank),
            lower_bound=self.bound,
            offload=np.zeros(count, np.int64),
            round=round[by_round],
            mode=self.mode,
        )


@compiled
def spread_where_they_fit(
    times: np.ndarray,
    tokens: np.ndarray,
    begins: np.ndarray,
    speeds: np.ndarray,
    capacities: np.ndarray,
    heap: np.ndarray,
    loads: np.ndarray,
) -> np.ndarray:  # pragma: no cover - compiled
    """int64 [documents]: of the ranks that hold each document, the one that is done with it soonest; the lower of two.

    Args:
        times: int64 [documents], nanoseconds at speed 1000, longest first.
        tokens: int64 [documents]; some rank holds each.
        begins: int64 [kinds + 1]: where ranks of one speed and memory begin in `heap`.
        speeds, capacities: int64 [kinds]: per mille, tokens.
        heap: int64 [world_size]: ranks of each kind, ascending; changed: a heap of each kind, the least loaded on top.
        loads: int64 [world_size], changed: when each rank is done; 0 at first.
    """
    chosen = np.empty(len(times), np.int64)
    times, tokens, begins = listed(times), listed(tokens), listed(begins)
    speeds, capacities, heap, loads = listed(speeds), listed(capacities), listed(heap), listed(loads)
    for i in range(len(times)):
        best, soonest = -1, 0
        for kind in range(len(speeds)):
            if capacities[kind] < tokens[i]:
                continue
            end = loads[heap[begins[kind]]] + times[i] * 1000 // speeds[kind]
            if best < 0 or end < soonest:
                best, soonest = kind, end
        begin, size = begins[best], begins[best + 1] - begins[best]
        rank = heap[begin]
        chosen[i] = rank
        loads[rank] = soonest
        place = 0
        while 2 * place + 1 < size:  # the rank sinks to its place
            child = begin + 2 * place + 1
            least = loads[heap[child]]
            if child + 1 < begin + size:
                other = loads[heap[child + 1]]
                if other < least or (other == least and heap[child + 1] < heap[child]):
                    child += 1
                    least = other
            if least > soonest or (least == soonest and heap[child] > rank):
                break
            heap[begin + place] = heap[child]
            place = child - begin
        heap[begin + place] = rank
    return chosen


@compiled
def fit_by(
    target: int,
    times: np.ndarray,
    first: np.ndarray,
    eligible: np.ndarray,
    speeds: np.ndarray,
    rank: np.ndarray,
) -> bool:  # pragma: no cover - compiled
    """Place documents, longest first, each on the first rank that still ends by `target`; return whether all found one.

    Args:
        target: nanoseconds.
        times, first: int64 [documents], nanoseconds at speed 1000: of each, and what a rank's first one takes more.
        eligible: int64 [documents]: so many of the ranks, from the first on, hold each; at least one.
        speeds: int64 [world_size], per mille.
        rank: int64 [documents], filled.

    A binary tree knows the most time left on any rank in each of its halves, -1 on those without a document.
    """
    leaves, opened = 1, 0
    while leaves < len(speeds):
        leaves *= 2
    left = listed(np.full(2 * leaves, -1))
    times, first, eligible, speeds = listed(times), listed(first), listed(eligible), listed(speeds)
    for i in range(len(times)):
        node, rest = 1, left[1] - times[i]
        if rest >= 0:
            while node < leaves:
                node *= 2
                if left[node] < times[i]:
                    node += 1
            rest = left[node] - times[i]
        if rest < 0 or node - leaves >= eligible[i]:
            if opened >= eligible[i]:
                return False
            node = leaves + opened
            rest = target // 1000 * speeds[opened] + target % 1000 * speeds[opened] // 1000 - times[i] - first[i]
            opened += 1
            if rest < 0:
                return False
        rank[i] = node - leaves
        left[node] = rest
        while node > 1:
            node //= 2
            left[node] = max(left[2 * node], left[2 * node + 1])
    return True


def exchanged(rank: np.ndarray, times: np.ndarray, tokens: np.ndarray, bound: int, topology: Topology) -> np.ndarray:
    """int64 [documents]: the rank of each after the rank that ends last gave a document away, or exchanged one for another, as
    often as that made it end sooner.

    Args:
        rank, times, tokens: int64 [documents]; times are nanoseconds at speed 1000.
        bound: nanoseconds that are good enough.
    """
    rank, work, speeds = rank.copy(), times.astype(np.float64), topology.speeds / FULL
    capacities, ranks = topology.capacities, np.arange(topology.world_size)
    load = sums(rank, times, topology.world_size).astype(np.float64)  # at speed 1000
    left = MOST_PAIRS
    while True:
        last = int((load / speeds).argmax())
        end = load[last] / speeds[last]
        mine, theirs = np.flatnonzero(rank == last), np.flatnonzero(rank != last)
        left -= len(mine) * (len(theirs) + len(ranks))
        if end <= bound * GOOD_ENOUGH or left < 0:
            break
        # Columns: a document of another rank that comes back, or nothing that does.
        to = np.concatenate([rank[theirs], ranks])
        back_work = np.concatenate([work[theirs], np.zeros(len(ranks))])
        back_tokens = np.concatenate([tokens[theirs], np.zeros(len(ranks), np.int64)])
        less = work[mine, None] - back_work
        after = np.maximum((load[last] - less) / speeds[last], (load[to] + less) / speeds[to])
        after[(tokens[mine, None] > capacities[to]) | (back_tokens > capacities[last]) | (to == last)] = np.inf
        i, j = np.unravel_index(int(after.argmin()), after.shape)
        if not after[i, j] < end:
            break
        rank[mine[i]] = to[j]
        if j < len(theirs):
            rank[theirs[j]] = last
        for changed in (last, int(to[j])):
            load[changed] = times[rank == changed].sum()  # of integers: exact in any order
    return rank
