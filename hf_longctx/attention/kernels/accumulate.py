"""Accumulating what kernels return block by block: outputs merged by log-sum-exp, gradients summed.

lse = logaddexp(lse1, lse2);   out = out1 * exp(lse1 - lse) + out2 * exp(lse2 - lse)

Shapes: T tokens, H heads (Hq of queries), D head dimension (Dv of values). Accumulation is float32 (float64 for float64 inputs).
"""

from typing import NamedTuple

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Partial(NamedTuple):
    """Attention of the query rows [start, stop) over some of their keys."""

    start: int
    stop: int
    out: torch.Tensor
    """[stop - start, Hq, Dv]"""
    lse: torch.Tensor
    """[Hq, stop - start], float32 or float64; natural logarithm"""


def merge_(out: torch.Tensor, lse: torch.Tensor, partial: Partial) -> None:
    """Merges a partial result into out [T, Hq, Dv] and lse [Hq, T] of the rows so far, in place.

    Both sides must have seen at least one key (finite lse). exp(lse2 - lse) is sigmoid(lse2 - lse1), so that merging
    the outputs is one linear interpolation.
    """
    if (partial.start, partial.stop) != (0, out.shape[0]):
        out, lse = out[partial.start : partial.stop], lse[:, partial.start : partial.stop]
    weight = (partial.lse - lse).sigmoid_()
    out.lerp_(partial.out.to(out.dtype), weight.t().unsqueeze(-1))
    torch.logaddexp(lse, partial.lse, out=lse)


class RowSum:
    """A sum over rows [T, H, D] of contributions to some of them, in the accumulation dtype.

    Rows that are reached for the first time are written, not added to zeros, and a first contribution to all rows is
    kept as it is: nothing is filled or copied where one call computes everything.
    """

    def __init__(self, like: torch.Tensor, rows: int | None = None, into: torch.Tensor | None = None) -> None:
        """Sum rows like those of a tensor [*, H, D]; as many as it has, unless given. `into` [rows, H, D], in the accumulation
        dtype: where the sum is to be, whatever is there."""
        self._rows = like.shape[0] if rows is None else rows
        self._heads, self._device = like.shape[1:], like.device
        self._dtype = accumulation_dtype(like.dtype) if into is None else into.dtype
        self._sum = into
        self._written = 0
        """Rows from here on have not been reached."""

    def part(self, start: int, stop: int) -> "RowSum":
        """Give the sum of some rows, zero where nothing was added: what it gets is added to these."""
        rows = self.total()[start:stop]
        part = RowSum(rows, into=rows)
        part._written = stop - start
        return part

    def begin(self) -> None:
        """Begin anew where the sum is to be: what is there counts no more."""
        self._written = 0

    def add(self, start: int, stop: int, values: torch.Tensor, *, lent: bool = False) -> None:
        """values [stop - start, H, D], which belong to the sum from now on, unless they are lent."""
        if self._sum is None and not lent and (start, stop) == (0, self._rows):
            self._sum, self._written = values.to(self._dtype), stop
            return
        total = self._sum if start <= self._written and self._sum is not None else self._reached(start)
        if stop <= self._written:
            (total if stop - start == self._rows else total[start:stop]).add_(values)
            return
        middle = max(start, self._written)
        if start < middle:
            total[start:middle].add_(values[: middle - start])
            values = values[middle - start :]
        (total if stop - middle == self._rows else total[middle:stop]).copy_(values)
        self._written = stop

    def total(self) -> torch.Tensor:
        """[T, H, D]; zero where nothing was added."""
        return self._sum if self._sum is not None and self._written == self._rows else self._reached(self._rows)

    def _reached(self, start: int) -> torch.Tensor:
        """The sum, with zeros in the rows before `start` that nothing has reached."""
        if self._sum is None:
            self._sum = torch.empty((self._rows, *self._heads), dtype=self._dtype, device=self._device)
        if self._written < start:
            self._sum[self._written : start] = 0
            self._written = start
        return self._sum
