"""Asks a tiny model what its modules do with rows, rather than knowing it by their names.

    positions     which position_ids give what none give: the model counts from 0, from elsewhere, or takes none
    states        which modules let rows of one document change rows of the next, although their attention runs over a layout:
                  those that carry a state from row to row (a Mamba, a convolution, a token shift), or have attention code of
                  their own. Each module of a forward over all documents is called again with other rows of document 0;
                  the innermost ones whose rows of other documents change are these.
    row numbers   which modules give other rows for the same rows where documents lie in another order: those that count rows
                  (positions, a temperature by position)

Nothing is sent. Shapes: T rows.
"""

import copy
import inspect
from collections import Counter
from typing import Any

import torch

from hf_longctx.certificate.drawn_documents import LENGTHS, TOKENS, Documents, packed_layout, tokens_of
from hf_longctx.layouts.layout import Layout, Segment
from hf_longctx.models.layout_mask import LayoutMask
from hf_longctx.models.loss.own_logits import base_of
from hf_longctx.models.traits import Traits, class_name

FIRST_POSITIONS = range(4)
"""Asked for; families that count from after their padding token begin at 1 or 2."""
PACKED = packed_layout()
REVERSED = Layout({0: tuple(Segment(number, 0, LENGTHS[number]) for number in reversed(range(len(LENGTHS))))})
"""The documents in another order."""
CHANGED = 1e-9
"""Share of the largest value: rows that differ by more have changed."""


def first_position(model: Any, documents: Documents) -> Traits:
    """Return the traits of a tiny model that says nothing but where its positions begin."""
    base = base_of(model)
    if "position_ids" not in inspect.signature(type(base).forward).parameters:
        return Traits(takes_positions=False)
    ids = documents[0][None]
    rows = torch.arange(ids.shape[1])[None]
    with torch.no_grad():
        own = base(input_ids=ids, use_cache=False).last_hidden_state
        for first in FIRST_POSITIONS:
            try:
                shifted = base(input_ids=ids, position_ids=rows + first, use_cache=False).last_hidden_state
            except (IndexError, RuntimeError):  # there are no more positions
                continue
            if torch.allclose(shifted, own, rtol=CHANGED, atol=CHANGED * float(own.abs().max())):
                return Traits(first_position=first)
    raise ValueError(
        f"{type(base).__name__} gives with no position_ids what it gives with none of those that begin at "
        f"{FIRST_POSITIONS.start} to {FIRST_POSITIONS.stop - 1}: where its positions begin is not known"
    )


def classes_by_document(model: Any, documents: Documents) -> tuple[str, ...]:
    """Names of the classes of a patched tiny model's modules that must run document by document, sorted."""
    probe = _Probe(model)
    with torch.no_grad():
        for order in (PACKED, REVERSED):
            probe.order = order
            model(input_ids=tokens_of(documents, order.shard(0))[None], layout=order)
    return tuple(sorted({class_name(module) for module in probe.innermost}))


