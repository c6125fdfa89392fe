"""Counts of a model: two forwards of different lengths on fake tensors, made into counts per token and per token squared.

What products with weights cost grows with the tokens; what products without weights cost grows with the tokens (states along the
document) or with their square (attention that does not go through transformers' interface, indexers). Two lengths tell them
apart. Layers that work in blocks of up to 256 tokens are asked at multiples of that.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from hf_longctx.counting import building
from hf_longctx.counting.busiest import Busiest, Call, busiest
from hf_longctx.counting.config_fields import head_counts
from hf_longctx.counting.products import OUTSIDE, CountProducts, LayerProducts, Products
from hf_longctx.counting.records import (
    AttentionShape,
    CountedLayer,
    CountedModel,
    KeptBytes,
    KeptLayer,
    NotCountedError,
)
from hf_longctx.counting.saved import AFTER, LayerSaved, Saved
from hf_longctx.counting.stand_ins import LISTENER, REACHES

SHORT = (16, 32)
"""Tokens of the two forwards: few, as some layers with a state loop over them."""
LONG = (512, 1024)
"""Multiples of the blocks in which layers with a state and block-wise attention compute (64 and 256)."""
DTYPES = {2: torch.bfloat16, 4: torch.float32}
CACHED = 64
"""Configurations and settings whose counts are remembered."""
OWN_SCORES = "attention computes its own scores, with the heads that the configuration names; windows are left out"


@dataclass(frozen=True)
class _Keyed:
    """A configuration, equal to others with the same fields."""

    digest: str
    config: Any = field(compare=False)

    @classmethod
    def of(cls, config: Any) -> _Keyed:
        fields = config.to_dict() if hasattr(config, "to_dict") else vars(config)
        text = json.dumps([type(config).__name__, fields], sort_keys=True, default=str)
        return cls(hashlib.sha256(text.encode()).hexdigest(), config)


def count_model(config: Any) -> CountedModel:
    """Count a configuration of transformers, or anything with the fields of one; counted once for the same fields.

    Raises:
        NotCountedError: transformers makes no causal language model of it, or its forward does not run on shapes alone.
    """
    return _counted(_Keyed.of(config)).model


def count_parameters(config: Any) -> int:
    """Count the weights of a configuration's model, also where nothing else of it can be counted.

    Raises:
        NotCountedError: transformers makes no causal language model of it.
    """
    built = building.build(building.transformers_config(config), torch.float32)
    return sum(weight.numel() for weight in built.model.parameters())


def count_kept(
    config: Any,
    weight_bytes: int,
    activation_bytes: int,
    lora_rank: int = 0,
    lora_targets: tuple[str, ...] | None = None,
    adapter_bytes: int = 4,
) -> KeptBytes:
    """Count what autograd keeps of a model.

    Args:
        config: as of `count_model`.
        weight_bytes, activation_bytes: 4 and 4, 2 and 2, or 4 and 2, which is autocast.
        lora_rank: of adapters, which alone are trained; 0: all weights are.
        lora_targets: names of linear layers that are adapted; None: all in decoder layers.
        adapter_bytes: of the adapters' weights where they compute.

    Raises:
        NotCountedError: as of `count_model`; or attention does not go through transformers' interface, so that it keeps scores of
            all pairs, whose bytes are not linear in the tokens.
    """
    return _count_kept(_Keyed.of(config), weight_bytes, activation_bytes, lora_rank, lora_targets, adapter_bytes)


@dataclass
class _Run:
    """Counts of one forward."""

    products: Products
    layers: list[torch.nn.Module] = field(default_factory=list)
    """Decoder layers in the order in which they ran first."""
    attention: dict[int, list[AttentionShape]] = field(default_factory=dict)
    experts: dict[int, tuple[torch.nn.Module, int, int]] = field(default_factory=dict)
    """Decoder layer -> its experts, how many there are, and how many a token goes to."""
    notes: dict[str, None] = field(default_factory=dict)
    saved: Saved | None = None
    calls: dict[int, Call] = field(default_factory=dict)
    """Decoder layer -> what it was called with first, where what is kept is counted."""
    index: int = OUTSIDE

    def attended(self, shape: AttentionShape, own: tuple[torch.Tensor, ...]) -> None:
        self.attention.setdefault(self.index, []).append(shape)
        if self.saved is not None:
            self.saved.after_attention(own)

    def routed(self, module: torch.nn.Module, experts: int, per_token: int) -> None:
        self.experts[self.index] = (module, experts, per_token)

    def not_exact(self, note: str) -> None:
        self.notes[note] = None

    def enter(self, layer: torch.nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if layer not in self.layers:
            self.layers.append(layer)
        self.index = self.layers.index(layer)
        if self.saved is not None:
            self.calls.setdefault(self.index, (inputs, keywords))
            self.saved.enter(self.index, _tensors((inputs, keywords)))

    def leave(self) -> None:
        self.index = OUTSIDE
        if self.saved is not None:
            self.saved.leave()


def _run(built: building.Built, tokens: int, *, keep: bool = False, autocast: bool = False) -> _Run:
    """Run one document of so many tokens, and listen."""
    model = built.model
    with built.mode:
        ids = torch.zeros((1, tokens), dtype=torch.long)
    weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
    head = model.get_output_embeddings()
    counting = CountProducts(weights, None if head is None else head.weight.untyped_storage()._cdata, lambda: run.index)
    run = _Run(counting.counted, saved=Saved(weights | {ids.untyped_storage()._cdata}) if keep else None)
    with ExitStack() as stack:
        stack.callback(LISTENER.reset, LISTENER.set(run))
        stack.callback(REACHES.reset, REACHES.set({}))
        stack.enter_context(_hooks(built, head, run))
        stack.enter_context(built.mode)
        if run.saved is not None:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(run.saved.pack, lambda tensor: tensor))
            stack.enter_context(torch.autocast("cpu", torch.bfloat16, enabled=autocast))
        else:
            stack.enter_context(torch.no_grad())
            stack.enter_context(counting)
        building.forward(built, ids)
    return run


@contextmanager
def _hooks(built: building.Built, head: torch.nn.Module | None, run: _Run) -> Iterator[None]:
    """Tell `run` where decoder layers begin and end, and where the output head begins."""

    def begin_head(*_: Any) -> None:
        if run.saved is not None:
            run.saved.ended = True

    handles = [] if head is None else [head.register_forward_pre_hook(begin_head)]
    for layer in building.layer_lists(built.model):
        handles.append(layer.register_forward_pre_hook(run.enter, with_kwargs=True))
        handles.append(layer.register_forward_hook(lambda *_: run.leave(), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class _Counted:
    """A model's counts, and how they were come by."""

    model: CountedModel
    lengths: tuple[int, int]
    by_interface: bool
    """Whether all attention went through transformers' interface."""


