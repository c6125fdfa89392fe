"""Receives what layers cache of a prompt's shard, as they run over a layout.

What a layer caches need not be what it attends to. Latent attention (DeepSeek V2 and V3 and their kin) caches one head of few
numbers, and makes the keys and values of all heads of it again for each token; DiffLlama pairs the values that it has cached. So
a model of transformers' own attention is given a cache that keeps nothing and notes what it is told to keep. Nothing is sent.
"""

from typing import Any

import torch
from transformers import DynamicCache

from hf_longctx.models.layout_mask import CollectedKeys


class ShardCache(DynamicCache):
    """A cache that stays empty: what layers would keep of a shard goes to `collected`, and back to them."""

    def __init__(self, config: Any, collected: CollectedKeys) -> None:
        super().__init__(config=config)
        self._collected = collected

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take keys and values [1, Hkv, T, D] of the shard's T tokens, D not always the same, and return them."""
        self._collected.of_layer[layer_idx] = (key_states[0].transpose(0, 1), value_states[0].transpose(0, 1))
        return key_states, value_states
