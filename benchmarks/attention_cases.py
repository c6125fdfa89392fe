"""What attention benchmarks compute: documents, heads, inputs, and a float64 reference on one process.

Shapes: T tokens of all documents together, H heads, D head dimension. Documents lie end to end.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

DOCUMENTS, DOCUMENT_MULTIPLE = 15, 32
"""A packed case has 15 documents. Where they are made to suit the peers, lengths are multiples of 32 tokens: their rules
ask for 2 * ranks at most, and 4 ranks are the most that is measured by default."""


@dataclass(frozen=True)
class Case:
    """Causal attention within each document, forward and backward."""

    name: str
    lengths: tuple[int, ...]
    """tokens of each document"""
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def boundaries(self) -> list[int]:
        """First token of each document, and the number of tokens."""
        return [0, *accumulate(self.lengths)]

    @property
    def kv_bytes(self) -> int:
        """Of all keys and values in float32."""
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
        """One process, one call of torch's attention per document: [T, H, D]. The limit that times are compared with."""
        grouped = self.heads != self.kv_heads
        outputs = []
        for document in zip(*(x.split(self.lengths) for x in (q, k, v))):
            query, key, value = (x.transpose(0, 1)[None] for x in document)
            out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
            outputs.append(out[0].transpose(0, 1))
        return torch.cat(outputs)

    def reference(self) -> tuple[torch.Tensor, ...]:
        """Output and gradients of q, k, v in float64, shapes as in `inputs`."""
        q, k, v, grad_out = (x.double() for x in self.inputs())
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = self.attend(q, k, v)
        return out.detach(), *torch.autograd.grad(out, leaves, grad_out)


def cases(tokens: int) -> list[Case]:
    """The standard cases, each of about `tokens` tokens.

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
        Case("one document, 2 KV heads", (tokens,), kv_heads=2),
    ]


def packed_lengths(tokens: int, multiple: int) -> tuple[int, ...]:
    """Lengths of 15 documents, uniform between half and one and a half of their mean, each a multiple of `multiple`."""
    weights = np.random.default_rng(1).uniform(0.5, 1.5, DOCUMENTS)
    ends = np.cumsum(weights) / weights.sum() * tokens // multiple * multiple
    ends[-1] = tokens
    return tuple(int(length) for length in np.diff(ends, prepend=0))
