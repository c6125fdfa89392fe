"""The documents of a certificate, and how they lie on virtual ranks."""

from collections.abc import Sequence
from typing import Any

import torch

from hf_longctx.certificate.tokens import ordinary_tokens
from hf_longctx.layouts.layout import Layout, Segment
from hf_longctx.models.traits import Traits

LENGTHS = (29, 8, 17, 2)
"""Tokens of each; the last has fewer than keys are chosen for a query"""
TOKENS = sum(LENGTHS)

Documents = tuple[torch.Tensor, ...]
"""int64 [length] each"""
Step = tuple[Layout, ...]
"""Micro-batches that hold all documents together"""


def documents_for(config: Any) -> Documents:
    """Return documents of ordinary tokens of a model."""
    return ordinary_tokens(config, TOKENS).split(LENGTHS)


def packed_layout() -> Layout:
    """All documents in one row of one rank."""
    return Layout({0: tuple(Segment(number, 0, length) for number, length in enumerate(LENGTHS))})


def steps_for(traits: Traits) -> tuple[Step, ...]:
    """Return how a model with these traits is tried."""
    steps = {"split": split_steps, "whole": whole_steps, "alone": alone_steps}
    return steps[traits.documents]()


def split_steps() -> tuple[Step, ...]:
    """Documents over two and over four ranks: parts of one in no order, parts of two on a rank, one whole on its rank."""
    two = {
        0: (Segment(0, 15, 22), Segment(1, 0, 8), Segment(0, 0, 7)),
        1: (Segment(2, 3, 17), Segment(0, 22, 29), Segment(0, 7, 15), Segment(3, 0, 2), Segment(2, 0, 3)),
    }
    four = {
        0: (Segment(0, 9, 10), Segment(3, 1, 2), Segment(0, 0, 4)),
        1: (Segment(2, 0, 9), Segment(0, 10, 18)),
        2: (Segment(0, 18, 29), Segment(2, 9, 17)),
        3: (Segment(1, 0, 8), Segment(3, 0, 1), Segment(0, 4, 9)),
    }
    return (Layout(two),), (Layout(four),)


def whole_steps() -> tuple[Step, ...]:
    """Documents whole on their ranks: all on one, and over two."""
    two = {0: (Segment(2, 0, 17), Segment(3, 0, 2), Segment(1, 0, 8)), 1: (Segment(0, 0, 29),)}
    return (packed_layout(),), (Layout(two),)


def alone_steps() -> tuple[Step, ...]:
    """Every document in a micro-batch of its own: all on one rank, on two, and on three of four."""
    ranks_of_documents = ((0, 0, 0, 0), (0, 1, 0, 1), (0, 1, 3, 0))
    return tuple(
        tuple(Layout({rank: (Segment(number, 0, LENGTHS[number]),)}) for number, rank in enumerate(ranks))
        for ranks in ranks_of_documents
    )


def tokens_of(documents: Documents, shard: Sequence[Segment]) -> torch.Tensor:
    """int64 [T]: the tokens of a rank's segments, in memory order."""
    return torch.cat([documents[segment.doc][segment.start : segment.stop] for segment in shard])


def labels_of(documents: Documents, segment: Segment) -> torch.Tensor:
    """int64 [tokens of the segment]: the token after each; -100 after the document's last."""
    following = torch.nn.functional.pad(documents[segment.doc][1:], (0, 1), value=-100)
    return following[segment.start : segment.stop]
