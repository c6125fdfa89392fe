"""Checks of a model of any class before it runs over a layout: whether it has the parts that a layout's forward calls.

Whether it is then computed exactly is not for this file: the certificate runs it (hf_longctx/certificate).
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils import logging

from hf_longctx.models.attention import refuse_unsafe_rope
from hf_longctx.models.loss.head_check import OtherLoss, needs_own_forward, refuse_loss_of_its_own
from hf_longctx.models.loss.own_logits import hidden_dtype, hidden_width, own_output

logger = logging.get_logger(__name__)


def refuse_no_language_model(model: Any) -> None:
    """Raises ValueError for what is no causal language model of transformers, or rotates by the largest position of a call."""
    name = type(model).__name__
    if getattr(model, "longctx_cut", None) is not None:
        return
    if not isinstance(model, PreTrainedModel) or model.get_output_embeddings() is None:
        raise ValueError(
            f"{name} is no causal language model of transformers with an output head: a layout has no way into it. Valid: a "
            "model of AutoModelForCausalLM"
        )
    refuse_unsafe_rope(model.config.get_text_config(decoder=True))


def refuse_unreachable(model: Any) -> None:
    """Raises ValueError, naming what is missing, if a layout cannot reach a causal language model's attention in its masks.
    Notes which part of the model turns tokens into hidden states (`base_of`)."""
    if getattr(model, "longctx_cut", None) is None:
        find_base(model)
        refuse_random_attention(model.config)


def needs_own_logits(model: Any) -> bool:
    """Tell whether the loss of a model that runs documents alone needs logits of its class's own forward. Notes its base model,
    which is the model itself where no part of it gives what its forward makes logits of.

    Raises:
        OtherLoss: its loss is not the cross-entropy of hidden states times the head's weight, which would be computed instead.
    """
    try:
        find_base(model)
        return needs_own_forward(model)
    except OtherLoss:
        raise
    except ValueError:
        model.longctx_base = ""
        try:
            refuse_loss_of_its_own(model)
        except OtherLoss as error:
            logger.warning_once(
                f"the next token is learned and nothing else, by the cross-entropy of the logits: {error}"
            )
        return True


def refuse_random_attention(config: Any) -> None:
    """Raises ValueError for attention probabilities that are dropped and experts that are drawn, which would depend on how
    documents are spread over ranks, and for layers that are: a rank that skips one leaves others waiting for its keys. A tiny
    copy has none of them.

    config: of the whole model, whose language model is looked at.
    """
    text = config.get_text_config(decoder=True)
    for name, value in layers_drawn(text):
        raise ValueError(
            f"{name}={value}: each rank would draw the layers that it skips, and ranks that hold a document together must "
            f"run the same ones. {_set_to_zero(config, text, name)}"
        )
    for name, value in _attention_drawn(text):
        raise ValueError(
            f"{name}={value}: what is drawn at random in attention or in a router depends on how a document is split over "
            f"ranks. {_set_to_zero(config, text, name)}"
        )


def _set_to_zero(config: Any, text: Any, name: str) -> str:
    """Say how a field of a language model is set to 0, in Python and in YAML, wherever in the whole model's configuration."""
    part = next((f"{part}." for part, value in vars(config).items() if value is text), "")
    return f"Set config.{part}{name} = 0.0, in YAML model.config.{part}{name}: 0.0"


def drop_nothing(config: Any) -> None:
    """Set the probabilities by which a language model drops attention and layers to 0, as they are in evaluation mode. Noise of
    routers stays: PhiMoE weighs its experts by it in evaluation too."""
    dropped = [(name, value) for name, value in _attention_drawn(config) if "jitter" not in name]
    for name, _ in [*layers_drawn(config), *dropped]:
        *parts, field = name.split(".")
        setattr(reduce(getattr, parts, config), field, 0.0)


def _attention_drawn(config: Any) -> Iterator[tuple[str, float]]:
    """Yield the fields of a language model's configuration by which attention, or what a router sees, is drawn at random."""
    for name, value in _numbers(config.to_dict()):
        attention = ("attention" in name or "attn" in name) and "drop" in name
        if (attention or "jitter" in name) and value > 0:
            yield name, value


def layers_drawn(config: Any) -> Iterator[tuple[str, float]]:
    """Yield the fields of a language model's configuration by which layers are skipped at random, where they are above 0."""
    for name, value in _numbers(config.to_dict()):
        if "layerdrop" in name and "encoder" not in name and value > 0:
            yield name, value


def _numbers(fields: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the fields that are numbers, those of configurations inside too: DBRX has ffn_config.moe_jitter_eps."""
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", value


def find_base(model: Any) -> None:
    """Notes the part whose output the class's forward turns into logits. Raises ValueError if there is none."""
    widths = (hidden_width(model), getattr(model.config.get_text_config(decoder=True), "hidden_size", None))
    names = {id(part): part_name for part_name, part in model.named_modules()}
    candidates = (model.base_model, model.get_decoder(), getattr(model, "model", None))
    problems = []
    head = _head_in_parts(model)
    noted = ("longctx_base", "longctx_hidden_width")
    parts = {id(part): part for part in candidates if part is not None and part is not model}.values()
    for part, width in itertools.product(parts, dict.fromkeys(width for width in widths if width)):
        model.__dict__ |= dict(zip(noted, (names[id(part)], width)))
        try:
            with torch.no_grad():
                own_output(model, torch.zeros(1, 2, width, dtype=hidden_dtype(model), device=model.device), head)
            return
        except Exception as error:  # of modeling code that is given something else than it expects
            problems.append(f"{names[id(part)]}: {type(error).__name__}: {str(error)[:200]}")
    for name in noted:
        model.__dict__.pop(name, None)
    reason = "; ".join(problems) or "it has no base model: base_model, get_decoder() and .model are none, or itself"
    raise ValueError(
        f"no part of {type(model).__name__} gives hidden states that its forward makes logits of ({reason}). "
        "Valid: a causal language model whose forward calls its base model, and then a head"
    )


def _head_in_parts(model: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Return what stands for an output head whose weight is in parts, which only a forward of the whole model may call: it takes
    hidden states of the head's width alone. None: it can be called."""
    weight = getattr(model.get_output_embeddings(), "weight", None)
    if not isinstance(weight, DTensor):
        return None

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[-1] != weight.shape[1]:
            raise ValueError(f"the output head takes hidden states of {weight.shape[1]}, not {hidden.shape[-1]}")
        return hidden.new_zeros(*hidden.shape[:-1], weight.shape[0])

    return logits
