"""Threads that work ahead, and that the end of the program does not wait for.

Python waits at its end for threads of a ThreadPoolExecutor: for one that compiles the planner half a minute or more, and a
launcher that has sent SIGTERM kills what is still there after 30 s. What these do is wanted by nobody any more by then: machine
code gets its name on disk when it is whole (planner/machine_code.py).
"""

import atexit
import contextlib
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

LEAVING_SECONDS = 2.0
"""How long the end of the program waits for threads at work: a read or a short plan is done by then, and no thread is ended
inside of a library that does not expect it."""

Work = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]


class Ahead:
    """Threads that call what is submitted, in order, until nobody refers to this object any more, or the program ends.

    Args:
        threads: how many calls run at a time.
        name: of the threads.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._works: SimpleQueue[Work | None] = SimpleQueue()
        self.threads = [Thread(target=_run, args=(self._works,), name=name, daemon=True) for _ in range(threads)]
        for thread in self.threads:
            thread.start()
        weakref.finalize(self, _end, self._works, threads).atexit = False  # at exit there is one wait for all
        _alive.add(self)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Call a function, once the calls before have begun."""
        future: Future[Any] = Future()
        self._works.put((future, function, arguments))
        return future

    def end(self) -> None:
        """Have the threads end after the calls that they are in; what waits is cancelled."""
        with contextlib.suppress(Empty):
            while (work := self._works.get_nowait()) is not None:
                work[0].cancel()
        _end(self._works, len(self.threads))


_alive: weakref.WeakSet[Ahead] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    deadline = time.monotonic() + LEAVING_SECONDS
    ahead = list(_alive)
    for threads in ahead:
        threads.end()
    for thread in (thread for threads in ahead for thread in threads.threads):
        thread.join(max(0.0, deadline - time.monotonic()))


def _end(works: SimpleQueue[Work | None], threads: int) -> None:
    for _ in range(threads):
        works.put(None)


def _run(works: SimpleQueue[Work | None]) -> None:
    while (work := works.get()) is not None:
        future, function, arguments = work
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)
        del work, future, function, arguments  # an idle thread keeps no data set
