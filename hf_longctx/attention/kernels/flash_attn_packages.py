"""The flash-attn packages, where installed: flash-attention 2 (`flash-attn`), 3 (`flash_attn_3`), 4 (`flash-attn-4`).

Read in the sources of flash-attn 2.8.3, flash_attn_3 3.0.0 and flash-attn-4 4.0.0b36; windows, alignment and log-sum-exp
are in all three as varlen.py says.

                      GPU             head dimension               ALiBi                    soft cap       in order by
    flash-attention 2 8.0 and later   to 256                       exact in causal blocks   yes            sums of parts
    flash-attention 3 9.0             to 192; 256 not in order     folded                   yes            semaphores
    flash-attention 4 9.0, 10.x       to 256; on 10.x 128 or 256   folded                   forward only   semaphores

"In order" is how backward is deterministic where torch's switch for that is on. A soft cap of 0 is none; the log-sum-exp is
that of capped scores. Builds may leave it out, and say so when called.

In a causal call flash-attention 2 adds slope * column to the scores, of up to 55,000 at 64K tokens, which float32
rounds by 4e-3. In a windowed call it subtracts slope * |x - y| of the integers. Causal blocks with ALiBi therefore get
a window as long as the longest of them: (longest - 1, 0) hides nothing, and the bias is exact at any length. Blocks
that are not square have no such form and are folded.

A package is imported when it is first asked for a GPU that it could run on: they load large libraries.
"""

import re
from abc import abstractmethod
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from hf_longctx.attention.kernels.varlen import Triple, VarlenCall, VarlenKernel
from hf_longctx.hardware import kernel_bytes
from hf_longctx.hardware.nccl import EXCHANGE_CHANNELS
from hf_longctx.layouts.blocks import Mask


@cache
def installed_version(distribution: str) -> str | None:
    """Version of an installed package, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


@cache
def import_error(module: str) -> str | None:
    """Why a module cannot be imported; tried once, because kernels are chosen at every call."""
    try:
        import_module(module)
    except (ImportError, OSError) as error:
        return str(error)
    return None


class PackageKernel(VarlenKernel):
    """A varlen kernel of a package that may not be installed."""

    distribution: str
    oldest: tuple[int, int]
    """First release (major, minor) with the functions that are called."""
    module: str
    install: str
    """The command, or where to look."""
    capabilities: str
    """Compute capabilities that it runs on, in words."""

    @abstractmethod
    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether `capabilities` holds this one."""

    def unavailable(self, capability: tuple[int, int]) -> str | None:
        installed = installed_version(self.distribution)
        if installed is None:
            return f"{self.distribution} is not installed: {self.install}"
        release = tuple(int(number) for number in re.findall(r"\d+", installed)[:2])
        if release < self.oldest:
            return f"needs {self.distribution} {'.'.join(map(str, self.oldest))} or later, {installed} is installed"
        if not self.runs_on(capability):
            return f"needs compute capability {self.capabilities}, this GPU has {capability[0]}.{capability[1]}"
        error = import_error(self.module)
        return f"{self.distribution} {installed} is installed, but cannot be imported: {error}" if error else None

    @property
    def package(self) -> Any:
        """Return what holds the functions that are called."""
        return import_module(self.module)


