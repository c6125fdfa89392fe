"""A watchdog that a test can wait for."""

import time
from typing import Any

from hf_longctx.supervision.watchdog import Watchdog


class CountingWatchdog(Watchdog):
    """Counts what it tells of its rank."""

    records = 0

    def record(self, *args: Any) -> str:
        self.records += 1
        return super().record(*args)

    def be_seen(self) -> None:
        """Waits until what this rank does now has been told, if it watches: it was, when the next record but one is made. In the
        time of a few more the others, which may be late, read it: where this rank keeps the store, they cannot once it stops."""
        before = self.records
        while self._threads and self.records < before + 6:
            time.sleep(0.01)
