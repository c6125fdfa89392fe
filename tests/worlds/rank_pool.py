"""Worlds of persistent gloo ranks that all distributed tests share.

Starting a rank costs time, so a pool starts its ranks once, at first use (forked: fork_server.py), and then sends them
functions: `pool.run(function, *args)` runs `function(*args)` on every rank and returns the results in rank order.
Arguments and results travel as plain pickles through pipes (tensors by value, never through shared memory).

A rank that raises, dies or does not answer in time fails the call with what it printed, and the world is killed: the
ranks that wait for the failed one would wait forever. The next call starts a new world, so a failing test costs the
following one a few seconds and nothing else. A test that *expects* an error of a rank is therefore quicker when the
function catches it and returns it.

Ranks do not outlive their parent, however it ends: they watch a pipe that closes with it.
"""

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hf_longctx.supervision.clock import SYSTEM_CLOCK, Clock
from tests.worlds import fifo, garbage
from tests.worlds.fork_server import fork
from tests.worlds.patience import PATIENCE

FAILURE_GRACE = 1.0
"""Seconds the other ranks have, after the first failure, to report one of their own."""
REPORT_TIME = 2.0
"""Seconds a rank has to write down where it is stuck."""

MOST_GROUPS = 64
"""Process groups of a rank after which its world ends, and the next run starts another. Meshes (FSDP, tensor parallelism) leave
theirs behind, and torch keeps them for meshes alike: no test should pay for what many others left."""

FEW_MODULES = 50
"""Modules that a rank may import without being cleaned up after."""

worker_state: dict[str, Any] = {}
"""In a worker: what functions keep from one run to the next, e.g. process groups made once per world. Empty in a new
world; not used in the parent."""


class RankFailure(RuntimeError):
    """A rank died, did not answer in time, or raised something that cannot be pickled."""


@dataclass
class _Answer:
    value: Any = None
    error: Exception | None = None
    report: str = ""
    groups: int = 0
    """process groups that the rank has"""


@dataclass
class _Rank:
    process: BaseProcess
    requests: Connection
    watch: Connection
    log: Path
    log_seen: int = 0

    def printed(self) -> str:
        """Return what the rank has written to stdout and stderr since the current run began."""
        return self.log.read_bytes()[self.log_seen :].decode(errors="replace").strip()


