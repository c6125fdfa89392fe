"""The interface of attention kernels: all the blocks of one step of a schedule in one call, tokens first.

Shapes: T tokens, Hq query heads, Hkv key/value heads (Hq a multiple of Hkv), D dimension of query and key heads, Dv of
    value heads, D unless a kernel takes others. Row counts are those of `Block`.

The score of query row x and key row y of a block is

    scale * q[x] . k[y]  -  slopes[head] * (distance + x - y)          the second term with ALiBi only
    softcap * tanh(scale * q[x] . k[y] / softcap)                      with a soft cap, and never with ALiBi

A forward yields partial results: attention of some query rows over *some* of their keys, with the log-sum-exp
(natural logarithm) that merging needs. A backward takes the global `out` and `lse` of the query rows, so that it
recomputes the true probabilities exp(score - lse) of its blocks and gives the exact partial gradients. Nothing is
sent between ranks here.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch

from hf_longctx.attention.kernels.accumulate import Partial, RowSum
from hf_longctx.hardware.kernel_bytes import Workspace
from hf_longctx.layouts.blocks import Block

ALIBI_OR_SOFT_CAP = "has ALiBi or a soft cap, not both"
"""Why a kernel with each refuses both: flash-attention 2 adds the bias after the cap, a bias folded into queries and keys would
come before it."""


class AttentionCall(NamedTuple):
    """Attention of some blocks: what a kernel is given, and asked about before there are blocks. Attention sinks need nothing
    of a kernel (attention/sinks.py). A tuple because one is made for each step of a schedule: it costs two Python calls, a frozen
    dataclass nine."""

    q: torch.Tensor
    """[Tq, Hq, D]"""
    k: torch.Tensor
    """[Tk, Hkv, D]"""
    v: torch.Tensor
    """[Tk, Hkv, Dv]; Dv is not D in multi-head latent attention"""
    blocks: Sequence[Block]
    """may differ in mask and may share query rows and key rows; none is empty"""
    scale: float
    window: int | None = None
    """a query sees fewer than so many keys before it. Blocks say where it ends: some have `Mask.ANTICAUSAL`"""
    slopes: torch.Tensor | None = None
    """[Hq] in the dtype of lse: ALiBi's"""
    softcap: float | None = None
    """scores are squashed by a tanh (Gemma 2)"""

    @classmethod
    def of_heads(
        cls,
        query_heads: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        value_dim: int | None = None,
        window: int | None = None,
        alibi: bool = False,
        softcap: float | None = None,
    ) -> "AttentionCall":
        """Describe attention over such heads, to ask kernels about it: one row, no block."""
        dims = ((query_heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim or head_dim))
        q, k, v = (torch.empty(1, heads, dim, dtype=dtype, device=device) for heads, dim in dims)
        slopes = torch.empty(query_heads, device=device) if alibi else None
        return cls(q, k, v, (), head_dim**-0.5, window, slopes, softcap)


Gradients = tuple[RowSum, RowSum, RowSum]
"""Sums over the rows of q, k and v, to which a backward adds."""


class Kernel(Protocol):
    """A way to compute attention, and what it states about itself."""

    name: str
    alibi_tile: int
    """Most rows of a causal block with ALiBi: the bias is a score of up to slope * rows, of which rounding takes its
    share."""
    value_dims: bool
    """Whether values may have heads of another dimension than queries and keys; others are given padded ones."""

    @property
    def workspace(self) -> Workspace:
        """Return what counts the bytes per token that backward takes beside its operands and the sums that it adds to."""

    def unsupported(self, call: AttentionCall) -> str | None:
        """Say why this kernel cannot compute such a call here; None if it can. Blocks are not looked at."""

    def forward(self, call: AttentionCall) -> Iterator[Partial]:
        """Compute partial results, each for one run of query rows; where blocks share rows there are several for those, to be
        merged."""

    def backward(
        self, call: AttentionCall, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, gradients: Gradients
    ) -> None:
        """Add the gradients of these blocks to the sums.

        grad_out and out are [Tq, Hq, Dv], lse is [Hq, Tq]; out and lse are those of the whole attention, not of these
        blocks.
        """
