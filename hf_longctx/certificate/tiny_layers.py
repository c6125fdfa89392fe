"""Chooses the layers that a tiny copy keeps: two of each kind, in their order.

Two layers are of one kind if their modules have the same classes, shapes and switches (sliding_window None or not, is_causal,
...) and the lists of the configuration with an entry for each layer (layer_types, no_rope_layers, ...) say the same of both.
So the kinds are read from the model, built without memory, and not from the names that configurations have for them.

Fields that speak of layers follow the choice. Of 12 layers with two kinds, kept 0 1 4 5:

    a list with an entry for each layer     the entries 0 1 4 5
    repetitions  [[["a", "b"], 6]]          the entries 0 1 4 5:  [[["a"], 1], [["b"], 1], ...]
    a list of layers' numbers  [4, 5, 9]    their new numbers  [2, 3]
    a count of first layers    4            the kept among 0 1 2 3:   2
    a count of last layers     8            the kept among 4 ... 11:  2  (where the name has "shared" or "last")

Whether that is right is seen by building the model: its layers must be of the expected kinds. If not (a period: every fourth
layer is of another kind), the copy keeps the first layers as they are, as many as it takes for all kinds to occur.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch

from hf_longctx.certificate.field_kinds import Kind, is_size, kind_of
from hf_longctx.certificate.tiny_sizes import LABELS

ABSENT = "absent"
LAYERS_OF_A_KIND = 2
MANY_KINDS = 6
"""With more kinds than that, one layer of each is kept."""
LONG_PERIOD = 8
"""Most layers of a copy whose kinds follow a period: with two of each kind if these suffice, else with one."""
MOST_VALUES = 4
"""A number with more values than that over the layers tells them apart (a scale by depth), but is no kind."""

LAST = ("shared", "last")
PERIOD = ("period", "interval", "every", "step", "pattern", "offset", "freq", "group")
COUNT = ("layer", "dense", "first", "start", "end", *LAST)


def layer_count(values: dict[str, Any], kept: int) -> dict[str, int]:
    """Returns the fields of a scope that count layers, with their new values."""
    return {name: min(value, kept) for name, value in values.items() if kind_of(name) is Kind.LAYERS and is_size(value)}


def keep_layers(values: dict[str, Any], layers: int, kept: list[int], counts_first: bool = True) -> dict[str, Any]:
    """Returns the fields of a scope of `layers` layers that change when only the layers `kept` (ascending numbers) stay.

    `counts_first`: numbers that speak of layers are counts of first or last layers, as the head of this module describes; else
    they stay.
    """
    new: dict[str, Any] = dict(layer_count(values, len(kept)))
    for name, value in values.items():
        if name in new or isinstance(value, bool):
            continue
        if isinstance(value, (list, str)) and _is_by_layer(name, value, layers):
            entries = [value[i] for i in kept]
            new[name] = "".join(entries) if isinstance(value, str) else entries
        elif isinstance(value, list) and len(_unrolled(value)) == layers:
            entries = _unrolled(value)
            new[name] = [[[entries[i]], 1] for i in kept]
        elif isinstance(value, list) and _are_layer_numbers(name, value, layers):
            new[name] = [kept.index(i) for i in value if i in kept]
        elif isinstance(value, dict) and value and name not in LABELS and all(str(key).isdigit() for key in value):
            new[name] = {type(key)(kept.index(int(key))): entry for key, entry in value.items() if int(key) in kept}
        elif isinstance(value, int) and counts_first and _counts_layers(name, value, layers):
            last = any(word in name for word in LAST)
            new[name] = sum(i >= layers - value if last else i < value for i in kept)
    return {name: value for name, value in new.items() if value != values[name]}


def _is_by_layer(name: str, value: list[Any] | str, layers: int) -> bool:
    if isinstance(value, str):
        return len(value) == layers and "pattern" in name
    return len(value) == layers and not _are_layer_numbers(name, value, layers) and kind_of(name) is not Kind.TOKEN_ID


def _unrolled(value: list[Any]) -> list[Any]:
    """Returns the entries of a list of repetitions, [[["global", "local"], 12]], in full; none for another list."""
    pairs = [p for p in value if isinstance(p, list) and len(p) == 2 and isinstance(p[0], list) and is_size(p[1])]
    return (
        [entry for entries, times in pairs for _ in range(times) for entry in entries]
        if len(pairs) == len(value)
        else []
    )


def _are_layer_numbers(name: str, value: list[Any], layers: int) -> bool:
    """True for ascending whole numbers under `layers`, in a field whose name speaks of layers or indices."""
    if not value or not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < layers for i in value):
        return False
    named = any(word in name for word in ("layer", "idx", "indexes", "indices", "_ids")) and "no_rope" not in name
    return named and all(a < b for a, b in itertools.pairwise(value))


def _counts_layers(name: str, value: int, layers: int) -> bool:
    named = any(word in name for word in COUNT) and not any(word in name for word in PERIOD)
    return named and kind_of(name) is None and 0 < value <= layers


# Kinds


@dataclass(frozen=True)
class Kinds:
    """Kinds of a model's layers, and what tells them apart."""

    of_layers: tuple[tuple[Any, ...], ...]
    """For each layer the values of `facts`. Equal for all layers where the model has no list of as many layers."""
    facts: tuple[tuple[str, ...], ...]
    """Names of what differs between kinds: (path of the list of layers, module within the layer, attribute), or (field,)."""

    @classmethod
    def of(cls, model: torch.nn.Module, values: dict[str, Any], layers: int) -> Kinds:
        """Reads the kinds of a model with `layers` layers, built from a configuration whose scope of them is `values`."""
        stacks = [name for name, m in model.named_modules() if isinstance(m, torch.nn.ModuleList) and len(m) == layers]
        rows = _rows(model, values, layers, stacks)
        names = sorted({name for row in rows for name in row})
        facts = tuple(name for name in names if _tells_kinds([row.get(name, ABSENT) for row in rows]))
        return cls(tuple(tuple(row.get(name, ABSENT) for name in facts) for row in rows), facts)

    def are_kept(self, choice: Choice, model: torch.nn.Module, values: dict[str, Any]) -> bool:
        """True if the layers of a copy, built from the scope `values`, are of the kinds of the layers chosen."""
        stacks = list(dict.fromkeys(fact[0] for fact in self.facts if len(fact) > 1))
        rows = _rows(model, values, len(choice.kept), stacks)
        for row, original in zip(rows, choice.kept):
            for fact, value in zip(self.facts, self.of_layers[original]):
                row_value = row.get(fact, ABSENT)
                of_count = (is_size(row_value) and is_size(value)) or any(
                    word.isdigit() for word in ".".join(fact[1:]).split(".")
                )
                if row_value != value and not (choice.counts_may_differ and of_count):
                    return False
        return True


