"""Corrections of a run's cost model while it trains: factors on its terms, and how fast each rank is.

Every so many steps each rank sums up how long its own micro-batches took; all ranks gather these summaries and compute
the same Adjustment from them, in integers. It takes effect some steps later, when no plan that any rank has prepared ahead
could have missed it.

1. Each rank fits two factors, on attention and on everything linear, to its micro-batches of whole documents, by least
   absolute *relative* errors: a step that took 50 times as long weighs as much as one that was off by a little. Of
   these, the ratio counts: over ranks, its weighted median.
2. Given the ratio, each rank says how slow it is, the median over its micro-batches. The median rank sets the factors,
   and the others have speeds relative to it: a rank three times as slow changes its own speed and nothing else.
3. Split documents say how long exchanges take. Of a group's times the shortest counts, that of the rank that came last
   and waited for nobody. An exchange that compute hides only says that it is not longer than that. Groups of ranks that have
   run alone count, if there are enough.
4. What changes by less than a dead-band stays as it was: noise makes no new plans.

Torch is not needed here, and nothing is sent (training/measuring/recalibration.py does).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hf_longctx.planner.cost.cost_model import PS_PER_NS, CostModel
from hf_longctx.planner.plan import StepPlan
from hf_longctx.planner.topology import FULL, SPLIT, Topology

DEAD_BAND = 50
"""Per mille. Medians of 50 steps on two busy CPU cores repeat within 3 %, and 5 % off costs a plan about 1 % (the error of
one rank's time is its share of the makespan)."""
AT_ONCE = 4
"""A factor grows or shrinks at most so many times at once, and a speed is at most so many times another."""
FARTHEST = 100
"""A factor is at most so many times what the cost model began with, or one over it."""
MILLION = 10**6
USUAL_CHANGE = 0.2
"""How much the ratio of attention to linear may be expected to change, against which noise is weighed."""
LEAST_SAMPLES = 3
"""Micro-batches below which a rank says nothing: of three, one may be disturbed."""
EXPLAINED = 1100
"""Per mille of the compute of a split document: what takes no longer says nothing about its exchange."""


@dataclass(frozen=True)
class Adjustment:
    """Factors on a cost model's times, and how fast ranks are, all per mille."""

    attention: int = FULL
    linear: int = FULL
    exchange: int = FULL
    speed: tuple[int, ...] | None = None
    """[world_size]; None: all 1000"""

    def cost(self, base: CostModel) -> CostModel:
        """The cost model that plans."""
        if (self.attention, self.linear, self.exchange) == (FULL,) * 3:
            return base
        return base.scaled(self.attention / FULL, self.linear / FULL, self.exchange / FULL)

    def topology(self, base: Topology) -> Topology:
        """The ranks that are planned for: measured speeds stand in the place of those that were assumed."""
        return base if self.speed is None else replace(base, speed=self.speed)


class Adjustments:
    """Adjustments, with the (epoch, step) from which each holds. Positions only ever come later ones."""

    def __init__(self, entries: Sequence[tuple[int, int, Adjustment]] = ()) -> None:
        self._positions = [(epoch, step) for epoch, step, _ in entries]
        self._adjustments = [adjustment for _, _, adjustment in entries]

    def at(self, epoch: int, step: int) -> Adjustment:
        """Return what a step is planned with."""
        index = bisect_right(self._positions, (epoch, step))
        return self._adjustments[index - 1] if index else Adjustment()

    @property
    def latest(self) -> Adjustment:
        """The last one agreed on, also if it does not hold yet."""
        return self._adjustments[-1] if self._adjustments else Adjustment()

    def add(self, epoch: int, step: int, adjustment: Adjustment) -> None:
        """Let an adjustment hold from a position on, which is later than all before it."""
        assert not self._positions or self._positions[-1] < (epoch, step)
        self._positions.append((epoch, step))
        self._adjustments.append(adjustment)

    def state(self, epoch: int, step: int) -> list[list[Any]]:
        """Return what holds at a position and later, for JSON."""
        first = max(bisect_right(self._positions, (epoch, step)) - 1, 0)
        return [
            [
                *position,
                adjustment.attention,
                adjustment.linear,
                adjustment.exchange,
                adjustment.speed and list(adjustment.speed),
            ]
            for position, adjustment in zip(self._positions[first:], self._adjustments[first:])
        ]

    @classmethod
    def restored(cls, state: Sequence[Sequence[Any]], world_size: int) -> Adjustments:
        """Restore what `state` gave; on another number of ranks, speeds of ranks mean nothing and are dropped."""
        entries = []
        for epoch, step, attention, linear, exchange, speed in state:
            kept = tuple(speed) if speed is not None and len(speed) == world_size else None
            entries.append((epoch, step, Adjustment(attention, linear, exchange, kept)))
        return cls(entries)


@dataclass(frozen=True)
class Sample:
    """A micro-batch of whole documents that a rank has run."""

    attention: float
    """predicted nanoseconds of the unadjusted cost model"""
    linear: float
    """all others"""
    measured: float
    """nanoseconds"""


@dataclass(frozen=True)
class SplitSample:
    """A micro-batch of nothing but split documents, by the unadjusted cost model. Integers: all ranks agree on them."""

    linear: int
    """predicted nanoseconds of a rank that holds an equal share"""
    attention: int
    exchange: int
    members: tuple[tuple[int, int], ...]
    """(rank, per mille of an equal share of the tokens that it holds)"""


def whole_parts(plan: StepPlan, micro_batch: int, cost: CostModel) -> tuple[float, float] | None:
    """(attention, linear) nanoseconds that the cost model predicts for a micro-batch of one rank; None if several share it."""
    first, stop = plan.first_member[micro_batch : micro_batch + 2]
    if stop - first > 1 or plan.offload[micro_batch]:
        return None
    documents = slice(plan.first_document[micro_batch], plan.first_document[micro_batch + 1])
    lengths = plan.length[documents]
    linear = cost.without_attention().time(lengths, 1).sum()
    attention = cost.time(lengths, 1).sum() - linear
    return float(attention), float(linear - _saved(plan, documents, 1, cost) + cost.micro_batch_ns)


def _saved(plan: StepPlan, documents: slice, ranks: int, cost: CostModel) -> int:
    """Nanoseconds of each of so many ranks that the output head does not take, for tokens without a label."""
    return int(plan.unlabelled[documents].sum()) * cost.label_ps // (PS_PER_NS * ranks)


def split_sample(plan: StepPlan, turn: int, cost: CostModel) -> tuple[int, SplitSample] | None:
    """Choose one of the plan's micro-batches of nothing but split documents, another one each turn, the same on all ranks: its
    number, and what is predicted of it. None where the plan has none."""
    whole = np.bincount(plan.micro_batch_of_document, plan.holder != SPLIT, minlength=len(plan.cost))
    split = np.flatnonzero((plan.members > 1) & (whole == 0) & (plan.offload == 0))
    if not len(split):
        return None
    chosen = int(split[turn % len(split)])
    members = slice(plan.first_member[chosen], plan.first_member[chosen + 1])
    documents = slice(plan.first_document[chosen], plan.first_document[chosen + 1])
    lengths, ranks = plan.length[documents], plan.rank[members].tolist()
    silent = cost.without_exchange()
    linear = int(silent.without_attention().time(lengths, len(ranks)).sum())
    attention = int(silent.time(lengths, len(ranks)).sum()) - linear
    exchange = int(cost.without_attention().time(lengths, len(ranks)).sum()) - linear
    linear -= _saved(plan, documents, len(ranks), cost)
    tokens = int(lengths.sum())
    shares = [FULL * rank_tokens * len(ranks) // tokens for rank_tokens in plan.member_tokens[members].tolist()]
    return chosen, SplitSample(linear + cost.micro_batch_ns, attention, exchange, tuple(zip(ranks, shares)))


def own_ratio(samples: Sequence[Sample], before: Adjustment) -> tuple[int, int]:
    """Return what one rank's samples say of the ratio of the factors on attention and on linear, in millionths, and how well they
    tell the two apart: the summed squares of attention's share about its mean, in millionths.

    Where samples are alike, or noisy, the ratio stays near what it was.
    """
    if not samples:
        return MILLION * before.attention // before.linear, 0
    attention, linear, measured = np.array([(s.attention, s.linear, s.measured) for s in samples]).T
    attention, linear = attention * before.attention, linear * before.linear
    share = attention / (attention + linear)
    common = np.median(measured / (attention + linear))
    columns = np.stack([attention, linear], 1) * (common / measured)[:, None]
    left = 1 - columns.sum(1)
    free = _least_absolute(columns, left, 1e-9)
    noise = max(float(np.median(np.abs(left - columns @ free))), 1e-3)
    change = _least_absolute(columns, left, (noise / USUAL_CHANGE) ** 2)  # of the factors, relative to the median
    on_attention, on_linear = np.clip(1 + change, AT_ONCE**-2, AT_ONCE**2) * (before.attention, before.linear)
    return round(MILLION * float(on_attention / on_linear)), round(MILLION * float(((share - share.mean()) ** 2).sum()))


def _least_absolute(columns: np.ndarray, left: np.ndarray, ridge: float) -> np.ndarray:
    """float64 [2]: x with the least sum of |left - columns @ x|; `ridge` rows' worth of weight pull it to 0; columns
    [samples, 2], left [samples]."""
    x = np.zeros(2)
    for _ in range(50):
        weight = 1 / np.maximum(np.abs(left - columns @ x), 1e-3)
        normal = columns.T @ (columns * weight[:, None]) + ridge * weight.mean() * np.eye(2)
        x = np.linalg.lstsq(normal, columns.T @ (left * weight), rcond=None)[0]
    return x


def agreed_ratio(ratios: Sequence[tuple[int, int]]) -> int:
    """Agree on the ratio of all ranks' `own_ratio`: the weighted median, millionths. The first of two things that ranks agree
    on."""
    return _median(ratios)


def own_slowness(samples: Sequence[Sample], ratio: int) -> int:
    """One rank's median time over ratio * attention + linear, millionths; 0 where it has run too little alone."""
    if len(samples) < LEAST_SAMPLES:
        return 0
    slowness = np.median([s.measured / (s.attention * ratio / MILLION + s.linear) for s in samples])
    return round(min(max(MILLION * float(slowness), 1), MILLION * MILLION))


def agreed(
    ratio: int, slowness: Sequence[int], splits: Sequence[tuple[SplitSample, int]], before: Adjustment
) -> Adjustment:
    """The next adjustment; integers in, integers out, the same on every rank.

    Args:
        ratio: agreed_ratio.
        slowness: own_slowness of each rank.
        splits: split micro-batches, each with its shortest time of all members, nanoseconds.
        before: the adjustment agreed on last.
    """
    speeds = list(before.speed or [FULL] * len(slowness))
    attention, linear = before.attention, before.linear
    heard = [(slow, 1) for slow in slowness if slow]
    if heard:
        pace = _median(heard)
        for rank, slow in enumerate(slowness):
            if slow:
                speeds[rank] = _settled(FULL * pace // slow, speeds[rank], FULL // AT_ONCE, FULL * AT_ONCE)
        attention = _changed(FULL * ratio * pace // MILLION**2, attention)
        linear = _changed(FULL * pace // MILLION, linear)
    # A slow rank of which too little is known would make exchanges look slow. Where no rank has run alone, all count.
    known = [
        (split, measured)
        for split, measured in splits
        if all(slowness[rank] or speeds[rank] != FULL for rank, _ in split.members)
    ]
    of_known = known if len(known) >= LEAST_SAMPLES else splits
    exchange = _exchange(of_known, attention, linear, speeds, before.exchange)
    speeds = [FULL if abs(speed - FULL) < DEAD_BAND else speed for speed in speeds]
    return Adjustment(attention, linear, exchange, None if set(speeds) == {FULL} else tuple(speeds))


def _exchange(
    splits: Sequence[tuple[SplitSample, int]], attention: int, linear: int, speeds: Sequence[int], before: int
) -> int:
    """The factor on exchanges, per mille."""
    factors = []
    for split, measured in splits:
        if min(speeds[rank] for rank, _ in split.members) <= FULL // AT_ONCE:
            continue  # slower than anybody knows
        slowest = max(FULL * share // speeds[rank] for rank, share in split.members)
        compute = split.attention * attention // FULL * slowest // FULL
        left = measured - split.linear * linear // FULL * slowest // FULL
        if left > compute * EXPLAINED // FULL:
            factors.append((FULL * left // max(1, split.exchange), 1))
        else:
            factors.append((min(before, FULL * EXPLAINED * compute // FULL // max(1, split.exchange)), 1))
    if len(factors) < LEAST_SAMPLES:
        return before
    return _changed(_median(factors), before)


def _median(weighted: Sequence[tuple[int, int]]) -> int:
    """The lower weighted median of (value, weight): of two, the smaller, so that of two ranks the faster sets the pace."""
    total, reached = sum(max(1, weight) for _, weight in weighted), 0
    for value, weight in sorted(weighted):
        reached += max(1, weight)
        if 2 * reached >= total:
            return value
    raise AssertionError("the median of nothing")


def _changed(new: int, old: int) -> int:
    """A factor on the cost model, after it was `old`."""
    return _settled(new, old, max(FULL // FARTHEST, old // AT_ONCE), min(FULL * FARTHEST, old * AT_ONCE))


def _settled(new: int, old: int, least: int, most: int) -> int:
    """`new` within limits; `old` where it lies in the dead-band."""
    return old if FULL * abs(new - old) < DEAD_BAND * old else min(max(new, least), most)
