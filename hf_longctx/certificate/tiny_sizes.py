"""Small sizes for the fields of a configuration, chosen by what the fields mean and by the relations between them.

A configuration is taken as it is written to config.json: nested dicts of plain values. Each dict with a width of its own (the
model's, or that of a tower within it) is a scope. In a scope:

    heads           few, with dims of 8 to 32, as `tiny_heads` describes
    hidden size     query heads * head dim where that was so, else 64 (or 96, where 64 would be that product by chance)
    other widths    multiples and parts of the hidden size stay that; others get a fixed small size
    lengths         less than 8, the shortest document of a certificate

Every change is independent of the others in form: `changes` returns {path: new value}, and leaving one out is always possible.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from hf_longctx.certificate.field_kinds import Kind, is_size, kind_of
from hf_longctx.certificate.tiny_exceptions import EXCEPTIONS
from hf_longctx.certificate.tiny_heads import (
    HEADS,
    Change,
    fit_state_heads,
    head_divisor,
    main_head_dim,
    main_heads,
    named,
    small_dim,
    small_heads,
)

Path = tuple[str | int, ...]
"""Keys from the configuration down to a field, such as ("text_config", "hidden_size"). Overrides by layer have numbers as
keys."""

VOCABULARY = 128
POSITIONS = 128
"""More than the tokens of all documents of a certificate together: tables of positions may be read at any row of a batch."""
HIDDEN = 64
OTHER_HIDDEN = 96
"""Hidden size where heads * head dim must differ from it and would be 64."""
WIDEST = 512
"""Multiples of the hidden size beyond it get a fixed size."""
LABELS = ("id2label", "label2id")
"""Names of classes, by number."""
RANK_DIVISOR, RANKS = 32, (8, 48)
"""Ranks of projections are divided, to stay different (1536 and 512 -> 48 and 16), and lie in this range."""

SMALL: dict[Kind, int] = {
    Kind.VOCABULARY: VOCABULARY,
    Kind.POSITIONS: POSITIONS,
    Kind.ORIGINAL_POSITIONS: 16,
    Kind.WINDOW: 7,
    Kind.BLOCK: 4,
    Kind.TOP_K_TOKENS: 3,
    Kind.GROUPS: 2,
    Kind.MULTIPLE: 8,
    Kind.EXPERT_INTERMEDIATE: 32,
    Kind.INTERMEDIATE: 96,
    Kind.STATE: 8,
    Kind.WIDTH: 32,
}
"""Kinds whose size depends on no other field. No size ever grows."""


@dataclass(frozen=True)
class Scope:
    """One dict of a configuration, and the sizes that others in it are related to."""

    values: dict[str, Any]
    parent: Scope | None = None
    hidden: Change | None = None
    head_divisor: float = 1.0
    """Head dim / small head dim."""
    heads: dict[str, Change] = field(default_factory=dict)
    """By field; of the parent in a dict of overrides, such as those of one layer."""


def changes(config: dict[str, Any]) -> dict[Path, Any]:
    """Returns the new value of every field of a configuration that is to be smaller, by path. Layers are not among them."""
    new: dict[Path, Any] = {}
    _change(config, (), None, new)
    _small_token_ids(config, new)
    return new


def _change(values: dict[str, Any], path: Path, parent: Scope | None, new: dict[Path, Any]) -> None:
    scope = _scope(values, parent)
    for name, value in values.items():
        here = (*path, name)
        if isinstance(value, dict):
            if name not in LABELS:
                _change(value, here, scope, new)
            continue
        small = _small_list(name, value, scope) if isinstance(value, list) else _small(name, value, scope)
        if small is not None and small != value:
            new[here] = small
    new.update({(*path, *inner): size for inner, size in EXCEPTIONS.get(values.get("model_type", ""), {}).items()})


def _scope(values: dict[str, Any], parent: Scope | None) -> Scope:
    widths = named(values, Kind.HIDDEN)
    if not widths:
        return replace(parent, values=values, parent=parent) if parent else Scope(values)
    old = next(iter(widths.values()))
    divisor, heads = head_divisor(values), small_heads(values)
    main, dim = main_heads(values), main_head_dim(values)
    small = HIDDEN
    if main is not None:
        query_width = heads[main][1] * small_dim(dim or old // values[main], divisor)
        if dim is None or values[main] * dim == old:
            small = query_width
        elif query_width == HIDDEN:
            small = OTHER_HIDDEN
    hidden = (old, min(small, old))
    fit_state_heads(values, heads, hidden, divisor)
    return Scope(values, parent, hidden, divisor, heads)


# Other fields


def _small(name: str, value: Any, scope: Scope) -> Any:
    """Returns the small value of one field, or None to leave it."""
    kind = kind_of(name)
    if kind is Kind.DROPOUT:
        return 0.0 if isinstance(value, float) and value > 0 else None
    if kind is None or not is_size(value):
        return None
    if kind is Kind.HIDDEN and scope.hidden:
        return scope.hidden[1] if value == scope.hidden[0] else _related_width(value, scope, HIDDEN)
    if kind in (Kind.HEADS, Kind.KEY_VALUE_HEADS):
        return _small_heads(name, value, scope)
    if kind is Kind.HEAD_DIM:
        return small_dim(value, scope.head_divisor)
    if kind in (Kind.EXPERTS, Kind.TOP_K_EXPERTS, Kind.EXPERT_GROUPS, Kind.TOP_K_GROUPS):
        return _small_experts(kind, name, value, scope)
    if kind is Kind.RANK:
        return min(value, max(RANKS[0], min(RANKS[1], value // RANK_DIVISOR)))
    if kind is Kind.POSITIONS:
        return _small_positions(value, scope)
    if kind in (Kind.INTERMEDIATE, Kind.EXPERT_INTERMEDIATE, Kind.WIDTH):
        return _related_width(value, scope, SMALL[kind])
    if "budget" in name:  # tokens of the blocks chosen: two blocks
        return min(value, 2 * SMALL[Kind.BLOCK])
    return min(value, SMALL[kind]) if kind in SMALL else None


def _small_heads(name: str, value: int, scope: Scope) -> int:
    """A layer may have another number of heads than most: half of them, then."""
    old, small = scope.heads.get(
        name.removesuffix("_per_layer"), (value, min(value, 2 if kind_of(name) is Kind.KEY_VALUE_HEADS else HEADS))
    )
    scaled = small * value // old
    return scaled if scaled and small * value % old == 0 else min(value, HEADS)


def _small_list(name: str, values: list[Any], scope: Scope) -> list[Any] | None:
    """Lists of sizes are shrunk item by item. RoPE's lists are as long as, or sum to, half of the rotated head dim."""
    if name in ("mrope_section", "xdrope_section") and all(map(is_size, values)):
        return _small_sections(values, scope)
    if name in ("short_factor", "long_factor"):
        return values[: max(1, round(len(values) * _rotary_share(scope)))]
    if not values or not all(map(is_size, values)) or kind_of(name) is Kind.TOKEN_ID:
        return None
    small = [_small(name, value, scope) for value in values]
    return None if None in small else small


