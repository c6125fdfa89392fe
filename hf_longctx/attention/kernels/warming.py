"""Kernels that are compiled at their first call, called once of each kind before training: otherwise the first pack of short
documents, in step 137 on rank 88, stops everyone while a kernel is compiled.

Kinds are those by which flash-attention 4 compiles (4.0.0b36): the mask, whether the longest queries and the longest keys of
a call fit one block, and whether there are more than 256 sequences. Forward and backward of each run on a few hundred tokens.
Nothing is sent.
"""

from collections.abc import Iterator

import torch

from hf_longctx.attention.kernels.accumulate import RowSum
from hf_longctx.attention.kernels.interface import AttentionCall, Kernel
from hf_longctx.layouts.blocks import Block, Mask

ONE_BLOCK, SEVERAL_BLOCKS = 16, 400
"""Rows of a sequence: blocks have 64 to 256."""
FEW, MANY = 1, 257
"""Sequences of a call."""


def kinds(masks: tuple[Mask, ...]) -> Iterator[list[Block]]:
    """Blocks of each kind of call. Of many sequences all but the first have one row."""
    for mask in masks:
        sizes = (ONE_BLOCK, SEVERAL_BLOCKS)
        pairs = [(q, k) for q in sizes for k in sizes if mask is Mask.FULL or q == k]
        for q, k in pairs:
            for count in (FEW, MANY):
                blocks = [Block(0, q, 0, k, mask)]
                blocks += [Block(q + at, q + at + 1, k + at, k + at + 1, mask) for at in range(count - 1)]
                yield blocks


def warm(
    kernel: Kernel,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    masks: tuple[Mask, ...] = (Mask.CAUSAL, Mask.FULL, Mask.ANTICAUSAL),
) -> int:
    """Run each kind of call where the kernel is one that compiles. Returns how many calls there were."""
    if not getattr(kernel, "compiles", False):
        return 0
    calls = 0
    for blocks in kinds(masks):
        queries, keys = (max(getattr(block, end) for block in blocks) for end in ("q_stop", "k_stop"))
        q = torch.zeros(queries, heads, head_dim, dtype=dtype, device=device)
        k, v = (torch.zeros(keys, kv_heads, head_dim, dtype=dtype, device=device) for _ in range(2))
        call = AttentionCall(q, k, v, blocks, head_dim**-0.5)
        for _ in kernel.forward(call):
            calls += 1
        lse = torch.zeros(heads, queries, device=device)
        kernel.backward(call, q, q, lse, (RowSum(q), RowSum(k), RowSum(v)))
        calls += 1
    return calls
