"""torch's memory-efficient attention for CUDA (xFormers' cutlass kernels inside torch): heads wider than any flash kernel takes.

Heads of 512 (Gemma 4's full layers) fit no flash kernel; this one takes heads of any dimension, values of their own, and is
slower: it comes after them in `KERNELS`.

Read in torch's sources (attention.cu, attention_backward.cu, mem_eff_attention/ of torch 2.13):

- Rows are [1, T, H, D] with cu_seqlens; queries, keys and values have equally many heads, so shared ones are repeated here,
  and their gradients summed in float32.
- The log-sum-exp is natural, one padded row a sequence: [B, H, longest rounded up to 32]. Backward wants it so, with +inf in
  the padding, and a float32 workspace of as many rows: calls are closed before B * longest exceeds twice the rows.
- Masks are none and causal. An anticausal square is a causal one with all rows reversed; reversed end to end, sequences come
  in reverse order too.

      rows a0 a1 a2 b0 b1, cu_seqlens 0 3 5        reversed  b1 b0 a2 a1 a0, cu_seqlens 0 2 5

- Backward is deterministic where torch's global switch says so: keys are then not split, and each head of a sequence is one
  thread block.

tests/attention/kernels/test_efficient_attention.py computes what these sources state in place of the two operations; on a GPU,
tests/attention/kernels/test_varlen_kernels.py runs them.

Shapes: T tokens, B sequences of a call, Hq query heads, Hkv key/value heads, H heads of the operands.
"""

from collections.abc import Iterator, Sequence

import torch

from hf_longctx.attention.kernels.alibi_fold import Rows
from hf_longctx.attention.kernels.varlen import Triple, VarlenCall, VarlenKernel
from hf_longctx.hardware import kernel_bytes
from hf_longctx.layouts.blocks import Block, Mask

ALIGNMENT = 32
"""Numbers to which a row of the log-sum-exp is padded."""
LARGEST_OFFSET = 2**31
"""Elements behind a sequence's first key that forward no longer finds (kernel_forward.h: iter_key_start * k_strideM). Queries,
results, and all of backward are found in 64 bits."""
ALL = slice(None)
NO_MASK, CAUSAL_FROM_TOP_LEFT = 0, 1
"""torch's sdp::CustomMaskType."""


