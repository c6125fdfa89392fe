"""Results of a layer's attention in forward, kept for the recomputation of activation checkpointing.

Without it, recomputing a layer repeats its attention: kernels, and the exchange with other ranks. With it the
recomputation takes out and lse (with Ulysses also what the all-to-all brought) from here; nothing is computed and
nothing is sent. All ranks of a layout must decide alike, or some would wait for others in recomputation.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Tensors = tuple[torch.Tensor, ...]


class KeptAttention:
    """Results of all attention of one layer, which may call it more than once (DiffLlama does); made before the layer's forward,
    and empty again once its recomputation has run."""

    def __init__(
        self,
        put: Callable[[torch.Tensor], Any] = lambda tensor: tensor,
        get: Callable[[Any], torch.Tensor] = lambda kept: kept,
    ) -> None:
        """Keep tensors by `put`, and return them by `get` (training/memory/activation_offload.py)."""
        self._put, self._get = put, get
        self._runs = 0
        self._kept: deque[list[Any]] = deque()
        """Results of forward that no recomputation has taken out yet, in the order of their calls."""

    def in_layer(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a layer so that its attention receives this object, and count its runs: the first is its forward, the second its
        recomputation. The layer is a partial, whose keywords hold the layout; without one, nothing is kept."""
        keywords = layer.keywords if isinstance(layer, partial) else {}
        if keywords.get("layout") is not None:
            brought: dict[str, Any] = {"keep_attention": self}
        else:
            brought = {name: value.keeping(self) for name, value in keywords.items() if hasattr(value, "keeping")}

        def run(*inputs: Any) -> Any:
            self._runs += 1
            if self._runs > 2:
                self._kept.clear()
            return layer(*inputs, **brought)

        return run

    def once(self, compute: Callable[[], Tensors]) -> Tensors:
        """Return what `compute` returns: in the layer's forward, where it is kept. In its recomputation, each call returns what
        the same call of forward did, without computing, and keeps it no longer; later ones (a second backward through the same
        graph) compute again."""
        if self._runs == 2 and self._kept:
            return tuple(self._get(entry) for entry in self._kept.popleft())
        tensors = compute()
        if self._runs == 1:
            # Detached: the first of them is to become the output of an autograd function, which refers back to this.
            self._kept.append([self._put(tensor.detach()) for tensor in tensors])
        return tensors
