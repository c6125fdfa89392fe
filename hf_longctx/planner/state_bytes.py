"""Bytes of weights, gradients and optimizer on one rank, by what is sharded (training/sharding.py).

    ddp     everything on every rank
    zero1   FSDP2 gathers all weights once a step, beside this rank's shard; gradients of all weights are summed until
            the step ends
    zero2   weights as in zero1; a layer's gradients are reduce-scattered as soon as a round has computed them
    zero3   as zero2, and weights are gathered for their use only: a layer's while those of the next arrive, or the
            output head's, which FSDP2 holds twice then: as they arrived, and as parameters

Weights are gathered in the dtype that computes, and gradients are computed in it. In zero2 and zero3 those of the layer or head
before the one that runs backward are still being reduced: whole in the weights' own dtype, and beside them this rank's part of
the sum. With `optimizer_on_host` (FSDP2's CPU offload) shards of weights, gradients and optimizer lie in host memory. No torch;
nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from hf_longctx.hardware.model_sizes import ModelSizes
from hf_longctx.planner.activation_bytes import Precision

Sharding = Literal["ddp", "zero1", "zero2", "zero3"]
"""What ranks hold parts of; training/sharding.py says how."""
SHARDING: tuple[Sharding, ...] = get_args(Sharding)
IN_ROUNDS = ("zero2", "zero3")
"""Shardings whose ranks meet in every micro-batch."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Of one rank."""

    weights: int
    head_weights: int
    """Gathered for the loss, beyond `weights`."""
    cast_weights: int
    gradients: int
    """At most during backward, but for `layer_gradients`."""
    largest_gradient: int
    """Of those, the largest weight's as it is computed."""
    layer_gradients: int
    """The gradients of the layer that runs backward but for its largest weight's, once its attention runs."""
    waiting_gradients: int
    """Those of earlier micro-batches of a step, while one runs forward."""
    optimizer: int
    host: int
    weights_as_trained: bool
    """Whether weights compute in the dtype in which they are trained (DDP; autocast copies them)."""

    @classmethod
    def of(
        cls,
        sizes: ModelSizes,
        precision: Precision,
        sharding: str,
        ranks: int,
        *,
        adapters: int | None,
        gradient_bytes: int,
        optimizer_bytes: int,
        optimizer_on_host: bool,
    ) -> StateBytes:
        """adapters: parameters of a layer's, which are trained alone, in float32; None: all weights are. Other arguments
        are those of MemoryModel.from_config."""
        added = 0 if adapters is None else adapters
        layer, root = (sizes.layer_parameters, sizes.root_parameters) if adapters is None else (added, 0)
        trained, frozen = (sizes.parameters, 0) if adapters is None else (sizes.layers * added, sizes.parameters)
        largest = precision.weight * sizes.largest_weight if adapters is None else 0
        weight = precision.weight if adapters is None else 4
        # The gradient of a head that is the embeddings' weight too waits for theirs until backward ends.
        waits = sizes.head_rows * sizes.hidden if sizes.tied and adapters is None else 0
        if sharding == "ddp" or (ranks == 1 and not optimizer_on_host):
            copied = sizes.linear_parameters + sizes.layers * added
            return cls(
                weights=precision.weight * frozen + weight * trained,
                head_weights=0,
                cast_weights=precision.activation * copied if precision.autocast else 0,
                gradients=gradient_bytes * trained + largest + precision.weight * waits,
                largest_gradient=largest,
                layer_gradients=0,
                waiting_gradients=gradient_bytes * trained + largest,
                optimizer=optimizer_bytes * trained,
                host=0,
                weights_as_trained=True,
            )

        def shard(parameters: int) -> int:
            return -(-parameters // ranks)

        head = sizes.head_rows * sizes.hidden
        gathered, of_head = frozen + trained, 0
        if sharding == "zero3":
            gathered = 2 * (sizes.layer_parameters + added)
            of_head = max(0, 2 * head - gathered)
        held = (
            precision.weight * shard(frozen) + weight * shard(trained),
            gradient_bytes * shard(trained) if sharding != "zero1" else 0,
            optimizer_bytes * shard(trained),
        )
        here, on_host = ((0, 0, 0), sum(held)) if optimizer_on_host else (held, 0)
        computed = precision.activation if adapters is None else 4
        if sharding == "zero1":
            waiting = gradient_bytes * trained + largest
            summed, layer_gradients = waiting + computed * waits, 0
        else:
            reduced = max(layer, head if root and not waits else 0)
            largest = computed * sizes.largest_weight if adapters is None else 0
            summed, waiting = gradient_bytes * (reduced + shard(reduced)) + largest + computed * waits, 0
            layer_gradients = max(0, computed * layer - largest)
        return cls(
            weights=precision.activation * gathered + here[0],
            head_weights=precision.activation * of_head,
            cast_weights=0,
            gradients=summed + here[1],
            largest_gradient=largest,
            layer_gradients=layer_gradients,
            waiting_gradients=waiting + here[1],
            optimizer=here[2],
            host=on_host,
            weights_as_trained=False,
        )
