"""Flash attention in plain torch, a tile of scores at a time: for what no fast kernel at hand can do, such as soft-capping.

    score = softcap * tanh(scale * q . k / softcap)        d score / d (q . k) = scale * (1 - tanh(...) ** 2)

A tile holds TILE queries of all heads and TILE keys; the scores of a block are never there together. Forward keeps a
running maximum m and the total of exp(score - m) (Milakov and Gimelshein, arXiv 1805.02867), backward recomputes
exp(score - lse) from the lse of the whole attention. Query heads that share a key/value head are stacked, so that keys
and values are never repeated.

    block of 3 tiles, CAUSAL, query tile 2:    key tiles  2 (masked), 0, 1        the diagonal comes first: every row sees a
    ANTICAUSAL, query tile 1:                             1 (masked), 2           key there, so that m is finite from then on

Arithmetic is in the accumulation dtype. Shapes: T tokens, Hq query heads, Hkv key/value heads, G = Hq / Hkv, D dimension of
query and key heads, Dv of value heads, x queries and y keys of a tile.
"""

from collections.abc import Iterator

import torch

from hf_longctx.attention.kernels.accumulate import Partial, accumulation_dtype
from hf_longctx.attention.kernels.interface import AttentionCall, Gradients
from hf_longctx.hardware import kernel_bytes
from hf_longctx.layouts.blocks import Block, Mask

TILE = 256
"""Queries, and keys, of a tile. Measured with soft cap over 4,096 tokens in float32 on one core, 8 heads of 128 over 2: tiles
of 128, 256 and 512 take 1.0 to 1.1 s forward and 2.0 to 2.4 s backward, tiles of 1,024 1.6 and 3.6 s (`cpu_flash` without a
soft cap: 0.9 and 2.4 s)."""
TILE_ON_CUDA = 1024
"""The same on a GPU, which wants few launches with much work in each. On an H100, 16K tokens of 32 heads of 128 with a soft cap
take 146 ms forward and 340 ms backward with tiles of 1,024 or 2,048, and 1.1 and 3.0 GiB."""


class Tiled:
    """See the module's docstring; the interface is `Kernel`."""

    name = "tiled"
    alibi_tile = 1 << 40  # there is none
    value_dims = True
    workspace = staticmethod(kernel_bytes.float32_operands)

    def unsupported(self, call: AttentionCall) -> str | None:
        if call.q.device.type not in ("cpu", "cuda"):
            return f"needs tensors on cpu or cuda, these are on {call.q.device}"
        return None if call.slopes is None else "has no ALiBi"

    def forward(self, call: AttentionCall) -> Iterator[Partial]:
        q, k, v, scale, softcap = call.q, call.k, call.v, call.scale, call.softcap
        assert call.slopes is None
        tile = _tile(q.device)
        for b in call.blocks:
            keys, values = (_heads_first(x[b.k_start : b.k_stop]) for x in (k, v))
            for rows in _tiles(b.q_start, b.q_stop, tile):
                queries = _stacked(q[rows], k.shape[1])
                (masked, columns), *more = _key_tiles(b, rows, tile)
                scores = _scores(queries, keys[:, columns], scale, softcap)
                if masked:
                    _hide(scores, b.mask, float("-inf"))
                m = scores.amax(-1, keepdim=True)
                weights = scores.sub_(m).exp_()
                total, out = weights.sum(-1, keepdim=True), weights @ values[:, columns].to(weights.dtype)
                for _, columns in more:
                    scores = _scores(queries, keys[:, columns], scale, softcap)
                    larger = torch.maximum(m, scores.amax(-1, keepdim=True))
                    shrink, weights = (m - larger).exp_(), scores.sub_(larger).exp_()
                    m, total = larger, total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
                    out.mul_(shrink).baddbmm_(weights, values[:, columns].to(weights.dtype))
                lse = (m + total.log()).reshape(q.shape[1], -1)
                yield Partial(rows.start, rows.stop, _unstacked(out.div_(total), q.shape[1]), lse)

    def backward(
        self, call: AttentionCall, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, gradients: Gradients
    ) -> None:
        q, k, v, scale, softcap = call.q, call.k, call.v, call.scale, call.softcap
        grad_q, grad_k, grad_v = gradients
        assert call.slopes is None
        tile = _tile(q.device)
        for b in call.blocks:
            keys, values = (_heads_first(x[b.k_start : b.k_stop]) for x in (k, v))
            dk, dv = (x.new_zeros(x.shape, dtype=lse.dtype) for x in (keys, values))
            for rows in _tiles(b.q_start, b.q_stop, tile):
                queries, d_out, o = (_stacked(x[rows], k.shape[1]) for x in (q, grad_out, out))
                row_lse = lse[:, rows].reshape(*queries.shape[:2], 1)
                delta = (d_out * o).sum(-1, keepdim=True)
                dq = torch.zeros_like(queries)
                for masked, columns in _key_tiles(b, rows, tile):
                    of_keys, of_values = (x[:, columns].to(lse.dtype) for x in (keys, values))
                    scores = _scores(queries, of_keys, scale, softcap)
                    slope = scale if softcap is None else (scores / softcap).square_().neg_().add_(1).mul_(scale)
                    weights = scores.sub_(row_lse).exp_()
                    if masked:
                        _hide(weights, b.mask, 0.0)
                    dv[:, columns].baddbmm_(weights.mT, d_out)
                    d_scores = (d_out @ of_values.mT).sub_(delta).mul_(weights).mul_(slope)
                    dq.baddbmm_(d_scores, of_keys)
                    dk[:, columns].baddbmm_(d_scores.mT, queries)
                grad_q.add(rows.start, rows.stop, _unstacked(dq, q.shape[1]))
            grad_k.add(b.k_start, b.k_stop, dk.transpose(0, 1))
            grad_v.add(b.k_start, b.k_stop, dv.transpose(0, 1))


