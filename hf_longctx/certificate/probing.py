"""Asks a tiny model what its modules do with rows, rather than knowing it by their names.

    positions     which position_ids give what none give: the model counts from 0, from elsewhere, or takes none
    states        which modules let rows of one document change rows of the next, although their attention runs over a layout:
                  those that carry a state from row to row (a Mamba, a convolution, a token shift). Each module of a forward
                  over documents 0, 1 and 2 is called again with other rows of document 0; the innermost ones whose rows of
                  documents 1 and 2 change are these.

Nothing is sent. Shapes: T rows.
"""

import inspect
from typing import Any

import torch

from hf_longctx.certificate.documents import DOCUMENTS, packed, packed_layout
from hf_longctx.models.layout_mask import LayoutMask
from hf_longctx.models.own_logits import base_of
from hf_longctx.models.traits import Traits, class_name

FIRST_POSITIONS = range(4)
"""Asked for; families that count from after their padding token begin at 1 or 2."""
CHANGED = 1e-9
"""Of the largest value: rows that differ by more have changed."""


def first_position(model: Any) -> Traits:
    """Return the traits of a tiny model that says nothing but where its positions begin."""
    base = base_of(model)
    if "position_ids" not in inspect.signature(type(base).forward).parameters:
        return Traits(takes_positions=False)
    ids = DOCUMENTS[0][None]
    rows = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        own = base(input_ids=ids, use_cache=False).last_hidden_state
        for first in FIRST_POSITIONS:
            try:
                found = base(input_ids=ids, position_ids=rows + first, use_cache=False).last_hidden_state
            except (IndexError, RuntimeError):  # there are no more positions
                continue
            if torch.allclose(found, own, rtol=CHANGED, atol=CHANGED * float(own.abs().max())):
                return Traits(first_position=first)
    raise ValueError(
        f"{type(base).__name__} gives with no position_ids what it gives with none of those that begin at "
        f"{FIRST_POSITIONS.start} to {FIRST_POSITIONS.stop - 1}: where its positions begin is not known"
    )


def classes_with_state(model: Any) -> tuple[str, ...]:
    """Names of the classes of a patched tiny model's modules that carry a state from row to row, sorted."""
    probe = _Probe(model)
    with torch.no_grad():
        model(input_ids=packed()[None], layout=packed_layout())
    return tuple(sorted({class_name(module) for module in probe.found}))


class _Probe:
    """Calls modules again, from hooks of their forward, until it is forgotten."""

    def __init__(self, model: Any) -> None:
        self.found: list[torch.nn.Module] = []
        self._inside: set[int] = set()
        """Modules that hold one that was found."""
        self._asking = False
        self._parents = {id(child): parent for parent in model.modules() for child in parent.children()}
        for module in base_of(model).modules():
            if module is not base_of(model):
                module.register_forward_hook(self._ask, with_kwargs=True)

    def _ask(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._asking or id(module) in self._inside:
            return
        first = len(DOCUMENTS[0])
        given = _changed_in_document_0([*args, *kwargs.values()])
        before = _rows(output)
        if given is None or before is None:
            return
        self._asking = True
        try:
            after = _rows(module(*given[: len(args)], **dict(zip(kwargs, given[len(args) :]))))
        finally:
            self._asking = False
        if after is None or _same(before[:, first:], after[:, first:]):
            return
        self.found.append(module)
        while (parent := self._parents.get(id(module))) is not None:
            self._inside.add(id(parent))
            module = parent


def _changed_in_document_0(values: list[Any]) -> list[Any] | None:
    """Arguments with other rows of document 0 in the first of them that holds rows of numbers; None if none does."""
    for at, value in enumerate(values):
        if _rows(value) is not None and isinstance(value, torch.Tensor):
            other = value.clone()
            drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(1), dtype=value.dtype)
            first = len(DOCUMENTS[0])
            other[:, :first] = drawn[:, :first] * value.abs().mean().clamp(min=1e-3)
            return [*values[:at], other, *values[at + 1 :]]
    return None


def _rows(value: Any) -> torch.Tensor | None:
    """The tensor [1, T, ...] of numbers that a module takes or gives, if there is one."""
    if isinstance(value, tuple | list) and value:
        value = value[0]
    if not isinstance(value, torch.Tensor) or isinstance(value, LayoutMask) or not value.is_floating_point():
        return None
    return value if value.dim() >= 3 and value.shape[:2] == (1, len(packed())) else None


def _same(before: torch.Tensor, after: torch.Tensor) -> bool:
    return torch.allclose(before, after, rtol=CHANGED, atol=CHANGED * float(before.abs().max()))
