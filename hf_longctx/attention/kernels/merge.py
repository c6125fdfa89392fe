"""Partial attention results, and merging them by log-sum-exp.

lse = logaddexp(lse1, lse2);   out = out1 * exp(lse1 - lse) + out2 * exp(lse2 - lse)

Shapes: T tokens, Hq query heads, D head dimension. Accumulation is float32 (float64 for float64 inputs).
"""

import torch

from hf_longctx.attention.kernels.interface import Partial


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_(out: torch.Tensor, lse: torch.Tensor, partial: Partial) -> None:
    """Merges a partial result into out [T, Hq, D] and lse [Hq, T] of the rows so far, in place.

    Both sides must have seen at least one key (finite lse). exp(lse2 - lse) is sigmoid(lse2 - lse1), so that merging
    the outputs is one linear interpolation.
    """
    rows = slice(partial.start, partial.stop)
    weight = torch.sigmoid(partial.lse - lse[:, rows])
    out[rows].lerp_(partial.out.to(out.dtype), weight.t().unsqueeze(-1))
    lse[:, rows] = torch.logaddexp(lse[:, rows], partial.lse)
