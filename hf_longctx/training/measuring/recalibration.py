"""Measures micro-batches while training runs, and lets all ranks agree on what follows for the cost model.

A micro-batch is timed without waiting for the device: clocks on CPU; events on CUDA, read when the next step begins. Every
`every` steps, after the sum of gradients (never between two exchanges of a rank, where a collective would deadlock on
NCCL), ranks gather four integers each, and the shortest times of one split micro-batch of each step. All compute the same
adjustment from them (planner/cost/adjustment.py).

When it takes effect. A rank prepares up to P steps ahead: P = 2 in the loader's thread, workers * prefetch_factor in its
worker processes. Step k is handed out for preparation when step k - P is fetched, that is after step k - P - 1 has been
trained. What is agreed on in step n can therefore hold from step n + P + 1 on, with the largest P of all ranks: whoever
plans a step, in whatever process, has heard of it by then, and finds it by its (epoch, step) alone.

    P = 2   trained     0    1    2    3*   4    5    6         * agreed
            prepared   0-2   3    4    5    6+   7+   8+         + planned with it: 6 is handed out when 4 is fetched
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers.utils import logging

from hf_longctx.data.loader import PlannedSteps
from hf_longctx.planner import CostModel, StepPlan
from hf_longctx.planner.cost.adjustment import (
    Adjustments,
    Sample,
    SplitSample,
    agreed,
    agreed_ratio,
    own_ratio,
    own_slowness,
    split_sample,
    whole_parts,
)
from hf_longctx.planner.cost.cost_model import COEFFICIENTS

logger = logging.get_logger(__name__)

TOO_SLOW = 3
"""A step that takes so many times what was planned is worth a word: what a plan says of idle ranks and bounds means little then.
Runs with a profile of their own machine stay within 1.3 on a quiet one; two shipped examples without one took 4.5 and 12.9."""
NOT_RUN = 2**62
"""Nanoseconds of a micro-batch that a rank took no part in."""


class Stopwatch:
    """Marks on a rank's timeline. Nothing waits for the device until `seconds` is asked for."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Return the seconds between each mark and the next, after the device has passed the last."""
        pairs = zip(self._marks, self._marks[1:])
        if not self._cuda:
            return [after - before for before, after in pairs]
        if self._marks:
            self._marks[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]


class Recalibration:
    """Times the steps of a run, and turns the times of all ranks into adjustments of its plans.

    Args:
        steps: the run's; their `adjustments` are added to.
        rank: this one's.
        every: steps between two agreements; 0: only times.
        ahead: steps that this rank prepares ahead (P of the module docstring).
        device: where this rank computes.
    """

    def __init__(self, steps: PlannedSteps, rank: int, every: int, ahead: int, device: torch.device) -> None:
        self.steps, self.rank, self.every, self.ahead, self.device = steps, rank, every, ahead, device
        self.cost = steps.collator.cost
        """As it was at first: factors are of it."""
        self._step = self._micro_batches = Stopwatch(device)
        self._unread: tuple[StepPlan, Stopwatch] | None = None
        self._samples: list[Sample] = []
        self._splits: list[tuple[SplitSample, int]] = []
        """Of each step that has any: one of its split micro-batches, and this rank's nanoseconds."""
        self._turn = 0
        self._before: StepPlan | None = None
        """Of the step before, if that is to be compared: the first of a process compiles and allocates."""
        self._steps = 0
        self._said = dist.is_initialized() and dist.get_rank() > 0
        """Whether something was said, or is another process's to say."""

    def begin_step(self, plan: StepPlan) -> Callable[[], None]:
        """Return what `run_micro_batches` marks the micro-batches of a step with."""
        if self.every:
            self._read()
        if self._before is not None:  # that step is over on the device too: ranks have agreed on this one's plan
            self._compare(self._before)
        self._steps += 1
        self._before = plan if self._steps > 1 and not self._said else None
        self._step, self._micro_batches = Stopwatch(self.device), Stopwatch(self.device)
        self._unread = (plan, self._micro_batches) if self.every else None
        self._step.mark()
        return self._micro_batches.mark

    def end_step(self) -> None:
        """Note that the optimizer has stepped."""
        self._step.mark()

    def _compare(self, plan: StepPlan) -> None:
        """Says once, on rank 0, that a step took far longer than was planned, and what to do."""
        measured = sum(self._step.seconds())
        if measured < TOO_SLOW * (plan.lower_bound + self.cost.step_ns) / 1e9:
            return  # no plan promises less than its bound, and the makespan takes a while to find
        planned = (plan.timeline().makespan + self.cost.step_ns) / 1e9
        if measured < TOO_SLOW * planned:
            return
        self._said = True
        corrects = f"plans are corrected by what is measured every {self.every} steps"
        if not self.every:
            corrects = "recalibrate_steps=50 corrects plans by what is measured"
        remedy = f"; {corrects}" if self.steps.collator.mode == "async" else ""
        logger.warning(
            f"a step took {measured:.3g} s, and {planned:.3g} s were planned: {measured / planned:.1f} times as long "
            f"(said once, from {TOO_SLOW} times on). What is called planned (idle ranks, times the bound) is as far off. "
            f"`hf-longctx profile` measures this machine, and longctx.profile (LongContextPlugin's) plans with it{remedy}"
        )

    def describe(self, makespan: int) -> dict[str, float]:
        """Return what is logged of the last step; its predicted makespan in nanoseconds."""
        predicted, measured = (makespan + self.cost.step_ns) / 1e9, sum(self._step.seconds())
        return {
            "predicted_step_seconds": float(f"{predicted:.4g}"),
            "measured_step_seconds": float(f"{measured:.4g}"),
            "prediction_error": round(measured / predicted - 1, 4),
        }

    def agree(self, position: tuple[int, int]) -> bool:
        """Agree with all ranks on the next adjustment, and begin to measure anew. Returns whether plans change.

        Every rank calls this between two steps, at the same position (epoch, step)."""
        self._read()
        before = self.steps.adjustments.latest
        told = gather_integers([self.ahead, *own_ratio(self._samples, before)], self.device)
        ratio = agreed_ratio([(ratio, weight) for _, ratio, weight in told])
        slowness = [slow for (slow,) in gather_integers([own_slowness(self._samples, ratio)], self.device)]
        shortest = least_over_ranks([nanoseconds for _, nanoseconds in self._splits], self.device)
        splits = [(split, least) for (split, _), least in zip(self._splits, shortest)]
        after = agreed(ratio, slowest_of_ranks(slowness, self.steps.collator.topology.world_size), splits, before)
        self._samples, self._splits = [], []
        if after != before:
            ahead = max(ahead for ahead, _, _ in told)
            self.steps.adjustments.add(*effective_from(*position, ahead, self.steps.steps), after)
        return after != before

    def state(self, position: tuple[int, int]) -> dict[str, Any]:
        """Return what a checkpoint keeps: the adjustments from a position on, and the cost model that they belong to."""
        return {"cost": fingerprint(self.cost), "adjustments": self.steps.adjustments.state(*position)}

    def _read(self) -> None:
        """Takes in the times of the step before, which is done by now."""
        if self._unread is None:
            return
        (plan, stopwatch), self._unread = self._unread, None
        nanoseconds = [round(seconds * 1e9) for seconds in stopwatch.seconds()]
        measured = dict(zip(_micro_batches_of(plan, self.rank), nanoseconds, strict=True))
        for micro_batch, duration in measured.items():
            parts = whole_parts(plan, micro_batch, self.cost)
            if parts is not None and duration > 0:
                self._samples.append(Sample(*parts, duration))
        chosen = split_sample(plan, self._turn, self.cost)
        self._turn += 1
        if chosen is not None:
            self._splits.append((chosen[1], measured.get(chosen[0], NOT_RUN)))


