"""Plays the launcher of a few ranks, quickly: ranks are forked from a server that has imported everything, so that a rank
starts in a fifth of a second instead of eight.

Like torchrun's, the launcher holds the store at which ranks meet, or rank 0 holds it (as under mpirun). When a rank fails, it
sends SIGTERM to the others, as torchrun does, or it is patient and lets them find out by themselves. A rank that was stopped
(SIGSTOP) is killed once all others have ended: nothing else can end it.
"""

import contextlib
import os
import signal
import socket
import time
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.worlds.faults.faulty_run import FAULTS, Settings, ledger, train
from tests.worlds.fork_server import end_as_program, fork, polling
from tests.worlds.patience import PATIENCE

HANG = PATIENCE
"""Seconds, after its first fault or without one, in which a start of the program must end: a fault ends a run within
stall_timeout_seconds or join_seconds, and undisturbed it takes a few seconds."""
STACKS = 1.0
"""Seconds that ranks which hang have to write down where."""


@dataclass(frozen=True)
class Signal:
    """A signal that the launcher sends."""

    number: signal.Signals
    ranks: tuple[int, ...]
    after: float
    """seconds from the start"""


@dataclass
class Ending:
    """How a rank ended."""

    code: int
    """exit status; -9: by SIGKILL"""
    time: float
    """of time.monotonic()"""
    output: str
    """stdout and stderr"""


@dataclass
class Launched:
    """How a start of the program ended."""

    endings: list[Ending]
    """[rank]"""
    hung: list[int]
    """ranks that had not ended in time; their output ends with their stacks"""
    sent: dict[int, tuple[int, float]]
    """rank -> the first signal that it was sent, but for those that answer another rank's end, and when (time.monotonic())"""
    told: list[int]
    """ranks that were sent SIGTERM because another one had failed"""


def launch(
    settings: Settings,
    ranks: int,
    logs: Path,
    *,
    signals: tuple[Signal, ...] = (),
    patient: bool = False,
    store_of_rank_0: bool = False,
) -> Launched:
    """Starts the program on `ranks` ranks, disturbs it, and waits for the end of all of them.

    Args:
        logs: a folder to be made, for what ranks print.
        patient: ranks whose peer has failed are left to themselves.
        store_of_rank_0: rank 0 holds the store, instead of the launcher.
    """
    logs.mkdir(parents=True)
    store = None if store_of_rank_0 else dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = _free_port() if store is None else store.port
    environment = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    environment |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": str(store is not None)}
    processes = []
    for rank in range(ranks):
        (logs / f"rank-{rank}.log").touch()
        own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(fork(_rank, (settings, own, logs / f"rank-{rank}.log"), f"rank {rank} of {ranks}"))
    try:
        return _wait(processes, logs, list(signals), patient, ledger(settings.output_dir) / FAULTS)
    finally:
        for process in processes:
            process.kill()


def _wait(processes: list[Any], logs: Path, signals: list[Signal], patient: bool, faults: Path) -> Launched:
    began = time.monotonic()
    faults_before = faults.stat().st_size if faults.exists() else 0
    disturbed: float | None = None
    alive = {process.sentinel: rank for rank, process in enumerate(processes)}
    ended: dict[int, tuple[int, float]] = {}
    sent: dict[int, tuple[int, float]] = {}
    told: list[int] = []
    hung: list[int] = []
    while alive:
        now = time.monotonic()
        for sending in [sending for sending in signals if began + sending.after <= now]:
            signals.remove(sending)
            for rank in set(sending.ranks) & set(alive.values()):
                _send(processes[rank].pid, sending.number)
                sent.setdefault(rank, (sending.number, now))
        if disturbed is None and (sent or (faults.exists() and faults.stat().st_size > faults_before)):
            disturbed = now
        if now > (began if disturbed is None else disturbed) + HANG:
            hung = sorted(alive.values())
            for rank in hung:
                _send(processes[rank].pid, signal.SIGUSR1)
            time.sleep(STACKS)
        if hung or all(_is_stopped(processes[rank].pid) for rank in alive.values()):
            for rank in alive.values():
                processes[rank].kill()
        due = min([sending.after + began for sending in signals], default=now + 0.2)
        for sentinel in wait(list(alive), max(0.0, min(due - now, 0.2))):
            rank = alive.pop(sentinel)
            with polling:
                processes[rank].join()
            ended[rank] = processes[rank].exitcode, time.monotonic()
        if not patient and not told and any(code != 0 for code, _ in ended.values()):
            told = sorted(alive.values())
            for rank in told:
                _send(processes[rank].pid, signal.SIGTERM)
    printed = [(logs / f"rank-{rank}.log").read_bytes().decode(errors="replace") for rank in range(len(processes))]
    endings = [Ending(*ended[rank], printed[rank]) for rank in range(len(processes))]
    return Launched(endings, hung, sent, told)


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _rank(settings: Settings, environment: dict[str, str], log: Path) -> None:
    """The main function of a rank, from its first line to its exit status as a program of its own would have it."""
    end_as_program(lambda: train(settings), environment, log)
