"""Point-to-point exchange between the ranks of a layout. All communication of a forward and backward pass goes
through here.

One process group of its own, world-sized, made once and warmed by an all-reduce (a group's first batched
point-to-point operations need every rank). Any subset of ranks can then meet, without making a group for it. NCCL
runs the operations of one communicator in the order in which they were enqueued, so nothing else may ever share this
group: a gradient collective there would deadlock against the exchange of a rank that is still computing
(tests/fifo.py gives gloo the same order).

No deadlock: ranks walk layouts in one global order, and inside a layout the exchange offsets in ascending order, so
the operations that two ranks have in common come in the same order on both.
"""

import atexit
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from hf_longctx.layout import Layout


class Pending:
    """Operations in flight, and the buffers that must outlive them."""

    def __init__(self, operations: Sequence[dist.P2POp]) -> None:
        self._operations = operations
        self._works = dist.batch_isend_irecv(list(operations)) if operations else []

    def wait(self) -> None:
        """Returns once every buffer received may be read and every buffer sent may be reused."""
        for work in self._works:
            work.wait()


class Exchange:
    """The exchange process group as this rank sees it. Made once, by all ranks of the default group together.

    Args:
        timeout_seconds: how long a rank waits for a peer that never comes before it fails. A peer may legitimately be
            busy
            with a long micro-batch, so this is a safety net, not a detector: a peer that dies is noticed at once.
    """

    def __init__(self, timeout_seconds: float = 1800.0) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "Exchange needs torch.distributed: start the program with `accelerate launch` or torchrun, "
                "or pass exchange=None where every layout lies on one rank"
            )
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.bytes_sent = 0
        """Bytes that this rank has sent so far (measured, for reports and tests)."""
        self._group = dist.new_group(list(range(self.world_size)), timeout=timedelta(seconds=timeout_seconds))
        on_cpu = dist.get_backend(self._group) == "gloo"
        dist.all_reduce(torch.zeros(1, device="cpu" if on_cpu else "cuda"), group=self._group)
        if on_cpu:
            atexit.unregister(_leave_gloo_together)
            atexit.register(_leave_gloo_together)

    def start(self, sends: Sequence[tuple[torch.Tensor, int]], receives: Sequence[tuple[torch.Tensor, int]]) -> Pending:
        """Starts sending contiguous tensors to ranks and receiving into tensors from ranks; both are (tensor, rank)
        pairs."""
        self.bytes_sent += sum(tensor.nbytes for tensor, _ in sends)
        return Pending(
            [dist.P2POp(dist.isend, tensor, rank, self._group) for tensor, rank in sends]
            + [dist.P2POp(dist.irecv, tensor, rank, self._group) for tensor, rank in receives]
        )


LEAVING_SECONDS = 10.0
"""How long a rank that is done waits for the others before it leaves without them."""


def _leave_gloo_together() -> None:
    """At the end of a program that did not fail: gloo threads of a rank whose peers have left abort it (seen in 1 of
    7 runs).

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
