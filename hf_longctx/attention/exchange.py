"""Point-to-point exchange between the ranks of a layout. All communication of a forward and backward pass goes
through here.

Process groups of its own, made once and freed some time after the exchange is forgotten (groups.py): one inside each node, and
two between nodes, for keys and values and for the gradients that return (communicators.py). Any subset of ranks can then
meet, without making a group for it.
NCCL runs the operations of one communicator in the order in which they were enqueued, on a stream of the
communicator's own, so nothing else may ever share these groups: a gradient collective there would deadlock against the
exchange of a rank that is still computing (tests/worlds/fifo.py gives gloo the same order).

With tensor parallelism, each coordinate of it has an exchange of its own (`groups`); a rank is then numbered within
its group.

No deadlock. Every batch of messages has a key, by which all ranks start their batches:

    (layout, pass, layer, phase, round, inside a node before between nodes)

A layout's place is that in the plan's one order; a pass is forward, or a layer's recomputation and backward; phases are
Ulysses's all-to-alls, keys and values of round t + 1, gradients of round t. Both ends of a message give it one key, since rounds
follow from the layout alone, and what a rank passes on leaves in a later round than it came. So of all batches that are not
complete, the one with the least key has all of its ranks in it or on their way to it: it completes, even where each rank
starts a batch only when the one before it, on whatever group, is complete (tests/worlds/replay.py plays that).
"""

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hf_longctx.attention.buffers import Buffers
from hf_longctx.attention.communicators import Communicators, lane_of
from hf_longctx.layouts.layout import Layout
from hf_longctx.supervision.device_trail import DeviceTrail
from hf_longctx.supervision.progress import Progress

Messages = list[tuple[torch.Tensor, int]]
"""(tensor, rank at the other end)"""


class Work(Protocol):
    """One operation in flight, or several: what torch.distributed returns, or what stands in for it (virtual_ranks.py)."""

    def wait(self) -> Any:
        """Return once what was received may be read and what was sent may be reused."""


class Pending:
    """Operations in flight, and the buffers that must outlive them."""

    def __init__(self, works: Sequence[Work], buffers: Any, peers: Sequence[int], progress: Progress) -> None:
        self._works, self._buffers, self._peers, self._progress = works, buffers, peers, progress

    def wait(self) -> None:
        """Returns once every buffer received may be read and every buffer sent may be reused."""
        if not self._works:
            return
        progress, trail = self._progress, self._progress.trail
        progress.wait_for(self._peers)
        issued = None if trail is None else trail.begin(self._peers, progress.layer, progress.backward)
        for work in self._works:
            work.wait()
        if trail is not None and issued is not None:
            trail.end(issued)
        progress.wait_for(())


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """Messages that begin together."""

    parts: list[tuple[str, Any]]
    """lane, and the operations in it, in the order in which they begin"""
    peers: list[int]
    """global ranks"""
    sent: list[tuple[int, int]]
    """(rank, bytes) of each message that leaves"""
    bytes: int
    """of all of them"""
    bytes_between_nodes: int
    """of those to other nodes"""


