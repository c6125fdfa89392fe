"""Says whom everyone waits for, on every rank's standard error, where training or its set-up stands still; and ends what
stands still too long.

It begins with the trainer, or before (hf_longctx/run.py: as soon as there is a launcher's store or a process group), and lasts
until training has ended. What may take any time (loading; a program's own code between making a trainer and training) is told
in one line by rank 0 when others wait for it, and neither it nor who waits for it is ever ended. What else stands still is said
by every rank; whose stack is shown, and when, pace.py decides by what is usual in this run. An error of a collective names
nobody: `explaining` adds whom it was about.

Two daemon threads per rank, so that one can speak while the other is stuck in a store whose server is:
- the messenger. Every few seconds it writes this rank's progress to the job's store, over a connection of its own (the main
  thread may be blocked in another). Rank 0's reads all ranks' progress in one request and publishes a verdict (leader.py),
  which is all that the others read: with n ranks, n small writes, n small reads and one long one;
- the judge. It counts for how long this rank has not moved, rank 0 has published nothing, and the store has not
  answered.

Signs of life are numbers that grow, and each observer counts by its own clock how long they have not, between one look and
the next: clocks of machines are never compared, and a process that was stopped does not take its own absence for
everybody else's.

Sent, every few seconds and rank, through the store: about 300 bytes up, the last verdict down.
"""

import json
import math
import os
import re
import socket
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from hf_longctx.supervision.clock import SYSTEM_CLOCK, Clock
from hf_longctx.supervision.device_trail import Wait
from hf_longctx.supervision.leader import SOON, Leader, Look, Reports, record
from hf_longctx.supervision.pace import Pace
from hf_longctx.supervision.progress import Progress
from hf_longctx.supervision.termination import leave, say

REPORT_AFTER = 30.0
"""Seconds without a move before the first notice; the next come after 2, 4, 8 ... times as long. A layer of a long
document may take so long: it is a notice, not an error."""
EVERY = 5.0
"""Seconds from look to look. A stall is said after REPORT_AFTER and at most three more looks: this rank's, rank 0's, and
that of the rank that reads the verdict."""
EXIT_CODE = 75
"""Exit status of a process that stood still too long: sysexits.h's EX_TEMPFAIL, a failure that may not come again."""
EXCHANGE_MARGIN = 60.0
"""Seconds by which the exchange's own timeout is longer, so that the watchdog speaks first."""
LAUNCHER_SECONDS = 1.5
"""How long a rank that has lost contact in training waits with its error. torchrun looks ten times a second who has ended, and
calls the error of the earliest whole second the first: that of the rank that broke the contact, not of one that noticed."""
TOLD = 300
"""Characters of an error that other ranks are told."""
FRAMES = 16
"""Innermost frames of the stack that a rank prints when it is waited for."""
FRAMES_OF_OTHERS = 6
"""The same of each of its other threads."""
PATIENCE = 2.0
"""Seconds that the end of training waits for the messenger's farewell."""
LOST_CONTACT = re.compile(
    "[Cc]onnect|Broken pipe|[Tt]imed? ?out|[Gg]loo|NCCL|ncclRemote|Socket|peer|Store|recv|rendezvous", re.ASCII
)
"""Matches the error of a collective or of the store. Some are torch's own types, the others plain RuntimeErrors. Errors of other
classes (no Ray answers) say themselves what they are about."""


