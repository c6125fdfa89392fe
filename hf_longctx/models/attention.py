"""The attention of patched models: attention over a layout, or transformers' sdpa where there is no layout.

A model reaches `longctx_attention_forward` in three ways:

- `hf_longctx.patch_model(model)` makes its attention class one of ours (rope.py for Llama, Mistral and Mixtral;
  families/bloom.py, families/mpt.py), which calls it with or without a layout: the layout travels as a keyword of the
  model's forward, `model(..., layout=layout, exchange=exchange)`;
- for other models, `patch_model` leaves the attention class as it is, and the layout is in the attention mask
  (layout_mask.py);
- `from_pretrained(path, attn_implementation="longctx")` has transformers' own attention class call it (registered.py):
  without a layout only.

In each, the layout is an argument of every decoder layer, so that it survives the recomputation of activation checkpointing.
Shapes: B sequences, T tokens, Hq and Hkv heads, D head dimension of queries and keys, Dv of values.
"""

import functools
import inspect
import sys
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_longctx.attention.earlier import EarlierChunks
from hf_longctx.attention.engine import layout_attention
from hf_longctx.attention.exchange import Exchange, own_rank
from hf_longctx.attention.kept import KeptAttention
from hf_longctx.layouts.layout import Layout
from hf_longctx.models.layout_mask import CollectedKeys, LayoutCall, LayoutMask, Pattern, current_call
from hf_longctx.models.rope_scaling import SCALINGS, UNSAFE_ROPE_TYPES

NAME = "longctx"
"""The attention implementation's name, for `attn_implementation=`."""
NAME_OF_EAGER = "longctx_eager"
"""The name for models that `patch_model` knows and transformers' sdpa does not: without a layout they run eager attention."""

OF_THE_CALL = frozenset(
    {
        "cache_position",
        "deterministic",
        "ignore_index",
        "labels",
        "logits_to_keep",
        "mm_token_type_ids",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "return_dict",
        "shift_labels",
        "token_type_ids",
        "use_cache",
    }
)
"""Keywords that modeling code passes on from the model's call, and that change no score in any implementation: sdpa does not read
them either. Read off transformers 5.17 to 5.23: what it names in calls of attention functions, `TransformersKwargs`, what its
losses take of the same keywords, and what 189 model types were seen to pass on."""
OF_MASKS = frozenset({"cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q", "seq_idx"})
"""Boundaries of packed documents: without a layout sdpa's mask says the same, which transformers takes from the positions."""
OF_SDPA = OF_MASKS | {
    name
    for name, parameter in inspect.signature(sdpa_attention_forward).parameters.items()
    if parameter.kind != parameter.VAR_KEYWORD
}
"""Keywords that are right without a layout: those, and what this transformers' sdpa names. An older one would swallow
`position_bias` and `cache`."""