def _rotary_share(scope: Scope) -> float:
    """Returns small head dim / head dim."""
    values = scope.values
    outer: Scope | None = scope
    while outer is not None and not any(kind_of(n) in (Kind.HEADS, Kind.HEAD_DIM) for n in values):
        outer = outer.parent
        values = outer.values if outer else values
    dim = values.get("qk_rope_head_dim") or main_head_dim(values)
    if dim:
        return small_dim(dim, scope.head_divisor) / dim
    heads = main_heads(values)
    if heads is None or scope.hidden is None:
        return 1.0
    old, small = scope.hidden
    return (small / scope.heads[heads][1]) / (old / values[heads])


def _small_sections(sections: list[int], scope: Scope) -> list[int]:
    """Returns sections in about the same proportion, each at least 1: [24, 20, 20] of 64 -> [4, 2, 2] of 8."""
    total = max(len(sections), round(sum(sections) * _rotary_share(scope)))
    small = [max(1, n * total // sum(sections)) for n in sections]
    small[0] += total - sum(small)
    return small


def _related_width(value: int, scope: Scope, otherwise: int) -> int:
    """Keeps widths that are a multiple or a part of a hidden size, of this scope or one around it; gives others a fixed size."""
    candidates: list[tuple[int, int]] = []
    outer: Scope | None = scope
    while outer is not None:
        if outer.hidden and outer.hidden not in candidates:
            candidates.append(outer.hidden)
        outer = outer.parent
    for old, small in candidates:
        if value % old == 0 and small * (value // old) <= WIDEST:
            return min(value, small * (value // old))
        if old % value == 0 and old // value <= 4:
            return min(value, small // (old // value))
    return min(value, otherwise)


def _small_positions(value: int, scope: Scope) -> int:
    """Keeps the ratio to the length of pretraining, which some RoPEs compute with."""
    for name, original in (*scope.values.items(), *_rope_items(scope.values)):
        if kind_of(name) is Kind.ORIGINAL_POSITIONS and is_size(original) and original < value:
            return int(min(value, SMALL[Kind.ORIGINAL_POSITIONS] * value // original))
    if any(name == "rope_type" and kind == "dynamic" for name, kind in _rope_items(scope.values)):
        return min(value, SMALL[Kind.ORIGINAL_POSITIONS])  # dynamic RoPE changes beyond it
    return min(value, POSITIONS)


def _rope_items(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yields the fields of RoPE parameters, which may be given by layer kind."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    for parameters in (rope, *(v for v in rope.values() if isinstance(v, dict))):
        yield from parameters.items()


def _small_experts(kind: Kind, name: str, value: int, scope: Scope) -> int | None:
    """4 experts and 2 of them chosen; 8 experts in 2 groups, 1 of them chosen, where routing goes by groups."""
    groups = [v for n, v in scope.values.items() if kind_of(n) is Kind.EXPERT_GROUPS and is_size(v)]
    grouped = bool(groups) and max(groups) > 1
    if "shared" in name:
        return min(value, 2)
    if kind is Kind.EXPERTS:
        return min(value, 2 if "zero" in name else 8 if grouped else 4)
    if kind is Kind.TOP_K_EXPERTS:
        return min(value, 2)
    return min(value, 2 if kind is Kind.EXPERT_GROUPS else 1)


def _small_token_ids(config: dict[str, Any], new: dict[Path, Any]) -> None:
    """Gives token ids beyond the small vocabulary one of its last ids each; equal ids stay equal, others distinct."""
    fields = list(token_ids(config, ()))
    used = {i for _, ids in fields for i in ids if i < VOCABULARY // 2}
    free = iter([i for i in range(VOCABULARY - 1, -1, -1) if i not in used])
    mapping: dict[int, int] = {}
    for path, ids in fields:
        for i in ids:
            if i not in mapping:
                mapping[i] = i if i < VOCABULARY // 2 else next(free, VOCABULARY - 1)
        value: Any = config
        for key in path:
            value = value[key]
        small = mapping[value] if is_size(value) else [mapping.get(i, i) for i in value]
        if small != value:
            new[path] = small


def token_ids(values: dict[str, Any], path: Path) -> Iterator[tuple[Path, list[int]]]:
    """Yields (path, ids) of every field that holds token ids."""
    for name, value in values.items():
        if name in LABELS:
            continue
        if isinstance(value, dict):
            yield from token_ids(value, (*path, name))
        elif kind_of(name) is Kind.TOKEN_ID:
            ids = [i for i in (value if isinstance(value, list) else [value]) if is_size(i)]
            if ids:
                yield (*path, name), ids