class Watchdog:
    """Watches this rank's training and its set-up, between `start` and `stop`; one rank alone needs none, and starts no thread.

    Args:
        progress: of the main thread of this rank.
        stall_timeout: seconds without any move of this rank after which its process leaves with EXIT_CODE, and with the
            Python stacks of its threads on standard error; not while it does what may take any time, or waits for that.
        report_after: seconds; see REPORT_AFTER. At most half of stall_timeout, so that a verdict comes first.
        every: seconds; see EVERY. At most a quarter of report_after.
        clock: by which all of these are counted.
    """

    def __init__(
        self,
        progress: Progress,
        stall_timeout: float,
        *,
        report_after: float = REPORT_AFTER,
        every: float = EVERY,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.progress, self._stall_timeout, self._clock = progress, stall_timeout, clock
        self._report_after = min(report_after, stall_timeout / 2)
        self._every = min(every, self._report_after / 4)
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._pid = 0
        """of the process that started the threads: a forked child has none"""
        self._asking = False
        """whether a collective of this rank has failed, which wants to know because of whom"""
        self._pace = Pace(self._report_after, stall_timeout)
        """of this rank's moves; counts the seconds since the last one"""
        self._device_wait: Wait | None = None
        """the first wait for messages that this rank's device has not come through"""
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
        self._named = self._shown = False
        """whether a verdict has named this rank since it moved, and whether its stack has been shown"""
        self._excused = False
        """whether rank 0 has said last that everyone waits for what may take any time"""
        self._silent = 0.0
        """seconds without a sign of life of any rank, as rank 0 counts them"""

    @property
    def ended(self) -> bool:
        """Whether it has been stopped: another training needs another one."""
        return self._ended.is_set()

    def start(self) -> None:
        """Start the watchdog's threads, once. All ranks call this, in the thread that trains."""
        job = None if self._threads or self.ended else _job()
        if job is None or job.world_size == 1:
            return
        self.join(job)
        for run, arguments in ((self._judge, ()), (self._carry_messages, (job,))):
            thread = threading.Thread(target=run, args=arguments, name="hf_longctx watchdog", daemon=True)
            thread.start()
            self._threads.append(thread)

    def join(self, job: "Job") -> None:
        """Note that this thread trains, as this rank of the job."""
        self._rank, self._trains, self._pid = job.rank, threading.get_ident(), os.getpid()
        self._look, self._reports = Look(self._every, self._clock), Reports(self._report_after)

    def stop(self) -> None:
        """Tell the others, once, that this rank's training has ended."""
        self._ended.set()
        for thread in self._threads:
            if self._pid == os.getpid() and thread is not threading.current_thread():
                thread.join(PATIENCE)
        self._threads = []

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Tell the other ranks of an error in the block, and stop the watchdog then.

        The error of a lost contact gets a note of where this rank was, and while the run is set up also of the ranks that
        caused it."""
        try:
            yield
        except BaseException as error:
            if not self.ended:
                self._explain(error)
            raise

    def _explain(self, error: BaseException) -> None:
        at, stood = Progress(**self._position()), self._pace.idle
        text = " ".join(str(error).split())[:TOLD]
        failed = f"failed with {type(error).__name__}: {text}" if isinstance(error, Exception) else "leaving"
        self.progress.begin(failed, unbounded=True)
        self._collective = False
        of_a_collective = type(error) is RuntimeError or isinstance(error, dist.DistError)
        lost = of_a_collective and LOST_CONTACT.search(str(error))
        if self._threads and lost:
            reason = f" {self._reason(stood)}" if at.step == 0 else ""
            error.add_note(f"hf_longctx: watchdog: rank {self._rank} was at {at}.{reason}")
            if at.step:  # in training, the first rank that ends is seen by the launcher, which then ends the others
                self._clock.sleep(LAUNCHER_SECONDS)
        self.stop()

    def _reason(self, stood: float) -> str:
        """Return which ranks made a collective fail in which this rank waited `stood` seconds.

        The judge may need a few more looks to see them."""
        before, self._asking = self._said[0], True
        if before and stood >= self._report_after:
            return self._said[1]
        deadline = self._clock.now() + 2 * SOON * self._every
        while self._clock.now() < deadline:
            if self._said[0] > before:
                return self._said[1]
            if self._unheard >= SOON * self._every:
                return f"no sign of life for {self._unheard:.0f} s of {self._leader}"
            self._clock.sleep(self._every / 10)
        return "All other ranks give signs of life: see what they say"

    def _judge(self) -> None:
        """Judge, in its thread."""
        while not self._clock.wait(self._ended, self._every):
            self.judge()

    def judge(self) -> None:
        """Look at this rank, and at what is heard of rank 0."""
        elapsed = self._look.elapsed()
        self._collective = self._is_in_collective()
        self._look_at_device()
        if self._pace.look(self.progress, elapsed):
            self._named = self._shown = False
        idle = self._pace.idle
        self._unheard += elapsed
        here = f"rank {self._rank} is at {Progress(**self._position())}"
        excused = self._excused and self._unheard < self._report_after
        # Those who do what may take any time, or wait for it, wait no longer where a rank is gone: it may never end.
        gone = max(self._unheard, self._silent)
        bounded = not self.progress.unbounded or gone >= self._stall_timeout
        if idle >= self._stall_timeout and bounded and not excused:
            limit = f"stall_timeout_seconds={self._stall_timeout:g}"
            why = f", and a rank has given no sign of life for {gone:.0f} s" if self.progress.unbounded else ""
            self.say(f"watchdog: {self._said[1]}")
            self.leave(f"watchdog: {here} and leaves: it has not moved for {idle:.0f} s{why} ({limit})")
        if self._named and not self._shown and self._pace.is_unusual(self.progress):
            self._shown = True
            frames = sys._current_frames()
            stack = "".join(traceback.format_stack(frames.pop(self._trains), limit=FRAMES)) + _other_threads(frames)
            self.say(
                f"watchdog: this is rank {self._rank}, which is waited for, and has not moved for {idle:.0f} s; "
                f"{self._stall_timeout:g} s end it (stall_timeout_seconds). What its main thread is doing:\n{stack}"
            )
        if self._reports.due(self._unheard):
            came = "" if self._heard else "it has not come so far as to have a trainer, "
            cause = f"{came}its process is stopped, its machine gone, or the job's store does not answer"
            self.say(f"watchdog: no sign of life for {self._unheard:.0f} s ({cause}) of {self._leader}. This {here}")

    def say(self, message: str) -> None:
        """Write a message to standard error."""
        say(message)

    def leave(self, reason: str) -> None:
        """Ends this process."""
        leave(EXIT_CODE, reason)

    def _is_in_collective(self) -> bool:
        """Say it as the main thread's innermost frame does. DTensor's own calls compute."""
        frame = sys._current_frames().get(self._trains)
        module = frame.f_globals.get("__name__", "") if frame is not None else ""
        return module.startswith("torch.distributed.") and not module.startswith("torch.distributed.tensor.")

    def _look_at_device(self) -> None:
        """Count what the device has passed as moves of this rank, and note where it stands."""
        if self.progress.trail is not None:
            passed, self._device_wait = self.progress.trail.look()
            self.progress.moves += passed

    def _position(self) -> dict[str, Any]:
        """Fields of a Progress: the device's where that is behind the main thread."""
        position = {field.name: getattr(self.progress, field.name) for field in fields(Progress)}
        if (wait := self._device_wait) is not None:
            position |= {"layer": wait.layer, "backward": wait.backward}
            if wait.waiting:
                return position | {"awaited": list(wait.ranks), "awaited_for": wait.what}
        if self._collective and not self.progress.waits:
            within = "" if self.progress.step else f"{self.progress.activity}, "
            position |= {"collective": True, "activity": f"{within}waiting in a collective"}
        return position

    def _carry_messages(self, job: "Job") -> None:
        """Carry messages, in its thread."""
        messages = Messages(self, job)
        messages.exchange()
        while not self._clock.wait(self._ended, self._every):
            messages.exchange()
        messages.exchange(left=True)

    def leader(self, world_size: int) -> Leader:
        """Return what rank 0 makes of all records, by this watchdog's times."""
        return Leader(world_size, self._every, self._report_after, self._clock)

    def record(self, beat: int, place: str, left: bool) -> str:
        """Return what the other ranks are told of this one. The messenger's thread looks where this rank stands now: the judge's
        last look may be older."""
        self._collective = not self.ended and self._is_in_collective()
        self._look_at_device()
        idle = math.inf if left else self._pace.idle
        return record(idle, self._asking, beat, place, self._position())

    def hear(self, message: dict[str, Any]) -> None:
        """Take in what rank 0 has published."""
        if message["look"] != self._heard:
            self._heard, self._leader = message["look"], message["leader"]
            self._unheard = -math.inf if message["left"] else 0.0
        self._excused, self._silent = message["excused"], message["silent"]
        if message["number"] > self._said[0]:
            self._said = message["number"], message["verdict"]
            self._named = self._named or self._rank in message["named"]
            if self._rank == 0 or not message["expected"]:
                self.say(f"watchdog: {message['verdict']}")


def _other_threads(frames: dict[int, FrameType]) -> str:
    """Stacks of threads, by identifier; the watchdog's own is left out. Backward on a GPU runs in a thread of autograd's, which
    Python has no name for, and for which the main thread waits."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "".join(
        f"Its thread {names.get(number, number)}:\n{''.join(traceback.format_stack(frame, limit=FRAMES_OF_OTHERS))}"
        for number, frame in frames.items()
        if number != threading.get_ident()
    )


class Messages:
    """A rank's side of what is sent through the job's store. Creating it waits for the store."""

    def __init__(self, watchdog: Watchdog, job: "Job") -> None:
        store, rank = job.store, job.rank
        run = store.add(f"hf_longctx/watchdog/runs of rank {rank}", 1)  # each training has keys of its own
        prefix = f"hf_longctx/watchdog/{run}"
        self._watchdog, self._store = watchdog, store
        self._keys, self._published = [f"{prefix}/{number}" for number in range(job.world_size)], f"{prefix}/verdict"
        self._own = self._keys[rank]
        self._leader = watchdog.leader(job.world_size) if rank == 0 else None
        if self._leader is not None:  # reading a key that is not there would wait for it
            missing = [key for key in self._keys if not store.check([key])]
            store.multi_set(missing, [""] * len(missing))
        self._place = f"host {socket.gethostname()}, pid {os.getpid()}"
        self._beat, self._begun = 0, False

    def exchange(self, *, left: bool = False) -> None:
        """Write this rank's state and read the others', once; `left`: whether this rank's training has ended."""
        self._beat += 1
        store = self._store
        with suppress(RuntimeError):  # the store is gone or does not answer: the judge says so
            store.set(self._own, self._watchdog.record(self._beat, self._place, left))
            if self._leader is not None:
                store.set(self._published, json.dumps(self._leader.look(store.multi_get(self._keys))))
            self._begun = self._begun or store.check([self._published])
            if self._begun:
                self._watchdog.hear(json.loads(store.get(self._published)))


@dataclass(frozen=True)
class Job:
    """The store and the number of a rank that speaks with all others, over a connection of its own."""

    store: Any
    rank: int
    world_size: int


def _job() -> Job | None:
    """Return the job as the process group has it, or before there is one, torchrun's and accelerate's launcher; None: nobody has
    it yet."""
    store: Any
    if dist.is_initialized():
        store = _get_default_store()
        with suppress(RuntimeError):  # not every kind of store can be cloned
            store = store.clone()
        return Job(store, dist.get_rank(), dist.get_world_size())
    return launcher_job()


def launcher_job(timeout: timedelta = timedelta(minutes=5)) -> Job | None:
    """Return the job as torchrun's and accelerate's launcher has it; None: it has no store, and rank 0 will hold one.

    Args:
        timeout: how long to wait for the store, and for each of its answers.
    """
    environment = os.environ
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    attempt = f"hf_longctx/attempt {environment.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    return Job(dist.PrefixStore(attempt, store), int(environment["RANK"]), int(environment["WORLD_SIZE"]))
