"""Bytes per token of models without a formula: what autograd keeps of their own modules, counted on shapes alone.

What is kept is exact for the modules as transformers computes them in plain torch (counting/saved.py): for Llama, Mistral and
Mixtral it gives the numbers of activation_bytes.py, byte for byte. What backward adds until attention runs is the most that a
layer holds when it is run by itself (counting/busiest.py); where that is not known, two gradients of its widest product's input,
as there. Attention adds the gradients of q, k, v in float32. Layers differ: the mean is kept of all of them, and one layer, the
worst, is there at a moment. No torch is imported with this module.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hf_longctx.counting.records import AttentionShape, CountedLayer, KeptLayer
from hf_longctx.hardware.model_sizes import ModelSizes
from hf_longctx.planner.memory.activation_bytes import Precision, attention_gradients

IDS = 3 * 8
"""Id, position and label of a token."""


class CountedTokenBytes:
    """The fields of TokenBytes, of a model that was counted.

    Args:
        sizes: with `counted`.
        config: that they are of.
        precision: as of TokenBytes.
        lora_rank, lora_targets: of adapters; rank 0: all weights are trained.

    Raises:
        ValueError: bytes are not linear in the tokens, or the model cannot be run on shapes alone in this precision.
    """

    def __init__(
        self,
        sizes: ModelSizes,
        config: Any,
        precision: Precision,
        lora_rank: int = 0,
        lora_targets: Collection[str] | None = None,
    ) -> None:
        from hf_longctx.counting.count import count_kept

        counted = sizes.counted
        assert counted is not None
        targets = None if lora_targets is None else tuple(sorted(lora_targets))
        kept = count_kept(config, precision.weight, precision.activation, lora_rank, targets, precision.adapter)
        hidden, product = sizes.hidden, precision.activation
        self.residual = kept.residual
        flowing = self.residual + (product * hidden if precision.autocast else 0)

        def mean(name: str) -> int:
            return -(-sum(getattr(layer, name) for layer in kept.layers) // len(kept.layers))

        self.layer, self.attention_output, self.inner = mean("whole"), mean("attention_output"), mean("inner")
        worst = max(kept.layers, key=lambda layer: layer.whole)
        self.largest_layer, self.shared_input = worst.whole, worst.own_input
        self.flowing = flowing
        self.mlp_working = max(
            _mlp_working(layer, sizes, precision)
            if own.busiest is None
            else own.busiest - (own.whole - own.own_input) - flowing
            for layer, own in zip(counted.layers, kept.layers)
        )
        self.recomputing = max(
            flowing + self.mlp_working if own.recomputing is None else own.recomputing - (own.whole - own.own_input)
            for own in kept.layers
        )
        moments = [
            (attention_gradients(_largest_call(layer.attention), precision) + flowing, own.after_attention)
            for layer, own in _with_attention(counted.layers, kept.layers)
        ]
        self.attention_gradients, self.after_attention = max(
            moments, key=lambda moment: moment[0] - moment[1], default=(flowing + self.mlp_working, 0)
        )
        self.last_norm = kept.last_norm
        self.base = IDS + kept.outside + kept.last_norm
        self.last_norm_gradients = 4 * 4 * hidden + (self.residual if precision.weight < 4 else 0)
        self.head = self.residual + (2 if precision.autocast else 1) * product * hidden + 16


def _with_attention(
    layers: tuple[CountedLayer, ...], kept: tuple[KeptLayer, ...]
) -> list[tuple[CountedLayer, KeptLayer]]:
    return [(layer, own) for layer, own in zip(layers, kept) if layer.attention]


def _mlp_working(layer: CountedLayer, sizes: ModelSizes, precision: Precision) -> int:
    """Bytes per token that backward through a layer's widest product adds."""
    if sizes.experts:
        grown = max(precision.weight, precision.activation) * sizes.gelu_temporaries * layer.widest
        return max(grown, 4 * 3 * sizes.experts_per_token * sizes.hidden)
    return (
        max(precision.activation * sizes.gelu_temporaries, precision.activation + precision.product_scratch)
        * layer.widest
    )


def _largest_call(shapes: tuple[AttentionShape, ...]) -> AttentionShape:
    return max(shapes, key=lambda shape: shape.heads * shape.qk_width)
