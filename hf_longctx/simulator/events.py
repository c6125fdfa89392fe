"""When micro-batches start and stop, event by event, where they compete for the network cards of nodes.

A micro-batch starts when all its ranks have ended what came before; with rounds, also not before its round. Layer by
layer it computes what nothing hides behind (linear), then attention, behind which its exchange travels. At the rates b
of the nodes that it exchanges through, all of it would take

    T(b) = max( compute,  linear + messages + inside + max over its nodes of bytes / b )          direct exchange
           max( compute,  linear + messages + max( inside, max over its nodes of bytes / b ) )    ring

and it does dt / T(b) of its work in a time dt. Rates change whenever a micro-batch with traffic between nodes starts or
stops on one of its nodes. Each wants the rate at which its exchange just hides, at most one card for each rank that
sends; where a node's cards cannot serve all, the wants are cut to an equal share per sending rank:

    cards for 8, two micro-batches of 3 and 6 ranks; wants 2.0 and 6.0   ->   2.0 and 6.0
                                                     wants 3.0 and 6.0   ->   2.67 and 5.33

A micro-batch that is held up on one node keeps its share of the others: the result is never too good.

Interpreted or compiled (planner/compiled.py). Events of the same time come in the order of the micro-batches: the same result on
every machine.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from hf_longctx.planner.compiled import compiled, planning

SECONDS = 1e-4
"""A core's, interpreted, for each member of a micro-batch."""
COMPILING = 5.0
"""A core's seconds that compiling takes."""


class Tasks(NamedTuple):
    """m micro-batches with k members; seconds without contention."""

    first_member: np.ndarray
    """int64 [m + 1]"""
    rank: np.ndarray
    """int64 [k]"""
    round: np.ndarray
    """int64 [m], ascending; all alike where ranks do not meet."""
    compute: np.ndarray
    """[m]: of the slowest member."""
    linear: np.ndarray
    """[m]: the part of it that no exchange hides behind, of the slowest member."""
    messages: np.ndarray
    """[m]: latency of the exchange."""
    inside: np.ndarray
    """[m]: what travels inside nodes."""


class Links(NamedTuple):
    """The e pairs of a micro-batch and a node that it exchanges with others through."""

    first_pair: np.ndarray
    """int64 [m + 1]"""
    node: np.ndarray
    """int64 [e]"""
    micro_batch: np.ndarray
    """int64 [e]"""
    bytes: np.ndarray
    """[e]"""
    cards: np.ndarray
    """int64 [e]: ranks that send at the same time."""
    wanted: np.ndarray
    """[e]: bytes/s."""
    rate: np.ndarray
    """[e]: bytes/s, now."""
    moved: np.ndarray
    """[e]: bytes so far."""
    busy: np.ndarray
    """int64 [nodes, ranks per node]: pairs that exchange now; a rank runs one micro-batch at a time."""
    busy_count: np.ndarray
    """int64 [nodes]"""


class Progress(NamedTuple):
    """[m] each."""

    left: np.ndarray
    """Share of the work, 1 to 0."""
    since: np.ndarray
    """When that was so."""
    takes: np.ndarray
    """T(b) at the rates of now."""
    version: np.ndarray
    """int64: of the newest event."""
    stamp: np.ndarray
    """int64: the last event that changed a rate of it."""


