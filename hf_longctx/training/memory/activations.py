"""The tensors that layers keep between forward and backward of one micro-batch, and where.

With activation checkpointing a layer keeps its input alone and is computed a second time in backward. Its attention is
the one part whose cost grows with the length of documents, and recomputing it would repeat the exchange between ranks.
So its output can be kept: from some length on that saves a good part of a step, for the memory of one more activation
of the layer. The choice follows from the layout alone, because all its ranks must exchange in recomputation, or none.

A share of what is kept can wait in host memory (activation_offload.py): with checkpointing each middle layer's input and kept
attention, without it whatever autograd saves in a middle layer.

Both happen inside `micro_batch()` and leave nothing behind: layers, their classes and hooks are the caller's again
after it. Nothing is sent between ranks here.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_longctx.attention.kept import KeptAttention
from hf_longctx.attention.ulysses import inner_group
from hf_longctx.hardware.model_sizes import ModelSizes
from hf_longctx.layouts.layout import Layout, Segment
from hf_longctx.models.attention import LayoutAttention, carries_layouts, is_patched
from hf_longctx.models.documents import documents_of
from hf_longctx.models.loss.own_logits import base_of
from hf_longctx.training.memory.activation_offload import HostMemory, LayerHooks

KEEP_ATTENTION = ("auto", "always", "never")
KEPT_FROM_SHARE = 0.2
"""With recomputation a step is four forwards, one of which need not repeat attention: from here on keeping it saves 5 % of
a layer's step and more. Measured on a CPU (hidden 512, 2 layers, float32, one thread; forward and backward, one document of
1K, 2K, 4K, 16K tokens, share 0.15, 0.27, 0.42, 0.74): 1, 15, 16, 22 % of the seconds saved."""


class ActivationMemory:
    """Decides and does what `keep_attention` and `offload` say, for one patched model.

    Args:
        model: patched; may be wrapped (PEFT), and sharded with FSDP2 before or after.
        keep_attention: with activation checkpointing, whether a layer's attention output is kept: "always", "never"
            (attention and its exchange are computed again), or "auto", where attention is at least KEPT_FROM_SHARE of a
            layer's forward.
        device: where activations are.
        longest_document: tokens; where "auto" would keep attention of none of up to that length, it never does, because memory
            was counted so (capacity.py). None: not known.

    Raises:
        ValueError: an unknown choice, a model that is not patched, or layers that are checkpointed from
            outside.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        keep_attention: str = "auto",
        device: torch.device | str,
        longest_document: int | None = None,
    ) -> None:
        if keep_attention not in KEEP_ATTENTION:
            raise ValueError(f"keep_attention={keep_attention!r} is unknown; valid: {', '.join(KEEP_ATTENTION)}")
        self._layers = decoder_layers(model)
        if not is_patched(model):
            raise ValueError(
                f"{type(model).__name__} cannot run over a layout: call hf_longctx.patch_model(model) first"
            )
        if any(isinstance(module, CheckpointWrapper) for module in model.modules()):
            raise ValueError(
                "fsdp_config's activation_checkpointing wraps layers, so that keep_attention would be ignored, and offload would "
                "undo it. Valid: gradient_checkpointing=True, and activation_checkpointing out of fsdp_config"
            )
        self._keep_attention, self._longest = keep_attention, longest_document
        self._config = next(
            part.config.get_text_config() for part in model.modules() if isinstance(part, PreTrainedModel)
        )
        self._alone = documents_of(model) == "alone"
        if keep_attention == "auto" and not self._alone and not _has_known_sizes(self._config):
            self._keep_attention = "never"  # it saves time, and how much is not known
        self.host = HostMemory(device)
        """Counts what moves."""
        self._forwards = 0
        """so far: what layers of different micro-batches keep is numbered apart"""

    def keeps_attention(self, layout: Layout) -> bool:
        """Tell whether attention is kept in this micro-batch, where layers are checkpointed and attention is ours. The same on
        all ranks."""
        if self._alone:
            return False
        if self._keep_attention == "auto":
            return (
                may_keep_attention("auto", self._config, self._longest)
                and attention_share(self._config, layout) >= KEPT_FROM_SHARE
            )
        return self._keep_attention == "always"

    @contextlib.contextmanager
    def micro_batch(self, layout: Layout, rank: int, offload: float = 0.0) -> Iterator[None]:
        """Keep, offload and recompute activations in forward *and* backward of one micro-batch, between which no other one runs.
        Arguments and errors are those of `forward`."""
        with contextlib.ExitStack() as left:
            left.callback(self.host.forget)
            with self.forward(layout, rank, offload):
                yield

    @contextlib.contextmanager
    def forward(self, layout: Layout, rank: int, offload: float = 0.0) -> Iterator[None]:
        """Keep, offload and recompute activations of one micro-batch's forward, whose backward may come after those of others;
        `host.forget` follows when all are done.

        Args:
            layout: what the model is called with.
            rank: this one's number in it.
            offload: share of what the middle layers keep that waits in host memory, from 0 to 1.

        Raises:
            ValueError: the share is out of range, or checkpointing is reentrant.
        """
        if not 0 <= offload <= 1:
            raise ValueError(f"offload={offload} must be a share of the activations, from 0 to 1")
        if offload and not self._layers:
            raise ValueError(
                f"offload={offload}: no layer of this model is a GradientCheckpointingLayer of transformers, so that nothing "
                "says which of its activations may wait in host memory. Valid: activation_offload=0 and plan_offload=False"
            )
        keep = self.keeps_attention(layout)
        rows = self._rows(layout, rank) if offload else frozenset()
        first, self._forwards = self._forwards * len(self._layers), self._forwards + 1
        with contextlib.ExitStack() as replaced:
            for at, layer in enumerate(self._layers):
                middle, number = 0 < at < len(self._layers) - 1, first + at

                def hooks(
                    *excluded: torch.Tensor, number: int = number, share: float = offload if middle else 0.0
                ) -> LayerHooks | None:
                    return self.host.layer(number, share, rows, excluded) if offload else None

                if layer.gradient_checkpointing:
                    run: Any = layer._gradient_checkpointing_func
                    _refuse_reentrant(run)
                    if keep or offload:
                        replaced.enter_context(
                            _replaced(layer, "_gradient_checkpointing_func", _checkpointed(run, hooks, keep))
                        )
                elif offload:
                    replaced.enter_context(_replaced(layer, "forward", _hooked(layer, layer.forward, hooks)))
            yield

    def _rows(self, layout: Layout, rank: int) -> frozenset[int]:
        """Sizes of a dimension that counts this rank's tokens, as a Mixtral sends them to experts and as Ulysses merges
        them too."""
        tokens = layout.tokens(rank)
        rows = {tokens, tokens * getattr(self._config, "num_experts_per_tok", 1)}
        if layout.ulysses > 1:
            group = inner_group(layout, rank)
            rows |= {group.merged_tokens, tokens - group.split_tokens}
        return frozenset(rows - {0, 1})


