"""What attention benchmarks compute: documents, heads, inputs, and a float64 reference on one process.

Shapes: T tokens of all documents together, H heads, D head dimension, R rows of a chunk of queries. Documents lie end to
    end.
"""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

_flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

DOCUMENTS, DOCUMENT_MULTIPLE = 15, 32
"""A packed case has 15 documents. Where they are made to suit the peers, lengths are multiples of 32 tokens: their rules
ask for 2 * ranks at most, and 4 ranks are the most that is measured by default."""

TOKEN_SHARES = (34.0, 11.4, 10.4, 9.7, 9.5, 4.4, 4.4, 6.4, 4.5, 3.2, 2.1)
"""Percent of the tokens of GitHub's code that lie in documents of up to 2K, 4K, 8K, ... 2M tokens (ByteScale, arXiv
2502.21231, read off a figure)."""

PACK_TOKENS, FIRST_BUCKET = 2**20, 2**11
"""A GitHub-like pack stands for a pack of so many tokens: every length is divided by what that is of the tokens asked
for. The first bucket ends at FIRST_BUCKET tokens, each further one at twice the one before."""

GITHUB_MULTIPLE = 8
"""Lengths in a GitHub-like pack: 2 * ranks at 4 ranks, so that the peer that asks for it can take part."""

LONG, LONG_HEADS = 4, 4
"""The long document has so many times the tokens of the others, and so many heads: half of the others', to halve 16 times
the work of each run. All ratios are of the same case, so it enters both of their sides."""

REFERENCE_ROWS = 512
"""Queries of one head at a time, where the reference needs a dense bias: 8192 keys of them are 32 MiB in float64."""


