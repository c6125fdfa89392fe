"""Measures what autograd keeps of a forward for its backward, for each decoder layer: storages, parameters left out.

Counted as transformers' own modules compute in plain torch, with attention as this package keeps it (stand_ins.py). Kernels that
fuse operations (of Mamba or delta rules on a GPU, compiled layers) keep less. A tensor that several layers share counts once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from hf_longctx.counting.products import OUTSIDE

AFTER = -2
"""After the last decoder layer: the last norm."""


@dataclass
class LayerSaved:
    """Bytes of one layer in one forward."""

    whole: int = 0
    own_input: int = 0
    after_attention: int = 0
    inner: int = 0
    attention_output: int = 0


@dataclass
class Saved:
    """Hears of every tensor that autograd saves."""

    apart: set[int]
    """Storages that are there anyway: parameters, and the document itself."""
    of_layer: dict[int, LayerSaved] = field(default_factory=dict)
    residual: int = 0
    """Bytes that come into a decoder layer."""
    layer: int = OUTSIDE
    attended: bool = False
    ended: bool = False
    """Whether the output head has begun, of which the chunked loss keeps nothing."""
    _elements: int = 0
    """Elements that come into a decoder layer."""
    _input: int = 0
    """Storage of them."""
    _given: set[int] = field(default_factory=set)
    """Storages that layers are given beside that, rotations for instance: made once for all layers."""
    _alive: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    """Held, so that no address is used twice."""

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor that autograd saves."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if self.ended or key in self.apart or key in self._alive:
            return tensor
        self._alive[key] = storage
        counted = self.of_layer.setdefault(OUTSIDE if key in self._given else self.layer, LayerSaved())
        counted.whole += size
        counted.own_input += size if key == self._input else 0
        if self.attended and key not in self._given:
            counted.after_attention += size
            counted.inner += size if size // tensor.element_size() > self._elements else 0
        return tensor

    def enter(self, layer: int, inputs: list[torch.Tensor]) -> None:
        """A decoder layer begins with these inputs, the residual stream first."""
        self.layer, self.attended = layer, False
        if inputs:
            storages = [tensor.untyped_storage() for tensor in inputs]
            self.residual = max(self.residual, storages[0].nbytes())
            self._elements = max(self._elements, inputs[0].numel())
            self._input = storages[0]._cdata
            self._given |= {storage._cdata for storage in storages[1:]} - {self._input}

    def after_attention(self, own: tuple[torch.Tensor, ...]) -> None:
        """Count the tensors `own` that attention has kept for its backward."""
        counted = self.of_layer.setdefault(self.layer, LayerSaved())
        counted.attention_output += sum(tensor.untyped_storage().nbytes() for tensor in own)
        self.attended = True

    def leave(self) -> None:
        """A decoder layer has ended."""
        self.layer, self.attended = AFTER, False
