"""Dynamic context parallelism: groups of powers of two, chosen anew for every micro-batch, as Megatron-LM and verl train.

Every round gives each rank one micro-batch. A document needs the least power of two of ranks that holds it, d(s); its load
on them is taken to be s^2 / d. The longest document that is left opens a round on d(s) ranks. Each further one, longest
first, joins a group that has room, or opens a group on free ranks, of d(s) ranks or twice, four times ... as many:
whichever leaves the busiest rank of the round with the least load. What would exceed the load of a full group
of the longest document's, s * C, by more than 5 %, or fits nowhere, waits for the next round. Groups stand in order of size,
so that each lies on adjacent ranks; this is round one of lengths 9, 5, 4, 4, 2, 2, 1 on 8 ranks of C = 4:

    ranks 0-3  | 9 2       |      d(9) = 4, load 81 / 4 = 20; the second 2 fits nowhere else: 4 / 4 more
    ranks 4-5  | 5 2 1     |      d(5) = 2, load 25 / 2 = 12; all 8 tokens that two ranks hold
    rank  6    | 4         |      load 16
    rank  7    | 4         |

Free ranks that no document took go to the group that takes longest, whose ranks double while that makes it shorter.
Megatron-LM doubles the smallest groups until no rank is free, whether it helps or not. It takes powers of two of ranks only;
here a document that needs more than the largest power of two among any other number of ranks gets all of them.

Keys and values of a group go around its ring, as in static_cp.py. Here, nothing is sent.

Source: Megatron-LM's documentation of default_dynamic_cp and hybrid context parallelism. benchmarks/planner_peers.py replays
the scheduler of an installed Megatron-Core; this one stands beside ours in all commands, in every mode.
"""

from __future__ import annotations

import math

import numpy as np

from hf_longctx.planner.baselines.static_cp import pack_times
from hf_longctx.planner.compiled import compiled
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.effort import as_work_decides
from hf_longctx.planner.placing.micro_batches import Step
from hf_longctx.planner.placing.packing import grouped, joined_rows
from hf_longctx.planner.plan import Mode, StepPlan
from hf_longctx.planner.topology import Topology

SLACK = 50
"""Per mille by which a round's load may exceed that of a full group of its longest document's: Megatron-LM's 5 %."""


@as_work_decides
def plan_dynamic_cp(lengths: np.ndarray, topology: Topology, cost: CostModel, mode: Mode = "async") -> StepPlan:
    """Plan one optimizer step.

    Raises:
        PlanError: nothing to plan, a document that all ranks together cannot hold, unequal ranks, documents that must
            stay whole, or an unknown mode.
    """
    step = Step.checked(lengths, topology, cost, mode)
    step.refuse_unequal_ranks("dynamic context parallelism")
    step.refuse_kept_whole("dynamic context parallelism", "splits those that take longest")
    ordered = step.lengths[step.by_length]
    sizes_allowed = group_sizes(topology.world_size)
    least = np.searchsorted(sizes_allowed, topology.fewest_ranks(ordered))
    group, size, round = _fill_rounds(ordered, least, sizes_allowed, topology.capacity)
    # The groups of a round, the largest first, from rank 0 on.
    order = np.lexsort((-size, round))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    group, size, round = place[group], size[order], round[order]
    rounds = np.flatnonzero(np.diff(round, prepend=-1))
    groups = _Groups(ordered, group, len(size), step)
    costs = groups.times(np.arange(len(size)), size)
    _widen(groups, size, costs, np.append(rounds, len(size)))
    order = np.lexsort((-size, round))
    ends = np.cumsum(size[order])
    first_rank = np.empty_like(size)
    first_rank[order] = ends - size[order] - np.repeat((ends - size[order])[rounds], np.diff(rounds, append=len(size)))
    members = np.minimum(size, groups.tokens)  # a rank without a token runs nothing
    first_member = np.cumsum(members) - members
    member = np.repeat(first_rank - first_member, members) + np.arange(int(members.sum()))
    micro_batch = np.empty(len(ordered), np.int64)
    micro_batch[step.by_length] = group
    return step.plan("dynamic_cp", micro_batch, members, member, costs, "ring")