def _tile(device: torch.device) -> int:
    return TILE if device.type == "cpu" else TILE_ON_CUDA


def _tiles(start: int, stop: int, tile: int) -> Iterator[slice]:
    return (slice(first, min(first + tile, stop)) for first in range(start, stop, tile))


def _key_tiles(block: Block, rows: slice, tile: int) -> list[tuple[bool, slice]]:
    """Keys of the block that some of these query rows see, counted from the block's first, and whether they are on the
    diagonal and need a mask: those first."""
    keys = block.k_stop - block.k_start
    if block.mask is Mask.FULL:
        return [(False, columns) for columns in _tiles(0, keys, tile)]
    first, last = rows.start - block.q_start, rows.stop - block.q_start
    seen = _tiles(0, first, tile) if block.mask is Mask.CAUSAL else _tiles(last, keys, tile)
    return [(True, slice(first, last)), *((False, columns) for columns in seen)]


def _scores(q: torch.Tensor, k: torch.Tensor, scale: float, softcap: float | None) -> torch.Tensor:
    """q [Hkv, G * x, D], k [Hkv, y, D] -> [Hkv, G * x, y]."""
    scores = q @ k.to(q.dtype).mT
    if softcap is None:
        return scores.mul_(scale)
    return scores.mul_(scale / softcap).tanh_().mul_(softcap)


def _hide(tile: torch.Tensor, mask: Mask, value: float) -> None:
    """Writes a value where queries do not see keys, in a tile [Hkv, G * n, n] on the diagonal."""
    n = tile.shape[-1]
    seen = torch.ones(n, n, dtype=torch.bool, device=tile.device)
    hidden = seen.triu_(1) if mask is Mask.CAUSAL else seen.tril_(-1)
    tile.unflatten(1, (-1, n)).masked_fill_(hidden, value)


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[T, H, D] -> [H, T, D], a view."""
    return x.transpose(0, 1)


def _stacked(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[x, Hq, D] -> [Hkv, G * x, D] in the accumulation dtype: the rows of the heads that share a key/value head."""
    return x.to(accumulation_dtype(x.dtype)).transpose(0, 1).reshape(kv_heads, -1, x.shape[2])


def _unstacked(x: torch.Tensor, q_heads: int) -> torch.Tensor:
    """[Hkv, G * x, D] -> [x, Hq, D], a view."""
    return x.reshape(q_heads, -1, x.shape[2]).transpose(0, 1)
