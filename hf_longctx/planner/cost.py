"""How long a document occupies its ranks: the predictions that decide a plan.

A document of s tokens split over d ranks keeps each of them busy, forward and backward, for

    T(s, d) = launch + linear*s/d + max( attention*s^2/d,  (exchange*s/d + launch)*(d-1) )

Attention compute hides the d-1 exchanges of keys and values, each of s/d tokens; whichever of the two takes longer
counts. On one rank nothing is exchanged. `work` is d*T before division: the time of all its ranks together. It never
falls as d grows, which makes it the base of the lower bound (bound.py).

Every rank must arrive at the same plan, so coefficients are integers and the arithmetic is int64, rounded the same way
on every machine. Floating point is used once, in `from_config`, to turn speeds into coefficients. Nothing is sent.

Source: ByteScale (arXiv 2502.21231), section 4 for a*s^2 + b*s + g; the exchange term is ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

PS_PER_NS = 1000


@dataclass(frozen=True, slots=True)
class RankSpeed:
    """What one rank achieves. Only the ratios of these numbers shape a plan."""

    attention_flops: float
    """FLOP/s of the attention kernel, forward and backward."""
    linear_flops: float
    """FLOP/s of matrix multiplications, forward and backward."""
    link_bytes: float
    """Bytes/s that one rank receives from another while it also sends."""
    launch_seconds: float
    """Seconds per layer to start one more document, or one more exchange, however short."""
    activation_bytes: int
    """Bytes of one activation element: 2 for bfloat16, 4 for float32."""


CPU_CORE = RankSpeed(
    attention_flops=5.4e10, linear_flops=2.6e11, link_bytes=1.0e9, launch_seconds=1e-3, activation_bytes=2
)
"""A rank on one CPU core, gloo. Compute is fitted to SmolLM2-135M, bfloat16, forward and backward on two cores: 393
tokens/s in documents of 1024 tokens, 181 in 4096. Measured between two processes: 0.9 GB/s at 4 MiB each way, 0.34 ms
per message, of which an exchange has three per layer."""

GPU = RankSpeed(
    attention_flops=1.95e14, linear_flops=2.3e14, link_bytes=2.2e10, launch_seconds=1e-4, activation_bytes=2
)
"""A rank on one Hopper-class GPU with its own network card. From ByteScale's case study of a 7B model, taken to have 8
kv heads, in chunks of 8192 tokens: MLP 9.5 ms; attention 2.8 ms and exchange 1.5 ms per ring step. Launch is an
estimate."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """T(s, d) of the module docstring, in nanoseconds. Picosecond coefficients keep small models apart from zero."""

    attention_ps: int
    """Picoseconds per token squared of a document: causal attention of all layers, forward and backward."""
    linear_ps: int
    """Picoseconds per token: everything that is linear in the length (projections, MLP or active experts, head)."""
    exchange_ps: int
    """Picoseconds per token received from another rank: keys and values twice, their gradients once, all layers."""
    launch_ns: int
    """Nanoseconds per document and per exchange, however short: kernel launches and message latency of all layers."""
    window: int | None = None
    """Tokens that a query attends to at most; None: all before it."""

    def __post_init__(self) -> None:
        for name in ("attention_ps", "linear_ps", "exchange_ps", "launch_ns"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"CostModel.{name} is {value!r}; it must be an integer >= 0")
        if self.window is not None and self.window < 1:
            raise ValueError(f"CostModel.window is {self.window}; a query attends to at least 1 token, itself")
        if self.linear_ps == 0:
            raise ValueError("CostModel.linear_ps is 0; it must be >= 1, or short documents would cost nothing")

    @classmethod
    def from_config(cls, config: Any, speed: RankSpeed = GPU) -> CostModel:
        """Count the FLOPs of a Hugging Face configuration (Llama, Mistral, Mixtral, BLOOM, MPT), and divide them by what a
        rank achieves.

        A weight costs 6 FLOPs per token: 2 forward, 4 backward. A causal query-key pair, of which there are s^2 / 2,
        costs 12 * head_dim per head. Raises ValueError, naming it, when the configuration lacks a size.
        """
        hidden = _size(config, "hidden_size")
        layers = _size(config, "num_hidden_layers")
        heads = _size(config, "num_attention_heads")
        family = getattr(config, "model_type", None)
        plain_mlp = family in ("bloom", "mpt")  # two matrices, and four times as wide unless it says otherwise
        intermediate = (
            getattr(config, "expansion_ratio", 4) * hidden if plain_mlp else _size(config, "intermediate_size")
        )
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head_dim = getattr(config, "head_dim", None) or hidden // heads
        experts_per_token = getattr(config, "num_experts_per_tok", None) or 1

        projections = 2 * hidden * head_dim * (heads + kv_heads)
        mlp = (2 if plain_mlp else 3) * hidden * intermediate * experts_per_token
        linear_flops = 6 * (layers * (projections + mlp) + hidden * _size(config, "vocab_size"))
        attention_flops = 6 * layers * heads * head_dim
        kv_elements = 2 * layers * kv_heads * head_dim
        exchange_bytes = kv_elements * (2 * speed.activation_bytes + 4)  # gradients return in float32
        return cls(
            attention_ps=max(1, round(attention_flops / speed.attention_flops * 1e12)),
            linear_ps=max(1, round(linear_flops / speed.linear_flops * 1e12)),
            exchange_ps=max(1, round(exchange_bytes / speed.link_bytes * 1e12)),
            launch_ns=round(layers * speed.launch_seconds * 1e9),
            window=config.sliding_window if family in ("mistral", "mixtral") else None,
        )

    def work(self, length: Any, ranks: Any) -> Any:
        """Nanoseconds of all `ranks` ranks together on a document of `length` tokens; ints or int64 arrays, broadcast.

        Never falls as `ranks` or `length` grows.
        """
        linear = -(-self.linear_ps * length // PS_PER_NS)  # rounded up: at least 1
        # Divided before the second multiplication, or int64 would end at 1.5M tokens on a CPU. Loses 1 ns per token.
        reach = length if self.window is None else np.minimum(length, self.window)
        attention = self.attention_ps * reach // PS_PER_NS * (2 * length - reach)
        exchange = (self.exchange_ps * length // PS_PER_NS + self.launch_ns * ranks) * (ranks - 1)
        return self.launch_ns * ranks + linear + np.maximum(attention, exchange)

    def time(self, length: Any, ranks: Any) -> Any:
        """Nanoseconds that each of its `ranks` ranks spends on a document of `length` tokens: T(s, d), rounded up."""
        return -(-self.work(length, ranks) // ranks)


def _size(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or value < 1:
        raise ValueError(
            f"{type(config).__name__}.{name} is {value!r}; the cost model needs an integer >= 1. "
            "Construct CostModel(attention_ps, linear_ps, exchange_ps, launch_ns) for other architectures"
        )
    return value
