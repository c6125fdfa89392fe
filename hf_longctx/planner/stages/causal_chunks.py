"""Ends of the causal chunks of a document, which runs through a pipeline chunk by chunk.

Chunks cost about the same, not the same tokens, because attention grows. With s0 = linear_tokens, the tokens at which all
that is linear costs what attention does, the first s tokens of a document of L cost s^2 + s0*s, and chunk c of k ends where

    s^2 + s0*s = (c + 1)/k * (L^2 + s0*L)

    100 tokens, 4 chunks:     s0 = 0: 50, 71, 87, 100         s0 = 200: 33, 59, 81, 100        s0 = 10^6: 26, 51, 76, 100

rounded up. What chunks add up to on d ranks that share a document:

    T(s, d, k) = sum over chunks from token b to e of   micro_batch + document + linear*(e - b)/d
                    + state*(d - 1) + max( attention*((e^2 - b^2)/d + half*(e - b/2)),   exchange(e, d) )

where a window leaves less of attention, as planner/cost/cost_model.py has it, and of the exchange if all layers have one.
Each chunk receives the keys of all tokens before it once more, and blocks of shorter queries are slower: half*(q + k)/2 is
lost on q queries and k keys of each rank, which for equals is half*s.

p stages wait (p - 1)/k of that for a document's first chunk and its last. A step whose ranks all wait for chunks of `unit`
nanoseconds loses (p - 1)*unit; what longer chunks make it lose beyond that counts as time of their document, and the number
of chunks is that which counts least.

Integers, and floating-point operations that round alike on every machine. Nothing is sent.
"""

from __future__ import annotations

import math

import numpy as np

from hf_longctx.planner.compiled import borrowing, compiled, remembered
from hf_longctx.planner.cost.cost_model import NANOSECONDS, PS_PER_NS, exchange_ps, work_of

MOST_CHUNKS = 32
"""Chunks of a document at most: p stages wait for (p - 1)/32 of it, and every further chunk costs a micro-batch's launches and
sends all the keys before it once more. 2M tokens on 256 ranks (7B, 8 key/value heads, H100, 4 stages) count least in 8
chunks: 1.47 times their time, in 32 already 3.1 times. Layouts of 32 chunks on 256 ranks take
0.6 s of Python, of 64 four times that."""


