"""Shared by the attention classes with rotary positions (families/: llama.py, mistral.py, mixtral.py): their forward over a
layout, with or without a sliding window.

Projections and rotation need this rank's tokens only; keys and values travel inside `layout_attention`. Shapes: T
tokens of this rank's shard.
"""

from typing import Any

import torch

from hf_longctx.layouts.layout import Layout
from hf_longctx.models.attention import LayoutAttention, longctx_attention_forward, refuse_unsafe_rope
from hf_longctx.models.liger import rotate


class RopeAttention(LayoutAttention):
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

    @staticmethod
    def check_config(config: Any) -> None:
        LayoutAttention.check_config(config)
        refuse_unsafe_rope(config)

    @property
    def window(self) -> int | None:
        """Tokens that a query sees, itself included; None for all of its document."""
        return None

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
        query, key, value = self.project(hidden_states, *position_embeddings)
        return self.o_proj(self.attend(query, key, value, attention_mask, layout=layout, **kwargs)), None

    def project(
        self, hidden_states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """hidden_states [1, T, hidden], cos and sin [1, T, D] -> query [1, Hq, T, D], key and value [1, Hkv, T, D]."""
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            projection(hidden_states).view(shape).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        return *rotate(query, key, cos, sin, self.longctx_liger), value

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return what `project` gives, and the keywords of `longctx_attention_forward` -> [1, T, Hq * D]."""
        out, _ = longctx_attention_forward(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            sliding_window=self.window,
            **kwargs,
        )
        return out.flatten(2)


class WindowAttention(RopeAttention):
    """Mixin for the classes whose queries see no further than `config.sliding_window`, where it is set, in every
    layer."""

    @property
    def window(self) -> int | None:
        return getattr(self.config, "sliding_window", None)
