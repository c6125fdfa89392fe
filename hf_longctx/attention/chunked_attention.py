"""Chunked attention (Llama 4): a query at position i sees the keys j <= i of its own chunk, j // chunk == i // chunk.

Nothing crosses a chunk's edge, so a chunk is a document: the layout is cut at the multiples of `chunk`, and the engine
computes causal attention within each document of what results. Rows stay where they are. What lies whole on one rank
communicates nothing, so a long document sends only what its chunks that are split between ranks need.

    chunks of 4, document A over two ranks:      rank 0: A[0:2) A[6:9)         rank 1: A[2:6)
        A is cut into B (A[0:4)), C, D           rank 0: B[0:2) C[2:4) D[0:1)  rank 1: B[2:4) C[0:2)

A pipeline's chunk of a long document (`Layout.context`) keeps of its context only what lies in the chunk that it goes on
with: rows of earlier ones are left out of keys and values.
"""

from collections.abc import Iterable, Iterator

import torch

from hf_longctx.layouts.exchange_schedule import Runs
from hf_longctx.layouts.layout import Layout, LayoutError, Segment


def in_chunks(layout: Layout, chunk: int) -> Layout:
    """The layout with each chunk of a document a document of its own; derived once and kept with the layout.

    Returns:
        A layout with the same rows of every rank in the same order, less the rows of context that nobody sees; the layout
        itself where no document is longer than a chunk.

    Raises:
        LayoutError: chunk is not positive.
    """
    if chunk < 1:
        raise LayoutError(f"chunk={chunk}: a query attends at least to itself, so a chunk has 1 token or more")
    chunks = _chunks(layout, chunk)
    if chunks == 1:
        return layout
    key = ("in chunks", chunk)
    if key not in layout.derived:
        shards = {rank: tuple(_cut(segments, chunk, chunks)) for rank, segments in layout.shards.items()}
        documents = {segment.doc for segments in shards.values() for segment in segments}
        context = {
            rank: tuple(segment for segment in _cut(segments, chunk, chunks) if segment.doc in documents)
            for rank, segments in layout.context.items()
        }
        layout.derived[key] = Layout(shards, layout.ulysses, context)
    return layout.derived[key]


def rows_in_chunks(x: torch.Tensor, layout: Layout, rank: int, chunk: int) -> torch.Tensor:
    """Keys or values [T + C, H, D] of a rank's rows in `layout` and its context -> those of its rows `in_chunks`."""
    tokens, seen = layout.tokens(rank), in_chunks(layout, chunk).context_tokens(rank)
    if seen == layout.context_tokens(rank):
        return x
    return torch.cat([x[:tokens], *(x[tokens + start : tokens + stop] for start, stop in _seen(layout, rank, chunk))])


def _chunks(layout: Layout, chunk: int) -> int:
    """Chunks of the longest document."""
    return -(-max(layout.doc_lengths.values()) // chunk)


def _cut(shard: Iterable[Segment], chunk: int, chunks: int) -> Iterator[Segment]:
    """Segments cut at multiples of `chunk`, as segments of documents that are numbered `chunks` to each one of before."""
    for segment in shard:
        for number in range(segment.start // chunk, (segment.stop - 1) // chunk + 1):
            first = number * chunk
            start, stop = max(segment.start, first), min(segment.stop, first + chunk)
            yield Segment(segment.doc * chunks + number, start - first, stop - first)


def _seen(layout: Layout, rank: int, chunk: int) -> Runs:
    """Rows of a rank's context, counted from its first, that lie in a chunk with queries."""
    documents, chunks = in_chunks(layout, chunk).doc_lengths, _chunks(layout, chunk)
    runs, row = [], 0
    for segment in _cut(layout.context[rank], chunk, chunks):
        if segment.doc in documents:
            runs.append((row, row + len(segment)))
        row += len(segment)
    return tuple(runs)
