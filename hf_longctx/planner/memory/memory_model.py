"""Predicts from a model's configuration what a rank holds in memory: the bytes that decide how many tokens it can take.

Any of these moments of a step can be the worst; `parts` takes the one that is:

    loss         kept activations of all layers + a chunk of logits and the gradient of the output head
    last norm    kept activations + float32 gradients inside it
    MLP          kept activations + gradients inside one layer's MLP while it runs backward
    attention    kept activations + gradients inside one layer's attention

and in each the buffers of keys, values and gradients that travel.

With activation checkpointing a layer keeps its input alone, and in the last two moments one layer is there whole,
because it was just recomputed. What is kept is counted as this package and transformers keep it: q, k, v, out and lse of
attention (attention/engine.py), both norms with their float32 copies, the inputs of the matrix products, each step of the MLP
(activation_bytes.py; of families without a formula, counted_bytes.py).
With weights of 4 bytes and activations of 2, autocast is counted: a residual stream in float32, and one copy of the
norm's output for each projection that reads it.

Offload (ByteScale, arXiv 2502.21231, section 5): r per mille of what l-2 of l layers keep goes to host memory during
forward and comes back during backward; the first and the last layer would have no time for it. With F seconds of
forward, 2F of backward and t = bytes / bandwidth each way, max(0, t - F) + max(0, t - 2F) of it is not hidden. In the
paper's measurement (64K tokens, 5.08 s in all, 32 GB, 10.3 GB/s) this gives 5.08, 5.25, 5.87, 6.49 s for r = 0.5, 0.6,
0.8, 1; measured were 5.08, 5.38, 5.93, 6.49.

Integers throughout, and no torch. Nothing is sent.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from hf_longctx.counting.records import AttentionShape
from hf_longctx.hardware.kernel_bytes import Conditions, Workspace, float32_operands
from hf_longctx.hardware.model_sizes import ModelSizes
from hf_longctx.planner.memory.activation_bytes import Adapters, Precision, TokenBytes
from hf_longctx.planner.memory.counted_bytes import CountedTokenBytes
from hf_longctx.planner.memory.device_bytes import UNNAMED
from hf_longctx.planner.memory.state_bytes import SHARDING, StateBytes, Trained

AS_CONFIGURED = Trained()
FORWARD_SHARE = 1 / 3
"""Forward's share of forward and backward together: backward computes every product twice, for inputs and for weights."""
HOST_SHARE = 0.5
"""Share of a node's memory that offloaded activations may take: data loaders and page cache need the rest, and pinned pieces are
rounded up."""


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """Bytes on one rank. Those that are "per token" are of all tokens that the rank holds of one micro-batch."""

    weights: int
    """Parameters; zero3 counts its shard, and two layers whole."""
    head_weights: int
    """Bytes that the head's weights add under zero3 while the loss is computed."""
    first_weights: int
    """Bytes that the embeddings' weights add there while the first layer runs backward."""
    cast_weights: int
    """Under autocast, the weights of matrix products once more in the activations' dtype, until backward has used them;
    with checkpointing, until forward ends."""
    gradients: int
    """At most during backward, but for `layer_gradients`: of the trained parameters, and the largest weight's once more, as it is
    computed before it is added. In rounds, this rank's part, and what is being reduced."""
    largest_gradient: int
    """The part of `gradients` that is the largest weight's as it is computed."""
    layer_gradients: int
    """Bytes that the layer that runs backward adds in rounds, until its attention runs."""
    waiting_gradients: int
    """From earlier micro-batches of the step, while one runs forward."""
    optimizer: int
    """Optimizer states, float32 master weights included."""
    host: int
    """Bytes in host memory: shards of weights, gradients and optimizer that wait there."""
    accumulating: bool
    """Whether gradients are there when a forward begins, from an earlier micro-batch of the step."""
    checkpointing: bool
    layers: int
    base_token: int
    """Per token, kept once for all layers: ids, positions, labels, rotations, the last norm, that of the embeddings."""
    layer_token: int
    """Per token, what backward needs of one layer."""
    checkpoint_token: int
    """Per token, all that is kept of one layer with checkpointing: its input, and attention's output where that is kept."""
    recomputed_token: int
    """Per token, what recomputing one layer adds beside that."""
    recompute_token: int
    """Per token, what backward through one layer adds at most before there is a gradient of its weights; may be negative."""
    mlp_token: int
    """Per token, what backward through one layer's MLP adds at most."""
    norm_token: int
    """The same of the norm before an MLP in tiles, after the last of them; without tiles, as `mlp_token`."""
    tile_token: int
    """Per token of a tile, what an MLP in tiles adds."""
    tile_tokens: int
    """Most tokens of a tile; 0: no tiles."""
    attention_token: int
    """Per token, what backward through one layer's attention adds at most beside the exchange, less what its MLP had
    kept, which is free by then; may be negative."""
    head_token: int
    """Per token, during the loss: hidden states and their gradient."""
    last_norm_token: int
    """Per token, what backward through the last norm adds."""
    keys_token: int
    """Per token, keys and values of one layer."""
    key_sums_token: int
    """Per token, the float32 sums of gradients of one layer's keys and values."""
    exchange: int
    """Per token, where documents lie on several ranks: buffers of received keys and values in use and in flight, of what is
    sent, and of float32 gradients of a slice summed, sent and received. The exchange keeps them (attention/buffers.py)."""
    loss_chunk_tokens: int
    """Most rows of logits at once."""
    head_rows: int
    """Rows of the output head's weight on this rank, and logits of a token."""
    hidden: int
    activation_bytes: int
    head_trained: bool
    product_scratch: int
    """Bytes of each element of a matrix product's result, beside it while it is computed."""
    outside: int = 0
    """Bytes of the device that are no tensor's (device_bytes.py)."""
    in_flight: int = 1
    """Micro-batches between forward and backward, at most."""
    layers_in_flight: int = 0
    """Layers whose activations they keep together, at most; 0: `layers`, each once."""
    layers_in_chunks: int = 0
    """Layers of one stage of a pipeline, at most, which documents pass in chunks (attention/earlier.py); 0: no pipeline."""

    def in_stages(self, share: float, in_flight: int, layers_in_flight: int, layers_in_chunks: int) -> MemoryModel:
        """Return the model of a device of a pipeline that has the most of everything, which no one device may have.

        Args:
            share: of the weights (fullest_share of planner/stages/stage_layers.py).
            in_flight, layers_in_flight, layers_in_chunks: as `most_in_flight` there counts them.
        """
        weights = ("weights", "head_weights", "first_weights", "cast_weights")
        shared = (*weights, "gradients", "waiting_gradients", "optimizer", "host")
        parts = {name: math.ceil(getattr(self, name) * share) for name in shared}
        of_device = replace(self, in_flight=in_flight, layers_in_flight=layers_in_flight)
        return replace(of_device, **parts, layers_in_chunks=layers_in_chunks)

    @classmethod
    def from_config(
        cls,
        config: Any,
        *,
        sharding: str = "ddp",
        world_size: int = 1,
        weight_bytes: int = 2,
        gradient_bytes: int | None = None,
        optimizer_bytes: int | None = None,
        optimizer_on_host: bool = False,
        lora_rank: int = 0,
        lora_targets: Collection[str] | None = None,
        trained: Trained = AS_CONFIGURED,
        checkpointing: bool = False,
        keep_attention: bool = False,
        mlp_tile_tokens: int = 0,
        accumulating: bool = True,
        activation_bytes: int = 2,
        loss_chunk_tokens: int = 1024,
        keep_last_slice: bool = False,
        ulysses_degree: int = 1,
        tensor_parallel: int = 1,
        product_scratch: int = 0,
        workspace: Workspace = float32_operands,
        deterministic: bool = False,
    ) -> MemoryModel:
        """Counts a Hugging Face configuration, of any causal language model of transformers.

        Args:
            config: anything with the fields of such a configuration.
            sharding: "ddp" (all on every rank), "zero1" (optimizer sharded), "zero2" (gradients too) or "zero3"
                (weights too): state_bytes.py.
            world_size: ranks that share what is sharded and exchange keys and values; those of tensor parallelism do not
                count. With 1, nothing is sharded or exchanged.
            weight_bytes: of one weight as it is trained, 2 or 4; 4 with activations of 2 is mixed precision: autocast, or
                with FSDP2 weights gathered in 2 bytes.
            gradient_bytes: of one gradient; default: as the weight.
            optimizer_bytes: per parameter; default: Adam's, 12 beside weights of 2 bytes (float32 master, two moments) and
                8 beside weights of 4, which are the master themselves. AdamW on bfloat16 weights without a master: 4.
            optimizer_on_host: FSDP2's CPU offload.
            lora_rank: of adapters, which alone are trained, in float32; 0: all weights are trained.
            lora_targets: names of the projections that are adapted; None: all of attention and dense MLPs.
            trained: of a model that is there, what is trained of it beside the adapters of its layers.
            keep_attention: with checkpointing, attention's output and lse are kept too, and what ranks have sent for them.
            mlp_tile_tokens: as `patch_model` has it.
            accumulating: whether a rank may run several micro-batches in a step, whose gradients add up.
            loss_chunk_tokens: rows of logits that exist at once.
            keep_last_slice: as `patch_model` has it.
            ulysses_degree: most ranks among which heads are split. What an all-to-all brought is kept like the output.
            tensor_parallel: ranks that share heads, MLPs and the output head's weight.
            product_scratch: bytes that a matrix product takes for each element of its result while it computes it, beside
                the result: 4 for bfloat16 on some CPUs (hardware/speeds.py), else 0.
            workspace: what the attention kernel states of its own memory (hardware/kernel_bytes.py).
            deterministic: whether torch is asked for deterministic algorithms.

        Raises:
            ValueError: a size is missing, a setting is out of range, heads do not divide by `tensor_parallel`, or the model
                cannot be counted (hardware/model_sizes.py, counting/).
        """
        if sharding not in SHARDING:
            raise ValueError(f"sharding={sharding!r} is unknown; valid: {', '.join(SHARDING)}")
        for name, value, least in (
            ("world_size", world_size, 1),
            ("loss_chunk_tokens", loss_chunk_tokens, 1),
            ("ulysses_degree", ulysses_degree, 1),
            ("tensor_parallel", tensor_parallel, 1),
            ("lora_rank", lora_rank, 0),
            ("mlp_tile_tokens", mlp_tile_tokens, 0),
        ):
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        if (weight_bytes, activation_bytes) not in ((2, 2), (4, 2), (4, 4)):
            raise ValueError(
                f"weight_bytes={weight_bytes} with activation_bytes={activation_bytes}: valid are 2 and 2 (all bfloat16), 4 and "
                "2 (autocast), 4 and 4 (all float32)"
            )
        sizes = ModelSizes.of(config, tensor_parallel)
        adapters = Adapters(sizes.adapted(lora_targets), lora_rank) if lora_rank else None
        trained_bytes = 4 if adapters else weight_bytes
        states = StateBytes.of(
            sizes,
            Precision(weight_bytes, activation_bytes),
            sharding,
            world_size,
            adapters=-(-sizes.adapter_parameters(lora_rank, lora_targets) // sizes.layers) if adapters else None,
            gradient_bytes=trained_bytes if gradient_bytes is None else gradient_bytes,
            optimizer_bytes=16 - 2 * trained_bytes if optimizer_bytes is None else optimizer_bytes,
            optimizer_on_host=optimizer_on_host,
            counts=trained,
        )
        computing = weight_bytes if states.weights_as_trained else activation_bytes
        shared = min(ulysses_degree, world_size, max(1, sizes.heads))
        # Families with a formula and LayerNorm have ALiBi.
        alibi = sizes.counted is None and not sizes.norms_are_rms
        conditions = Conditions(activation_bytes, deterministic, alibi)

        def of_kernel(shape: AttentionShape) -> int:
            """Count a rank's share of the heads, over the tokens of all ranks that share them."""
            own = replace(shape, heads=max(1, shape.heads // shared), kv_heads=max(1, shape.kv_heads // shared))
            return shared * workspace(own, conditions)

        gathered = not states.weights_as_trained and activation_bytes < weight_bytes
        adapter = activation_bytes if gathered else 4
        precision = Precision(computing, activation_bytes, product_scratch, of_kernel, adapter)
        tokens: TokenBytes | CountedTokenBytes
        if sizes.counted is None:
            tokens = TokenBytes(sizes, precision, adapters)
        else:
            tokens = CountedTokenBytes(sizes, config, precision, lora_rank, lora_targets)
        slice_token = activation_bytes * sizes.kv_elements
        # Two ranks have one round, so that none is in flight while another is computed.
        buffers = min(3, world_size) if world_size > 1 else 0
        # What a kernel returns of a slice's gradients is added to a buffer.
        attention_gradients = tokens.attention_gradients + (slice_token if buffers else 0)
        received = slice_token if keep_last_slice and world_size > 1 else 0
        # The merged output beside this rank's rows of it; merged q, k, v take the place of q, k, v, but for replicated heads.
        merged_out = replicated = merged = 0
        if ulysses_degree > 1 and world_size > 1 and sizes.heads:
            merged_out = activation_bytes * sizes.heads * sizes.head_dim
            replicated = slice_token * (max(1, -(-ulysses_degree * sizes.head_dim // sizes.kv_width)) - 1)
            merged = 2 * merged_out + slice_token + replicated
        kept_attention = tokens.attention_output + received + merged if keep_attention else 0
        # In tiles, only the norm's output is kept of an MLP, and the rest exists once more while a tile runs backward. The norm's
        # own backward runs after the last tile.
        in_tiles = tokens.inner if mlp_tile_tokens else 0
        mlp_gradients, recomputing = tokens.flowing + tokens.mlp_working, tokens.recomputing
        norm_gradients = mlp_gradients
        if mlp_tile_tokens:
            mlp_gradients = recomputing = tokens.flowing
            norm_gradients = tokens.last_norm_gradients
        # Gradients of an MLP's weights are summed over tiles in float32, then cast (models/tiled_mlp.py).
        summed_bytes = 4 + (computing if computing < 4 else 0)
        tile_sums = summed_bytes * sizes.mlp_parameters if mlp_tile_tokens and adapters is None else 0
        exchanged = received + merged_out + replicated
        return cls(
            weights=states.weights,
            head_weights=states.head_weights,
            first_weights=states.first_weights,
            cast_weights=states.cast_weights,
            gradients=states.gradients + tile_sums,
            largest_gradient=states.largest_gradient,
            layer_gradients=states.layer_gradients,
            waiting_gradients=states.waiting_gradients + tile_sums,
            optimizer=states.optimizer,
            host=states.host,
            accumulating=accumulating,
            checkpointing=checkpointing,
            layers=sizes.layers,
            base_token=tokens.base,
            layer_token=tokens.layer - in_tiles + exchanged,
            checkpoint_token=tokens.residual + kept_attention,
            recomputed_token=tokens.largest_layer - in_tiles + exchanged - tokens.shared_input - kept_attention,
            recompute_token=recomputing - tokens.last_norm,
            mlp_token=mlp_gradients - tokens.last_norm,
            norm_token=norm_gradients - tokens.last_norm,
            tile_token=in_tiles + tokens.mlp_working if mlp_tile_tokens else 0,
            tile_tokens=mlp_tile_tokens,
            attention_token=attention_gradients - (tokens.after_attention - in_tiles) - tokens.last_norm,
            head_token=tokens.head,
            keys_token=slice_token,
            key_sums_token=4 * sizes.kv_elements,
            exchange=buffers * (slice_token + 4 * sizes.kv_elements),
            last_norm_token=tokens.last_norm_gradients,
            loss_chunk_tokens=loss_chunk_tokens,
            head_rows=sizes.head_rows,
            hidden=sizes.hidden,
            activation_bytes=activation_bytes,
            head_trained=adapters is None or trained.head,
            product_scratch=product_scratch,
        )

    @property
    def token(self) -> int:
        """Bytes per token that are kept until backward: all layers, with or without checkpointing, and keys and values of
        chunks, which later ones attend to."""
        return self.in_flight * self.base_token + self._layers_kept * (self._layer_kept + self._chunk_keys)

    @property
    def logits(self) -> int:
        """Bytes of a full loss chunk, forward and backward, the gradient of the output head included."""
        return self._loss(self.loss_chunk_tokens + 1)

    @property
    def offloadable_token_bytes(self) -> int:
        """Bytes per token that may go to host memory: what all layers but two keep, without keys and values of chunks."""
        keys = self.keys_token if self.layers_in_chunks and not self.checkpointing else 0
        return max(0, self._layers_kept - 2) * (self._layer_kept - keys)

    @property
    def _chunk_keys(self) -> int:
        """Bytes per token and layer of keys and values that are kept of chunks alone."""
        return self.keys_token if self.layers_in_chunks and self.checkpointing else 0

    @property
    def _layers_kept(self) -> int:
        return self.layers_in_flight or self.layers

    @property
    def _layer_kept(self) -> int:
        return self.checkpoint_token if self.checkpointing else self.layer_token

    def parts(self, tokens: int, offload: int = 0) -> dict[str, int]:
        """Name -> bytes at the worst moment of a micro-batch of `tokens` tokens on this rank, with `offload` per mille in
        host memory. They add up to the peak."""
        recomputed = self.recomputed_token if self.checkpointing else 0
        forward = self.weights + self.head_weights + self.cast_weights
        backward = self.weights + self.cast_weights // (self.layers if self.checkpointing else 1)
        first = backward + self.first_weights
        kept = self.token * tokens - self.offloadable_token_bytes * tokens * offload // 1000
        leaving = (
            self._layer_kept * tokens * offload // 1000 if self.layers > 2 else 0
        )  # of the last layer that offloads
        left = (self.base_token + self._layer_kept) * tokens
        waiting = self.waiting_gradients if self.accumulating else 0
        # In rounds, those of the head are being reduced when the last layer begins.
        early = self.gradients if self.accumulating or self.layer_gradients else 0
        whole_layer = self.layer_gradients
        tile = self.tile_token * min(tokens, self.tile_tokens)
        again = (recomputed + self.recompute_token) * tokens + tile if self.checkpointing else 0
        mlp = max((recomputed + self.mlp_token) * tokens + tile, (recomputed + self.norm_token) * tokens)
        attention = (recomputed + self.attention_token) * tokens
        exchange = self.exchange * tokens
        if self.layers_in_chunks:
            # Either whole documents run backward, of which no keys are kept, or a chunk; beside it, what later ones have found
            # for keys and values of earlier ones, and these, joined. The first of two chunks has 0.71 of a document's tokens at
            # most (planner/stages/causal_chunks.py).
            own = self.layers_in_chunks * self._chunk_keys * tokens
            later = (self.layers_in_chunks * self.key_sums_token + self.keys_token) * tokens
            mlp, attention = (max(whole - own, whole * 3 // 4 + later) for whole in (mlp, attention))
        moments = (  # weights, gradients, kept, working, exchange, logits
            (forward, waiting, kept + leaving, self.head_token * tokens, exchange, self._loss(tokens)),
            (backward, early, kept, self.last_norm_token * tokens, exchange, 0),
            (backward, max(0, early - self.largest_gradient), kept, again, exchange, 0),
            (backward, early, kept, mlp, exchange, 0),
            (backward, early + whole_layer, kept, attention, exchange, 0),
            (first, self.gradients, left, mlp, exchange, 0),
            (first, self.gradients + whole_layer, left, attention, exchange, 0),
        )
        weights, gradients, activations, working, in_flight, logits = max(moments, key=sum)
        return {
            "weights": weights,
            "gradients": gradients,
            "optimizer": self.optimizer,
            "activations": activations,
            "working": working,
            "buffers": in_flight,
            "logits": logits,
            "outside": self.outside,
        }

    def peak(self, tokens: int, offload: int = 0) -> int:
        """Bytes at the worst moment."""
        return sum(self.parts(tokens, offload).values())

    def capacity(self, device_bytes: int, reserve: float = UNNAMED, offload: int = 0) -> int:
        """Most tokens that a rank holds in one micro-batch; `reserve` is the share of its memory that stays free
        (device_bytes.py).

        Raises:
            ValueError: not a single token fits.
        """
        budget = _budget(device_bytes, reserve)
        if self.peak(1, offload) > budget:
            raise ValueError(f"not a single token fits: {self._arithmetic(1, device_bytes, reserve, offload)}")
        low, high = 1, 2
        while self.peak(high, offload) <= budget:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.peak(middle, offload) <= budget else (low, middle)
        return low

    def _loss(self, tokens: int) -> int:
        """Bytes of the chunked loss (models/loss/cross_entropy.py): rows of logits, and the gradient of the head's weight,
        which is summed in float32 over chunks."""
        rows, head = min(tokens, self.loss_chunk_tokens) * self.head_rows, self.head_rows * self.hidden
        half = self.activation_bytes if self.activation_bytes < 4 else 0
        # Beside logits in float32 a log-sum-exp has a temporary of their size, and the chunk before is not gone yet.
        chunk = max(8, half + self.product_scratch) * rows + (0 if tokens <= self.loss_chunk_tokens else 4 * rows)
        if not self.head_trained:
            return max(chunk, (4 + half) * rows)
        chunk += 4 * head
        # The gradient of a chunk, beside the sum that it is added to; that sum is scaled in place.
        product = (4 + half) * rows + (4 + self.activation_bytes + self.product_scratch) * head
        return max(chunk, product)

    def _arithmetic(self, tokens: int, device_bytes: int, reserve: float, offload: int) -> str:
        parts = {name: count for name, count in self.parts(tokens, offload).items() if count}
        terms = " + ".join(f"{name} {count / 2**30:.2f}" for name, count in parts.items())
        return (
            f"{terms} = {sum(parts.values()) / 2**30:.2f} GiB, and of {device_bytes / 2**30:.2f} GiB "
            f"{_budget(device_bytes, reserve) / 2**30:.2f} may be used (reserve={reserve})"
        )


def exposed_seconds(moved: int, seconds: float, host_bandwidth: float, forward_share: float = FORWARD_SHARE) -> float:
    """Seconds by which moving so many bytes to host memory and back outlasts what hides it: forward one way, backward the
    other; `seconds` of both together, of which forward takes a share."""
    if moved == 0:
        return 0.0
    transfer = moved / host_bandwidth if host_bandwidth > 0 else float("inf")
    forward = forward_share * seconds
    return max(0.0, transfer - forward) + max(0.0, transfer - (seconds - forward))


def _budget(device_bytes: int, reserve: float) -> int:
    if not 0 <= reserve < 1:
        raise ValueError(f"reserve={reserve} must be a share of the memory, in [0, 1)")
    return int(device_bytes * (1 - reserve))