def fingerprint(cost: CostModel) -> list[int]:
    """Return what factors are relative to: no matter how many ranks there are, or on how many nodes."""
    return [getattr(cost, name) for name in COEFFICIENTS if name != "step_ns"]


def restored(state: dict[str, Any] | None, cost: CostModel, world_size: int) -> Adjustments:
    """Return what a checkpoint holds (Recalibration.state); nothing if it was of another cost model, whose factors mean nothing
    here."""
    if state is None:
        return Adjustments()
    before = state["cost"]
    if before != fingerprint(cost)[: len(before)]:  # older checkpoints lack the last ones
        logger.warning(
            f"the checkpoint's cost model had the coefficients {before}, this run's has {fingerprint(cost)} (another "
            "profile, preset or model): what was measured then is dropped, and measured anew"
        )
        return Adjustments()
    return Adjustments.restored(state["adjustments"], world_size)


def _micro_batches_of(plan: StepPlan, rank: int) -> list[int]:
    """Those that a rank takes part in, in the order in which it runs them."""
    return (np.searchsorted(plan.first_member, np.flatnonzero(plan.rank == rank), side="right") - 1).tolist()


def gather_integers(own: list[int], device: torch.device) -> list[list[int]]:
    """[processes][len(own)]: those of all."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [own]
    everyone = [torch.empty(len(own), dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, torch.tensor(own, dtype=torch.int64, device=device))
    return torch.stack(everyone).tolist()


def slowest_of_ranks(of_processes: list[int], ranks: int) -> list[int]:
    """[ranks]: what is largest of each rank's processes, several where tensor parallelism makes them one rank."""
    return np.array(of_processes).reshape(ranks, -1).max(1).tolist()


def least_over_ranks(own: list[int], device: torch.device) -> list[int]:
    """Element by element; all ranks give equally many."""
    if not own or not dist.is_initialized() or dist.get_world_size() == 1:
        return own
    least = torch.tensor(own, dtype=torch.int64, device=device)
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return least.tolist()


def effective_from(epoch: int, step: int, ahead: int, steps_of: Callable[[int], int]) -> tuple[int, int]:
    """The (epoch, step) from which on holds what is agreed on in this one; `steps_of(epoch)` counts steps."""
    step += ahead + 1
    while step >= steps_of(epoch):
        step -= steps_of(epoch)
        epoch += 1
    return epoch, step
