"""Known speeds, the times that they give, and a profile of them."""

from dataclasses import replace

import numpy as np

from hf_longctx.hardware.profile import Point, Profile
from hf_longctx.planner import RankSpeed
from hf_longctx.planner.cost.calibration import predict
from tests.builders.tiny_models import tiny_llama

CONFIG = tiny_llama(hidden_size=256, intermediate_size=688, num_hidden_layers=4).config
TRUTH = RankSpeed(
    attention_flops=4.2e10,
    linear_flops=8.9e10,
    inside_bytes=1.7e9,
    between_bytes=3e8,
    message_seconds=2.3e-3,
    document_seconds=4e-4,
    micro_batch_seconds=3e-3,
    attention_half_tokens=300.0,
    reduce_bytes=7e8,
    optimizer_parameters=2.3e8,
    activation_bytes=4,
)
NODE = 2


def shapes(ranks: int) -> list[Point]:
    """Return what a profile measures, without times."""
    points = [Point("micro_batch", (2**k,), 1, 1.0) for k in range(4, 13)]
    points += [Point("micro_batch", (length,) * (2048 // length), 1, 1.0) for length in (16, 64, 256)]
    points += [Point("attention", (2**k,), 1, 1.0) for k in range(6, 13, 2)]
    for d in (2, 4, 8):
        if d <= ranks:
            points += [Point("micro_batch", (d * 2**k,), d, 1.0) for k in range(5, 12)]
            points += [Point("exchange", (d * 2**k,), d, 1.0) for k in (0, 7, 11, 14)]
    return [*points, Point("reduction", (), ranks, 1.0), Point("optimizer", (), ranks, 1.0)]


def timed(points: list[Point], seconds: np.ndarray) -> list[Point]:
    return [replace(point, seconds=float(s)) for point, s in zip(points, seconds, strict=True)]


def true_seconds(points: list[Point], speed: RankSpeed = TRUTH) -> np.ndarray:
    return predict(points, CONFIG, speed, ranks_per_node=NODE)


def profile(**changes) -> Profile:
    points = tuple(timed(shapes(2), true_seconds(shapes(2))))
    fields = {
        "speed": TRUTH,
        "points": points,
        "predicted_seconds": tuple(point.seconds * 1.25 for point in points),
        "clock": "wall",
        "device": "cpu",
        "backend": "gloo",
        "world_size": 2,
        "ranks_per_node": 2,
        "threads": 1,
        "precision": "float32",
        "device_bytes": 2**33,
        "host_bytes": 2**34,
        "model": {"model_type": "llama", "layers": 4},
        "versions": {"torch": "2"},
    }
    return Profile(**fields | changes)
