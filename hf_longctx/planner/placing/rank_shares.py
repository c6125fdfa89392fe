"""How many tokens of a split document each of its ranks holds.

Equal ranks hold equally many, but for a token. Of several documents that the same ranks share, each begins to deal out
what is left over where the one before ended, so that no rank holds more than one token above another in total:

    3 ranks, documents of 4, 5 and 3 tokens:     rank 0: 2 1 1     rank 1: 1 2 1     rank 2: 1 2 1

Unequal ranks hold a document in proportion to their speed, so that they finish together, but none more than its
capacity, and each at least a token. What is left over goes to the fastest.
"""

from __future__ import annotations

import numpy as np

from hf_longctx.planner.compiled import borrowing, compiled, listed

TWO_TOKENS = 2000
"""Two tokens, in thousandths: each rank holds less than that above its share of what is left when every rank has one."""


def shares(length: int, ranks: int, before: int = 0) -> list[int]:
    """Tokens of a document on each of `ranks` equal ranks that share it; `before`: tokens of earlier documents that they
    share."""
    base, left = divmod(length, ranks)
    return [base + ((position - before) % ranks < left) for position in range(ranks)]


@compiled
def proportional_shares(length: int, speeds: np.ndarray, room: np.ndarray) -> np.ndarray:  # pragma: no cover - compiled
    """int64 [ranks]: tokens of one document on ranks of these speeds (per mille) and this room (tokens).

    The room of all should be at least the length, and the length at least the number of ranks. Where it is not, the first
    rank holds more than its room, or the last ones nothing: StepPlan.check finds either.
    """
    ranks = len(speeds)
    tokens = np.zeros(ranks, np.int64)
    tokens[:length] = 1
    left = max(length - ranks, 0)
    open = room > 1
    while left > 0:
        speed = (speeds * open).sum()
        if speed == 0:
            tokens[0] += left
            break
        share = left * speeds // speed * open
        capped = open & (share > room - tokens)
        if capped.any():  # first, those whose share does not fit are filled
            left -= ((room - tokens) * capped).sum()
            tokens = np.where(capped, room, tokens)
            open = open & ~capped
        else:
            tokens += share
            left -= share.sum()
            fits = tokens < room  # what rounding down left over, a token each, to the fastest
            open = open & fits
            if left > 0 and fits.any():
                fastest = np.sort(speeds[fits])[::-1][:left]
                faster = fits & (speeds > fastest[-1])
                as_fast = fits & (speeds == fastest[-1])
                more = faster | (as_fast & (np.cumsum(as_fast) <= left - faster.sum()))
                tokens += more
                left -= more.sum()
    return tokens


