"""Training as ranks of this machine: the command that starts them, starting them, and which of them says what went wrong.

    start_program   a verb of this command line on n ranks, by torch's elastic agent, as torchrun does it
    one_voice       where several ranks fail, the first of them speaks

Verbs that need no agent (nothing to restart, nobody who sends SIGTERM) start their ranks by commands/shared/ranks.py. Sent
between ranks here: one number in the job's store when one of them fails.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shlex
import signal
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import psutil

from hf_longctx.commands.shared.ranks import USER_ERROR, cores, loopback_store

FAILED = "hf_longctx/failed"
"""Name of the number in the store."""
SOON = timedelta(seconds=3)
"""Time in which a store answers, and in which a launcher ends the others of a rank that has failed: torchrun looks ten times a
second."""
LAUNCHER = "LONGCTX_LAUNCHER"
"""Name of the environment's variable with the process that has started this one as a rank."""
PR_SET_PDEATHSIG = 1
"""Number by which Linux's prctl sets the signal that a process gets when its parent ends."""
EMPTY_READS = 100
"""How often an environment that is empty is read, a hundredth of a second apart."""
PORT = 29500
"""The port in commands that are shown, at which the processes of several machines meet."""


def command(config: str, overrides: Sequence[str], ranks: int, nodes: int) -> str:
    """Return what starts a run, on each of its machines the same."""
    arguments = shlex.join(["train", config, *overrides])
    if nodes == 1:
        return f"hf-longctx {arguments}" + (f" --ranks {ranks}" if ranks > 1 else "")
    meet = f"--rdzv-backend c10d --rdzv-endpoint FIRST_NODE:{PORT} --rdzv-id my-run"
    return f"torchrun --nnodes {nodes} --nproc-per-node {ranks // nodes} {meet} -m hf_longctx {arguments}"


def start_program(ranks: int, arguments: Sequence[str]) -> int:
    """Runs `hf-longctx ARGUMENTS` as so many ranks of this machine, and ends them all when one fails. Returns the exit code: 0,
    or that of the rank that failed first (128 + the signal that ended it)."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    os.environ[LAUNCHER] = str(os.getpid())
    store, run_id = loopback_store(), uuid.uuid4().hex
    # Its only agent finds the server of this store at its port, and makes none, which would listen on all interfaces.
    here = {"rdzv_backend": "static", "rdzv_endpoint": f"127.0.0.1:{store.port}", "local_addr": "127.0.0.1"}
    guest: Any = {"rdzv_configs": {"rank": 0}}
    agent: Any = LaunchConfig(1, 1, ranks, run_id=run_id, max_restarts=0, **here, **guest)  # type: ignore[arg-type]
    logging.disable(logging.ERROR)  # the agent's own words about a rank that has said what is wrong
    try:
        elastic_launch(agent, sys.executable)("-m", "hf_longctx", *arguments)
    except ChildFailedError as failed:
        rank, first = failed.get_first_failure()
        if first.exitcode >= 0:
            return first.exitcode
        ended_by = signal.Signals(-first.exitcode)
        hint = ": the machine may be out of memory" if ended_by == signal.SIGKILL else ""
        print(f"rank {rank} was ended by {ended_by.name}{hint}", file=sys.stderr)
        return 128 + ended_by
    except SignalException as signalled:
        return 128 + signalled.sigval
    finally:
        logging.disable(logging.NOTSET)
        _end_ranks(run_id)
        del os.environ[LAUNCHER]
    return 0


def end_with_launcher() -> None:
    """Have this rank get SIGTERM when `start_program`'s process ends, be it by SIGKILL: it saves and leaves, in place of training
    on where nobody sees it. A rank of another launcher is left to that."""
    if os.environ.get(LAUNCHER) == str(os.getppid()) and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _end_ranks(run_id: str) -> None:
    """End ranks that the agent has left behind: a second Ctrl-C ends it while it waits for them. Each leads a process group."""
    for process in psutil.Process().children():
        with suppress(ProcessLookupError, psutil.Error):
            if _environment(process).get("TORCHELASTIC_RUN_ID") == run_id:
                os.killpg(process.pid, signal.SIGKILL)


def _environment(process: psutil.Process) -> dict[str, str]:
    """Return a process's environment, read again while it is empty: it is for a moment when the process's program begins."""
    for _ in range(EMPTY_READS):
        if (environment := process.environ()) or process.status() == psutil.STATUS_ZOMBIE:
            return environment
        time.sleep(0.01)
    return {}


@contextmanager
def one_voice() -> Iterator[None]:
    """Lets an error through on the rank that failed first; most of the others fail because it did, or as it did, and end
    without a word."""
    try:
        yield
    except Exception as error:
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            raise
        sys.last_value = error  # at exit, a rank waits for the others unless it has failed (attention/exchange.py)
        if _failed_first():
            raise
        raise SystemExit(USER_ERROR) from None


def _failed_first() -> bool:
    """Whether this rank failed first, and so speaks. Where neither the launcher nor the ranks have a store, the first process of
    each machine speaks, and others do if they are alive a little later: a launcher ends them soon after one that has failed."""
    import torch.distributed as dist

    from hf_longctx.supervision.watchdog import launcher_job

    with suppress(RuntimeError):  # the launcher is gone
        if (job := launcher_job(SOON)) is not None:
            return job.store.add(FAILED, 1) == 1
    if not dist.is_initialized():
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(SOON.total_seconds())
        return True
    with suppress(RuntimeError):  # the store went with the rank that kept it, which has spoken
        return dist.distributed_c10d._get_default_store().add(FAILED, 1) == 1
    return False
