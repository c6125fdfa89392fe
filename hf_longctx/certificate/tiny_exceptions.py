"""Sizes that no rule finds, by model type. Each says why."""

from __future__ import annotations

EXCEPTIONS: dict[str, dict[tuple[str, ...], int]] = {
    # The global transformer reads cross_attn_k = 2 vectors of the encoder for each patch as one: twice the encoder's width.
    "blt": {("global_config", "hidden_size"): 128, ("global_config", "num_attention_heads"): 8},
}
"""Model type -> path from the configuration of that type -> size."""