def longctx_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    alibi_slopes: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    layout: Layout | None = None,
    exchange: Exchange | None = None,
    collect: CollectedKeys | None = None,
    keep_attention: KeptAttention | None = None,
    earlier: EarlierChunks | None = None,
    layout_positions: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface.

    Args:
        module: the attention layer; its config, layer_idx and longctx_* settings are read.
        query: [B, Hq, T, D] after RoPE; with a layout B is 1 and T this rank's tokens.
        key: [B, Hkv, T, D]
        value: [B, Hkv, T, Dv]
        attention_mask: a LayoutMask, which holds the layout and what follows; refused with any other layout; without one, as for
            sdpa.
        sliding_window: with a layout, a query at position i sees positions i - sliding_window < j <= i; without one
            the mask says so, as a LayoutMask does.
        alibi_slopes: float32 [Hq], with a layout only: a query at position i sees position j with slope * (i - j)
            taken from its score.
        layout: which rank holds which tokens; None for an ordinary call.
        exchange: needed where the layout spans several ranks.
        collect, keep_attention, earlier: see LayoutCall.
        layout_positions: with a layout, int64 [1, T], the positions that the base model was given. A model that makes others of
            them is refused; where position_ids is the same tensor, nothing is compared.
        kwargs: with a LayoutMask, `softcap` (a number) and `s_aux` (sinks, [Hq]) are computed.

    Returns:
        ([B, T, Hq, Dv], None)

    Raises:
        ValueError: something that a layout cannot honour: a mask, a cache, dropout, RoPE scaling that depends on the
            call, or a layer that is not patched; or, with or without one, a keyword that may change the scores and is not
            known, such as an index of keys. Says which, and what would be valid.
    """
    if isinstance(attention_mask, LayoutMask):
        pattern = _usable_pattern(module, attention_mask)
        understood = {name: kwargs.pop(name, None) for name in ("softcap", "s_aux")}
        _refuse_unknown(attention_mask.call.layout, kwargs)
        features = {"window": pattern.window, "chunk": pattern.chunk, "softcap": understood["softcap"]}
        return _over_layout(
            module,
            (query, key, value),
            attention_mask.call,
            dropout,
            position_ids,
            scale=scaling,
            sinks=understood["s_aux"],
            **features,
        )
    refuse_lost_layout(module)
    if layout is not None and not isinstance(module, LayoutAttention):
        refuse_layout(module)
    _refuse_unknown(layout, kwargs if layout is not None else kwargs | {"alibi_slopes": alibi_slopes})
    if layout is None:
        # loss/head.py passes an empty mask with a layout, and nobody else does.
        if attention_mask is not None and not attention_mask.numel():
            raise ValueError(
                f"a layout has not reached {type(module).__name__}: the forward of a module above it passes no keywords on, and "
                "the row would be one document. Valid: classes that hand **kwargs down to every layer, as LlamaModel does"
            )
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            position_ids=position_ids,
            **kwargs,
        )
    if attention_mask is not None and attention_mask.numel():
        raise ValueError(
            f"an attention mask (its shape here is {tuple(attention_mask.shape)}) came with a layout: documents in a "
            "layout are not padded and need no mask. Remove attention_mask from the call; if you passed none, the base model "
            "was called, for which transformers builds one: call the causal language model"
        )
    call = LayoutCall(
        layout,
        exchange,
        kernel=module.longctx_kernel,
        keep_last_slice=module.longctx_keep_last_slice,
        positions=layout_positions,
        collect=collect,
        keep_attention=keep_attention,
        earlier=earlier,
    )
    return _over_layout(
        module,
        (query, key, value),
        call,
        dropout,
        position_ids,
        scale=scaling,
        window=sliding_window,
        alibi_slopes=alibi_slopes,
    )


def longctx_or_eager_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> Any:
    """Attention over a layout where the mask holds one, and otherwise the eager attention of the layer's own file."""
    if isinstance(attention_mask, LayoutMask):
        return longctx_attention_forward(module, query, key, value, attention_mask, **kwargs)
    refuse_lost_layout(module)
    return sys.modules[type(module).__module__].eager_attention_forward(
        module, query, key, value, attention_mask, **kwargs
    )


def runs_sdpa(model: Any) -> bool:
    """Tell whether torch's scaled_dot_product_attention computes what a model's layers mean. It caps no scores; transformers says
    so of Gemma 2 from 5.21 on."""
    return model._supports_sdpa and getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is None


def refuse_lost_layout(module: Any) -> None:
    """Raises ValueError where a call over a layout runs, and an attention layer has not received its mask."""
    if current_call() is not None:
        raise ValueError(
            f"the layout has not reached {type(module).__name__}: its mask is made without transformers' masking_utils, or "
            "changed on the way, and the row would be one document. Valid: a model that hands the masks of masking_utils to its "
            "layers"
        )


def _usable_pattern(module: Any, mask: LayoutMask) -> Pattern:
    """Return what a layer's mask means. Raises ValueError if that is nothing that is computed."""
    if mask.pattern is None:
        raise ValueError(f"{type(module).__name__} has a mask that cannot be used over a layout: {mask.unusable}")
    return mask.pattern


def _over_layout(
    module: Any,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    call: LayoutCall,
    dropout: float,
    position_ids: torch.Tensor | None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """Query, key and value as `longctx_attention_forward` has them, and features of `layout_attention` (None: without it)."""
    query, key, _ = tensors
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{key.shape[2]} keys for {query.shape[2]} queries: a cache came with a layout. A layout holds whole documents "
            "and uses no cache: remove past_key_values from the call, or remove the layout to generate"
        )
    refuse_dropout("attention_dropout", dropout)
    refuse_unsafe_rope(getattr(module, "config", None))
    if call.positions is not None and position_ids is not None and position_ids is not call.positions:
        check_positions(position_ids, call.layout, call.exchange)
    call.seen.append(type(module).__name__)
    q, k, v = (x[0].transpose(0, 1) for x in tensors)
    if torch.is_autocast_enabled(q.device.type):  # as sdpa does: RoPE has made query and key float32 again
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    if call.collect is not None:
        call.collect.of_layer[module.layer_idx] = (k, v)
    again = None
    if call.earlier is not None:
        before = call.layout.context_tokens(own_rank(call.layout, call.exchange))
        k, v = call.earlier.extend(module.layer_idx, before, k, v)
        again = functools.partial(call.earlier.again, module.layer_idx, before)
    out = layout_attention(
        q,
        k,
        v,
        call.layout,
        call.exchange,
        kernel=call.kernel,
        keep_last_slice=call.keep_last_slice,
        keep=call.keep_attention,
        again=again,
        **{name: feature for name, feature in features.items() if feature is not None},
    )
    return out.unsqueeze(0), None