class _Probe:
    """Compares what modules take and give, in hooks of their forward: those of the first forward call them again with other rows,
    those of the second compare documents with where they were in the first."""

    def __init__(self, model: Any) -> None:
        self.movers: list[torch.nn.Module] = []
        """Modules whose output for a document depends on other documents, or on where it lies."""
        self.order = PACKED
        self._inside: set[int] = set()
        """Modules that hold a mover."""
        self._asking = False
        self._seen: dict[tuple[int, int], tuple[list[Any], Any]] = {}
        """What a module took and gave in the first forward, by module and number of the call."""
        self._calls: Counter[tuple[int, int]] = Counter()
        self._parents = {id(child): parent for parent in model.modules() for child in parent.children()}
        for module in base_of(model).modules():
            if module is not base_of(model):
                module.register_forward_hook(self._ask, with_kwargs=True)

    @property
    def innermost(self) -> list[torch.nn.Module]:
        """Return the movers that hold no other one: a module may be noted before one that it holds."""
        return [module for module in self.movers if id(module) not in self._inside]

    def _ask(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._asking:
            return
        key = (id(module), id(self.order))
        self._calls[key] += 1
        call = (id(module), self._calls[key])
        taken = [*args, *kwargs.values()]
        if self.order is PACKED:
            if all(_is_plain(value) for value in taken):  # of other things, rows cannot be compared
                self._seen[call] = (
                    [_copied(value) for value in taken],
                    _copied(output),
                )  # some are changed in place later
            moved = self._moves_other_documents(module, args, kwargs, output)
        else:
            moved = call in self._seen and _depends_on_row(*self._seen[call], taken, output)
        if not moved or id(module) in self._inside or module in self.movers:
            return
        self.movers.append(module)
        while (parent := self._parents.get(id(module))) is not None:
            self._inside.add(id(parent))
            module = parent

    def _moves_other_documents(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> bool:
        """Whether other rows of document 0 give other rows of the other documents."""
        # What layers share and write to (keys and values of one for another) is not written to here.
        shared = [value if _is_plain(value) else copy.copy(value) for value in (*args, *kwargs.values())]
        given = _changed_in_document_0(shared)
        before = _rows(output)
        if given is None or before is None or id(module) in self._inside:
            return False
        self._asking = True
        try:
            after = _rows(module(*given[: len(args)], **dict(zip(kwargs, given[len(args) :]))))
        finally:
            self._asking = False
        first = LENGTHS[0]
        return after is not None and not _same(before[:, first:], after[:, first:])


def _depends_on_row(taken: list[Any], gave: Any, takes: list[Any], gives: Any) -> bool:
    """Whether a module takes the same rows of documents in another order, and gives other rows for them."""
    before, after = _rows(gave), _rows(gives)
    if before is None or after is None or len(taken) != len(takes):
        return False
    pairs = [(_rows(old, of_ids=True), _rows(new, of_ids=True)) for old, new in zip(taken, takes)]
    rows = [(old, new) for old, new in pairs if old is not None and new is not None]
    if not rows or not all(_same(_in_order(old, PACKED), _in_order(new, REVERSED)) for old, new in rows):
        return False
    return not _same(_in_order(before, PACKED), _in_order(after, REVERSED))


def _in_order(rows: torch.Tensor, order: Layout) -> torch.Tensor:
    """Rows [1, T, ...] that lie in the order of a layout of one rank, by document."""
    lengths = [len(segment) for segment in order.shard(0)]
    parts = dict(zip([segment.doc for segment in order.shard(0)], rows.split(lengths, dim=1)))
    return torch.cat([parts[doc] for doc in sorted(parts)], dim=1)


def _changed_in_document_0(values: list[Any]) -> list[Any] | None:
    """Arguments with other rows of document 0 in the first of them that holds rows of numbers; None if none does."""
    for at, value in enumerate(values):
        if _rows(value) is not None and isinstance(value, torch.Tensor):
            other = value.clone()
            drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(1), dtype=value.dtype)
            first = LENGTHS[0]
            other[:, :first] = drawn[:, :first] * value.abs().mean().clamp(min=1e-3)
            return [*values[:at], other, *values[at + 1 :]]
    return None


def _rows(value: Any, of_ids: bool = False) -> torch.Tensor | None:
    """The tensor [1, T, ...] of numbers that a module takes or gives, if there is one; of_ids: also token ids [1, T]."""
    if isinstance(value, tuple | list) and value:
        value = value[0]
    if not isinstance(value, torch.Tensor) or isinstance(value, LayoutMask):
        return None
    if not value.is_floating_point() and not of_ids:
        return None
    return value if value.dim() >= (2 if of_ids else 3) and value.shape[:2] == (1, TOKENS) else None


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_is_plain(part) for part in value)
    return value is None or isinstance(value, torch.Tensor | bool | int | float | str | torch.dtype | torch.device)


def _copied(value: Any) -> torch.Tensor | None:
    rows = _rows(value, of_ids=True)
    return None if rows is None else rows.clone()


def _same(before: torch.Tensor, after: torch.Tensor) -> bool:
    if before.shape != after.shape:
        return False
    before, after = before.double(), after.double()
    return torch.allclose(before, after, rtol=CHANGED, atol=CHANGED * float(before.abs().max()))
