"""Counts of a model; plain data, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field


class NotCountedError(ValueError):
    """A model cannot be counted, or its memory cannot; the message says why."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """One call of attention in a forward of the model."""

    heads: int
    kv_heads: int
    qk_width: int
    """Elements of a head's query or key."""
    value_width: int
    """Elements of a head's value. Multi-head latent attention has other values than keys."""
    window: int | None = None
    """Tokens that a query sees, itself included; None: all before it."""
    chunk: int | None = None
    """Tokens of the chunks within which queries see all before them (Llama 4); None: there are no chunks."""

    @property
    def flops(self) -> int:
        """FLOPs per token squared of a causal document, forward: scores and sums of values of half of the pairs."""
        return self.heads * (self.qk_width + self.value_width)

    @property
    def kv_elements(self) -> int:
        """Elements of keys and values per token, which ranks exchange."""
        return self.kv_heads * (self.qk_width + self.value_width)

    @property
    def reach(self) -> int | None:
        """The window that costs as much as this one: half a chunk, as a token sees half of its chunk on average."""
        chunk = None if self.chunk is None else max(1, self.chunk // 2)
        return min((tokens for tokens in (self.window, chunk) if tokens is not None), default=None)


@dataclass(frozen=True, slots=True)
class CountedLayer:
    """One decoder layer."""

    parameters: int
    weighted_flops: int
    """FLOPs per token of products with weights, forward; of experts, those that a token goes to."""
    state_flops: int
    """FLOPs per token of products without weights, forward: states that run along the document (Mamba, delta rules)."""
    score_flops: int
    """FLOPs per token squared, forward, of what the layer multiplies beside its attention: scores of indexers, blocks of
    states."""
    widest: int
    """Elements per token of the widest input of a product."""
    attention: tuple[AttentionShape, ...] = ()


@dataclass(frozen=True, slots=True)
class CountedModel:
    """A causal language model, whole, on one device. FLOPs are those of forward."""

    parameters: int
    """All; weights that are shared, such as a tied head, once."""
    matrices: int
    """Those of weights with two or more dimensions: norms and biases left out."""
    linear_parameters: int
    """All weights of matrix products but stacked experts: what autocast copies."""
    largest_weight: int
    """Elements of a decoder layer's largest weight."""
    hidden: int
    """Elements of a token between layers."""
    vocabulary: int
    """Rows of the output head."""
    tied: bool
    """Whether the output head is the embeddings' weight."""
    layers: tuple[CountedLayer, ...]
    outside_flops: int
    """FLOPs per token of products with weights outside of the decoder layers, the output head included."""
    head_flops: int
    """FLOPs per token of the output head."""
    experts: int
    """Experts of a layer, those that are always active left out; 0: MLPs are dense."""
    experts_per_token: int
    expert_parameters: int
    """Parameters of all experts of one layer."""
    projections: dict[str, int] = field(compare=False)
    """Name of a torch.nn.Linear of decoder layers -> inputs and outputs, of all that have it; LoRA can adapt these."""
    notes: tuple[str, ...] = ()
    """Remarks on what is not exact."""

    @property
    def linear_flops(self) -> int:
        """FLOPs per token of everything that is linear in the length, forward."""
        return self.outside_flops + sum(layer.weighted_flops + layer.state_flops for layer in self.layers)

    @property
    def active_parameters(self) -> int:
        """Weights that a token meets in matrix products, each counted as often as it is met; the head is one of them."""
        return (self.outside_flops + sum(layer.weighted_flops for layer in self.layers)) // 2

    @property
    def attention(self) -> tuple[AttentionShape, ...]:
        """Every call of attention, in the order of the layers."""
        return tuple(shape for layer in self.layers for shape in layer.attention)

    @property
    def state_layers(self) -> int:
        """Layers without attention: states, convolutions, or an MLP alone."""
        return sum(not layer.attention for layer in self.layers)


@dataclass(frozen=True, slots=True)
class KeptLayer:
    """Bytes per token that backward needs of one decoder layer; tensors that several layers share are the first one's."""

    whole: int
    own_input: int
    """Those of `whole` that are the layer's input itself, which checkpointing keeps anyway."""
    after_attention: int
    """Those of `whole` that are kept after attention has run: second norm and MLP."""
    inner: int
    """Those of `after_attention` in tensors that are wider than the residual stream: inside the MLP."""
    attention_output: int
    """Output and log-sum-exp of attention."""
    recomputing: int | None = field(default=None, compare=False)
    """The most that recomputing the layer and its backward hold at once, its input left out, before there is a gradient of its
    weights (busiest.py); None: not known."""
    busiest: int | None = field(default=None, compare=False)
    """From then on until attention runs backward."""


@dataclass(frozen=True, slots=True)
class KeptBytes:
    """Bytes that autograd keeps, per token."""

    layers: tuple[KeptLayer, ...]
    residual: int
    """Bytes of a token between layers."""
    outside: int
    """Kept once, whatever the number of layers: rotations, norms of embeddings."""
    last_norm: int
    """Kept between the last layer and the output head."""
    adapter_parameters: int
    """Parameters of LoRA; 0 without."""
