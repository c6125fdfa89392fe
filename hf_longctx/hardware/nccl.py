"""NCCL's own rules for messages between two ranks: how many channels a pair of ranks gets, and the memory that takes.

Read in the sources of NCCL 2.27.5 to 2.30.7: graph/paths.cc (ncclTopoGetNchannels, ncclTopoComputeP2pChannels), init.cc
(computeBuffSizes), transport/p2p.cc (p2pSendSetup, p2pRecvSetup), transport/net.cc (sharedNetBuffersInit). Nothing here was
measured.

Channels. All pairs of a communicator get the same number: the fewest that any pair may have. Over NVLink that is two a link, so
that in a node the limit is the communicator's channels. Over a network

    before 2.29    2, or 1 where 2 * ranks > 4 * channels
    from 2.29      bytes/s of the card / 14 GB/s, halved until   pair's channels * ceil(ranks / 8) <= channels

unless NCCL_NCHANNELS_PER_NET_PEER says how many. A power of two, and never more than the communicator has.

    channels 32, a card of 50 GB/s            ranks    64    128    256
                                              2.28      2      1      1
                                              2.30      4      2      1

Memory. In a node each channel of a pair has buffers of its own on both ends: 10 MiB to receive (three protocols) and 2 MiB to
send (on an A100 6 and 6). Over a network buffers are shared: 16 pieces of 128 KiB for each channel to receive, and as many to
send for every rank of the node, since its messages leave by the card next to the receiver's (PXN). Collectives connect each
channel to a neighbour on either side.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20
Version = tuple[int, int]
"""Major and minor."""
NCCL_OF_TORCH: Version = (2, 28)
"""NCCL that torch 2.11 comes with (2.28.9)."""
BY_BANDWIDTH: Version = (2, 29)
"""First release that gives a pair channels by the card's bandwidth."""
CHANNELS = 32
"""Channels of a communicator without a limit on 8 GPUs of Hopper with NVSwitch: 24 of collectives, rounded up."""
CHANNEL_NET_BYTES = 14e9
"""Bytes/s of a channel over a network (NCCL_P2P_PER_CHANNEL_NET_BW)."""
CHANNEL_INSIDE_BYTES = 20e9
"""Bytes/s of a channel over NVLink. Not NCCL's: engineering judgement."""
EXCHANGE_CHANNELS = 8
"""Thread blocks of the kernels of an exchange's groups, and so channels: each takes a multiprocessor of the GPU while messages
travel. Chosen by arithmetic, not measured: inside a node they carry 160 GB/s at 20 GB/s a channel, and between nodes more than a
card, with two ranks at a time."""
CHANNELS_PER_NET_PEER = 4
"""Channels that our runs ask for between two ranks of several nodes (settings/gpu_environment.py)."""
PEERS_PER_BATCH = 8
"""Messages that one thread block works on at a time (NCCL_MAX_DEV_WORK_P2P_PER_BATCH)."""

GRANULE = 2 * MIB
"""Device memory is given out in multiples of this (CUDA_IPC_MIN)."""
STEPS, SHARED_STEPS = 8, 16
LL = 8 * 512 * STEPS * 16
"""Lines a thread * threads * steps * bytes of a line."""
LL128 = 120 * 640 * STEPS * 8
SIMPLE = 4 * MIB
CONTROL = 4096
"""Counters before the buffers (ncclSendMem, ncclRecvMem)."""
NET_CHUNK = 128 * 1024


def _rounded(count: int) -> int:
    return -(-count // GRANULE) * GRANULE


RECEIVE_BYTES = _rounded(CONTROL + LL + LL128 + SIMPLE)
SEND_BYTES = _rounded(CONTROL)
PAIR_BYTES = RECEIVE_BYTES + SEND_BYTES
"""Bytes of one channel between two ranks of a node, on each of them."""


@dataclass(frozen=True, slots=True)
class Communicator:
    """A group of ranks under NCCL, as one of its ranks has it."""

    ranks: int
    ranks_here: int
    """Ranks of them that lie on the node of this one."""
    most_channels: int | None = None
    """`max_ctas` of its configuration; None: no limit."""
    net_channels: int | None = None
    """NCCL_NCHANNELS_PER_NET_PEER; None: NCCL's own rule."""
    net_bytes: float = 50e9
    """bytes/s of a rank's network card"""

    def __post_init__(self) -> None:
        if not 1 <= self.ranks_here <= self.ranks:
            raise ValueError(f"ranks_here={self.ranks_here} must be one of 1 to {self.ranks}, the ranks of the group")

    @property
    def channels(self) -> int:
        """Channels that messages are spread over."""
        most = CHANNELS if self.most_channels is None else min(self.most_channels, CHANNELS)
        return _power_of_two(most)

    def channels_of_a_pair(self, version: Version = NCCL_OF_TORCH) -> int:
        """Channels between any two ranks."""
        if self.ranks_here == self.ranks:
            return self.channels
        if self.net_channels is not None:
            return min(self.channels, _power_of_two(self.net_channels))
        if version < BY_BANDWIDTH:
            return 1 if 2 * self.ranks > 4 * self.channels else min(2, self.channels)
        pair = min(self.channels, _power_of_two(max(1, -int(-self.net_bytes // CHANNEL_NET_BYTES))))
        while pair > 1 and pair * -(-self.ranks // PEERS_PER_BATCH) > self.channels:
            pair //= 2
        return pair

    def collective_bytes(self) -> int:
        """Device memory of a ring, which is there once a collective has run; nothing for a single rank."""
        return self.channels * PAIR_BYTES if self.ranks > 1 else 0

    def message_memory(self, peers_here: int, crosses: bool, version: Version = NCCL_OF_TORCH) -> int:
        """Device memory of messages.

        Args:
            peers_here: ranks of the node that this one sends to and receives from.
            crosses: whether there are messages to other nodes too.
        """
        pairs = peers_here * self.channels_of_a_pair(version) * PAIR_BYTES
        shared = _rounded(self.channels * SHARED_STEPS * NET_CHUNK)
        return pairs + (crosses and (1 + self.ranks_here) * shared)


def _power_of_two(count: int) -> int:
    """The least power of two that is no less."""
    return 1 << (count - 1).bit_length()


def exchange_groups(ranks: int, ranks_per_node: int) -> list[tuple[Communicator, int, bool]]:
    """Groups of an exchange of so many ranks (attention/communicators.py): each with the peers of this node that a rank meets in
    it, and whether its messages cross nodes. None where ranks have nobody to meet."""
    here = min(ranks, ranks_per_node)
    groups = []
    if here > 1:
        groups.append((Communicator(here, here, EXCHANGE_CHANNELS), here - 1, False))
    if ranks > here:
        groups += 2 * [(Communicator(ranks, here, EXCHANGE_CHANNELS, CHANNELS_PER_NET_PEER), 0, True)]
    return groups


def exchange_bytes(ranks: int, ranks_per_node: int, version: Version = NCCL_OF_TORCH) -> int:
    """Device memory of an exchange's groups once ranks have met: of collectives, by which they were warmed, and of messages."""
    return sum(
        group.collective_bytes() + group.message_memory(peers, crosses, version)
        for group, peers, crosses in exchange_groups(ranks, ranks_per_node)
    )
