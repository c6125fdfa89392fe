"""The record of a family of models: what it has of ours for speed, beside the general way that any model takes.

A family is one file of this folder with one record, named in families/__init__.py. A model without one runs over layouts through
its attention mask (models/layout_mask.py), with MLPs, layers and norms as transformers has them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hf_longctx.models.attention import LayoutAttention
from hf_longctx.models.compiled_layers import CompiledLayer


@dataclass(frozen=True)
class Family:
    """Classes of transformers, and what stands in their place. None: the general way."""

    attention: type[torch.nn.Module]
    """its attention layer"""
    layout_attention: type[LayoutAttention]
    """the subclass that takes a layout"""
    base_model: type[torch.nn.Module] | None = None
    """its base model, where that passes no keyword on to attention layers"""
    base_forward: Callable[..., Any] | None = None
    """the forward of that base model over a layout"""
    tiled_mlp: type[torch.nn.Module] | None = None
    """its MLP, where that runs in tiles although its forward takes more than one tensor"""
    decoder_layer: type[torch.nn.Module] | None = None
    """its decoder layer, where that can be compiled in parts"""
    compiled_layer: type[CompiledLayer] | None = None
    """the subclass that is, under the same name: FSDP finds layers by it"""
    cut_model: type[torch.nn.Module] | None = None
    """its base model, where that runs in pipeline stages"""
    liger_norm: type[torch.nn.Module] | None = None
    """its norm, where Liger's RMSNorm computes the same"""
    liger_mlp: type[torch.nn.Module] | None = None
    """its MLP, where that is down(act(gate(x)) * up(x)), as Liger's is with silu"""
