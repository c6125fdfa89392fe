"""How large a model is, and what it computes: widths, exact parameter counts and FLOPs, from a Hugging Face configuration.

    Widths        the sizes that a configuration states, and the matrices of a layer that follow from them
    ModelFlops    what the cost model divides by speeds
    ModelSizes    what the memory model counts; each rank of tensor parallelism with its share of heads, MLPs and output head
                  (transformers' `tp_plan`); embeddings and norms are whole on each

Llama, Mistral, Mixtral, BLOOM and MPT have formulas, which need no torch. Any other causal language model of transformers is
counted from its modules (counting/), which imports torch and transformers and takes seconds, once for a configuration. Tests
compare formulas, counts and the real models.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from hf_longctx.counting.config_fields import field_values
from hf_longctx.counting.records import AttentionShape, CountedModel

ALL_SLIDING = ("mistral", "mixtral")
"""Families with a formula of which every layer has the window that the configuration names."""
SLIDING = "sliding_attention"
"""Entry of `layer_types`, transformers' name of layers with a window."""

MODEL_TYPES = (None, "llama", "mistral", "mixtral", "bloom", "mpt")
"""Values of `model_type` with a formula; without one, a configuration is taken for a Llama's, or for a Mixtral's where it has
experts."""


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
    def router_weights(self) -> int:
        """Weights that choose a layer's experts; 0 for a dense MLP."""
        return self.hidden * self.experts

    @property
    def mlp_weights(self) -> int:
        """Weights of a layer's MLP, or of one of its experts."""
        return (2 if self.plain else 3) * self.hidden * self.intermediate


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs and elements of a model on one rank, without parallelism inside the model."""

    layers: int
    hidden: int
    """Elements of a token between layers."""
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


def counted_model(config: Any) -> CountedModel | None:
    """Return the counts of a configuration without a formula, from its modules; None where there is a formula.

    Raises:
        ValueError: transformers makes no causal language model of it, or cannot run it on shapes alone.
    """
    if getattr(config, "model_type", None) in MODEL_TYPES:
        return None
    from hf_longctx.counting.count import count_model  # torch and transformers

    return count_model(config)


def windowed_layers(config: Any) -> tuple[int, int | None]:
    """Return how many layers of a configuration have a window, and the window in tokens; (0, None) where there are none.

    In Mistral and Mixtral, `sliding_window` holds for all layers; in Llama, for those that `layer_types` names; other families
    are asked layer by layer, and windows of several sizes give their mean.
    """
    if (counted := counted_model(config)) is not None:
        return sum(shape.reach is not None for shape in counted.attention), _mean_window(counted)
    window = getattr(config, "sliding_window", None)
    if window is None:
        return 0, None
    if getattr(config, "model_type", None) in ALL_SLIDING:
        layers = config.num_hidden_layers
    else:
        layers = list(getattr(config, "layer_types", None) or ()).count(SLIDING)
    return (layers, int(window)) if layers else (0, None)


def attention_shapes(config: Any) -> tuple[AttentionShape, ...]:
    """Return the calls of attention in a forward of a configuration's model, in the order of its layers; where only a formula is
    known, those without a window first.

    Raises:
        ValueError: as `counted_model` and `Widths.of` do.
    """
    if (counted := counted_model(config)) is not None:
        return counted.attention
    widths, (with_window, window) = Widths.of(config), windowed_layers(config)
    whole = AttentionShape(widths.heads, widths.kv_heads, widths.head_dim, widths.head_dim)
    return (whole,) * (widths.layers - with_window) + (replace(whole, window=window),) * with_window


def model_flops(config: Any) -> ModelFlops:
    """Count the FLOPs of a Hugging Face configuration.

    A weight costs 6 FLOPs per token: 2 forward, 4 backward. A causal query-key pair, of which there are s^2 / 2, costs
    12 * head_dim per head; where keys and values have other widths, 6 * (both together). Raises ValueError, naming it, when the
    configuration lacks a size, and as `counted_model` does.
    """
    if (counted := counted_model(config)) is not None:
        return _counted_flops(counted)
    widths = Widths.of(config)
    embeddings = widths.hidden * widths.vocabulary
    layers_with_window, window = windowed_layers(config)
    of_layer = 6 * widths.heads * widths.head_dim
    always = widths.attention_weights + widths.router_weights
    active = always + widths.mlp_weights * widths.experts_per_token
    whole = always + widths.mlp_weights * max(1, widths.experts)
    return ModelFlops(
        layers=widths.layers,
        hidden=widths.hidden,
        linear=6 * (widths.layers * active + embeddings),
        head=6 * embeddings,
        attention=of_layer * widths.layers,
        windowed=of_layer * layers_with_window,
        window=window,
        kv_elements=2 * widths.layers * widths.kv_heads * widths.head_dim,
        parameters=widths.layers * whole + (1 if widths.tied else 2) * embeddings,
    )


EVEN_TOKENS = 2**14
"""Length of a document whose attention costs as much as all that is linear, in a model that cannot be counted: about as in one of
1B. What it is in fact would change balance, never what is computed."""


def flops_of_weights(parameters: int, config: Any) -> ModelFlops:
    """Guess the FLOPs of a model that cannot be counted: all weights at work, and in every layer attention with the heads that
    its configuration names; with none, by EVEN_TOKENS."""

    def number(name: str, default: int = 0) -> int:
        return (
            max((value for value in field_values(config, name) if isinstance(value, int)), default=default) or default
        )

    layers, heads, hidden = number("num_hidden_layers", 1), number("num_attention_heads"), number("hidden_size")
    head_dim = number("head_dim", hidden // max(heads, 1))
    attention = 6 * layers * heads * head_dim
    return ModelFlops(
        layers=layers,
        hidden=hidden,
        linear=6 * parameters,
        head=0,
        attention=attention or max(1, 6 * parameters // EVEN_TOKENS),
        windowed=0,
        window=None,
        kv_elements=2 * layers * number("num_key_value_heads", heads) * head_dim,
        parameters=parameters,
    )


def _counted_flops(counted: CountedModel) -> ModelFlops:
    """FLOPs of a model that was counted: forward, and twice as many backward."""
    scores = sum(layer.score_flops for layer in counted.layers)
    return ModelFlops(
        layers=len(counted.layers),
        hidden=counted.hidden,
        linear=3 * counted.linear_flops,
        head=3 * counted.head_flops,
        attention=3 * (scores + sum(shape.flops for shape in counted.attention)),
        windowed=3 * sum(shape.flops for shape in counted.attention if shape.reach is not None),
        window=_mean_window(counted),
        kv_elements=sum(shape.kv_elements for shape in counted.attention),
        parameters=counted.matrices,
    )


def _mean_window(counted: CountedModel) -> int | None:
    """The window of a model's layers that have one, weighted by what they compute where there are several."""
    behind = [(shape.reach, shape.flops) for shape in counted.attention if shape.reach is not None]
    return round(sum(reach * flops for reach, flops in behind) / sum(flops for _, flops in behind)) if behind else None


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
    """Elements of the keys of one token, in the layer with most."""
    kv_elements: int
    """Elements of the keys and values of one token, in the layer with most."""
    intermediate: int
    experts: int
    """0 for a dense MLP."""
    experts_per_token: int
    head_rows: int
    """Rows of the output head's weight on one rank: the vocabulary's tokens, or its share of them."""
    gated: bool
    gelu_temporaries: int
    """Tensors of the MLP's width beyond those kept, at the worst point of its backward."""
    clipped: bool
    """Whether projections are clamped, which keeps them once more (MPT)."""
    layer_parameters: int
    """Parameters of the largest layer."""
    layers_parameters: int
    """Parameters of all layers."""
    mlp_parameters: int
    """Parameters of one layer's MLP, all experts."""
    root_parameters: int
    """Embeddings, output head, last norm."""
    tied: bool
    """Whether the output head is the embeddings' weight."""
    linear_parameters: int
    """All weights of matrix products but experts: what autocast copies."""
    largest_weight: int
    projections: dict[str, int]
    """Name of a torch.nn.Linear of layers -> its inputs and outputs, of all layers; LoRA can adapt these, not experts that are
    stacked in one tensor."""
    counted: CountedModel | None = field(default=None, compare=False)
    """Counts from the modules, where there is no formula."""

    @classmethod
    def of(cls, config: Any, tensor_parallel: int) -> ModelSizes:
        """Reads a configuration, or anything with its fields.

        Raises:
            ValueError: a size that is missing, heads that do not divide by `tensor_parallel`, or as of `counted_model`.
        """
        family = getattr(config, "model_type", None)
        if (counted := counted_model(config)) is not None:
            return _counted_sizes(counted, family, tensor_parallel)
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
        router = whole.router_weights
        layer_parameters = in_attention + mlp * max(1, experts) + router + vectors
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
            kv_elements=2 * kv_width,
            intermediate=intermediate,
            experts=experts,
            experts_per_token=whole.experts_per_token,
            head_rows=head_rows,
            gated=not plain,
            gelu_temporaries={"bloom": 5, "mpt": 1}.get(family or "", 2),
            clipped=bool(getattr(getattr(config, "attn_config", None), "clip_qkv", None)),
            layer_parameters=layer_parameters,
            layers_parameters=layers * layer_parameters,
            mlp_parameters=mlp * max(1, experts),
            root_parameters=embeddings + head + (4 if family == "bloom" else 1) * hidden,
            tied=whole.tied,
            linear_parameters=layers * (in_attention + router + (0 if experts else mlp)) + head_rows * hidden,
            largest_weight=max(gate_up, hidden * intermediate, q_width * hidden),
            projections={name: layers * sum(widths) for name, widths in (attention | dense).items()},
        )

    @property
    def parameters(self) -> int:
        """Count all parameters: those of idle experts, norms and biases included."""
        return self.layers_parameters + self.root_parameters

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
        """Count the parameters of all layers: each adapted projection has matrices [rank, inputs] and [outputs, rank]."""
        return rank * sum(self.projections[name] for name in self.adapted(targets))


