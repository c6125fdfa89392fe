"""The attention that patched and registered models share: attention over a layout, or transformers' sdpa where there
is no layout.

`import hf_longctx` registers it under the name "longctx", which changes nothing for other models. A model reaches it
in two ways:

- registration: `from_pretrained(path, attn_implementation="longctx")`; transformers' own attention class calls
  `longctx_attention_forward` after RoPE;
- patching: `hf_longctx.patch_model(model)`; the attention class is one of ours (llama.py, mixtral.py), which calls
  the same function.

The layout travels as a keyword of the model's forward, `model(..., layout=layout, exchange=exchange)`, never through
a global; it survives the recomputation of activation checkpointing. Shapes: B sequences, T tokens, Hq and Hkv heads,
D head dimension.
"""

from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_longctx.attention.engine import layout_attention
from hf_longctx.attention.exchange import Exchange
from hf_longctx.layout import Layout

NAME = "longctx"
"""The attention implementation's name, for `attn_implementation=`."""

UNSAFE_ROPE_TYPES = frozenset({"dynamic", "longrope"})
"""RoPE scalings that depend on the largest position of the *call*: ranks that hold different parts of a document
would disagree."""


def register() -> None:
    """Makes "longctx" known to transformers. Masks are sdpa's, and are only built where there is no layout."""
    AttentionInterface.register(NAME, longctx_attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def longctx_attention_forward(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    position_ids: torch.Tensor | None = None,
    layout: Layout | None = None,
    exchange: Exchange | None = None,
    collect: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface.

    Args:
        module: the attention layer; its config, layer_idx and longctx_* settings are read.
        query: [B, Hq, T, D] after RoPE; with a layout B is 1 and T this rank's tokens.
        key: [B, Hkv, T, D]
        value: [B, Hkv, T, D]
        attention_mask: refused with a layout; without one, as for sdpa.
        layout: which rank holds which tokens; None for an ordinary call.
        exchange: needed where the layout spans several ranks.
        collect: with a layout, receives this shard's keys and values of the layer, both [T, Hkv, D], under its
            layer_idx.

    Returns:
        ([B, T, Hq, D], None)

    Raises:
        ValueError: something that a layout cannot honour: a mask, a cache, dropout, a window shorter than a document,
            RoPE scaling
            that depends on the call, wrong positions. Says which, and what would be valid.
    """
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
    check_layout_supported(module.config, max(layout.doc_lengths.values()), dropout, sliding_window)
    if position_ids is not None and getattr(module, "layer_idx", None) == 0 and not isinstance(module, LayoutAttention):
        check_positions(position_ids, layout, exchange)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if torch.is_autocast_enabled(q.device.type):  # as sdpa does: RoPE has made query and key float32 again
        q, k, v = (x.to(torch.get_autocast_dtype(q.device.type)) for x in (q, k, v))
    if collect is not None:
        collect[module.layer_idx] = (k, v)
    out = layout_attention(
        q,
        k,
        v,
        layout,
        exchange,
        scale=scaling,
        kernel=getattr(module, "longctx_kernel", "auto"),
    )
    return out.unsqueeze(0), None


def check_layout_supported(config: Any, longest: int, dropout: float, sliding_window: int | None) -> None:
    """Raises ValueError if a model's settings cannot be honoured over layouts of documents of up to `longest` tokens."""
    if dropout:
        raise ValueError(
            f"attention_dropout={dropout}: dropping attention probabilities would depend on how a document is split over "
            "ranks. Set config.attention_dropout = 0.0"
        )
    scaling = getattr(config, "rope_parameters", None) or {}
    rope_types = {p.get("rope_type") for p in (scaling, *scaling.values()) if isinstance(p, dict)}
    if unsafe := rope_types & UNSAFE_ROPE_TYPES:
        raise ValueError(
            f"rope_type={unsafe.pop()!r} scales by the largest position of the call, which differs between the ranks that "
            "hold a document (measured: cosine error 2.0 on the rank with the first half). Valid: default, linear, llama3, "
            "yarn"
        )
    if sliding_window is not None and longest > sliding_window:
        raise ValueError(
            f"sliding_window={sliding_window} is shorter than the longest document ({longest} tokens), and "
            "windows are not supported over a layout. Valid: config.sliding_window = None (full attention), or documents of "
            f"at most {sliding_window} tokens"
        )


def check_positions(position_ids: torch.Tensor, layout: Layout, exchange: Exchange | None) -> None:
    """Raises ValueError unless position_ids [1, T] are the positions of this rank's tokens in their documents."""
    rank = exchange.rank if exchange is not None else layout.ranks[0]
    expected = torch.from_numpy(layout.positions(rank)).to(position_ids.device)
    if position_ids.shape[-1] != len(expected) or not torch.equal(position_ids[0], expected):
        raise ValueError(
            f"position_ids {position_ids[0, :8].tolist()}... are not the positions of this rank's tokens in their documents, "
            f"{expected[:8].tolist()}...: pass position_ids=torch.from_numpy(layout.positions(rank))[None], or call "
            "hf_longctx.patch_model(model), which derives them from the layout"
        )


class LayoutAttention(torch.nn.Module):
    """Mixin for RoPE attention classes of transformers (q_proj, k_proj, v_proj, o_proj). Without a layout it is the
    class it extends."""

    config: Any
    head_dim: int
    scaling: float
    attention_dropout: float
    q_proj: torch.nn.Module
    k_proj: torch.nn.Module
    v_proj: torch.nn.Module
    o_proj: torch.nn.Module
    longctx_kernel: str = "auto"
    """Name of the kernel; see `hf_longctx.attention.kernels.select_kernel`."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        layout: Layout | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states [1, T, hidden] of this rank's shard -> ([1, T, hidden], None)."""
        if layout is None:
            return super().forward(hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)  # type: ignore[misc]
        assert position_embeddings is not None
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            projection(hidden_states).view(shape).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        out, _ = longctx_attention_forward(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=getattr(self.config, "sliding_window", None),
            layout=layout,
            **kwargs,
        )
        return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None
