"""The documents that training is measured on: which ones make each optimizer step, and what they hold.

    mixture           GitHub's documents of up to `longest` tokens. Packed first, as TRL does it: best fit decreasing over all
                      documents, so that every pack but a few is full; a step is PACKS of these packs. This suits
                      packing, and everybody trains on the same documents in the same steps
    long documents    each step has one document of `longest` tokens among short ones, which have at most a quarter of
                      it; together as many tokens as the long one

Token ids are random, the same wherever they are made.
"""

from dataclasses import dataclass

import numpy as np

from hf_longctx.simulator.lengths import draw_tokens

PACKS = 4
"""Packs of `longest` tokens in a step of the mixture: two for each of two ranks."""
SPARE_PACKS = 16
"""Packs beyond those needed: the least full are left out, as the last ones of a large data set would be."""


@dataclass(frozen=True)
class Case:
    """Documents in optimizer steps."""

    name: str
    lengths: tuple[int, ...]
    """tokens of each document"""
    steps: tuple[tuple[int, ...], ...]
    """documents of each optimizer step"""
    vocabulary: int
    seed: int = 0

    def tokens(self, document: int) -> list[int]:
        """Token ids of one document."""
        generator = np.random.default_rng([self.seed, document])
        return generator.integers(self.vocabulary, size=self.lengths[document]).tolist()

    def label_tokens(self, documents: tuple[int, ...]) -> int:
        """The first token of a document is predicted from nothing."""
        return sum(self.lengths[document] - 1 for document in documents)


def best_fit_decreasing(lengths: dict[int, int], size: int) -> list[tuple[int, ...]]:
    """Packs of documents (name -> tokens) of at most `size` tokens: each, longest first, goes where it leaves least room.

    Raises:
        ValueError: a document is longer than a pack: packing would have to cut it.
    """
    packs: list[list[int]] = []
    room: list[int] = []
    for document in sorted(lengths, key=lambda name: -lengths[name]):
        if lengths[document] > size:
            raise ValueError(f"document {document} has {lengths[document]} tokens, a pack holds {size}")
        fitting = [(left, pack) for pack, left in enumerate(room) if left >= lengths[document]]
        if fitting:
            _, pack = min(fitting)
        else:
            pack = len(packs)
            packs.append([])
            room.append(size)
        packs[pack].append(document)
        room[pack] -= lengths[document]
    return [tuple(pack) for pack in packs]


def mixture(steps: int, longest: int, vocabulary: int, seed: int = 0) -> Case:
    """GitHub's documents, `steps` steps of PACKS full packs."""
    wanted = steps * PACKS
    drawn = draw_tokens("github", (wanted + SPARE_PACKS) * longest, seed, longest, "exclude").tolist()
    packs = best_fit_decreasing(dict(enumerate(drawn)), longest)
    packs = sorted(packs, key=lambda pack: -sum(drawn[document] for document in pack))[:wanted]
    generator = np.random.default_rng(seed)
    order = generator.permutation(wanted)
    lengths: list[int] = []
    chosen = []
    for step in order.reshape(steps, PACKS):
        documents = generator.permutation([document for pack in step for document in packs[pack]])
        chosen.append(tuple(range(len(lengths), len(lengths) + len(documents))))
        lengths += [drawn[document] for document in documents]
    return Case("mixture", tuple(lengths), tuple(chosen), vocabulary, seed)


def long_documents(steps: int, longest: int, vocabulary: int, seed: int = 0) -> Case:
    """One document of `longest` tokens in every step, among as many tokens of short ones."""
    lengths: list[int] = []
    chosen = []
    for step in range(steps):
        short = draw_tokens("github", longest, seed + step, longest // 4, "exclude").tolist()
        chosen.append(tuple(range(len(lengths), len(lengths) + len(short) + 1)))
        lengths += [*short, longest]
    return Case("long documents", tuple(lengths), tuple(chosen), vocabulary, seed)
