"""StepPlan -> what every member of every micro-batch computes, and what travels for it. Counted from the plan's columns
and the model's configuration alone: nothing is taken from the costs that the planner predicted.

Compute. A rank that holds t tokens of a document of s computes, forward and backward,

    linear * t   and   attention * (t*s + half*s)   FLOPs     (half: short blocks are slower, planner/cost/cost_model.py)

Direct exchange (layouts/exchange_schedule.py). Zigzag gives rank i of a group a low and a high chunk of each document it
shares, of h_i tokens together. Rank i needs all that later ranks hold, and the low half of what earlier ones hold. Keys that
several ranks of a node need cross to it once and are passed on inside:

    into a node, from other nodes       h of later nodes + h/2 of earlier ones
    out of it                           its h to each earlier node, h/2 to each later one
    into a rank, inside its node        h of later ranks + h/2 of earlier ones + what others of the node brought in

    3 ranks on nodes {0, 1} {2}, h = 4 each:    node 0 gets 4 and sends 2 + 2;  node 1 gets 4 and sends 4
                                                rank 0 gets 4 of rank 1, and 4 from the other node, half of it directly

Chunks (planner/stages/causal_chunks.py) of t tokens after c others compute (c + t)^2 - c^2 pairs, lose half*(t + c/2), and need
what all other ranks hold of the c as well. Each chunk is a unit here; so is every other micro-batch.

Ring. Everything goes around: each rank passes all but its own share to the next.

Forward sends keys and values. Backward sends them again, and float32 gradients the other way. A link carries both
directions at once, and the phases follow each other: each takes as long as its busier direction.

Numbers are float64; shares that do not divide are fractions of tokens here. Nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hf_longctx.hardware.model_sizes import model_flops, squares
from hf_longctx.hardware.speeds import RankSpeed
from hf_longctx.planner.compiled import compiled, planning
from hf_longctx.planner.memory.memory_model import FORWARD_SHARE
from hf_longctx.planner.plan import StepPlan
from hf_longctx.planner.topology import FULL
from hf_longctx.simulator.events import COMPILING
from hf_longctx.simulator.units import UnitColumns, unit_columns

SECONDS = 3e-5
"""A core's, interpreted, for each member of a unit."""
GRADIENT_BYTES = 4
"""Bytes of an element of a key's or value's gradient on its way back."""


@dataclass(frozen=True, eq=False, slots=True)
class Workload:
    """u units with k members, and e pairs of a unit and one of the several nodes that it lies on."""

    units: UnitColumns
    linear_seconds: np.ndarray
    """[k]: compute that no exchange hides behind, launches included."""
    attention_seconds: np.ndarray
    """[k]"""
    slowest_linear: np.ndarray
    """[u]: of any member."""
    slowest_compute: np.ndarray
    """[u]: linear and attention of any member."""
    messages: np.ndarray
    """[u]: rounds of messages, all layers."""
    inside_link: np.ndarray
    """[u]: bytes over the busiest rank's link inside its node."""
    inside_bytes: np.ndarray
    """[u]: bytes that all members receive inside their nodes."""
    between_bytes: np.ndarray
    """[u]: bytes that all members receive from other nodes."""
    first_pair: np.ndarray
    """[u + 1]: unit i has the pairs first_pair[i] to first_pair[i + 1]; none if nothing leaves a node."""
    node: np.ndarray
    """[e]: ascending in each unit."""
    node_link: np.ndarray
    """[e]: bytes over the node's network cards."""
    node_cards: np.ndarray
    """[e]: ranks of the node that send and receive at the same time."""
    model_flops: float
    """Forward and backward of all documents, half of each square of attention, without recomputation."""


