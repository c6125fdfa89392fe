"""The moment at which backward through one decoder layer holds most, until its attention runs: bytes per token.

A layer is run by itself as checkpointing runs it, on fake tensors of two lengths: forward, which keeps nothing, then
backward, which recomputes it up to the last tensor that is needed while the gradients of its last operations wait. After each
operation the storages that are alive are added up. Both lengths run the same operations, so that the difference is what grows
with the tokens:

    bytes per token after operation k = (alive[k] of the longer - alive[k] of the shorter) / (longer - shorter)

What does not grow is gradients of the layer's weights: the moments at which there is none yet, recomputation and the first of
backward, are told from the others.

The layer's own input, which is kept anyway, and what was there before (rotations, masks, weights) do not count; the gradient that
comes in does. Attention's own backward ends it: what that takes follows from the shapes (planner/memory/counted_bytes.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.checkpoint import checkpoint

from hf_longctx.counting.stand_ins import AttentionReached

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments and keywords of a layer, the residual stream first among their tensors."""
LARGE = 1 / 8
"""Share of the layer's largest weight: gradients of norms and biases are none."""


class Busiest(NamedTuple):
    """Bytes per token at most."""

    before: int
    """while there is no gradient of the layer's weights"""
    after: int
    """from the first of them on"""


class Alive(TorchDispatchMode):
    """Adds up, while it is entered, the storages that operations have made and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.after: list[int] = []
        """bytes after each operation"""
        self._of: dict[int, tuple[StorageWeakRef, int]] = {}
        self._apart: set[int] = set()

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Count this tensor's storage no longer, or never."""
        self._apart.add(tensor.untyped_storage()._cdata)
        self._of.pop(tensor.untyped_storage()._cdata, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in tree_flatten((args, kwargs))[0] if _is_tensor(tensor)}
        out = func(*args, **(kwargs or {}))
        self._of = {key: storage for key, storage in self._of.items() if not storage[0].expired()}
        for tensor in filter(_is_tensor, tree_flatten(out)[0]):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._apart and (storage._cdata in self._of or storage._cdata not in given):
                self._of[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.after.append(sum(size for _, size in self._of.values()))
        return out


def busiest(layer: torch.nn.Module, calls: Sequence[Call], tokens: Sequence[int], autocast: bool) -> Busiest | None:
    """Count both moments.

    Args:
        layer: on fake tensors.
        calls: what it was called with, for two lengths.
        tokens: those lengths.

    Returns:
        None where the two run different operations: such a layer loops over its tokens.
    """
    shorter, longer = (_alive(layer, call, autocast) for call in calls)
    if len(shorter) != len(longer):
        return None
    largest = max((parameter.nbytes for parameter in layer.parameters()), default=0)
    of_token = [-(-(long - short) // (tokens[1] - tokens[0])) for short, long in zip(shorter, longer)]
    gradients = [short - tokens[0] * size for short, size in zip(shorter, of_token)]
    begins = next((step for step, size in enumerate(gradients) if size > LARGE * largest), len(gradients))
    return Busiest(max(of_token[:begins], default=0), max(of_token[begins:], default=0))


def _alive(layer: torch.nn.Module, call: Call, autocast: bool) -> list[int]:
    """Bytes that are alive after each operation of the layer: forward, again, and backward."""
    arguments, keywords = tree_map_only(torch.Tensor, torch.Tensor.detach, call)
    hidden = next(leaf for leaf in tree_flatten((arguments, keywords))[0] if _is_tensor(leaf))
    hidden.requires_grad_()
    mode: FakeTensorMode = hidden.fake_mode
    alive = Alive()
    alive.leave_out(hidden)
    for parameter in layer.parameters():
        parameter.grad = None
    try:
        with mode, torch.enable_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast), alive:
            gradient = torch.empty_like(hidden)
            made = checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False, **keywords)
            out = next(leaf for leaf in tree_flatten(made)[0] if _is_tensor(leaf))
            alive.leave_out(out)  # the next layer's input, which that layer keeps
            out.backward(gradient.to(out.dtype))
    except AttentionReached:
        pass
    finally:
        for parameter in layer.parameters():
            parameter.grad = None
    return alive.after


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
