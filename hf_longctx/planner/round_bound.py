"""The makespan that no plan in rounds beats, in mode "lockstep", where a round costs its slowest rank.

Order the rounds by cost. The j-th costliest costs at least H_j, any m of them do no more work than D_m of the work W of all
documents, and the other rounds keep all R ranks busy for the rest at best:

    LB = max over m of  H_1 + ... + H_m  +  (W - D_m) / R

H_j, what its longest document takes on the ranks that suit it best: j-1 rounds hold (j-1)*R*C tokens, so of the longest documents
that exceed these together, one lies in the j-th round or a costlier one. Of documents of more than a (k+1)-th of a round's
tokens each, a round holds k at most, so the same holds for the longest (j-1)*k + 1.

D_m: at most the m*R*C tokens that are densest in work. Or else, at a price p of a token, a document of s tokens and w work is
worth w - p*s, and m rounds do no more than the price of their tokens and what all documents in them are worth that are worth
anything; but of documents of more than a (k+1)-th of a round's tokens, no more than the k*m worthiest:

    D_m <=  m*R*C*p + (the k*m worthiest of these) + (all others of worth)           for every price p and every k

Where k is 1, a round with a document of s tokens has room for R*C - s more, whose price is no higher than the density of the
densest document that fits there.

Unequal ranks: R is the sum of their speeds, and R*C the tokens of all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from hf_longctx.planner.topology import FULL

TOGETHER = (1, 2, 3, 5)
"""k: documents of a round that are looked at."""
PRICES = 16
"""Densities of documents that are tried as prices, each of a 16th of all tokens."""
LARGEST = 2**62
"""Nanoseconds: no product exceeds it."""


def bound_of_rounds(
    lengths: np.ndarray,
    tokens: np.ndarray,
    work: np.ndarray,
    round_tokens: int,
    speed: int,
    least: Callable[[np.ndarray], np.ndarray],
) -> int:
    """Return a makespan that no plan in rounds goes below: nanoseconds, or units of the cost model; at least 1.

    Args:
        lengths, tokens, work: int64 [documents], longest first: tokens that each counts as, and has; nanoseconds of all its
            ranks, with its share of a micro-batch.
        round_tokens: what all ranks hold.
        speed: of all ranks together, per mille.
        least: nanoseconds that documents of some lengths (int64, longest first) take on the ranks that suit them best.
    """
    ends, total = np.cumsum(tokens), int(work.sum())
    rounds = -(-int(ends[-1]) // round_tokens)
    # No document has fewer tokens than it counts as. So of these, k + 1 exceed a round.
    apart = {k: int(np.searchsorted(-lengths, -(round_tokens // (k + 1)))) for k in TOGETHER}
    most = max([rounds, *(-(-count // k) for k, count in apart.items())])
    decisive = np.full(most, len(lengths) - 1)
    decisive[:rounds] = np.searchsorted(ends, round_tokens * np.arange(rounds), side="right")
    for k, count in apart.items():
        later = np.arange(0, count, k)
        decisive[: len(later)] = np.minimum(decisive[: len(later)], later)
    rising = np.append(0, np.cumsum(least(lengths[decisive])))
    done = np.full(most + 1, total)
    for limit in _work_of_rounds(lengths, tokens, work, round_tokens, apart, most):
        done = np.minimum(done, limit)
    rest = total - done
    rest = rest // speed * FULL + rest % speed * FULL // speed  # rest * FULL may exceed 64 bits
    return max(int((rising + rest).max()), 1)


def _work_of_rounds(
    lengths: np.ndarray, tokens: np.ndarray, work: np.ndarray, round_tokens: int, apart: dict[int, int], most: int
) -> Iterator[np.ndarray]:
    """Yield limits of D_m for m = 0 to `most`: int64 [most + 1]. `apart`: k -> how many of the documents, of which a round holds
    k at most."""
    rounds = np.arange(most + 1)
    by_density = np.argsort(-(work / tokens), kind="stable")
    dense_ends = np.cumsum(tokens[by_density])
    # Documents that m rounds hold only in part are counted whole: more work than there can be.
    last = np.minimum(np.searchsorted(dense_ends, round_tokens * rounds[1:]), len(lengths) - 1)
    yield np.append(0, np.cumsum(work[by_density])[last])

    alone = apart[1]
    room = round_tokens - tokens[:alone]
    density = -(-work // tokens)
    densest = np.append(np.maximum.accumulate(density[::-1])[::-1], 0)  # of each document and all after it
    beside = densest[np.searchsorted(-lengths, -room)]
    at = by_density[np.searchsorted(dense_ends, int(dense_ends[-1]) * np.arange(PRICES) // PRICES)]
    for price in dict.fromkeys(density[at].tolist()):
        if price * round_tokens * (most + 1) > LARGEST:
            continue
        worth = np.maximum(work - price * tokens, 0)
        everything = int(worth.sum())
        # Where a round holds all of a few such documents, they limit nothing.
        limiting = {k: count for k, count in apart.items() if count > k}
        if not limiting:
            yield rounds * (price * round_tokens) + everything
        for k, count in limiting.items():
            others = everything - int(worth[:count].sum())
            above = worth[:count]
            if k == 1:  # more than the price of its tokens that a round with this document does
                above = work[:count] + np.minimum(beside, price) * room - price * round_tokens
            worthiest = np.append(0, np.cumsum(np.sort(np.maximum(above, 0))[::-1]))
            yield rounds * (price * round_tokens) + worthiest[np.minimum(rounds * k, count)] + others