def workload(plan: StepPlan, config: Any, speed: RankSpeed, *, recompute: bool = False) -> Workload:
    """Counts a plan.

    Args:
        config: of the Hugging Face model.
        speed: of a rank whose factor in the plan's topology is 1000.
        recompute: whether backward begins with forward once more, exchange included (activation checkpointing).

    Raises ValueError, naming it, when the configuration lacks a size.
    """
    flops = model_flops(config)
    units = unit_columns(plan)
    context = units.context[np.repeat(np.arange(len(units.context)), np.diff(units.first_document))]
    # Of all layers: those with a window see, and receive, fewer of the tokens of earlier chunks.
    with_window = flops.windowed / flops.attention if flops.windowed else 0.0

    def seen(context: np.ndarray) -> np.ndarray:
        return context - with_window * np.maximum(context - (flops.window or 0), 0)

    def pairs_to(tokens: np.ndarray) -> np.ndarray:
        return (1 - with_window) * squares(tokens).astype(np.float64) + with_window * squares(tokens, flops.window)

    pairs = pairs_to(context + units.length) - pairs_to(context)
    edges = units.length + seen(context) / 2
    unlabelled = (plan.unlabelled / plan.length)[units.document] * units.length
    again = 1 + FORWARD_SHARE if recompute else 1.0
    with planning(len(units.rank) * SECONDS, COMPILING):
        linear, attention, shared, slowest_linear, slowest_compute = _compute(
            units.first_member,
            units.rank,
            units.first_document,
            units.length,
            pairs,
            edges,
            unlabelled,
            units.holder,
            units.member_tokens,
            plan.topology.speeds / FULL,
            (again * (flops.linear - flops.head) + flops.head) / speed.linear_flops,  # the head lies behind all layers
            flops.head / speed.linear_flops,
            again * flops.attention / speed.attention_flops,
            speed.attention_half_tokens,
            again * flops.layers * speed.document_seconds,
            again * flops.layers * speed.micro_batch_seconds,
            again * flops.layers * speed.launch_seconds,
        )
        travel = _ring if plan.exchange == "ring" else _direct
        keys, gradients = flops.kv_elements * speed.activation_bytes, flops.kv_elements * GRADIENT_BYTES
        forward = 2.0 if recompute else 1.0
        inside_link, inside, between, first_pair, node, node_link, node_cards = travel(
            units.first_member,
            units.rank,
            shared,
            seen(units.context).astype(np.float64),
            plan.topology.node_size,
            forward * keys,
            float(keys),
            float(gradients),
        )
    return Workload(
        units=units,
        linear_seconds=linear,
        attention_seconds=attention,
        slowest_linear=slowest_linear,
        slowest_compute=slowest_compute,
        messages=np.where(inside + between > 0, np.diff(units.first_member) - 1, 0) * flops.layers,
        inside_link=inside_link,
        inside_bytes=inside,
        between_bytes=between,
        first_pair=first_pair,
        node=node,
        node_link=node_link,
        node_cards=node_cards,
        model_flops=flops.linear * float(units.length.sum())
        - flops.head * float(unlabelled.sum())
        + flops.attention * float(pairs.sum()),
    )


@compiled
def _compute(
    first_member: np.ndarray,
    rank: np.ndarray,
    first_document: np.ndarray,
    length: np.ndarray,
    pairs: np.ndarray,
    edges: np.ndarray,
    unlabelled: np.ndarray,
    holder: np.ndarray,
    member_tokens: np.ndarray,
    speed: np.ndarray,
    linear: float,
    head: float,
    attention: float,
    half: float,
    document: float,
    micro_batch: float,
    launch: float,
) -> tuple[np.ndarray, ...]:  # pragma: no cover - compiled
    """Seconds of linear and attention [k], tokens of split documents [k], slowest linear and compute [u].

    pairs [n]: twice the (query, key) pairs of each document, s^2 without a window; edges [n]: mean of its queries and keys,
    which lose `half` on short blocks; unlabelled [n]: tokens that the head skips; linear, head, attention: seconds per token, of
    them in the head, and per pair; document, micro_batch: seconds each; launch: seconds in which a host starts the kernels of a
    micro-batch, none of which is done sooner.
    """
    micro_batches = len(first_member) - 1
    linear_seconds, attention_seconds, shared = np.zeros(len(rank)), np.zeros(len(rank)), np.zeros(len(rank))
    slowest_linear, slowest_compute = np.zeros(micro_batches), np.zeros(micro_batches)
    for i in range(micro_batches):
        low, high = first_member[i], first_member[i + 1]
        split_tokens = split_pairs = split_edges = split_unlabelled = 0.0
        split_documents = 0
        for j in range(low, high):
            shared[j] = member_tokens[j]
            linear_seconds[j] = micro_batch + linear * member_tokens[j]
        for j in range(first_document[i], first_document[i + 1]):
            if holder[j] < 0:
                split_tokens += length[j]
                split_pairs += pairs[j]
                split_edges += edges[j]
                split_unlabelled += unlabelled[j]
                split_documents += 1
            else:
                member = low + np.searchsorted(rank[low:high], holder[j])
                shared[member] -= length[j]
                linear_seconds[member] += document - head * unlabelled[j]
                attention_seconds[member] += attention * (pairs[j] + half * edges[j])
        for j in range(low, high):
            if split_documents > 0:
                linear_seconds[j] += document * split_documents - head * split_unlabelled * shared[j] / split_tokens
                attention_seconds[j] += attention * (split_pairs * shared[j] / split_tokens + half * split_edges)
            linear_seconds[j] /= speed[rank[j]]
            attention_seconds[j] /= speed[rank[j]]
            slowest_linear[i] = max(slowest_linear[i], linear_seconds[j])
            slowest_compute[i] = max(slowest_compute[i], linear_seconds[j] + attention_seconds[j], launch)
    return linear_seconds, attention_seconds, shared, slowest_linear, slowest_compute


