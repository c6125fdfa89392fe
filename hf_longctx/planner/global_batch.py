"""Global batches: which documents make one optimizer step.

A global batch is a contiguous run of a permutation of all documents, or of those that a mixture draws (mixture.py); both
are drawn anew for each (seed, epoch). It is cut by a number of documents, or by a number of tokens: closed before it would
exceed them, never skipping ahead to a document that still fits, which would favour short ones. A document longer than the
token budget is a batch alone. The last batch is kept.

    budget 10 tokens; lengths in permuted order  4 5 | 3 | 12 | 8 1 | 10 | 2

Nothing here knows of ranks, capacity or costs: any number of ranks trains on the same batches, and balancing inside a
step cannot bias training. Every rank derives them from the lengths and the seed; nothing is sent.

The permutation sorts raw 64-bit words of PCG64, seeded with SeedSequence([seed, epoch]). numpy promises that both stay
as they are across versions and machines, which it does not promise of Generator.permutation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from hf_longctx.planner.mixture import Mixture


class GlobalBatches:
    """The global batches of each epoch over a fixed set of documents.

    Args:
        lengths: integers [documents], in tokens.
        seed: >= 0.
        documents: documents in a global batch; or
        tokens: most tokens in a global batch. Exactly one of the two.
        mixture: how often each document is seen in an epoch; None: once.

    Raises:
        ValueError: no documents, a length below 1, a budget below 1, or not exactly one budget.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        seed: int,
        *,
        documents: int | None = None,
        tokens: int | None = None,
        mixture: Mixture | None = None,
    ) -> None:
        lengths = np.asarray(lengths)
        if lengths.ndim != 1 or len(lengths) == 0 or not np.issubdtype(lengths.dtype, np.integer):
            raise ValueError(
                f"lengths has dtype {lengths.dtype} and shape {lengths.shape}; "
                "it must be integers, one per document, at least one"
            )
        if (shortest := int(lengths.min())) < 1:
            raise ValueError(f"document {lengths.argmin()} has {shortest} tokens; every document needs >= 1")
        if (documents is None) == (tokens is None):
            raise ValueError(
                f"global_batch_documents is {documents} and global_batch_tokens is {tokens}; set exactly one of them"
            )
        for name, value in (("global_batch_documents", documents), ("global_batch_tokens", tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be >= 1")
        if seed < 0:
            raise ValueError(f"seed is {seed}; it must be >= 0")
        self.lengths = lengths.astype(np.int64)
        self.seed = seed
        self.documents = documents
        self.tokens = tokens
        self.mixture = mixture

    def epoch(self, epoch: int) -> EpochBatches:
        """The batches of one epoch (>= 0). Any of them can be indexed at once, from the end too: resuming is cheap."""
        if epoch < 0:
            raise ValueError(f"epoch is {epoch}; it must be >= 0")
        drawn = np.arange(len(self.lengths)) if self.mixture is None else self.mixture.drawn(self.seed, epoch)
        words = np.random.PCG64(np.random.SeedSequence([self.seed, epoch])).random_raw(len(drawn))
        permutation = drawn[np.argsort(words, kind="stable")]
        return EpochBatches(permutation, self._bounds(permutation))

    def _bounds(self, permutation: np.ndarray) -> np.ndarray:
        """int64 [batches + 1]: batch i is permutation[bounds[i]:bounds[i + 1]]."""
        count = len(permutation)
        if self.documents is not None:
            return np.append(np.arange(0, count, self.documents), count)
        assert self.tokens is not None
        tokens_before = np.concatenate([[0], np.cumsum(self.lengths[permutation])])
        bounds = [0]
        while bounds[-1] < count:
            last_that_fits = np.searchsorted(tokens_before, tokens_before[bounds[-1]] + self.tokens, side="right") - 1
            bounds.append(max(int(last_that_fits), bounds[-1] + 1))
        return np.array(bounds, np.int64)


class EpochBatches(Sequence[np.ndarray]):
    """The global batches of one epoch: int64 arrays of document indices."""

    def __init__(self, permutation: np.ndarray, bounds: np.ndarray) -> None:
        self._permutation = permutation
        self._bounds = bounds

    def __len__(self) -> int:
        return len(self._bounds) - 1

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...

    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...

    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        return self._permutation[self._bounds[i] : self._bounds[i + 1]]
