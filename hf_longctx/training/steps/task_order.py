"""The tasks of a step on every device of a pipeline, as the plan orders them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Unit = tuple[int, int]
"""Micro-batch of the plan, and chunk."""


class Task(NamedTuple):
    """A task that a device runs."""

    kind: int
    """FORWARD or BACKWARD of planner/stages/stage_order.py"""
    unit: Unit
    stage: int
    """virtual stages counted"""
    place: int = 0
    """in the one order of the tasks of all devices and ranks"""


def tasks_of(rows: Sequence[np.ndarray]) -> list[list[Task]]:
    """[device]: its tasks in order; rows: [device], int64 [n, 5] each: kind, micro-batch, chunk, stage, place."""
    return [
        [Task(kind, (number, chunk), stage, place) for kind, number, chunk, stage, place in of_device.tolist()]
        for of_device in rows
    ]
