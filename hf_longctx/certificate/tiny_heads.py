"""Small numbers of heads and small head dims, for one dict of a configuration.

heads           2 key/value heads (1 if there was 1) and up to 4 query heads for each: 32 / 8 -> 8 / 2, 64 / 4 -> 8 / 2,
                16 / 16 -> 4 / 4. Ratios of 1 to 4 stay
head dims       all are divided by one number, so that sums (192 = 128 + 64), equalities and differences stay:
                128 -> 16, or 192, 128, 64 -> 24, 16, 8
state layers    heads * head dim = m * hidden size stays, by the number of heads
"""

from __future__ import annotations

import re
from typing import Any

from hf_longctx.certificate.field_kinds import Kind, is_size, kind_of

HEAD_DIM = 16
HEAD_DIMS = (HEAD_DIM, 24, 32)
"""Choices for the largest head dim: the first of these that makes all head dims multiples of 8 and leaves at least as much for a
partial RoPE, else the last."""
MULTIPLE = 8
"""Head dims are multiples of it, because kernels want that."""
RATIO = 4
"""Query heads for each key/value head, at most."""
HEADS = 4
"""Heads of a layer that does not group them."""

Change = tuple[int, int]
"""Value before and after."""


def named(values: dict[str, Any], kind: Kind) -> dict[str, int]:
    """Returns the fields of a kind that hold one size."""
    return {name: value for name, value in values.items() if kind_of(name) is kind and is_size(value)}


def main_heads(values: dict[str, Any]) -> str | None:
    """Returns the name of the field with the attention's query heads, if there is one."""
    names = list(named(values, Kind.HEADS))
    plain = [name for name in names if re.fullmatch(r"(num_|n_)?(attention_|decoder_attention_|decoder_)?heads?", name)]
    attention = [name for name in names if "attention" in name or "decoder" in name]
    return next(iter([*plain, *attention, *names]), None)


def main_head_dim(values: dict[str, Any]) -> int | None:
    """Returns the attention's head dim where a field gives it."""
    for name in ("head_dim", "d_kv", "kv_channels", "attention_head_size", "dim_head", "d_head"):
        if is_size(values.get(name)):
            return int(values[name])
    return None


def head_divisor(values: dict[str, Any]) -> float:
    """Returns the number that every head dim is divided by."""
    dims = set(named(values, Kind.HEAD_DIM).values())
    heads = main_heads(values)
    if heads and main_head_dim(values) is None:  # heads share the hidden size out
        dims |= {width // values[heads] for width in named(values, Kind.HIDDEN).values()}
    largest = max(dims, default=HEAD_DIM)
    for small in HEAD_DIMS:
        if all(dim * small % (MULTIPLE * largest) == 0 for dim in dims) and small * rotated_part(values) >= MULTIPLE:
            return largest / small
    return largest / HEAD_DIMS[-1]


def rotated_part(values: dict[str, Any]) -> float:
    """Returns the part of a head that RoPE rotates: the least, where layers differ."""
    rope = values.get("rope_parameters") or {}
    parts = [scope.get("partial_rotary_factor") for scope in (values, rope, *rope.values()) if isinstance(scope, dict)]
    return min([part for part in parts if isinstance(part, float) and part > 0], default=1.0)


def small_dim(dim: int, divisor: float) -> int:
    """Returns the small value of a head dim: a multiple of MULTIPLE, unless it is no more than that."""
    return min(dim, max(MULTIPLE, round(dim / divisor / MULTIPLE) * MULTIPLE))


def small_heads(values: dict[str, Any]) -> dict[str, Change]:
    """Returns the numbers of heads before and after, by field."""
    query = {_layer_kind(name): name for name in named(values, Kind.HEADS)}
    new: dict[str, int] = {}
    for name, groups in named(values, Kind.KEY_VALUE_HEADS).items():
        main = query.get(_layer_kind(name)) or main_heads(values)
        if main is None or values[main] % groups:
            new[name] = min(groups, 2)
            continue
        ratio = values[main] // groups
        new[name] = min(groups, HEADS if ratio == 1 else 2)
        new.setdefault(main, new[name] * min(ratio, RATIO))
    for name in query.values():
        new.setdefault(name, min(values[name], HEADS))
    return {name: (values[name], small) for name, small in new.items()}


def fit_state_heads(values: dict[str, Any], heads: dict[str, Change], hidden: Change, divisor: float) -> None:
    """Changes the heads of state layers so that heads * head dim stays the same multiple, or part, of the hidden size. Heads in
    groups keep the ratio to their groups instead."""
    old, small = hidden
    dims = {_layer_kind(name): dim for name, dim in named(values, Kind.HEAD_DIM).items()}
    grouped = {_layer_kind(name) for name in named(values, Kind.KEY_VALUE_HEADS)}
    for name in named(values, Kind.HEADS):
        dim = dims.get(_layer_kind(name))
        if _layer_kind(name) in grouped or dim is None:
            continue
        width = values[name] * dim
        fitting = small * width // old // small_dim(dim, divisor)
        if (width % old == 0 or old % width == 0) and 0 < fitting <= values[name]:
            heads[name] = (values[name], fitting)


def _layer_kind(name: str) -> str:
    """Returns what the fields of heads and head dims of one kind of layer have in common: "linear" of "linear_num_key_heads",
    "linear_num_value_heads" and "linear_value_head_dim", "mamba" of "n_mamba_heads" and "mamba_headdim"."""
    name = re.sub(r"multi_query_group_num|num_query_groups|key_value|value|key|kv|headdim", "", name)
    words = ("num", "n", "heads", "head", "dim", "d", "attention", "size")
    return "_".join(word for word in name.split("_") if word and word not in words)
