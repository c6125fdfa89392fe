"""Implementations of attention across ranks: ours, and the peers as their own packages bring them, unmodified.

Each module offers `IMPLEMENTATIONS`, {name: prepare}. `prepare(case, world)` returns how this rank takes its shard of a
tensor and how it attends over shards; it raises CannotRun where the implementation does not do a case. All ranks
prepare the same implementations in the same order, since some make process groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from attention_cases import Case

from hf_longctx.attention.exchange import Exchange


class CannotRun(Exception):
    """An implementation does not do a case; the message says why."""


@dataclass(frozen=True)
class World:
    """The ranks of a measurement."""

    rank: int
    size: int
    exchange: Exchange


@dataclass(frozen=True)
class Prepared:
    """One implementation on one rank."""

    shard: Callable[[torch.Tensor], torch.Tensor]
    """[T, H, D] of all documents -> what this rank holds of it, in the implementation's own shape"""
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    """q, k, v, sharded -> output, sharded; differentiable"""


Prepare = Callable[[Case, World], Prepared]


def need(condition: Any, reason: str) -> None:
    """Raises CannotRun unless `condition` holds."""
    if not condition:
        raise CannotRun(reason)


def need_groups(world: World, ranks: int) -> None:
    """For implementations with inner groups of so many ranks: there must be several."""
    need(world.size > ranks and world.size % ranks == 0, f"needs a multiple of {ranks} ranks, and more than {ranks}")


def need_one_document(case: Case, parts: int) -> None:
    """For implementations that know no documents and cut the sequence into equal parts."""
    need(len(case.lengths) == 1, "no packed documents")
    need(case.tokens % parts == 0, f"tokens must be a multiple of {parts}")
