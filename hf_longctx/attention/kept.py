"""Results of a layer's attention in forward, kept for the recomputation of activation checkpointing.

Without it, recomputing a layer repeats its attention: kernels, and the exchange with other ranks. With it the
recomputation takes out and lse (with Ulysses also what the all-to-all brought) from here; nothing is computed and
nothing is sent. All ranks of a layout must decide alike, or some would wait for others in recomputation.
"""

from collections.abc import Callable
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]


class KeptAttention:
    """Results of one call of one layer; made before its forward, and empty again once its recomputation has run."""

    def __init__(
        self,
        put: Callable[[torch.Tensor], Any] = lambda tensor: tensor,
        get: Callable[[Any], torch.Tensor] = lambda kept: kept,
    ) -> None:
        """Keep tensors by `put`, and return them by `get` (training/memory/activation_offload.py)."""
        self._put, self._get = put, get
        self._called = False
        self._kept: list[Any] = []

    def once(self, compute: Callable[[], Tensors]) -> Tensors:
        """Return what `compute` returns. The second call returns what the first did, without computing, and keeps it no
        longer; further ones (a second backward through the same graph) compute again."""
        if self._kept:
            kept, self._kept = self._kept, []
            return tuple(self._get(entry) for entry in kept)
        tensors = compute()
        if not self._called:
            # Detached: the first of them is to become the output of an autograd function, which refers back to this.
            self._called, self._kept = True, [self._put(tensor.detach()) for tensor in tensors]
        return tensors
