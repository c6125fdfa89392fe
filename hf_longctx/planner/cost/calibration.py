"""Measured times -> RankSpeed: what this hardware achieves, fitted so that CostModel predicts what was measured.

A point is one thing that was timed, per rank. What cost_model.py predicts of it is a sum of terms, each a count (FLOPs, bytes,
messages, documents ...) times the seconds that one of them takes. For a micro-batch of documents s_i over d ranks:

    layers*micro_batch + sum_i ( layers*document + F_linear*s_i/d*linear
                               + max( F_attention*(s_i^2/d*attention + s_i*short),  bytes*s_i*(d-1)/d*inside + ... ) )

where `short` stands for attention*half_tokens, and a window leaves less than s_i^2. A host that starts kernels on a device works
beside it: such a micro-batch takes this sum, or layers*launch where that is more. The seconds are fitted in rounds:

1. of each document, take the side of the max that is longer by the seconds of the round before; of each micro-batch too;
2. nonnegative least squares on *relative* errors, so that 10 ms count as much as 10 s;
3. points that fit badly weigh less in the next round (Huber), so that a time that was disturbed moves little.

Which micro-batches the host bounds is not known to begin with: the fit begins with the quickest few of them, with some more, and
so on, and the best of these fits counts.

What no point counts, such as bytes between nodes on a single node, stays as the preset has it. Nothing is sent here, and
nothing here needs torch: training/measuring/rank_profile.py measures the points.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hf_longctx.hardware.model_sizes import model_flops, squares
from hf_longctx.hardware.profile import CalibrationError, Point
from hf_longctx.hardware.speeds import RankSpeed

TERMS = (
    "linear",
    "attention",
    "short",
    "inside",
    "between",
    "message",
    "document",
    "micro_batch",
    "reduce",
    "optimizer",
    "launch",
)
"""The columns of the fit."""
RATES = ("linear", "attention", "inside", "between", "reduce", "optimizer")
"""Terms whose seconds are one over a speed, so that zero would be an infinite one."""
FASTEST = 1000
"""A speed is at most so many times the preset's: where a term is too short to be seen, any speed would fit. Attention is then as
much faster than the preset's as products are: documents that are longer than those that were measured would cost nothing."""
LAUNCH = TERMS.index("launch")
ROUNDS = 60
"""The fit ends here at the latest; sides and weights settle in 5 to 20 rounds."""
HUBER = 0.1
"""Relative error above which a point weighs less: beyond what the model leaves open on real points (median 0.03, one in
ten above 0.1), far below what a disturbance does."""
BOUND_BY_HOST = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8)
"""Shares of the micro-batches, the quickest, with which fits begin that look for those that the host bounds."""


def fit_speed(
    points: Sequence[Point],
    config: Any,
    preset: RankSpeed,
    *,
    ranks_per_node: int | None = None,
    beside_host: bool = False,
) -> RankSpeed:
    """The speeds with which CostModel.from_config(config, ...) predicts the points best.

    Args:
        points: at least one micro-batch among them.
        config: of the Hugging Face model that was measured.
        preset: where the fit begins, and what is kept of terms that no point counts; its `activation_bytes` hold.
        ranks_per_node: of the machine measured; None: all.
        beside_host: whether a device computes what the host starts, and goes on meanwhile.

    Raises:
        CalibrationError: no micro-batch was measured, or a time is not positive and finite.
    """
    if not any(point.part == "micro_batch" for point in points):
        raise CalibrationError(f"{len(points)} points, and none is a micro-batch: there is nothing to fit speeds to")
    for point in points:
        if not 0 < point.seconds < float("inf"):
            raise CalibrationError(f"{point}: its seconds must be positive and finite; measure it again")
    counts = [_Counts.of(point, config, preset.activation_bytes, ranks_per_node) for point in points]
    seconds = np.array([point.seconds for point in points])
    if not beside_host:
        theta = _fitted(counts, seconds, _seconds(replace(preset, launch_seconds=0.0)))
        return _speed(_with_attention(theta, counts, seconds, preset), preset)
    layers = np.array([count.launches for count in counts])
    quickest = np.sort(seconds[layers > 0])
    fits = []
    for share in BOUND_BY_HOST:
        slowest = quickest[: 1 + int(share * (len(quickest) - 1))].max()
        begin = replace(preset, launch_seconds=float(np.median(quickest[quickest <= slowest]) / layers.max()))
        theta = _fitted(counts, seconds, _seconds(begin), by_host=(layers > 0) & (seconds <= slowest))
        fits.append((_loss(_predicted(counts, theta) / seconds - 1), theta))
    return _speed(_with_attention(min(fits, key=lambda fit: fit[0])[1], counts, seconds, preset), preset)