@borrowing
@compiled
def slowest_share(length: int, speeds: np.ndarray, room: np.ndarray) -> int:  # pragma: no cover - compiled
    """Tokens that a rank of speed 1000 holds in the time that the slowest of these ranks needs for its `proportional_shares`,
    rounded up. No array is made: it is asked for each group that may be one."""
    slowest = 0 * length
    if length <= len(speeds):
        for i in range(length):
            slowest = max(slowest, -(-1000 // speeds[i]))
        return slowest
    slowest = slowest_of_kinds(length, speeds, room, room[:0], room[:0])
    return slowest if slowest >= 0 else _slowest_of(length, speeds, room)


@borrowing
@compiled
def slowest_of_kinds(
    length: int, speeds: np.ndarray, room: np.ndarray, before: np.ndarray, end: np.ndarray
) -> int:  # pragma: no cover - compiled
    """`slowest_share` of fewer ranks than tokens, which are of a few kinds; -1 where only dealing tokens out says it.

    Args:
        speeds, room: int64 [kinds], per mille, tokens.
        before, end: int64 [kinds]: ranks of each kind before the group, and before what follows it; [0]: there is one of each.
    """
    kinds, counted, slowest, ranks = len(speeds), len(end) > 0, 0 * length, 0 * length
    for i in range(kinds):
        ranks += end[i] - before[i] if counted else 1
    # Those whose share does not fit are filled, and shares of the others grow: so who was filled once stays so.
    left, speed = length - ranks, 0 * length
    for i in range(kinds):
        if room[i] > 1:
            speed += speeds[i] * (end[i] - before[i] if counted else 1)
    while speed > 0:
        still_left, still_open = length - ranks, 0 * length
        for i in range(kinds):
            if room[i] > 1:
                count = end[i] - before[i] if counted else 1
                if left * speeds[i] >= min(room[i], length) * speed:  # a product takes a tenth of a quotient's time
                    still_left -= (room[i] - 1) * count
                else:
                    still_open += speeds[i] * count
        if still_open == speed:
            break
        left, speed = still_left, still_open
    if speed == 0:
        return -1
    rest, fitting, fastest, slowest_fitting = left, 0 * length, 0 * length, 0 * length
    for i in range(kinds):
        share, count = left * speeds[i] // speed, end[i] - before[i] if counted else 1
        if count > 0 and room[i] > 1 and share < room[i]:
            rest -= share * count
            if share + 1 < room[i]:
                fitting += count
                fastest = max(fastest, speeds[i])
                slowest_fitting = speeds[i] if slowest_fitting == 0 else min(slowest_fitting, speeds[i])
    if rest > fitting:
        return -1
    # What rounding down left over goes to those of this speed or more. Of one speed all hold as much, or a token less.
    low, high = slowest_fitting, fastest
    while rest > 0 and low < high:
        middle = (low + high + 1) // 2
        faster, next_faster, next_slower = 0 * length, fastest, slowest_fitting
        for i in range(kinds):
            if left * speeds[i] < (min(room[i], length + 1) - 1) * speed:
                if speeds[i] >= middle:
                    faster += end[i] - before[i] if counted else 1
                    next_faster = min(next_faster, speeds[i])
                else:
                    next_slower = max(next_slower, speeds[i])
        if faster >= rest:
            low = next_faster
        else:
            high = next_slower
    for i in range(kinds):
        if counted and end[i] == before[i]:
            continue
        tokens = max(min(left * speeds[i] // speed + 1, room[i]), 1)
        if rest > 0 and speeds[i] >= low and tokens < room[i]:
            tokens += 1
        if tokens * 1000 > slowest * speeds[i]:
            slowest = -(-tokens * 1000 // speeds[i])
    return slowest


@borrowing
@compiled
def least_slowest_share(
    length: int, speeds: np.ndarray, room: np.ndarray
) -> tuple[int, bool]:  # pragma: no cover - compiled
    """Return a lower bound of `slowest_share`, of fewer ranks than tokens, and whether that is at most TWO_TOKENS over the least
    speed, and 3, more; 0 and False where nothing is known. A division for each rank would take ten times as long."""
    ranks, left, speed, tight = len(speeds), length - len(speeds), 0 * length, 0 * length
    for i in range(ranks):
        if room[i] > 1:
            speed += speeds[i]
    while speed > 0:  # as in `slowest_of_kinds`
        still_left, still_open, tight = length - ranks, 0 * length, 0 * length
        for i in range(ranks):
            if room[i] > 1:
                share = left * speeds[i]
                if share >= min(room[i], length) * speed:
                    still_left -= room[i] - 1
                else:
                    still_open += speeds[i]
                    if share >= (min(room[i], length + 1) - 1) * speed:
                        tight += 1
        if still_open == speed:
            break
        left, speed = still_left, still_open
    if speed == 0 or left <= 0:
        return 0 * length, False
    if tight > 0:  # as many have no room for a token that rounding down leaves over
        rest, fitting = left, 0 * length
        for i in range(ranks):
            if room[i] > 1 and left * speeds[i] < min(room[i], length) * speed:
                rest -= left * speeds[i] // speed
                if left * speeds[i] < (min(room[i], length + 1) - 1) * speed:
                    fitting += 1
        if rest > fitting:
            return left * 1000 // speed, False
    return left * 1000 // speed, True


@compiled
def _slowest_of(length: int, speeds: np.ndarray, room: np.ndarray) -> int:  # pragma: no cover - compiled
    return (-(-proportional_shares(length, speeds, room) * 1000 // speeds)).max()


@compiled
def slowest_shares(
    lengths: np.ndarray,
    sizes: np.ndarray,
    speeds: np.ndarray,
    room: np.ndarray,
    kind: np.ndarray,
    kind_speeds: np.ndarray,
    kind_room: np.ndarray,
) -> np.ndarray:  # pragma: no cover - compiled
    """int64 [documents]: `slowest_share` of each.

    Args:
        lengths, sizes: int64 [documents], tokens, ranks.
        speeds, room, kind: int64 [members], those of group after group.
        kind_speeds, kind_room: int64 [kinds], where these are few; else [0].
    """
    slowest, begin = np.empty(len(lengths), np.int64), 0
    nothing, counts = np.zeros(len(kind_speeds), np.int64), np.empty(len(kind_speeds), np.int64)
    for i in range(len(lengths)):
        end, share = begin + sizes[i], -1
        if len(counts) > 0 and lengths[i] > sizes[i]:
            counts[:] = 0
            for at in range(begin, end):
                counts[kind[at]] += 1
            share = slowest_of_kinds(lengths[i], kind_speeds, kind_room, nothing, counts)
        slowest[i] = share if share >= 0 else slowest_share(lengths[i], speeds[begin:end], room[begin:end])
        begin = end
    return slowest


@compiled
def shares_of_members(
    first_member: np.ndarray,
    rank: np.ndarray,
    first_document: np.ndarray,
    length: np.ndarray,
    holder: np.ndarray,
    speeds: np.ndarray,
    capacities: np.ndarray,
    uniform: bool,
) -> np.ndarray:  # pragma: no cover - compiled
    """int64 [members]: tokens that each rank of each micro-batch holds. Columns are those of StepPlan."""
    tokens = np.zeros(len(rank), np.int64)
    first_member, first_document = listed(first_member), listed(first_document)
    length, holder = listed(length), listed(holder)
    for i in range(len(first_member) - 1):
        low, high = first_member[i], first_member[i + 1]
        shared = 0
        for j in range(first_document[i], first_document[i + 1]):
            if holder[j] < 0:
                shared += length[j]
            else:
                tokens[low + np.searchsorted(rank[low:high], holder[j])] += length[j]
        if shared and uniform:
            base, left = shared // (high - low), shared % (high - low)
            tokens[low:high] += base
            tokens[low : low + left] += 1
        elif shared:
            ranks = rank[low:high]
            tokens[low:high] += proportional_shares(shared, speeds[ranks], capacities[ranks])
    return tokens
