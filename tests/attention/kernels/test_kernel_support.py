"""Each kernel computes what it states, and refuses the rest: every combination of masks, ALiBi, a soft cap and narrower values,
beside attention written out over whole documents, forward and backward. Kernels for GPUs are asked as on an H100, and run with
their functions as plain mathematics (stand_in_kernels.py). Tolerance: 1e-11 in float64.
"""

from contextlib import AbstractContextManager, nullcontext
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_longctx.attention.kernels import KERNELS, AttentionCall, KernelError, select_kernel
from hf_longctx.attention.kernels.flash_attn_packages import PackageKernel
from hf_longctx.layouts.blocks import Block, Mask
from tests.attention.kernels.any_blocks import HEAD_DIM, HEADS, KV_HEADS, SCALE, SLOPES, results, tensors
from tests.attention.kernels.stand_in_kernels import PACKAGES, EfficientAttention, TorchsFlashAttention

WINDOW = 8
REFUSED: dict[str, tuple[set[str], ...]] = {
    "flash_attn_3": ({"alibi", "softcap"},),
    "flash_attn_4": ({"softcap"},),
    "flash_attn_2": ({"alibi", "softcap"},),
    "cuda_varlen": ({"softcap"},),
    "cuda_efficient": ({"softcap"},),
    "cpu_flash": ({"softcap"},),
    "tiled": ({"alibi"},),
    "reference": ({"alibi", "softcap"},),
}
"""Kernel -> features that it does not have together."""
BLOCKS = {
    "causal": [Block(0, 16, 0, 16, Mask.CAUSAL)],
    "full": [Block(0, 16, 0, 24, Mask.FULL, distance=24)],
    "window": [
        Block(0, 8, 0, 8, Mask.CAUSAL),
        Block(8, 16, 8, 16, Mask.CAUSAL),
        Block(8, 15, 1, 8, Mask.ANTICAUSAL, distance=7),
    ],
}


def plain(given: list[torch.Tensor], kind: str, slopes: torch.Tensor | None, softcap: float | None) -> list[Any]:
    """Output, and gradients of q, k, v: a softmax over all keys that a query sees."""
    q, k, v, grad = (x.detach().clone().requires_grad_() for x in given)
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = SCALE * torch.einsum("ihd,jhd->hij", q, keys)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    first = BLOCKS[kind][0].distance
    apart = first + torch.arange(len(q)).unsqueeze(1) - torch.arange(len(k))
    if slopes is not None:
        scores = scores - slopes[:, None, None] * apart
    hidden = (apart < 0) | ((apart >= WINDOW) & (kind == "window"))
    out = torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, float("-inf")).softmax(-1), values)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad.detach())]


def asked_on_its_device(name: str, call: AttentionCall, monkeypatch: pytest.MonkeyPatch) -> AttentionCall:
    """Return the call as the kernel is asked about it: in bfloat16 on an H100, with all packages, unless it runs on CPUs."""
    if not (name in ("cuda_varlen", "cuda_efficient") or isinstance(KERNELS[name], PackageKernel)):
        return call
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(PackageKernel, "unavailable", lambda self, capability: None)
    q = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=call.q.shape)
    return call._replace(q=q)  # type: ignore[arg-type]


def stand_in(name: str, monkeypatch: pytest.MonkeyPatch) -> AbstractContextManager[Any]:
    if isinstance(KERNELS[name], PackageKernel):
        monkeypatch.setattr(type(KERNELS[name]), "package", PACKAGES[type(KERNELS[name])])
    modes = {"cuda_varlen": TorchsFlashAttention, "cuda_efficient": EfficientAttention}
    return modes[name]() if name in modes else nullcontext()


def test_refusals_of_all_kernels_are_listed():
    assert list(REFUSED) == list(KERNELS)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_computes_what_it_states_and_refuses_the_rest(name: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    blocks, computed = BLOCKS[kind], 0
    keys = max(block.k_stop for block in blocks)
    for alibi, softcap, value_dim in product((False, True), (None, 0.5), (HEAD_DIM, HEAD_DIM - 8)):
        given = tensors(16, keys, torch.float64, value_dim=value_dim)
        slopes, window = SLOPES if alibi else None, WINDOW if kind == "window" else None
        call = AttentionCall(*given[:3], blocks, SCALE, window, slopes, softcap)
        asked = asked_on_its_device(name, call, monkeypatch)
        features = {feature for feature, has in (("alibi", alibi), ("softcap", softcap is not None)) if has}
        if any(together <= features for together in REFUSED[name]):
            reason = KERNELS[name].unsupported(asked)
            assert reason is not None
            with pytest.raises(KernelError, match=f"{name}: {reason}"):
                select_kernel(asked, name)
            continue
        kernel = select_kernel(asked, name)
        with stand_in(name, monkeypatch):
            out, _, *gradients = results(kernel, given, blocks, slopes, softcap)
        for ours, right in zip((out, *gradients), plain(given, kind, slopes, softcap)):
            torch.testing.assert_close(ours, right, rtol=1e-11, atol=1e-11)
        computed += 1
    assert computed == (6 if {"alibi", "softcap"} in REFUSED[name] else 4)