def _with_attention(theta: np.ndarray, counts: Sequence[_Counts], seconds: np.ndarray, preset: RankSpeed) -> np.ndarray:
    """Return the fitted `theta` [terms] with seconds of attention that no point was long enough to show: as products suggest, and
    at most what a point took in all."""
    attention, linear = TERMS.index("attention"), TERMS.index("linear")
    pairs = np.array([count.attention[:, attention].sum() for count in counts])
    if not pairs.any() or theta[attention] * preset.attention_flops * FASTEST > 1 + 1e-6:
        return theta
    suggested = theta[linear] * preset.linear_flops / preset.attention_flops
    most = (seconds[pairs > 0] / pairs[pairs > 0]).min()
    return np.where(np.arange(len(TERMS)) == attention, max(theta[attention], min(suggested, most)), theta)


def _loss(residual: np.ndarray) -> float:
    """Sum of Huber's loss of relative errors [points]."""
    size = np.abs(residual)
    return float(np.where(size <= HUBER, size**2, HUBER * (2 * size - HUBER)).sum())


def _fitted(
    counts: Sequence[_Counts], seconds: np.ndarray, theta: np.ndarray, *, by_host: np.ndarray | None = None
) -> np.ndarray:
    """float64 [terms]: seconds that predict those of the points [points] best, from `theta` [terms].

    Args:
        by_host: bool [points], which points the host bounds, in the first round; None: as theta says.
    """
    floor = np.array([value / FASTEST if term in RATES else 0.0 for term, value in zip(TERMS, theta)])
    fitted = np.logical_or.reduce([count.nonzero for count in counts])
    fitted[LAUNCH] = theta[LAUNCH] > 0
    weight = np.ones(len(seconds))
    for _ in range(ROUNDS):
        before = theta
        sides = [None] * len(counts) if by_host is None else by_host.tolist()
        by_host = None
        rows = np.stack([count.row(theta, side) for count, side in zip(counts, sides)]) / seconds[:, None]
        left = 1 - rows[:, fitted] @ floor[fitted] - rows[:, ~fitted] @ theta[~fitted]
        theta = np.where(fitted, floor, theta)
        theta[fitted] += nonnegative_least_squares(rows[:, fitted] * weight[:, None], left * weight)
        residual = np.abs(_predicted(counts, theta) / seconds - 1)
        weight = np.sqrt(HUBER / np.maximum(residual, HUBER))
        if np.allclose(theta, before, rtol=1e-5, atol=0):
            break
    return theta


def predict(points: Sequence[Point], config: Any, speed: RankSpeed, *, ranks_per_node: int | None = None) -> np.ndarray:
    """float64 [points]: seconds of what the points timed, as CostModel.from_config(config, speed) has them."""
    counts = [_Counts.of(point, config, speed.activation_bytes, ranks_per_node) for point in points]
    return _predicted(counts, _seconds(speed))


@dataclass(frozen=True)
class _Counts:
    """How often each of TERMS counts in a point. Of row i of `attention` and `exchange`, the longer one counts."""

    always: np.ndarray
    """float64 [terms]"""
    attention: np.ndarray
    """float64 [documents, terms]"""
    exchange: np.ndarray
    """float64 [documents, terms]"""
    launches: int = 0
    """Layers whose kernels a host starts; 0: the point is no micro-batch."""

    @classmethod
    def of(cls, point: Point, config: Any, activation_bytes: int, ranks_per_node: int | None) -> _Counts:
        flops, d = model_flops(config), point.ranks
        node = min(ranks_per_node or d, d)
        sizes = np.array(point.lengths, float)
        always = dict.fromkeys(TERMS, 0.0)
        attention, exchange = np.zeros((2, len(sizes), len(TERMS)))
        if point.part == "reduction":
            always["reduce"] = 4 * flops.parameters * 2 * (d - 1) / d
        elif point.part == "optimizer":
            always["optimizer"] = flops.parameters
        elif point.part == "micro_batch":
            always |= {"micro_batch": flops.layers, "linear": flops.linear * sizes.sum() / d}
        if point.part in ("micro_batch", "attention"):
            always["document"] = flops.layers * len(sizes)
            pairs = flops.of_attention(squares(sizes), squares(sizes, flops.window))
            attention[:, TERMS.index("attention")] = pairs / d
            attention[:, TERMS.index("short")] = flops.attention * sizes
        if point.part in ("micro_batch", "exchange"):
            traffic = flops.kv_elements * (2 * activation_bytes + 4) * sizes
            exchange[:, TERMS.index("inside")] = traffic * (d - 1) / d
            exchange[:, TERMS.index("between")] = traffic * (d - node) / (d * node)
            exchange[:, TERMS.index("message")] = flops.layers * (d - 1)
        launches = flops.layers if point.part == "micro_batch" else 0
        return cls(np.array([always[term] for term in TERMS]), attention, exchange, launches)

    @property
    def nonzero(self) -> np.ndarray:
        """bool [terms]"""
        return (self.always > 0) | (self.attention > 0).any(0) | (self.exchange > 0).any(0)

    def row(self, theta: np.ndarray, by_host: bool | None = None) -> np.ndarray:
        """float64 [terms]: the counts, of each document those of its longer side by the seconds `theta` [terms]; the host's alone
        where it takes longer than the device, or where `by_host` says so."""
        longer = (self.attention @ theta >= self.exchange @ theta)[:, None]
        device = self.always + np.where(longer, self.attention, self.exchange).sum(0)
        host = self.launches * theta[LAUNCH]
        if not (host > device @ theta if by_host is None else by_host):
            return device
        return np.where(np.arange(len(TERMS)) == LAUNCH, float(self.launches), 0.0)