@lru_cache(maxsize=CACHED)
def _counted(keyed: _Keyed) -> _Counted:
    config = building.transformers_config(keyed.config)
    built = building.build(config, torch.float32)
    lengths, (first, second) = _runs(built)
    model, notes = built.model, first.notes
    free = [_per_token(first.products, second.products, index, lengths) for index in range(len(first.layers))]
    attention = dict(first.attention)
    if OUTSIDE in attention:
        raise NotCountedError(
            f"{building.named(config)} cannot be counted: attention runs outside of its lists of decoder layers"
        )
    scores = [score for _, score in free]
    # Without heads it is no attention: Mamba 2's fallback multiplies the states of all its blocks.
    heads = head_counts(config)
    by_interface = bool(attention) or not any(scores) or not heads
    if not by_interface:
        notes[OWN_SCORES] = None
        attention = {index: [_own_attention(heads, index, score)] for index, score in enumerate(scores) if score}
        scores = [0] * len(scores)
    experts = max(first.experts.values(), key=lambda entry: entry[1], default=None)
    stacked = {id(weight) for module, *_ in first.experts.values() for weight in module.parameters()}
    weights = list(model.parameters())
    head = model.get_output_embeddings()
    text = config.get_text_config()
    apart = lengths[1] - lengths[0]
    difference = {
        index: _weighted(second.products, index) - _weighted(first.products, index) for index in first.products.of_layer
    }
    own, seen = [], set()  # blocks that several layers share count for the first of them
    for layer in first.layers:
        own.append(sum(weight.numel() for weight in layer.parameters() if id(weight) not in seen))
        seen |= {id(weight) for weight in layer.parameters()}
    made = CountedModel(
        parameters=sum(weight.numel() for weight in weights),
        matrices=sum(weight.numel() for weight in weights if weight.dim() > 1),
        linear_parameters=sum(
            weight.numel()
            for weight in weights
            if weight.dim() > 1 and weight.untyped_storage()._cdata in first.products.used and id(weight) not in stacked
        ),
        largest_weight=max((w.numel() for layer in first.layers for w in layer.parameters()), default=0),
        hidden=text.hidden_size if head is None else head.weight.shape[1],
        vocabulary=text.vocab_size if head is None else head.weight.shape[0],
        tied=head is not None and any(weight is head.weight for weight in _embeddings(model)),
        layers=tuple(
            CountedLayer(
                parameters=own[index],
                weighted_flops=difference.get(index, 0) // apart,
                state_flops=free[index][0],
                score_flops=scores[index],
                widest=_of(first.products, index).widest // lengths[0],
                attention=tuple(attention.get(index, ())),
            )
            for index, layer in enumerate(first.layers)
        ),
        outside_flops=difference.get(OUTSIDE, 0) // apart,
        head_flops=(second.products.head - first.products.head) // apart,
        experts=0 if experts is None else experts[1],
        experts_per_token=1 if experts is None else experts[2],
        expert_parameters=0 if experts is None else sum(weight.numel() for weight in experts[0].parameters()),
        projections=_projections(first.layers),
        notes=tuple(notes),
    )
    return _Counted(made, lengths, by_interface)


