"""The trail of a rank's GPU, which the host is ahead of: for threads that watch (supervision/watchdog.py).

On a GPU a wait for messages returns at once; the device waits, and the host stands still only when the next question about a
value comes, in a line that has nothing to do with it. So each wait leaves two events in the stream that computes, and so does
FSDP2's wait for a layer's weights (training/execution.py):

    compute  | reached |  messages of ranks 3 and 7  | came |  compute

A watching thread asks which of them the device has come to. Reached and not come: it waits for those ranks, in that layer.
Not reached: it still computes what is before. Events are used again. 2 microseconds a wait, and nothing waits for anything.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

MOST = 4096
"""Waits that are remembered: CUDA queues about a thousand launches, and a round has several."""


class Event(Protocol):
    """The part of torch.cuda.Event that is used here."""

    def record(self) -> Any: ...

    def query(self) -> bool: ...


@dataclass(eq=False, slots=True)
class Wait:
    """One wait for messages, as the device will come to it."""

    reached: Event
    came: Event
    ranks: Sequence[int]
    """global ranks that are waited for"""
    layer: int | None
    backward: bool
    what: str
    """is waited for"""

    @property
    def waiting(self) -> bool:
        """Whether the device stands at it."""
        return self.reached.query()


class DeviceTrail:
    """Waits that the host has issued, in order. The thread that computes adds to it, another one looks."""

    def __init__(self, event: Callable[[], Event] | None = None) -> None:
        self._event, self._spare = event or torch.cuda.Event, deque[Event](maxlen=2 * MOST)
        self._device = torch.cuda.current_device() if event is None else None
        self._waits = deque[Wait](maxlen=MOST)
        self._looking = threading.Lock()

    def begin(self, ranks: Sequence[int], layer: int | None, backward: bool, what: str = "keys and values") -> Wait:
        """Note that what is issued next waits for these ranks."""
        reached, came = (self._spare.pop() if self._spare else self._event() for _ in range(2))
        wait = Wait(reached, came, ranks, layer, backward, what)
        reached.record()
        return wait

    def end(self, wait: Wait) -> None:
        """Note that all of the wait has been issued."""
        wait.came.record()
        self._waits.append(wait)

    def look(self) -> tuple[int, Wait | None]:
        """Count the waits that the device has passed since the last look, and give the first that it has not; None: it has passed
        all, or an error of the device, which the thread that computes will raise, keeps it from telling."""
        passed = 0
        if (
            self._device is not None
        ):  # a thread begins on the first device, and would leave memory of this process there
            torch.cuda.set_device(self._device)
        with self._looking, suppress(RuntimeError):
            while self._waits:
                first = self._waits[0]
                if not first.came.query():
                    return passed, first
                self._waits.popleft()
                self._spare.extend((first.reached, first.came))
                passed += 1
        return passed, None
