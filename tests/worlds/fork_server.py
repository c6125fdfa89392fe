"""The server that ranks and programs of tests are forked from: it has imported everything, so that a process starts in a fifth
of a second instead of eight. The processes of a test session share one, which inherits the environment of its start; what was
forked from it may fork from it in turn."""

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
PRELOADED = (
    *("pytest", "tests.worlds.rank_launcher", "tests.worlds.rank_pool", "tests.builders.training_runs"),
    "tests.worlds.forked_program",
    *("torch.distributed.run", "accelerate.commands.launch", "hf_longctx.run", "hf_longctx.commands.train"),
    "tests.worlds.forked_ranks",  # last: it freezes what has been imported
)

QUIET = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT), "HF_DATASETS_OFFLINE": "1"}
"""The environment of ranks and programs, some of which libraries read when they are imported. PYTHONPATH: so that the server
finds our modules, which its own search path does not know in every Python."""

_starting = threading.Lock()
polling = threading.Lock()
"""A process that starts asks after all others of this program. Were one asked by two threads at once, the second would find
its exit status already read, and put 255 in its place."""


def start() -> str:
    """Starts the server, unless it runs; returns the address by which another process joins it. It ends with this process."""
    with _starting, _environment(**QUIET):
        forkserver.set_forkserver_preload(list(PRELOADED))
        forkserver._forkserver.ensure_running()  # forkserver.ensure_running would not know that this one was joined
    address = forkserver._forkserver._forkserver_address
    assert address is not None
    return address


def join(address: str) -> None:
    """Lets this process fork from a server that another one has started."""
    server = forkserver._forkserver
    server._forkserver_address = address
    _, server._forkserver_alive_fd = (
        os.pipe()
    )  # each process is given one to keep; this server ends with its starter instead
    server.ensure_running = lambda: None  # type: ignore[method-assign]


def fork(target: Callable[..., Any], args: tuple[Any, ...], name: str, daemon: bool = True) -> BaseProcess:
    """Starts a process that runs `target(*args)`, which are pickled. A daemon starts no processes of its own."""
    if (
        forkserver.get_inherited_fds() is not None
    ):  # forked itself: the server runs, but multiprocessing would start another
        forkserver._forkserver.ensure_running = lambda: None  # type: ignore[method-assign]
    start()
    process = multiprocessing.get_context("forkserver").Process(target=target, args=args, name=name, daemon=daemon)
    with polling, _without_main():
        process.start()
    return process


def end_as_program(main: Callable[[], Any], environment: Mapping[str, str], output: Path) -> NoReturn:
    """Runs `main` with both streams going to a file, and ends this forked process with the status that an interpreter would.

    The process ends with the one that started it. SIGUSR1 prints its stacks.
    """
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the launcher decides
    threading.Thread(target=_end_with_parent, name="watch parent", daemon=True).start()
    os.environ |= environment
    code = 0
    try:
        main()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if code and not isinstance(leaving.code, int):
            print(leaving.code, file=sys.stderr)
    except BaseException as error:
        sys.last_value = error  # as the interpreter does
        traceback.print_exc()
        code = 1
    end(code)


def end(code: int) -> NoReturn:
    """End this forked process as an interpreter ends, with a status."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ |= variables
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """A new process would import the main module of this one, which is pytest or a program of a test."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
