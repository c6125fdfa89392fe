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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hf_longctx.attention.kernels.accumulate import Partial, RowSum
from hf_longctx.layouts.blocks import Block


@dataclass(frozen=True)
class Needs:
    """Features that a call needs of a kernel beyond causal attention. Attention sinks need nothing of it (attention/sinks.py)."""

    alibi: bool = False
    """A bias linear in the distance of query and key."""
    window: bool = False
    """Blocks with `Mask.ANTICAUSAL`."""
    soft_cap: bool = False
    """Scores squashed by a tanh (Gemma 2)."""
    value_dim: int | None = None
    """Dimension of value heads, where it is not that of query and key heads (multi-head latent attention)."""

    def __post_init__(self) -> None:
        if self.alibi and self.soft_cap:
            raise ValueError(
                "alibi_slopes came with a softcap: flash-attention 2 adds the bias after the cap, a bias folded into "
                "queries and keys would come before it, and no kernel here has both. Valid: one of them"
            )


class Kernel(Protocol):
    """Blocks of one call may differ in mask and may share query rows and key rows; none is empty."""

    name: str
    alibi_tile: int
    """Most rows of a causal block with ALiBi: the bias is a score of up to slope * rows, of which rounding takes its
    share."""
    value_dims: bool
    """Whether values may have heads of another dimension than queries and keys; others are given padded ones."""

    def unsupported(self, q: torch.Tensor, k: torch.Tensor, needs: Needs) -> str | None:
        """Why this kernel cannot run these tensors here; None if it can."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        blocks: Sequence[Block],
        scale: float,
        slopes: torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> Iterable[Partial]:
        """q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv], slopes [Hq] in the dtype of lse -> partial results.

        Each is for one run of query rows; where blocks share rows there are several for those, to be merged.
        """

    def backward(
        self,
        grad_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        blocks: Sequence[Block],
        scale: float,
        grad_q: RowSum,
        grad_k: RowSum,
        grad_v: RowSum,
        slopes: torch.Tensor | None = None,
        softcap: float | None = None,
    ) -> None:
        """Adds the gradients of these blocks to grad_q, grad_k and grad_v, which have the rows of q, k and v.

        grad_out and out are [Tq, Hq, Dv], lse is [Hq, Tq]; out and lse are those of the whole attention, not of these
        blocks.
        """
