"""The attention that patched and registered models share: attention over a layout, or transformers' sdpa where there
is no layout.

Importing this module registers it under the name "longctx", which changes nothing for other models; after `import
hf_longctx` (registration.py), importing transformers' models is enough. A model reaches it in two ways:

- registration: `from_pretrained(path, attn_implementation="longctx")`; transformers' own attention class calls
  `longctx_attention_forward` after RoPE;
- patching: `hf_longctx.patch_model(model)`; the attention class is one of ours (rope.py for Llama, Mistral and
  Mixtral; bloom.py; mpt.py), which calls the same function. BLOOM and MPT know this way only.

The layout travels as a keyword of the model's forward, `model(..., layout=layout, exchange=exchange)`, never through
a global; it survives the recomputation of activation checkpointing. Shapes: B sequences, T tokens, Hq and Hkv heads,
D head dimension.
"""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_longctx.attention.earlier import EarlierChunks
from hf_longctx.attention.engine import layout_attention
from hf_longctx.attention.exchange import Exchange, own_rank
from hf_longctx.attention.kept import KeptAttention
from hf_longctx.layout import Layout
from hf_longctx.models.rope_scaling import SCALINGS, UNSAFE_ROPE_TYPES

NAME = "longctx"
"""The attention implementation's name, for `attn_implementation=`."""

EAGER_MODELS = frozenset({"bloom", "mpt"})
"""Model types whose attention classes call no function by name, and add the eager implementation's mask themselves."""


def register() -> None:
    """Makes "longctx" known to transformers. Masks are sdpa's, and are only built where there is no layout."""
    AttentionInterface.register(NAME, longctx_attention_forward)
    AttentionMaskInterface.register(NAME, _mask)


def _mask(*args: Any, config: Any, **kwargs: Any) -> torch.Tensor | None:
    """transformers' mask interface. Raises ValueError for a model that would take sdpa's mask for eager's: it would
    not be causal.
    """
    if config.model_type in EAGER_MODELS:
        raise ValueError(
            f"attn_implementation={NAME!r} means nothing to a {config.model_type} model: its attention classes call no "
            "function by name. Load it with hf_longctx.from_pretrained, or call hf_longctx.patch_model(model)"
        )
    return sdpa_mask(*args, config=config, **kwargs)


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
    collect: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None,
    keep_attention: KeptAttention | None = None,
    earlier: EarlierChunks | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface.

    Args:
        module: the attention layer; its config, layer_idx and longctx_* settings are read.
        query: [B, Hq, T, D] after RoPE; with a layout B is 1 and T this rank's tokens.
        key: [B, Hkv, T, D]
        value: [B, Hkv, T, D]
        attention_mask: refused with a layout; without one, as for sdpa.
        sliding_window: with a layout, a query at position i sees positions i - sliding_window < j <= i; without one
            the mask says so.
        alibi_slopes: float32 [Hq], with a layout only: a query at position i sees position j with slope * (i - j)
            taken from its score.
        layout: which rank holds which tokens; None for an ordinary call.
        exchange: needed where the layout spans several ranks.
        collect: with a layout, receives this shard's keys and values of the layer, both [T, Hkv, D], under its
            layer_idx.
        keep_attention: with a layout and activation checkpointing, holds the output for the layer's recomputation.
        earlier: of a chunk of a document, the keys and values of the chunks before it; keeps this one's.

    Returns:
        ([B, T, Hq, D], None)

    Raises:
        ValueError: something that a layout cannot honour: a mask, a cache, dropout, RoPE scaling that depends on the
            call, wrong positions, a learned position bias; or, with or without one, soft-capping or attention sinks.
            Says which, and what would be valid.
    """
    _refuse_other_scores(layout, kwargs)
    if layout is None:
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
            "layout are not padded and need no mask. Remove attention_mask from the call; if you passed none, "
            "transformers built one from the positions of packed documents: call hf_longctx.patch_model(model) first"
        )
    if key.shape[2] != query.shape[2]:
        raise ValueError(
            f"{key.shape[2]} keys for {query.shape[2]} queries: a cache came with a layout. A layout holds whole documents "
            "and uses no cache: remove past_key_values from the call, or remove the layout to generate"
        )
    refuse_dropout("attention_dropout", dropout)
    refuse_unsafe_rope(getattr(module, "config", None))
    if position_ids is not None and getattr(module, "layer_idx", None) == 0 and not isinstance(module, LayoutAttention):
        check_positions(position_ids, layout, exchange)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if torch.is_autocast_enabled(q.device.type):  # as sdpa does: RoPE has made query and key float32 again
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    if collect is not None:
        collect[module.layer_idx] = (k, v)
    if earlier is not None:
        k, v = earlier.extend(module.layer_idx, layout.context_tokens(own_rank(layout, exchange)), k, v)
    out = layout_attention(
        q,
        k,
        v,
        layout,
        exchange,
        scale=scaling,
        kernel=getattr(module, "longctx_kernel", "auto"),
        window=sliding_window,
        alibi_slopes=alibi_slopes,
        keep_last_slice=getattr(module, "longctx_keep_last_slice", False),
        keep=keep_attention,
    )
    return out.unsqueeze(0), None


def _refuse_other_scores(layout: Layout | None, settings: dict[str, Any]) -> None:
    """Raises ValueError for keywords that change the scores in a way that no kernel here computes."""
    if (cap := settings.get("softcap")) is not None:
        raise ValueError(
            f"softcap={cap}: {NAME} attention does not cap scores. Valid: None (config.attn_logit_softcapping = None, which "
            "is another model), or attn_implementation='eager' and no layout"
        )
    if (sinks := settings.get("s_aux")) is not None:
        raise ValueError(
            f"s_aux of shape {tuple(sinks.shape)}: {NAME} attention has no attention sinks. Valid: None (a model without "
            "sinks), or attn_implementation='eager' and no layout"
        )
    if layout is not None and (bias := settings.get("position_bias")) is not None:
        raise ValueError(
            f"position_bias of shape {tuple(bias.shape)} came with a layout, which holds no scores to add it to. Valid: "
            "None (a model with RoPE or ALiBi positions)"
        )


def refuse_dropout(name: str, dropout: float) -> None:
    """Raises ValueError if attention probabilities would be dropped; `name` is the field of the config that says so."""
    if dropout:
        raise ValueError(
            f"{name}={dropout}: dropping attention probabilities would depend on how a document is split over ranks. Set "
            f"config.{name} = 0.0"
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
            f"{expected[:8].tolist()}...: pass position_ids=torch.from_numpy(layout.positions(rank))[None], or call "
            "hf_longctx.patch_model(model), which derives them from the layout"
        )


class LayoutAttention(torch.nn.Module):
    """What our attention classes have in common: settings that `patch_model` writes and `longctx_attention_forward`
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


register()