def play_events(
    tasks: Tasks,
    first_pair: np.ndarray,
    node: np.ndarray,
    node_link: np.ndarray,
    node_cards: np.ndarray,
    *,
    world_size: int,
    ranks_per_node: int,
    ring: bool,
    card_bytes: float,
    cards_per_node: float,
    round_seconds: float = 0.0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, float, float]:
    """start [m], stop [m], bytes that went over the cards [e], when all has ended, and the seconds of that in which rounds
    waited for their own collectives.

    Args:
        first_pair, node, node_link, node_cards: of Workload.
        card_bytes: bytes/s of one card, each way.
        round_seconds: a round takes at least so long: what is gathered and reduced while it runs.
    """
    hidden = tasks.compute - tasks.linear - tasks.messages
    hidden = np.maximum(hidden, tasks.inside) if ring else hidden - tasks.inside
    micro_batch = np.repeat(np.arange(len(tasks.compute)), np.diff(first_pair))
    slack = hidden[micro_batch]
    most = node_cards * card_bytes
    wanted = np.minimum(most, np.divide(node_link, slack, out=most.copy(), where=slack > 0))
    nodes = int(node.max(initial=-1)) + 1
    links = Links(
        first_pair=first_pair,
        node=node,
        micro_batch=micro_batch,
        bytes=node_link,
        cards=node_cards,
        wanted=wanted,
        rate=np.zeros(len(node)),
        moved=np.zeros(len(node)),
        busy=np.zeros((nodes, ranks_per_node), np.int64),
        busy_count=np.zeros(nodes, np.int64),
    )
    with planning(len(tasks.rank) * SECONDS, COMPILING):
        start, stop, end, waited = _play(tasks, links, world_size, ring, card_bytes * cards_per_node, round_seconds)
    assert np.isfinite(stop).all(), "micro-batches wait for each other: their ranks do not run them in one global order"
    return start, stop, links.moved, end, waited


@compiled
def _play(
    tasks: Tasks, links: Links, world_size: int, ring: bool, node_bytes: float, round_seconds: float
) -> tuple[np.ndarray, np.ndarray, float, float]:  # pragma: no cover - compiled
    micro_batches = len(tasks.compute)
    start, stop = np.full(micro_batches, np.inf), np.full(micro_batches, np.inf)
    of_member = np.empty(len(tasks.rank), np.int64)
    missing = np.empty(micro_batches, np.int64)
    for i in range(micro_batches):
        of_member[tasks.first_member[i] : tasks.first_member[i + 1]] = i
        missing[i] = tasks.first_member[i + 1] - tasks.first_member[i]
    # A rank's members, in the order in which it runs them.
    by_rank = np.argsort(tasks.rank, kind="mergesort")
    first_of_rank = np.searchsorted(tasks.rank[by_rank], np.arange(world_size + 1))
    position = first_of_rank[:-1].copy()
    progress = Progress(
        np.ones(micro_batches),
        np.zeros(micro_batches),
        np.zeros(micro_batches),
        np.zeros(micro_batches, np.int64),
        np.full(micro_batches, -1),
    )
    changed = np.empty(micro_batches, np.int64)
    ready = np.empty(micro_batches, np.int64)
    events = [(0.0, 0, 0)]
    events.pop()

    for r in range(world_size):
        if position[r] < first_of_rank[r + 1]:
            missing[of_member[by_rank[position[r]]]] -= 1
    now = round_began = waited = 0.0
    ended = tick = ready_count = round_stop = 0
    while True:
        if ended == round_stop:  # the next round, or the only one
            if ended > 0:
                waited += max(0.0, round_began + round_seconds - now)
                now = max(now, round_began + round_seconds)
            if ended == micro_batches:
                break
            round_began = now
            first = round_stop
            while round_stop < micro_batches and tasks.round[round_stop] == tasks.round[first]:
                if missing[round_stop] == 0:
                    ready[ready_count] = round_stop
                    ready_count += 1
                round_stop += 1
        ready[:ready_count].sort()
        changes = 0
        tick += 1
        for a in range(ready_count):
            i = ready[a]
            start[i] = progress.since[i] = now
            for e in range(links.first_pair[i], links.first_pair[i + 1]):
                n = links.node[e]
                links.busy[n, links.busy_count[n]] = e
                links.busy_count[n] += 1
                changes = _share(n, links, node_bytes, progress.stamp, tick, changed, changes)
            if links.first_pair[i] == links.first_pair[i + 1]:
                changed[changes] = i
                changes += 1
        ready_count = 0
        _update(now, changed[:changes], tasks, links, ring, progress, events)
        if len(events) == 0:
            break  # a deadlock
        when, i, version = heapq.heappop(events)
        if version != progress.version[i]:
            continue
        now = when
        _work(i, now, links, progress)
        for e in range(links.first_pair[i], links.first_pair[i + 1]):
            links.moved[e] += progress.left[i] * links.bytes[e]  # what rounding left
        progress.left[i] = 0.0
        progress.version[i] += 1
        stop[i] = now
        ended += 1
        changes = 0
        tick += 1
        for e in range(links.first_pair[i], links.first_pair[i + 1]):
            n = links.node[e]
            at = 0
            while links.busy[n, at] != e:
                at += 1
            links.busy_count[n] -= 1
            links.busy[n, at] = links.busy[n, links.busy_count[n]]
            changes = _share(n, links, node_bytes, progress.stamp, tick, changed, changes)
        _update(now, changed[:changes], tasks, links, ring, progress, events)
        for j in range(tasks.first_member[i], tasks.first_member[i + 1]):
            r = tasks.rank[j]
            position[r] += 1
            if position[r] < first_of_rank[r + 1]:
                following = of_member[by_rank[position[r]]]
                missing[following] -= 1
                if missing[following] == 0 and following < round_stop:
                    ready[ready_count] = following
                    ready_count += 1
    return start, stop, now, waited


