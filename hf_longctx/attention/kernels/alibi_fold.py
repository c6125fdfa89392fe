"""ALiBi as eight more head dimensions, for kernels that take no bias.

The bias of a key, -slope * p with p = last - y its distance from the last key of its block (alibi_keys.py), is a product of
a number of the query's head and a number of the key, so the kernel's own dot product can add it. bfloat16 holds 8
bits, so both factors are cut into pieces that it holds exactly; products of pieces are exact in float32.

    p / 256              = p0 / 256 + p1 + 256 p2       digits of 8 bits, p below 2 ** 24
    -256 * slope / scale = w1 + w2 + w3                 24 bits in bfloat16, 33 in float16

    query     w1     w2     w3   w1 w2 w3      w1     w2
    key   p0/256 p0/256 p0/256   p1 p1 p1  256 p2 256 p2

The query's side depends on its head alone and the key's on its position alone, so grouped key/value heads stay
grouped. The last digit goes without w3: in bfloat16 an error of 2 ** -16 of what lies beyond 65536 keys. The factor
256 keeps w3 of usual slopes (2 ** -8 and more) above what float16 rounds to 0.

Measured against float64, products summed in float32 (tests/attention/kernels/test_varlen_kernels.py): for slopes of 1 to 1e-6 and
1 to 1M tokens apart, the bias is right to 2e-6 of itself (1e-5 for 1e-6 in float16). Outputs in bfloat16 are off by 1.6e-3
relative with ALiBi as without, over 1K, 64K and 1M keys. One bfloat16 dimension is right to 4e-3 only: 0.24 of a bias
below 100.

Shapes: T tokens, Hq query heads, H heads, D head dimension, B blocks of a call.
"""

from typing import NamedTuple

import torch

ALIBI_DIMS = 8
"""Head dimensions that the bias takes; flash kernels want multiples of 8."""


class Rows(NamedTuple):
    """Query or key rows of B blocks, laid end to end."""

    cu_seqlens: torch.Tensor
    """int32 [B + 1]: where each block's rows start, on the device of the rows; the last is `total`."""
    total: int
    longest: int
    """Rows of the largest block."""

    def spread(self, per_block: torch.Tensor) -> torch.Tensor:
        """[B] -> [total]: each block's number for all of its rows."""
        return per_block.repeat_interleave(self.cu_seqlens.diff(), output_size=self.total)

    def to_stop(self) -> torch.Tensor:
        """int32 [total]: rows from each row to the end of its block, itself counted."""
        return self.spread(self.cu_seqlens[1:]) - torch.arange(
            self.total, dtype=torch.int32, device=self.cu_seqlens.device
        )


def query_dims(slopes: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """slopes [Hq] -> [Hq, 8] in dtype, the same for all queries of a head."""
    rest = slopes.double() * (-256 / scale)
    pieces = []
    for _ in range(3):
        pieces.append(rest.to(dtype))
        rest = rest - pieces[-1].double()
    w1, w2, w3 = pieces
    return torch.stack((w1, w2, w3, w1, w2, w3, w1, w2), -1)


def key_dims(keys: Rows, dtype: torch.dtype) -> torch.Tensor:
    """[T, 1, 8] in dtype, the same for all heads of a key."""
    p = keys.to_stop() - 1
    low, middle, high = (p & 0xFF) / 256, p >> 8 & 0xFF, (p >> 16) * 256
    return torch.stack((low, low, low, middle, middle, middle, high, high), -1).to(dtype).unsqueeze(1)


def lse_shift(slopes: torch.Tensor, queries: Rows, keys: Rows, distances: torch.Tensor) -> torch.Tensor:
    """slopes [Hq], distances int32 [B] -> [Hq, T of queries]: what the folded scores' log-sum-exp lacks.

    slope * (last - x - distance), where last is the number of the block's last key and x of the query, both from 0.
    """
    per_block = keys.cu_seqlens.diff() - queries.cu_seqlens.diff() - distances
    return slopes.unsqueeze(1) * (queries.spread(per_block) + queries.to_stop() - 1)


def with_dims(x: torch.Tensor, dims: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, H, D] -> [T, H, D + 8]: dims (any shape that broadcasts to [T, H, 8]), or zeros, behind it."""
    wider = x.new_zeros(*x.shape[:-1], x.shape[-1] + ALIBI_DIMS)
    wider[..., : x.shape[-1]] = x
    if dims is not None:
        wider[..., x.shape[-1] :] = dims
    return wider
