"""Matrix products of a forward as torch runs them: FLOPs by torch's own formulas, for the decoder layer that runs.

A product with a weight, or with a view of it, is known by the storage of its operands. What no formula of torch's flop counter
covers (elementwise operations, norms, softmax) is no matrix product and is not counted, as in the formulas for known families.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

OUTSIDE = -1
"""The layer's index where no decoder layer runs."""


@dataclass
class LayerProducts:
    """FLOPs of one decoder layer, or of what is outside of all."""

    weighted: int = 0
    free: int = 0
    """FLOPs of products without weights."""
    widest: int = 0
    """Elements of the largest input of a product with weights."""


@dataclass
class Products:
    """The matrix products of one forward."""

    of_layer: dict[int, LayerProducts] = field(default_factory=dict)
    head: int = 0
    used: set[int] = field(default_factory=set)
    """Storages of weights that were multiplied with."""


class CountProducts(TorchDispatchMode):
    """Counts matrix products while it is entered.

    Args:
        weights: storages of all parameters.
        head: storage of the output head's weight, or None.
        layer: returns the index of the decoder layer that runs, or OUTSIDE.
    """

    def __init__(self, weights: set[int], head: int | None, layer: Callable[[], int]) -> None:
        super().__init__()
        self.counted = Products()
        self._weights, self._head, self._layer = weights, head, layer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            self._count(formula(*args, **(kwargs or {}), out_val=out), [a for a in args if isinstance(a, torch.Tensor)])
        return out

    def _count(self, flops: int, operands: list[torch.Tensor]) -> None:
        layer = self.counted.of_layer.setdefault(self._layer(), LayerProducts())
        storages = {operand.untyped_storage()._cdata for operand in operands}
        multiplied = storages & self._weights
        if not multiplied:
            layer.free += flops
            return
        self.counted.used |= multiplied
        layer.weighted += flops
        inputs = [a.numel() for a in operands if a.untyped_storage()._cdata not in self._weights]
        layer.widest = max([layer.widest, *inputs])
        if self._head in multiplied:
            self.counted.head += flops