class Exchange:
    """The exchange as this rank sees it. Made once, by all ranks of the default group together.

    Args:
        timeout_seconds: how long a rank waits for a peer that never comes before it fails. A peer may legitimately be
            busy with a long micro-batch, so this is a safety net, not a detector: a peer that dies is noticed at once.
        ranks_per_node: rank // ranks_per_node is a rank's node, inside which bytes are cheap; default: what the launcher
            started on this machine (LOCAL_WORLD_SIZE), or all ranks.
        progress: notes for whom this rank waits.
        meet_all: whether ranks of several nodes exchange a first message now, which connects them; those of one node always do.
            Otherwise two ranks connect when they first share a document, which holds both up in the middle of a step.
        groups: for tensor parallelism, global ranks of each exchange, e.g. [[0, 2], [1, 3]]: ranks 0 and 2 exchange what
            belongs to one half of the heads. Default: one exchange of all ranks.

    Raises:
        RuntimeError: torch.distributed is not initialised.
        ValueError: there is no GPU for this rank, ranks_per_node is not positive, the groups do not hold every rank exactly
            once, or nodes do not hold equally many ranks of a group, in order.
    """

    def __init__(
        self,
        timeout_seconds: float = 1800.0,
        *,
        ranks_per_node: int | None = None,
        groups: Sequence[Sequence[int]] | None = None,
        progress: Progress | None = None,
        meet_all: bool = False,
    ) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "Exchange needs torch.distributed: start the program with `accelerate launch` or torchrun, "
                "or pass exchange=None where every layout lies on one rank"
            )
        world = dist.get_world_size()
        groups = [list(range(world))] if groups is None else groups
        if sorted(rank for group in groups for rank in group) != list(range(world)):
            raise ValueError(f"groups={groups} must hold each of the ranks 0 to {world - 1} exactly once")
        if ranks_per_node is None:
            ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        _choose_gpu()
        own = next(group for group in groups if dist.get_rank() in group)
        self._take_place(own, own.index(dist.get_rank()), ranks_per_node, progress)
        limit = timedelta(seconds=timeout_seconds)
        self._communicators = self._make_communicators(groups, ranks_per_node, limit, meet_all)
        self.device = torch.device("cpu" if dist.get_backend() == "gloo" else "cuda")
        """The device that tensors must be on to be sent."""
        if self.device.type == "cuda" and torch.cuda.is_available() and self.progress.trail is None:
            self.progress.trail = DeviceTrail()
        if self.device.type == "cpu":
            atexit.unregister(_leave_gloo_together)
            atexit.register(_leave_gloo_together)

    def _take_place(self, peers: Sequence[int], rank: int, ranks_per_node: int, progress: Progress | None) -> None:
        """Set what does not depend on how messages travel. `peers`: global ranks of this exchange; `rank`: this one's place
        among them. Raises ValueError as the class does."""
        if ranks_per_node < 1:
            raise ValueError(f"ranks_per_node={ranks_per_node}: a node has at least one rank")
        self._peers = peers
        self.rank = rank
        """This rank's number in its exchange."""
        self.world_size = len(self._peers)
        """Ranks of this exchange."""
        nodes = [peer // ranks_per_node for peer in self._peers]
        self.ranks_per_node = nodes.count(nodes[0])
        """Ranks of this exchange on each node."""
        distinct = list(dict.fromkeys(nodes))
        if nodes != [distinct[min(rank // self.ranks_per_node, len(distinct) - 1)] for rank in range(len(nodes))]:
            raise ValueError(
                f"ranks {list(self._peers)} of an exchange lie on nodes {nodes} ({ranks_per_node} ranks to a node): each node "
                f"must hold {self.ranks_per_node} of them, one after another"
            )
        self.buffers = Buffers()
        """Memory for messages of keys, values and their gradients."""
        self.progress = progress or Progress()
        """Where this rank is."""
        self.bytes_sent = 0
        """Bytes that this rank has sent so far (measured, for reports and tests)."""
        self.bytes_between_nodes = 0
        """Those of them that went to another node."""

    def _make_communicators(
        self, groups: Sequence[Sequence[int]], ranks_per_node: int, timeout: timedelta, meet_all: bool
    ) -> Communicators:
        return Communicators.made(self, groups, ranks_per_node, timeout, meet_all)

    def prepare(self, sends: Messages, receives: Messages, *, gradients: bool = False) -> Batch:
        """Make a batch, which may begin any number of times, one after the other.

        Args:
            sends: contiguous tensors, and the ranks that they go to.
            receives: contiguous tensors, and the ranks from which they are filled.
            gradients: whether they return, in parallel with a forward direction.
        """
        node = self.rank // self.ranks_per_node
        # By whether they go to another node; messages inside the node begin first.
        leaving: tuple[Messages, Messages] = ([], [])
        arriving: tuple[Messages, Messages] = ([], [])
        for messages, sorted_by_node in ((receives, arriving), (sends, leaving)):
            for message in messages:
                sorted_by_node[message[1] // self.ranks_per_node != node].append(message)
        parts = []
        for crosses in (False, True):
            if leaving[crosses] or arriving[crosses]:
                lane = lane_of(crosses, gradients)
                parts.append((lane, self._operations(leaving[crosses], arriving[crosses], lane)))
        return Batch(
            parts,
            [self._peers[rank] for _, rank in (*receives, *sends)],
            [(rank, tensor.nbytes) for tensor, rank in sends],
            sum(tensor.nbytes for tensor, _ in sends),
            sum(tensor.nbytes for tensor, _ in leaving[True]),
        )

    def begin(self, batch: Batch) -> Pending:
        """Begin all messages of a batch."""
        self.bytes_sent += batch.bytes
        self.bytes_between_nodes += batch.bytes_between_nodes
        if len(batch.parts) == 1:
            [(lane, operations)] = batch.parts
            works = self._begin(operations, lane)
        else:
            works = [work for lane, operations in batch.parts for work in self._begin(operations, lane)]
        return Pending(works, batch, batch.peers, self.progress)

    def start(self, sends: Messages, receives: Messages, *, gradients: bool = False) -> Pending:
        """Prepare a batch and begin it, once."""
        return self.begin(self.prepare(sends, receives, gradients=gradients))

    def all_gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        """Give every rank each rank's tensor, by rank; all have one shape and dtype. One collective, which connects each rank
        with a few others, where messages would connect it with all. For inference, in which every rank takes part."""
        parts = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(parts, own.contiguous(), group=self._communicators.whole)
        self.bytes_sent += own.nbytes * (self.world_size - 1)
        return parts

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Give every rank the tensor of one, in place. One collective, for inference."""
        dist.broadcast(tensor, self._peers[source], group=self._communicators.whole)
        self.bytes_sent += tensor.nbytes * (self.rank == source)

    def _operations(self, sends: Messages, receives: Messages, lane: str) -> Any:
        """Make what `_begin` begins, of the messages of one lane."""
        group = self._communicators.groups[lane]
        return [
            dist.P2POp(kind, tensor, self._peers[rank], group)
            for kind, messages in ((dist.isend, sends), (dist.irecv, receives))
            for tensor, rank in messages
        ]

    def _begin(self, operations: Any, lane: str) -> Sequence[Work]:
        """Begin operations of one lane as one batch; returns the works to wait for."""
        return dist.batch_isend_irecv(operations)


def _choose_gpu() -> None:
    """Choose the GPU of LOCAL_RANK where a program under torchrun has chosen none, so that not all ranks of a machine are on its
    first one. Raises ValueError if there is no such GPU."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    if local == 0 or "nccl" not in dist.get_backend() or torch.cuda.device_count() < 2 or torch.cuda.current_device():
        return
    if local >= torch.cuda.device_count():
        raise ValueError(
            f"LOCAL_RANK={local}, and {torch.cuda.device_count()} GPUs are visible here: processes cannot share one. "
            f"Valid: at most {torch.cuda.device_count()} processes on this machine"
        )
    torch.cuda.set_device(local)


def own_rank(layout: Layout, exchange: Exchange | None) -> int:
    """Return which rank of a layout this process is: without an exchange, its only one."""
    return exchange.rank if exchange is not None else layout.ranks[0]


LEAVING_SECONDS = 10.0
"""How long a rank that is done waits for the others before it leaves without them."""


def _leave_gloo_together() -> None:
    """Wait for the other ranks at the end of a program that did not fail.

    Otherwise gloo threads of a rank whose peers have left abort it (seen in 1 of 7 runs).

    A rank that leaves in the middle (sys.exit in a callback) must not wait for peers that wait for it: after
    LEAVING_SECONDS it goes, its connections close, and they fail at once.
    """
    failed = getattr(sys, "last_value", None) is not None
    if failed or not dist.is_initialized() or dist.get_backend() != "gloo":
        return
    deadline = time.monotonic() + LEAVING_SECONDS
    with contextlib.suppress(RuntimeError):  # a peer that failed says so itself
        barrier = dist.barrier(async_op=True)
        while not barrier.is_completed() and time.monotonic() < deadline:
            time.sleep(0.02)
        if barrier.is_completed():
            dist.destroy_process_group()
            return
    print(f"rank {dist.get_rank()} leaves, although not all ranks are done", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # joining gloo's threads would wait for the barrier


def sum_over_holders(values: dict[int, torch.Tensor], layout: Layout, exchange: Exchange | None) -> None:
    """Sums one tensor per document over the ranks that hold a part of it, in place. Documents of one rank send nothing.

    Every rank of the layout calls this with all its documents; tensors of one document agree in shape and dtype.
    Ranks add in the same order, so all holders end with the same bits.

    Args:
        values: {document: tensor} for the documents that this rank holds.
    """
    split = {doc: ranks for doc, ranks in layout.split_documents.items() if doc in values}
    if not split:
        return
    assert exchange is not None, "a layout over several ranks was run without an exchange"
    own = {doc: values[doc].clone() for doc in split}
    arrived = {
        (doc, rank): torch.empty_like(own[doc])
        for doc, ranks in split.items()
        for rank in ranks
        if rank != exchange.rank
    }
    exchange.start(
        [(own[doc], rank) for doc, rank in arrived], [(tensor, rank) for (_, rank), tensor in arrived.items()]
    ).wait()
    for doc, ranks in split.items():
        values[doc].zero_()
        for rank in ranks:
            values[doc].add_(own[doc] if rank == exchange.rank else arrived[doc, rank])
