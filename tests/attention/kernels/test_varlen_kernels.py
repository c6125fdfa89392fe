"""Varlen kernels: everything around the call, with the call itself as plain mathematics; and what is passed to it.

Stand-ins have the signatures of the packages' functions and compute what these state (stand_in_kernels.py); torch's own
operation is called on tensors without data. Results are compared with the
`reference` kernel in float64 (any_blocks.py).
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hf_longctx.attention import kernels
from hf_longctx.attention.kernels import KERNELS, AttentionCall, KernelError, flash_attn_packages, select_kernel
from hf_longctx.attention.kernels.accumulate import RowSum
from hf_longctx.attention.kernels.alibi_fold import Rows, key_dims, query_dims
from hf_longctx.attention.kernels.cuda_efficient import CudaEfficient
from hf_longctx.attention.kernels.cuda_varlen import CudaVarlen
from hf_longctx.attention.kernels.flash_attn_packages import FlashAttn2, FlashAttn3, FlashAttn4, PackageKernel
from hf_longctx.attention.kernels.padded_heads import PaddedHeads
from hf_longctx.attention.kernels.varlen import VarlenCall, VarlenKernel, calls_of
from hf_longctx.layouts.blocks import Block, Blocks, Mask
from tests.attention.kernels.any_blocks import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    SCALE,
    SLOPES,
    Call,
    assert_equals_reference,
    calls,
    results,
    tensors,
)
from tests.attention.kernels.stand_in_kernels import PACKAGES

ON_CUDA = ("flash_attn_3", "flash_attn_4", "flash_attn_2", "cuda_varlen", "cuda_efficient")


@pytest.fixture(params=PACKAGES, ids=lambda kernel: kernel.name)
def kernel(request, monkeypatch) -> PackageKernel:
    """A package's kernel with the stand-in for the package."""
    monkeypatch.setattr(request.param, "package", PACKAGES[request.param])
    return request.param()


@pytest.mark.parametrize("slopes", [None, SLOPES], ids=["plain", "alibi"])
def test_any_blocks_equal_the_reference(kernel: PackageKernel, slopes: torch.Tensor | None):
    """Float64 holds a slope in one piece, so ALiBi is exact too, folded or not."""

    @given(calls())
    @settings(max_examples=60, deadline=None)
    def equal(call: Call) -> None:
        assert_equals_reference(kernel, call, slopes)

    equal()


