"""Watchdogs of several ranks in one process, whose time passes at once: what each would say, and whether it would leave.

Every few seconds of the fake clock all ranks look, as their threads would: the judge, then the messages.
"""

from typing import Any

import torch.distributed as dist

from hf_longctx.supervision.progress import Progress
from hf_longctx.supervision.watchdog import EVERY, Job, Messages, Watchdog
from tests.worlds.fake_clock import FakeClock


class HeardWatchdog(Watchdog):
    """Keeps what it says."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.said: list[str] = []
        self.left = ""
        """why it would have ended its process"""

    def say(self, message: str) -> None:
        self.said.append(message)

    def leave(self, reason: str) -> None:
        self.left = self.left or reason

    @property
    def stacks(self) -> list[str]:
        return [message for message in self.said if "What its main thread is doing" in message]

    @property
    def notices(self) -> list[str]:
        return [message for message in self.said if message not in self.stacks]


class WatchedWorld:
    """So many ranks of a job. Those in `stopped` look at nothing, as a process that is stopped."""

    def __init__(self, ranks: int, stall_timeout: float = 1800.0) -> None:
        store = dist.HashStore()
        self.clock = FakeClock()
        self.every = min(EVERY, stall_timeout / 8)
        self.watchdogs = [HeardWatchdog(Progress(), stall_timeout, clock=self.clock) for _ in range(ranks)]
        jobs = [Job(store, rank, ranks) for rank in range(ranks)]
        for watchdog, job in zip(self.watchdogs, jobs):
            watchdog.join(job)
        self._messages = [Messages(watchdog, job) for watchdog, job in zip(self.watchdogs, jobs)]
        self.stopped: set[int] = set()
        self.ended: set[int] = set()
        self.store_answers = True

    @property
    def progress(self) -> list[Progress]:
        return [watchdog.progress for watchdog in self.watchdogs]

    def let_pass(self, seconds: float) -> None:
        """So many seconds, in which all ranks stay where they are."""
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self.clock.sleep(min(self.every, end - self.clock.now()))
            living = [
                rank
                for rank in range(len(self.watchdogs))
                if rank not in self.stopped | self.ended and not self.watchdogs[rank].left
            ]
            for rank in living:
                self.watchdogs[rank].judge()
            for rank in [*living, *living] if self.store_answers else ():  # rank 0 reads what all have written
                self._messages[rank].exchange()

    def end(self, rank: int) -> None:
        """Training has ended on a rank."""
        self._messages[rank].exchange(left=True)
        self.ended.add(rank)
