"""Check that a causal language model's loss is the cross-entropy of hidden states times the output head's weight: the only one
that the chunked loss (cross_entropy.py) computes.

Many families do more to their logits: a scale (Granite, Cohere), a soft cap (Gemma 2), a norm or a layer before the head (BERT),
some of them by their configuration alone. No list of them would know the next one, or a subclass, or code that comes with a
model. So the model is asked: its class's own forward runs once on a few tokens, with its base model and its head replaced by

    base model   hidden states, drawn at random
    head         notes what it is given, and returns logits, drawn at random

The head must get those hidden states and the call must return those logits, bit for bit, and their cross-entropy. Neither weights
nor layers run, so that this costs milliseconds for any size, and works where weights are in parts, on other stages or absent.
Values reach from 1e-3 to 1e4, so that a soft cap or a clamp shows whatever its bound is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hf_longctx.models.loss.balance import FIELD, takes_field
from hf_longctx.models.loss.own_logits import (
    OutputOfBase,
    StandIn,
    base_of,
    hidden_dtype,
    hidden_width,
    own_logits,
    own_output,
    replaced_parts,
)
from hf_longctx.models.stages import Elsewhere

ROWS = 4
"""Tokens of the call."""
SMALLEST_DECADE, LARGEST_DECADE = -3.0, 4.0
"""Powers of ten of the values drawn; float16 holds them all."""
LOSS_ROUNDINGS = 16
"""Units of rounding by which the class's own loss may differ: its sum runs over as many logits as there are tokens."""
NEEDED = "the chunked loss is the cross-entropy of hidden states times the head's weight"


class OtherLogits(ValueError):
    """A class does more to its logits than its head does."""


class OtherLoss(ValueError):
    """A class's loss is not the cross-entropy of its logits."""


def needs_own_forward(model: Any, certified: bool = False) -> bool:
    """Tell whether a model's loss must be computed by its class's own forward (own_logits.py), because its logits are more than
    hidden states times the head's weight.

    Args:
        certified: whether a tiny copy's own forward was seen to compute it, of which the same is true: the weights of a model
            in parts cannot be asked.

    Raises:
        ValueError: nor can its own forward compute it: see `refuse_other_logits`.
    """
    try:
        refuse_other_logits(model)
        return False
    except OtherLogits as error:
        in_parts = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        if in_parts and _is_adapted(model.get_output_embeddings()):
            raise OtherLogits(
                "an adapter, or a copy that is trained, stands in place of the output head of a model that was loaded in parts "
                "(DistributedConfig): a copy of its class alone is certified, which has neither, and weights in parts cannot be "
                "asked. Valid: lm_head left out of target_modules and modules_to_save, or a whole model, which "
                "LongContextPlugin(sharding='zero3') spreads"
            ) from error
        if in_parts and not certified:
            raise
        if not in_parts:
            _refuse_other_rows(model, error)
        return True