@pytest.mark.parametrize("of", [FlashAttn2, FlashAttn3], ids=lambda of: of.name)
def test_soft_caps_are_computed_by_the_kernel(of: type[PackageKernel], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(of, "package", PACKAGES[of])

    @given(calls(), st.sampled_from([0.5, 30.0]))
    @settings(max_examples=30, deadline=None)
    def equal(call: Call, softcap: float) -> None:
        assert_equals_reference(of(), call, None, softcap=softcap)

    equal()


@pytest.mark.parametrize("slopes", [None, SLOPES], ids=["plain", "alibi"])
@pytest.mark.parametrize("value_dim", [HEAD_DIM - 8, HEAD_DIM + 8])
def test_values_of_another_dimension_are_padded(kernel: PackageKernel, slopes: torch.Tensor | None, value_dim: int):
    """The stand-ins refuse operands of several dimensions."""

    @given(calls())
    @settings(max_examples=10, deadline=None)
    def equal(call: Call) -> None:
        assert_equals_reference(PaddedHeads(kernel), call, slopes, value_dim=value_dim)

    equal()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slopes", [None, SLOPES], ids=["plain", "alibi"])
def test_half_precision_with_wide_accumulation(kernel: PackageKernel, slopes: torch.Tensor | None, dtype: torch.dtype):
    causal = Block(0, 500, 0, 500, Mask.CAUSAL)
    far = Block(0, 500, 500, 2500, Mask.FULL, distance=2000)
    edge = Block(100, 300, 2500, 2700, Mask.ANTICAUSAL, distance=2300)
    assert_equals_reference(kernel, (500, 2700, [causal, far, edge]), slopes, dtype)


def test_folded_alibi_over_64k_keys(monkeypatch):
    """Slopes for which keys 1K, 10K and 64K tokens away still weigh something."""
    monkeypatch.setattr(FlashAttn4, "package", PACKAGES[FlashAttn4])
    block = Block(0, 3, 0, 65536, Mask.FULL, distance=65536)
    slopes = torch.tensor([1e-3, 1e-4, 1e-5, 1e-6], dtype=torch.float64)
    assert_equals_reference(FlashAttn4(), (3, 65536, [block]), slopes, torch.bfloat16)


@given(calls())
@settings(max_examples=60, deadline=None)
def test_calls_take_each_block_once_and_gather_at_most_twice_the_rows(call: Call):
    q_rows, k_rows, blocks = call
    grouped = list(calls_of(blocks, q_rows, k_rows))
    assert sorted(id(b) for group in grouped for b in group) == sorted(map(id, blocks))
    for group in grouped:
        assert len({b.mask for b in group}) == 1
        assert sum(b.q_stop - b.q_start for b in group) <= 2 * q_rows
        assert sum(b.k_stop - b.k_start for b in group) <= 2 * k_rows


def test_blocks_of_a_schedule_are_laid_out_once_for_all_layers(kernel: PackageKernel):
    """And once more where calls are others: for other rows, or backward in order."""
    blocks = Blocks(Block(a, b, a, b, Mask.CAUSAL) for a, b in ((0, 3), (4, 12)))
    q, k, v, _ = tensors(12, 12, torch.float64)
    sequences = []

    def run_forward(call: VarlenCall):
        sequences.append(call.sequences)
        return type(kernel).run_forward(kernel, call)

    kernel.run_forward = run_forward  # type: ignore[method-assign]
    for _ in range(2):
        list(kernel.forward(AttentionCall(q, k, v, blocks, SCALE)))
    first, second = sequences
    assert first is second
    list(kernel.forward(AttentionCall(q[:12], k, v, list(blocks), SCALE)))
    assert sequences[-1] is not first, "a list keeps nothing"
    with torch.device("cpu"):
        kernel._laid_out(blocks, q, torch.cat([k, k]))
        kernel._laid_out(blocks, q, k, backward=True)
    assert len(blocks.derived) == 3


def test_blocks_that_lie_end_to_end_are_one_result_without_a_copy(kernel: PackageKernel):
    blocks = [Block(a, b, a, b, Mask.CAUSAL) for a, b in ((0, 3), (3, 4), (4, 12))]
    q, k, v, _ = tensors(12, 12, torch.float64)
    received = []

    def run_forward(call: VarlenCall):
        received.append(call)
        return type(kernel).run_forward(kernel, call)

    kernel.run_forward = run_forward  # type: ignore[method-assign]
    assert [(p.start, p.stop) for p in kernel.forward(AttentionCall(q, k, v, blocks, SCALE))] == [(0, 12)]
    (call,) = received
    assert [x.data_ptr() for x in call[:3]] == [x.data_ptr() for x in (q, k, v)]
    assert call.sequences.queries.cu_seqlens.tolist() == call.sequences.keys.cu_seqlens.tolist() == [0, 3, 4, 12]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slope", [1.0, 0.84, 2**-2.5, 2**-8, 1e-4, 1e-6])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_folded_bias_holds_at_any_distance(dtype: torch.dtype, slope: float, head_dim: int):
    """Every distance to 4K, then to 1M, products summed in float32 one dimension after the other."""
    apart = torch.cat([torch.arange(1, 4096), torch.arange(4096, 2**20, 97), torch.tensor([2**16, 2**20 - 1])])
    scale, slopes = head_dim**-0.5, torch.tensor([slope])
    keys = key_dims(Rows(torch.tensor([0, 2**20], dtype=torch.int32), 2**20, 2**20), dtype)[2**20 - 1 - apart, 0]
    bias = (keys.float() * query_dims(slopes, scale, dtype).float()).cumsum(1, dtype=torch.float32)[:, -1] * scale
    expected = -slopes.double() * apart
    relative = ((bias.double() - expected) / expected).abs().max().item()
    assert relative <= (1e-5 if dtype == torch.float16 and slope == 1e-6 else 2e-6)


@pytest.mark.parametrize("slopes", [None, SLOPES.float()], ids=["plain", "alibi"])
def test_torch_accepts_the_call_and_its_switch_is_left_alone(slopes: torch.Tensor | None):
    """On tensors without data: torch's own shape functions of the two operations."""
    modes = {}

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "_flash_attention" in func.name():
                modes[func.name()] = torch.get_deterministic_debug_mode()
            return func(*args, **(kwargs or {}))

    q, k, v, grad = tensors(12, 12, torch.bfloat16, "meta")
    blocks = [Block(0, 12, 0, 12, Mask.CAUSAL), Block(2, 5, 0, 9, Mask.FULL, 9), Block(0, 4, 4, 8, Mask.ANTICAUSAL, 4)]
    slopes = None if slopes is None else slopes.to("meta")
    lse = torch.empty(HEADS, 12, device="meta")
    call = AttentionCall(q, k, v, blocks, SCALE, slopes=slopes)
    torch.set_deterministic_debug_mode("warn")
    try:
        with Watch():
            partials = list(CudaVarlen().forward(call))
            CudaVarlen().backward(call, grad, q, lse, (RowSum(q), RowSum(k), RowSum(v)))
        assert torch.get_deterministic_debug_mode() == 1
    finally:
        torch.set_deterministic_debug_mode("default")
    assert modes == {"aten::_flash_attention_forward": 1, "aten::_flash_attention_backward": 1}
    assert [(p.start, p.stop, p.out.shape, p.lse.shape) for p in partials] == [
        (start, stop, (stop - start, HEADS, HEAD_DIM), (HEADS, stop - start))
        for start, stop in ((2, 5), (0, 12), (0, 4))
    ]


def test_a_kernel_says_why_it_cannot_run(monkeypatch):
    call = AttentionCall.of_heads(HEADS, KV_HEADS, HEAD_DIM, torch.bfloat16, "cpu")
    for name in ON_CUDA:
        assert KERNELS[name].unsupported(call) == "needs tensors on cuda, these are on cpu"
    assert CudaVarlen().unavailable((7, 5)) == "needs compute capability 8.0 or later, this GPU has 7.5"
    versions: dict[str, str] = {}
    monkeypatch.setattr(flash_attn_packages, "installed_version", versions.get)
    missing = "flash-attn is not installed: pip install --no-build-isolation 'hf_longctx[cuda]'"
    assert FlashAttn2().unavailable((9, 0)) == missing
    versions.update({"flash-attn": "2.6.3", "flash_attn_3": "3.0.0", "flash-attn-4": "4.0.0b36"})
    assert FlashAttn2().unavailable((9, 0)) == "needs flash-attn 2.8 or later, 2.6.3 is installed"
    assert FlashAttn3().unavailable((10, 0)) == "needs compute capability 9.0, this GPU has 10.0"
    assert FlashAttn4().unavailable((12, 0)) == "needs compute capability 9.0 or 10.x, this GPU has 12.0"
    broken = FlashAttn3().unavailable((9, 0))
    assert broken is not None
    assert broken.startswith("flash_attn_3 3.0.0 is installed, but cannot be imported: No module named")


@pytest.mark.parametrize(
    ("kernel", "capability", "largest", "with_alibi"),
    [
        (CudaVarlen(), (8, 0), 256, 248),
        (FlashAttn2(), (8, 0), 256, 248),
        (FlashAttn3(), (9, 0), 192, 184),
        (FlashAttn4(), (9, 0), 256, 248),
        (FlashAttn4(), (10, 0), 128, 120),
        (CudaEfficient(), (8, 0), 65536, 65528),
    ],
)
def test_head_dimensions(kernel: VarlenKernel, capability: tuple[int, int], largest: int, with_alibi: int):
    assert kernel.unfit_head_dim(largest, capability) is None
    assert kernel.unfit_head_dim(with_alibi, capability, alibi=True) is None
    rule = f"needs a head dimension that is a multiple of 8 up to {largest}, this one is"
    assert kernel.unfit_head_dim(largest + 8, capability) == f"{rule} {largest + 8}"
    assert kernel.unfit_head_dim(largest, capability, alibi=True) == f"{rule} {largest}, and ALiBi takes 8 more"
    assert kernel.unfit_head_dim(20, capability) == f"{rule} 20"


def call_on_an_h100(installed: bool, head_dim: int, features: dict[str, Any], monkeypatch: Any) -> AttentionCall:
    """Return what a kernel is asked about, in bfloat16, and say whether the packages are there."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(PackageKernel, "unavailable", lambda self, capability: None if installed else "is missing")
    call = AttentionCall.of_heads(HEADS, HEADS, head_dim, torch.bfloat16, "meta", **features)
    return call._replace(q=SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16, shape=call.q.shape))


@pytest.mark.parametrize(
    ("installed", "head_dim", "features", "chosen"),
    [
        (True, 128, {}, "flash_attn_3"),
        (True, 128, {"softcap": 30.0}, "flash_attn_3"),
        (True, 256, {"softcap": 30.0}, "flash_attn_2"),
        (True, 192, {"value_dim": 128}, "flash_attn_3"),
        (True, 64, {"value_dim": 200}, "flash_attn_4"),
        (True, 512, {}, "cuda_efficient"),
        (True, 512, {"alibi": True, "value_dim": 128}, "cuda_efficient"),
        (True, 512, {"value_dim": 100}, "tiled"),
        (True, 512, {"softcap": 30.0}, "tiled"),
        (False, 128, {"softcap": 30.0}, "tiled"),
        (False, 128, {}, "cuda_varlen"),
    ],
)
def test_which_kernel_a_gpu_gets(installed: bool, head_dim: int, features: dict[str, Any], chosen: str, monkeypatch):
    call = call_on_an_h100(installed, head_dim, features, monkeypatch)
    warnings: list[str] = []
    monkeypatch.setattr(kernels, "_warn_of_plain_torch", warnings.append)
    chosen_kernel = select_kernel(call)
    assert chosen_kernel.name == chosen
    assert len(warnings) == (chosen == "tiled")
    assert all("cuda_efficient: " in warning and "tiled" not in warning for warning in warnings)
    assert isinstance(chosen_kernel, PaddedHeads) == (
        "value_dim" in features and chosen not in ("cuda_efficient", "tiled")
    )


@pytest.mark.parametrize(
    ("installed", "head_dim", "features", "reason"),
    [
        (
            True,
            512,
            {"alibi": True, "value_dim": 100},
            "cuda_efficient: needs a head dimension .*, this one is 100, and ALiBi",
        ),
        (True, 516, {"alibi": True}, "flash_attn_2: needs a head dimension .* up to 256, this one is 516, and ALiBi"),
        (False, 516, {"alibi": True}, "flash_attn_2: is missing;.* tiled: has no ALiBi"),
    ],
)
def test_why_a_gpu_gets_none(installed: bool, head_dim: int, features: dict[str, Any], reason: str, monkeypatch):
    call = call_on_an_h100(installed, head_dim, features, monkeypatch)
    with pytest.raises(KernelError, match=reason):
        select_kernel(call)


def test_head_dimension_256_on_a_b200():
    assert FlashAttn4().unfit_head_dim(256, (10, 0)) is None


@pytest.fixture
def same_bits() -> Iterator[None]:
    """Torch's switch for deterministic algorithms is on."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_with_the_switch_on_backward_is_deterministic_and_lengths_are_called_by_class(
    kernel: PackageKernel, same_bits: None
):
    """The stand-ins assert that they are told what torch's switch says."""
    lengths = (40, 3, 2, 33, 1)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    blocks = [Block(a, a + n, a, a + n, Mask.CAUSAL) for a, n in zip(starts, lengths)]
    assert_equals_reference(kernel, (79, 79, blocks), None)
    classes = [[40, 33], [3, 2], [1]] if kernel.sums_parts else [list(lengths)]
    called = [[b.q_stop - b.q_start for b in call] for call in kernel.backward_calls(blocks, 79, 79)]
    assert called == classes
    assert [len(call) for call in kernel.calls(blocks, 79, 79)] == [5]


