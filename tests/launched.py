"""Programs of two gloo ranks started as users start them, in processes of their own."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fork_server import QUIET, ROOT, fork, polling
from tests.forked_program import play

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")
ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--main_process_port", "0", "--num_processes")


@dataclass
class Ended:
    """How a launch ended."""

    code: int
    output: str
    """of all ranks, stdout and stderr together"""
    seconds: float


def torchrun(*program: Any, ranks: int = 2, fresh: bool = False, timeout: float = 120.0, **environment: str) -> Ended:
    """Runs `program` through torchrun."""
    return run(*TORCHRUN, ranks, *program, fresh=fresh, timeout=timeout, **environment)


def accelerate_launch(
    *program: Any, ranks: int = 2, fresh: bool = False, timeout: float = 120.0, **environment: str
) -> Ended:
    """Runs `program` through accelerate, on CPU processes."""
    return run(*ACCELERATE, ranks, *program, fresh=fresh, timeout=timeout, **environment)


def run(*arguments: Any, timeout: float, fresh: bool = False, **environment: str) -> Ended:
    """Runs Python with these arguments from the repository's root; kills it after `timeout` seconds.

    Args:
        fresh: in an interpreter of its own, which imports everything; else in a process that is forked from the server, as
            are the ranks that it launches.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    began = time.monotonic()
    start = _interpret if fresh else _fork
    code, output = start(tuple(map(str, arguments)), inherited | QUIET | environment, timeout)
    return Ended(code, output, time.monotonic() - began)


def _interpret(arguments: tuple[str, ...], environment: dict[str, str], timeout: float) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    return done.returncode, done.stdout


def _fork(arguments: tuple[str, ...], environment: dict[str, str], timeout: float) -> tuple[int, str]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "output"
        process = fork(play, (arguments, environment, ROOT, log), " ".join(arguments[:3]), daemon=False)
        try:
            with polling:
                process.join(timeout)
            if process.exitcode is None:
                raise subprocess.TimeoutExpired(arguments, timeout, log.read_bytes())
            return process.exitcode, log.read_text(errors="replace")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)  # ranks end with it