@compiled
def _share(
    n: int, links: Links, node_bytes: float, stamp: np.ndarray, tick: int, changed: np.ndarray, changes: int
) -> int:  # pragma: no cover - compiled
    """Share out the cards of node n anew; returns how many micro-batches `changed` holds, those of n now among them, each
    once."""
    pairs = links.busy[n, : links.busy_count[n]]
    room, cards, served = node_bytes, 0, 0
    for e in pairs:
        links.rate[e] = -1.0
        cards += links.cards[e]
        if stamp[links.micro_batch[e]] != tick:
            stamp[links.micro_batch[e]] = tick
            changed[changes] = links.micro_batch[e]
            changes += 1
    while served < len(pairs):
        share = room / cards
        content = 0
        for e in pairs:
            if links.rate[e] < 0 and links.wanted[e] <= share * links.cards[e]:
                links.rate[e] = links.wanted[e]
                room -= links.wanted[e]
                cards -= links.cards[e]
                content += 1
        served += content
        if content == 0:
            for e in pairs:
                if links.rate[e] < 0:
                    links.rate[e] = share * links.cards[e]
            break
    return changes


@compiled
def _update(
    now: float,
    changed: np.ndarray,
    tasks: Tasks,
    links: Links,
    ring: bool,
    progress: Progress,
    events: list[tuple[float, int, int]],
) -> None:  # pragma: no cover - compiled
    """New ends of the micro-batches whose rates have changed: T(b) of the module docstring."""
    for i in changed:
        _work(i, now, links, progress)
        between = 0.0
        for e in range(links.first_pair[i], links.first_pair[i + 1]):
            if links.bytes[e] > 0:
                between = max(between, links.bytes[e] / links.rate[e])
        exchange = max(tasks.inside[i], between) if ring else tasks.inside[i] + between
        progress.takes[i] = max(tasks.compute[i], tasks.linear[i] + tasks.messages[i] + exchange)
        progress.version[i] += 1
        heapq.heappush(events, (now + progress.left[i] * progress.takes[i], i, progress.version[i]))


@compiled
def _work(i: int, now: float, links: Links, progress: Progress) -> None:  # pragma: no cover - compiled
    """Note what micro-batch i has done since it was looked at last."""
    if progress.takes[i] > 0:
        done = min(progress.left[i], (now - progress.since[i]) / progress.takes[i])
        progress.left[i] -= done
        for e in range(links.first_pair[i], links.first_pair[i + 1]):
            links.moved[e] += done * links.bytes[e]
    progress.since[i] = now