class FlashAttn2(PackageKernel):
    """See the module's docstring; the interface is `Kernel`."""

    name = "flash_attn_2"
    distribution, oldest, module = "flash-attn", (2, 8), "flash_attn.flash_attn_interface"
    install = "pip install --no-build-isolation 'hf_longctx[cuda]'"
    capabilities = "8.0 or later"
    workspace = staticmethod(kernel_bytes.flash_2)
    exact_causal_alibi = True
    sums_parts = True
    soft_caps = True
    alibi_tile = 1 << 40  # exact at any length

    def runs_on(self, capability: tuple[int, int]) -> bool:
        return capability >= (8, 0)

    def max_head_dim(self, capability: tuple[int, int], head_dim: int) -> int:
        return 256

    def run_forward(self, call: VarlenCall) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = self.package._flash_attn_varlen_forward(
            *call[:3], dropout_p=0.0, softmax_scale=call.scale, **self._arguments(call)
        )
        return out, lse

    def run_backward(self, call: VarlenCall, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Triple:
        dq, dk, dv = (torch.empty_like(x) for x in call[:3])
        self.package._flash_attn_varlen_backward(
            grad_out,
            *call[:3],
            out,
            lse,
            dq=dq,
            dk=dk,
            dv=dv,
            dropout_p=0.0,
            softmax_scale=call.scale,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._arguments(call),
        )
        return dq, dk, dv

    def _arguments(self, call: VarlenCall) -> dict[str, Any]:
        sequences, slopes = call.sequences, call.slopes
        left, right = sequences.window if slopes is None else (sequences.keys.longest - 1, 0)
        return {
            "cu_seqlens_q": sequences.queries.cu_seqlens,
            "cu_seqlens_k": sequences.keys.cu_seqlens,
            "max_seqlen_q": sequences.queries.longest,
            "max_seqlen_k": sequences.keys.longest,
            "causal": slopes is None and sequences.mask is Mask.CAUSAL,
            "window_size_left": left,
            "window_size_right": right,
            "softcap": call.softcap or 0.0,
            "alibi_slopes": slopes,
        }


class FlashAttn3(PackageKernel):
    """See the module's docstring; the interface is `Kernel`. Its forward keeps every multiprocessor until it ends, so that
    kernels of messages would wait for it: while some travel, it leaves them as many as they take."""

    name = "flash_attn_3"
    distribution, oldest, module = "flash_attn_3", (3, 0), "flash_attn_interface"
    install = "built from the folder hopper/ of Dao-AILab/flash-attention"
    capabilities = "9.0"
    workspace = staticmethod(kernel_bytes.flash_3)
    soft_caps = True

    @property
    def package(self) -> Any:
        import_module(self.module)
        return torch.ops.flash_attn_3

    def runs_on(self, capability: tuple[int, int]) -> bool:
        return capability == (9, 0)

    def max_head_dim(self, capability: tuple[int, int], head_dim: int) -> int:
        return 192

    def run_forward(self, call: VarlenCall) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = self.package.fwd(*call[:3], softmax_scale=call.scale, num_splits=1, **self._arguments(call))
        return out, lse

    def run_backward(self, call: VarlenCall, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Triple:
        dq, dk, dv = (torch.empty_like(x) for x in call[:3])
        self.package.bwd(
            grad_out,
            *call[:3],
            out,
            lse,
            dq=dq,
            dk=dk,
            dv=dv,
            softmax_scale=call.scale,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._arguments(call),
        )
        return dq, dk, dv

    def _arguments(self, call: VarlenCall) -> dict[str, Any]:
        sequences, (left, right) = call.sequences, call.sequences.window
        return {
            "cu_seqlens_q": sequences.queries.cu_seqlens,
            "cu_seqlens_k": sequences.keys.cu_seqlens,
            "max_seqlen_q": sequences.queries.longest,
            "max_seqlen_k": sequences.keys.longest,
            "is_causal": sequences.mask is Mask.CAUSAL,
            "window_size_left": left,
            "window_size_right": right,
            "softcap": call.softcap or 0.0,
            "sm_margin": EXCHANGE_CHANNELS if sequences.beside_messages else 0,
        }


class FlashAttn4(PackageKernel):
    """See the module's docstring; the interface is `Kernel`. Kernels are compiled at the first call of each kind."""

    name = "flash_attn_4"
    distribution, oldest, module = "flash-attn-4", (4, 0), "flash_attn.cute.interface"
    install = "pip install --pre flash-attn-4"
    compiles = True
    capabilities = "9.0 or 10.x"
    workspace = staticmethod(kernel_bytes.flash_4)

    def runs_on(self, capability: tuple[int, int]) -> bool:
        return capability[0] in (9, 10)

    def max_head_dim(self, capability: tuple[int, int], head_dim: int) -> int:
        return 256 if capability[0] == 9 or head_dim == 256 else 128

    def run_forward(self, call: VarlenCall) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = self.package._flash_attn_fwd(*call[:3], return_lse=True, **self._arguments(call))
        return out, lse

    def run_backward(self, call: VarlenCall, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Triple:
        return self.package._flash_attn_bwd(
            *call[:3],
            out,
            grad_out,
            lse,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **self._arguments(call),
        )

    def _arguments(self, call: VarlenCall) -> dict[str, Any]:
        sequences = call.sequences
        left, right = (None if side == -1 else side for side in sequences.window)
        return {
            "softmax_scale": call.scale,
            "cu_seqlens_q": sequences.queries.cu_seqlens,
            "cu_seqlens_k": sequences.keys.cu_seqlens,
            "max_seqlen_q": sequences.queries.longest,
            "max_seqlen_k": sequences.keys.longest,
            "causal": sequences.mask is Mask.CAUSAL,
            "window_size_left": left,
            "window_size_right": right,
        }
