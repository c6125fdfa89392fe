"""Bytes per token that one layer keeps for backward, that its backward adds, and those around the layers.

What is said of memory is measured in tests/planner/memory/test_memory_model.py, by the storages that autograd keeps and by the
allocator: it follows how this package and transformers compute, line by line. With weights of 4 bytes and activations of
2, autocast is counted: a residual stream in float32, and one copy of the norm's output for each projection that reads it.

Where weights are frozen (LoRA), the input of a matrix product is kept only if an adapter reads it, and a norm does not
keep what it multiplies with its weight. PEFT holds adapters in float32: beside weights of bfloat16 each adapter reads a
float32 copy of its input, and autocast makes it a bfloat16 copy. No torch; nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hf_longctx.counting.records import AttentionShape
from hf_longctx.hardware.model_sizes import ModelSizes

READ_NORM = ("q_proj", "k_proj", "v_proj", "query_key_value", "Wqkv")
"""Projections whose input is the norm before attention."""
READ_ATTENTION = ("o_proj", "dense", "out_proj")
READ_SECOND_NORM = ("gate_proj", "up_proj", "dense_h_to_4h")
READ_NORM_LAST = ("up_proj", "dense_h_to_4h")
"""The last of these to run."""
READ_INNER = ("down_proj", "dense_4h_to_h")


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of one element."""

    weight: int
    activation: int
    product_scratch: int = 0
    """of a matrix product's result, beside it while it is computed; see memory_model.py"""
    workspace: Callable[[AttentionShape], int] = lambda shape: 0
    """of the attention kernel per token, while it runs backward"""
    adapter: int = 4
    """of LoRA's weights where they compute; FSDP2 gathers them in the activations' dtype"""

    @property
    def autocast(self) -> bool:
        return self.activation < self.weight


@dataclass(frozen=True, slots=True)
class Adapters:
    """LoRA: which projections, and of what rank."""

    names: tuple[str, ...]
    rank: int

    def keep(self, width: int, readers: tuple[str, ...], precision: Precision, kept_anyway: bool) -> int:
        """Bytes per token that the adapters of `readers` keep of an input [T, width] that they all read."""
        reading = sum(name in self.names for name in readers)
        alike = self.computed_in(precision) == precision.activation and not precision.autocast
        copies = min(reading, not kept_anyway) if alike else reading
        return self.computed_in(precision) * (copies * width + reading * self.rank)

    def _adapt(self, readers: tuple[str, ...]) -> bool:
        return any(name in self.names for name in readers)

    @staticmethod
    def computed_in(precision: Precision) -> int:
        """Bytes of an element of what an adapter computes."""
        return 2 if precision.autocast else precision.adapter

    def working(self, width: int, hidden: int, kept_inner: int, gelu_temporaries: int, precision: Precision) -> int:
        """Bytes per token that recomputing an MLP, and its backward, add at most to what is kept of it.

        Args:
            width: of the MLP.
            hidden: of the residual stream.
            kept_inner: bytes per token that adapters keep of the MLP's inner activation.
        """
        product, wide = precision.activation, self.computed_in(precision)
        half, alike = precision.weight < 4, wide == product and not precision.autocast
        # The residual stream and the norm's output, which the MLP was given: kept only as others' copies.
        given = (precision.weight if half else 0) + (0 if alike else precision.weight)
        # The gradients inside; the inner activation is free by then.
        moments, waiting = [product * (gelu_temporaries + 1) * width - kept_inner], 0
        if self._adapt(READ_INNER):
            # While the layer is recomputed, the gradients of its last projection and of what the adapter adds to it wait.
            waiting = (product + wide if half and not alike else wide) * hidden
            copied = 4 if precision.autocast else 0
            inner = 0 if alike else product  # which the adapter keeps itself, or a copy of it
            moments += [wide * width, (inner + copied) * width + (given + product) * hidden]
        if self._adapt(READ_NORM_LAST):
            # The adapter's product and that times its scale, beside what it is added to, before there is an inner activation.
            moments.append(2 * wide * width - kept_inner + given * hidden)
        return waiting + max(moments)


