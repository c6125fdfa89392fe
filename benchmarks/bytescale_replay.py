"""ByteScale's experiments (arXiv 2502.21231, section 8), replayed: its two planners, static packing and ours on the same
documents, on one set of parameters for all of its figures.

The setting, as the paper gives it: a 7B model with 8 key/value heads (table 1) on 1024 GPUs, 8K tokens per rank, 32M
tokens per step, contexts up to 2M. Its baseline runs 8 micro-batches of 2M tokens on groups of 256 ranks: 32M tokens are
2 groups, so there are 512 ranks, each 2 GPUs of tensor parallelism, 4 ranks on a node. (Figure 18c counts to 1000, which we
take for GPUs. Were these ranks, steps would hold 64M tokens, as many for each rank.)

The GPUs are not named. What a rank achieves is taken from the case study (figure 18), where micro-batches of 8K tokens per
rank are timed, forward + backward:

    longest     25 + 63 s             2M tokens on 256 ranks, bound by attention
    ring        18.7 + 42.7 s         mean of the other 7, which wait for the ring of 256 ranks
    MLP         9 to 10 ms            one layer, forward: FLOP/s of all that is linear

    attention FLOP/s = FLOPs / (longest - linear)         bytes/s of a ring = bytes / (ring - linear)

`KERNELS` takes single kernels of the same figure instead (attention of 39 ranks 110 ms, a message of 8K tokens 1.5 ms):
5 % faster attention and 24 % faster rings than whole micro-batches show. Both are reported; the table is of the former.

Selective offload, as the paper's equation 3 has it: a document may keep a share r of its middle layers' activations in
host memory, as long as forward hides the transfer, and then needs

    D(s) = ceil( (2 + (1 - r)(l - 2)) / l * s / C ) ranks        l layers

Figure 21: 64K tokens hide r = 0.545 (between 0.5 and 0.6); the time to hide it in grows with the length. r is at most
0.465: the case study's balanced step is one micro-batch of 156 s, and 2M tokens on 256 ranks take 88, so they ran on
256 * 88 / 156 = 144 ranks. Why not on fewer, the paper does not say.

Loading (figure 20): documents read by every node cost 5 % of the balanced step, 8 s, which ByteScale's remote loader, the
last row of its ablation, hides. Static packing and all rows before wait for it here too; ours hides it.

Left open, and chosen here: documents are log-uniform inside a bucket of figure 4 and truncated at the context; a batch is
what packs of 32M tokens together hold; documents come in random order; throughput is all tokens over all seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from hf_longctx.hardware.devices import BYTESCALE
from hf_longctx.hardware.model_sizes import model_flops
from hf_longctx.hardware.published import ARCHITECTURES, Architecture
from hf_longctx.planner import CostModel, StepPlan, Topology, lower_bound, plan_step
from hf_longctx.planner.baselines.bytescale import plan_bytescale_balanced, plan_bytescale_naive
from hf_longctx.planner.baselines.static_cp import plan_static_cp
from hf_longctx.planner.placing.packing import first_fit
from hf_longctx.planner.plan import Mode
from hf_longctx.simulator.lengths import draw_tokens
from hf_longctx.simulator.machine import Loader, Machine
from hf_longctx.simulator.play import play
from hf_longctx.simulator.workload import GRADIENT_BYTES

RANKS, RANKS_PER_NODE, GPUS_PER_RANK = 512, 4, 2
CAPACITY = 8192
STEP_TOKENS = 2**25
SHORTEST_CONTEXT, LONGEST_CONTEXT = 2**18, 2**21

LONGEST_SECONDS = 25 + 63
RING_SECONDS = 18.7 + 42.7
BALANCED_SECONDS = 156
HIDDEN_AT_64K = 0.545
MOST_OFFLOAD = 1 - (32 * LONGEST_SECONDS / BALANCED_SECONDS - 2) / 30  # equation 3 for r

GPUS = {"llama-7b": 1024, "llama-13b": 2048, "llama-30b": 4096, "llama-70b": 8192, "mistral-8x22b": 8192}
"""The paper's clusters. All are played with 512 ranks, of as many GPUs as that makes."""