class CudaEfficient(VarlenKernel):
    """See the module's docstring; the interface is `Kernel`."""

    name = "cuda_efficient"
    value_dims = True
    workspace = staticmethod(kernel_bytes.memory_efficient)

    def unavailable(self, capability: tuple[int, int]) -> str | None:
        if capability < (8, 0):
            return f"needs compute capability 8.0 or later, this GPU has {capability[0]}.{capability[1]}"
        if capability >= (10, 0) and torch_version() < (2, 12):
            return "torch 2.11 has no such kernels for compute capability 10.0 and later; torch 2.12 has"
        return None

    def max_head_dim(self, capability: tuple[int, int], head_dim: int) -> int:
        return 1 << 16

    def calls(self, blocks: Sequence[Block], q_rows: int, k_rows: int) -> Iterator[list[Block]]:
        for blocks_of_mask in super().calls(blocks, q_rows, k_rows):
            call: list[Block] = []
            for block in blocks_of_mask:
                longer = [*call, block]
                queries, keys = (max(map(length, longer)) * len(longer) for length in (_queries, _keys))
                if call and (queries > 2 * q_rows or keys > 2 * k_rows):
                    yield call
                    longer = [block]
                call = longer
            yield call

    def run_forward(self, call: VarlenCall) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, sequences, scale, _, _ = call
        reverse = sequences.mask is Mask.ANTICAUSAL
        queries, keys = (_reversed(rows) if reverse else rows for rows in (sequences.queries, sequences.keys))
        heads = most_heads(keys.longest, max(k.shape[2], v.shape[2]), q.shape[1])
        parts = []
        for first in range(0, q.shape[1], heads):
            some = slice(first, first + heads)
            parts.append(
                torch.ops.aten._efficient_attention_forward(
                    *(_operand(x, q.shape[1], reverse, some) for x in (q, k, v)),
                    None,
                    queries.cu_seqlens,
                    keys.cu_seqlens,
                    queries.longest,
                    keys.longest,
                    0.0,
                    NO_MASK if sequences.mask is Mask.FULL else CAUSAL_FROM_TOP_LEFT,
                    True,
                    scale=scale,
                )[:2]
            )
        out, padded = parts[0] if len(parts) == 1 else (torch.cat(part, dim) for part, dim in zip(zip(*parts), (2, 1)))
        sequence, position = _places(queries)
        lse = padded[sequence, :, position].t()
        return (out[0].flip(0), lse.flip(1)) if reverse else (out[0], lse)

    def run_backward(self, call: VarlenCall, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Triple:
        q, k, v, sequences, scale, _, _ = call
        reverse = sequences.mask is Mask.ANTICAUSAL
        queries, keys = (_reversed(rows) if reverse else rows for rows in (sequences.queries, sequences.keys))
        longest = -(-queries.longest // ALIGNMENT) * ALIGNMENT
        padded = lse.new_full((len(queries.cu_seqlens) - 1, len(lse), longest), torch.inf)
        sequence, position = _places(queries)
        padded[sequence, :, position] = (lse.flip(1) if reverse else lse).t()
        d_out, rows_q, rows_k, rows_v, o = (_operand(x, q.shape[1], reverse) for x in (grad_out, q, k, v, out))
        no_dropout = torch.empty((), dtype=torch.long)
        gradients = torch.ops.aten._efficient_attention_backward(
            d_out,
            rows_q,
            rows_k,
            rows_v,
            None,
            o,
            queries.cu_seqlens,
            keys.cu_seqlens,
            queries.longest,
            keys.longest,
            padded,
            0.0,
            no_dropout,
            no_dropout,
            NO_MASK if sequences.mask is Mask.FULL else CAUSAL_FROM_TOP_LEFT,
            False,
            scale=scale,
        )
        dq, dk, dv = (x[0].flip(0) if reverse else x[0] for x in gradients[:3])
        return dq, _summed(dk, k.shape[1]), _summed(dv, v.shape[1])


def _queries(block: Block) -> int:
    return block.q_stop - block.q_start


def _keys(block: Block) -> int:
    return block.k_stop - block.k_start


def most_heads(keys: int, head_dim: int, heads: int) -> int:
    """Return of how many of its heads a call of so many keys a sequence may be: forward finds a key at its number times the
    elements of a row, in 32 bits.

    Raises:
        ValueError: not even one head fits.
    """
    most = min((LARGEST_OFFSET - 1) // (keys * head_dim), heads)
    if most < 1:
        raise ValueError(
            f"{keys} keys of dimension {head_dim} are {keys * head_dim} elements, and memory-efficient attention finds at most "
            f"{LARGEST_OFFSET - 1}; valid: documents on more ranks, or kernel 'tiled'"
        )
    return most


def torch_version() -> tuple[int, int]:
    """Return torch's major and minor version."""
    major, minor, *_ = torch.__version__.split(".")
    return int(major), int(minor)


def _operand(x: torch.Tensor, heads: int, reverse: bool, some: slice = ALL) -> torch.Tensor:
    """[T, H, D] -> [1, T, heads of `some`, D], contiguous, with heads repeated to `heads`, and rows reversed."""
    first, stop, _ = some.indices(heads)
    times = heads // x.shape[1]
    own = x[:, first // times : (stop - 1) // times + 1]
    if times > 1:
        before = first // times * times
        own = own.repeat_interleave(times, 1)[:, first - before : stop - before]
    return (own.flip(0) if reverse else own).contiguous().unsqueeze(0)


def _summed(gradient: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[T, Hq, D] -> [T, Hkv, D], summed over the query heads that share a key/value head, in the accumulation dtype."""
    if gradient.shape[1] == kv_heads:
        return gradient
    return gradient.unflatten(1, (kv_heads, -1)).sum(2, dtype=torch.promote_types(gradient.dtype, torch.float32))


def _reversed(rows: Rows) -> Rows:
    """The same sequences, rows from the last to the first."""
    return rows._replace(cu_seqlens=(rows.total - rows.cu_seqlens).flip(0))


def _places(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [T], int32 [T]: the sequence of each row, and its number in it."""
    starts = rows.cu_seqlens[:-1]
    sequence = rows.spread(torch.arange(len(starts), dtype=torch.int32, device=starts.device))
    return sequence, torch.arange(rows.total, dtype=torch.int32, device=starts.device) - rows.spread(starts)
