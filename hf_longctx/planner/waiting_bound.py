"""Ranks that wait for slower ones, whatever the plan: the least that documents keep all ranks busy, their waiting counted.

A rank of speed v that holds t of a document's s tokens, which take W of work, computes for W*t / (s*v). Say that the document's
micro-batch takes W*x/s, so that x tokens are done meanwhile at full speed. The rank holds v*x of them if it has room for as many.
If its capacity C is less, it waits for the time of v*x - C tokens. The document's ranks have s tokens together, so they wait for

    G(s) = min over x and ranks r of  sum over r of max(0, v_r*x - C_r)     where  sum over r of min(v_r*x, C_r) >= s

tokens at least. For one x, ranks of low v/C are the best: the next one waits longest for each token that it holds. A part of a
rank counts as such, and between two of these x the least is concave in x: those where a kind of ranks begins to wait, and those
where whole kinds hold the document. G is 0 up to the tokens that some ranks hold without waiting.

Other documents in the micro-batch fill no waiting, as a rank has no room for more tokens, unless one of theirs takes longer. So a
token counts as taking no longer than one of any document that is counted with its waiting and has as many tokens or more.

Each micro-batch waits for one of its documents at least. Of those with more than a (k+1)-th of all ranks' tokens it holds k at
most, so a k-th of each one's waiting may be counted, for any one k: of a document with a share f of all tokens,
u_k(f) = floor((k+1)*f) / k, or f where (k+1)*f is whole. These sum up to 1 at most wherever the f do.

Source: the functions u_k are dual feasible functions of Fekete and Schepers (2001).
"""

from __future__ import annotations

import numpy as np

from hf_longctx.planner.topology import FULL, Topology

SHARED_BY = (1, 2, 3)
"""k: documents with waiting in a micro-batch that are looked at."""
AT_A_TIME = 1 << 20
"""Pairs of a document and a kind of ranks, which take a few dozen bytes."""
ROUNDED = 1 - 1e-9
"""A share of waiting that is more than floats lose."""


def work_with_waiting(work: np.ndarray, tokens: np.ndarray, topology: Topology) -> np.ndarray:
    """int64 [documents]: work with the waiting that it brings. All ranks' speeds times the makespan are no less than its sum, in
    any plan, and no less in any part of a plan than the sum over its documents.

    Args:
        work, tokens: int64 [documents], in any order: of all ranks together, on the fewest that hold the document; at least 1.
    """
    most = topology.tokens
    counted = np.flatnonzero(tokens * (max(SHARED_BY) + 1) > most)
    if topology.uniform or not len(counted):
        return work
    counted = counted[np.argsort(-tokens[counted], kind="stable")]
    waiting = least_waiting(tokens[counted], topology)
    best, total = work, int(work.sum())
    for k in SHARED_BY:
        parts = (k + 1) * tokens[counted]
        share = np.where(parts % most == 0, tokens[counted] / most, parts // most / k) * waiting
        some = share > 0
        if not some.any():
            continue
        documents = counted[some]
        # As many as longer ones take at most, and all others as many as the shortest of these.
        rates = np.minimum.accumulate(work[documents] / tokens[documents])
        with_waiting = np.minimum(work, (tokens * rates[-1] * ROUNDED).astype(np.int64))
        with_waiting[documents] = ((tokens[documents] + share[some]) * rates * ROUNDED).astype(np.int64)
        if (summed := int(with_waiting.sum())) > total:
            best, total = with_waiting, summed
    return best


def least_waiting(tokens: np.ndarray, topology: Topology) -> np.ndarray:
    """float64 [documents]: G(s), in tokens at full speed, of documents that all ranks together hold."""
    (speed, room), kind = topology.kinds
    count = np.bincount(kind)
    by_waiting = np.argsort(speed / room, kind="stable")
    speed, room, count = speed[by_waiting] / FULL, room[by_waiting].astype(float), count[by_waiting]
    begins = room / speed  # x from which on ranks of a kind wait, falling
    speeds, rooms = np.append(0, np.cumsum(count * speed)), np.append(0, np.cumsum(count * room))
    without_waiting = speeds[1:] * begins
    distinct, of_document = np.unique(tokens, return_inverse=True)
    least = np.zeros(len(distinct))
    waits = np.flatnonzero(distinct > without_waiting.max())
    step = max(1, AT_A_TIME // len(begins))
    for first in range(0, len(waits), step):
        some = waits[first : first + step]
        s = distinct[some, None].astype(float)
        least[some] = np.minimum(
            _where_whole_kinds_hold(s, speeds, rooms, begins), _where_a_kind_begins(s, speeds, rooms, begins)
        )
    return least[of_document]


def _where_whole_kinds_hold(s: np.ndarray, speeds: np.ndarray, rooms: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """float64 [documents]: the least waiting where the first k kinds hold the document, of all k. `s`: [documents, 1]."""
    kinds = np.arange(1, len(begins) + 1)
    left = s - rooms[1:]  # tokens that the kinds with room to spare must hold, less all that they could
    spare = speeds[1:] * begins - rooms[1:]  # the same where kind j begins to wait, falling with j
    roomy = np.minimum(np.searchsorted(-spare, -left.ravel(), side="right").reshape(left.shape), kinds)
    enough = left <= 0
    roomy = np.where(enough, np.maximum(roomy, 1), 1)  # how many kinds have room to spare
    x = (left + rooms[roomy]) / speeds[roomy]
    waiting = (speeds[1:] - speeds[roomy]) * x - (rooms[1:] - rooms[roomy])
    return np.where(enough, np.maximum(waiting, 0), np.inf).min(axis=1)


def _where_a_kind_begins(s: np.ndarray, speeds: np.ndarray, rooms: np.ndarray, begins: np.ndarray) -> np.ndarray:
    """float64 [documents]: the least waiting where a kind begins to wait, of all kinds. `s`: [documents, 1]."""
    need = s - speeds[1:] * begins + rooms[1:]  # all tokens of full ranks, where kinds up to this one were full as well
    last = np.searchsorted(rooms, need.ravel(), side="left").reshape(need.shape)  # the kind that holds the rest
    enough = last < len(rooms)
    last = np.clip(last, np.arange(2, len(begins) + 2), len(rooms) - 1)
    enough &= last > np.arange(1, len(begins) + 1)
    before = last - 1
    of_last = (need - rooms[before]) / (rooms[last] - rooms[before])
    own = np.arange(1, len(begins) + 1)
    waiting = (speeds[before] - speeds[own]) * begins - (rooms[before] - rooms[own])
    waiting = waiting + of_last * ((speeds[last] - speeds[before]) * begins - (rooms[last] - rooms[before]))
    return np.where(enough, np.maximum(waiting, 0), np.inf).min(axis=1)
