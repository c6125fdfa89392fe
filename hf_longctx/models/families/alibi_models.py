"""Shared by models with ALiBi (bloom.py, mpt.py): how a layout reaches their attention layers, without a bias tensor.

transformers' base models build the bias and a causal mask from the batch and hand both to every block, which passes
the bias to its attention untouched. Over a layout neither is built: a block gets an `AlibiOverLayout` *in place of*
the bias tensor, and our attention class, which finds it there, runs the engine with its slopes. Blocks stay
transformers' own. The object is an argument of the block, so that activation checkpointing replays it.

    model(input_ids, layout=...) -> base model's forward (ours) -> block(hidden, bias=AlibiOverLayout) -> attention (ours)

Slopes are read off transformers' own bias tensor for two positions, so that they are its formula whatever the number
of heads. Shapes: T tokens of this rank's shard, Hq heads, D head dimension.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from hf_longctx.attention.kept import KeptAttention
from hf_longctx.layouts.layout import uncopied
from hf_longctx.models.attention import LayoutAttention, longctx_attention_forward


@uncopied
@dataclass(frozen=True, eq=False)
class AlibiOverLayout:
    """Stands in for the bias tensor that a block receives."""

    slopes: torch.Tensor
    """float32 [Hq]: a query at position i sees position j with slope * (i - j) taken from its score."""
    keywords: dict[str, Any]
    """Keywords that the base model was called with: layout, exchange, and whatever else `longctx_attention_forward` reads or
    refuses."""

    def keeping(self, kept: KeptAttention) -> "AlibiOverLayout":
        """Return the same for a layer whose attention is kept."""
        return AlibiOverLayout(self.slopes, self.keywords | {"keep_attention": kept})


class AlibiAttention(LayoutAttention):
    """Mixin for ALiBi attention classes of transformers."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: AlibiOverLayout,
        scaling: float,
        dropout: float,
    ) -> torch.Tensor:
        """query, key and value [1, Hq, T, D] -> [1, T, Hq * D]; `scaling` of the scores, `dropout` while training."""
        out, _ = longctx_attention_forward(
            self,
            query,
            key,
            value,
            dropout=dropout if self.training else 0.0,
            scaling=scaling,
            alibi_slopes=bias.slopes,
            **bias.keywords,
        )
        return out.flatten(2)


def run_blocks(
    blocks: Iterable[torch.nn.Module],
    norm: torch.nn.Module,
    hidden: torch.Tensor,
    bias_name: str,
    slopes: torch.Tensor,
    output_hidden_states: bool | None = None,
    attention_mask: torch.Tensor | None = None,
    **keywords: Any,
) -> BaseModelOutput:
    """Blocks one after another, then the last norm.

    Args:
        hidden: [1, T, hidden size], embeddings of this rank's shard.
        bias_name: the argument of a block that is its bias tensor without a layout.
        slopes: float32 [Hq]
        output_hidden_states: also return the embeddings, what each block but the last gives, and the last hidden
            state, as transformers does.
        keywords: what else the base model was called with.
    """
    bias = AlibiOverLayout(slopes, keywords | {"attention_mask": attention_mask})
    states: tuple[torch.Tensor, ...] = ()
    for block in blocks:
        if output_hidden_states:
            states += (hidden,)
        hidden = block(hidden, attention_mask=None, **{bias_name: bias})[0]
    hidden = norm(hidden)
    return BaseModelOutput(hidden, (*states, hidden) if output_hidden_states else None)
