"""Device memory that attention kernels take for themselves while they run backward, beside their operands and the float32 sums
that they add to. A kernel names one of these functions as its `workspace` (attention/kernels/interface.py).

Read in the sources of flash-attn 2.8.3 (csrc/flash_attn/flash_api.cpp, mha_varlen_bwd; torch's own kernel is a copy),
flash_attn_3 (hopper/flash_api.cpp, mha_bwd), flash-attn-4 (cute/interface.py, _flash_attn_bwd) and torch's
attention_backward.cu. Bytes per token of queries and keys, for one sequence; each further one takes up to 128 rows more.
Beside these, GPUs' kernels return gradients of queries, keys and values, in the dtype of their operands.

                      gradients of queries           of shared keys and values          of rows
    flash-attention 2 float32, once for each split   a copy for each query head         1 float32
    flash-attention 3 float32                        float32                            2
    flash-attention 4 float32                        float32                            2
    memory-efficient  float32                        float32, and a copy of operands    1

A deterministic backward of flash-attention 2 has a split for each thread block that works on one head, so that all of the GPU's
multiprocessors do: with few heads on a rank (tensor parallelism, Ulysses) those are many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hf_longctx.counting.records import AttentionShape

PROCESSORS = 132
"""Multiprocessors of an H100."""
HEAD_DIMS_OF_3 = (64, 96, 128, 192, 256)


@dataclass(frozen=True)
class Conditions:
    """How a call runs, beside its shape."""

    element_bytes: int = 2
    """of an operand"""
    deterministic: bool = False
    """whether torch is asked for deterministic algorithms"""
    alibi: bool = False
    processors: int = PROCESSORS
    """multiprocessors of the GPU"""


Workspace = Callable[[AttentionShape, Conditions], int]
"""Bytes per token of one call of backward, of this rank's heads."""


def flash_2(shape: AttentionShape, conditions: Conditions) -> int:
    """Count those of flash-attention 2, and of torch's copy of it."""
    dim, heads = _dim(shape), shape.heads
    splits = -(-conditions.processors // heads) if conditions.deterministic else 1
    copies = 2 * 2 * heads * dim if _shared(shape) else 0
    sums = 4 * splits * heads * _multiple(dim, 32 if dim <= 128 else 64)
    return sums + 4 * heads + copies + returned(shape, conditions)


def flash_3(shape: AttentionShape, conditions: Conditions) -> int:
    """Count those of flash-attention 3."""
    dim = _dim(shape)
    rounded = next((size for size in HEAD_DIMS_OF_3 if size >= dim), _multiple(dim, 32))
    return _float32_sums(shape, rounded) + returned(shape, conditions)


def flash_4(shape: AttentionShape, conditions: Conditions) -> int:
    """Count those of flash-attention 4."""
    return _float32_sums(shape, _multiple(_dim(shape), 32)) + returned(shape, conditions)


def memory_efficient(shape: AttentionShape, conditions: Conditions) -> int:
    """Count those of torch's memory-efficient attention."""
    dim, heads = _dim(shape), shape.heads
    copies = 2 * 2 * 2 * heads * dim if _shared(shape) else 0
    return 3 * 4 * heads * dim + 4 * heads + copies + returned(shape, conditions)


def returned(shape: AttentionShape, conditions: Conditions) -> int:
    """Count what every kernel of a GPU returns, which is all that a trace on fake tensors sees of it (training/traced.py)."""
    return conditions.element_bytes * (shape.heads * shape.qk_width + shape.kv_elements)


def float32_operands(shape: AttentionShape, conditions: Conditions) -> int:
    """Count those of plain torch and of torch's kernel for CPUs, whose gradients become the sums: half precision's operands in
    float32, and where ALiBi cuts queries into tiles, a tile's gradients of keys and values."""
    tile = 4 * shape.kv_elements if conditions.alibi else 0
    if conditions.element_bytes == 4:
        return tile
    return max(4 * (3 * shape.heads * shape.qk_width + shape.kv_elements), tile + 4 * shape.kv_elements)


def _float32_sums(shape: AttentionShape, rounded: int) -> int:
    """Count gradients of heads of so many elements in float32, and two numbers a row."""
    return 4 * shape.heads * rounded + 2 * 4 * shape.heads + (2 * 4 * shape.kv_heads * rounded if _shared(shape) else 0)


def _dim(shape: AttentionShape) -> int:
    """Return the elements of a head, all of which are padded to the widest."""
    return max(shape.qk_width, shape.value_width)


def _shared(shape: AttentionShape) -> bool:
    """Whether several query heads share keys and values."""
    return shape.kv_heads < shape.heads


def _multiple(count: int, of: int) -> int:
    return -(-count // of) * of
