"""A clock whose time passes when a test says so."""

import threading
from collections.abc import Callable

from hf_longctx.supervision.clock import Clock


class FakeClock(Clock):
    """Begins at 0. Who sleeps lets the time pass at once; `meanwhile` is called after each second of it, or part of one."""

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.seconds, self.meanwhile = 0.0, meanwhile

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        end = self.seconds + seconds
        while self.seconds < end:
            self.seconds = min(end, self.seconds + 1.0)
            self.meanwhile()

    def wait(self, event: threading.Event, seconds: float) -> bool:
        if not event.is_set():
            self.sleep(seconds)
        return event.is_set()
