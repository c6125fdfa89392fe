"""Where the causal chunks of a document end, which runs through a pipeline chunk by chunk.

Chunks cost about the same, not the same tokens, because attention grows. With s0 = linear_tokens, the tokens at which all
that is linear costs what attention does, the first s tokens of a document of L cost s^2 + s0*s, and chunk c of k ends where

    s^2 + s0*s = (c + 1)/k * (L^2 + s0*L)

    100 tokens, 4 chunks:     s0 = 0: 50, 71, 87, 100         s0 = 200: 33, 59, 81, 100        s0 = 10^6: 26, 51, 76, 100

Exact integers, rounded up: the same on every machine. Nothing is sent.
"""

from __future__ import annotations

import math

MOST_CHUNKS = 64
"""Of a document: p stages wait for (p - 1)/64 of it, and every further chunk costs a micro-batch's launches and sends all the
keys before it once more."""


def chunk_stops(length: int, chunks: int, linear_tokens: int) -> list[int]:
    """Where each of a document's chunks ends, in tokens; the last at `length`."""
    total = 4 * length * (length + linear_tokens)  # 4*(s^2 + s0*s) + s0^2 = (2*s + s0)^2
    stops = []
    for chunk in range(1, chunks + 1):
        square = linear_tokens**2 + -(-total * chunk // chunks)
        root = math.isqrt(square - 1) + 1
        stops.append(-(-(root - linear_tokens) // 2))
    return stops


def most_chunks(length: int, ranks: int, linear_tokens: int) -> int:
    """The largest number of chunks, at most MOST_CHUNKS, in which each of the ranks holds a token of each."""
    for chunks in range(min(MOST_CHUNKS, length // ranks), 1, -1):
        stops = chunk_stops(length, chunks, linear_tokens)
        if min(stop - start for start, stop in zip([0, *stops], stops)) >= ranks:
            return chunks
    return 1
