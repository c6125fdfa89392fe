"""Says whom everyone waits for, on every rank's standard error, where training or its set-up stands still; and ends what
stands still too long.

It begins with the trainer, or before (run.py: as soon as there is a launcher's store or a process group), and lasts until
training has ended. What may take any time (loading; a program's own code between making a trainer and training) is told
when others wait for it, and never ended. An error of a collective names nobody: `explaining` adds whom it was about.

Two daemon threads per rank, so that one can speak while the other is stuck in a store whose server is:
- the messenger. Every few seconds it writes this rank's progress to the job's store, over a connection of its own (the main
  thread may be blocked in another). Rank 0's reads all ranks' progress in one request and publishes a verdict, which is
  all that the others read: with n ranks, n small writes, n small reads and one long one;
- the judge. It counts for how long this rank has not moved, rank 0 has published nothing, and the store has not
  answered.

Signs of life are numbers that grow, and each observer counts by its own clock how long they have not, between one look and
the next: clocks of machines are never compared, and a process that was stopped does not take its own absence for
everybody else's.

Sent, every few seconds and rank, through the store: about 300 bytes up, the last verdict down. Rank 0 looks through the
records of 16,384 ranks in 20 ms (measured on one CPU core).
"""

import json
import math
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from hf_longctx.attention.progress import Progress
from hf_longctx.training.termination import leave, say
from hf_longctx.training.verdict import Sign, Verdict, verdict, verdict_on_lost_contact

REPORT_AFTER = 30.0
"""Seconds without a move before the first notice; the next come after 2, 4, 8 ... times as long. A layer of a long
document may take so long: it is a notice, not an error."""
EVERY = 5.0
"""Seconds from look to look. A stall is said after REPORT_AFTER and at most three more looks: this rank's, rank 0's, and
that of the rank that reads the verdict."""
EXIT_CODE = 75
"""Of a process that stood still too long: sysexits.h's EX_TEMPFAIL, a failure that may not come again."""
EXCHANGE_MARGIN = 60.0
"""Seconds by which the exchange's own timeout is longer, so that the watchdog speaks first."""
LEFT = b"inf"
"""What the record of a rank whose training has ended begins with, in place of the seconds since it moved."""
TOLD = 300
"""Characters of an error that other ranks are told."""
ASKING, QUIET = "asking", "quiet"
"""What a record says next: whether a collective of its rank has failed."""
MOST_HEAD = 40
"""Bytes of a record that both are in."""
FRAMES = 16
"""Of the stack that a rank prints when it is waited for, the innermost ones."""
PATIENCE = 2.0
"""Seconds that the end of training waits for the messenger's farewell."""
SOON = 2.5
"""Looks without a sign of life, after which a rank is held for gone where a collective of others has failed already."""
LOST_CONTACT = re.compile(
    "[Cc]onnect|Broken pipe|[Tt]imed? ?out|[Gg]loo|NCCL|ncclRemote|Socket|peer|Store|recv|rendezvous", re.ASCII
)
"""In the error of a collective or of the store. All are RuntimeErrors, and few of torch's own types."""


