"""The present activity of a rank's main thread, for threads that watch it (supervision/watchdog.py).

Plain attributes, written as the thread moves on: 0.1 microseconds a write, and with the hooks that follow layers
(training/execution.py) 7 microseconds a layer, forward and backward (measured on one CPU core). The object travels with
the exchange, so that every wait for another rank is noted where it happens. On GPUs the main thread runs ahead of the
device: noted is where it is itself, and `trail` says where the device is.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hf_longctx.supervision.device_trail import DeviceTrail

MOST_RUNS = 32
"""Runs of ranks that a message spells out; of thousands, the rest is counted."""


@dataclass
class Progress:
    """One rank's position in training."""

    step: int = 0
    """optimizer step, from 1; 0 while the run is set up"""
    activity: str = "starting"
    stage: int = 0
    """activities that the step has begun so far: all ranks go through the same ones"""
    collective: bool = False
    """whether the activity is a wait for all ranks"""
    unbounded: bool = False
    """whether the activity may take any time, such as loading a model, or is somebody else's: nobody is ended for it"""
    evaluating: bool = False
    micro_batch: int = 0
    """this rank's, from 1; 0: between steps"""
    micro_batches: int = 0
    """how many this rank has in the step"""
    backward: bool = False
    layer: int | None = None
    """decoder layer, from 0; None before the first (in backward: before the last)"""
    awaited: Sequence[int] = ()
    """global ranks that are being waited for"""
    awaited_for: str = "keys and values"
    """and what of them"""
    place: str = ""
    """which part of the model this rank has; empty: all of it"""
    moves: int = 0
    """grows with every change"""

    def __post_init__(self) -> None:
        self.kind = (self.evaluating, self.activity)
        """the activity, in evaluation or not: what takes about as long each time"""
        self.passed: set[tuple[bool, str]] = set()
        """kinds that this rank has come through"""
        self.trail: DeviceTrail | None = None
        """where the device is, which the main thread is ahead of; None where it computes itself"""

    def begin_setting_up(self) -> None:
        """Note that a training begins, before its first step."""
        self.evaluating = False
        self.begin_step(0)
        self.begin("starting")

    def begin_step(self, step: int) -> None:
        """A rank that loads the documents of a step is in it."""
        self.step, self.stage = step, 0

    def begin(self, activity: str, *, collective: bool = False, unbounded: bool = False) -> None:
        """The next activity of a step, in the order in which every rank goes through them."""
        self.passed.add(self.kind)
        self.activity, self.collective, self.unbounded = activity, collective, unbounded
        self.kind = (self.evaluating, activity)
        self.micro_batch, self.layer, self.awaited = 0, None, ()
        self.stage += 1
        self.moves += 1

    def begin_micro_batch(self, number: int, of: int) -> None:
        self.micro_batch, self.micro_batches, self.backward, self.layer = number, of, False, None
        self.moves += 1

    def begin_backward(self) -> None:
        self.backward, self.layer = True, None
        self.moves += 1

    def at_layer(self, layer: int) -> None:
        self.layer = layer
        self.moves += 1

    def wait_for(self, ranks: Sequence[int], what: str = "keys and values") -> None:
        """Note that this rank waits for what those send, until it is called again: with no rank, when all has come."""
        self.awaited, self.awaited_for = ranks, what
        self.moves += 1

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Note an evaluation, which begins with loading data. After one that fails, messages still name where it was."""
        after, unbounded = (self.activity, True) if self.unbounded else ("callbacks", False)
        self.evaluating = True
        self.begin("loading data")
        try:
            yield
        except BaseException:
            self.unbounded = True  # what the program does next is its own
            raise
        self.evaluating = False
        self.begin(after, unbounded=unbounded)

    @property
    def waits(self) -> bool:
        """Whether it is known to wait for other ranks."""
        return self.collective or bool(self.awaited)

    @property
    def order(self) -> tuple[float, ...]:
        """Sort key of ranks: the least is furthest behind. Ranks run different numbers of micro-batches and end together, so
        those that are left count."""
        layer = -math.inf if self.layer is None else -self.layer if self.backward else self.layer
        left = self.micro_batches - self.micro_batch if self.micro_batch else 0
        return (self.step, self.stage, -left, self.backward, layer)

    @property
    def step_in_words(self) -> str:
        return f"step {self.step}" if self.step else "setting up"

    def __str__(self) -> str:
        """Such as "step 7, micro-batch 2 of 3, backward, layer 14, computing", or "setting up, making process groups"."""
        parts = [self.step_in_words] + ([self.place] if self.place else [])
        if self.evaluating:
            parts.append("evaluation")
        if self.micro_batch:
            parts += [
                f"micro-batch {self.micro_batch} of {self.micro_batches}",
                "backward" if self.backward else "forward",
            ]
            parts += [f"layer {self.layer}"] if self.layer is not None else []
        parts.append(
            f"waiting for {self.awaited_for} of {ranks_in_words(self.awaited)}" if self.awaited else self.activity
        )
        return ", ".join(parts)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """[3] -> "rank 3"; [0, 1, 2, 5] -> "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    words = ", ".join("-".join(map(str, run)) for run in runs[:MOST_RUNS])
    more = f" and others, {len(set(ranks))} in all" if len(runs) > MOST_RUNS else ""
    return f"rank{'s' if len(set(ranks)) > 1 else ''} {words}{more}"
