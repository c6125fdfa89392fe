"""The simulator's knowledge of the ranks of a plan: how fast each is, which links they share, what is read for them.

A rank of a plan is one device, or with tensor parallelism several of a node, which share heads, MLPs and weights. They
compute together, and sum their parts of every layer's output twice forward and twice backward:

    seconds per token = FLOPs / (devices * linear FLOP/s)  +  layers * 4 * 2(n-1)/n * hidden * bytes / (bytes/s inside)

Each sends its own part of keys and values, over its own links. A device uses one network card at a time; what all ranks
of a node want together, its cards must carry. Sums over all ranks go around inside the nodes and between them at the
same time, as NCCL's hierarchical rings do: the slower of the two decides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from hf_longctx.counting.config_fields import head_counts
from hf_longctx.hardware.devices import Cluster
from hf_longctx.hardware.model_sizes import ModelSizes, model_flops
from hf_longctx.hardware.nccl import (
    CHANNEL_INSIDE_BYTES,
    CHANNEL_NET_BYTES,
    CHANNELS_PER_NET_PEER,
    EXCHANGE_CHANNELS,
    Communicator,
    Version,
)
from hf_longctx.hardware.profile import Profile
from hf_longctx.hardware.speeds import RankSpeed
from hf_longctx.planner.cost.cost_model import CostModel
from hf_longctx.planner.memory.memory_model import FORWARD_SHARE
from hf_longctx.simulator.workload import GRADIENT_BYTES

ALL_REDUCES = 4
"""Sums of a layer's output over ranks, forward and backward together: after attention and after the MLP."""
EXPERT_EXCHANGES = 4
"""Exchanges of a layer's tokens where experts lie on several ranks: to the experts and back, forward and backward."""
SHARED_RATES = ("attention_flops", "inside_bytes", "between_bytes", "reduce_bytes", "optimizer_parameters")
"""Rates of RankSpeed that are as many times as fast on so many devices, each of which has its part of heads and weights."""