def decoder_layers(model: torch.nn.Module) -> list[GradientCheckpointingLayer]:
    """The layers of a patched model that run over layouts, in order."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    of_ours = [layer for layer in layers if any(isinstance(part, LayoutAttention) for part in layer.modules())]
    if of_ours:
        return of_ours
    bases = [base_of(part) for part in model.modules() if carries_layouts(part)]
    return [layer for base in bases for layer in base.modules() if isinstance(layer, GradientCheckpointingLayer)]


def attention_share(config: Any, layout: Layout) -> float:
    """Attention's share of the forward FLOPs of one layer, over all ranks of a layout.

    A pair of query and key costs 4 FLOPs per element of the heads (score, and sum of values), a token 2 per weight that
    it meets. Tensor parallelism divides both alike.
    """
    sizes = ModelSizes.of(config, 1)
    window = getattr(config, "sliding_window", None)
    pairs = sum(_pairs(length, window or length) for length in layout.doc_lengths.values())
    mlp = (3 if sizes.gated else 2) * sizes.hidden * sizes.intermediate
    weights = sizes.layer_parameters - max(0, sizes.experts - sizes.experts_per_token) * mlp
    attention = 4 * sizes.heads * sizes.head_dim * pairs
    return attention / (attention + 2 * weights * sum(layout.doc_lengths.values()))


def _has_known_sizes(config: Any) -> bool:
    """Tell whether the sizes of a model can be read from its configuration, or counted."""
    try:
        ModelSizes.of(config, 1)
    except ValueError:
        return False
    return True


def may_keep_attention(keep_attention: str, config: Any, longest_document: int | None) -> bool:
    """Tell whether attention of any micro-batch is kept where layers are checkpointed, if no document has more than
    `longest_document` tokens (None: not known). Raises ValueError: the model's sizes are unknown."""
    if keep_attention == "auto" and longest_document is not None:
        alone = Layout({0: (Segment(0, 0, longest_document),)})
        return attention_share(config, alone) >= KEPT_FROM_SHARE
    return keep_attention != "never"


