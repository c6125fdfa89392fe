"""What a fault trial does to a run, drawn at random."""

import random
import signal
from dataclasses import dataclass

from tests.worlds.faults.damage import DAMAGES
from tests.worlds.faults.faulty_run import PHASES, SAVING, SETTING_UP, STARTING, STEPS, Fault
from tests.worlds.rank_launcher import Signal

KINDS = (
    "kill a rank",
    "power loss",
    "stop a rank",
    "stall in Python",
    "SIGTERM to one",
    "SIGTERM to all",
    "disk full",
    "NaN gradient",
    "out of memory",
    "exception",
    *DAMAGES,
)
COUNTS = {"forward": 4, "backward": 4, "exchange": 6, "collective": 5, "saving": 8, "resuming": 6}
"""The how-many-th time that a rank reaches a phase, at most; elsewhere the first."""
STARTED = 2.5
"""Seconds: a signal is sent that long after the start at the latest, when small runs are about to end."""


@dataclass(frozen=True)
class Disturbance:
    """What is done to one start of the program, and after it."""

    kind: str
    faults: tuple[Fault, ...] = ()
    signals: tuple[Signal, ...] = ()
    damage: str | None = None
    """to the newest checkpoint, once all ranks have ended"""
    ends_run: bool = True
    """the faults end the run that meets them"""

    def __str__(self) -> str:
        parts = [
            f"{fault.action} rank {fault.rank}, {fault.phase} {fault.count} of step {fault.step}"
            for fault in self.faults
        ]
        parts += [
            f"{sending.number.name} to {list(sending.ranks)} after {sending.after:.2f} s" for sending in self.signals
        ]
        return f"{self.kind} ({'; '.join(parts)})"


def draw(kind: str, rng: random.Random, ranks: int, first_step: int, *, removing: bool) -> Disturbance:
    """A disturbance of a start that is going to run steps `first_step` to STEPS on so many ranks.

    Args:
        kind: one of KINDS.
        removing: whether old checkpoints are removed, which is then a phase to be disturbed in.
    """
    victim, everyone = rng.randrange(ranks), tuple(range(ranks))
    step = rng.randint(min(first_step, STEPS), STEPS)
    saving = SAVING if removing else SAVING[:2]
    starting = STARTING if first_step > 1 else STARTING[:2]
    running = PHASES if ranks > 1 else tuple(name for name in PHASES if name not in ("exchange", "collective"))

    def fault(action: str, phases: tuple[str, ...], at: int = step) -> Fault:
        phase = rng.choice(phases)
        at = 0 if phase in (*STARTING, *SETTING_UP) else at
        return Fault(action, victim, phase, at, rng.randint(1, COUNTS.get(phase, 1)))

    def at_any_time(number: signal.Signals, whom: tuple[int, ...]) -> Disturbance:
        return Disturbance(kind, signals=(Signal(number, whom, rng.uniform(0.0, STARTED)),))

    by_time = rng.random() < 0.4
    if kind == "kill a rank":
        if by_time:
            return at_any_time(signal.SIGKILL, (victim,))
        return Disturbance(kind, (fault("kill", running + saving + saving + starting + SETTING_UP),))
    if kind == "power loss":
        return at_any_time(signal.SIGKILL, everyone)
    if kind == "stop a rank":
        if by_time:
            return at_any_time(signal.SIGSTOP, (victim,))
        return Disturbance(kind, (fault("stop", running + saving + SETTING_UP),))
    if kind == "stall in Python":
        return Disturbance(kind, (fault("sleep", running + SETTING_UP[1:]),))  # what comes first may take any time
    if kind == "SIGTERM to one":
        if by_time:
            return at_any_time(signal.SIGTERM, (victim,))
        return Disturbance(kind, (fault("terminate", running + saving),))
    if kind == "SIGTERM to all":
        return at_any_time(signal.SIGTERM, everyone)
    if kind == "disk full":
        whom = everyone if rng.random() < 0.5 else (victim,)
        steps = rng.choice([1, 2, 3, STEPS])
        full = tuple(Fault("full disk", rank, "step", step, steps=steps) for rank in whom)
        return Disturbance(kind, full, ends_run=False)
    if kind == "NaN gradient":
        return Disturbance(kind, (fault("kill", running + saving),))
    if kind == "out of memory":
        return Disturbance(kind, (fault("out of memory", ("forward", "backward")),))
    if kind == "exception":
        return Disturbance(kind, (fault("raise", running + starting + SETTING_UP),))
    killed = tuple(Fault("kill", rank, "step", max(step, min(first_step + 3, STEPS))) for rank in everyone)
    return Disturbance(kind, killed, damage=kind)