def _refuse_other_rows(model: Any, reason: OtherLogits) -> None:
    """Raises ValueError unless the class's own forward makes the same logits of a few hidden states in one call and in two, and
    its loss is their cross-entropy. Where weights are absent, nothing is asked."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return
    hidden = torch.randn(1, ROWS, hidden_width(model), generator=torch.Generator().manual_seed(0)).to(
        model.device, hidden_dtype(model)
    )
    ids = torch.arange(ROWS, device=hidden.device)[None]
    keywords: dict[str, Any] = {FIELD: False} if takes_field(model) else {}
    with torch.no_grad(), _training(model, base_of(model)):
        output = own_output(model, hidden, labels=ids, **keywords)
        parts = torch.cat([own_logits(model, part) for part in hidden.split(ROWS // 2, dim=1)], dim=1)
    if output.logits.shape[:2] != hidden.shape[:2] or not torch.allclose(output.logits, parts, rtol=1e-2, atol=1e-3):
        raise ValueError(
            f"{reason} Nor can its own forward be asked a few rows at a time: it gives them other logits then (dropout before "
            "the head, or rows that see one another)"
        ) from reason
    _refuse_other_loss(type(model).__name__, output.loss, output.logits, ids)


def refuse_other_logits(model: Any) -> None:
    """Raises ValueError, naming the class and what it does, unless the model's loss is one that the chunked loss computes:
    OtherLogits where its loss is the cross-entropy of other logits.

    Args:
        model: a causal language model, no wrapper; whole, or some stages of one. It is unchanged afterwards.
    """
    head, base, name = model.get_output_embeddings(), base_of(model), type(model).__name__
    _refuse_other_head(head)
    if base is model:
        raise ValueError(
            f"{name} has no base model of its own (base_model_prefix={model.base_model_prefix!r}): {NEEDED}, "
            "and the hidden states are not to be had. Valid: a causal language model of transformers"
        )
    text = model.config.get_text_config()
    device = torch.device("cpu") if model.device.type == "meta" else model.device
    generator = torch.Generator().manual_seed(0)

    def drawn(width: int) -> torch.Tensor:
        decades = torch.rand(1, ROWS, width, generator=generator) * (LARGEST_DECADE - SMALLEST_DECADE) + SMALLEST_DECADE
        signs = torch.randint(0, 2, (1, ROWS, width), generator=generator) * 2 - 1
        return (signs * 10**decades).to(device, hidden_dtype(model))

    hidden = drawn(hidden_width(model))
    # Where a head has other rows than the vocabulary (padding), the class's own loss is asked with as many logits as it expects.
    for rows in dict.fromkeys((getattr(head, "out_features", None) or text.vocab_size, text.vocab_size)):
        _refuse_other_forward(model, hidden, drawn(rows), with_loss=rows == text.vocab_size)


def _refuse_other_forward(model: Any, hidden: torch.Tensor, logits: torch.Tensor, with_loss: bool) -> None:
    """Raises ValueError unless the class's forward gives its head these hidden states [1, ROWS, H] and returns these logits
    [1, ROWS, V]; with_loss: and their cross-entropy."""
    head, base, name = model.get_output_embeddings(), base_of(model), type(model).__name__
    ids = torch.arange(ROWS, device=hidden.device)[None] % logits.shape[-1]
    given: list[torch.Tensor] = []

    def as_head(received: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        given.append(received)
        return logits

    keywords: dict[str, Any] = {"labels": ids} if with_loss else {}
    if takes_field(model):
        keywords[FIELD] = False
    replaced = {
        id(base): StandIn(base, lambda *args, **kwargs: OutputOfBase(hidden)),
        id(head): StandIn(head, as_head),
    }
    with torch.no_grad(), _training(model, base), replaced_parts(model, replaced):
        try:
            output = type(model).forward(model, input_ids=ids, use_cache=False, **keywords)
            returned, own_loss = output.logits, output.loss
        except Exception as error:
            raise ValueError(
                f"what {name} makes of hidden states cannot be followed ({type(error).__name__}: {str(error)[:200]}): {NEEDED}, "
                "and this class may do more. Valid: a causal language model whose forward is lm_head(base_model(...))"
            ) from error
    if len(given) != 1 or not _same(given[0], hidden):
        deviation = (
            "changes hidden states before its head" if len(given) == 1 else "does not call its head with hidden states"
        )
        raise OtherLogits(
            f"{name} {deviation} (a scale, a norm, a layer, dropout, or a product of its own): {NEEDED}, and the rest would be "
            "lost. Valid: a class or configuration without it"
        )
    if returned is None or not _same(returned, logits):
        raise OtherLogits(
            f"{name} changes its logits after the head (a scale, a soft cap or a bias, often by a field of its configuration "
            f"such as logits_scaling, logit_scale or final_logit_softcapping): {NEEDED}, and the rest would be lost. "
            "Valid: a class or configuration without it"
        )
    _refuse_other_loss(name, own_loss, logits, ids)


def _refuse_other_loss(name: str, own_loss: torch.Tensor | None, logits: torch.Tensor, ids: torch.Tensor) -> None:
    """Raises ValueError unless the class's loss (None: it has none) for labels `ids` is the cross-entropy of its logits."""
    if own_loss is None:
        return
    right = torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:])
    unshifted = torch.nn.functional.cross_entropy(
        logits[0].float(), ids[0]
    )  # of classes that leave the shift to their users
    tolerance = LOSS_ROUNDINGS * max(torch.finfo(kind).eps for kind in (own_loss.dtype, torch.float32))
    if not any(
        abs(float(own_loss) - float(expected)) <= tolerance * abs(float(expected)) for expected in (right, unshifted)
    ):
        raise OtherLoss(
            f"the loss of {name} for a few tokens is {float(own_loss):.6g}, and their cross-entropy {float(right):.6g}: "
            f"{NEEDED}, and the rest (label smoothing, a term of its own) would be lost. Valid: a class without it"
        )


