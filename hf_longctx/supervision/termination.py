"""SIGTERM: noted at once, and answered within a grace time, whatever the process is doing.

Clusters and launchers end a job with SIGTERM, and with SIGKILL some time later. Training notices `requested` at its next
step, together with all other ranks (`agree_on_plan`), and leaves in order. A main thread that waits for a peer inside a
collective runs no Python, and would never notice: so the signal also wakes a thread, by the interpreter's wake-up file
descriptor, which leaves for it when the grace time is over. Nothing is sent between ranks here.
"""

import faulthandler
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

logger = logging.getLogger(__name__)

EXIT_CODE = 128 + signal.SIGTERM
"""Exit status of a process that SIGTERM ended, as shells count: 143."""


class Termination:
    """Between `start` and `stop`, SIGTERM sets `requested` and starts the grace time, in place of ending the process.

    A handler that was there before is called too, in the main thread. Child processes that are forked meanwhile have the
    signal as it was before.

    Args:
        grace_seconds: after the signal. Then the process says what it was doing, on standard error, with the Python stacks
            of all threads, and leaves with EXIT_CODE; also if it was stopped meanwhile: it has been told to end.
        doing: called then; what the process is doing, in words.
    """

    def __init__(self, grace_seconds: float, doing: Callable[[], str]) -> None:
        self.requested = False
        """whether SIGTERM has come"""
        self._grace, self._doing = grace_seconds, doing
        self._before: Any = None
        self._wakeup_before = -1
        self._thread: threading.Thread | None = None
        self._wakes: tuple[socket.socket, socket.socket] | None = None
        os.register_at_fork(after_in_child=self._restore)

    def start(self) -> None:
        """Does nothing, but for a line in the log, outside the main thread: only that one may handle signals."""
        if threading.current_thread() is not threading.main_thread():
            logger.warning("training runs outside the main thread: SIGTERM ends this process without a checkpoint")
            return
        self._wakes = reader, writer = socket.socketpair()
        writer.setblocking(False)  # what a signal handler writes to must never block
        self._thread = threading.Thread(target=self._watch, args=(reader,), name="hf_longctx SIGTERM", daemon=True)
        self._thread.start()
        self._wakeup_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._before = signal.signal(signal.SIGTERM, self._handle)

    def stop(self) -> None:
        """Gives the signal back; again: does nothing. A grace time that has begun goes on."""
        if self._wakes is None or self._thread is None:
            return
        _, writer = self._wakes
        self._restore()
        writer.shutdown(socket.SHUT_WR)
        if not self.requested:
            self._thread.join(1.0)

    def _restore(self) -> None:
        if self._wakes is not None:
            signal.signal(signal.SIGTERM, self._before if self._before is not None else signal.SIG_DFL)
            signal.set_wakeup_fd(self._wakeup_before)
            self._wakes = None

    def _handle(self, number: int, frame: Any) -> None:
        """Run in the main thread, as soon as that runs Python again."""
        self.requested = True
        if callable(self._before):
            self._before(number, frame)

    def _watch(self, reader: socket.socket) -> None:
        """Run in the thread: one byte arrives for each signal, none any more when training has ended."""
        while arrived := reader.recv(1):
            if arrived[0] == signal.SIGTERM:
                self.requested = True
                say(f"SIGTERM: this process leaves within {self._grace:g} s. It was at {self._doing()}")
                time.sleep(self._grace)
                leave(EXIT_CODE, f"SIGTERM came {self._grace:g} s ago (grace_seconds): leaving now, at {self._doing()}")


def say(message: str) -> None:
    """Write to standard error, past Python's buffer: a daemon thread that holds its lock when the interpreter ends
    would abort the process. A message that cannot be written, as on a full disk, is lost, and nothing else."""
    with suppress(OSError):
        os.write(2, f"hf_longctx: {message}\n".encode(errors="backslashreplace"))


def leave(code: int, reason: str) -> NoReturn:
    """Ends the process at once, whatever its threads wait for, with the reason and their Python stacks on standard
    error as far as they can be written."""
    try:
        say(f"{reason}. What each thread was doing:")
        faulthandler.dump_traceback(2)
    finally:
        os._exit(code)
