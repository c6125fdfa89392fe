"""Small sizes for the fields of a configuration, chosen by what the fields mean and by the relations between them.

A configuration is taken as it is written to config.json: nested dicts of plain values. Each dict with a width of its own (the
model's, or that of a tower within it) is a scope. In a scope:

    head dims       all are divided by one number, so that sums (192 = 128 + 64), equalities and differences stay: 128 -> 16,
    64 -> 8 heads           2 key/value heads (1 if there was 1) and up to 4 query heads for each: 32 / 8 -> 8 / 2, 64 / 4 -> 8
    / 2, 16 / 16 -> 4 / 4 hidden size     query heads * head dim where that was so, else 64 (or 96, if heads * head dim would
    be 64 by chance) other widths    multiples and parts of the hidden size stay multiples and parts; others get a fixed small
    size lengths         less than 8, the shortest document of a certificate

Every change is independent of the others in form: `changes` returns {path: new value}, and leaving one out is always possible.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hf_longctx.certificate.field_kinds import Kind, kind_of

Path = tuple[str | int, ...]
"""Keys from the configuration down to a field, such as ("text_config", "hidden_size"). Overrides by layer have numbers as
keys."""

VOCABULARY = 128
POSITIONS = 128
"""More than the tokens of all documents of a certificate together: tables of positions may be read at any row of a batch."""
HIDDEN = 64
OTHER_HIDDEN = 96
"""Hidden size where heads * head dim must differ from it and would be 64."""
HEAD_DIM = 16
LABELS = ("id2label", "label2id")
"""Names of classes, by number."""
RANKS = {"q": 32, "": 16}

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


@dataclass
class Scope:
    """Fields of one dict of a configuration that sizes are related to."""

    values: dict[str, Any]
    parent: Scope | None = None
    hidden: tuple[int, int] | None = None
    """Hidden size before and after."""
    head_divisor: float = 1.0
    heads: dict[str, int] = field(default_factory=dict)
    """Name of a field of heads -> new number."""


def is_size(value: Any) -> bool:
    """True for a positive integer that is no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


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