@dataclass(frozen=True)
class Parameters:
    """What one rank of 2 GPUs achieves."""

    name: str
    attention_flops: float
    ring_bytes: float
    """Bytes/s from rank to rank between nodes."""


def _case_study() -> Parameters:
    flops = model_flops(architecture("llama-7b"))
    speed = BYTESCALE.speed()
    linear = flops.linear * CAPACITY / speed.linear_flops
    attention = flops.attention * LONGEST_CONTEXT * (CAPACITY + speed.attention_half_tokens)
    ring = flops.kv_elements * (2 * speed.activation_bytes + GRADIENT_BYTES) * CAPACITY * 255
    return Parameters("micro-batches", attention / (LONGEST_SECONDS - linear), ring / (RING_SECONDS - linear))


def architecture(model: str) -> Architecture:
    """The paper's model of this name: 8 key/value heads, whatever its size."""
    return replace(ARCHITECTURES[model], num_key_value_heads=8)


CASE_STUDY = _case_study()
KERNELS = Parameters("single kernels", BYTESCALE.speed().attention_flops, BYTESCALE.speed().between_bytes)


MESSAGE_SECONDS = 3e-5
"""Of its runtime: with the half a millisecond of our preset, its micro-batches of short documents would take 7 % longer than
published."""


@dataclass(frozen=True)
class Setting:
    """A model on its cluster: 512 ranks."""

    model: str = "llama-7b"
    parameters: Parameters = CASE_STUDY
    most_offload: float = MOST_OFFLOAD
    """The largest share of activations in host memory."""
    stages: int = 1
    """Of a pipeline, over which a rank's GPUs are spread."""
    step_tokens: int = STEP_TOKENS
    expert_ranks: int = 1
    """Over which the experts of each layer are spread."""

    @property
    def config(self) -> Architecture:
        return architecture(self.model)

    @cached_property
    def machine(self) -> Machine:
        gpus = GPUS[self.model] / RANKS / GPUS_PER_RANK / self.stages
        base = Machine.of(replace(BYTESCALE, ranks_per_node=RANKS_PER_NODE, nics_per_node=RANKS_PER_NODE), self.config)
        speed = replace(
            base.speed,
            attention_flops=self.parameters.attention_flops * gpus,
            linear_flops=base.speed.linear_flops * gpus,
            inside_bytes=base.speed.inside_bytes * gpus,
            between_bytes=self.parameters.ring_bytes * gpus,
            message_seconds=MESSAGE_SECONDS,
        )
        machine = replace(base, speed=speed, planned_speed=speed, card_bytes=speed.between_bytes)
        return machine.with_experts_on(self.expert_ranks, self.config) if self.expert_ranks > 1 else machine

    @property
    def cost(self) -> CostModel:
        return self.machine.cost(self.config, RANKS)


@dataclass(frozen=True)
class OffloadTopology(Topology):
    """Ranks that hold more of long documents, part of which waits in host memory: equation 3."""

    layers: int = 2
    most_offload: float = 0.0
    seconds_per_token: tuple[float, float] = (0.0, 0.0)
    """What one rank computes for a token: of any document, and more per token of the document's length. Any unit."""

    def fewest_ranks(self, lengths: np.ndarray) -> np.ndarray:
        fixed, growing = self.seconds_per_token
        hidden = HIDDEN_AT_64K * (fixed + growing * lengths) / (fixed + growing * 65536)
        offloaded = np.minimum(self.most_offload, hidden)
        tokens_held = (2 + (1 - offloaded) * (self.layers - 2)) / self.layers * lengths
        fewer = np.ceil(tokens_held / self.capacity).astype(np.int64)
        return np.where(lengths > self.capacity, np.maximum(1, fewer), 1)


LOCAL, REMOTE = Loader(remote=False, prefetch=False), Loader()


