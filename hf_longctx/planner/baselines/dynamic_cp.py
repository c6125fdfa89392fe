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

import numpy as np

from hf_longctx.planner.baselines.static_cp import pack_times
from hf_longctx.planner.compiled import compiled
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.effort import as_work_decides
from hf_longctx.planner.placing.micro_batches import Step
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
    by_group = np.split(ordered[np.argsort(group, kind="stable")], np.cumsum(np.bincount(group))[:-1])
    costs = _times(by_group, size, step)
    starts = np.concatenate([np.flatnonzero(np.diff(round, prepend=-1)), [len(round)]])
    first_rank = np.empty_like(size)
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist()):
        _widen(by_group[begin:end], size[begin:end], costs[begin:end], step)
        order = np.argsort(-size[begin:end], kind="stable")
        first_rank[begin:end][order] = np.cumsum(size[begin:end][order]) - size[begin:end][order]
    # A rank without a token runs nothing.
    members = np.minimum(size, np.bincount(group, weights=ordered).astype(np.int64))
    first_member = np.cumsum(members) - members
    member = np.repeat(first_rank - first_member, members) + np.arange(int(members.sum()))
    micro_batch = np.empty(len(ordered), np.int64)
    micro_batch[step.by_length] = group
    return step.plan("dynamic_cp", micro_batch, members, member, costs, "ring")


def group_sizes(world_size: int) -> np.ndarray:
    """int64: the powers of two up to `world_size`, and `world_size` itself."""
    powers = 2 ** np.arange(world_size.bit_length(), dtype=np.int64)
    return np.union1d(powers, [world_size])


def _times(by_group: list[np.ndarray], size: np.ndarray, step: Step) -> np.ndarray:
    """int64 [groups], nanoseconds of each on so many ranks (int64 [groups]); `by_group`: lengths of each, which descend."""
    tokens = np.array([int(lengths.sum()) for lengths in by_group])
    return pack_times(by_group, np.minimum(size, tokens), step)


def _widen(by_group: list[np.ndarray], size: np.ndarray, costs: np.ndarray, step: Step) -> None:
    """Give the free ranks of a round to the groups that take longest, while that helps. Changes `size` and `costs`."""
    free = step.topology.world_size - int(size.sum())
    while free > 0:
        longest = int(costs.argmax())
        ranks = int(size[longest])
        if ranks > free or (wider := _times([by_group[longest]], np.array([2 * ranks]), step)[0]) >= costs[longest]:
            return
        size[longest], costs[longest] = 2 * ranks, wider
        free -= ranks


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
        limit = longest * capacity * (1000 + SLACK) // 1000
        for at in range(len(pending)):
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
                pending[left] = i
                left += 1
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
            busiest = reached
        pending = pending[:left].copy()
        round += 1
    return group, sizes[kind_of[:groups]], round_of[:groups]
