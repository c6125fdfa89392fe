"""Every call of an attention kernel's function is one that the recorded releases take (kernel_schemas.py): names, numbers of
arguments, and types of values. What the functions compute is not looked at."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_longctx.attention.kernels.accumulate import RowSum
from hf_longctx.attention.kernels.cuda_efficient import CudaEfficient
from hf_longctx.attention.kernels.cuda_varlen import CudaVarlen
from hf_longctx.attention.kernels.flash_attn_packages import FlashAttn2, FlashAttn3, FlashAttn4
from hf_longctx.attention.kernels.interface import AttentionCall
from hf_longctx.attention.kernels.varlen import VarlenKernel
from hf_longctx.layouts.blocks import Block, Blocks, Mask
from tests.attention.kernels.kernel_schemas import Parameter, check, read, recorded

RELEASES = recorded()
KERNELS: dict[str, list[type[VarlenKernel]]] = {
    "flash-attn-2": [FlashAttn2],
    "flash_attn_3": [FlashAttn3],
    "flash-attn-4": [FlashAttn4],
    "torch": [CudaVarlen, CudaEfficient],
}
CASES = [
    pytest.param(release, kernel, id=f"{kernel.name}, {release}")
    for release in RELEASES
    for prefix, kernels in KERNELS.items()
    if release.startswith(prefix)
    for kernel in kernels
]
TOKENS, HEADS, KV_HEADS, DIM = 24, 4, 2, 16


def standing_in(name: str, parameters: list[Parameter], called: list[tuple[str, dict[str, Any]]]) -> Any:
    """A function that checks its call and returns tensors of the right shapes."""

    def function(*args: Any, **kwargs: Any) -> Any:
        check(parameters, args, kwargs)
        given = dict(zip((parameter[0] for parameter in parameters), args)) | kwargs
        called.append((name, given))
        q, k, v = (given.get(letter, given.get(long)) for letter, long in zip("qkv", ("query", "key", "value")))
        if name.endswith(("bwd", "backward")):
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), None
        rows = q.shape[0] if q.dim() == 3 else q.shape[1]
        padded = torch.zeros(8, q.shape[-2], 32) if q.dim() == 4 else torch.zeros(HEADS, rows)
        return torch.zeros_like(q), padded, None, None, None

    return function


def calls(
    kernel: VarlenKernel, release: str, monkeypatch: Any, *, messages: bool = False
) -> list[tuple[str, dict[str, Any]]]:
    """Calls of forward and backward over blocks of each mask, with and without what the kernel takes beside."""
    called: list[tuple[str, dict[str, Any]]] = []
    functions = {name: standing_in(name, of, called) for name, of in RELEASES[release].items()}
    if release.startswith("torch"):
        for name, function in functions.items():
            monkeypatch.setattr(torch.ops.aten, name, function, raising=False)
    else:
        monkeypatch.setattr(type(kernel), "package", SimpleNamespace(**functions))
    causal, full, corner = (Block(0, 12, 0, 12, mask, 0) for mask in (Mask.CAUSAL, Mask.FULL, Mask.ANTICAUSAL))
    blocks = Blocks((causal, dataclasses.replace(causal, q_start=12, q_stop=24, k_start=12, k_stop=24), full, corner))
    blocks.in_flight = (messages, messages)
    q, k, v = (torch.zeros(TOKENS, heads, DIM, dtype=torch.bfloat16) for heads in (HEADS, KV_HEADS, KV_HEADS))
    lse = torch.zeros(HEADS, TOKENS)
    for slopes, softcap in ((None, None), (torch.ones(HEADS), None), *([(None, 30.0)] if kernel.soft_caps else [])):
        call = AttentionCall(q, k, v, blocks, 0.25, None, slopes, softcap)
        list(kernel.forward(call))
        kernel.backward(call, q, q, lse, (RowSum(q), RowSum(k), RowSum(v)))
    return called


@pytest.mark.parametrize(("release", "kernel"), CASES)
def test_recorded_releases_take_every_call(release: str, kernel: type[VarlenKernel], monkeypatch):
    called = calls(kernel(), release, monkeypatch)
    assert {name for name, _ in called} <= set(RELEASES[release])
    assert len({name for name, _ in called}) == 2
    assert len(called) >= 2 * 3 * 2, "each mask, forward and backward, with and without ALiBi"


@pytest.mark.parametrize("messages", [False, True])
def test_flash_attention_3_leaves_multiprocessors_to_messages_in_flight(messages: bool, monkeypatch):
    called = calls(FlashAttn3(), "flash_attn_3-3.0.0-2026", monkeypatch, messages=messages)
    assert {given["sm_margin"] for _, given in called} == {8 if messages else 0}


def test_what_this_torch_has_is_recorded():
    release = "torch-" + ".".join(torch.__version__.split(".")[:2])
    assert read(Path(torch.__file__).parents[1]) == RELEASES[release]


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((1,), {}, "missing a required argument: 'b'"),
        ((1, 2), {"c": 1.0}, "unexpected keyword argument 'c'"),
        ((1, True), {}, "b=True is a bool, and int is wanted"),
        ((None, 2), {}, "a=None is a NoneType, and int is wanted"),
        ((torch.zeros(1), 2), {}, "Tensor, and int is wanted"),
        ((1, 2, None, 4), {}, "too many positional arguments"),
    ],
)
def test_a_call_that_would_be_refused_is(args: tuple[Any, ...], kwargs: dict[str, Any], message: str):
    parameters = [
        ("a", "int", False, False),
        ("b", "int", False, False),
        ("d", "Tensor?", True, False),
        ("e", "int", True, True),
    ]
    with pytest.raises(TypeError, match=message):
        check(parameters, args, kwargs)
