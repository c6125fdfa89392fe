"""Plays the messages of all ranks of a step against each other, by the strictest rules that a backend may have.

Each rank's own engine runs the micro-batches of a plan, forward and backward, with a kernel without arithmetic; its exchange
writes down what it would start. Under sharding in rounds, FSDP2's collectives are written down between them, where FSDP2
starts them; so are the sums of tensor parallelism, of processes that share a rank's heads and have an exchange for each of their
places, and the all-to-alls of expert parallelism. Then

    in order        a batch begins when the one before it on the same group is complete (NCCL)
    one at a time   a batch begins when the one before it on any group is complete: connections that are made when a pair first
                    meets block the host; a device may run one kernel of NCCL's at a time (NCCL_LAUNCH_ORDER_IMPLICIT)

and a batch is complete when everyone at the other ends of its messages has begun theirs. What cannot begin for ever is a
deadlock. No processes and no time: hundreds of ranks in one.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hf_longctx.attention.engine import layout_attention
from hf_longctx.attention.exchange import Exchange
from hf_longctx.attention.kernels import KERNELS
from hf_longctx.attention.kernels.varlen import Sequences, Triple, VarlenKernel
from hf_longctx.data.collator import LengthAwareCollator
from hf_longctx.hardware.published import Architecture
from hf_longctx.planner import GPU, CostModel, Topology

SHARDS, HEADS_SHARED, EXPERTS = "shards", "heads shared", "experts"
"""Groups of FSDP2's collectives, of tensor parallelism's and of expert parallelism's."""
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 8, 2, 8, 2
MODEL = Architecture(64, 128, LAYERS, HEADS, KV_HEADS, 1024, 1 << 20)


@dataclass(frozen=True)
class Case:
    """One step of all ranks."""

    ranks: int
    ranks_per_node: int = 8
    ulysses: int = 1
    window: int | None = None
    keep_last_slice: bool = False
    in_rounds: bool = False
    """with FSDP2's collectives"""
    tensor_parallel: int = 1
    """processes of a rank, neighbours on a node; `ranks_per_node` counts ranks"""
    experts: bool = False
    """with expert parallelism's collectives over all ranks; in rounds"""
    recomputes: bool = True
    """whether backward computes a layer's attention, and with it its messages, once more"""
    seed: int = 0


@dataclass(eq=False)
class Batch:
    """What one rank starts at once."""

    rank: int
    lane: str
    sends: list[tuple[int, int]]
    """(rank, bytes)"""
    receives: list[tuple[int, int]]
    partners: set["Batch"] = field(default_factory=set)
    """at the other ends"""


