"""Process groups of an exchange: one inside each node, two over all nodes, and none where no message would take it.

    2 nodes of 2 ranks     inside     [0 1] [2 3]      keys, values and gradients
                           between    [0 1 2 3]        keys and values
                           between    [0 1 2 3]        gradients

NCCL gives each pair of ranks of a group as many channels as the slowest pair may have, and each channel buffers of 12 MiB on
either side (hardware/nccl.py): in a group over several nodes that is few, also over NVLink, and in one of a node it is much
memory. So messages inside a node have a group of their own, no group has more channels than it needs, and both directions share
the one inside: ranks start their messages in one order, and nothing waits for ever if each begins only after the one before
(exchange.py).

With NCCL the streams of these groups have priority: a message that is to travel beside a kernel must not wait for that kernel's
last block. Every group is warmed by an all-reduce, since its first messages between two ranks need all of its ranks. Then
ranks of a node meet: the first message between two ranks connects them, which takes the host's time and the device's memory,
and both are wanted before anything is planned with what is left. Ranks of several nodes meet when they are asked to (`meet_all`):
NCCL takes as long as there are ranks, and most pairs of a large job never exchange a message.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hf_longctx.attention.groups import own_group
from hf_longctx.hardware.nccl import EXCHANGE_CHANNELS

INSIDE, BETWEEN, BETWEEN_GRADIENTS = LANES = ("inside nodes", "between nodes", "between nodes, gradients")
"""Names of the groups. The messages of one run in the order in which ranks start them."""


def lane_of(crosses: bool, gradients: bool) -> str:
    """Return the name of the group that a message takes."""
    return INSIDE if not crosses else BETWEEN_GRADIENTS if gradients else BETWEEN


@dataclass(frozen=True)
class Communicators:
    """The groups that this rank is in, by lane."""

    groups: dict[str, dist.ProcessGroup]

    @property
    def whole(self) -> dist.ProcessGroup:
        """A group of all ranks of the exchange, which has several."""
        return self.groups[BETWEEN if BETWEEN in self.groups else INSIDE]

    @classmethod
    def made(
        cls,
        owner: Any,
        exchanges: Sequence[Sequence[int]],
        ranks_per_node: int,
        timeout: timedelta,
        meet_all: bool = False,
    ) -> "Communicators":
        """Make and warm them. Collective: every rank of the job makes all.

        Args:
            owner: which uses the groups; it must outlive every operation on them.
            exchanges: global ranks of each exchange; together they hold every rank once.
            ranks_per_node: rank // ranks_per_node is the node of a global rank.
            timeout: of each operation.
            meet_all: whether ranks of several nodes meet too.
        """
        by_node = [_by_node(ranks, ranks_per_node) for ranks in exchanges]
        wanted: dict[str, list[list[int]]] = {}
        if any(len(ranks) > 1 for nodes in by_node for ranks in nodes):
            wanted[INSIDE] = [ranks for nodes in by_node for ranks in nodes]
        if any(len(nodes) > 1 for nodes in by_node):
            wanted[BETWEEN] = wanted[BETWEEN_GRADIENTS] = [list(ranks) for ranks in exchanges]
        groups = {}
        for lane, ranks in wanted.items():
            groups[lane] = own_group(owner, ranks, timeout, options=message_options)
            dist.all_reduce(_message(groups[lane]), group=groups[lane])
        for lane, group in groups.items():
            if lane == INSIDE:
                _meet_at_once(group)
            elif meet_all:
                _meet_in_turn(group, ranks_per_node)
        return cls(groups)


def _message(group: dist.ProcessGroup) -> torch.Tensor:
    return torch.zeros(1, device="cpu" if dist.get_backend(group) == "gloo" else "cuda")


def _exchanged(group: dist.ProcessGroup, to: Sequence[int], source: Sequence[int]) -> None:
    """Exchange one number with global ranks as one batch, and wait for it."""
    operations = [dist.P2POp(dist.isend, _message(group), rank, group) for rank in to]
    operations += [dist.P2POp(dist.irecv, _message(group), rank, group) for rank in source]
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()


def _meet_at_once(group: dist.ProcessGroup) -> None:
    """Exchange a number with each rank of a node."""
    others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
    _exchanged(group, others, others)


def _meet_in_turn(group: dist.ProcessGroup, ranks_per_node: int) -> None:
    """Exchange a number with each rank of another node, one after another: in turn t with those t places on and back."""
    ranks = dist.get_process_group_ranks(group)
    me, node = ranks.index(dist.get_rank()), dist.get_rank() // ranks_per_node
    for turn in range(1, len(ranks)):
        ends = ranks[(me + turn) % len(ranks)], ranks[(me - turn) % len(ranks)]
        to, source = ([rank] if rank // ranks_per_node != node else [] for rank in ends)
        _exchanged(group, to, source)


def _by_node(ranks: Sequence[int], ranks_per_node: int) -> list[list[int]]:
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // ranks_per_node, []).append(rank)
    return list(nodes.values())


def message_options(channels: int = EXCHANGE_CHANNELS, *, priority: bool = True) -> Any:
    """Make NCCL's options of a group for messages; None for other backends.

    Args:
        channels: the most that its kernels take.
        priority: whether its stream has priority before those that compute.
    """
    if "nccl" not in dist.get_backend():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=priority)
    options.config.max_ctas = channels
    return options
