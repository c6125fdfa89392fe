"""Any blocks that a kernel may be given, and its results on them against the `reference` kernel in float64.

Tolerances: float64 1e-12. bfloat16 and float16, float32 accumulation: 1e-2 and 2e-3 relative (8 and 11 bits of mantissa).
"""

from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from hf_longctx.attention.kernels.accumulate import RowSum, merge_
from hf_longctx.attention.kernels.interface import AttentionCall
from hf_longctx.attention.kernels.reference import Reference
from hf_longctx.layouts.blocks import Block, Mask

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
SCALE = HEAD_DIM**-0.5
SLOPES = torch.tensor([0.7, 0.25, 0.1, 0.0039], dtype=torch.float64)
TOLERANCE = {torch.float64: 1e-12, torch.bfloat16: 1e-2, torch.float16: 2e-3}

Call = tuple[int, int, list[Block]]
"""Query rows, key rows, blocks."""


@st.composite
def calls(draw) -> Call:
    """Blocks of all masks, which may share query rows and key rows."""
    q_rows, k_rows = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    blocks = []
    for _ in range(draw(st.integers(1, 7))):
        mask = draw(st.sampled_from(Mask))
        q_start, k_start = draw(st.integers(0, q_rows - 1)), draw(st.integers(0, k_rows - 1))
        queries, keys = draw(st.integers(1, q_rows - q_start)), draw(st.integers(1, k_rows - k_start))
        if mask is not Mask.FULL:
            queries = keys = min(queries, keys)
        nearest = 0 if mask is Mask.CAUSAL else keys
        distance = nearest + draw(st.integers(0, 50))
        blocks.append(Block(q_start, q_start + queries, k_start, k_start + keys, mask, distance))
    return q_rows, k_rows, blocks


def tensors(
    q_rows: int, k_rows: int, dtype: torch.dtype, device: str = "cpu", value_dim: int = HEAD_DIM
) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(100 * q_rows + k_rows)
    rows_and_heads = ((q_rows, HEADS), (k_rows, KV_HEADS), (k_rows, KV_HEADS), (q_rows, HEADS))
    shapes = [(*shape, dim) for shape, dim in zip(rows_and_heads, (HEAD_DIM, HEAD_DIM, value_dim, value_dim))]
    return [torch.randn(*shape, generator=generator).to(dtype).to(device) for shape in shapes]


def results(
    kernel,
    given_: Sequence[torch.Tensor],
    blocks: Sequence[Block],
    slopes: torch.Tensor | None,
    softcap: float | None = None,
):
    """out, lse, dq, dk, dv of all blocks merged; rows that see no key keep an lse of -1e30."""
    q, k, v, grad = given_
    wide = torch.promote_types(q.dtype, torch.float32)
    out = torch.zeros_like(grad, dtype=wide)
    lse = torch.full((HEADS, q.shape[0]), -1e30, dtype=wide, device=q.device)
    call = AttentionCall(q, k, v, blocks, SCALE, None, slopes, softcap)
    for partial in kernel.forward(call):
        merge_(out, lse, partial)
    sums = [RowSum(x) for x in (q, k, v)]
    kernel.backward(call, grad, out.to(q.dtype), lse, tuple(sums))
    return [out, lse, *(x.total() for x in sums)]


def assert_equals_reference(
    kernel,
    call: Call,
    slopes: torch.Tensor | None,
    dtype=torch.float64,
    device="cpu",
    value_dim=HEAD_DIM,
    softcap: float | None = None,
) -> None:
    q_rows, k_rows, blocks = call
    given_ = tensors(q_rows, k_rows, dtype, device, value_dim)
    lse_dtype = torch.promote_types(dtype, torch.float32)
    computed = results(kernel, given_, blocks, None if slopes is None else slopes.to(device, lse_dtype), softcap)
    right = results(Reference(), [x.double().cpu() for x in given_], blocks, slopes, softcap)
    for name, ours, expected in zip(("out", "lse", "dq", "dk", "dv"), computed, right):
        error = ((ours.double().cpu() - expected).norm() / expected.norm().clamp_min(1.0)).item()
        assert error <= TOLERANCE[dtype], f"{name}: {error:.1e}"
