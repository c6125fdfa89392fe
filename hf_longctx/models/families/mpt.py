"""MPT over layouts: its attention class, and the forward of its base model.

What transformers' MPT does not read (learned_pos_emb, alibi, alibi_bias_max, logit_scale, qk_ln, prefix_lm,
resid_pdrop, emb_pdrop) has no effect here either. Shapes: T tokens of this rank's shard.
"""

from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.mpt.modeling_mpt import MptAttention

from hf_longctx.models.attention import refuse_dropout
from hf_longctx.models.families.alibi_models import AlibiAttention, AlibiOverLayout, run_blocks


class LongContextMptAttention(AlibiAttention, MptAttention):  # type: ignore[misc]
    """MptAttention that runs over a layout when it finds one in place of the bias tensor."""

    softmax_scale: float

    @staticmethod
    def check_config(config: Any) -> None:
        refuse_dropout("attn_config.attn_pdrop", config.attn_config.attn_pdrop)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_bias: torch.Tensor | AlibiOverLayout,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states [1, T, hidden] of this rank's shard -> ([1, T, hidden], None)."""
        if not isinstance(position_bias, AlibiOverLayout):
            return super().forward(hidden_states, position_bias, *args, **kwargs)
        projected = self.Wqkv(hidden_states)
        if self.clip_qkv:
            projected = projected.clamp(min=-self.clip_qkv, max=self.clip_qkv)
        query, key, value = (
            part.unflatten(2, (self.n_heads, self.head_dim)).transpose(1, 2) for part in projected.chunk(3, dim=2)
        )
        out = self.attend(query, key, value, position_bias, self.softmax_scale, self.attn_dropout_p)
        return self.out_proj(out), None


def base_forward(model: Any, input_ids: torch.Tensor, **keywords: Any) -> BaseModelOutput:
    """MptModel's forward over a layout: input_ids [1, T] of this rank's shard."""
    slopes = -model.build_mpt_alibi_tensor(model.num_heads, 2, device=input_ids.device)[:, 0, 0]
    return run_blocks(model.blocks, model.norm_f, model.wte(input_ids), "position_bias", slopes, **keywords)
