"""A profile: what `hf-longctx profile` measured on a machine, and the speeds that were fitted to it
(planner/cost/calibration.py).

A file of JSON. The planner, the trainer and the simulator plan with its speeds.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hf_longctx.hardware.speeds import RankSpeed

if TYPE_CHECKING:
    import numpy as np

Part = Literal["micro_batch", "attention", "exchange", "reduction", "optimizer"]
"""Part that a point timed: a micro-batch, forward and backward; the attention or the messages of one alone, all layers; the sum
of all gradients over all ranks; a step of the optimizer."""


class CalibrationError(ValueError):
    """Measurements that nothing can be fitted to, or a profile that cannot be read."""


@dataclass(frozen=True)
class Point:
    """One measurement, taken on all ranks at once: contention is part of the answer."""

    part: Part
    lengths: tuple[int, ...]
    """tokens of the documents, each of them split over all `ranks`; none for reduction and optimizer"""
    ranks: int
    """of the group; for reduction and optimizer, all of them"""
    seconds: float
    """of one rank"""
    held_out: bool = False
    """whether speeds are judged by it, and were not fitted to it"""


@dataclass(frozen=True)
class Profile:
    """Measured times and speeds of a machine, by `hf-longctx profile`; the planner, the trainer and the simulator read it."""

    speed: RankSpeed
    points: tuple[Point, ...]
    predicted_seconds: tuple[float, ...]
    """what the speeds predict of each point"""
    clock: Literal["wall", "cpu"]
    """cpu: seconds of CPU, the waiting for a core left out, where more ranks than cores took part"""
    device: str
    """its name"""
    backend: str
    """what the ranks exchange through: gloo or nccl; none on one rank"""
    world_size: int
    ranks_per_node: int
    threads: int
    """of each rank"""
    precision: str
    """of weights and matrix products"""
    device_bytes: int
    """memory of one rank's device; on CPUs, its share of the node's"""
    host_bytes: int
    """memory of a node"""
    model: dict[str, int | str]
    """sizes of the model that was run"""
    versions: dict[str, str]
    host_bandwidth: float = 0.0
    """bytes/s that one rank moves to pinned host memory and back while all of its node do; 0: unknown"""

    @property
    def errors(self) -> np.ndarray:
        """float64 [points]: predicted / measured - 1."""
        import numpy as np

        return np.array(self.predicted_seconds) / [point.seconds for point in self.points] - 1

    def save(self, path: str | Path) -> None:
        """Writes JSON, one point a line."""
        content = asdict(self)
        points, seconds = content.pop("points"), content.pop("predicted_seconds")
        lines = [json.dumps(point | {"predicted_seconds": float(f"{s:.6g}")}) for point, s in zip(points, seconds)]
        head = json.dumps(content, indent=1).removesuffix("\n}")
        Path(path).write_text(head + ',\n "points": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n")

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads what `save` wrote. Raises CalibrationError, naming the file, where there is nothing of the kind."""
        try:
            content = json.loads(Path(path).read_text())
            points = content.pop("points")
            return cls(
                speed=RankSpeed(**content.pop("speed")),
                predicted_seconds=tuple(point.pop("predicted_seconds") for point in points),
                points=tuple(Point(**point | {"lengths": tuple(point["lengths"])}) for point in points),
                **content,
            )
        except OSError as error:
            raise CalibrationError(f"profile {str(path)!r} cannot be read: {error.strerror}") from None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CalibrationError(
                f"{str(path)!r} is no profile ({type(error).__name__}: {error}); `hf-longctx profile` writes one"
            ) from None
