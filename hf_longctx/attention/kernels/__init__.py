"""Attention kernels behind one small interface (interface.py), and the choice between them.

A backend for another device is one more file with one more class, named in `KERNELS`.
"""

from functools import cache

from transformers.utils import logging

from hf_longctx.attention.kernels.accumulate import Partial, RowSum
from hf_longctx.attention.kernels.cpu_flash import CpuFlash
from hf_longctx.attention.kernels.cuda_efficient import CudaEfficient
from hf_longctx.attention.kernels.cuda_varlen import CudaVarlen
from hf_longctx.attention.kernels.flash_attn_packages import FlashAttn2, FlashAttn3, FlashAttn4
from hf_longctx.attention.kernels.interface import AttentionCall, Kernel
from hf_longctx.attention.kernels.padded_heads import PaddedHeads
from hf_longctx.attention.kernels.reference import Reference
from hf_longctx.attention.kernels.tiled import Tiled

logger = logging.get_logger(__name__)

__all__ = ["KERNELS", "AttentionCall", "Kernel", "KernelError", "Partial", "RowSum", "select_kernel"]

KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        FlashAttn3(),
        FlashAttn4(),
        FlashAttn2(),
        CudaVarlen(),
        CudaEfficient(),
        CpuFlash(),
        Tiled(),
        Reference(),
    )
}
"""By name, in the order of preference; `reference` is used only when it is named."""


class KernelError(ValueError):
    """No kernel can run a call, or the one that was named cannot."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__(reasons)
        self.reasons = reasons
        """Kernel -> why it cannot run."""

    def __str__(self) -> str:
        listed = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
        return (
            f"no attention kernel for this call ({listed}). kernel='reference' runs any dtype on any device, slowly "
            "and with memory quadratic in the tokens of a document, so it is never chosen silently"
        )


@cache
def _warn_of_plain_torch(reasons: str) -> None:
    """Say once that a GPU gets the kernel that takes many times as long as the others."""
    logger.warning(
        f"attention runs in plain torch (kernel 'tiled'), many times as slowly as a flash kernel: {reasons}. Valid: one of these "
        "packages, or what their kernels take"
    )


def select_kernel(call: AttentionCall, name: str = "auto") -> Kernel:
    """Choose the kernel for such calls: the one named, or the first fast one that supports them. Where values have another
    dimension and the kernel wants one for all, it comes with padding around it.

    Raises:
        ValueError: no kernel has this name.
        KernelError: the kernel named, or with "auto" every fast one, does not support the call; says why for each.
    """
    if name != "auto" and name not in KERNELS:
        raise ValueError(f"kernel={name!r} is unknown; valid: auto, {', '.join(KERNELS)}")
    candidates = [KERNELS[name]] if name != "auto" else [k for k in KERNELS.values() if k.name != "reference"]
    reasons: dict[str, str] = {}
    for kernel in candidates:
        reason = kernel.unsupported(call)
        if reason is None:
            if isinstance(kernel, Tiled) and name == "auto" and call.q.device.type == "cuda":
                _warn_of_plain_torch("; ".join(f"{other}: {why}" for other, why in reasons.items()))
            unequal = call.q.shape[-1] != call.v.shape[-1]
            return PaddedHeads(kernel) if unequal and not kernel.value_dims else kernel
        reasons[kernel.name] = reason
    raise KernelError(reasons)
