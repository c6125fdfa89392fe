"""Grouped heads that share key/value heads unevenly, for kernels whose query heads must share them evenly.

    6 query heads read key/value heads 0 0 0 0 1 1:    the kernel is given heads 0 0 1, each for 2 query heads

Only the kernel's operands are repeated: what is kept and sent between ranks is not.
"""

from collections.abc import Iterator, Sequence

import torch

from hf_longctx.attention.kernels.accumulate import Partial, RowSum
from hf_longctx.attention.kernels.interface import AttentionCall, Gradients, Kernel


class RepeatedHeads:
    """A kernel that gives another one each key/value head `repeats` times; the interface is `Kernel`."""

    def __init__(self, kernel: Kernel, repeats: Sequence[int]) -> None:
        self.name, self.alibi_tile, self.value_dims = kernel.name, kernel.alibi_tile, kernel.value_dims
        self.workspace, self._kernel, self._repeats = kernel.workspace, kernel, repeats

    def unsupported(self, call: AttentionCall) -> str | None:
        return self._kernel.unsupported(call)

    def forward(self, call: AttentionCall) -> Iterator[Partial]:
        return self._kernel.forward(call._replace(k=self._repeated(call.k), v=self._repeated(call.v)))

    def backward(
        self, call: AttentionCall, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, gradients: Gradients
    ) -> None:
        repeated = call._replace(k=self._repeated(call.k), v=self._repeated(call.v))
        grad_q, grad_k, grad_v = gradients
        of_keys, of_values = RowSum(repeated.k), RowSum(repeated.v)
        self._kernel.backward(repeated, grad_out, out, lse, (grad_q, of_keys, of_values))
        grad_k.add(0, len(call.k), self._summed(of_keys.total()))
        grad_v.add(0, len(call.v), self._summed(of_values.total()))

    def _repeated(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H, D] -> [T, sum of repeats, D]."""
        return torch.cat([x[:, head : head + 1].expand(-1, n, -1) for head, n in enumerate(self._repeats)], 1)

    def _summed(self, gradient: torch.Tensor) -> torch.Tensor:
        """[T, sum of repeats, D] -> [T, H, D], in the same order every time."""
        return torch.stack([part.sum(1) for part in gradient.split(list(self._repeats), 1)], 1)