def _rows(
    model: torch.nn.Module, values: dict[str, Any], layers: int, stacks: list[str]
) -> list[dict[tuple[str, ...], Any]]:
    rows: list[dict[tuple[str, ...], Any]] = [{} for _ in range(layers)]
    for stack in stacks:
        for row, layer in zip(rows, cast(torch.nn.ModuleList, model.get_submodule(stack))):
            row.update({(stack, *name): value for name, value in _facts(layer)})
    for field, value in values.items():
        if isinstance(value, (list, str)) and _is_by_layer(field, value, layers):
            for row, entry in zip(rows, value):
                row[(field,)] = str(entry)
    return rows


def _facts(layer: torch.nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    for name, module in layer.named_modules():
        yield (name, "class"), type(module).__qualname__
        for key, value in vars(module).items():
            if key.startswith("_") or key == "training" or kind_of(key) is Kind.LAYERS:
                continue
            if value is None or isinstance(value, (bool, str, int)):
                yield (name, key), value
        for key, parameter in module.named_parameters(recurse=False):
            yield (name, key), tuple(parameter.shape)


def _tells_kinds(values: list[Any]) -> bool:
    """False for what is the same everywhere, for the number of a layer, and for what grows with it."""
    if len({str(value) for value in values}) <= 1:
        return False
    numbers = {i: value for i, value in enumerate(values) if isinstance(value, int) and not isinstance(value, bool)}
    if not numbers or len(numbers) + values.count(ABSENT) < len(values):
        return True
    return len(set(numbers.values())) <= MOST_VALUES and not all(i == value for i, value in numbers.items())


def choose(kinds: Kinds) -> list[int]:
    """Returns the numbers of the first two layers of each kind (one, where there are many kinds), ascending."""
    per_kind = LAYERS_OF_A_KIND if len(set(kinds.of_layers)) <= MANY_KINDS else 1
    seen: Counter[tuple[Any, ...]] = Counter()
    kept = []
    for i, kind in enumerate(kinds.of_layers):
        seen[kind] += 1
        if seen[kind] <= per_kind:
            kept.append(i)
    return kept


def first_layers(kinds: Kinds) -> list[int]:
    """Returns the numbers of as many first layers as it takes for every kind to occur, twice where that is soon."""
    occur = Counter(kinds.of_layers)
    count = len(kinds.of_layers)
    for repeats in (LAYERS_OF_A_KIND, 1):
        seen: Counter[tuple[Any, ...]] = Counter()
        for count, kind in enumerate(kinds.of_layers, start=1):
            seen[kind] += 1
            if count > 1 and all(seen[k] >= min(repeats, n) for k, n in occur.items()):
                break
        if count <= LONG_PERIOD:
            break
    return list(range(count))


@dataclass(frozen=True)
class Choice:
    """Layers that a copy keeps."""

    layers: int
    """How many layers the original has."""
    kept: tuple[int, ...]
    counts_first: bool = True
    """How numbers that speak of layers are read; see `keep_layers`."""
    counts_may_differ: bool = False
    """Modules may count the layers of their kind, and hold a list with a module for each."""

    def fields(self, values: dict[str, Any]) -> dict[str, Any]:
        """Returns the fields of a scope that change."""
        return (
            {}
            if len(self.kept) == self.layers
            else keep_layers(values, self.layers, list(self.kept), self.counts_first)
        )


def choices(kinds: Kinds) -> Iterator[Choice]:
    """Yields choices of layers, the smallest copy first. The last keeps all layers."""
    layers = len(kinds.of_layers)
    for counts_may_differ in (False, True):
        for kept in (choose(kinds), first_layers(kinds)):
            for counts_first in (True, False):
                yield Choice(layers, tuple(kept), counts_first, counts_may_differ)
    yield Choice(layers, tuple(range(layers)))
