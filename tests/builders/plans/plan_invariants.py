"""What every plan must fulfil, recomputed from its layouts: tokens, costs, and the times of its micro-batches."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
from hypothesis import settings

from hf_longctx.layouts.layout import Layout
from hf_longctx.planner import CostModel, StepPlan, Topology

many_examples = settings(max_examples=6 * settings().max_examples)
"""Of a profile: an example takes milliseconds here. scripts/nightly.sh draws many more."""


def simulate(plan: StepPlan) -> tuple[list[int], list[int], int]:
    """Start and stop of each micro-batch in its first stage, and the end of all, by programs that know what their rank
    knows and block until all partners have arrived: at a chunk of a micro-batch those that share it, after a round all
    ranks."""
    stages = range(plan.topology.stages if plan.mode == "pipeline" else 1)
    programs: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    for rank in range(plan.world_size):
        program = [micro_batch for micro_batch, _ in plan.layouts(rank)]
        meetings = {-1 - round: plan.world_size for round in range(plan.rounds)} if plan.mode == "lockstep" else {}
        program = sorted([*program, *meetings], key=lambda op: (-1 - op, 1) if op < 0 else (plan.round[op], 0))
        for stage in stages:
            programs[rank, stage] = [(op, program[:at].count(op), stage) for at, op in enumerate(program)]
    partners: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for process, ops in programs.items():
        for op in ops:
            partners.setdefault(op, []).append(process)

    clock = dict.fromkeys(programs, 0)
    start: dict[tuple[int, int, int], int] = {}
    stop: dict[tuple[int, int, int], int] = {}
    while any(programs.values()):
        waiting: dict[tuple[int, int, int], int] = {}
        for ops in programs.values():
            if ops and (ops[0][2] == 0 or (*ops[0][:2], ops[0][2] - 1) in stop):
                waiting[ops[0]] = waiting.get(ops[0], 0) + 1
        arrived = [op for op, count in waiting.items() if count == len(partners[op])]
        assert arrived, "deadlock: every rank waits"
        for op in arrived:
            micro_batch, chunk, stage = op
            came = stop[micro_batch, chunk, stage - 1] if stage else 0
            start[op] = max(came, *(clock[process] for process in partners[op]))
            chunks, cost = (int(plan.chunks[micro_batch]), int(plan.cost[micro_batch])) if micro_batch >= 0 else (1, 0)
            stop[op] = start[op] + cost * (chunk + 1) // chunks - cost * chunk // chunks
            for process in partners[op]:
                clock[process] = stop[op]
                programs[process].pop(0)
    ids = range(len(plan.cost))
    return [start[i, 0, 0] for i in ids], [stop[i, int(plan.chunks[i]) - 1, 0] for i in ids], max(clock.values())


def tokens_held_once(plan: StepPlan, lengths: np.ndarray) -> dict[int, list[Layout]]:
    """Asserts that the layouts which the ranks see hold every token once, fit, and agree; returns those of each
    micro-batch, one for each chunk."""
    holders = [np.full(length, -1) for length in lengths]
    layouts: dict[int, list[Layout]] = {}
    for rank in range(plan.world_size):
        of_rank = plan.layouts(rank)
        ids = [micro_batch for micro_batch, _ in of_rank]
        assert ids == sorted(ids), "a rank's micro-batches are a subsequence of the global order"
        mine: dict[int, list[Layout]] = {}
        for micro_batch, layout in of_rank:
            mine.setdefault(micro_batch, []).append(layout)
        for micro_batch, chunks in mine.items():
            assert len(chunks) == plan.chunks[micro_batch]
            assert layouts.setdefault(micro_batch, chunks) == chunks, "all ranks see the same layouts"
            assert sum(layout.tokens(rank) for layout in chunks) <= plan.topology.capacities[rank]
        for _, layout in of_rank:
            assert rank in layout.ranks
            for segment in layout.shards[rank]:
                assert (holders[segment.doc][segment.start : segment.stop] == -1).all(), "held twice"
                holders[segment.doc][segment.start : segment.stop] = rank
    assert all((holder >= 0).all() for holder in holders), "every token is held"
    assert sorted(layouts) == list(range(len(plan.cost)))
    return layouts


def expected_cost(
    layout: Layout, topology: Topology, cost: CostModel, counted: np.ndarray | None = None
) -> tuple[Fraction, Fraction]:
    """Nanoseconds of a micro-batch from the tokens that its ranks hold, and how much may be lost by rounding.

    counted: int64 [documents of the batch], tokens that each counts as; None: all that it has.
    """
    slowest_rank = min(int(topology.speeds[rank]) for rank in layout.ranks)
    shared, lost = Fraction(cost.micro_batch_ns * 1000, slowest_rank), Fraction(1)
    whole = dict.fromkeys(layout.ranks, Fraction(0))
    for doc, length in layout.doc_lengths.items():
        tokens = length if counted is None else int(counted[doc])
        holders = layout.split_documents.get(doc)
        if holders is None:
            [rank] = [rank for rank in layout.ranks if any(s.doc == doc for s in layout.shards[rank])]
            whole[rank] += Fraction(int(cost.time(tokens, 1)) * 1000, int(topology.speeds[rank]))
            lost += 1
            continue
        assert holders == layout.ranks, "a split document lies on all ranks of its micro-batch"
        work = int(cost.work(tokens, len(holders)))
        if topology.uniform:
            lost += 1
        else:  # the rank that holds most for its speed decides; its tokens are rounded up
            parts = {r: sum(len(s) for s in layout.shards[r] if s.doc == doc) for r in holders}
            shared += Fraction(work, length) * max(
                Fraction(n * 1000, int(topology.speeds[r])) for r, n in parts.items()
            )
            one_token = Fraction(work, tokens) * Fraction(1000, min(slowest_rank, 1000))  # rounded up at speed 1000
            lost += one_token * (1 if counted is None else 2) + 1
    if topology.uniform and layout.split_documents:
        split = [layout.doc_lengths[doc] if counted is None else int(counted[doc]) for doc in layout.split_documents]
        shared += _time_together(np.array(split), len(layout.ranks), topology, cost)
    return shared + max(whole.values()), lost


def _time_together(lengths: np.ndarray, ranks: int, topology: Topology, cost: CostModel) -> Fraction:
    """Nanoseconds of documents that the same equal ranks share: their messages are counted once, and the attention of one hides
    the exchange of another; but no less than the lower bound counts, or than each takes alone."""
    computed, sent = cost.without_exchange(), replace(cost.without_attention(), message_ns=0)
    linear = int(computed.without_attention().work(lengths, ranks).sum())
    attention = int(computed.work(lengths, ranks).sum()) - linear
    exchange = int(sent.work(lengths, ranks).sum()) - linear + cost.message_ns * ranks * (ranks - 1)
    bound = int(cost.work(lengths, topology.fewest_ranks(lengths)).sum())
    alone = int(cost.work(lengths, ranks).max())
    return Fraction(max(linear + max(attention, exchange), bound, alone), ranks)
