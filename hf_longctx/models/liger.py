"""Liger's kernels (the package liger-kernel) in the place of three functions of a family that names them, on CUDA.

RMSNorm, rotation of queries and keys, and the MLP's silu(gate) * up: each reads and writes its tensors once, and saves
less for backward than the operations it replaces. They are put on instances: other models of the process keep
transformers' functions. Tensors that are not on CUDA take those too, so that a model may move after it was patched.

The package is optional; without it nothing changes. Nothing is sent between ranks.
"""

import importlib.util
from typing import Any

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hf_longctx.models.tiled_mlp import own_forward


def installed() -> bool:
    """Whether the package is there."""
    return importlib.util.find_spec("liger_kernel") is not None


class LigerNorm:
    """An RMSNorm's forward on this instance."""

    def __init__(self, norm: Any) -> None:
        self._norm = norm

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [B, T, H] -> [B, T, H]."""
        if not _runs(hidden):
            return own_forward(self._norm, hidden)
        from liger_kernel.transformers.functional import liger_rms_norm

        return liger_rms_norm(hidden, self._norm.weight, self._norm.variance_epsilon)


def gated_mlp(module: Any, hidden: torch.Tensor) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)), [B, T, H] -> [B, T, H]."""
    if not _runs(hidden):
        return own_forward(module, hidden)
    from liger_kernel.transformers.functional import liger_swiglu

    return module.down_proj(liger_swiglu(module.gate_proj(hidden), module.up_proj(hidden)))


def rotate(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, liger: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """query [B, Hq, T, D] and key [B, Hkv, T, D], rotated to the positions of cos and sin [B, T, D]."""
    if not liger or not _runs(query):
        return apply_rotary_pos_emb(query, key, cos, sin)
    from liger_kernel.transformers.functional import liger_rope

    return liger_rope(query, key, cos, sin)


def _runs(tensor: torch.Tensor) -> bool:
    """Whether the kernels can take it: they know neither CPUs nor distributed tensors."""
    return tensor.is_cuda and type(tensor) is torch.Tensor
