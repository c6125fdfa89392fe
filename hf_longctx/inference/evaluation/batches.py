"""Documents of any lengths -> batches that all ranks together hold, longest documents first.

Nothing is sent between ranks, and every rank finds the same batches.
"""

from collections.abc import Sequence

from hf_longctx.planner.topology import Documents, Topology

USUAL_CAPACITY = 8192
"""Tokens of a micro-batch on one rank, where nothing is said and no document needs more."""


def batches_of(
    lengths: Sequence[int], world_size: int, capacity: int | None, documents: Documents = "split"
) -> tuple[int, list[list[int]]]:
    """Choose how many tokens one rank holds, and the documents of each batch.

    Args:
        lengths: tokens of each document.
        capacity: most tokens of a batch on one rank; None: as many as the longest document needs, USUAL_CAPACITY at least.
        documents: how they may lie on ranks; one that stays whole needs its length as capacity, on any number of ranks.

    Raises:
        ValueError: a document does not fit.
    """
    order = sorted(range(len(lengths)), key=lambda document: -lengths[document])
    longest = lengths[order[0]] if order else 0
    if capacity is None:
        capacity = max(USUAL_CAPACITY, -(-longest // (world_size if documents == "split" else 1)))
    if order:
        Topology(world_size, capacity, documents=documents).refuse_too_long(longest, f"document {order[0]}")
    batches: list[list[int]] = []
    room = 0
    for document in order:
        if not batches or lengths[document] > room:
            batches.append([])
            room = capacity * world_size
        batches[-1].append(document)
        room -= lengths[document]
    return capacity, batches
