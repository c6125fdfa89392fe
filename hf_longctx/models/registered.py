"""Gives attn_implementation="longctx" its meaning for a model of transformers' own classes: sdpa's attention, until
`patch_model` has made it a model that runs over layouts.

transformers takes every registered name for every class. What would not be sdpa's attention is refused here:

    loading, set_attn_implementation     classes that transformers refuses for "sdpa", and classes that look their attention up in
                                         a table of their own
    the first mask                       BLOOM and MPT, which `patch_model` helps and this name does not
    model(..., layout=...)               any model that is not patched, also one whose layers would drop the keyword
    each attention call                  keywords that sdpa does not honour (models/attention.py)

Importing this module registers the name. Other models stay as they are: the check of a name that transformers makes is
followed by ours where the name is "longctx".
"""

import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask, sdpa_mask

from hf_longctx.models.attention import (
    NAME,
    NAME_OF_EAGER,
    is_patched,
    longctx_attention_forward,
    longctx_or_eager_attention,
    refuse_layout,
    runs_sdpa,
)
from hf_longctx.models.layout_mask import current_call, layout_mask, leave_packing_to_layouts

EAGER_MODELS = frozenset({"bloom", "mpt"})
"""Model types that `patch_model` knows, and whose attention classes call no function by name: they add the eager implementation's
mask themselves."""


def register() -> None:
    """Makes "longctx" known to transformers, with what is refused under this name."""
    AttentionInterface.register(NAME, longctx_attention_forward)
    AttentionMaskInterface.register(NAME, _mask)
    AttentionInterface.register(NAME_OF_EAGER, longctx_or_eager_attention)
    AttentionMaskInterface.register(NAME_OF_EAGER, _mask_or_eager)
    leave_packing_to_layouts()
    check_name = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(check_name)
    def check_name_and_class(model: Any, requested_attention: str | None, *args: Any, **kwargs: Any) -> str:
        if requested_attention == NAME:
            _refuse_class(model)
            _guard(model)
        return check_name(model, requested_attention, *args, **kwargs)

    PreTrainedModel.get_correct_attn_implementation = check_name_and_class  # type: ignore[assignment, method-assign]


def _refuse_class(model: Any) -> None:
    """Raises ValueError for a model whose class would not run sdpa's attention under our name. Called before it has layers."""
    cls = type(model)
    if model.config.model_type in EAGER_MODELS:
        return
    if not runs_sdpa(model):
        raise ValueError(
            f"attn_implementation={NAME!r} means nothing to {cls.__name__}: without a layout it is torch's scaled_dot_product_"
            "attention, which this class does not support (_supports_sdpa is False, or scores are capped), and "
            "hf_longctx has no layouts for it. Valid: load it without attn_implementation, or with 'eager'"
        )
    module = sys.modules.get(cls.__module__)
    for name, table in vars(module).items() if module is not None else ():
        if name.endswith("ATTENTION_CLASSES") and isinstance(table, Mapping) and NAME not in table:
            raise ValueError(
                f"attn_implementation={NAME!r} means nothing to {cls.__name__}: its attention classes are looked up in a table "
                f"of its own ({name}). Valid: load it without attn_implementation, or with one of {', '.join(table)}"
            )


def _guard(model: torch.nn.Module) -> None:
    if _refuse_layout_of_call not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_refuse_layout_of_call, with_kwargs=True)


def _refuse_layout_of_call(model: torch.nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuses a layout before the forward: it reaches no attention where a layer passes no keywords on, or has none."""
    if kwargs.get("layout") is not None and not is_patched(model):
        refuse_layout(model)


def _mask(*args: Any, config: Any, **kwargs: Any) -> torch.Tensor | None:
    """transformers' mask interface: a LayoutMask over a layout, sdpa's mask otherwise. Raises ValueError for a model that would
    take sdpa's mask for eager's: it would not be causal.
    """
    if (call := current_call()) is not None:
        return layout_mask(call, **kwargs)
    if config.model_type in EAGER_MODELS:
        raise ValueError(
            f"attn_implementation={NAME!r} means nothing to a {config.model_type} model: its attention classes call no "
            "function by name. Load it with hf_longctx.from_pretrained, or call hf_longctx.patch_model(model)"
        )
    return sdpa_mask(*args, config=config, **kwargs)


def _mask_or_eager(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """transformers' mask interface: a LayoutMask over a layout, that of eager attention otherwise."""
    if (call := current_call()) is not None:
        return layout_mask(call, **kwargs)
    return eager_mask(*args, **kwargs)


register()
