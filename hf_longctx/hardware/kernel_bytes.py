"""Device memory that an attention kernel takes for itself while it runs backward, by the kernel's name.

Read in the sources of flash-attn 2.8.3 (csrc/flash_attn/flash_api.cpp, mha_varlen_bwd; torch's own kernel is a copy),
flash_attn_3 (hopper/flash_api.cpp, mha_bwd), flash-attn-4 (cute/interface.py, _flash_attn_bwd) and torch's
attention_backward.cu. Bytes per token of queries and keys, for one sequence; each further one takes up to 128 rows more.

                      gradients of queries           of shared keys and values          of rows
    flash-attention 2 float32, once for each split   a copy for each query head         1 float32
    flash-attention 3 float32                        float32                            2
    flash-attention 4 float32                        float32                            2
    memory-efficient  float32                        float32, and a copy of operands    1

A deterministic backward of flash-attention 2 has a split for each thread block that works on one head, so that all of the GPU's
multiprocessors do: with few heads on a rank (tensor parallelism, Ulysses) those are many.
"""

from __future__ import annotations

PROCESSORS = 132
"""Multiprocessors of an H100."""
FLASH_2 = ("flash_attn_2", "cuda_varlen")
FLASH_3, FLASH_4, EFFICIENT = "flash_attn_3", "flash_attn_4", "cuda_efficient"
WITHOUT_PACKAGES = "cuda_varlen"
"""The kernel of a GPU on which no package of flash-attention is installed."""
TRACED = "traced"
"""Stands for a kernel on fake tensors, whose own memory no trace sees (training/traced.py)."""
HEAD_DIMS_OF_3 = (64, 96, 128, 192, 256)


def _multiple(count: int, of: int) -> int:
    return -(-count // of) * of


def workspace_token(
    kernel: str | None,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    deterministic: bool = False,
    processors: int = PROCESSORS,
) -> int | None:
    """Return the bytes per token of one call of backward beside its operands and results; None for a kernel that is not listed
    here: those of CPUs, and plain torch.

    Args:
        kernel: its name.
        heads, kv_heads, head_dim: of this rank's tensors.
        deterministic: whether torch is asked for deterministic algorithms.
        processors: multiprocessors of the GPU.
    """
    grouped = kv_heads < heads
    if kernel == TRACED:
        return 0
    if kernel in FLASH_2:
        rounded = _multiple(head_dim, 32 if head_dim <= 128 else 64)
        splits = -(-processors // heads) if deterministic else 1
        return 4 * splits * heads * rounded + 4 * heads + (2 * 2 * heads * head_dim if grouped else 0)
    if kernel in (FLASH_3, FLASH_4):
        rounded = _multiple(head_dim, 32)
        if kernel == FLASH_3:
            rounded = next((dim for dim in HEAD_DIMS_OF_3 if dim >= head_dim), rounded)
        return 4 * heads * rounded + 2 * 4 * heads + (2 * 4 * kv_heads * rounded if grouped else 0)
    if kernel == EFFICIENT:
        copies = 2 * 2 * 2 * heads * head_dim if grouped else 0
        return 3 * 4 * heads * head_dim + 4 * heads + copies
    return None