@lru_cache(maxsize=CACHED)
def _count_kept(
    keyed: _Keyed,
    weight_bytes: int,
    activation_bytes: int,
    lora_rank: int,
    lora_targets: tuple[str, ...] | None,
    adapter_bytes: int,
) -> KeptBytes:
    config = building.transformers_config(keyed.config)
    counted = _counted(keyed)
    built, lengths = building.build(config, DTYPES[weight_bytes]), counted.lengths
    if not counted.by_interface:
        raise NotCountedError(
            f"{building.named(config)}: memory cannot be counted. Its attention does not go through transformers' interface and "
            "keeps scores of all pairs of tokens, whose bytes are not linear in the tokens. Valid: a capacity in tokens"
        )
    adapters = building.add_adapters(built, lora_rank, lora_targets, DTYPES[adapter_bytes]) if lora_rank else 0
    runs = [_run(built, tokens, keep=True, autocast=activation_bytes < weight_bytes) for tokens in lengths]
    first, second = (run.saved for run in runs)
    assert first is not None
    assert second is not None
    apart = lengths[1] - lengths[0]

    def per_token(name: str, index: int) -> int:
        short, long = (getattr(saved.of_layer.get(index, LayerSaved()), name) for saved in (first, second))
        return -(-(long - short) // apart)

    names = ("whole", "own_input", "after_attention", "inner", "attention_output")
    busiest_of_kind: dict[tuple[Any, ...], Busiest | None] = {}

    def of_layer(index: int) -> KeptLayer:
        """Layers of a kind are run by themselves once."""
        counts = {name: per_token(name, index) for name in names}
        kind = (*counts.values(), counted.model.layers[index])
        if kind not in busiest_of_kind:
            busiest_of_kind[kind] = _busiest(runs, index, lengths, activation_bytes < weight_bytes)
        moments = busiest_of_kind[kind]
        return (
            KeptLayer(**counts) if moments is None else KeptLayer(**counts, recomputing=moments[0], busiest=moments[1])
        )

    return KeptBytes(
        layers=tuple(of_layer(index) for index in range(len(runs[0].layers))),
        residual=(second.residual - first.residual) // apart,
        outside=per_token("whole", OUTSIDE),
        last_norm=per_token("whole", AFTER),
        adapter_parameters=adapters,
    )


def _busiest(runs: list[_Run], index: int, lengths: tuple[int, int], autocast: bool) -> Busiest | None:
    """Run a layer by itself; None where its code does not allow that."""
    listening = LISTENER.set(_Run(Products()))
    reaching = REACHES.set({})
    try:
        return busiest(runs[0].layers[index], [run.calls[index] for run in runs], lengths, autocast)
    except Exception:  # of any modeling code that cannot run a layer by itself
        return None
    finally:
        LISTENER.reset(listening)
        REACHES.reset(reaching)


def _runs(built: building.Built) -> tuple[tuple[int, int], list[_Run]]:
    """Forwards of two lengths, and the lengths: the short ones where products without weights are linear in the tokens, or where
    the model has no positions for the long ones."""
    short = [_run(built, tokens) for tokens in SHORT]
    free = [[_of(run.products, index).free for run in short] for index in range(len(short[0].layers))]
    if all(few * SHORT[1] == many * SHORT[0] for few, many in free):
        return SHORT, short
    try:
        return LONG, [_run(built, tokens) for tokens in LONG]
    except NotCountedError:
        return SHORT, short


def _of(products: Products, index: int) -> LayerProducts:
    return products.of_layer.get(index, LayerProducts())


def _weighted(products: Products, index: int) -> int:
    return _of(products, index).weighted


def _per_token(first: Products, second: Products, index: int, lengths: tuple[int, int]) -> tuple[int, int]:
    """Products without weights of a layer: FLOPs per token, and per token squared."""
    (short, long), (few, many) = lengths, (_of(products, index).free for products in (first, second))
    squared = max(0, (many * short - few * long) // (long * short * (long - short)))
    return max(0, many - squared * long * long) // long, squared


def _own_attention(heads: list[tuple[int, int]], layer: int, scores: int) -> AttentionShape:
    """Attention whose scores and sums of values take so many FLOPs per token squared, of all pairs.

    Args:
        heads: of queries and of keys and values, as `head_counts` has them.
    """
    query_heads, kv_heads = heads[layer if len(heads) > 1 else 0]
    width = max(1, scores // (4 * query_heads))
    return AttentionShape(query_heads, kv_heads, width, width)


def _projections(layers: list[torch.nn.Module]) -> dict[str, int]:
    """Linear layers of decoder layers by their last name: inputs and outputs of all of them."""
    widths_of: dict[str, int] = {}
    for layer in layers:
        for name, module in layer.named_modules():
            if (widths := building.linear_widths(module)) is not None:
                last = name.rpartition(".")[2]
                widths_of[last] = widths_of.get(last, 0) + sum(widths)
    return widths_of


def _embeddings(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    return (module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding))


def _tensors(values: Any) -> list[torch.Tensor]:
    """Tensors in arguments of a call, in their order."""
    if isinstance(values, torch.Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (list, tuple)):
        return []
    return [tensor for value in values for tensor in _tensors(value)]
