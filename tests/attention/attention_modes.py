"""Kinds of attention for tests: tensors of a document, dense attention over it, and the rows of its tokens in memory."""

from dataclasses import dataclass

import torch

from hf_longctx.layouts.layout import Layout

HEADS, HEAD_DIM = 24, 8
NAMES = ("out", "dq", "dk", "dv")

Results = list[torch.Tensor]
"""out, dq, dk, dv."""


@dataclass(frozen=True)
class Kind:
    """A kind of attention."""

    heads: int = HEADS
    kv_heads: int = HEADS
    window: int | None = None
    alibi: bool = False

    def slopes(self) -> torch.Tensor | None:
        return 2.0 ** -torch.linspace(1, 8, self.heads) if self.alibi else None


KINDS = {
    "causal": Kind(),
    "grouped": Kind(kv_heads=2),
    "three key-value heads": Kind(kv_heads=3),  # which degrees of 2 and 4 share unevenly
    "one key-value head": Kind(kv_heads=1),
    "alibi": Kind(alibi=True),
    "window": Kind(window=7),
    "window of one token": Kind(window=1, kv_heads=4),
    "alibi in a window": Kind(alibi=True, window=7),
}


def tensors(tokens: int, kind: Kind, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and the gradient of the output: [T, heads, D]."""
    generator = torch.Generator().manual_seed(tokens)
    heads = (kind.heads, kind.kv_heads, kind.kv_heads, kind.heads)
    return [torch.randn(tokens, h, HEAD_DIM, generator=generator).to(dtype) for h in heads]


def dense(tensors: list[torch.Tensor], lengths: list[int], kind: Kind) -> Results:
    """Attend in float64, each document alone: scores, mask and softmax written out."""
    q, k, v, grad = (x.double() for x in tensors)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    outs = []
    for dq, dk, dv in zip(*(x.split(lengths) for x in leaves)):
        keys, values = (x.repeat_interleave(kind.heads // kind.kv_heads, 1).transpose(0, 1) for x in (dk, dv))
        position = torch.arange(len(dq))
        distance = position[:, None] - position
        scores = dq.transpose(0, 1) @ keys.transpose(1, 2) * HEAD_DIM**-0.5
        if (slopes := kind.slopes()) is not None:
            scores = scores - slopes.double()[:, None, None] * distance
        hidden = (distance < 0) | (distance >= (kind.window or len(dq)))
        outs.append((scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values).transpose(0, 1))
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def memory_rows(layout: Layout, rank: int) -> torch.Tensor:
    """Rows of a rank's tokens in the layout's documents laid end to end."""
    start, first = 0, {}
    for doc, length in layout.doc_lengths.items():
        first[doc] = start
        start += length
    return torch.cat([torch.arange(first[s.doc] + s.start, first[s.doc] + s.stop) for s in layout.shard(rank)])