def refuse_loss_of_its_own(model: Any) -> None:
    """Raises OtherLoss unless the loss that the class's own forward gives of a few tokens is their cross-entropy. Nothing is
    asked where weights are in parts or absent, nor where that forward takes no tokens alone."""
    if any(isinstance(parameter, DTensor) or parameter.is_meta for parameter in model.parameters()):
        return
    ids = torch.arange(ROWS, device=model.device)[None]
    keywords = {FIELD: False} if takes_field(model) else {}
    try:
        with torch.no_grad():
            output = type(model).forward(model, input_ids=ids, labels=ids, use_cache=False, **keywords)
    except Exception:  # of any class's own code
        return
    if output.logits.shape[:2] == ids.shape:
        _refuse_other_loss(type(model).__name__, output.loss, output.logits, ids)


def _is_adapted(head: Any) -> bool:
    """Tell whether a head is an adapter of PEFT, or a copy that is trained beside adapters."""
    return type(head).__module__.startswith("peft.")


def _refuse_other_head(head: Any) -> None:
    """Raises ValueError unless calling the head is multiplying with its weight: OtherLogits where an adapter of PEFT, or a copy
    that is trained beside adapters, stands in its place."""
    if _is_adapted(head):
        raise OtherLogits(
            f"the output head is PEFT's {type(head).__name__}, and {NEEDED}, so that the rest would be lost."
        )
    if not isinstance(head, (torch.nn.Linear, Elsewhere)):
        raise ValueError(
            f"the output head is a {type(head).__name__}: the chunked loss multiplies with the weight of a torch.nn.Linear, and "
            "what else a wrapper computes (a scale, a quantised weight) would be lost. Valid: a torch.nn.Linear, or one with an "
            "adapter of PEFT's"
        )
    if isinstance(head, Elsewhere):
        return
    if type(head).forward is not torch.nn.Linear.forward:
        raise ValueError(
            f"the output head is a {type(head).__name__} with a forward of its own: {NEEDED}, and what else it computes would be "
            "lost. Valid: a torch.nn.Linear, in no quantised form"
        )
    watched = head._forward_hooks or head._forward_pre_hooks or "forward" in head.__dict__
    if not watched or isinstance(head.weight, DTensor) or head.weight.is_meta:
        return
    hidden = torch.linspace(-1, 1, head.in_features, device=head.weight.device, dtype=head.weight.dtype)[None, None]
    with torch.no_grad():
        own, product = head(hidden), torch.nn.functional.linear(hidden, head.weight, head.bias)
    if not isinstance(own, torch.Tensor) or own.shape != product.shape or not torch.allclose(own, product):
        raise ValueError(
            f"the output head gives something else than hidden states times its weight: a hook or a forward set on it changes "
            f"them. {NEEDED[0].upper()}{NEEDED[1:]}, and that would be lost. Valid: a head without it"
        )


def _same(tensor: torch.Tensor, right: torch.Tensor) -> bool:
    """Tells whether these are the numbers, whatever dtype they were cast to."""
    return tensor.shape == right.shape and torch.equal(tensor, right.to(tensor.dtype))


@contextmanager
def _training(model: torch.nn.Module, base: torch.nn.Module) -> Iterator[None]:
    """Sets training mode for all but the base model: dropout before the head counts too."""
    inside = {id(module) for module in base.modules()}
    changed = [module for module in model.modules() if id(module) not in inside and not module.training]
    for module in changed:
        module.training = True
    try:
        yield
    finally:
        for module in changed:
            module.training = False
