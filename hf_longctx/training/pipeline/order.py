"""The order of a step's tasks on every device of a pipeline, as the plan gives it, the same for all who ask."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np

Unit = tuple[int, int]
"""Micro-batch of the plan, and chunk."""


class Task(NamedTuple):
    """What a device runs at a time."""

    kind: int
    """FORWARD or BACKWARD of planner/stages.py"""
    unit: Unit
    stage: int
    """virtual stages counted"""


class Order:
    """Of one rank of the plan.

    Args:
        rows: device -> int64 [n, 4]: kind, micro-batch, chunk, stage of its tasks, in their order.
    """

    def __init__(self, rows: Callable[[int], np.ndarray]) -> None:
        self._rows = rows
        self.tasks: Callable[[int], Sequence[Task]] = cache(self._tasks)

    def _tasks(self, device: int) -> Sequence[Task]:
        return [Task(kind, (number, chunk), stage) for kind, number, chunk, stage in self._rows(device).tolist()]
