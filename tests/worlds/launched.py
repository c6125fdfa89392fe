"""Programs that tests run: `python ARGUMENTS`, alone or as the ranks of a launcher.

    run("scripts/train.py", "--config", file)                   forked: 0.2 s until it runs
    torchrun("-m", "hf_longctx", "train", file)                 torchrun and its two ranks, all forked
    torchrun(program, fresh=True)                               three interpreters, each importing everything in 8 s

A forked program is the same code with its own arguments, environment, folder, session and exit code, but its libraries have been
imported before, under QUIET; a launcher is torch's own agent, whose ranks are forked too. What only a true start shows (entry
points, quoting, environment variables that are read at import, the launcher's way to interpreters) is shown once by:

| started as | test |
|---|---|
| the `hf-longctx` command of a wheel | test_packaging: it works where it is installed |
| `python -m hf_longctx`, `import hf_longctx` | test_cli: help is shown without a verb; test_package |
| `hf-longctx train --ranks 2` | test_cli_verbs: training starts its ranks |
| `accelerate launch scripts/train.py` | test_run_page, all on a pushed run |
| torchrun | test_failures: a rank that raises, by night |
| ranks of verbs (`profile --ranks 2`) | test_profile: ranks are started here, by night |
| scripts/*.sh | test_launch_scripts |
| two nodes that meet; examples under accelerate | test_restarts, test_examples, by night |
| Ray | test_ray_cluster, test_remote, test_remote_training |

Forked instead since then: test_commands_train (both real runs), test_restarts (one node), test_train_script, test_out_of_memory,
test_profile (torchrun), test_watchdog (a store that does not answer), worker processes of test_recalibration (spawned:
test_loader).
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.worlds.fork_server import QUIET, ROOT, fork, polling
from tests.worlds.forked_program import play
from tests.worlds.patience import PATIENCE

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")
ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--main_process_port", "0", "--num_processes")


@dataclass
class Ended:
    """How a launch ended."""

    code: int
    output: str
    """of all ranks, stdout and stderr together"""


def torchrun(*program: Any, ranks: int = 2, fresh: bool = False, **environment: str) -> Ended:
    """Runs `program` through torchrun."""
    return run(*TORCHRUN, ranks, *program, fresh=fresh, **environment)


def accelerate_launch(*program: Any, ranks: int = 2, fresh: bool = False, **environment: str) -> Ended:
    """Runs `program` through accelerate, on CPU processes."""
    return run(*ACCELERATE, ranks, *program, fresh=fresh, **environment)


def run(*arguments: Any, fresh: bool = False, **environment: str) -> Ended:
    """Runs Python with these arguments from the repository's root; kills it after PATIENCE.

    Args:
        fresh: in an interpreter of its own, which imports everything; else in a process that is forked from the server, as
            are the ranks that it launches.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    start = _interpret if fresh else _fork
    return Ended(*start(tuple(map(str, arguments)), inherited | QUIET | environment))


def _interpret(arguments: tuple[str, ...], environment: dict[str, str]) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
    )
    return done.returncode, done.stdout


def _fork(arguments: tuple[str, ...], environment: dict[str, str]) -> tuple[int, str]:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "output"
        process = fork(play, (arguments, environment, ROOT, log), " ".join(arguments[:3]), daemon=False)
        try:
            with polling:
                process.join(PATIENCE)
            if process.exitcode is None:
                raise subprocess.TimeoutExpired(arguments, PATIENCE, log.read_bytes())
            return process.exitcode, log.read_text(errors="replace")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid or 0, signal.SIGKILL)  # ranks end with it
