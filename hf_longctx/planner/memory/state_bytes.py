"""Bytes of weights, gradients and optimizer on one rank, by what is sharded (parallel/sharding.py).

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
from hf_longctx.planner.memory.activation_bytes import Precision

Sharding = Literal["ddp", "zero1", "zero2", "zero3"]
"""What ranks hold parts of; parallel/sharding.py says how."""
SHARDING: tuple[Sharding, ...] = get_args(Sharding)
IN_ROUNDS = ("zero2", "zero3")
"""Shardings whose ranks meet in every micro-batch."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Numbers of weights that are trained, of a model that is there, beside what its configuration says."""

    adapters: int = 0
    """Of all adapters, in float32; 0: what rank and projections make."""
    copies: int = 0
    """Of modules that are trained whole beside adapters, in the dtype of the model."""
    largest: int = 0
    """Of the largest gradient of one weight of these, or of embeddings of which some rows are trained."""
    head: bool = False
    """Beside adapters: whether the output head's weight gets a gradient."""
    merged_head: bool = False
    """Whether trained rows are put into a copy of the head's weight whenever it is used."""
    one_state: int = 0
    """Those for which the optimizer keeps one state, and not two: Muon's."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Of one rank."""

    weights: int
    head_weights: int
    """Gathered for the loss, beyond `weights`."""
    first_weights: int
    """Of the embeddings, which FSDP2 gathers while the first layer runs backward, beyond `weights`."""
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
        counts: Trained,
    ) -> StateBytes:
        """adapters: parameters of a layer's, which are trained alone, in float32; None: all weights are. Other arguments
        are those of MemoryModel.from_config."""
        added = 0 if adapters is None else adapters
        head = sizes.head_rows * sizes.hidden
        whole = Kind(sizes.parameters, precision.weight, gradient_bytes, optimizer_bytes)
        kinds: tuple[Kind, ...] = (whole,)
        frozen, layer, root = 0, sizes.layer_parameters, head
        largest = precision.weight * sizes.largest_weight
        if adapters is not None:
            of_adapters = Kind(counts.adapters or sizes.layers * added, 4, gradient_bytes, optimizer_bytes)
            copies = Kind(counts.copies, precision.weight, precision.weight, 2 * precision.weight)
            kinds, frozen, layer, root = (of_adapters, copies), sizes.parameters, added, counts.copies
            largest = precision.weight * counts.largest
        trained = sum(kind.weights for kind in kinds)
        merged_head = precision.activation * head if counts.merged_head else 0
        # The gradient of a head that is the embeddings' weight too waits for theirs until backward ends.
        waits = head if sizes.tied and (adapters is None or counts.head) else 0
        if sharding == "ddp" or (ranks == 1 and not optimizer_on_host):
            copied = sizes.linear_parameters + sizes.layers * added
            gradients = sum(kind.gradient * kind.weights for kind in kinds) + largest
            return cls(
                weights=precision.weight * frozen + sum(kind.weight * kind.weights for kind in kinds),
                head_weights=merged_head,
                first_weights=0,
                cast_weights=precision.activation * copied if precision.autocast else 0,
                gradients=gradients + precision.weight * waits,
                largest_gradient=largest,
                layer_gradients=0,
                waiting_gradients=gradients,
                optimizer=sum(kind.optimizer * kind.weights for kind in kinds)
                - optimizer_bytes // 2 * counts.one_state,
                host=0,
                weights_as_trained=True,
            )

        def shard(parameters: int) -> int:
            return -(-parameters // ranks)

        gathered, of_head, of_first = frozen + trained, 0, 0
        if sharding == "zero3":
            gathered = 2 * (sizes.layer_parameters + added)
            of_head = max(0, 2 * (head + counts.copies) - gathered)
            of_first = max(0, sizes.root_parameters - (0 if sizes.tied else head) - gathered // 2)
        shards = (
            precision.weight * shard(frozen) + sum(kind.weight * shard(kind.weights) for kind in kinds),
            sum(kind.gradient * shard(kind.weights) for kind in kinds) if sharding != "zero1" else 0,
            sum(kind.optimizer * shard(kind.weights) for kind in kinds)
            - optimizer_bytes // 2 * (counts.one_state // ranks),
        )
        here, on_host = ((0, 0, 0), sum(shards)) if optimizer_on_host else (shards, 0)
        computed = precision.activation if adapters is None else 4
        if sharding == "zero1":
            waiting = sum(kind.gradient * kind.weights for kind in kinds) + largest
            summed, layer_gradients = waiting + computed * waits, 0
        else:
            reduced = max(layer, 0 if waits else root)
            largest = computed * sizes.largest_weight if adapters is None else largest
            summed, waiting = gradient_bytes * (reduced + shard(reduced)) + largest + computed * waits, 0
            layer_gradients = max(0, computed * layer - largest)
        return cls(
            weights=precision.activation * gathered + here[0],
            head_weights=precision.activation * of_head + merged_head,
            first_weights=precision.activation * of_first,
            cast_weights=0,
            gradients=summed + here[1],
            largest_gradient=largest,
            layer_gradients=layer_gradients,
            waiting_gradients=waiting + here[1],
            optimizer=here[2],
            host=on_host,
            weights_as_trained=False,
        )


@dataclass(frozen=True, slots=True)
class Kind:
    """Trained weights of one dtype, and bytes of each: itself, its gradient, the optimizer's states."""

    weights: int
    weight: int
    gradient: int
    optimizer: int
