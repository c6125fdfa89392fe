"""Python for xdist's workers: `forked_worker.py -u -c PROGRAM` runs the program in a process that is forked from the tests' fork
server, which has imported everything, instead of in a new interpreter, which would take four seconds to do so.

This process waits for the other one, and ends as it does.
"""

import os
import sys
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])

from tests.worlds import fork_server

ADDRESS = "LONGCTX_TEST_FORK_SERVER"
"""Environment variable with the fork server's address."""


def run(program: str, streams: list[Any], environment: dict[str, str]) -> None:
    """Run a program as the main one of this forked process, and end it.

    Args:
        streams: standard input and output, which the program talks through.
        environment: the one that a new interpreter would have; the fork server's has more.
    """
    for number, stream in enumerate(streams):
        os.dup2(stream.detach(), number)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    os.environ.clear()
    os.environ |= environment
    exec(program, vars(sys.modules["__main__"]))
    fork_server.end(0)


def main() -> int:
    """Fork, wait, and return the exit status."""
    environment = {name: value for name, value in os.environ.items() if name != ADDRESS}
    fork_server.join(os.environ[ADDRESS])
    streams = [DupFd(0), DupFd(1)]
    process = fork_server.fork(run, (sys.argv[-1], streams, environment), "test worker", daemon=False)
    for number in (0, 1):  # whose other ends would wait for this process
        os.close(number)
    process.join()
    return process.exitcode or 0


if __name__ == "__main__":
    # Under its own name, by which the forked process finds `run`.
    from tests.worlds import forked_worker

    os._exit(forked_worker.main())
