"""The load-balancing loss of mixtures of experts: whether a model's configuration asks for it, and how it is weighted.

A class that has this loss takes `output_router_logits` in its forward. Without it, the class asks its configuration; that of a
model of several parts (vision and language) asks the part of its language model, and ignores a field of the same name outside.
"""

from collections.abc import Callable, Collection
from functools import cache
from inspect import signature
from typing import Any

from hf_longctx.models.wrappers import language_model_of

FIELD = "output_router_logits"
WEIGHTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Fields of the loss's weight, of all families and of JetMoE."""


def has_field(config: Any) -> bool:
    """Tell whether a configuration, or its language model's, may ask for router logits."""
    return hasattr(config.get_text_config(decoder=True), FIELD)


def asks_for_balance(model: Any) -> bool:
    """Tell whether a plain model of this class and configuration would add a load-balancing loss to its own."""
    config = model.config.get_text_config(decoder=True)
    return bool(getattr(config, FIELD, False)) and takes_field(model)


def takes_field(model: Any) -> bool:
    """Tell whether a model's class may add a load-balancing loss. PEFT's wrappers, which take anything, are looked through."""
    bare = language_model_of(model)
    return FIELD in _parameters(type(bare).forward)


@cache
def _parameters(forward: Callable[..., Any]) -> Collection[str]:
    return frozenset(signature(forward).parameters)


def balance_settings(model: Any) -> tuple[float | None, int | None]:
    """Return the weight of the load-balancing loss and the experts of a token; None where the configuration has no such field."""
    config = model.config.get_text_config(decoder=True)
    weights = [weight for name in WEIGHTS if (weight := getattr(config, name, None)) is not None]
    return next(iter(weights), None), getattr(config, "num_experts_per_tok", None)
