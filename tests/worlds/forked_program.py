"""The main function of a program that a test runs in a forked process (launched.py): `python ARGUMENTS`, without the imports.

Launchers are the true ones (torchrun, accelerate launch and `hf-longctx train --ranks` share torch's elastic agent), but the
agent forks its ranks from the server too, instead of starting interpreters.
"""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler as elastic

from tests.worlds.fork_server import end_as_program, fork, polling


def play(arguments: tuple[str, ...], environment: dict[str, str], folder: Path, output: Path) -> NoReturn:
    """Becomes `python ARGUMENTS`, begun in a folder, in a session of its own."""
    os.setsid()
    multiprocessing.current_process()._config.pop("daemon", None)  # type: ignore[attr-defined]
    os.environ.clear()
    elastic.SubprocessHandler._popen = lambda self, args, env: _start(args, env, output)  # type: ignore[method-assign]
    os.chdir(folder)
    end_as_program(lambda: _interpret(list(arguments)), environment, output)


def _interpret(arguments: list[str]) -> None:
    """Do what the interpreter does with its arguments: a script, -m a module, or -c a program."""
    if arguments[0] == "-u":
        arguments = arguments[1:]
    kind, *rest = arguments
    if kind == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        sys.modules.pop(rest[0], None)  # it is run, not imported
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = arguments, str(Path(kind).resolve().parent)
        runpy.run_path(kind, run_name="__main__")


def _start(arguments: tuple[str, ...], environment: dict[str, str], output: Path) -> Any:
    """Return what starts a rank in torch's agent: it prints where the agent does."""
    python, *program = arguments
    assert python == sys.executable
    return _Forked(fork(play, (tuple(program), environment, Path.cwd(), output), "rank", daemon=False))


class _Forked:
    """What the agent asks of a subprocess.Popen."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid
        while self.poll() is None and os.getpgid(self.pid) != self.pid:  # signals go to its session
            time.sleep(0.001)

    def poll(self) -> int | None:
        with polling:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        with polling:
            self._process.join(timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(f"rank of pid {self.pid}", timeout or 0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)