def cuda_cases() -> Iterator[object]:
    """The kernels that this machine can run; all of them, skipped, where it has no GPU."""
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="a CUDA kernel needs a GPU")
        yield from (pytest.param(name, marks=skip) for name in ON_CUDA)
        return
    call = AttentionCall.of_heads(HEADS, KV_HEADS, HEAD_DIM, torch.bfloat16, "cuda", alibi=True, window=100)
    yield from (name for name in ON_CUDA if KERNELS[name].unsupported(call) is None)


@pytest.mark.parametrize("name", cuda_cases())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("slopes", [None, SLOPES], ids=["plain", "alibi"])
def test_on_cuda(name: str, dtype: torch.dtype, slopes: torch.Tensor | None, same_bits: None):
    """The kernels themselves, and equal bits when run twice with torch's switch on."""
    blocks = [
        *(Block(a, b, a, b, Mask.CAUSAL) for a, b in ((0, 1), (1, 700), (700, 1000))),
        Block(100, 900, 0, 1000, Mask.FULL, distance=1000),
        Block(200, 201, 7, 8, Mask.FULL, distance=300),
        Block(300, 700, 600, 1000, Mask.ANTICAUSAL, distance=500),
    ]
    assert_equals_reference(KERNELS[name], (1000, 1000, blocks), slopes, dtype, "cuda")
    given_ = tensors(1000, 1000, dtype, "cuda")
    on_device = None if slopes is None else slopes.to("cuda", torch.float32)
    first, second = (results(KERNELS[name], given_, blocks, on_device) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
