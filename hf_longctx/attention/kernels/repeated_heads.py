"""Grouped heads that share key/value heads unevenly, for kernels whose query heads must share them evenly.

    6 query heads read key/value heads 0 0 0 0 1 1:    the kernel is given heads 0 0 1, each for 2 query heads

Only the kernel's operands are repeated: what is kept and sent between ranks is not.
"""

from collections.abc import Iterable, Sequence

import torch

from hf_longctx.attention.kernels.accumulate import Partial, RowSum
from hf_longctx.attention.kernels.interface import Kernel, Needs
from hf_longctx.layouts.blocks import Block


class RepeatedHeads:
    """A kernel that gives another one each key/value head `repeats` times; the interface is `Kernel`."""

    def __init__(self, kernel: Kernel, repeats: Sequence[int]) -> None:
        self.name, self.alibi_tile, self.value_dims = kernel.name, kernel.alibi_tile, kernel.value_dims
        self._kernel, self._repeats = kernel, repeats

    def unsupported(self, q: torch.Tensor, k: torch.Tensor, needs: Needs) -> str | None:
        return self._kernel.unsupported(q, k, needs)

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
        return self._kernel.forward(q, self._repeated(k), self._repeated(v), blocks, scale, slopes, softcap)

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
        keys, values = self._repeated(k), self._repeated(v)
        of_keys, of_values = RowSum(keys), RowSum(values)
        self._kernel.backward(
            grad_out, q, keys, values, out, lse, blocks, scale, grad_q, of_keys, of_values, slopes, softcap
        )
        grad_k.add(0, len(k), self._summed(of_keys.total()))
        grad_v.add(0, len(v), self._summed(of_values.total()))

    def _repeated(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H, D] -> [T, sum of repeats, D]."""
        return torch.cat([x[:, head : head + 1].expand(-1, n, -1) for head, n in enumerate(self._repeats)], 1)

    def _summed(self, gradient: torch.Tensor) -> torch.Tensor:
        """[T, sum of repeats, D] -> [T, H, D], in the same order every time."""
        return torch.stack([part.sum(1) for part in gradient.split(list(self._repeats), 1)], 1)