def _pairs(length: int, window: int) -> int:
    """Count the pairs of queries and keys that a query sees: itself and fewer than `window` before it."""
    first = min(length, window)
    return first * (first + 1) // 2 + (length - first) * window


Hooks = Callable[..., LayerHooks | None]
"""Tensors that stay where they are -> what saves a layer's tensors; None: autograd alone."""


def _checkpointed(run: Callable[..., Any], hooks: Hooks, keep: bool) -> Callable[..., Any]:
    """The function that transformers calls to checkpoint a layer: `run(function, *inputs)`, with the layer's keywords bound to
    `function`. The inputs are all that is saved outside of it."""

    def run_layer(function: Callable[..., Any], *inputs: Any) -> Any:
        if not torch.is_grad_enabled():  # there will be no backward
            return run(function, *inputs)
        saving = hooks()
        kept = KeptAttention() if saving is None else KeptAttention(saving.put, saving.get)
        with saving or contextlib.nullcontext():
            return run(kept.in_layer(function) if keep else function, *inputs)

    return run_layer


def _hooked(layer: torch.nn.Module, forward: Callable[..., Any], hooks: Hooks) -> Callable[..., Any]:
    """A layer's forward, which saves its activations by way of the hooks."""

    def run_layer(*inputs: Any, **keywords: Any) -> Any:
        shared = [tensor for value in keywords.values() for tensor in (value if isinstance(value, tuple) else (value,))]
        shared += [*layer.parameters(), *layer.buffers()]
        with hooks(*(tensor for tensor in shared if isinstance(tensor, torch.Tensor))) or contextlib.nullcontext():
            return forward(*inputs, **keywords)

    return run_layer


@contextlib.contextmanager
def _replaced(layer: torch.nn.Module, name: str, value: Any) -> Iterator[None]:
    """An attribute of this one layer."""
    before = layer.__dict__.get(name)
    layer.__dict__[name] = value
    try:
        yield
    finally:
        if before is None:
            del layer.__dict__[name]
        else:
            layer.__dict__[name] = before


def _refuse_reentrant(run: Any) -> None:
    given = run.keywords if isinstance(run, partial) else {"use_reentrant": False}
    if given.get("use_reentrant", True) is not False:  # torch's own default is True
        raise ValueError(
            f"gradient_checkpointing_kwargs={given} means use_reentrant=True: reentrant checkpointing runs backward inside "
            "backward, and cannot keep attention or offload. "
            'Valid: gradient_checkpointing_kwargs={"use_reentrant": False}, which is transformers\' default'
        )