@dataclass(frozen=True, slots=True)
class Loader:
    """The processes that read and prepare documents."""

    node_tokens: float = 4e6
    """Tokens/s that a node reads and prepares. ByteScale's ablation (arXiv 2502.21231, figure 20): a loader that reads
    all 32M tokens of a batch on every node costs 5 % of steps of 157 s, that is 8 s."""
    remote: bool = True
    """Whether each node prepares its share and passes it on; otherwise each reads the whole batch to know its lengths."""
    prefetch: bool = True
    """Whether the next step's documents are prepared during this one."""

    def exposed_seconds(self, tokens: int, nodes: int, step_seconds: float) -> float:
        """Seconds that a step of so many tokens waits for its documents."""
        seconds = tokens / (self.node_tokens * (nodes if self.remote else 1))
        return max(0.0, seconds - step_seconds) if self.prefetch else seconds


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates are those of one rank, in bytes/s each way."""

    speed: RankSpeed
    """Its bytes/s are those of a link."""
    planned_speed: RankSpeed
    """The speed that planners are told."""
    ranks_per_node: int
    devices_per_rank: int
    card_bytes: float
    """Rate of the network cards that one rank can use at a time."""
    cards_per_node: float
    """How many times `card_bytes` a node can carry."""
    mesh_links: int
    """Links inside a node that a rank has, each to another rank, of `speed.inside_bytes` each; 1: a switch."""
    sum_bytes: float
    """Inside a node, when all its ranks sum up tensors."""
    peak_flops: float
    """FLOP/s that MFU is a share of."""
    host_bandwidth: float
    """To host memory while all ranks of a node transfer; 0: unknown."""

    @classmethod
    def of(cls, cluster: Cluster, config: Any, *, tensor_parallel: int = 1) -> Machine:
        """Ranks of `tensor_parallel` devices each.

        Raises:
            ValueError: a node has no whole number of such ranks, or the model's heads do not divide by it.
        """
        heads = math.gcd(*(kv_heads for _, kv_heads in head_counts(config))) or 1
        if tensor_parallel < 1 or cluster.ranks_per_node % tensor_parallel or heads % tensor_parallel:
            both = [n for n in range(1, cluster.ranks_per_node + 1) if cluster.ranks_per_node % n == heads % n == 0]
            raise ValueError(
                f"tensor_parallel={tensor_parallel} must divide {cluster.ranks_per_node} devices of a node and {heads} "
                f"key/value heads; valid: {', '.join(map(str, both))}"
            )
        one = cluster.speed()
        planned = replace(
            one,
            linear_flops=_linear_flops(one, config, tensor_parallel, cluster.mesh_links),
            **{name: getattr(one, name) * tensor_parallel for name in SHARED_RATES},
        )
        if cluster.measured is not None:
            return cls._measured(
                planned,
                cluster.ranks_per_node // tensor_parallel,
                tensor_parallel,
                cluster.matmul_flops * tensor_parallel,
                cluster.host_bandwidth * tensor_parallel,
            )
        node_bytes = one.between_bytes * cluster.ranks_per_node
        card_bytes = min(max(one.between_bytes, node_bytes / cluster.nics_per_node) * tensor_parallel, node_bytes)
        return cls(
            speed=planned,
            planned_speed=planned,
            ranks_per_node=cluster.ranks_per_node // tensor_parallel,
            devices_per_rank=tensor_parallel,
            card_bytes=card_bytes,
            cards_per_node=node_bytes / card_bytes,
            mesh_links=cluster.mesh_links,
            sum_bytes=cluster.inside_bytes * cluster.inside_share * tensor_parallel,
            peak_flops=cluster.matmul_flops * tensor_parallel,
            host_bandwidth=cluster.host_bandwidth * tensor_parallel,
        )

    def under_nccl(self, ranks: int, version: Version, *, by_node: bool = True) -> Machine:
        """Limit what one message gets to NCCL's channels between two ranks (hardware/nccl.py).

        Args:
            ranks: that exchange keys and values.
            version: NCCL's.
            by_node: whether messages inside nodes and between them have groups of their own, with the settings of our runs
                (attention/communicators.py); False: one group for all, by NCCL's own rule.
        """
        here, devices = min(ranks, self.ranks_per_node), self.devices_per_rank
        if ranks == 1:
            return self
        card = self.card_bytes / devices
        if by_node:
            inside = Communicator(here, here, EXCHANGE_CHANNELS).channels_of_a_pair(version)
            all_ranks = Communicator(ranks, here, EXCHANGE_CHANNELS, CHANNELS_PER_NET_PEER, card)
            between = all_ranks.channels_of_a_pair(version)
        else:
            inside = between = Communicator(ranks, here, net_bytes=card).channels_of_a_pair(version)

        def limited(speed: RankSpeed) -> RankSpeed:
            return replace(
                speed,
                inside_bytes=min(speed.inside_bytes, inside * CHANNEL_INSIDE_BYTES * devices),
                between_bytes=min(speed.between_bytes, between * CHANNEL_NET_BYTES * devices),
            )

        # All messages of a node together still have all of its cards.
        card_bytes = min(self.card_bytes, between * CHANNEL_NET_BYTES * devices)
        return replace(
            self,
            speed=limited(self.speed),
            planned_speed=limited(self.planned_speed),
            card_bytes=card_bytes,
            cards_per_node=self.node_bytes / card_bytes,
        )

    @classmethod
    def from_profile(cls, profile: Profile) -> Machine:
        """The machine that `hf-longctx profile` measured: MFU is a share of what its products achieve."""
        peak = max(profile.speed.linear_flops, profile.speed.attention_flops)
        return cls._measured(profile.speed, profile.ranks_per_node, 1, peak, profile.host_bandwidth)

    @classmethod
    def _measured(
        cls, speed: RankSpeed, ranks_per_node: int, devices_per_rank: int, peak_flops: float, host_bandwidth: float
    ) -> Machine:
        """Bytes/s between nodes were measured with all ranks of a node at once, so that each has a card of its own."""
        share = busiest_share(speed.activation_bytes)
        return cls(
            speed=replace(speed, inside_bytes=speed.inside_bytes * share, between_bytes=speed.between_bytes * share),
            planned_speed=speed,
            ranks_per_node=ranks_per_node,
            devices_per_rank=devices_per_rank,
            card_bytes=speed.between_bytes * share,
            cards_per_node=float(ranks_per_node),
            mesh_links=1,
            sum_bytes=speed.reduce_bytes,
            peak_flops=peak_flops,
            host_bandwidth=host_bandwidth,
        )

    def with_experts_on(self, ranks: int, config: Any) -> Machine:
        """Return this machine with each layer's experts spread over so many ranks, to which every token travels once for each
        expert that it has chosen (transformers' all-to-all), evenly. Nothing hides it, so it slows what is linear in the tokens
        down; ranks of the same node and others are sent to at the same time.

        Raises:
            ValueError: the model has no experts, or they do not divide by `ranks`.
        """
        sizes = ModelSizes.of(config, 1)
        experts = sizes.experts
        if ranks < 1 or not experts or experts % ranks:
            valid = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0) or "none, it has no experts"
            raise ValueError(f"{ranks} ranks for the {experts} experts of each layer; valid: {valid}")
        flops, speed = model_flops(config), self.speed
        here = min(ranks, self.ranks_per_node)
        copied = flops.layers * EXPERT_EXCHANGES * sizes.experts_per_token * flops.hidden * speed.activation_bytes
        # All ranks of a node exchange at once: they share its cards, and each uses all its links.
        inside = speed.inside_bytes * _links_used(here, self.mesh_links)
        between = min(self.card_bytes, self.node_bytes / self.ranks_per_node)
        exchange = copied / ranks * max((here - 1) / inside, (ranks - here) / between)

        def slower(speed: RankSpeed) -> RankSpeed:
            return replace(speed, linear_flops=flops.linear / (flops.linear / speed.linear_flops + exchange))

        return replace(self, speed=slower(speed), planned_speed=slower(self.planned_speed))

    @property
    def node_bytes(self) -> float:
        """Bytes/s that all network cards of a node carry each way."""
        return self.card_bytes * self.cards_per_node

    def cost(self, config: Any, world_size: int, *, capacity: int | None = None, recompute: bool = False) -> CostModel:
        """Return what a plan for `world_size` such ranks should be made with. `capacity`: tokens of a full micro-batch; None:
        what its host takes to start kernels is left out."""
        cost = CostModel.from_config(
            config,
            self.planned_speed,
            ranks_per_node=self.ranks_per_node,
            world_size=world_size,
            capacity=capacity,
        )
        if not recompute:
            return cost
        keys = self.planned_speed.activation_bytes
        exchange = (3 * keys + 4) / (2 * keys + 4)  # keys and values travel once more
        again = cost.scaled(1 + FORWARD_SHARE, 1 + FORWARD_SHARE, exchange)
        # The output head lies behind all layers: it runs once.
        head = again.label_ps - cost.label_ps
        return replace(again, linear_ps=again.linear_ps - head, label_ps=cost.label_ps)

    def sum_seconds(self, bytes: float, world_size: int) -> float:
        """Seconds to add up `bytes` of every rank so that each has a share of the sum, or to collect such shares."""
        ranks = min(self.ranks_per_node, world_size)
        nodes = -(-world_size // ranks)
        inside = bytes * (ranks - 1) / ranks / self.sum_bytes
        return max(inside, bytes * (nodes - 1) / nodes / self.node_bytes)


def busiest_share(activation_bytes: int) -> float:
    """Bytes of the direct exchange over a rank's busiest link (workload.py), over what planner/cost/cost_model.py counts: all
    keys and values twice, and their gradients. A profile's bytes/s are fitted to the latter.

    In units of half a rank's share, per other rank: forward, the first rank takes 2. In backward it takes 2 again and
    gives gradients of 2, and takes 1 of its own back; the last rank takes 1 and gives 2 of keys, takes gradients of 2.
    """
    keys, gradients = activation_bytes, GRADIENT_BYTES
    busiest = 2 * keys + max(2 * keys + gradients, keys + 2 * gradients)
    return busiest / (2 * (2 * keys + gradients))


def _links_used(ranks: int, mesh_links: int) -> int:
    """Links that each of so many ranks of a node uses at once where all exchange with all."""
    return max(1, min(ranks - 1, mesh_links))


def _linear_flops(one: RankSpeed, config: Any, devices: int, mesh_links: int) -> float:
    """FLOP/s of `devices` of tensor parallelism together, their sums included."""
    flops = model_flops(config)
    share = 2 * (devices - 1) / devices
    summed = flops.layers * ALL_REDUCES * share * flops.hidden * one.activation_bytes
    inside = one.inside_bytes * _links_used(devices, mesh_links)
    return flops.linear / (flops.linear / (devices * one.linear_flops) + summed / inside)
