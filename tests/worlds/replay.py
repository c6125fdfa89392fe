"""Plays the messages of all ranks of a step against each other, by the strictest rules that a backend may have.

Each rank's own engine runs the micro-batches of a plan, forward and backward, with a kernel without arithmetic; its exchange
writes down what it would start. Under sharding in rounds, FSDP2's collectives are written down between them, where FSDP2
starts them; so are the sums of tensor parallelism, of processes that share a rank's heads and have an exchange for each of their
places, and the all-to-alls of expert parallelism. Stages of a pipeline (replay_stages.py) send each other activations and
gradients. Then

    in order        a batch begins when the one before it on the same group is complete (NCCL)
    host blocks     a batch begins when the one before it on any group is complete: connections that are made when a pair first
                    meets block the host. Stages have met when a step begins: their messages travel beside
    one at a time   those too: a device runs one kernel of NCCL's at a time (an older driver, NCCL_LAUNCH_ORDER_IMPLICIT)

and a batch is complete when everyone at the other ends of its messages has begun theirs. By each rule nothing begins before what
the rank waits for. What cannot begin for ever is a deadlock. No processes and no time: hundreds of ranks in one.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch

from hf_longctx.attention.engine import layout_attention
from hf_longctx.attention.exchange import Exchange, Messages
from hf_longctx.attention.kernels import KERNELS, AttentionCall
from hf_longctx.attention.kernels.varlen import Triple, VarlenCall, VarlenKernel
from hf_longctx.data.collator import LengthAwareCollator
from hf_longctx.hardware.published import Architecture
from hf_longctx.planner import GPU, CostModel, Mode, StepPlan, Topology

SHARDS, HEADS_SHARED, EXPERTS = "shards", "heads shared", "experts"
"""Groups of FSDP2's collectives, of tensor parallelism's and of expert parallelism's."""
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 8, 2, 8, 2
Rule = Literal["in order", "host blocks", "one at a time"]
RULES: tuple[Rule, ...] = get_args(Rule)
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
    stages: int = 1
    """devices of a pipeline, each with so many ranks (replay_stages.py)"""
    virtual: int = 1
    """stages of a device, interleaved; 1: one forward, one backward"""
    links_in_order: bool = False
    """whether stages receive in the one order of all tasks, as where a device runs one kernel at a time"""


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
    beside: bool = False
    """whether the host goes on by any rule that lets a device do so"""
    waits_for: "Batch | None" = None
    """nothing is sent: the rank goes on when this one is complete"""


class WithoutArithmetic(VarlenKernel):
    """Results have shapes only."""

    name = "without_arithmetic"

    def unavailable(self, capability: tuple[int, int]) -> str | None:
        return None

    def max_head_dim(self, capability: tuple[int, int], head_dim: int) -> int:
        return 256

    def unsupported(self, call: AttentionCall) -> str | None:
        return None

    def run_forward(self, call: VarlenCall) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.empty_like(call.q), torch.zeros(call.q.shape[1], call.q.shape[0])

    def run_backward(self, call: VarlenCall, grad_out, out, lse) -> Triple:
        return torch.empty_like(call.q), torch.empty_like(call.k), torch.empty_like(call.v)


class WrittenDown(Exchange):
    """The exchange of one process, which sends nothing. Batches count processes: `degree` share a rank, and this is the one at
    `place` of them; the ranks of a pipeline's device come behind those of the devices before it."""

    def __init__(self, case: Case, rank: int, place: int = 0, device: int = 0) -> None:
        self.device = torch.device("cpu")
        self._take_place(range(case.ranks), rank, case.ranks_per_node, None)
        self.degree, self.place = case.tensor_parallel, place
        self.first = device * case.ranks * case.tensor_parallel
        """process of those with the same layers"""
        self.process = self.process_of(rank)
        self.batches: list[Batch] = []

    def process_of(self, rank: int) -> int:
        """Return the one that exchanges with this one, of a rank."""
        return self.first + rank * self.degree + self.place

    def _operations(self, sends: Messages, receives: Messages, lane: str) -> Any:
        return [[(self.process_of(rank), tensor.nbytes) for tensor, rank in messages] for messages in (sends, receives)]

    def _begin(self, operations: Any, lane: str) -> list[Any]:
        self.batches.append(Batch(self.process, lane, *operations))
        return []

    def meet(self, lane: str) -> None:
        """A collective: of processes that share heads, or of all."""
        of_rank = self.process - self.place
        first, count = (of_rank, 1) if lane == HEADS_SHARED else (self.first, self.world_size)
        all_of_it = range(first, first + count * self.degree)
        others = [(process, 0) for process in all_of_it if process != self.process]
        if others:
            self.batches.append(Batch(self.process, lane, others, others))


def planned(case: Case, mode: Mode) -> StepPlan:
    """Return the plan of a case's documents."""
    drawn = np.random.default_rng(case.seed).lognormal(4.0, 1.6, 3 * case.ranks).astype(np.int64) + 2
    # More than all ranks hold at once: several micro-batches, some of many ranks and some of few.
    lengths = np.r_[80 * case.ranks, 40 * case.ranks, np.minimum(drawn, 64 * case.ranks)]
    cost = CostModel.from_config(MODEL, GPU, ranks_per_node=case.ranks_per_node, world_size=case.ranks)
    topology = Topology(
        world_size=case.ranks,
        capacity=128,
        ranks_per_node=case.ranks_per_node,
        ulysses_degree=case.ulysses,
        stages=case.stages,
    )
    return LengthAwareCollator(topology, cost, mode=mode).plan(lengths)


def recorded(case: Case) -> list[list[Batch]]:
    """By rank, what it starts in a step."""
    KERNELS[WithoutArithmetic.name] = WithoutArithmetic()
    plan = planned(case, "lockstep" if case.in_rounds else "async")
    by_rank = []
    for process in range(case.ranks * case.tensor_parallel):
        rank, place = divmod(process, case.tensor_parallel)
        exchange = WrittenDown(case, rank, place)
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


def stuck(by_rank: Sequence[Sequence[Batch]], rule: Rule) -> Counter[str]:
    """Play matched batches by a rule. Returns how many never complete, by group."""
    behind: dict[Batch, list[Batch]] = defaultdict(list)
    """what may begin once a batch is complete, and all else that it is behind"""
    ahead: Counter[Batch] = Counter()
    """how many that are not complete a batch is behind"""
    for batches in by_rank:
        last: dict[str | None, Batch] = {}
        """of each group, and (None) of those that hold up all that comes later"""
        for batch in batches:
            for before in {last.get(None), last.get(batch.lane), batch.waits_for} - {None}:
                behind[before].append(batch)
                ahead[batch] += 1
            last[batch.lane] = batch
            if rule == "one at a time" or batch.waits_for or (rule == "host blocks" and not batch.beside):
                last[None] = batch
    unfinished = {batch: len(batch.partners) + 1 for batches in by_rank for batch in batches}
    """of a batch and those at its other ends, how many have not begun"""
    ready = [batch for batch in unfinished if not ahead[batch]]
    while ready:
        batch = ready.pop()
        for end in (batch, *batch.partners):
            unfinished[end] -= 1
            for later in behind[end] if not unfinished[end] else ():
                ahead[later] -= 1
                if not ahead[later]:
                    ready.append(later)
    return Counter(batch.lane for batch, left in unfinished.items() if left)