def _refuse_unknown(layout: Layout | None, settings: dict[str, Any]) -> None:
    """Raises ValueError for keywords that may change the scores in a way that is not computed here."""
    known = OF_THE_CALL if layout is not None else OF_THE_CALL | OF_SDPA
    for name, value in settings.items():
        if value is None or name in known or (name == "is_causal" and value is True):
            continue
        shown = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"={str(value)[:40]}"
        where = "with a layout" if layout is not None else "without a layout"
        raise ValueError(
            f"the attention call has {name}{shown}, which {NAME} attention does not know {where}: it would be ignored, and other "
            "scores computed than the model means. Valid: None (a model or a call without it), or attn_implementation='eager' "
            "and no layout"
        )


def is_patched(model: torch.nn.Module) -> bool:
    """Tell whether `patch_model` has been here."""
    return any(isinstance(module, LayoutAttention) or carries_layouts(module) for module in model.modules())


def carries_layouts(module: Any) -> bool:
    """Tell whether this is a causal language model whose masks carry layouts: `patch_model` has made it one."""
    return "longctx_kernel" in module.__dict__ and not isinstance(module, LayoutAttention)


def refuse_layout(module: torch.nn.Module) -> None:
    """Raises ValueError: a layout came to a model, or an attention layer, that is not patched."""
    raise ValueError(
        f"a layout came to {type(module).__name__}, which is not patched: its documents would not be kept apart. Call "
        "hf_longctx.patch_model(model) first, or load it with hf_longctx.from_pretrained"
    )


def refuse_other_implementation(model: Any) -> None:
    """Raises ValueError if a model whose masks carry layouts has been given another attention since it was patched: its layers
    would take a row for one document."""
    name = model.config.get_text_config(decoder=True)._attn_implementation
    if name != model.longctx_implementation:
        raise ValueError(
            f"attn_implementation={name!r} has been set since {type(model).__name__} was patched, and knows no layouts: the "
            "documents of a row would not be kept apart. Call hf_longctx.patch_model(model) again"
        )


def refuse_dropout(name: str, dropout: float) -> None:
    """Raises ValueError if attention probabilities would be dropped; `name` is the field of the config that says so."""
    if dropout:
        raise ValueError(
            f"{name}={dropout}: dropping attention probabilities would depend on how a document is split over ranks. Set "
            f"config.{name} = 0.0, in YAML model.config.{name}: 0.0"
        )


def refuse_unsafe_rope(config: Any) -> None:
    """Raises ValueError if rotary embeddings would differ between the ranks that hold a document."""
    scaling = getattr(config, "rope_parameters", None) or {}
    rope_types = {p.get("rope_type") for p in (scaling, *scaling.values()) if isinstance(p, dict)}
    if unsafe := rope_types & UNSAFE_ROPE_TYPES:
        raise ValueError(
            f"rope_type={unsafe.pop()!r} scales by the largest position of the call, which differs between the ranks that "
            f"hold a document (measured: cosine error 2.0 on the rank with the first half). Valid: default, {', '.join(SCALINGS)}"
        )


def check_positions(position_ids: torch.Tensor, layout: Layout, exchange: Exchange | None) -> None:
    """Raises ValueError unless position_ids [1, T] are the positions of this rank's tokens in their documents."""
    rank = own_rank(layout, exchange)
    expected = torch.from_numpy(layout.positions(rank)).to(position_ids.device)
    if position_ids.shape[-1] != len(expected) or not torch.equal(position_ids[0], expected):
        raise ValueError(
            f"position_ids {position_ids[0, :8].tolist()}... are not the positions of this rank's tokens in their documents, "
            f"{expected[:8].tolist()}...: leave position_ids out, and they are derived from the layout"
        )


class LayoutAttention(torch.nn.Module):
    """The common part of our attention classes: settings that `patch_model` writes and `longctx_attention_forward`
    reads."""

    longctx_kernel: str = "auto"
    """Name of the kernel; see `hf_longctx.attention.kernels.select_kernel`."""
    longctx_keep_last_slice: bool = False
    """Whether backward starts from the slice of keys and values that forward received last, kept until then."""
    longctx_liger: bool = False
    """Whether Liger's kernels may rotate queries and keys."""

    @staticmethod
    def check_config(config: Any) -> None:
        """Raises ValueError if a model's settings cannot be honoured over a layout."""
        refuse_dropout("attention_dropout", getattr(config, "attention_dropout", 0.0))