def _scope(values: dict[str, Any], parent: Scope | None) -> Scope:
    names = [name for name, value in values.items() if kind_of(name) is Kind.HIDDEN and is_size(value)]
    if not names:
        return Scope(values, parent, parent.hidden, parent.head_divisor, parent.heads) if parent else Scope(values)
    scope = Scope(values, parent, head_divisor=_head_divisor(values))
    old = values[names[0]]
    scope.heads = _heads(values)
    heads, head_dim = _main_heads(values), _main_head_dim(values)
    small_dim = _divided(head_dim or old // values[heads], scope) if heads else HEAD_DIM
    if heads is None:
        hidden = HIDDEN
    elif head_dim is None or values[heads] * head_dim == old:
        hidden = scope.heads[heads] * small_dim
    else:
        hidden = OTHER_HIDDEN if scope.heads[heads] * small_dim == HIDDEN else HIDDEN
    scope.hidden = (old, min(hidden, old))
    _fit_products(scope)
    return scope


# Heads


def _main_heads(values: dict[str, Any]) -> str | None:
    """Name of the field with the attention's query heads."""
    names = [name for name, value in values.items() if kind_of(name) is Kind.HEADS and is_size(value)]
    plain = [name for name in names if re.fullmatch(r"(num_|n_)?(attention_|decoder_attention_|decoder_)?heads?", name)]
    named = [name for name in names if "attention" in name or "decoder" in name]
    return next(iter([*plain, *named, *names]), None)


def _main_head_dim(values: dict[str, Any]) -> int | None:
    for name in ("head_dim", "d_kv", "kv_channels", "attention_head_size", "dim_head", "d_head"):
        if is_size(values.get(name)):
            return int(values[name])
    return None


def _prefix(name: str) -> str:
    """What the fields of heads and head dims of one layer kind have in common: "linear_value" of "linear_num_value_heads"."""
    words = [w for w in re.split(r"_", name.replace("headdim", "head_dim").replace("ngroups", "n_groups")) if w]
    return "_".join(w for w in words if w not in ("num", "n", "heads", "head", "dim", "d", "attention", "size"))


def _heads(values: dict[str, Any]) -> dict[str, int]:
    """Returns new numbers of heads: query heads with their key/value heads first, then those without."""
    new: dict[str, int] = {}
    query = {_prefix(n): n for n, v in values.items() if kind_of(n) is Kind.HEADS and is_size(v)}
    for name, value in values.items():
        if kind_of(name) is not Kind.KEY_VALUE_HEADS or not is_size(value):
            continue
        prefix = re.sub(r"_?(key_value|kv|multi_query_group|query_groups)_?|key", "", _prefix(name))
        linear = {"linear": "linear_value"}.get(prefix.strip("_"), prefix.strip("_"))
        main = query.get(linear) or _main_heads(values)
        if main is None or values[main] % value:
            new[name] = min(value, 2)
            continue
        ratio = values[main] // value
        groups = 1 if value == 1 else (4 if ratio == 1 else 2)
        groups = min(groups, value)
        new[name] = groups
        new.setdefault(main, groups * ratio if ratio <= 4 else 4 * groups)
    for name in query.values():
        new.setdefault(name, min(values[name], 4))
    return new


def _fit_products(scope: Scope) -> None:
    """Keeps heads * head dim = m * hidden size, of state layers too, by the number of heads."""
    assert scope.hidden is not None
    old, small = scope.hidden
    dims = {_prefix(n): v for n, v in scope.values.items() if kind_of(n) is Kind.HEAD_DIM and is_size(v)}
    grouped = {n for n, v in scope.values.items() if kind_of(n) is Kind.KEY_VALUE_HEADS}
    for name in list(scope.heads):
        dim = dims.get(_prefix(name))
        if name in grouped or dim is None:
            continue
        width, small_dim = scope.values[name] * dim, _divided(dim, scope)
        if width == old or (width % old and old % width):
            continue
        heads = small * width // old // small_dim
        attention = name == _main_heads(scope.values) and any(kind_of(n) is Kind.KEY_VALUE_HEADS for n in scope.values)
        if heads and not attention:
            scope.heads[name] = heads


def _head_divisor(values: dict[str, Any]) -> float:
    """Returns the number that every head dim of a scope is divided by: the largest becomes 16, or else 24 or 32, so that all
    become multiples of 8. Sums and ratios are kept then: 192 = 128 + 64 becomes 24 = 16 + 8."""
    dims = {value for name, value in values.items() if kind_of(name) is Kind.HEAD_DIM and is_size(value)}
    heads = _main_heads(values)
    if heads and _main_head_dim(values) is None:
        dims |= {
            width // values[heads] for name, width in values.items() if kind_of(name) is Kind.HIDDEN and is_size(width)
        }
    largest = max(dims, default=HEAD_DIM)
    for small in (HEAD_DIM, 24, 32):
        if all(dim * small % (8 * largest) == 0 for dim in dims):
            return largest / small
    return largest / 32


def _divided(dim: int, scope: Scope) -> int:
    """Returns a head dim's small value, a multiple of 8 (kernels want that) unless it was not."""
    if dim <= 8:
        return dim
    return min(dim, max(8, round(dim / scope.head_divisor / 8) * 8))


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
        return min(value, scope.heads.get(name, 4))
    if kind is Kind.HEAD_DIM:
        return _divided(value, scope)
    if kind in (Kind.EXPERTS, Kind.TOP_K_EXPERTS, Kind.EXPERT_GROUPS, Kind.TOP_K_GROUPS):
        return _small_experts(kind, name, value, scope)
    if kind is Kind.RANK:
        return min(value, RANKS["q" if name.startswith("q_") else ""] if value > 64 else 8)
    if kind is Kind.POSITIONS:
        return _small_positions(value, scope)
    if kind in (Kind.INTERMEDIATE, Kind.EXPERT_INTERMEDIATE, Kind.WIDTH):
        return _related_width(value, scope, SMALL[kind])
    return min(value, SMALL[kind]) if kind in SMALL else None


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
    dim = values.get("qk_rope_head_dim") or _main_head_dim(values)
    if dim:
        return _divided(dim, scope) / dim
    heads = _main_heads(values)
    if heads is None or scope.hidden is None:
        return 1.0
    old, small = scope.hidden
    return (small / scope.heads[heads]) / (old / values[heads])


def _small_sections(sections: list[int], scope: Scope) -> list[int]:
    """Returns sections in about the same proportion, each at least 1: [24, 20, 20] of 64 -> [4, 2, 2] of 8."""
    total = max(len(sections), round(sum(sections) * _rotary_share(scope)))
    small = [max(1, n * total // sum(sections)) for n in sections]
    small[0] += total - sum(small)
    return small


def _related_width(value: int, scope: Scope, otherwise: int) -> int:
    """Keeps widths that are a multiple or a part of a hidden size; gives others a fixed size."""
    candidates: list[tuple[int, int]] = []
    outer: Scope | None = scope
    while outer is not None:
        if outer.hidden and outer.hidden not in candidates:
            candidates.append(outer.hidden)
        outer = outer.parent
    for old, small in candidates:
        if value % old == 0 and value // old <= 4:
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
