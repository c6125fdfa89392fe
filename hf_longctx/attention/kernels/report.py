"""A report in plain text: which attention kernel each feature would use on this machine, and why not the others.

Every kernel is asked by the same `Kernel.unsupported` that a training run asks, about empty tensors on this machine's
device.
"""

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from hf_longctx.attention.kernels import KERNELS, AttentionCall
from hf_longctx.attention.kernels.cuda_varlen import CudaVarlen
from hf_longctx.attention.kernels.flash_attn_packages import FlashAttn2, FlashAttn3, FlashAttn4

PACKAGES = ("hf_longctx", "torch", "transformers", "accelerate", "flash_attn_3", "flash-attn-4", "flash-attn")
"""Distributions whose versions are shown."""

FLASH_2 = (FlashAttn2.name, CudaVarlen.name)
"""Those that run flash-attention 2."""
USED = "used, see above"
ONLY_NAMED = "plain mathematics, its memory quadratic in tokens: used only where it is named"


@dataclass(frozen=True)
class Feature:
    """A kind of attention call."""

    name: str
    dtype: torch.dtype = torch.bfloat16
    query_heads: int = 8
    kv_heads: int = 8
    head_dim: int = 128
    value_dim: int | None = None
    window: int | None = None
    alibi: bool = False
    softcap: float | None = None

    def call(self, device: torch.device | str) -> AttentionCall:
        """Return what kernels are asked about."""
        return AttentionCall.of_heads(
            self.query_heads,
            self.kv_heads,
            self.head_dim,
            self.dtype,
            device,
            value_dim=self.value_dim,
            window=self.window,
            alibi=self.alibi,
            softcap=self.softcap,
        )


FEATURES = (
    Feature("packed documents in bfloat16"),
    Feature("packed documents in float16", torch.float16),
    Feature("packed documents in float32", torch.float32),
    Feature("packed documents in float64", torch.float64),
    Feature("grouped heads (8 over 2)", kv_heads=2),
    Feature("ALiBi", alibi=True),
    Feature("sliding window", window=4096),
    Feature("head dimension 64", head_dim=64),
    Feature("head dimension 256", head_dim=256),
    Feature("head dimension 256 with ALiBi", head_dim=256, alibi=True),
    Feature("values of 128, queries and keys of 192", head_dim=192, value_dim=128),
    Feature("head dimension 512", head_dim=512),
    Feature("soft-capping", softcap=50.0),
    Feature("attention sinks"),
)
"""bfloat16 and heads of 128, where a feature does not say otherwise. Packed documents are causal, each on its own."""


def kernel_report(device: torch.device | None = None) -> str:
    """Versions, device, the kernel of each feature, and each kernel's reasons; `device` defaults to cuda if there is one.

    A kernel named with kernel=... is used even where a faster one could be. `reference` is only used that way.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    refusals = {feature.name: _refusals(feature, device) for feature in FEATURES}
    versions = [("python", platform.python_version()), *((name, _version(name)) for name in PACKAGES)]
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    faster = faster_kernel(capability, _chosen(refusals[FEATURES[0].name]))
    return "\n".join(
        [
            "This machine:",
            *_table([("device", _described(device)), *versions]),
            "",
            "Kernel of each feature:",
            *_table([(name, _chosen(reasons)) for name, reasons in refusals.items()]),
            "",
            "Kernels, the preferred first:",
            *_table([(name, why) for name in KERNELS for why in _why(name, refusals)]),
            *(["", faster] if faster else []),
        ]
    )


def faster_kernel(capability: tuple[int, int] | None, kernel: str) -> str | None:
    """Say what would be faster on a GPU of this compute capability than its kernel; None: nothing here, or no GPU."""
    if capability != (9, 0) or kernel not in FLASH_2:
        return None
    return (
        f"This GPU is a Hopper, and {kernel} runs the kernels of flash-attention 2. flash-attention 4 ({FlashAttn4.install}) was "
        "1.8 times as fast forward and backward on an H200 (docs/performance.md). flash-attention 3 "
        f"({FlashAttn3.install}) is made for it too: its paper (arXiv 2407.08608) measures 648 TFLOP/s forward where "
        "flash-attention 2 reaches 370."
    )


def _refusals(feature: Feature, device: torch.device) -> dict[str, str | None]:
    """Kernel -> why it cannot run the feature, None where it can."""
    call = feature.call(device)
    return {name: kernel.unsupported(call) for name, kernel in KERNELS.items()}


def _chosen(reasons: dict[str, str | None]) -> str:
    fast = [name for name, reason in reasons.items() if reason is None and name != "reference"]
    if fast:
        return fast[0]
    return "none; kernel='reference' runs it slowly" if reasons["reference"] is None else "none"


def _why(kernel: str, refusals: dict[str, dict[str, str | None]]) -> Iterator[str]:
    """Yield what there is to say of a kernel: that it is used, could be, or why not and for which features."""
    features: dict[str, list[str]] = {}
    for feature, reasons in refusals.items():
        features.setdefault(_verdict(kernel, reasons), []).append(feature)
    for verdict, names in features.items():
        everything = len(names) == len(refusals) or verdict in (USED, ONLY_NAMED)
        yield verdict if everything else f"{verdict} ({', '.join(names)})"


def _verdict(kernel: str, reasons: dict[str, str | None]) -> str:
    reason = reasons[kernel]
    if reason is not None:
        return reason
    if kernel == "reference":
        return ONLY_NAMED
    first = _chosen(reasons)
    return USED if first == kernel else f"could, but {first} comes first"


def _described(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device}, {torch.get_num_threads()} threads"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}"


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def _table(rows: list[tuple[str, str]]) -> list[str]:
    """Two columns; a name that repeats the row above is left out."""
    width = max(len(name) for name, _ in rows)
    above = [None, *(name for name, _ in rows)]
    return [f"  {'' if name == last else name:<{width}}  {text}" for last, (name, text) in zip(above, rows)]
