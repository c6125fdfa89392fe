"""BLOOM over layouts: its attention class, and the forward of its base model.

Shapes: T tokens of this rank's shard.
"""

from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.bloom.modeling_bloom import BloomAttention, dropout_add

from hf_longctx.models.families.alibi_models import AlibiAttention, AlibiOverLayout, run_blocks


class LongContextBloomAttention(AlibiAttention, BloomAttention):  # type: ignore[misc]
    """BloomAttention that runs over a layout when it finds one in place of the bias tensor."""

    @staticmethod
    def check_config(config: Any) -> None:
        AlibiAttention.check_config(config)
        if config.slow_but_exact and config.pretraining_tp > 1:
            raise ValueError(
                f"slow_but_exact=True with pretraining_tp={config.pretraining_tp} adds the output projection up in slices, "
                "and without its bias; over a layout it is one product. Valid: config.slow_but_exact = False, or "
                "config.pretraining_tp = 1"
            )

    def forward(
        self,
        hidden_states: torch.Tensor,
        residual: torch.Tensor,
        alibi: torch.Tensor | AlibiOverLayout,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """hidden_states and residual [1, T, hidden] of this rank's shard -> ([1, T, hidden], None)."""
        if not isinstance(alibi, AlibiOverLayout):
            return super().forward(hidden_states, residual, alibi, *args, **kwargs)
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        out = self.attend(query, key, value, alibi, self.inv_norm_factor, self.attention_dropout.p)
        return dropout_add(self.dense(out), residual, self.hidden_dropout, self.training), None


def base_forward(model: Any, input_ids: torch.Tensor, **keywords: Any) -> BaseModelOutput:
    """BloomModel's forward over a layout: input_ids [1, T] of this rank's shard."""
    two_positions = torch.ones(1, 2, device=input_ids.device)
    slopes = model.build_alibi_tensor(two_positions, model.num_heads, torch.float32)[:, 0, 1]
    embeddings = model.word_embeddings_layernorm(model.word_embeddings(input_ids))
    return run_blocks(model.h, model.ln_f, embeddings, "alibi", slopes, **keywords)