class TokenBytes:
    """Bytes per token of one layer, and around the layers; `adapters` None: all weights are trained."""

    def __init__(self, sizes: ModelSizes, precision: Precision, adapters: Adapters | None = None) -> None:
        hidden, rms, product, cast = sizes.hidden, sizes.norms_are_rms, precision.activation, precision.autocast
        q_width, kv_width = sizes.heads * sizes.head_dim, sizes.kv_width
        self.residual = precision.weight * hidden

        def kept(width: int, readers: tuple[str, ...], whole: int, kept_anyway: bool = False) -> int:
            """Count the bytes of an input of matrix products: `whole` bytes if their weights are trained."""
            return whole if adapters is None else adapters.keep(width, readers, precision, kept_anyway)

        # RMSNorm keeps its input in float32, a factor, and what it multiplies with its weight; LayerNorm its input and
        # two statistics.
        norm = 4 * hidden + (self.residual if adapters is None else 0) + 4 if rms else self.residual + 8
        self.shared_input = self.residual if not rms or precision.weight == 4 else 0

        def read_by(projections: int) -> int:
            """The norm's output as these keep it: one tensor, or under autocast a copy for each."""
            return projections * product * hidden if cast else self.residual

        self.attention_output = product * q_width + 4 * sizes.heads
        attention = product * (q_width + 2 * kv_width) + self.attention_output
        attention += kept(q_width, READ_ATTENTION, 0, kept_anyway=True)
        attention += product * 3 * q_width if sizes.clipped else 0
        width = sizes.experts_per_token * sizes.intermediate
        if sizes.experts:
            # Experts compute in the dtype of their weights, autocast or not (transformers' grouped_mm). Beside each
            # token's copies for its experts: the router's softmax, choices, and the order that sorts and unsorts them.
            chosen, trained = sizes.experts_per_token, adapters is None
            self.inner = precision.weight * ((3 + trained) * width + (1 + trained) * chosen * hidden)
            self.inner += 4 * sizes.experts + 40 * chosen + 4
            # The products of float32 router weights and what experts give are float32, beside that in the experts' dtype.
            given = 4 * 3 + (precision.weight if precision.weight < 4 else 0)
            # Frozen experts keep no inner activation, which would be free when these are there.
            temporaries = sizes.gelu_temporaries + (not trained)
            mlp_working = max(precision.weight * temporaries * width, given * chosen * hidden)
        else:
            inner = kept(width, READ_INNER, product * width)
            self.inner = product * (3 if sizes.gated else 1) * width + inner
            mlp_working = max(product * sizes.gelu_temporaries, product + precision.product_scratch) * width
            if adapters is not None:
                mlp_working = max(
                    adapters.working(width, hidden, inner, sizes.gelu_temporaries, precision),
                    (product + precision.product_scratch) * width,
                )
        whole = read_by(2 if sizes.gated and not sizes.experts else 1)
        self.after_attention = norm + kept(hidden, READ_SECOND_NORM, whole) + self.inner
        whole = read_by(3 if rms else 1)
        self.layer = norm + kept(hidden, READ_NORM, whole) + attention + self.after_attention
        self.largest_layer = self.layer  # all are alike
        # The gradient of the residual stream, and of what is projected back into it.
        flowing = self.residual + (product * hidden if cast else 0)
        self.flowing, self.mlp_working = flowing, mlp_working
        self.recomputing = flowing + mlp_working  # no more than that
        shape = AttentionShape(sizes.heads, kv_width // max(1, sizes.head_dim), sizes.head_dim, sizes.head_dim)
        self.attention_gradients = flowing + attention_gradients(shape, precision)
        rotations = 2 * precision.weight * sizes.head_dim if rms else 0
        self.last_norm = norm
        self.base = 3 * 8 + rotations + (norm if sizes.norm_of_embeddings else 0) + self.last_norm
        self.last_norm_gradients = (4 * 4 * hidden + (self.residual if precision.weight < 4 else 0)) if rms else 0
        self.head = self.residual + (2 if cast else 1) * product * hidden + 16


def attention_gradients(shape: AttentionShape, precision: Precision) -> int:
    """Bytes per token of attention's gradients: of its output, and q, k, v summed in float32, beside what the kernel takes for
    itself."""
    queries, outputs = shape.heads * shape.qk_width, shape.heads * shape.value_width
    return precision.activation * outputs + 4 * (queries + shape.kv_elements) + precision.workspace(shape)
