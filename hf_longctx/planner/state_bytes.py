"""Bytes of weights, gradients and optimizer on one rank, by what is sharded (training/sharding.py).

    ddp     everything on every rank
    zero1   FSDP2 gathers all weights once a step, beside this rank's shard; gradients of all weights are summed until
            the step ends
    zero2   weights as in zero1; a layer's gradients are reduce-scattered as soon as a round has computed them
    zero3   as zero2, and weights are gathered for their use only: a layer's while those of the next arrive, or the
            output head's

A layer's gradients are whole while it runs backward, and those of the layer or head before it are still being reduced.
Weights are gathered in the dtype that computes; gradients that wait to be reduced have the weights' own. With `optimizer_on_host`
(FSDP2's CPU offload) shards of weights, gradients and optimizer lie in host memory. No torch; nothing is sent.
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
    cast_weights: int
    gradients: int
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
        if sharding == "ddp" or (ranks == 1 and not optimizer_on_host):
            copied = sizes.linear_parameters + sizes.layers * added
            return cls(
                weights=precision.weight * frozen + weight * trained,
                cast_weights=precision.activation * copied if precision.autocast else 0,
                gradients=gradient_bytes * trained + largest,
                optimizer=optimizer_bytes * trained,
                host=0,
                weights_as_trained=True,
            )

        def shard(parameters: int) -> int:
            return -(-parameters // ranks)

        head = sizes.head_rows * sizes.hidden
        gathered = max(2 * (sizes.layer_parameters + added), head) if sharding == "zero3" else frozen + trained
        held = (
            precision.weight * shard(frozen) + weight * shard(trained),
            gradient_bytes * shard(trained) if sharding != "zero1" else 0,
            optimizer_bytes * shard(trained),
        )
        here, on_host = ((0, 0, 0), sum(held)) if optimizer_on_host else (held, 0)
        summed = trained if sharding == "zero1" else layer + max(layer, head if root else 0)
        return cls(
            weights=precision.activation * gathered + here[0],
            cast_weights=0,
            gradients=gradient_bytes * summed + here[1] + largest,
            optimizer=here[2],
            host=on_host,
            weights_as_trained=False,
        )