def _counted_sizes(counted: CountedModel, family: str | None, tensor_parallel: int) -> ModelSizes:
    """Sizes of a model that was counted. Raises ValueError where tensor parallelism would share it."""
    if tensor_parallel > 1:
        known = ", ".join(name for name in MODEL_TYPES if name)
        raise ValueError(
            f"tensor_parallel={tensor_parallel}: a rank's share of a {family} model is not counted; valid: 1, or one of {known}"
        )
    shapes, largest = counted.attention, max((layer.parameters for layer in counted.layers), default=0)
    layers_parameters = sum(layer.parameters for layer in counted.layers)
    experts, hidden = counted.experts, counted.hidden
    # Of one expert, or of the MLP: as of three matrices between the residual stream and what its widest product takes.
    width = max((layer.widest for layer in counted.layers), default=0)
    intermediate = counted.expert_parameters // (3 * hidden * experts) if experts else width
    return ModelSizes(
        norms_are_rms=True,
        norm_of_embeddings=False,
        hidden=hidden,
        layers=len(counted.layers),
        heads=max((shape.heads for shape in shapes), default=0),
        head_dim=max((max(shape.qk_width, shape.value_width) for shape in shapes), default=0),
        kv_width=max((shape.kv_heads * shape.qk_width for shape in shapes), default=0),
        kv_elements=max((shape.kv_elements for shape in shapes), default=0),
        intermediate=intermediate,
        experts=experts,
        experts_per_token=counted.experts_per_token,
        head_rows=counted.vocabulary,
        gated=True,
        gelu_temporaries=2,
        clipped=False,
        layer_parameters=largest,
        layers_parameters=layers_parameters,
        mlp_parameters=counted.expert_parameters or 3 * hidden * intermediate,
        root_parameters=counted.parameters - layers_parameters,
        tied=counted.tied,
        linear_parameters=counted.linear_parameters,
        largest_weight=counted.largest_weight,
        projections=counted.projections,
        counted=counted,
    )


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
