"""A kernel that compiles at its first call of each kind is called in all of them before training."""

from typing import Any

import pytest
import torch

from hf_longctx.attention.kernels.flash_attn_packages import FlashAttn2, FlashAttn4
from hf_longctx.attention.kernels.varlen import Sequences, VarlenCall
from hf_longctx.attention.kernels.warming import warm
from hf_longctx.layouts.blocks import Mask

CPU = torch.device("cpu")
BLOCK, MANY = 64, 256
"""Rows of the smallest block of flash-attention 4, and sequences above which it compiles another kernel (4.0.0b36)."""


def kind(sequences: Sequences) -> tuple[Any, ...]:
    queries, keys = sequences.queries, sequences.keys
    return sequences.mask, queries.longest <= BLOCK, keys.longest <= BLOCK, len(queries.cu_seqlens) - 1 > MANY


def test_each_kind_is_called_forward_and_backward(monkeypatch: pytest.MonkeyPatch):
    seen: dict[str, set[tuple[Any, ...]]] = {"forward": set(), "backward": set()}

    def forward(self: Any, call: VarlenCall) -> Any:
        seen["forward"].add(kind(call.sequences))
        return torch.zeros_like(call.q), torch.zeros(call.q.shape[1], call.q.shape[0])

    def backward(self: Any, call: VarlenCall, *_: Any) -> Any:
        seen["backward"].add(kind(call.sequences))
        return torch.zeros_like(call.q), torch.zeros_like(call.k), torch.zeros_like(call.v)

    monkeypatch.setattr(FlashAttn4, "run_forward", forward)
    monkeypatch.setattr(FlashAttn4, "run_backward", backward)
    assert warm(FlashAttn4(), 4, 2, 64, torch.bfloat16, CPU) > 0
    square = {(mask, one, one, many) for mask in Mask for one in (True, False) for many in (True, False)}
    oblong = {(Mask.FULL, one, not one, many) for one in (True, False) for many in (True, False)}
    assert seen == {"forward": square | oblong, "backward": square | oblong}


def test_kernels_that_are_compiled_already_are_not_called():
    assert warm(FlashAttn2(), 4, 2, 64, torch.bfloat16, CPU) == 0
