"""Kernels against torch's own attention in float64, whole and merged from blocks, forward and backward.

Tolerances: 2e-6 relative in float32, 1e-12 in float64; on CUDA 1e-2 in bfloat16 and float16 (8 and 11 bits of mantissa).
"""

import pickle
from contextlib import contextmanager

import pytest
import torch

from hf_longctx.attention.engine import layout_attention
from hf_longctx.attention.kernels import KERNELS, AttentionCall, KernelError, Partial, RowSum, select_kernel
from hf_longctx.attention.kernels.accumulate import merge_
from hf_longctx.layouts.blocks import Block, Mask
from hf_longctx.layouts.layout import Layout, Segment
from tests.attention.kernels.document_attention import HEAD_DIM, HEADS, plain, tensors

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12, torch.bfloat16: 1e-2, torch.float16: 1e-2}

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="a CUDA kernel needs a GPU")

CASES = [
    ("cpu_flash", torch.float32, "cpu"),
    ("cpu_flash", torch.float64, "cpu"),
    ("reference", torch.float64, "cpu"),
] + [pytest.param(("cuda_varlen"), dtype, "cuda", marks=needs_cuda) for dtype in (torch.bfloat16, torch.float16)]


def assert_near(results: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    for name, ours, right in zip(("out", "dq", "dk", "dv"), results, expected):
        # The gradient of a one-token document's query is zero: inputs of unit size give the scale there.
        error = ((ours.double().cpu() - right).norm() / right.norm().clamp_min(1.0)).item()
        assert error <= tolerance, f"{name}: {error:.1e} > {tolerance}"


@pytest.mark.parametrize(("kernel", "dtype", "device"), CASES)
@pytest.mark.parametrize("lengths", [[1], [37], [5, 1, 64, 13]])
def test_whole_documents(kernel: str, dtype: torch.dtype, device: str, lengths: list[int]):
    given = tensors(sum(lengths), dtype, device)
    q, k, v = (x.requires_grad_() for x in given[:3])
    layout = Layout({0: [Segment(doc, 0, length) for doc, length in enumerate(lengths)]})
    out = layout_attention(q, k, v, layout, kernel=kernel)
    assert out.dtype == dtype
    assert_near([out.detach(), *torch.autograd.grad(out, (q, k, v), given[3])], plain(given, lengths), TOLERANCE[dtype])


@pytest.mark.parametrize(("kernel", "dtype", "device"), CASES)
def test_a_document_merged_from_blocks(kernel: str, dtype: torch.dtype, device: str):
    """Causal blocks first, then full ones in two calls; the last call has keys that two blocks share."""
    lengths = [24]
    given = tensors(24, dtype, device)
    q, k, v, grad = given
    scale, chosen = HEAD_DIM**-0.5, KERNELS[kernel]
    local = [Block(0, 8, 0, 8, Mask.CAUSAL), Block(8, 24, 8, 24, Mask.CAUSAL)]
    calls = [[Block(8, 24, 0, 4, Mask.FULL)], [Block(8, 12, 4, 8, Mask.FULL), Block(12, 24, 4, 8, Mask.FULL)]]
    accumulate = torch.float64 if dtype == torch.float64 else torch.float32
    out = torch.empty(24, HEADS, HEAD_DIM, dtype=accumulate, device=device)
    lse = torch.empty(HEADS, 24, dtype=accumulate, device=device)
    for partial in chosen.forward(AttentionCall(q, k, v, local, scale)):
        out[partial.start : partial.stop], lse[:, partial.start : partial.stop] = partial.out, partial.lse
    for blocks in calls:
        for partial in chosen.forward(AttentionCall(q, k, v, blocks, scale)):
            merge_(out, lse, partial)
    sums = RowSum(q), RowSum(k), RowSum(v)
    for blocks in (local, *calls):
        chosen.backward(AttentionCall(q, k, v, blocks, scale), grad, out.to(dtype), lse, sums)
    assert_near([out, *(x.total() for x in sums)], plain(given, lengths), TOLERANCE[dtype])


def test_merging_is_exact_where_one_side_dominates():
    out, lse = torch.ones(1, 1, 2), torch.tensor([[0.0]])
    merge_(out, lse, Partial(0, 1, torch.full((1, 1, 2), 3.0), torch.tensor([[200.0]])))
    torch.testing.assert_close(out, torch.full((1, 1, 2), 3.0))
    torch.testing.assert_close(lse, torch.tensor([[200.0]]))


def test_the_slow_kernel_is_never_chosen_silently():
    call = AttentionCall.of_heads(4, 2, 16, torch.float32, "meta")
    reasons = "cuda_varlen: needs tensors on cuda.*cpu_flash: needs tensors on cpu.*tiled: needs tensors on cpu or cuda"
    with pytest.raises(KernelError, match=f"{reasons}.*never chosen silently"):
        select_kernel(call)
    assert select_kernel(call, "reference").name == "reference"


def test_the_error_passes_through_context_managers_and_between_processes():
    error = KernelError({"cpu_flash": "needs tensors on cpu"})
    with pytest.raises(KernelError, match="cpu_flash: needs tensors on cpu"), closing_context():
        raise error
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@contextmanager
def closing_context():
    yield


def test_a_kernel_that_cannot_run_says_why():
    call = AttentionCall.of_heads(4, 2, 16, torch.float32, "cpu")
    assert select_kernel(call).name == "cpu_flash"
    with pytest.raises(KernelError, match="cuda_varlen: needs tensors on cuda, these are on cpu"):
        select_kernel(call, "cuda_varlen")
    with pytest.raises(ValueError, match=r"kernel=.flash. is unknown; valid: auto, .*cuda_varlen, .*, reference$"):
        select_kernel(call, "flash")
