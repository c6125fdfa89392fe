"""How long a document occupies its ranks: the predictions that decide a plan.

A document of s tokens split over d ranks keeps each of them busy, forward and backward, for

    T(s, d) = document + linear*s/d - label*u/d + state*(d-1) + max( attention(s, d),  exchange(s, d) )

    attention(s, d) = quadratic*s^2/d + windowed*w*(2*s - w)/d + (quadratic + windowed)*half*s       w = min(s, window)
    exchange(s, d)  = (inside*s/d + message)*(d-1)  +  between*s*(d-g)/(d*g) where d > g             g ranks on a node

and a micro-batch for `micro_batch` plus the T of its documents. On one rank nothing is exchanged. The terms:

- `quadratic` is attention of layers that see all tokens before, `windowed` of those that see a window of them.
- u tokens have no label: the output head skips them. Planners count such a document as the shorter one that costs as much on
  one rank and whose tokens all have labels (`equivalent_lengths`).
- layers that carry a state along the document hand it from rank to rank, which nothing hides.
- attention runs at t / (t + half) of its speed on blocks of t = s/d tokens: short blocks are slower. On d ranks a rank
  computes s/d x s pairs, so what it loses is the same time, half*s, however many ranks there are.
- a rank receives the keys and values of the d-1 others. Those of other nodes cross once and are passed on inside, so
  each of a node's g ranks brings in 1/g of the s*(d-g)/d tokens that its node lacks.
- whichever takes longer of attention and exchange counts: each hides the other.

`work` is d*T before division: the time of all its ranks together. It never falls as d grows, which makes it the base of
the lower bound (planner/bound.py).

Every rank must arrive at the same plan, so coefficients are integers and the arithmetic is int64, rounded the same way
on every machine. Where a step's work does not fit 64 bits in nanoseconds, its planner counts in units of 2^k nanoseconds
(`in_units`; planner/bound.py chooses k). Work is then multiplied out in float64, which rounds alike on every machine too, is as
precise as a unit, and never falls where one of its factors grows. Nothing is sent.

Source: ByteScale (arXiv 2502.21231), section 4 for a*s^2 + b*s + g; half, exchange and topology are ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hf_longctx.hardware.model_sizes import ModelFlops, model_flops
from hf_longctx.hardware.speeds import GPU, RankSpeed
from hf_longctx.planner.compiled import borrowing, compiled, inlined, listed

PS_PER_NS = 1000
UNLIMITED = 2**40
"""Tokens or ranks that nothing has."""
NANOSECONDS = 11
"""Coefficients that compiled functions take where times are nanoseconds; in units, there is one more."""
NEWTON_STEPS = 6
"""The error is squared in each, and smaller than the document from the first on."""
LONGEST_TIME = 2**62
"""Nanoseconds, 146 years: longer times are given as this."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """T(s, d) of the module docstring, in nanoseconds. Picosecond coefficients keep small models apart from zero."""

    attention_ps: int
    """Picoseconds per token squared of a document: causal attention of the layers that see all of it, forward and backward."""
    linear_ps: int
    """Picoseconds per token with a label: everything that is linear in the length (projections, MLP or active experts, head)."""
    inside_ps: int
    """Picoseconds per token received from a rank of the same node: keys and values twice, their gradients once, all layers."""
    between_ps: int = 0
    """Picoseconds more per token received from another node."""
    message_ns: int = 0
    """Nanoseconds per rank exchanged with, however little: latency of all layers' messages."""
    document_ns: int = 0
    """Nanoseconds per document and rank, however short: launches of all layers' attention kernels."""
    micro_batch_ns: int = 0
    """Nanoseconds per micro-batch, however little it holds: all other launches."""
    attention_half_tokens: int = 0
    """Tokens per block at which attention runs at half speed."""
    ranks_per_node: int | None = None
    """Ranks between which `inside_ps` holds. None: all of them."""
    windowed_ps: int = 0
    """Picoseconds per token squared of a document up to the window: attention of layers whose queries see `window` tokens."""
    window: int | None = None
    """Tokens that a query of these layers sees at most; None: there are no such layers."""
    label_ps: int = 0
    """Picoseconds of `linear_ps` that a token without a label does not cost: those of the output head and the loss."""
    state_ns: int = 0
    """Nanoseconds for each further rank of a group: layers that carry a state along a document hand it on."""
    step_ns: int = 0
    """Nanoseconds once a step, on every rank: summing gradients and the optimizer. No part of a plan's makespan."""
    unit_bits: int | None = field(default=None, repr=False)
    """k of a model that a planner works with (`in_units`). None: times are nanoseconds, whatever the lengths."""

    def __post_init__(self) -> None:
        for name in COEFFICIENTS:
            value = getattr(self, name)
            if type(value) is not int or not 0 <= value < 2**63:
                raise ValueError(f"CostModel.{name} is {value!r}; it must be an integer >= 0 and < 2^63")
        for name, meaning in (("window", "a query attends to at least 1 token, itself"), ("ranks_per_node", "or None")):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"CostModel.{name} is {value!r}; it must be an integer >= 1: {meaning}")
        if self.linear_ps == 0:
            raise ValueError("CostModel.linear_ps is 0; it must be >= 1, or short documents would cost nothing")
        if (self.windowed_ps > 0) != (self.window is not None):
            raise ValueError(
                f"CostModel.windowed_ps is {self.windowed_ps} and window {self.window}: layers with a window need both, and "
                "without such layers they are 0 and None"
            )
        if self.label_ps >= self.linear_ps:
            raise ValueError(
                f"CostModel.label_ps is {self.label_ps}, and linear_ps, of which it is a part, {self.linear_ps}; valid: up to "
                f"{self.linear_ps - 1}"
            )

    @classmethod
    def from_config(
        cls,
        config: Any,
        speed: RankSpeed = GPU,
        *,
        ranks_per_node: int | None = None,
        world_size: int = 1,
        capacity: int | None = None,
    ) -> CostModel:
        """Count the FLOPs of a Hugging Face configuration, of any causal language model (hardware/model_sizes.py), and divide
        them by what a rank achieves.

        A weight costs 6 FLOPs per token: 2 forward, 4 backward. A causal query-key pair, of which there are s^2 / 2,
        costs 12 * head_dim per head. `world_size` decides what a step costs once: with several ranks, gradients travel.
        `capacity`, tokens of a full micro-batch, decides how much of the host's `launch_seconds` a micro-batch costs.
        Raises ValueError, naming it, when the configuration lacks a size, or with the reason why it cannot be counted.
        """
        return cls.from_flops(
            model_flops(config), speed, ranks_per_node=ranks_per_node, world_size=world_size, capacity=capacity
        )

    @classmethod
    def from_flops(
        cls,
        flops: ModelFlops,
        speed: RankSpeed = GPU,
        *,
        ranks_per_node: int | None = None,
        world_size: int = 1,
        capacity: int | None = None,
    ) -> CostModel:
        """Divide FLOPs and bytes of a model by what a rank achieves, as `from_config` does."""
        layers = flops.layers
        exchange_bytes = flops.kv_elements * (2 * speed.activation_bytes + 4)  # gradients return in float32
        inside = exchange_bytes / speed.inside_bytes * 1e12
        reduced = 4 * flops.parameters / speed.reduce_bytes * 2 * (world_size - 1) / world_size

        def attention_ps(of: int) -> int:
            return max(1, round(of / speed.attention_flops * 1e12)) if of else 0

        linear_ps = max(1, round(flops.linear / speed.linear_flops * 1e12))
        # Kernels that the host starts while the device computes cost what the device does not hide, in a full micro-batch.
        unhidden = 0.0 if capacity is None else layers * speed.launch_seconds * 1e9 - capacity * linear_ps / PS_PER_NS
        return cls(
            attention_ps=attention_ps(flops.attention - flops.windowed),
            windowed_ps=attention_ps(flops.windowed),
            window=flops.window,
            attention_half_tokens=round(speed.attention_half_tokens),
            linear_ps=linear_ps,
            label_ps=min(round(flops.head / speed.linear_flops * 1e12), linear_ps - 1),
            inside_ps=max(1, round(inside)),
            between_ps=round(exchange_bytes / speed.between_bytes * 1e12),
            message_ns=round(layers * speed.message_seconds * 1e9),
            document_ns=round(layers * speed.document_seconds * 1e9),
            micro_batch_ns=round(layers * speed.micro_batch_seconds * 1e9 + max(0.0, unhidden)),
            ranks_per_node=ranks_per_node,
            step_ns=round((reduced + flops.parameters / speed.optimizer_parameters) * 1e9),
        )

    def in_units(self, bits: int) -> CostModel:
        """Return the model that counts times in units of 2^bits nanoseconds: its `work` and `time`, and its `document_ns` and
        `micro_batch_ns`, rounded up. The other coefficients stay as they are, so that nothing is lost of them."""
        fixed = {name: -(-getattr(self, name) >> bits) for name in ("document_ns", "micro_batch_ns")}
        return replace(self, **fixed, unit_bits=bits)

    def most_work(self, length: float, ranks: float, tokens: float, documents: float = 1.0) -> float:
        """Return a bound on the nanoseconds of `work` of so many documents of up to `length` and together `tokens` tokens, each
        on up to so many ranks: multiplied in floats, which do not wrap around."""
        reach = length + self.attention_half_tokens * ranks
        exchange = (self.inside_ps + self.between_ps) * ranks
        per_token = ((self.attention_ps + self.windowed_ps) * reach + self.linear_ps + exchange) / PS_PER_NS
        return per_token * tokens + ((self.message_ns + self.state_ns) * ranks + self.document_ns) * ranks * documents

    def largest_product(self, length: float) -> float:
        """Return the largest number of picoseconds that `work` multiplies out for documents of up to `length` tokens."""
        half = (self.attention_ps + self.windowed_ps) * self.attention_half_tokens
        return max(
            float(half),
            max(self.attention_ps, self.windowed_ps, self.linear_ps, self.inside_ps, self.between_ps) * length,
        )

    def equivalent_lengths(self, lengths: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Tokens of documents that cost as much on one rank and whose tokens all have labels, rounded up.

        Args:
            lengths, labels: int64 [documents]: tokens, and how many of them have a label.

        Returns:
            int64 [documents]: 1 to `lengths`. As float64 has it, the same on every machine.
        """
        if self.label_ps == 0:
            return lengths
        # What saves no more than a token costs does not count as fewer tokens.
        unlabelled = np.flatnonzero(lengths - labels > (self.linear_ps - 1) // self.label_ps)
        if not len(unlabelled):
            return lengths
        tokens = lengths[unlabelled].astype(np.float64)
        window = float(self.window or 0)
        per_token = self.linear_ps + float(self.attention_ps + self.windowed_ps) * self.attention_half_tokens

        def cost(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """Picoseconds, and their derivative by tokens."""
            reach = np.minimum(tokens, window)
            pairs = self.attention_ps * tokens * tokens + self.windowed_ps * reach * (2 * tokens - reach)
            return pairs + per_token * tokens, 2 * self.attention_ps * tokens + 2 * self.windowed_ps * reach + per_token

        goal = cost(tokens)[0] - float(self.label_ps) * (tokens - labels[unlabelled])
        for _ in range(NEWTON_STEPS):  # from above, and never below: costs are convex
            picoseconds, slope = cost(tokens)
            tokens -= (picoseconds - goal) / slope
        equivalent = lengths.copy()
        equivalent[unlabelled] = np.clip(np.ceil(tokens), 1, lengths[unlabelled]).astype(np.int64)
        return equivalent

    def work(self, length: Any, ranks: Any) -> Any:
        """Nanoseconds of all `ranks` ranks together on a document of `length` tokens; ints or int64 arrays, broadcast.

        Never falls as `ranks` or `length` grows; at most LONGEST_TIME. The micro-batch that it lies in is not counted.
        """
        return _nanoseconds(*self._work(length, ranks))

    def _work(self, length: Any, ranks: Any) -> tuple[Any, int]:
        """Work in units of 2^k nanoseconds, and k; 0 where the model has units of its own."""
        lengths, sizes = np.asarray(length, np.int64), np.asarray(ranks, np.int64)
        # New arrays of one shape, sooner than by broadcast_arrays.
        lengths, sizes = lengths + 0 * sizes, sizes + 0 * lengths
        model, bits = self, 0
        if self.unit_bits is None and lengths.size:
            longest = float(lengths.max())
            largest = max(self.most_work(longest, float(sizes.max()), longest), self.largest_product(longest))
            if largest >= LONGEST_TIME:
                bits = math.frexp(largest / LONGEST_TIME)[1]
                model = self.in_units(bits)
        work = _works(lengths.ravel(), sizes.ravel(), model.coefficients).reshape(lengths.shape)
        return (work if work.ndim else int(work)), bits

    @property
    def linear_tokens(self) -> int:
        """Tokens at which attention costs as much as all that is linear: s0 of planner/stages/causal_chunks.py."""
        if self.attention_ps == 0:
            return UNLIMITED
        behind_window = 2 * self.windowed_ps * (self.window or 0)  # costs every token the same
        return min((self.linear_ps + behind_window) // self.attention_ps, UNLIMITED)

    @property
    def coefficients(self) -> tuple[int, ...]:
        """The argument of `work_of` and of other compiled functions of the planner: NANOSECONDS integers, and k where times are
        in units of 2^k nanoseconds and k is not 0."""
        coefficients = (
            self.attention_ps,
            self.attention_half_tokens,
            self.linear_ps,
            self.inside_ps,
            self.between_ps,
            self.message_ns,
            self.document_ns,
            self.ranks_per_node or UNLIMITED,
            self.window or UNLIMITED,
            self.windowed_ps,
            self.state_ns,
        )
        return (*coefficients, self.unit_bits) if self.unit_bits else coefficients

    def time(self, length: Any, ranks: Any) -> Any:
        """Nanoseconds that each of its `ranks` ranks spends on a document of `length` tokens: T(s, d), rounded up; at most
        LONGEST_TIME."""
        work, bits = self._work(length, ranks)
        return _nanoseconds(-(-work // ranks), bits)

    def ring_time(self, lengths: np.ndarray, ranks: int) -> int:
        """Nanoseconds of a micro-batch whose documents (tokens, int64 array) are all split over `ranks` ranks that pass every
        key and value around a ring, as static context parallelism does, whoever needs them.

        A ring over several nodes is as slow as its slowest link, between nodes. Attention hides the ring or is hidden.
        """
        return int(self.ring_times(lengths, np.zeros(1, np.int64), np.array([ranks]))[0])

    def ring_times(self, lengths: np.ndarray, begins: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """`ring_time` of many micro-batches, int64.

        Args:
            lengths: int64 [documents], tokens, one micro-batch after the other.
            begins, ranks: int64 [micro-batches]: the first document of each, and its ranks.
        """
        tokens, count = np.add.reduceat(lengths, begins), np.diff(begins, append=len(lengths))
        several_nodes = ranks > (self.ranks_per_node or UNLIMITED)
        link_ps = np.where(several_nodes, max(self.inside_ps, self.between_ps), self.inside_ps)
        # Fewer than 8 such numbers are added.
        if self._largest_of_ring(float(tokens.max()), float(ranks.max())) >= LONGEST_TIME / 8:
            tokens, count, link_ps, ranks = (column.astype(object) for column in (tokens, count, link_ps, ranks))
        # s^2 and half*s of every document; a rank has 1/ranks of the pairs, and pieces of s/ranks tokens.
        reach, both_ps = np.minimum(lengths, self.window or UNLIMITED), self.attention_ps + self.windowed_ps
        if self.unit_bits:
            unit = PS_PER_NS << self.unit_bits
            squares = float(self.attention_ps) * lengths * lengths
            squares += float(self.windowed_ps) * reach * (2 * lengths - reach)
            pairs = np.add.reduceat((squares / unit).astype(np.int64), begins).astype(object) // ranks
            attention = pairs + both_ps * self.attention_half_tokens * tokens // unit
            ring = (link_ps * tokens + self.message_ns * PS_PER_NS * ranks) * (ranks - 1) // (unit * ranks)
            linear = -(-self.linear_ps * tokens // (unit * ranks))
        else:
            squares = self.attention_ps * lengths // PS_PER_NS * lengths
            squares += self.windowed_ps * reach // PS_PER_NS * (2 * lengths - reach)
            pairs = np.add.reduceat(squares, begins).astype(object) // ranks
            attention = pairs + both_ps * self.attention_half_tokens // PS_PER_NS * tokens
            ring = (link_ps * tokens // PS_PER_NS // ranks + self.message_ns) * (ranks - 1)
            linear = -(-self.linear_ps * tokens // PS_PER_NS // ranks)
        states = count * (-(-self.state_ns * (ranks - 1) // 2 ** (self.unit_bits or 0)))
        times = self.micro_batch_ns + count * self.document_ns + linear + states + np.maximum(attention, ring)
        return times.astype(np.int64)

    def _largest_of_ring(self, tokens: float, ranks: float) -> float:
        """Return more than any number that `ring_times` multiplies out, but for attention's squares, for a micro-batch of so many
        tokens on so many ranks."""
        link_ps = max(self.inside_ps, self.between_ps)
        a_token = max(
            (self.attention_ps + self.windowed_ps) * self.attention_half_tokens,
            self.linear_ps,
            self.document_ns + self.state_ns * ranks,  # no document is shorter than a token
        )
        unit = PS_PER_NS << (self.unit_bits or 0)
        ring = (link_ps * tokens + self.message_ns * PS_PER_NS * ranks) * ranks
        return max(self.micro_batch_ns, a_token * tokens, ring, unit * ranks)

    def scaled(self, attention: float = 1.0, linear: float = 1.0, exchange: float = 1.0) -> CostModel:
        """The same model with its parts so many times as slow: `linear` includes what documents and micro-batches cost."""

        def times(factor: float, *names: str) -> dict[str, int]:
            return {name: round(getattr(self, name) * factor) for name in names}

        parts = times(attention, "attention_ps", "windowed_ps")
        parts |= times(linear, "linear_ps", "label_ps", "document_ns", "micro_batch_ns")
        parts["linear_ps"] = max(1, parts["linear_ps"])
        parts["label_ps"] = min(parts["label_ps"], parts["linear_ps"] - 1)
        if self.windowed_ps:
            parts["windowed_ps"] = max(1, parts["windowed_ps"])
        return replace(self, **parts, **times(exchange, "inside_ps", "between_ps", "message_ns", "state_ns"))

    def without_attention(self) -> CostModel:
        """Return the model without attention."""
        return replace(self, attention_ps=0, windowed_ps=0, window=None)

    def without_exchange(self) -> CostModel:
        """Return the model of ranks between which nothing takes time."""
        return replace(self, inside_ps=0, between_ps=0, message_ns=0, state_ns=0)


def _nanoseconds(times: Any, bits: int) -> Any:
    """Times (int64 array or int) in units of 2^bits nanoseconds -> nanoseconds, at most LONGEST_TIME."""
    if bits == 0:
        return times
    most = LONGEST_TIME >> bits
    return np.minimum(times, most) << bits if isinstance(times, np.ndarray) else min(times, most) << bits


@inlined
@borrowing
@compiled
def work_of(length: int, ranks: int, coefficients: tuple[int, ...]) -> int:  # pragma: no cover - compiled
    """CostModel.work of one document; rounded down term by term, but linear, which is rounded up to at least 1."""
    if len(coefficients) > NANOSECONDS:  # costs nothing in machine code, which is made for tuples of one length
        return _work_in_units(length, ranks, coefficients)
    attention_ps, half, linear_ps, inside_ps, between_ps, message, document, node, window, windowed_ps, state = (
        coefficients[:NANOSECONDS]
    )
    linear = -(-linear_ps * length // PS_PER_NS) + state * ranks * (ranks - 1)
    # Divided before the second multiplication, or int64 would end at 1.5M tokens on a CPU. Loses 1 ns per token.
    reach = min(length, window)
    attention = attention_ps * length // PS_PER_NS * length + windowed_ps * reach // PS_PER_NS * (2 * length - reach)
    attention += (attention_ps + windowed_ps) * half // PS_PER_NS * length * ranks
    exchange = (inside_ps * length // PS_PER_NS + message * ranks) * (ranks - 1)
    if ranks > node:  # most groups lie inside one, and a quotient takes as long as all else
        exchange += between_ps * length // PS_PER_NS * (ranks - node) // node
    return document * ranks + linear + max(attention, exchange)


@borrowing
@compiled
def _work_in_units(length: int, ranks: int, coefficients: tuple[int, ...]) -> int:  # pragma: no cover - compiled
    """`work_of` in units. Every operation rounds a result that does not fall where an operand grows, so work does not either."""
    attention_ps, half, linear_ps, _, _, _, document, _, window, windowed_ps, state = coefficients[:NANOSECONDS]
    unit = math.ldexp(float(PS_PER_NS), int(coefficients[-1]))
    reach = min(length, window)
    attention = float(attention_ps) * length * length + float(windowed_ps) * reach * (2 * length - reach)
    attention += (float(attention_ps) + float(windowed_ps)) * half * length * ranks
    hidden = max(attention, exchange_ps(length, ranks, coefficients)) + float(state) * PS_PER_NS * ranks * (ranks - 1)
    return document * ranks + int(np.ceil(float(linear_ps) * length / unit)) + int(hidden / unit)


@borrowing
@compiled
def exchange_ps(tokens: int, ranks: int, coefficients: tuple[int, ...]) -> float:  # pragma: no cover - compiled
    """Picoseconds of all ranks together to exchange the keys and values of so many tokens, in float64."""
    _, _, _, inside_ps, between_ps, message, _, node, _, _, _ = coefficients[:NANOSECONDS]
    inside = (float(inside_ps) * tokens + float(message) * PS_PER_NS * ranks) * (ranks - 1)
    return inside + float(between_ps) * tokens * max(ranks - node, 0) / node


@compiled
def _works(
    lengths: np.ndarray, ranks: np.ndarray, coefficients: tuple[int, ...]
) -> np.ndarray:  # pragma: no cover - compiled
    work = np.empty(len(lengths), np.int64)
    lengths, ranks = listed(lengths), listed(ranks)
    for i in range(len(lengths)):
        work[i] = work_of(lengths[i], ranks[i], coefficients)
    return work


COEFFICIENTS = (
    "attention_ps",
    "linear_ps",
    "inside_ps",
    "between_ps",
    "message_ns",
    "document_ns",
    "micro_batch_ns",
    "attention_half_tokens",
    "windowed_ps",
    "label_ps",
    "state_ns",
    "step_ns",
)
"""Fields of CostModel that are counts >= 0. New ones go before the last: checkpoints hold all before that, in this order, and
older checkpoints fewer (training/measuring/recalibration.py)."""
