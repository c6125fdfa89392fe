"""Logits and loss of a causal language model by its class's own forward, from hidden states, a chunk of rows at a time.

Many families do more to their logits than multiply with the head: a scale (Granite, Cohere), a soft cap (Gemma 2), a norm or a
layer before the head (BERT). Instead of knowing each, the class's own forward runs on hidden states that are there already, with
its base model replaced by what returns them. A chunk's logits are computed again in backward, so that those of all rows never
exist at once. Where logits are no more than the head's, cross_entropy.py is faster (head_check.py tells).

Shapes: T tokens, H hidden size, V vocabulary. Nothing is sent.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from hf_longctx.models.loss.cross_entropy import ObserveLogits, rows_with_label


class OutputOfBase:
    """Hidden states where modeling code looks for them; nothing else."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> torch.Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class StandIn(torch.nn.Module):
    """Has the attributes of a module, and another forward."""

    def __init__(self, original: torch.nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["_original"] = original
        self.forward = forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


@contextmanager
def replaced_parts(model: torch.nn.Module, replaced: Mapping[int, torch.nn.Module]) -> Iterator[None]:
    """Puts other modules in the places of some parts of the model, for the time being. Those are not touched and not called, so
    that no hook of theirs runs: FSDP2's would gather weights, and take the first module called for the root."""
    parents = [part for part in model.modules() if any(id(child) in replaced for child in part.children())]
    before = [parent._modules for parent in parents]
    for parent, children in zip(parents, before):
        parent.__dict__["_modules"] = {name: replaced.get(id(child), child) for name, child in children.items()}
    try:
        yield
    finally:
        for parent, children in zip(parents, before):
            parent.__dict__["_modules"] = children


def base_of(model: Any) -> Any:
    """The part of a causal language model that turns tokens into the hidden states of its output head: its base model, or, where
    the class's forward passes that by, the decoder inside."""
    name = model.__dict__.get("longctx_base")
    return model.base_model if name is None else model.get_submodule(name)


def is_own_base(model: Any) -> bool:
    """Tell whether a model's class gives logits and nothing that they could be made of again: it is its own base model then, and
    logits stand where hidden states do."""
    return model.__dict__.get("longctx_base") == ""


def hidden_width(model: Any) -> int:
    """Elements of a hidden state of `base_of(model)`: what the head takes, unless there are layers between them."""
    known: int | None = model.__dict__.get("longctx_hidden_width")
    if known is not None:
        return known
    head = model.get_output_embeddings()
    weight = getattr(head, "weight", None)
    # before in_features: PEFT's copy of a tied head is a Linear of the right weight, with in_features and out_features swapped
    if isinstance(weight, torch.Tensor) and weight.ndim == 2 and weight.is_floating_point():
        return weight.shape[1]
    return getattr(head, "in_features", None) or model.config.get_text_config().hidden_size


def hidden_dtype(model: Any) -> torch.dtype:
    """The dtype of what the head takes, which need not be that of the first weights: embeddings may be in another."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    if isinstance(weight, torch.Tensor) and weight.is_floating_point():
        return weight.dtype
    dtype: torch.dtype = model.dtype
    return dtype


def own_output(
    model: Any, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor] | None = None, **keywords: Any
) -> Any:
    """Return what the class's forward returns for hidden states [1, T, H] of its base model: logits [1, T, V] and more.

    Args:
        head: what to call in place of the output head.

    Raises:
        ValueError: the forward does not ask its base model for them, once.
    """
    calls: list[int] = []

    def as_base(*args: Any, **kwargs: Any) -> OutputOfBase:
        calls.append(hidden.shape[1])
        return OutputOfBase(hidden)

    base = base_of(model)
    ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    replaced = {id(base): StandIn(base, as_base)}
    if head is not None:
        own_head = model.get_output_embeddings()
        replaced[id(own_head)] = StandIn(own_head, head)
    with replaced_parts(model, replaced):
        output = type(model).forward(model, input_ids=ids, use_cache=False, **keywords)
    if len(calls) != 1:
        raise ValueError(
            f"the forward of {type(model).__name__} calls its {type(base).__name__} {len(calls)} times: its logits cannot be "
            "computed from hidden states. Valid: a causal language model whose forward calls its base model once"
        )
    return output


def own_logits(
    model: Any, hidden: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> torch.Tensor:
    """Logits [1, T, V] of the class's own forward for hidden states [1, T, H]. Arguments and errors as of `own_output`."""
    if is_own_base(model):
        return hidden
    return own_output(model, hidden, head).logits


class _InFloat32(torch.autograd.Function):
    """A weight -> a tensor that stands for it: of its shape, without memory of its own, and in float32, so that autograd sums in
    float32 what flows back to it. The weight gets the sum, rounded once."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.dtype = weight.dtype
        return weight.new_zeros((), dtype=torch.float32).expand(weight.shape)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to(ctx.dtype)


class _StoodFor(torch.autograd.Function):
    """The tensor that `_InFloat32` gave, and the weight that it stands for -> the weight."""

    @staticmethod
    def forward(ctx: Any, stand_in: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight.detach().view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.float(), None


def head_summed_in_float32(model: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return the output head, [t, H] -> [t, V], with the gradient of its weight summed over calls in float32; None where the head
    itself does as well, being no plain matrix in half precision, or not trained, or where something else runs with it."""
    head = None if is_own_base(model) else model.get_output_embeddings()
    if type(head) is not torch.nn.Linear or "forward" in vars(head) or head._forward_hooks or head._forward_pre_hooks:
        return None
    weight = head.weight
    if type(weight) is not torch.nn.Parameter or weight.dtype.itemsize > 2 or not weight.requires_grad:
        return None
    stand_in = _InFloat32.apply(weight)
    return lambda rows: torch.nn.functional.linear(rows, _StoodFor.apply(stand_in, weight), head.bias)


def logits_of(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [1, T, V] of a patched model for hidden states [1, T, H] of its base model: its head's, or its class's own where
    these are more."""
    if getattr(model, "longctx_own_logits", False):
        return own_logits(model, hidden)
    return model.get_output_embeddings()(hidden)  # type: ignore[no-any-return]


def own_cross_entropy(
    model: Any,
    hidden: torch.Tensor,
    labels: torch.Tensor,
    chunk_tokens: int,
    observe: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    label_rows: torch.Tensor | None = None,
    observe_logits: ObserveLogits | None = None,
) -> torch.Tensor:
    """Sum over tokens of the cross-entropy of the class's own logits.

    Args:
        hidden: [T, H]
        labels: int64 [T], already shifted; -100 where none counts.
        chunk_tokens: rows of logits that exist at once.
        observe: called with the rows of each chunk (int64 [t], those with a label) and their losses ([t]).
        label_rows: int64 [n], the rows with a label, where the caller knows them.
        observe_logits: called with each chunk's logits [t, V], once.

    Returns:
        Scalar, float32 or float64; zero, with a graph, where no label counts.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)

    head = head_summed_in_float32(model)

    def losses_of(rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = own_logits(model, rows[None], head)[0].to(dtype)
        if observe_logits is not None and not recomputing:
            with torch.no_grad():
                observe_logits(logits, targets, logits.logsumexp(-1, keepdim=True), None)
        return torch.nn.functional.cross_entropy(logits, targets, reduction="none")

    recomputing = False
    total = hidden[:0].sum().to(dtype)  # a sum of all may overflow in float16
    for rows in rows_with_label(labels, label_rows).split(chunk_tokens):
        losses = checkpoint(losses_of, hidden[rows], labels[rows], use_reentrant=False)
        total = total + losses.sum()
        if observe is not None:
            observe(rows, losses.detach())
    recomputing = True  # checkpoint calls losses_of again in backward
    return total