@dataclass(frozen=True)
class Case:
    """Causal attention within each document, forward and backward."""

    name: str
    lengths: tuple[int, ...]
    """tokens of each document"""
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    alibi: bool = False

    @property
    def slopes(self) -> torch.Tensor | None:
        """ALiBi's slope of each head, float32 [heads]: 1/2, 1/4, ... 1/256 for 8 heads; None without ALiBi."""
        return torch.exp2(-8 / self.heads * torch.arange(1, self.heads + 1)) if self.alibi else None

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def boundaries(self) -> list[int]:
        """First token of each document, and the number of tokens."""
        return [0, *accumulate(self.lengths)]

    @property
    def kv_bytes(self) -> int:
        """Count the bytes of all keys and values in float32."""
        return 2 * self.tokens * self.kv_heads * self.head_dim * 4

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [T, H, D], k and v [T, kv_heads, D], gradient of the output [T, H, D]; float32, the same in every process."""
        generator = torch.Generator().manual_seed(0)
        q, grad_out, k, v = (
            torch.randn(self.tokens, heads, self.head_dim, generator=generator)
            for heads in (self.heads, self.heads, self.kv_heads, self.kv_heads)
        )
        return q, k, v, grad_out

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """One process, one call of torch's attention per document: [T, H, D]. The limit that times are compared with.

        ALiBi is a bias per key, slope * j: what it lacks of -slope * (i - j) is the same for all keys of a query. The
        operation that torch's attention ends in takes it, [1, H, 1, T]; the public function would need [1, H, T, T].
        """
        outputs = []
        for document in zip(*(x.split(self.lengths) for x in (q, k, v))):
            query, key, value = (x.transpose(0, 1)[None] for x in document)
            if self.slopes is None:
                grouped = self.heads != self.kv_heads
                out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
            else:
                bias = (self.slopes[:, None] * torch.arange(query.shape[2]))[None, :, None]
                out, _ = _flash_on_cpu(query, key, value, 0.0, True, attn_mask=bias.to(q.dtype))
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)

    def reference(self) -> tuple[torch.Tensor, ...]:
        """Output and gradients of q, k, v in float64, shapes as in `inputs`."""
        q, k, v, grad_out = (x.double() for x in self.inputs())
        if self.slopes is not None:
            return self._alibi_reference(q, k, v, grad_out)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = self.attend(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, grad_out)

    def _alibi_reference(self, q, k, v, grad_out) -> tuple[torch.Tensor, ...]:
        """With the bias as it is defined, -slope * (i - j), in plain mathematics: some rows of one head at a time."""
        assert self.slopes is not None
        assert self.heads == self.kv_heads
        results = out, dq, dk, dv = [torch.zeros_like(x) for x in (q, q, k, v)]
        for first, stop in pairwise(self.boundaries):
            for start in range(first, stop, REFERENCE_ROWS):
                rows, keys = (
                    slice(start, min(start + REFERENCE_ROWS, stop)),
                    slice(first, min(start + REFERENCE_ROWS, stop)),
                )
                distance = torch.arange(rows.start, rows.stop)[:, None] - torch.arange(keys.start, keys.stop)
                for head, slope in enumerate(self.slopes.tolist()):
                    leaves = [x.detach().requires_grad_() for x in (q[rows, head], k[keys, head], v[keys, head])]
                    scores = leaves[0] @ leaves[1].T * self.head_dim**-0.5 - slope * distance
                    chunk = scores.masked_fill(distance < 0, float("-inf")).softmax(-1) @ leaves[2]
                    grads = torch.autograd.grad(chunk, leaves, grad_out[rows, head])
                    out[rows, head] = chunk.detach()
                    for total, part, where in zip((dq, dk, dv), grads, (rows, keys, keys)):
                        total[where, head] += part
        return tuple(results)


def cases(tokens: int) -> list[Case]:
    """The standard cases, each of about `tokens` tokens, and one document of LONG times as many.

    Raises:
        ValueError: too few tokens for 15 documents.
    """
    smallest = 4 * DOCUMENTS * DOCUMENT_MULTIPLE
    if tokens < smallest or tokens % DOCUMENT_MULTIPLE:
        raise ValueError(f"--tokens {tokens} must be a multiple of {DOCUMENT_MULTIPLE} and at least {smallest}")
    return [
        Case("one document", (tokens,)),
        Case("15 packed documents", packed_lengths(tokens, DOCUMENT_MULTIPLE)),
        Case("15 packed documents of any length", packed_lengths(tokens - 1, 1)),
        Case("GitHub-like pack", github_like_lengths(tokens)),
        Case("one document, 2 KV heads", (tokens,), kv_heads=2),
        Case("one document, ALiBi", (tokens,), alibi=True),
        Case(f"one document of {LONG * tokens}", (LONG * tokens,), LONG_HEADS, LONG_HEADS),
    ]


def packed_lengths(tokens: int, multiple: int) -> tuple[int, ...]:
    """Lengths of 15 documents, uniform between half and one and a half of their mean, each a multiple of `multiple`."""
    weights = np.random.default_rng(1).uniform(0.5, 1.5, DOCUMENTS)
    ends = np.cumsum(weights) / weights.sum() * tokens // multiple * multiple
    ends[-1] = tokens
    return tuple(int(length) for length in np.diff(ends, prepend=0))


def github_like_lengths(tokens: int) -> tuple[int, ...]:
    """Lengths as in a pack of PACK_TOKENS tokens of GitHub's code into which one document of half the pack fell, scaled
    down to `tokens`: the long document first, then documents drawn until the pack is full, the last one cut to fit.

    A drawn document is of a bucket with the chance share / mean length, so that buckets hold tokens by their shares; in
    its bucket, its length is uniform. Lengths are multiples of GITHUB_MULTIPLE, at least one.

        8192 tokens: one document of 4096 (it stands for 512K), 9 of 72 to 504 tokens, 144 of 8 to 64
    """
    random = np.random.default_rng(0)
    upper = FIRST_BUCKET * 2.0 ** np.arange(len(TOKEN_SHARES))
    shares = np.where(upper < PACK_TOKENS / 2, TOKEN_SHARES, 0)  # longer ones do not fit beside the long document
    chances = shares / (0.75 * upper)
    lengths = [_multiple(tokens / 2)]
    while (left := tokens - sum(lengths)) > 0:
        drawn = random.choice(upper, p=chances / chances.sum()) * random.uniform(0.5, 1)
        lengths.append(min(_multiple(drawn * tokens / PACK_TOKENS), left))
    return tuple(lengths)


def _multiple(length: float) -> int:
    return max(1, round(length / GITHUB_MULTIPLE)) * GITHUB_MULTIPLE