CHUNKS = (2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Numbers of chunks that are tried."""


def chunk_stops(length: int, chunks: int, linear_tokens: int) -> list[int]:
    """Return where each of a document's chunks ends, in tokens; the last at `length`."""
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


@borrowing
@compiled
def _chunk_stop(length: int, chunk: int, chunks: int, linear_tokens: int) -> int:  # pragma: no cover - compiled
    """chunk_stops of one chunk, counted from 1; where 64 bits do not hold its squares, but for a token or two."""
    if 2 * length + linear_tokens >= 2**28:
        share = chunk / chunks
        if linear_tokens >= length * 2**20:  # a little above its share of the tokens
            return min(length, length * chunk // chunks + 1)
        squared = float(linear_tokens) * float(linear_tokens) + 4.0 * length * float(length + linear_tokens) * share
        return min(length, int(np.ceil((np.sqrt(squared) - linear_tokens) / 2)))
    square = linear_tokens**2 + -(-4 * length * (length + linear_tokens) * chunk // chunks)
    root = int(np.sqrt(float(square)))
    while root * root < square:
        root += 1
    while (root - 1) * (root - 1) >= square:
        root -= 1
    return -(-(root - linear_tokens) // 2)


@remembered
@borrowing
@compiled
def chunked_work(
    length: int, ranks: int, chunks: int, linear_tokens: int, micro_batch: int, coefficients: tuple[int, ...]
) -> int:  # pragma: no cover - compiled
    """Nanoseconds of all ranks together on a document in chunks: d * T(s, d, k) of the module docstring."""
    if chunks == 1:
        return work_of(length, ranks, coefficients) + micro_batch * ranks
    if len(coefficients) > NANOSECONDS:
        return _chunked_work_in_units(length, ranks, chunks, linear_tokens, micro_batch, coefficients)
    attention_ps, half, linear_ps, inside_ps, between_ps, message, document, node, window, windowed_ps, state = (
        coefficients[:NANOSECONDS]
    )
    work = (document + micro_batch + state * (ranks - 1)) * ranks * chunks + -(-linear_ps * length // PS_PER_NS)
    begin, before = 0, 0
    for chunk in range(1, chunks + 1):
        end = _chunk_stop(length, chunk, chunks, linear_tokens)
        reach, in_window = min(end, window), min(end, end - begin + window)
        seen = in_window if attention_ps == 0 else end  # and received
        pairs = attention_ps * end // PS_PER_NS * end + windowed_ps * reach // PS_PER_NS * (2 * end - reach)
        # Rounded up, or chunks might add up to less than the document takes whole.
        edges = -(-attention_ps * half // PS_PER_NS) * (end - begin + end)
        edges += -(-windowed_ps * half // PS_PER_NS) * (end - begin + in_window)
        attention = pairs - before - (-edges // 2) * ranks
        exchange = (message * ranks - (-inside_ps * seen // PS_PER_NS)) * (ranks - 1)
        exchange -= (between_ps * -seen // PS_PER_NS) * max(ranks - node, 0) // node
        work += max(attention, exchange)
        begin, before = end, pairs
    return work


@borrowing
@compiled
def _chunked_work_in_units(
    length: int, ranks: int, chunks: int, linear_tokens: int, micro_batch: int, coefficients: tuple[int, ...]
) -> int:  # pragma: no cover - compiled
    """`chunked_work` in units (planner/cost/cost_model.py)."""
    attention_ps, half, linear_ps, _, _, _, document, _, window, windowed_ps, state = coefficients[:NANOSECONDS]
    unit = math.ldexp(float(PS_PER_NS), int(coefficients[-1]))
    begin, before, hidden = 0, 0.0, 0.0
    for chunk in range(1, chunks + 1):
        end = _chunk_stop(length, chunk, chunks, linear_tokens)
        reach, in_window = min(end, window), min(end, end - begin + window)
        seen = in_window if attention_ps == 0 else end
        pairs = float(attention_ps) * end * end + float(windowed_ps) * reach * (2 * end - reach)
        edges = float(attention_ps) * (end - begin + end) + float(windowed_ps) * (end - begin + in_window)
        attention = pairs - before + edges * half / 2 * ranks
        hidden += max(attention, exchange_ps(seen, ranks, coefficients))
        begin, before = end, pairs
    hidden += float(state) * PS_PER_NS * ranks * (ranks - 1) * chunks
    linear = int(np.ceil(float(linear_ps) * length / unit))
    return (document + micro_batch) * ranks * chunks + linear + int(hidden / unit)


@borrowing
@compiled
def best_chunks(
    length: int,
    ranks: int,
    stages: int,
    unit: int,
    most: int,
    least: int,
    linear_tokens: int,
    micro_batch: int,
    coefficients: tuple[int, ...],
) -> tuple[int, int]:  # pragma: no cover - compiled
    """The number of chunks that counts least, up to `most` and with `least` tokens (2 or more) of a rank in a chunk or more on
    average, and the nanoseconds of each rank in all of them."""
    best, best_time = 1, -(-chunked_work(length, ranks, 1, linear_tokens, micro_batch, coefficients) // ranks)
    best_counts = counted(best_time, 1, stages, unit)
    for chunks in CHUNKS:
        # The last chunk is the smallest: it has at least length / (2 * chunks) tokens.
        if best_counts == best_time or chunks > most or chunks * ranks * least > length:
            break
        time = -(-chunked_work(length, ranks, chunks, linear_tokens, micro_batch, coefficients) // ranks)
        counts = counted(time, chunks, stages, unit)
        if counts > best_counts:
            break
        best, best_time, best_counts = chunks, time, counts
    return best, best_time


@borrowing
@compiled
def counted(time: int, chunks: int, stages: int, unit: int) -> int:  # pragma: no cover - compiled
    """Nanoseconds that a document counts, with what longer chunks than `unit` make the stages wait."""
    return time + (stages - 1) * max(0, -(-time // chunks) - unit)
