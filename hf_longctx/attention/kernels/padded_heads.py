"""Value heads of another dimension than query and key heads (multi-head latent attention: 192 and 128), for kernels that
need one dimension for all.

The narrower operands get zeros behind each head: in queries and keys they add nothing to a score, in values they give
output columns of zero, which are cut off.

    queries and keys of 192, values of 128:    values, out and grad_out are padded to 192, out and grad_v cut to 128

Only the kernel's operands are padded, for the time of the call: what is kept and sent between ranks is not. Shapes: T
tokens, H heads, D dimension of query and key heads, Dv of value heads.
"""

from collections.abc import Iterator, Sequence

import torch

from hf_longctx.attention.kernels.accumulate import Partial, RowSum
from hf_longctx.attention.kernels.interface import Kernel, Needs
from hf_longctx.layouts.blocks import Block


class PaddedHeads:
    """A kernel that gives another one heads of max(D, Dv); the interface is `Kernel`."""

    value_dims = True

    def __init__(self, kernel: Kernel) -> None:
        self.name, self.alibi_tile = kernel.name, kernel.alibi_tile
        self._kernel = kernel

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
    ) -> Iterator[Partial]:
        dim = max(q.shape[-1], v.shape[-1])
        queries, keys, values = (_padded(x, dim) for x in (q, k, v))
        for partial in self._kernel.forward(queries, keys, values, blocks, scale, slopes, softcap):
            yield partial._replace(out=partial.out[..., : v.shape[-1]].contiguous())

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
        dim = max(q.shape[-1], v.shape[-1])
        sums = ((grad_q, q), (grad_k, k), (grad_v, v))
        grad_q, grad_k, grad_v = (_Narrowed(total, x.shape[-1]) for total, x in sums)
        grad_out, q, k, v, out = (_padded(x, dim) for x in (grad_out, q, k, v, out))
        self._kernel.backward(grad_out, q, k, v, out, lse, blocks, scale, grad_q, grad_k, grad_v, slopes, softcap)


def _padded(x: torch.Tensor, dim: int) -> torch.Tensor:
    """[T, H, D] -> [T, H, dim]: zeros behind each head; x itself where D is dim."""
    return x if x.shape[-1] == dim else torch.nn.functional.pad(x, (0, dim - x.shape[-1]))


class _Narrowed(RowSum):
    """A sum that takes the first `dim` numbers of each head of what is added."""

    def __init__(self, total: RowSum, dim: int) -> None:
        self._total, self._dim = total, dim

    def add(self, start: int, stop: int, values: torch.Tensor, *, lent: bool = False) -> None:
        self._total.add(start, stop, values[..., : self._dim].contiguous(), lent=lent)

    def total(self) -> torch.Tensor:
        return self._total.total()
