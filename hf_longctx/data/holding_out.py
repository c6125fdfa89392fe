"""A share of a data set's documents is held out: which ones, a hash of each document's tokens says.

    hash of the tokens:   0 ........ fraction * 2**64 ................................... 2**64
                          held out  |  trained on

So a document is on the same side whatever its place, on every rank, and in every data set that holds it: a copy of it is never
trained on while it is evaluated, and more documents move none. Nothing is sent between ranks.
"""

import hashlib
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from hf_longctx.data.length_index import LengthIndex

TOKENS = "input_ids"


def part_of(dataset: Any, fraction: float, *, held_out: bool) -> Any:
    """Return the documents of a data set that are held out, or the others.

    Args:
        dataset: a `datasets.Dataset` with input_ids; what a prepared one knows of its documents stays known.
        fraction: share that is held out, between 0 and 1: about so many documents.
        held_out: which of the two parts.

    Raises:
        ValueError: the part has no document.
    """
    chosen = np.flatnonzero((hashes(dataset) < np.uint64(int(fraction * 2**64))) == held_out)
    if not len(chosen):
        side = "holds out" if held_out else "leaves"
        raise ValueError(
            f"eval_fraction={fraction:g} {side} none of {len(dataset)} documents (by a hash of each): valid are "
            f"{'larger' if held_out else 'smaller'} fractions, more documents, or an eval_split"
        )
    # Its own name: that of `select` is a hash of pickled numbers, which other versions of libraries pickle differently.
    facts = f"{dataset._fingerprint} {fraction!r} {held_out}".encode()
    part = dataset.select(chosen, new_fingerprint=hashlib.blake2b(facts, digest_size=8).hexdigest())
    for name in ("directory", "manifest", "weights", "data_version", "compared"):
        if hasattr(dataset, name):
            setattr(part, name, getattr(dataset, name))
    if (index := getattr(dataset, "index", None)) is not None:
        part.index = LengthIndex(index.lengths[chosen], index.label_tokens[chosen], part._fingerprint)
    if (source := getattr(dataset, "source", None)) is not None:
        part.source = source[chosen]
    return part


def hashes(dataset: Any) -> np.ndarray:
    """uint64 [documents]: of each document's tokens as int32, the same on every machine."""
    table = dataset.with_format("arrow")
    digests = np.empty(len(dataset), np.uint64)
    done = 0
    for batch in table.iter(1000):
        column = batch[TOKENS].combine_chunks()
        column = column if isinstance(column, pa.ListArray) else column.cast(pa.list_(column.type.value_type))
        values, offsets = (
            column.values.to_numpy(zero_copy_only=False).astype("<i4", copy=False),
            column.offsets.to_numpy(),
        )
        for start, stop in pairwise(offsets):
            digest = hashlib.blake2b(values[start:stop].tobytes(), digest_size=8).digest()
            digests[done] = int.from_bytes(digest, "little")
            done += 1
    return digests