class RankPool:
    """A world of `world_size` gloo ranks, each one process and one thread, started at first use.

    `run` fails after `timeout` seconds of `clock` unless it is given another limit.
    """

    clock: Clock = SYSTEM_CLOCK

    def __init__(self, world_size: int, timeout: float = PATIENCE):
        self.world_size = world_size
        self.timeout = timeout
        self._world: list[_Rank] = []
        self._groups = 0
        self._store: dist.TCPStore | None = None
        self._folder: tempfile.TemporaryDirectory | None = None
        atexit.register(self.close)

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        ranks: Iterable[int] | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run `function(*args, **kwargs)` on `ranks` (all of them by default); return their results in that order.

        `function` must be importable by name; `torch.distributed` is initialised where it runs, and every random
        generator is seeded alike. Raises the error of the rank that failed first, with its traceback and output as a
        note; `RankFailure` if a rank dies or has not answered after `timeout` seconds.
        """
        called = list(range(self.world_size)) if ranks is None else list(ranks)
        outside = [rank for rank in called if not 0 <= rank < self.world_size]
        if outside:
            raise ValueError(f"ranks {outside} are not in a world of {self.world_size} (0 to {self.world_size - 1})")
        request = pickle.dumps((function, args, kwargs))
        try:
            if not self._world:
                self._start()
            results = self._call(called, request, self.timeout if timeout is None else timeout)
        except BaseException:  # a KeyboardInterrupt too: the ranks would stay inside the function
            self.close()
            raise
        if self._groups > MOST_GROUPS:
            self.close()
        return results

    def processes(self) -> list[int]:
        """The process ids of the current world, in rank order; empty before the first run and after a failure."""
        return [rank.process.pid or 0 for rank in self._world]

    def close(self) -> None:
        """Kill the ranks, if there are any. The pool stays usable: the next run starts a new world."""
        for rank in self._world:
            rank.process.kill()
        for rank in self._world:
            rank.process.join()
            rank.requests.close()
            rank.watch.close()
        self._world, self._store = [], None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        # The parent holds the store, on a port that the system picks: no race for a free port, and no rank whose death
        # takes the store with it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory(prefix="rank_pool_")
        for rank in range(self.world_size):
            requests, worker_requests = multiprocessing.Pipe()
            watch, worker_watch = multiprocessing.Pipe()
            log = Path(self._folder.name) / f"rank{rank}.log"
            arguments = (rank, self.world_size, self._store.port, worker_requests, worker_watch, log)
            process = fork(_serve, arguments, f"rank {rank} of {self.world_size}")
            worker_requests.close()
            worker_watch.close()
            log.touch()
            self._world.append(_Rank(process, requests, watch, log))
        self._collect(list(range(self.world_size)), PATIENCE, "start")

    def _call(self, called: list[int], request: bytes, timeout: float) -> list[Any]:
        for worker in self._world:
            worker.log_seen = worker.log.stat().st_size
        for rank in called:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a dead rank: its sentinel says so below
                self._world[rank].requests.send_bytes(request)
        return self._collect(called, timeout, "answer")

    def _collect(self, called: list[int], timeout: float, verb: str) -> list[Any]:
        """Receive one answer of each called rank; raise at the first failure, once the others had time to fail too."""
        waiting = {self._world[rank].requests: rank for rank in called}
        alive = {rank.process.sentinel: index for index, rank in enumerate(self._world)}
        answers: dict[int, _Answer] = {}
        failed: list[int] = []
        deadline = self.clock.now() + timeout
        while waiting and (remaining := deadline - self.clock.now()) > 0:
            ready = self._ready(list(waiting), list(alive), remaining)
            for connection in [pipe for pipe in list(waiting) if pipe in ready]:
                try:
                    answer = pickle.loads(connection.recv_bytes())
                except (EOFError, ConnectionResetError):  # died: its sentinel is or will be ready
                    continue
                rank = waiting.pop(connection)
                answers[rank] = answer
                if answer.report:
                    failed.append(rank)
                    deadline = min(deadline, self.clock.now() + FAILURE_GRACE)
            dead = [alive[sentinel] for sentinel in ready if sentinel in alive]
            if dead:  # others may have failed before, because their peer was gone: the death comes first
                raise self._with_reports(RankFailure(self._death(dead)), failed, answers)
        if failed:
            unknown = RankFailure(f"rank {failed[0]} raised an error that cannot be pickled; its report follows")
            raise self._with_reports(answers[failed[0]].error or unknown, failed, answers)
        if waiting:
            raise RankFailure(self._hang(sorted(waiting.values()), timeout, verb))
        self._groups = max(answers[rank].groups for rank in called)
        return [answers[rank].value for rank in called]

    def _ready(self, answers: list[Connection], lives: list[int], seconds: float) -> list[Any]:
        """Wait for answers of ranks, or the end of one."""
        return wait([*answers, *lives], seconds)

    def _with_reports(self, error: Exception, failed: list[int], answers: dict[int, _Answer]) -> Exception:
        for rank in failed:
            error.add_note(f"--- rank {rank} of {self.world_size} raised\n{answers[rank].report}")
        error.add_note(self._output(failed))
        return error

    def _death(self, dead: list[int]) -> str:
        for rank in dead:
            self._world[rank].process.join()
        codes = ", ".join(f"rank {rank} (exit code {self._world[rank].process.exitcode})" for rank in dead)
        return f"{codes} of {self.world_size} died\n{self._output(dead)}"

    def _hang(self, silent: list[int], timeout: float, verb: str) -> str:
        for index in silent:
            rank = self._world[index]
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                rank.watch.send_bytes(b"where are you?")
                if rank.watch.poll(REPORT_TIME):
                    continue
            # The rank holds the interpreter's lock: the handler writes the stacks without it. It may crash (it walks
            # frames that change meanwhile) and does not say when it is done, so it comes second.
            os.kill(rank.process.pid or 0, signal.SIGUSR1)
            self.clock.sleep(REPORT_TIME / 4)
        return (
            f"ranks {silent} of {self.world_size} did not {verb} within {timeout:g} s; their stacks follow\n"
            f"{self._output(silent)}"
        )

    def _output(self, ranks: list[int]) -> str:
        return "\n".join(
            f"--- rank {rank} of {self.world_size} printed\n{self._world[rank].printed() or '(nothing)'}"
            for rank in ranks
        )


def _serve(rank: int, world_size: int, port: int, requests: Connection, watch: Connection, log: Path) -> None:
    """The main function of a rank: join the world, then answer requests until killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    threading.Thread(target=_watch_parent, args=(watch,), name="watch parent", daemon=True).start()
    os.environ |= {  # what accelerate and the Trainer read
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "ACCELERATE_USE_CPU": "true",
    }
    torch.set_num_threads(1)
    distributed_c10d.ProcessGroupGloo = _sharing_one_device()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    requests.send_bytes(pickle.dumps(_Answer()))
    imported = len(sys.modules)
    while True:
        requests.send_bytes(_answer(requests.recv_bytes()))
        if len(sys.modules) > imported + FEW_MODULES:  # or every trainer's collecting would look through them
            imported = len(sys.modules)
            garbage.freeze()


def _sharing_one_device() -> type[dist.ProcessGroupGloo]:
    """Return what this rank makes gloo groups of. A group has a device of its own otherwise, whose thread wakes up a hundred
    times a second: 8 idle ranks with 51 to 56 of them took a third of a core from the tests that ran."""
    device = dist.ProcessGroupGloo.create_default_device()

    class Group(dist.ProcessGroupGloo):
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
            options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout, options._devices, options._threads = timeout, [device], 2
            super().__init__(store, rank, size, options)

    return Group


def _answer(request: bytes) -> bytes:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    try:
        function, args, kwargs = pickle.loads(request)
        result = function(*args, **kwargs)
        return pickle.dumps(_Answer(result, groups=len(distributed_c10d._world.pg_map)))
    except Exception as error:
        report = traceback.format_exc()
        try:
            answer = pickle.dumps(_Answer(error=error, report=report))
            pickle.loads(answer)  # an exception with arguments of its own may pickle and yet not load
            return answer
        except Exception:
            return pickle.dumps(_Answer(report=report))


def _watch_parent(watch: Connection) -> None:
    """Write down the stacks and what the process groups wait for when the parent asks; exit when the parent is gone."""
    with contextlib.suppress(EOFError, OSError):
        while watch.recv_bytes():
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            for thread, frame in sys._current_frames().items():
                print(
                    f"--- stack of {names.get(thread, thread)}\n{''.join(traceback.format_stack(frame))}",
                    file=sys.stderr,
                )
            print("\n".join(fifo.pending_operations()), file=sys.stderr, flush=True)
            watch.send_bytes(b"here")
    os._exit(1)
