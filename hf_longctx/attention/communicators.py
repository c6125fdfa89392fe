"""Process groups of an exchange: one inside each node, two over all nodes, and none where no message would take it.

    2 nodes of 2 ranks     inside     [0 1] [2 3]      keys, values and gradients
                           between    [0 1 2 3]        keys and values
                           between    [0 1 2 3]        gradients

NCCL gives each pair of ranks of a group as many channels as the slowest pair may have, and each channel buffers of 12 MB on
either side: in a group over several nodes that is few, also over NVLink, and in one of a node it is much memory. So messages
inside a node have a group of their own, with no more channels than they need, and both directions share it: ranks start
their messages in one order, and nothing waits for ever if each begins only after the one before (exchange.py).

With NCCL the streams of these groups have priority: a message that is to travel beside a kernel must not wait for that kernel's
last block. Every group is warmed by an all-reduce, since its first messages between two ranks need all of its ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hf_longctx.attention.groups import own_group

CHANNELS_INSIDE = 8
"""Thread blocks of a group's kernels inside a node, and so channels: each takes a multiprocessor of the GPU while messages
travel. Chosen by arithmetic, not measured: at some 20 GB/s a channel they carry 160 GB/s."""
INSIDE, BETWEEN, BETWEEN_GRADIENTS = LANES = ("inside nodes", "between nodes", "between nodes, gradients")
"""Names of the groups. The messages of one run in the order in which ranks start them."""


def lane_of(crosses: bool, gradients: bool) -> str:
    """Return the name of the group that a message takes."""
    return INSIDE if not crosses else BETWEEN_GRADIENTS if gradients else BETWEEN


@dataclass(frozen=True)
class Communicators:
    """The groups that this rank is in, by lane."""

    groups: dict[str, dist.ProcessGroup]

    @classmethod
    def made(
        cls, owner: Any, exchanges: Sequence[Sequence[int]], ranks_per_node: int, timeout: timedelta
    ) -> "Communicators":
        """Make and warm them. Collective: every rank of the job makes all.

        Args:
            owner: which uses the groups; it must outlive every operation on them.
            exchanges: global ranks of each exchange; together they hold every rank once.
            ranks_per_node: rank // ranks_per_node is the node of a global rank.
            timeout: of each operation.
        """
        by_node = [_by_node(ranks, ranks_per_node) for ranks in exchanges]
        wanted: dict[str, list[list[int]]] = {}
        if any(len(ranks) > 1 for nodes in by_node for ranks in nodes):
            wanted[INSIDE] = [ranks for nodes in by_node for ranks in nodes]
        if any(len(nodes) > 1 for nodes in by_node):
            wanted[BETWEEN] = wanted[BETWEEN_GRADIENTS] = [list(ranks) for ranks in exchanges]
        groups = {}
        for lane, ranks in wanted.items():
            groups[lane] = own_group(owner, ranks, timeout, options=_options(lane))
            on = "cpu" if dist.get_backend(groups[lane]) == "gloo" else "cuda"
            dist.all_reduce(torch.zeros(1, device=on), group=groups[lane])
        return cls(groups)


def _by_node(ranks: Sequence[int], ranks_per_node: int) -> list[list[int]]:
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // ranks_per_node, []).append(rank)
    return list(nodes.values())


def _options(lane: str) -> Any:
    """NCCL's, for messages; None for other backends."""
    if "nccl" not in dist.get_backend():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if lane == INSIDE:
        options.config.max_ctas = CHANNELS_INSIDE
    return options
