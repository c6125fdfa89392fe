"""The prompt of a model that needs documents whole: its own forward reads all of it on one rank, and makes its own cache.

Nothing is sent. Shapes: T tokens, V vocabulary."""

import inspect
from typing import Any

import torch


class NoCache(ValueError):
    """A class makes no cache of a prompt, so that nothing can go on from one."""


def read_whole(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return the logits after a prompt of ids [T], [V], and its cache.

    Raises:
        NoCache: the class returns none, or fails as it makes one.
    """
    known = inspect.signature(model.forward).parameters
    keywords: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
    name = type(model).__name__
    try:
        output = model(input_ids=ids[None].to(model.device), use_cache=True, **keywords)
    except AttributeError as error:  # transformers' cache asks a configuration for what this one calls otherwise
        raise NoCache(
            f"{name} cannot make a cache of a prompt (AttributeError: {error}). Valid: score, which needs none, or "
            "model.generate(..., use_cache=False)"
        ) from error
    cache = getattr(output, "past_key_values", None)
    cache = getattr(output, "cache_params", None) if cache is None else cache
    if cache is None:
        raise NoCache(
            f"{name} returns no cache with use_cache=True, so that nothing can go on from the prompt. Valid: a class with "
            "past_key_values or cache_params, or generate from the prompt itself, with use_cache=False"
        )
    return output.logits[0, -1], cache
