"""The server that ranks of tests are forked from: it has imported everything, so that a rank starts in a fifth of a second
instead of eight. A program has one such server, which inherits the environment of its first use."""

import contextlib
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PRELOADED = ("pytest", "tests.forked_ranks", "tests.rank_launcher", "tests.rank_pool", "tests.training_runs")

_starting = threading.Lock()
polling = threading.Lock()
"""A process that starts asks after all others of this program. Were one asked by two threads at once, the second would find
its exit status already read, and put 255 in its place."""


def fork(target: Callable[..., Any], args: tuple[Any, ...], name: str) -> BaseProcess:
    """Starts a daemon that runs `target(*args)`, which are pickled."""
    with _starting, _environment(OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true", PYTHONPATH=str(ROOT)):
        # PYTHONPATH: so that it finds our modules, which its own search path does not know in every Python.
        forkserver.set_forkserver_preload(list(PRELOADED))
        forkserver.ensure_running()
    process = multiprocessing.get_context("forkserver").Process(target=target, args=args, name=name, daemon=True)
    with polling:
        process.start()
    return process


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = dict(os.environ)
    os.environ |= variables
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before
