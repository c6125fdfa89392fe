"""Attention kernels as their packages offer them, called once for a whole case: what ours is compared with on a GPU.

Shapes: T tokens of all documents together, H heads, D head dimension. All take q [T, Hq, D], k and v [T, Hkv, D] with
documents end to end, attend causally within each document, and return [T, Hq, D]; all are differentiable. Functions for
whole rows are asked only for one document, functions with boundaries for any number of them.

A package that is not installed, or that cannot run a case, says so when it is made or first called.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from inspect import signature
from itertools import accumulate
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from hf_longctx.attention.engine import layout_attention
from hf_longctx.layouts.layout import Layout, Segment

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""q [T, Hq, D], k and v [T, Hkv, D] -> out [T, Hq, D]"""

Make = Callable[[tuple[int, ...], torch.device], Attention]
"""Lengths of the documents -> how a contender attends over them."""


def ours(lengths: tuple[int, ...], device: torch.device) -> Attention:
    """Whole documents on one rank, with the kernel that the engine chooses itself."""
    layout = Layout({0: tuple(Segment(doc, 0, length) for doc, length in enumerate(lengths))})
    return partial(layout_attention, layout=layout)


def sdpa(lengths: tuple[int, ...], device: torch.device, backend: SDPBackend) -> Attention:
    """torch's scaled_dot_product_attention with one backend."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
            grouped = q.shape[1] != k.shape[1]
            out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return out[0].transpose(0, 1)

    return attend


def flash(lengths: tuple[int, ...], device: torch.device, module: str) -> Attention:
    """A flash-attn package's function for rows of equal length."""
    function = import_module(module).flash_attn_func
    return lambda q, k, v: _first(function(q[None], k[None], v[None], causal=True))[0]


def flash_varlen(lengths: tuple[int, ...], device: torch.device, module: str, **settings: Any) -> Attention:
    """A flash-attn package's function with boundaries, and with further settings of its own."""
    function = import_module(module).flash_attn_varlen_func
    starts = _boundaries(lengths, device)
    given = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    return lambda q, k, v: _first(function(q, k, v, **given, **settings, causal=True))


def torch_varlen(lengths: tuple[int, ...], device: torch.device) -> Attention:
    """torch.nn.attention.varlen, as releases from 2.11 on call it."""
    function = import_module("torch.nn.attention.varlen").varlen_attn
    starts, longest = _boundaries(lengths, device), max(lengths)
    # Its releases before 2.12 take grouped heads without being told.
    told = "enable_gqa" in signature(function).parameters

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        grouped = {"enable_gqa": q.shape[1] != k.shape[1]} if told else {}
        return function(q, k, v, starts, starts, longest, longest, window_size=(-1, 0), **grouped)

    return attend


def _boundaries(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int32 [documents + 1]"""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def _first(returned: Any) -> torch.Tensor:
    """The output: some releases return the log-sum-exp too."""
    return returned[0] if isinstance(returned, tuple) else returned


OURS = "ours"

ONE_DOCUMENT: dict[str, Make] = {
    OURS: ours,
    "cuDNN SDPA": partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION),
    "torch flash SDPA": partial(sdpa, backend=SDPBackend.FLASH_ATTENTION),
    "flash-attn 2": partial(flash, module="flash_attn"),
    "flash-attn 3": partial(flash, module="flash_attn_interface"),
    "flash-attn 4": partial(flash, module="flash_attn.cute"),
}

PACKED: dict[str, Make] = {
    OURS: ours,
    "torch varlen_attn": torch_varlen,
    "flash-attn 2 varlen": partial(flash_varlen, module="flash_attn"),
    "flash-attn 3 varlen": partial(flash_varlen, module="flash_attn_interface"),
    "flash-attn 4 varlen": partial(flash_varlen, module="flash_attn.cute"),
}

PACKED_IN_ORDER: dict[str, Make] = {
    OURS: ours,
    "torch varlen_attn": torch_varlen,
    "flash-attn 2 varlen": partial(flash_varlen, module="flash_attn", deterministic=True),
    "flash-attn 3 varlen": partial(flash_varlen, module="flash_attn_interface", deterministic=True),
    "flash-attn 4 varlen": partial(flash_varlen, module="flash_attn.cute", deterministic=True),
}
"""The same with a deterministic backward; ours and torch's follow torch's switch."""


def pairs(lengths: tuple[int, ...]) -> int:
    """(query, key) pairs of causal attention within each document."""
    return sum(length * (length + 1) // 2 for length in lengths)


def forward_flops(area: int, heads: int, head_dim: int) -> int:
    """Floating-point operations of a forward pass over `area` pairs: two matrix products of 2 * D operations a pair.
    Backward counts 2.5 times as many (five products), as is usual; recomputing the scores is not counted."""
    return 4 * head_dim * heads * area


BACKWARD = 2.5
