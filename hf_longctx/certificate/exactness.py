"""Runs a tiny model through the product's own path on virtual ranks, and compares it with the plain model, document by document.

What is compared, in float64: the loss, and every parameter's gradient, to TOLERANCE of the largest gradient, or to
TOLERANCE_OF_CASTS where modeling code was seen to cast to float32 all the same. With activation checkpointing where the model has
it. And what must not matter is changed: a token of another document, and one of
the future; no logits may move, the latter in the plain model already: one that sees the future is not causal. No call sees a
whole document that is split, so what looks at its call (the largest position, a mean over rows, the capacity of experts) shows.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_longctx.attention.exchange import Exchange
from hf_longctx.attention.kept import KeptAttention
from hf_longctx.attention.replicas import add_gradients, replicate
from hf_longctx.attention.virtual_ranks import run_on_virtual_ranks
from hf_longctx.certificate.drawn_documents import (
    LENGTHS,
    TOKENS,
    Documents,
    Step,
    labels_of,
    packed_layout,
    tokens_of,
)
from hf_longctx.layouts.layout import Layout
from hf_longctx.models.loss.balance import asks_for_balance, balance_settings

TOLERANCE = 1e-9
"""Largest difference of an exact model, as a part of its largest gradient and of the loss; of logits that must not move, as a
part of the largest logit. Far above rounding in float64, which was seen to make 4e-14 in 181 families."""
TOLERANCE_OF_CASTS = 1e-6
"""The former, of a model some of whose operations give float32 out of float64 where `float64_throughout` does not reach: eps of
float32 is 1.2e-7. The certificate names these operations."""


@dataclass(frozen=True)
class Answer:
    """Results of a model for the documents."""

    loss: float
    """Sum over tokens with a label."""
    gradients: dict[str, torch.Tensor]


def plain_answer(model: Any, documents: Documents) -> Answer:
    """Run a plain model on each document alone. A load-balancing loss that its configuration asks for counts by tokens."""
    balances, (coefficient, _) = asks_for_balance(model), balance_settings(model)
    model.zero_grad()
    total = 0.0
    for document in documents:
        output = model(input_ids=document[None], use_cache=False)
        logits = output.logits[0, : len(document) - 1]
        loss = torch.nn.functional.cross_entropy(logits.double(), document[1:], reduction="sum")
        if balances and getattr(output, "aux_loss", None) is not None:
            loss = loss + coefficient * output.aux_loss * len(document) / TOKENS
        _backward(loss)
        total += float(loss.detach())
    return Answer(total, gradients_of(model))


def answer_over(model: Any, documents: Documents, step: Step) -> Answer:
    """Run a patched model over the micro-batches of a step, on as many virtual ranks as these have."""
    model.zero_grad()
    world_size = _ranks(step)
    replicas = replicate(model, world_size)

    def run(exchange: Exchange) -> float:
        return sum(run_layout(exchange, layout) for layout in step if exchange.rank in layout.ranks)

    def run_layout(exchange: Exchange, layout: Layout) -> float:
        rank = exchange.rank
        shard = layout.shard(rank)
        ids = tokens_of(documents, shard)
        labels = torch.cat([labels_of(documents, segment) for segment in shard])
        loss = replicas[rank](
            input_ids=ids[None],
            layout=layout,
            exchange=exchange if world_size > 1 else None,
            shift_labels=labels[None],
            num_items_in_batch=1,
            num_tokens_in_batch=TOKENS,
        ).loss
        _backward(loss)
        return float(loss.detach())

    losses = run_on_virtual_ranks(world_size, run, device=model.device)
    add_gradients(model, replicas)
    return Answer(sum(losses), gradients_of(model))


def _ranks(step: Step) -> int:
    return 1 + max(rank for layout in step for rank in layout.ranks)


def _backward(loss: torch.Tensor) -> None:
    """Run `loss.backward()` with the modes of torch functions left on.

    A mode that is asked about a call is off during that call. It would be asked about `backward`, and so be off while layers
    are computed again."""
    torch.autograd.graph._engine_run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copy of each parameter's gradient in float64, on CPU, by name."""
    return {
        name: p.grad.detach().to("cpu", torch.float64, copy=True)
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def difference(answer: Answer, right: Answer) -> tuple[float, str]:
    """The largest difference, and what differs: of the loss relative to it, of gradients relative to the largest of all."""
    largest = max((float(gradient.abs().max()) for gradient in right.gradients.values()), default=0.0) or 1.0
    differences = {"loss": abs(answer.loss - right.loss) / max(abs(right.loss), 1e-30)}
    for name in {**right.gradients, **answer.gradients}:
        zero = torch.zeros(())
        moved = answer.gradients.get(name, zero) - right.gradients.get(name, zero)
        differences[f"the gradient of {name}"] = float(moved.abs().max()) / largest
    if not all(value == value for value in differences.values()):
        name = next(name for name, value in differences.items() if value != value)
        return float("inf"), f"{name} (not a number)"
    name = max(differences, key=differences.__getitem__)
    return differences[name], name


CHANGES: tuple[tuple[int, str, slice], ...] = (
    (LENGTHS[0] - 5, "a later token of the document", slice(0, LENGTHS[0] - 5)),
    (LENGTHS[0] - 1, "a token of the document before", slice(LENGTHS[0], None)),
    (LENGTHS[0] + 1, "a token of the document behind", slice(0, LENGTHS[0])),
)
"""Row of a token among those of all documents, what it is to other rows, and rows whose logits it must not move."""


def sees_later_tokens(plain: Any, documents: Documents) -> bool:
    """Whether a plain model's logits depend on a later token of the document."""
    return bool(_moved(lambda ids: plain(input_ids=ids, use_cache=False), documents[0], CHANGES[:1]))


def leaks(model: Any, documents: Documents) -> str:
    """Return what a patched model's logits depend on and must not: a later token, or one of another document; empty if
    neither."""
    layout = packed_layout()
    return _moved(lambda ids: model(input_ids=ids, layout=layout), torch.cat(documents), CHANGES)


def _moved(run: Callable[[torch.Tensor], Any], ids: torch.Tensor, changes: Sequence[tuple[int, str, slice]]) -> str:
    """Return what moves logits that it must not; empty if nothing does."""
    with torch.no_grad():
        before = run(ids[None]).logits[0]
        for changed, what, unmoved in changes:
            other = ids.clone()
            other[changed] = next(token for token in ids if token != ids[changed])
            moved = (run(other[None]).logits[0][unmoved] - before[unmoved]).abs().max()
            if float(moved) > TOLERANCE * float(before.abs().max()):
                return what
    return ""


def checkpointed(model: Any) -> Any:
    """A copy whose layers are recomputed in backward, with their attention kept, where its class can; the model itself
    otherwise."""
    copied = copy.deepcopy(model)
    try:
        copied.gradient_checkpointing_enable({"use_reentrant": False})
    except ValueError:
        return model
    for layer in copied.modules():
        if isinstance(layer, GradientCheckpointingLayer) and layer.gradient_checkpointing:
            run: Any = layer._gradient_checkpointing_func
            layer.__dict__["_gradient_checkpointing_func"] = partial(_run_kept, run)
    return copied


def _run_kept(run: Callable[..., Any], layer: Callable[..., Any], *inputs: Any) -> Any:
    return run(KeptAttention().in_layer(layer), *inputs)


def worst_difference(model: Any, documents: Documents, steps: Sequence[Step], right: Answer) -> tuple[float, str]:
    """The largest difference over all steps, and where it is; the last one runs with activation checkpointing too."""
    worst, where = 0.0, ""
    runs = [(model, step, "") for step in steps]
    runs.append((checkpointed(model), steps[-1], " with activation checkpointing"))
    for variant, step, how in runs:
        error, what = difference(answer_over(variant, documents, step), right)
        if error >= worst:
            worst, where = error, f"{what} on {_ranks(step)} ranks{how}"
    return worst, where
