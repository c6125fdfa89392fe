"""Mixtures: how often the documents of each source are seen in an epoch.

A source's weight is a number of passes: 1 shows each of its documents once in an epoch, 2 twice, 0.5 half of them, drawn
anew in each epoch. It may change from epoch to epoch. What is drawn depends on the seed and the epoch alone, so every
rank draws the same; nothing is sent.

    weights 2, 0.5    documents a a a b b b b    drawn a a a a a a b b
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

MOST_PASSES = 1000

_FRACTIONS = 1
"""Third word of the seed of what is drawn here; the order of an epoch has a seed of two words."""


@dataclass(frozen=True, eq=False)
class Mixture:
    """Weights of the sources that documents come from.

    Raises:
        ValueError: a source has no weight, a weight is not from 0 to MOST_PASSES, or all are 0 in an epoch.
    """

    source: np.ndarray
    """int [documents]: number of the source of each document"""
    weights: tuple[tuple[float, ...], ...]
    """of each source: passes in epoch 0, 1 and so on; the last goes on"""

    def __post_init__(self) -> None:
        if self.source.size and not 0 <= self.source.min() <= self.source.max() < len(self.weights):
            raise ValueError(
                f"documents come from source {self.source.max()}, and {len(self.weights)} sources have weights"
            )
        for number, weights in enumerate(self.weights):
            if not weights or not all(0 <= weight <= MOST_PASSES for weight in weights):
                raise ValueError(
                    f"source {number} has the weights {list(weights)}; each must be from 0 to {MOST_PASSES}, at least one"
                )
        has_documents = np.bincount(self.source, minlength=len(self.weights)) > 0
        for epoch in range(max(map(len, self.weights), default=0)):
            if not any(weight for weight, has_any in zip(self.at(epoch), has_documents) if has_any):
                raise ValueError(f"no document is drawn in epoch {epoch}: the weights are {self.at(epoch)}")

    def at(self, epoch: int) -> list[float]:
        """Passes over each source in an epoch."""
        return [weights[min(epoch, len(weights) - 1)] for weights in self.weights]

    def drawn(self, seed: int, epoch: int) -> np.ndarray:
        """int64: the documents of an epoch, ascending; one that is seen several times stands there as often."""
        weights, documents = np.array(self.at(epoch)), len(self.source)
        whole = np.floor(weights).astype(np.int64)
        times = whole[self.source]
        seeds = np.random.SeedSequence([seed, epoch, _FRACTIONS])
        words = np.random.PCG64(seeds).random_raw(documents + len(weights))
        chances = words[documents:] / 2.0**64
        for number in np.flatnonzero(weights > whole):
            of_source = np.flatnonzero(self.source == number)
            more = int(float(weights[number] - whole[number]) * len(of_source) + chances[number])
            times[of_source[np.argsort(words[of_source], kind="stable")[:more]]] += 1
        if not times.any():  # an epoch has a document, however small the weights
            shown = np.flatnonzero(weights[self.source] > 0)
            times[shown[words[shown].argmin()]] = 1
        return np.repeat(np.arange(documents), times)