@dataclass(frozen=True)
class Method:
    """How a step is trained."""

    planner: Callable[[np.ndarray], StepPlan]
    """Of its lengths."""
    loader: Loader


@dataclass(frozen=True)
class Replayed:
    """Some steps of a method."""

    tokens: int
    seconds: float
    loading: float
    """Seconds, of `seconds`, spent waiting for documents."""
    steps: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def busy_seconds(self) -> float:
        """Return the busy seconds of a step, without loading: what the case study shows."""
        return (self.seconds - self.loading) / self.steps


def methods(setting: Setting, context: int) -> dict[str, Method]:
    """By name: static packing, the rows of the ablation, and ours with a ring and with direct exchange."""
    cost, layers = setting.cost, setting.config.num_hidden_layers
    plain = Topology(RANKS, CAPACITY, ranks_per_node=RANKS_PER_NODE, stages=setting.stages)
    mode: Mode = "pipeline" if setting.stages > 1 else "async"
    per_token = (cost.linear_ps + cost.attention_ps * cost.attention_half_tokens, cost.attention_ps)
    offload = OffloadTopology(
        RANKS,
        CAPACITY,
        ranks_per_node=RANKS_PER_NODE,
        stages=setting.stages,
        layers=layers,
        most_offload=setting.most_offload,
        seconds_per_token=per_token,
    )
    naive = partial(plan_bytescale_naive, mode=mode)
    balanced = partial(plan_bytescale_balanced, mode=mode)
    static = partial(plan_static_cp, topology=plain, cost=cost, context=context, mode=mode)
    ours = partial(plan_step, topology=plain, cost=cost, mode=mode)
    balanced_offload = partial(balanced, topology=offload, cost=cost)
    return {
        "static packing": Method(static, LOCAL),
        "Alg. 1": Method(partial(naive, topology=plain, cost=cost), LOCAL),
        "+ offload": Method(partial(naive, topology=offload, cost=cost), LOCAL),
        "+ balance": Method(balanced_offload, LOCAL),
        "+ remote loader": Method(balanced_offload, REMOTE),
        "ours, ring": Method(lambda lengths: replace(ours(lengths), exchange="ring"), REMOTE),
        "ours": Method(ours, REMOTE),
    }


def batch(dataset: str, seed: int, context: int, tokens: int = STEP_TOKENS) -> np.ndarray:
    """int64 [documents]: of at most so many tokens, in the order drawn, what as many packs of the context hold."""
    lengths = draw_tokens(dataset, tokens, seed, context)
    longest_first = np.argsort(-lengths, kind="stable")
    fits = first_fit(lengths[longest_first], context) < tokens // context
    return lengths[np.sort(longest_first[fits])]


def bound(setting: Setting, dataset: str, context: int, steps: int) -> float:
    """Tokens/s that no plan of these documents exceeds (planner/bound.py; without offload)."""
    cost, topology = setting.cost, Topology(RANKS, CAPACITY, ranks_per_node=RANKS_PER_NODE)
    batches = [batch(dataset, seed, context, setting.step_tokens) for seed in range(steps)]
    seconds = sum(lower_bound(np.sort(lengths)[::-1], topology, cost) for lengths in batches) / 1e9
    return sum(int(lengths.sum()) for lengths in batches) / seconds


def replay(setting: Setting, dataset: str, context: int, steps: int) -> dict[str, Replayed]:
    """Every method on the same documents."""
    machine, config = setting.machine, setting.config
    batches = [batch(dataset, seed, context, setting.step_tokens) for seed in range(steps)]
    tokens = sum(int(lengths.sum()) for lengths in batches)
    results = {}
    for name, method in methods(setting, context).items():
        played = [play(method.planner(lengths), config, machine, loader=method.loader) for lengths in batches]
        seconds, loading = sum(step.seconds for step in played), sum(step.parts["loading"] for step in played)
        results[name] = Replayed(tokens, seconds, loading, steps)
    return results