def group_sizes(world_size: int) -> np.ndarray:
    """int64: the powers of two up to `world_size`, and `world_size` itself."""
    powers = 2 ** np.arange(world_size.bit_length(), dtype=np.int64)
    return np.union1d(powers, [world_size])


class _Groups:
    """The documents of each group.

    Args:
        ordered, group: int64 [documents]: tokens of each, longest first, and its group.
        count: groups; none is empty.
    """

    def __init__(self, ordered: np.ndarray, group: np.ndarray, count: int, step: Step) -> None:
        documents, self._first_document = grouped(group, count)
        self._lengths, self._step, self.world_size = ordered[documents], step, step.topology.world_size
        self.tokens = np.add.reduceat(self._lengths, self._first_document[:-1])

    def times(self, groups: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """int64 [groups], nanoseconds of each of these groups on so many ranks (int64 [groups])."""
        first, documents = joined_rows(self._first_document, groups)
        ranks = np.minimum(sizes, self.tokens[groups])
        return pack_times(self._lengths[documents], first[:-1], ranks, self._step)


def _widen(groups: _Groups, size: np.ndarray, costs: np.ndarray, first_group: np.ndarray) -> None:
    """Give the free ranks of every round to its group that takes longest, while that helps. Changes `size` and `costs`.

    Args:
        size, costs: int64 [groups]: ranks, and nanoseconds, of each, those of one round after the other.
        first_group: int64 [rounds + 1]: the groups of round i are first_group[i] to first_group[i + 1].
    """
    free = groups.world_size - np.add.reduceat(size, first_group[:-1])
    rounds = np.flatnonzero(free > 0)
    while len(rounds):
        first, longest = joined_rows(first_group, rounds)
        longest = longest[np.lexsort((-costs[longest], np.repeat(rounds, np.diff(first))))]
        before = np.cumsum(size[longest]) - size[longest]
        fits = before - np.repeat(before[first[:-1]], np.diff(first)) < np.repeat(free[rounds], np.diff(first))
        longest, first = longest[fits], np.append(0, np.add.reduceat(fits, first[:-1]).cumsum())
        wider = groups.times(longest, np.minimum(2 * size[longest], groups.world_size))
        rounds = rounds[_doubled(longest, first, rounds, wider, size, costs, free)]


@compiled
def _doubled(
    longest: np.ndarray,
    first: np.ndarray,
    rounds: np.ndarray,
    wider: np.ndarray,
    size: np.ndarray,
    costs: np.ndarray,
    free: np.ndarray,
) -> np.ndarray:  # pragma: no cover - compiled
    """Double groups, as `_widen` does, up to one that was doubled before. Changes `size`, `costs` and `free`.

    Args:
        longest, wider: int64: groups of each round, those that take longest first, and nanoseconds that each takes if doubled.
        first: int64 [rounds + 1]: those of rounds[i] are longest[first[i]] to longest[first[i + 1]].
        free: int64 [all rounds]: free ranks of each.

    Returns:
        bool [rounds]: in which of these another group may be doubled.
    """
    goes_on = np.zeros(len(rounds), np.bool_)
    for i in range(len(rounds)):
        doubled = 0  # nanoseconds of the longest that was
        goes_on[i] = True
        for at in range(first[i], first[i + 1]):
            group = longest[at]
            if costs[group] <= doubled:
                break
            if size[group] > free[rounds[i]] or wider[at] >= costs[group]:
                goes_on[i] = False
                break
            free[rounds[i]] -= size[group]
            size[group] *= 2
            costs[group] = wider[at]
            doubled = max(doubled, wider[at])
        goes_on[i] = goes_on[i] and free[rounds[i]] > 0
    return goes_on


@compiled
def _fill_rounds(
    lengths: np.ndarray, least: np.ndarray, sizes: np.ndarray, capacity: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # pragma: no cover - compiled
    """Group of each document, int64 [documents]; ranks of each group and its round, int64 [groups].

    Args:
        lengths: int64 [documents], longest first.
        least: int64 [documents]: index into `sizes` of the smallest group that holds each.
        sizes: int64, ascending: how many ranks groups may have; the last is all of them.
    """
    count = len(lengths)
    kinds = len(sizes)
    group = np.empty(count, np.int64)
    kind_of, round_of = np.empty(count, np.int64), np.empty(count, np.int64)
    room, load = np.empty(count, np.int64), np.empty(count, np.int64)
    # The groups of this round, a chain for each size, and room that none of them exceeds.
    newest, before = np.empty(kinds, np.int64), np.empty(count, np.int64)
    most_room = np.empty(kinds, np.int64)
    pending = np.arange(count)
    groups, round = 0, 0
    while len(pending) > 0:
        newest[:] = -1
        most_room[:] = 0
        free, busiest, left, failed = sizes[kinds - 1], 0, 0, 0
        longest = lengths[pending[0]]
        limit = longest * capacity + longest * capacity // 1000 * SLACK
        at, most = -1, -1  # `most`: of `_longest_that_may_fit`, -1 until that is asked for
        while at + 1 < len(pending):
            at += 1
            i = pending[at]
            s = lengths[i]
            chosen, opens, reached = -1, -1, limit + 1
            if s != failed:
                for kind in range(least[i], kinds):
                    size = sizes[kind]
                    if reached <= busiest or (at == 0 and kind > least[i]):
                        break
                    share = s * s // size
                    if most_room[kind] >= s:
                        best, widest, g = -1, 0, newest[kind]
                        while g >= 0:
                            widest = max(widest, room[g])
                            if room[g] >= s and (best < 0 or load[g] < load[best]):
                                best = g
                            g = before[g]
                        most_room[kind] = widest
                        if best >= 0 and max(busiest, load[best] + share) < reached:
                            chosen, opens, reached = best, -1, max(busiest, load[best] + share)
                    may_open = free >= size and (size <= s or kind == least[i])
                    if may_open and max(busiest, share) < reached:
                        chosen, opens, reached = groups, kind, max(busiest, share)
            if chosen < 0:
                failed = s  # as does every other document of this length
                if most < 0:
                    most = _longest_that_may_fit(newest, before, room, load, sizes, free, capacity, limit)
                # None that is longer needs to be looked at until another is placed.
                low, high = at, len(pending)
                if high > at + 1 and lengths[pending[at + 1]] <= most:
                    high = at + 1
                while high - low > 1:
                    middle = (low + high) // 2
                    if lengths[pending[middle]] > most:
                        low = middle
                    else:
                        high = middle
                pending[left : left + high - at] = pending[at:high]
                left += high - at
                at = high - 1
                continue
            if opens >= 0:
                kind_of[groups], round_of[groups] = opens, round
                room[groups], load[groups] = sizes[opens] * capacity, 0
                before[groups], newest[opens] = newest[opens], groups
                free -= sizes[opens]
                groups += 1
            kind = kind_of[chosen]
            group[i] = chosen
            room[chosen] -= s
            load[chosen] += s * s // sizes[kind]
            most_room[kind] = max(most_room[kind], room[chosen])
            busiest, most = reached, -1
        pending = pending[:left].copy()
        round += 1
    return group, sizes[kind_of[:groups]], round_of[:groups]


@compiled
def _longest_that_may_fit(
    newest: np.ndarray,
    before: np.ndarray,
    room: np.ndarray,
    load: np.ndarray,
    sizes: np.ndarray,
    free: int,
    capacity: int,
    limit: int,
) -> int:  # pragma: no cover - compiled
    """Return a length, in tokens, that none exceeds of the documents which still fit into the round: into a group, or into a new
    one of free ranks, within the load `limit`. The chains of groups are as in `_fill_rounds`."""
    most = 0
    for kind in range(len(sizes)):
        size = sizes[kind]
        if free >= size:
            most = max(most, min(size * capacity, int(math.sqrt(float(limit + 1) * size)) + 1))
        group = newest[kind]
        while group >= 0:
            if room[group] > most and load[group] <= limit:
                most = max(most, min(room[group], int(math.sqrt(float(limit + 1 - load[group]) * size)) + 1))
            group = before[group]
    return most
