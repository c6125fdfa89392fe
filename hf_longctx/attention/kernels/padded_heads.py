"""Value heads of another dimension than query and key heads (multi-head latent attention: 192 and 128), for kernels that
need one dimension for all.

The narrower operands get zeros behind each head: in queries and keys they add nothing to a score, in values they give
output columns of zero, which are cut off.

    queries and keys of 192, values of 128:    values, out and grad_out are padded to 192, out and grad_v cut to 128

Only the kernel's operands are padded, for the time of the call: what is kept and sent between ranks is not. Shapes: T
tokens, H heads, D dimension of query and key heads, Dv of value heads.
"""

from collections.abc import Iterator

import torch

from hf_longctx.attention.kernels.accumulate import Partial, RowSum
from hf_longctx.attention.kernels.interface import AttentionCall, Gradients, Kernel


class PaddedHeads:
    """A kernel that gives another one heads of max(D, Dv); the interface is `Kernel`."""

    value_dims = True

    def __init__(self, kernel: Kernel) -> None:
        self.name, self.alibi_tile, self.workspace = kernel.name, kernel.alibi_tile, kernel.workspace
        self._kernel = kernel

    def unsupported(self, call: AttentionCall) -> str | None:
        return self._kernel.unsupported(call)

    def forward(self, call: AttentionCall) -> Iterator[Partial]:
        for partial in self._kernel.forward(_padded_call(call)):
            yield partial._replace(out=partial.out[..., : call.v.shape[-1]].contiguous())

    def backward(
        self, call: AttentionCall, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, gradients: Gradients
    ) -> None:
        padded = _padded_call(call)
        grad_out, out = (_padded(x, padded.v.shape[-1]) for x in (grad_out, out))
        grad_q, grad_k, grad_v = (_Narrowed(total, x.shape[-1]) for total, x in zip(gradients, call[:3]))
        self._kernel.backward(padded, grad_out, out, lse, (grad_q, grad_k, grad_v))


def _padded_call(call: AttentionCall) -> AttentionCall:
    """The same call with heads of one dimension."""
    dim = max(call.q.shape[-1], call.v.shape[-1])
    return call._replace(q=_padded(call.q, dim), k=_padded(call.k, dim), v=_padded(call.v, dim))


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