@compiled
def _direct(
    first_member: np.ndarray,
    rank: np.ndarray,
    shared: np.ndarray,
    context: np.ndarray,
    ranks_per_node: int,
    forward: float,
    keys: float,
    gradients: float,
) -> tuple[np.ndarray, ...]:  # pragma: no cover - compiled
    """Columns of Workload from `inside_link` on. Bytes per token: of all passes forward, of keys and values in backward,
    and of their gradients. context [u]: tokens of earlier chunks that are attended to, spread as the chunk's own."""
    micro_batches = len(first_member) - 1
    inside_link, inside, between = np.zeros(micro_batches), np.zeros(micro_batches), np.zeros(micro_batches)
    first_pair = np.zeros(micro_batches + 1, np.int64)
    node, node_tokens = np.empty(len(rank), np.int64), np.empty(len(rank))
    node_link, node_cards = np.empty(len(rank)), np.empty(len(rank), np.int64)
    both = forward + keys + gradients
    e = 0
    for i in range(micro_batches):
        low, high = first_member[i], first_member[i + 1]
        total = shared[low:high].sum()
        kept = context[i] / total if total > 0 else 0.0  # for each token of the chunk, so many of earlier ones
        first = e
        before = 0.0
        start = low
        while start < high and total > 0 and high - low > 1:
            stop = start
            tokens = 0.0
            while stop < high and rank[stop] // ranks_per_node == rank[start] // ranks_per_node:
                tokens += shared[stop]
                stop += 1
            ranks = stop - start
            received = before / 2 + (total - before - tokens) + kept * (total - tokens)
            passed_on = received * (ranks - 1) / ranks  # into each rank, out of each rank
            earlier = 0.0
            for j in range(start, stop):
                later = tokens - earlier - shared[j]
                taken = later + earlier / 2 + kept * (tokens - shared[j]) + passed_on
                given = shared[j] * ((j - start) + (stop - j - 1) / 2 + kept * (ranks - 1)) + passed_on
                inside[i] += both * taken
                link = forward * max(taken, given)
                link += max(keys * taken + gradients * given, keys * given + gradients * taken)
                inside_link[i] = max(inside_link[i], link)
                earlier += shared[j]
            node[e], node_tokens[e] = rank[start] // ranks_per_node, tokens
            node_link[e], node_cards[e] = received, ranks
            between[i] += both * received
            before += tokens
            start = stop
            e += 1
        if e - first == 1:
            e = first  # all on one node
        for pair in range(first, e):
            sent = node_tokens[pair] * ((pair - first) + (e - pair - 1) / 2 + kept * (e - first - 1))
            received = node_link[pair]
            link = forward * max(received, sent)
            node_link[pair] = link + max(keys * received + gradients * sent, keys * sent + gradients * received)
        first_pair[i + 1] = e
    return inside_link, inside, between, first_pair, node[:e], node_link[:e], node_cards[:e]


@compiled
def _ring(
    first_member: np.ndarray,
    rank: np.ndarray,
    shared: np.ndarray,
    context: np.ndarray,
    ranks_per_node: int,
    forward: float,
    keys: float,
    gradients: float,
) -> tuple[np.ndarray, ...]:  # pragma: no cover - compiled
    """Like _direct. The ring enters and leaves each node over one rank, and turns as fast as its largest share."""
    micro_batches = len(first_member) - 1
    inside_link, inside, between = np.zeros(micro_batches), np.zeros(micro_batches), np.zeros(micro_batches)
    first_pair = np.zeros(micro_batches + 1, np.int64)
    node = np.empty(len(rank), np.int64)
    node_link, node_cards = np.empty(len(rank)), np.ones(len(rank), np.int64)
    both = forward + keys + gradients
    e = 0
    for i in range(micro_batches):
        low, high = first_member[i], first_member[i + 1]
        total = shared[low:high].sum()
        if total > 0 and high - low > 1:
            more = 1 + context[i] / total
            link = both * shared[low:high].max() * (high - low - 1) * more
            inside_link[i] = link
            first, last = rank[low] // ranks_per_node, rank[high - 1] // ranks_per_node
            for j in range(low, high):
                here = rank[j] // ranks_per_node
                enters = first != last and (j == low or rank[j - 1] // ranks_per_node != here)
                if enters:
                    between[i] += both * (total - shared[j]) * more
                    node[e], node_link[e] = here, link
                    e += 1
                else:
                    inside[i] += both * (total - shared[j]) * more
        first_pair[i + 1] = e
    return inside_link, inside, between, first_pair, node[:e], node_link[:e], node_cards[:e]
