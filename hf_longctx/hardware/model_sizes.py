"""How large a model is, and what it computes: widths, exact parameter counts and FLOPs, from a Hugging Face configuration.

    Widths        the sizes that a configuration states, and the matrices of a layer that follow from them
    ModelFlops    what the cost model divides by speeds
    ModelSizes    what the memory model counts: families that this package can run over a layout (Llama, Mistral, Mixtral,
                  BLOOM, MPT), each rank of tensor parallelism with its share of heads, MLPs and output head
                  (transformers' `tp_plan`); embeddings and norms are whole on each

No torch; tests compare the counts with the real models.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

ALL_SLIDING = ("doge", "mistral", "mixtral", "olmoe", "phi3", "phi4_multimodal", "phimoe", "qwen3_moe", "starcoder2")
"""Families of which every layer has the window that the configuration names (transformers 5.17 to 5.23)."""
SLIDING = "sliding_attention"
"""Entry of `layer_types`, transformers' name of layers with a window."""

MODEL_TYPES = (None, "llama", "mistral", "mixtral", "bloom", "mpt")
"""Values of `model_type` that can be counted; without one, a configuration is taken for a Llama's, or for a Mixtral's where
it has experts."""


@dataclass(frozen=True, slots=True)
class Widths:
    """The sizes that a configuration states; one rank, no parallelism inside the model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    experts: int
    """0 for a dense MLP."""
    experts_per_token: int
    vocabulary: int
    plain: bool
    """BLOOM and MPT: an MLP of two matrices instead of three, layer norms, no tp_plan."""
    tied: bool
    """Whether the output head is the embeddings' weight."""

    @classmethod
    def of(cls, config: Any) -> Widths:
        """Read a configuration, or anything with its fields. Raises ValueError, naming it, when it lacks a size."""
        hidden, layers, heads, vocabulary = (
            _size(config, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        )
        plain = getattr(config, "model_type", None) in ("bloom", "mpt")
        experts = getattr(config, "num_local_experts", None) or 0
        return cls(
            hidden=hidden,
            layers=layers,
            heads=heads,
            kv_heads=heads if plain else getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or hidden // heads,
            # transformers' BLOOM and MPT have four times the hidden size, whatever expansion_ratio says
            intermediate=4 * hidden if plain else _size(config, "intermediate_size"),
            experts=experts,
            experts_per_token=_size(config, "num_experts_per_tok") if experts else 1,
            vocabulary=vocabulary,
            plain=plain,
            tied=bool(getattr(config, "tie_word_embeddings", plain)),
        )

    @property
    def attention_weights(self) -> int:
        """Weights of a layer's four projections."""
        return 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)

    @property
    def mlp_weights(self) -> int:
        """Weights of a layer's MLP, or of one of its experts."""
        return (2 if self.plain else 3) * self.hidden * self.intermediate


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs and elements of a model on one rank, without parallelism inside the model."""

    layers: int
    linear: int
    """FLOPs per token of everything that is linear in the length, forward and backward."""
    head: int
    """Part of `linear` that the output head computes, for tokens with a label only."""
    attention: int
    """FLOPs per token squared of a document, causal, all layers, forward and backward, as if all saw the whole document."""
    windowed: int
    """Those of `attention` that belong to layers whose queries see the last `window` tokens only."""
    window: int | None
    """Tokens; None: there are no such layers."""
    kv_elements: int
    """Elements of keys and values per token, all layers."""
    parameters: int
    """All weights, those of idle experts included; norms and biases are left out (about 1 in 10,000)."""

    def of_attention(self, squares: Any, windowed_squares: Any) -> Any:
        """Return the FLOPs of attention of all layers, from `squares` without and with the window."""
        return (self.attention - self.windowed) * squares + self.windowed * windowed_squares


def squares(lengths: Any, window: int | None = None) -> Any:
    """Return twice the pairs of queries and keys of documents of these lengths (array of tokens): s^2, or w*(2*s - w) behind a
    window."""
    if window is None:
        return lengths * lengths
    reach = lengths.clip(max=window)
    return reach * (2 * lengths - reach)


def windowed_layers(config: Any) -> tuple[int, int | None]:
    """Return how many layers of a configuration have a window, and the window in tokens; (0, None) where there are none.

    In some families, `sliding_window` holds for all layers; in others, for those that `layer_types` names.
    """
    window = getattr(config, "sliding_window", None)
    if window is None:
        return 0, None
    if getattr(config, "model_type", None) in ALL_SLIDING:
        layers = config.num_hidden_layers
    else:
        layers = list(getattr(config, "layer_types", None) or ()).count(SLIDING)
    return (layers, int(window)) if layers else (0, None)


def model_flops(config: Any) -> ModelFlops:
    """Count the FLOPs of a Hugging Face configuration.

    A weight costs 6 FLOPs per token: 2 forward, 4 backward. A causal query-key pair, of which there are s^2 / 2, costs
    12 * head_dim per head. Raises ValueError, naming it, when the configuration lacks a size.
    """
    widths = Widths.of(config)
    embeddings = widths.hidden * widths.vocabulary
    layers_with_window, window = windowed_layers(config)
    of_layer = 6 * widths.heads * widths.head_dim
    active = widths.attention_weights + widths.mlp_weights * widths.experts_per_token
    whole = widths.attention_weights + widths.mlp_weights * max(1, widths.experts)
    return ModelFlops(
        layers=widths.layers,
        linear=6 * (widths.layers * active + embeddings),
        head=6 * embeddings,
        attention=of_layer * widths.layers,
        windowed=of_layer * layers_with_window,
        window=window,
        kv_elements=2 * widths.layers * widths.kv_heads * widths.head_dim,
        parameters=widths.layers * whole + (1 if widths.tied else 2) * embeddings,
    )


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """One tensor-parallel rank's part of a model."""

    norms_are_rms: bool
    norm_of_embeddings: bool
    hidden: int
    layers: int
    heads: int
    head_dim: int
    kv_width: int
    """Elements of the keys of one token."""
    intermediate: int
    experts: int
    """0 for a dense MLP."""
    experts_per_token: int
    head_rows: int
    """Of the output head's weight on one rank: the vocabulary's tokens, or its share of them."""
    gated: bool
    gelu_temporaries: int
    """Tensors of the MLP's width beyond those kept, at the worst point of its backward."""
    clipped: bool
    """Whether projections are clamped, which keeps them once more (MPT)."""
    layer_parameters: int
    mlp_parameters: int
    """Of one layer, all experts."""
    root_parameters: int
    """Embeddings, output head, last norm."""
    linear_parameters: int
    """All weights of matrix products but experts: what autocast copies."""
    largest_weight: int
    projections: dict[str, tuple[int, int]]
    """Name of a torch.nn.Linear of each layer -> its inputs and outputs; LoRA can adapt these, not a Mixtral's experts."""

    @classmethod
    def of(cls, config: Any, tensor_parallel: int) -> ModelSizes:
        """Reads a configuration, or anything with its fields.

        Raises:
            ValueError: another family, a size that is missing, or heads that do not divide by `tensor_parallel`.
        """
        family = getattr(config, "model_type", None)
        if family not in MODEL_TYPES:
            known = ", ".join(name for name in MODEL_TYPES if name)
            raise ValueError(f"model_type={family!r} cannot be counted; valid: {known}")
        whole = Widths.of(config)
        hidden, layers, vocabulary = whole.hidden, whole.layers, whole.vocabulary
        plain, experts = whole.plain, whole.experts
        if whole.heads % tensor_parallel or whole.kv_heads % tensor_parallel or (plain and tensor_parallel > 1):
            divide = [n for n in range(1, whole.heads + 1) if whole.heads % n == whole.kv_heads % n == 0]
            raise ValueError(
                f"tensor_parallel={tensor_parallel} must divide {whole.heads} query heads and {whole.kv_heads} key/value heads "
                f"of a {family or 'llama'} model; valid: {[1] if plain else divide}"
            )
        own = replace(
            whole,
            heads=whole.heads // tensor_parallel,
            kv_heads=whole.kv_heads // tensor_parallel,
            intermediate=-(-whole.intermediate // tensor_parallel),
        )
        heads, head_dim, intermediate = own.heads, own.head_dim, own.intermediate
        q_width, kv_width = heads * head_dim, own.kv_heads * head_dim
        attention = _attention(family, hidden, q_width, kv_width)
        dense = {} if experts else _mlp(family, hidden, intermediate)
        in_attention, mlp = own.attention_weights, own.mlp_weights
        vectors = 2 * hidden  # the weights of two norms
        if family == "bloom":
            vectors += 2 * hidden + (3 * q_width + hidden) + (intermediate + hidden)
        if getattr(config, "attention_bias", False) and not plain:
            vectors += q_width + 2 * kv_width + hidden
        if getattr(config, "mlp_bias", False) and not plain:
            vectors += 2 * intermediate + hidden
        router = experts * hidden
        embeddings = vocabulary * hidden
        head_rows = vocabulary if whole.tied else -(-vocabulary // tensor_parallel)
        head = 0 if whole.tied else head_rows * hidden
        gate_up = 2 * experts * hidden * intermediate  # one tensor of all experts
        return cls(
            norms_are_rms=not plain,
            norm_of_embeddings=family == "bloom",
            hidden=hidden,
            layers=layers,
            heads=heads,
            head_dim=head_dim,
            kv_width=kv_width,
            intermediate=intermediate,
            experts=experts,
            experts_per_token=whole.experts_per_token,
            head_rows=head_rows,
            gated=not plain,
            gelu_temporaries={"bloom": 5, "mpt": 1}.get(family or "", 2),
            clipped=bool(getattr(getattr(config, "attn_config", None), "clip_qkv", None)),
            layer_parameters=in_attention + mlp * max(1, experts) + router + vectors,
            mlp_parameters=mlp * max(1, experts),
            root_parameters=embeddings + head + (4 if family == "bloom" else 1) * hidden,
            linear_parameters=layers * (in_attention + router + (0 if experts else mlp)) + head_rows * hidden,
            largest_weight=max(gate_up, hidden * intermediate, q_width * hidden),
            projections=attention | dense,
        )

    @property
    def parameters(self) -> int:
        """All of them: those of idle experts, norms and biases included."""
        return self.layers * self.layer_parameters + self.root_parameters

    def adapted(self, targets: Collection[str] | None) -> tuple[str, ...]:
        """The projections that LoRA adapts: those named, or all (PEFT's "all-linear").

        Raises:
            ValueError: a name is none of this family's.
        """
        chosen = tuple(self.projections) if targets is None else tuple(targets)
        if unknown := [name for name in chosen if name not in self.projections]:
            experts = "; experts are no torch.nn.Linear, and cannot be adapted" if self.experts else ""
            raise ValueError(f"LoRA targets {unknown} are unknown; valid: {', '.join(self.projections)}{experts}")
        return chosen

    def adapter_parameters(self, rank: int, targets: Collection[str] | None) -> int:
        """Of all layers: each adapted projection has matrices [rank, inputs] and [outputs, rank]."""
        return self.layers * rank * sum(sum(self.projections[name]) for name in self.adapted(targets))


def _attention(family: str | None, hidden: int, q_width: int, kv_width: int) -> dict[str, tuple[int, int]]:
    if family in ("bloom", "mpt"):
        fused, out = ("query_key_value", "dense") if family == "bloom" else ("Wqkv", "out_proj")
        return {fused: (hidden, q_width + 2 * kv_width), out: (q_width, hidden)}
    widths = {"q_proj": q_width, "k_proj": kv_width, "v_proj": kv_width}
    return {name: (hidden, width) for name, width in widths.items()} | {"o_proj": (q_width, hidden)}


def _mlp(family: str | None, hidden: int, intermediate: int) -> dict[str, tuple[int, int]]:
    up, down = ("dense_h_to_4h", "dense_4h_to_h") if family == "bloom" else ("up_proj", "down_proj")
    gate = {} if family in ("bloom", "mpt") else {"gate_proj": (hidden, intermediate)}
    return gate | {up: (hidden, intermediate), down: (intermediate, hidden)}


def _size(config: Any, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{type(config).__name__}.{name} is {value!r}; counting a model needs an integer >= 1")
    return value
