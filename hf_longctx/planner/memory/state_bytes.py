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
"""Names of what ranks hold parts of; parallel/sharding.py says how."""
SHARDING: tuple[Sharding, ...] = get_args(Sharding)
IN_ROUNDS = ("zero2", "zero3")
"""Shardings whose ranks meet in every micro-batch."""


@dataclass(frozen=True, slots=True)
class Trained:
    """Numbers of weights that are trained, of a model that is there, beside what its configuration says."""

    adapters: int = 0
    """Weights of all adapters, in float32; 0: as many as rank and projections make."""
    copies: int = 0
    """Weights of modules that are trained whole beside adapters, in the dtype of the model."""
    largest: int = 0
    """Elements of the largest gradient of one weight of these, or of embeddings of which some rows are trained."""
    head: bool = False
    """Beside adapters: whether the output head's weight gets a gradient."""
    merged_head: bool = False
    """Whether trained rows are put into a copy of the head's weight whenever it is used."""
    one_state: int = 0
    """Those for which the optimizer keeps one state, and not two: Muon's."""


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes of weights, gradients and optimizer on one rank."""

    weights: int
    head_weights: int
    """Gathered for the loss, beyond `weights`."""
    first_weights: int
    """Bytes of the embeddings, which FSDP2 gathers while the first layer runs backward, beyond `weights`."""
    cast_weights: int
    gradients: int
    """At most during backward, but for `layer_gradients`."""
    largest_gradient: int
    """The part of these that is the largest weight's as it is computed."""
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
        weights = _Weights.of(sizes, precision, adapters, gradient_bytes, optimizer_bytes, counts)
        if sharding == "ddp" or (ranks == 1 and not optimizer_on_host):
            return cls._whole(sizes, precision, weights)
        return cls._sharded(sizes, precision, weights, sharding, ranks, optimizer_on_host)

    @classmethod
    def _whole(cls, sizes: ModelSizes, precision: Precision, weights: _Weights) -> StateBytes:
        """Count the bytes of a rank that holds everything."""
        copied = sizes.linear_parameters + sizes.layers * weights.added
        waiting = weights.gradients + weights.largest
        return cls(
            weights=precision.weight * weights.frozen + sum(kind.weight * kind.weights for kind in weights.kinds),
            head_weights=weights.merged_head,
            first_weights=0,
            cast_weights=precision.activation * copied if precision.autocast else 0,
            gradients=waiting + precision.weight * weights.waits,
            largest_gradient=weights.largest,
            layer_gradients=0,
            waiting_gradients=waiting,
            optimizer=sum(kind.optimizer * kind.weights for kind in weights.kinds) - weights.saved_by(1),
            host=0,
            weights_as_trained=True,
        )

    @classmethod
    def _sharded(
        cls,
        sizes: ModelSizes,
        precision: Precision,
        weights: _Weights,
        sharding: str,
        ranks: int,
        optimizer_on_host: bool,
    ) -> StateBytes:
        """Count the bytes of a rank that holds parts, and gathers what it computes with."""
        gathered, of_head, of_first = weights.frozen + weights.trained, 0, 0
        if sharding == "zero3":
            gathered = 2 * (sizes.layer_parameters + weights.added)
            of_head = max(0, 2 * weights.head - gathered)
            # Where all are trained, the gradient of the head, which is gone by then, is counted, and takes more.
            if not weights.all_trained:
                own_head = 0 if sizes.tied else sizes.head_rows * sizes.hidden
                of_first = max(0, sizes.root_parameters - own_head - gathered // 2)
        shards = weights.shards(precision, sharding, ranks)
        here, on_host = ((0, 0, 0), sum(shards)) if optimizer_on_host else (shards, 0)
        computed = precision.activation if weights.all_trained else 4
        largest = weights.largest
        if sharding == "zero1":
            waiting = weights.gradients + largest
            summed, layer_gradients = waiting + computed * weights.waits, 0
        else:
            reduced = max(weights.layer, 0 if weights.waits else weights.root)
            largest = computed * sizes.largest_weight if weights.all_trained else largest
            in_flight = weights.gradient_bytes * (reduced + _shard(reduced, ranks))
            summed, waiting = in_flight + largest + computed * weights.waits, 0
            layer_gradients = max(0, computed * weights.layer - largest)
        return cls(
            weights=precision.activation * gathered + here[0],
            head_weights=precision.activation * of_head + weights.merged_head,
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


@dataclass(frozen=True, slots=True)
class _Weights:
    """Trained and frozen weights: their numbers, and bytes of those that a rank holds anyway."""

    kinds: tuple[Kind, ...]
    """trained ones"""
    frozen: int
    added: int
    """of a layer's adapters"""
    layer: int
    """trained ones of a layer"""
    root: int
    """trained ones of the head and of modules beside the layers"""
    head: int
    """the output head, and modules that are trained whole beside adapters"""
    waits: int
    """weights of a head that is the embeddings too: its gradient waits for theirs until backward ends"""
    largest: int
    """bytes of the largest gradient of one weight"""
    merged_head: int
    """bytes of a head that trained rows are put into"""
    one_state: int
    """those for which the optimizer keeps one state, and not two"""
    gradient_bytes: int
    optimizer_bytes: int
    all_trained: bool

    @classmethod
    def of(
        cls,
        sizes: ModelSizes,
        precision: Precision,
        adapters: int | None,
        gradient_bytes: int,
        optimizer_bytes: int,
        counts: Trained,
    ) -> _Weights:
        """Tell trained from frozen. Arguments are those of `StateBytes.of`."""
        head = sizes.head_rows * sizes.hidden
        if adapters is None:
            kinds: tuple[Kind, ...] = (Kind(sizes.parameters, precision.weight, gradient_bytes, optimizer_bytes),)
            frozen, added, layer, root, largest = 0, 0, sizes.layer_parameters, head, sizes.largest_weight
        else:
            of_adapters = Kind(counts.adapters or sizes.layers * adapters, 4, gradient_bytes, optimizer_bytes)
            copies = Kind(counts.copies, precision.weight, precision.weight, 2 * precision.weight)
            kinds, frozen, added, layer = (of_adapters, copies), sizes.parameters, adapters, adapters
            root, largest = counts.copies, counts.largest
        return cls(
            kinds=kinds,
            frozen=frozen,
            added=added,
            layer=layer,
            root=root,
            head=head + counts.copies,
            waits=head if sizes.tied and (adapters is None or counts.head) else 0,
            largest=precision.weight * largest,
            merged_head=precision.activation * head if counts.merged_head else 0,
            one_state=counts.one_state,
            gradient_bytes=gradient_bytes,
            optimizer_bytes=optimizer_bytes,
            all_trained=adapters is None,
        )

    @property
    def trained(self) -> int:
        return sum(kind.weights for kind in self.kinds)

    @property
    def gradients(self) -> int:
        """bytes of all gradients, whole"""
        return sum(kind.gradient * kind.weights for kind in self.kinds)

    def saved_by(self, ranks: int) -> int:
        """Return the bytes of states that the optimizer does not keep, of each rank."""
        return self.optimizer_bytes // 2 * (self.one_state // ranks)

    def shards(self, precision: Precision, sharding: str, ranks: int) -> tuple[int, int, int]:
        """Return the bytes of a rank's parts of weights, gradients and states."""
        return (
            precision.weight * _shard(self.frozen, ranks)
            + sum(kind.weight * _shard(kind.weights, ranks) for kind in self.kinds),
            sum(kind.gradient * _shard(kind.weights, ranks) for kind in self.kinds) if sharding != "zero1" else 0,
            sum(kind.optimizer * _shard(kind.weights, ranks) for kind in self.kinds) - self.saved_by(ranks),
        )


def _shard(parameters: int, ranks: int) -> int:
    return -(-parameters // ranks)
