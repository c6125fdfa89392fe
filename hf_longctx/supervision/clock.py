"""The time, and waiting for it. What has a timeout takes a `Clock`, so that a test can give it one whose time passes at once."""

import threading
import time


class Clock:
    """The system's: seconds that never go backwards, from an unknown beginning."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Waits for an event, no longer than so many seconds; whether it has come."""
        return event.wait(seconds)


SYSTEM_CLOCK = Clock()