class Watchdog:
    """Of this rank's training and its set-up, between `start` and `stop`; one rank alone needs none, and starts no thread.

    Args:
        progress: of the main thread of this rank.
        stall_timeout: seconds without any move of this rank after which its process leaves with EXIT_CODE, and with the
            Python stacks of its threads on standard error; not while it does what may take any time.
        report_after: seconds; see REPORT_AFTER. At most half of stall_timeout, so that a verdict comes first.
        every: seconds; see EVERY. At most a quarter of report_after.
    """

    def __init__(
        self, progress: Progress, stall_timeout: float, *, report_after: float = REPORT_AFTER, every: float = EVERY
    ) -> None:
        self.progress, self._stall_timeout = progress, stall_timeout
        self._report_after = min(report_after, stall_timeout / 2)
        self._every = min(every, self._report_after / 4)
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._pid = 0
        """of the process that started the threads: a forked child has none"""
        self._asking = False
        """whether a collective of this rank has failed, which wants to know because of whom"""
        self._idle = 0.0
        """seconds since this rank moved"""
        self._collective = False
        """whether the main thread is inside a collective of somebody else's, such as FSDP2's or tensor parallelism's"""
        self._unheard = 0.0
        """seconds since rank 0 published something new"""
        self._heard = 0
        """its number"""
        self._leader = "rank 0"
        """and where that was"""
        self._said = (0, "training stands still")
        """number and text of the last verdict"""

    @property
    def ended(self) -> bool:
        """Whether it has been stopped: another training needs another one."""
        return self._ended.is_set()

    def start(self) -> None:
        """Called by all ranks, in the thread that trains. Where it has begun: does nothing."""
        job = None if self._threads or self.ended else _job()
        if job is None or job.world_size == 1:
            return
        self._rank, self._trains, self._pid = job.rank, threading.get_ident(), os.getpid()
        for run, arguments in ((self._judge, ()), (self._carry_messages, (job.store, job.world_size))):
            thread = threading.Thread(target=run, args=arguments, name="hf_longctx watchdog", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self) -> None:
        """Tells the others that this rank's training has ended; again: does nothing."""
        self._ended.set()
        for thread in self._threads:
            if self._pid == os.getpid() and thread is not threading.current_thread():
                thread.join(PATIENCE)
        self._threads = []

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Around what ranks do together. After an error it tells the others, and stops. The error of a lost contact is given a
        note of where this rank was, and of the ranks that it waited for; while the run is set up, of those it was about."""
        try:
            yield
        except BaseException as error:
            if not self.ended:
                self._explain(error)
            raise

    def _explain(self, error: BaseException) -> None:
        at, stood = Progress(**self._position()), self._idle
        text = " ".join(str(error).split())[:TOLD]
        failed = f"failed with {type(error).__name__}: {text}" if isinstance(error, Exception) else "leaving"
        self.progress.begin(failed, unbounded=True)
        self._collective = False
        lost = isinstance(error, RuntimeError) and LOST_CONTACT.search(str(error))
        if self._threads and lost:  # in training, the first rank that ends is seen by the launcher, at once
            reason = f" {self._reason(stood)}" if at.step == 0 else ""
            error.add_note(f"hf_longctx: watchdog: rank {self._rank} was at {at}.{reason}")
        self.stop()

    def _reason(self, stood: float) -> str:
        """Because of whom a collective has failed in which this rank stood for so many seconds. What has not been said while it
        stood may take a few looks to be seen."""
        before, self._asking = self._said[0], True
        if before and stood >= self._report_after:
            return self._said[1]
        deadline = time.monotonic() + 2 * SOON * self._every
        while time.monotonic() < deadline:
            if self._said[0] > before:
                return self._said[1]
            if self._unheard >= SOON * self._every:
                return f"no sign of life for {self._unheard:.0f} s of {self._leader}"
            time.sleep(self._every / 10)
        return "All other ranks give signs of life: see what they say"

    def _judge(self) -> None:
        """In its thread."""
        look, reports, moves = _Look(self._every), _Reports(self._report_after), -1
        while not self._ended.wait(self._every):
            elapsed = look.elapsed()
            self._collective = self._is_in_collective()
            self._idle = self._idle + elapsed if moves == self.progress.moves else 0.0
            moves = self.progress.moves
            self._unheard += elapsed
            here = f"rank {self._rank} is at {Progress(**self._position())}"
            if self._idle >= self._stall_timeout and not self.progress.unbounded:
                limit = f"stall_timeout_seconds={self._stall_timeout:g}"
                say(f"watchdog: {self._said[1]}")
                leave(EXIT_CODE, f"watchdog: {here} and leaves: it has not moved for {self._idle:.0f} s ({limit})")
            if reports.due(self._unheard):
                came = "" if self._heard else "it has not come so far as to have a trainer, "
                cause = f"{came}its process is stopped, its machine gone, or the job's store does not answer"
                say(f"watchdog: no sign of life for {self._unheard:.0f} s ({cause}) of {self._leader}. This {here}")

    def _is_in_collective(self) -> bool:
        """As the main thread's innermost frame says. DTensor's own calls compute."""
        frame = sys._current_frames().get(self._trains)
        module = frame.f_globals.get("__name__", "") if frame is not None else ""
        return module.startswith("torch.distributed.") and not module.startswith("torch.distributed.tensor.")

    def _position(self) -> dict[str, Any]:
        """Fields of a Progress."""
        position = {field.name: getattr(self.progress, field.name) for field in fields(Progress)}
        if self._collective and not self.progress.waits:
            within = "" if self.progress.step else f"{self.progress.activity}, "
            position |= {"collective": True, "activity": f"{within}waiting in a collective"}
        return position

    def _carry_messages(self, store: Any, world_size: int) -> None:
        """In its thread."""
        run = store.add(f"hf_longctx/watchdog/runs of rank {self._rank}", 1)  # each training has keys of its own
        prefix = f"hf_longctx/watchdog/{run}"
        keys, published = [f"{prefix}/{rank}" for rank in range(world_size)], f"{prefix}/verdict"
        leader = _Leader(world_size, self._every, self._report_after) if self._rank == 0 else None
        if leader is not None:  # reading a key that is not there would wait for it
            missing = [key for key in keys if not store.check([key])]
            store.multi_set(missing, [""] * len(missing))
        place = f"host {socket.gethostname()}, pid {os.getpid()}"
        ended, beat, begun = False, 0, False
        while not ended:
            ended, beat = self._ended.wait(self._every if beat else 0.0), beat + 1
            idle = math.inf if ended else self._idle
            with suppress(RuntimeError):  # the store is gone or does not answer: the judge says so
                said = json.dumps([beat, place, self._position()])
                store.set(keys[self._rank], f"{idle} {ASKING if self._asking else QUIET} {said}")
                if leader is not None:
                    store.set(published, json.dumps(leader.look(store.multi_get(keys))))
                begun = begun or store.check([published])
                if begun:
                    self._hear(json.loads(store.get(published)))

    def _hear(self, message: dict[str, Any]) -> None:
        """What rank 0 has published."""
        if message["look"] != self._heard:
            self._heard, self._leader = message["look"], message["leader"]
            self._unheard = -math.inf if message["left"] else 0.0
        if message["number"] > self._said[0]:
            self._said = message["number"], message["verdict"]
            say(f"watchdog: {message['verdict']}")
            if self._rank in message["named"]:
                stack = "".join(traceback.format_stack(sys._current_frames()[self._trains], limit=FRAMES))
                say(
                    f"watchdog: this is rank {self._rank}, which is waited for. What its main thread is doing:\n{stack}"
                )


@dataclass(frozen=True)
class _Job:
    """What a rank needs to speak with all others, over a connection of its own."""

    store: Any
    rank: int
    world_size: int


def _job() -> _Job | None:
    """As the process group has it, or before there is one, torchrun's and accelerate's launcher; None: nobody has it yet."""
    environment = os.environ
    store: Any
    if dist.is_initialized():
        store = _get_default_store()
        with suppress(RuntimeError):  # not every kind of store can be cloned
            store = store.clone()
        return _Job(store, dist.get_rank(), dist.get_world_size())
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # rank 0 will hold the store
        return None
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)
    attempt = f"hf_longctx/attempt {environment.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    return _Job(dist.PrefixStore(attempt, store), int(environment["RANK"]), int(environment["WORLD_SIZE"]))


class _Leader:
    """What rank 0 makes of all ranks' records."""

    def __init__(self, world_size: int, every: float, report_after: float) -> None:
        self._after = report_after
        self._look, self._reports = _Look(every), _Reports(report_after)
        self._records = [b""] * world_size
        self._silent = [0.0] * world_size
        """[rank]: seconds since its record changed"""
        self._published: dict[str, Any] = {"look": 0, "number": 0, "verdict": "", "named": []}
        self._soon = SOON * every
        self._blamed: set[int] = set()
        """ranks for which others' collectives have failed"""

    def look(self, records: list[bytes]) -> dict[str, Any]:
        """All ranks' records in; what is published out."""
        elapsed = self._look.elapsed()
        self._silent = [
            seconds + elapsed if record == before else 0.0
            for record, before, seconds in zip(records, self._records, self._silent)
        ]
        self._records = records
        leader = self._sign(0)
        self._published |= {"look": self._published["look"] + 1, "leader": leader.last_seen, "left": leader.left}
        if any(f" {ASKING} ".encode() in record[:MOST_HEAD] for record in records):
            found = verdict_on_lost_contact([self._sign(rank) for rank in range(len(records))], self._soon)
            if found is not None and not set(found.named) <= self._blamed:
                self._blamed |= set(found.named)
                self._publish(found)
            return self._published
        found = verdict([self._sign(rank) for rank in range(len(records))], self._after) if self._still() else None
        if self._reports.due(found.seconds if found is not None else 0.0) and found is not None:
            self._publish(found)
        return self._published

    def _publish(self, found: Verdict) -> None:
        number = self._published["number"] + 1
        self._published |= {"number": number, "verdict": found.message, "named": found.named}

    def _still(self) -> bool:
        """Whether there may be a verdict; thousands of records need not be parsed to know that there is none."""
        idle = [float(record.split(b" ", 1)[0]) if record else math.inf for record in self._records]
        return min(idle) >= self._after or any(
            silent >= self._after and not record.startswith(LEFT) for silent, record in zip(self._silent, self._records)
        )

    def _sign(self, rank: int) -> Sign:
        record = self._records[rank]
        if not record:
            return Sign(rank, "", Progress(), self._silent[rank], self._silent[rank])
        idle, _, said = record.split(b" ", 2)
        _, place, at = json.loads(said)
        return Sign(rank, place, Progress(**at), float(idle), self._silent[rank], left=record.startswith(LEFT))


class _Look:
    """The time between looks. At most two times what is meant: a process that was stopped meanwhile has not looked."""

    def __init__(self, every: float) -> None:
        self._most, self._last = 2 * every, time.monotonic()

    def elapsed(self) -> float:
        """Seconds since the last call."""
        before, self._last = self._last, time.monotonic()
        return min(self._last - before, self._most)


class _Reports:
    """When to speak of something that lasts: after so many seconds, and 2, 4, 8 ... times as many."""

    def __init__(self, after: float) -> None:
        self._after = self._next = after

    def due(self, seconds: float) -> bool:
        """Whether to speak now of what has lasted so long; once for each time."""
        if seconds < self._after:
            self._next = self._after
        if seconds < self._next or self._next == math.inf:
            return False
        self._next = self._next * 2 if math.isfinite(seconds) else math.inf
        while self._next <= seconds < math.inf:
            self._next *= 2
        return True