class WithoutArithmetic(VarlenKernel):
    """Results have shapes only."""

    name = "without_arithmetic"

    def unavailable(self, capability: tuple[int, int]) -> str | None:
        return None

    def max_head_dim(self, capability: tuple[int, int], head_dim: int) -> int:
        return 256

    def unsupported(self, q: torch.Tensor, k: torch.Tensor, needs: Any) -> str | None:
        return None

    def run_forward(self, q, k, v, sequences: Sequences, *scores: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(q), torch.zeros(q.shape[1], q.shape[0])

    def run_backward(self, grad_out, q, k, v, out, lse, sequences: Sequences, *scores: Any) -> Triple:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class WrittenDown(Exchange):
    """The exchange of one process, which sends nothing. Batches count processes: `degree` share a rank, and this is the one at
    `place` of them."""

    def __init__(self, ranks: int, rank: int, ranks_per_node: int, degree: int = 1, place: int = 0) -> None:
        self.device = torch.device("cpu")
        self._take_place(range(ranks), rank, ranks_per_node, None)
        self.degree, self.place = degree, place
        self.process = rank * degree + place
        self.batches: list[Batch] = []

    def _begin(self, sends: Any, receives: Any, lane: str) -> tuple[list[Any], Any]:
        ends = [
            [(rank * self.degree + self.place, tensor.nbytes) for tensor, rank in messages]
            for messages in (sends, receives)
        ]
        self.batches.append(Batch(self.process, lane, *ends))
        return [], None

    def meet(self, lane: str) -> None:
        """A collective: of processes that share heads, or of all."""
        first = self.rank * self.degree
        all_of_it = range(first, first + self.degree) if lane == HEADS_SHARED else range(self.world_size * self.degree)
        others = [(process, 0) for process in all_of_it if process != self.process]
        if others:
            self.batches.append(Batch(self.process, lane, others, others))


def recorded(case: Case) -> list[list[Batch]]:
    """By rank, what it starts in a step."""
    KERNELS[WithoutArithmetic.name] = WithoutArithmetic()
    drawn = np.random.default_rng(case.seed).lognormal(4.0, 1.6, 3 * case.ranks).astype(np.int64) + 2
    # More than all ranks hold at once: several micro-batches, some of many ranks and some of few.
    lengths = np.r_[80 * case.ranks, 40 * case.ranks, np.minimum(drawn, 64 * case.ranks)]
    cost = CostModel.from_config(MODEL, GPU, ranks_per_node=case.ranks_per_node, world_size=case.ranks)
    topology = Topology(
        world_size=case.ranks, capacity=128, ranks_per_node=case.ranks_per_node, ulysses_degree=case.ulysses
    )
    collator = LengthAwareCollator(topology, cost, mode="lockstep" if case.in_rounds else "async")
    plan = collator.plan(lengths)
    by_rank = []
    for process in range(case.ranks * case.tensor_parallel):
        rank, place = divmod(process, case.tensor_parallel)
        exchange = WrittenDown(case.ranks, rank, case.ranks_per_node, case.tensor_parallel, place)
        layouts: list[Any] = [layout for _, layout in plan.layouts(rank)]
        if case.in_rounds:
            in_round = {int(plan.round[number]): layout for number, layout in plan.layouts(rank)}
            layouts = [in_round.get(number) for number in range(plan.rounds)]
        for layout in layouts:
            _run(layout, exchange, case)
        by_rank.append(exchange.batches)
    return by_rank


def _run(layout: Any, exchange: WrittenDown, case: Case) -> None:
    """A micro-batch of one rank; None: it takes part in collectives alone."""
    tokens = layout.tokens(exchange.rank) if layout is not None else 0
    tensors = [torch.zeros(tokens, heads, HEAD_DIM, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS)]

    def attention() -> torch.Tensor:
        return layout_attention(
            *tensors,
            layout,
            exchange,
            kernel=WithoutArithmetic.name,
            window=case.window,
            keep_last_slice=case.keep_last_slice,
        )

    def after_attention() -> None:
        """Note what a layer sums and exchanges behind its attention."""
        for _ in range(2 if layout is not None or case.in_rounds else 0):  # attention's output, the MLP's
            exchange.meet(HEADS_SHARED)
        for _ in range(2 * case.experts):  # tokens to their experts, and back
            exchange.meet(EXPERTS)

    outputs = []
    for _ in range(LAYERS):
        if case.in_rounds:
            exchange.meet(SHARDS)  # gathers the layer's weights
        if layout is not None:
            outputs.append(attention())
        after_attention()
    for layer in reversed(range(LAYERS)):
        if case.in_rounds and layer == LAYERS - 1:
            exchange.meet(SHARDS)  # gathers them again
        if case.in_rounds and layer > 0:
            exchange.meet(SHARDS)  # and those of the layer before, ahead
        output = None
        if layout is not None:
            output = attention() if case.recomputes else outputs[layer]
        if case.recomputes:
            after_attention()
        after_attention()  # the gradients of it all
        if output is not None:
            output.backward(torch.zeros_like(output))
        if case.in_rounds:
            exchange.meet(SHARDS)  # sums gradients


def match(by_rank: Sequence[Sequence[Batch]]) -> int:
    """Find the batches at the other ends of each one's messages: the n-th that a rank sends to another on a group is the n-th
    that this one receives. Returns how many messages lack another end, or are of another size there."""
    ends: dict[tuple[str, int, int], tuple[list[Any], list[Any]]] = defaultdict(lambda: ([], []))
    for batch in (batch for batches in by_rank for batch in batches):
        for peer, size in batch.sends:
            ends[batch.lane, batch.rank, peer][0].append((batch, size))
        for peer, size in batch.receives:
            ends[batch.lane, peer, batch.rank][1].append((batch, size))
    wrong = 0
    for sent, received in ends.values():
        wrong += abs(len(sent) - len(received))
        for (one, size), (other, expected) in zip(sent, received):
            wrong += size != expected
            one.partners.add(other)
            other.partners.add(one)
    return wrong


def stuck(by_rank: Sequence[Sequence[Batch]], one_at_a_time: bool) -> Counter[str]:
    """Play matched batches. Returns how many never complete, by group."""
    queues: dict[Any, deque[Batch]] = defaultdict(deque)
    for batch in (batch for batches in by_rank for batch in batches):
        queues[_queue(batch, one_at_a_time)].append(batch)
    begun: set[Batch] = set()
    left = {batch: len(batch.partners) for batches in by_rank for batch in batches}
    ready = [queue[0] for queue in queues.values()]
    while ready:
        batch = ready.pop()
        begun.add(batch)
        for waiting in (batch, *batch.partners):
            left[waiting] -= waiting is not batch
            ready += _completed(waiting, queues[_queue(waiting, one_at_a_time)], begun, left)
    return Counter(batch.lane for queue in queues.values() for batch in queue)


def _queue(batch: Batch, one_at_a_time: bool) -> tuple[int, str]:
    return batch.rank, "" if one_at_a_time else batch.lane


def _completed(batch: Batch, queue: deque[Batch], begun: set[Batch], left: dict[Batch, int]) -> Iterator[Batch]:
    """Take a batch off its queue if it is complete; gives the one that begins then."""
    if batch in begun and left[batch] == 0 and queue and queue[0] is batch:
        queue.popleft()
        if queue:
            yield queue[0]
