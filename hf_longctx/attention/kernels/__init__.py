"""Attention kernels behind one small interface: all the blocks of one step of a schedule, tokens first.

Shapes: T tokens, Hq query heads, Hkv key/value heads (Hq a multiple of Hkv), D head dimension. Row counts are those
    of `Block`.

A forward yields partial results: attention of some query rows over *some* of their keys, with the log-sum-exp
(natural logarithm) that merging needs. A backward takes the global `out` and `lse` of the query rows, so that it
recomputes the true probabilities exp(score - lse) of its blocks and gives the exact partial gradients. Nothing is
sent between ranks here.

A backend for another device is one more file with one more class, named in `KERNELS`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hf_longctx.attention.kernels.cpu_flash import CpuFlash
from hf_longctx.attention.kernels.cuda_varlen import CudaVarlen
from hf_longctx.attention.kernels.partial import Partial
from hf_longctx.attention.kernels.reference import Reference
from hf_longctx.layout import Block


class Kernel(Protocol):
    """What a kernel offers. The blocks of one call are all causal or all full, and none is empty."""

    name: str

    def unsupported(self, q: torch.Tensor, k: torch.Tensor) -> str | None:
        """Why this kernel cannot run these tensors here; None if it can."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Sequence[Block], scale: float
    ) -> Iterable[Partial]:
        """q [Tq, Hq, D], k and v [Tk, Hkv, D] -> partial results, each for one run of query rows."""

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
        grad_q: torch.Tensor,
        grad_k: torch.Tensor,
        grad_v: torch.Tensor,
    ) -> None:
        """Adds the gradients of these blocks into grad_q, grad_k and grad_v, which have the shapes of q, k and v.

        grad_out and out are [Tq, Hq, D], lse is [Hq, Tq]; out and lse are those of the whole attention, not of these
        blocks.
        """


KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (CudaVarlen(), CpuFlash(), Reference())}
"""By name, in the order of preference; `reference` is used only when it is named."""


@dataclass(frozen=True)
class KernelError(ValueError):
    """No kernel can run a call, or the one that was named cannot."""

    reasons: dict[str, str]
    """Kernel -> why it cannot run."""

    def __str__(self) -> str:
        listed = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
        return (
            f"no attention kernel for this call ({listed}). kernel='reference' runs any dtype on any device, slowly "
            "and with memory quadratic in the tokens of a document, so it is never chosen silently"
        )


def select_kernel(q: torch.Tensor, k: torch.Tensor, name: str = "auto") -> Kernel:
    """The kernel to use for q [Tq, Hq, D] and k [Tk, Hkv, D]: the one named, or the first fast one that can run them.

    Raises:
        ValueError: no kernel has this name.
        KernelError: the kernel named, or with "auto" every fast one, cannot run these tensors; says why for each.
    """
    if name != "auto" and name not in KERNELS:
        raise ValueError(f"kernel={name!r} is unknown; valid: auto, {', '.join(KERNELS)}")
    candidates = [KERNELS[name]] if name != "auto" else [k for k in KERNELS.values() if k.name != "reference"]
    reasons = {}
    for kernel in candidates:
        reason = kernel.unsupported(q, k)
        if reason is None:
            return kernel
        reasons[kernel.name] = reason
    raise KernelError(reasons)