def _predicted(counts: Sequence[_Counts], theta: np.ndarray) -> np.ndarray:
    return np.array([count.row(theta) @ theta for count in counts])


def _seconds(speed: RankSpeed) -> np.ndarray:
    """float64 [terms]: seconds that one of each takes."""
    seconds = {
        "linear": 1 / speed.linear_flops,
        "attention": 1 / speed.attention_flops,
        "short": speed.attention_half_tokens / speed.attention_flops,
        "inside": 1 / speed.inside_bytes,
        "between": 1 / speed.between_bytes,
        "message": speed.message_seconds,
        "document": speed.document_seconds,
        "micro_batch": speed.micro_batch_seconds,
        "reduce": 1 / speed.reduce_bytes,
        "optimizer": 1 / speed.optimizer_parameters,
        "launch": speed.launch_seconds,
    }
    return np.array([seconds[term] for term in TERMS])


def _speed(theta: np.ndarray, preset: RankSpeed) -> RankSpeed:
    """The speeds of seconds [terms], to six digits."""
    seconds = dict(zip(TERMS, theta.tolist()))
    fields = {
        "attention_flops": 1 / seconds["attention"],
        "linear_flops": 1 / seconds["linear"],
        "inside_bytes": 1 / seconds["inside"],
        "between_bytes": 1 / seconds["between"],
        "message_seconds": seconds["message"],
        "document_seconds": seconds["document"],
        "micro_batch_seconds": seconds["micro_batch"],
        "attention_half_tokens": seconds["short"] / seconds["attention"],
        "reduce_bytes": 1 / seconds["reduce"],
        "optimizer_parameters": 1 / seconds["optimizer"],
        "launch_seconds": seconds["launch"],
    }
    return RankSpeed(
        activation_bytes=preset.activation_bytes, **{name: float(f"{value:.6g}") for name, value in fields.items()}
    )


def nonnegative_least_squares(matrix: np.ndarray, right: np.ndarray) -> np.ndarray:
    """float64 [n]: x >= 0 with the least |matrix @ x - right|; matrix [m, n], right [m].

    Lawson and Hanson's active sets: unknowns that would pull the error down enter one by one, and those that a solution
    without bounds makes negative leave on the way to it. Columns are scaled to length 1 first.
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1.0
    scaled = matrix / scale
    x = np.zeros(matrix.shape[1])
    free = np.zeros(len(x), bool)
    for _ in range(10 * len(x)):  # each set of free unknowns comes at most once; rounding alone could cycle
        pull = np.where(free, -np.inf, scaled.T @ (right - scaled @ x))
        if pull.max() <= 1e-12 * np.linalg.norm(right):
            break
        free[pull.argmax()] = True
        while True:
            goal = np.zeros(len(x))
            goal[free] = np.linalg.lstsq(scaled[:, free], right, rcond=None)[0]
            falling = free & (goal <= 0)
            if not falling.any():
                break
            way = np.min(x[falling] / (x[falling] - goal[falling]))
            x += way * (goal - x)
            free &= x > 1e-14
            x[~free] = 0.0
        x = goal
    return x / scale
