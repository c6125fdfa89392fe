"""How many tokens of a split document each of its ranks holds.

Equal ranks hold equally many, but for a token. Of several documents that the same ranks share, each begins to deal out
what is left over where the one before ended, so that no rank holds more than one token above another in total:

    3 ranks, documents of 4, 5 and 3 tokens:     rank 0: 2 1 1     rank 1: 1 2 1     rank 2: 1 2 1

Unequal ranks hold a document in proportion to their speed, so that they finish together, but none more than its
capacity, and each at least a token. What is left over goes to the fastest.
"""

from __future__ import annotations

import numpy as np

from hf_longctx.planner.compiled import compiled, listed


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


@compiled
def slowest_share(tokens: np.ndarray, speeds: np.ndarray) -> int:  # pragma: no cover - compiled
    """Tokens that a rank of speed 1000 holds in the time that the slowest of these needs, rounded up."""
    return (-(-tokens * 1000 // speeds)).max()


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
