"""Runs that launchers start again after a fault end by themselves with the result of an undisturbed one: torchrun, accelerate
launch, and two nodes, played by two launchers on this machine, of which one is killed.

RESTARTABLE is what restarts need: by default, launchers keep one store for all starts, and ranks that are started again find
in it the addresses of those that have gone (seen: gloo's connectFullMesh times out). accelerate's default rendezvous
(static) always does so; with c10d, and the variable set, each start has a store of its own.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.worlds.faults.faulty_run import STEPS, Fault, Settings
from tests.worlds.faults.run_ledger import faults_met, lost_or_repeated, starts, wrong_result, wrong_steps
from tests.worlds.launched import ROOT, Ended, run
from tests.worlds.patience import PATIENCE, wait_until

pytestmark = pytest.mark.processes

RESTARTABLE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
TORCHRUN = ("-m", "torch.distributed.run", "--monitor-interval", 0.2)
ACCELERATE = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", 2, "--monitor_interval", 0.2)
C10D = ("--rdzv_backend", "c10d", "--rdzv_conf", "store_type=file")
"""Of accelerate on one machine; without a file it would be port 29400, whoever uses it."""
FAULT_STEP = 6
KILLED = r"exitcode: -9|Connection (closed|reset) by peer"
"""What a launcher says of a rank that was killed, or of the one that lost its connection by it: whichever it sees end first."""


def assert_complete(output_dir: Path, ranks: list[int]) -> None:
    """A complete run of starts on so many ranks each, which has lost nothing by them."""
    run_starts = starts(output_dir)
    assert [start.ranks for start in run_starts] == ranks
    assert [wrong for start in run_starts for wrong in wrong_steps(start)] == []
    assert wrong_result(output_dir) == []
    assert lost_or_repeated(run_starts) == 0
    assert run_starts[-1].steps[-1] == STEPS


# One node


@pytest.mark.parametrize(
    ("launcher", "action", "message"),
    [
        ((*TORCHRUN, "--standalone", "--nproc-per-node", 2, "--max-restarts", 2), "kill", KILLED),
        pytest.param(
            (*ACCELERATE, *C10D, "--max_restarts", 2),
            "sleep",
            r"everyone waits for rank 1 \(",
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["torchrun, a rank is killed", "accelerate launch, a rank stalls"],
)
def test_a_launcher_that_restarts_ends_with_the_same_result(launcher, action, message, tmp_path):
    settings = Settings(str(tmp_path), (Fault(action, 1, "forward", FAULT_STEP),))
    ended = run(*launcher, "tests/worlds/faults/faulty_run.py", settings.to_json(), **RESTARTABLE)
    assert ended.code == 0, ended.output
    assert [fault["met in"] for fault in faults_met(tmp_path)] == [FAULT_STEP]
    assert_complete(tmp_path, [2, 2])
    before, after = starts(tmp_path)
    assert 0 < after.resumed <= before.last
    assert re.search(message, ended.output)


# Two nodes


class Node:
    """A launcher with one rank, which can be lost with all that runs on it."""

    def __init__(self, meeting: tuple[Any, ...], settings: Settings, log: Path) -> None:
        quiet = {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)} | RESTARTABLE
        command = [sys.executable, *TORCHRUN, *meeting, "tests/worlds/faults/faulty_run.py", settings.to_json()]
        self.log = log
        with log.open("a") as file:
            self.process = subprocess.Popen(
                list(map(str, command)), cwd=ROOT, env=os.environ | quiet, stdout=file, stderr=subprocess.STDOUT
            )

    def lose(self) -> None:
        """End both as when a machine fails: launcher and rank are gone at once."""
        pid = self.process.pid
        ranks = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        for process in (pid, *ranks):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()

    def ended(self) -> Ended:
        code = self.process.wait(PATIENCE)
        return Ended(code, self.log.read_text())


def has_ended(node: Node) -> bool:
    return node.process.poll() is not None


KEEP_ALIVE = "join_timeout=60,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
"""How quickly a lost node is noticed, and how long a start waits for more nodes than it needs."""


def rendezvous(port: int, nodes: str, host: bool) -> tuple[Any, ...]:
    """Return the rendezvous of nodes on this machine. The one that holds the store (`host`) must live: the others meet there."""
    return (
        *("--nnodes", nodes, "--nproc-per-node", 1, "--max-restarts", 3),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "restarts"),
        *("--rdzv-conf", f"is_host={int(host)},{KEEP_ALIVE}"),
    )


@contextlib.contextmanager
def lost_at_the_fault(nodes: str, folder: Path) -> Iterator[tuple[Node, Callable[[], Node]]]:
    """Two nodes have begun; the second is lost in the middle of a step. Gives the first, and what starts the second again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    settings = Settings(str(folder / "run"))
    stops = Settings(settings.output_dir, tuple(Fault("stop", rank, "forward", FAULT_STEP) for rank in range(2)))
    started = [
        Node(rendezvous(port, nodes, host=True), settings, folder / "first.log"),
        Node(rendezvous(port, nodes, host=False), stops, folder / "second.log"),
    ]

    def again() -> Node:
        started.append(Node(rendezvous(port, nodes, host=False), settings, folder / "second again.log"))
        return started[-1]

    try:
        assert wait_until(lambda: faults_met(folder / "run") != [] or any(map(has_ended, started)))
        for node in started:
            assert not has_ended(node), node.log.read_text()
        started[1].lose()
        yield started[0], again
    finally:
        for node in started:
            if not has_ended(node):
                node.lose()


@pytest.mark.nightly
def test_a_node_that_is_lost_and_comes_back(tmp_path):
    with lost_at_the_fault("2", tmp_path) as (first, again):
        ends = [node.ended() for node in (first, again())]
    for end in ends:
        assert end.code == 0, end.output
    assert_complete(tmp_path / "run", [2, 2])


@pytest.mark.nightly
def test_a_node_that_is_lost_for_good_where_one_is_enough(tmp_path):
    with lost_at_the_fault("1:2", tmp_path) as (first, _):
        end = first.ended()
    assert end.code == 0, end.output
    assert_complete(tmp_path / "run", [2, 1])
