"""The Ray that the remote loader starts or joins: whom it listens to, how it is joined and left, and how much it can hold."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from hf_longctx.data.remote import cluster
from hf_longctx.data.remote.client import refuse_small_store
from hf_longctx.data.remote.cluster import RemoteError, connect, disconnect, total_store_bytes
from tests.worlds.patience import PATIENCE

ROOT = Path(__file__).parents[3]
STORE_BYTES = 200 << 20


@pytest.fixture(scope="module", autouse=True)
def address(starts_processes: None) -> Iterator[str]:
    """Return the address of the Ray that all tests here use."""
    handler = signal.getsignal(signal.SIGTERM)
    address = connect(store_bytes=STORE_BYTES)
    assert signal.getsignal(signal.SIGTERM) == handler, "a trainer's own handler stays"
    yield address
    disconnect()


def test_a_store_too_small_for_a_step_is_refused_with_the_arithmetic():
    assert total_store_bytes() == STORE_BYTES
    refuse_small_store(100, 2, 2400)
    with pytest.raises(
        RemoteError,
        match=r"hold 2399 bytes, but .* \(1 \+ 2\) \* 100 tokens \* 8 bytes = 2400\. Valid: stores of >= 2400 bytes, or "
        r"ahead <= 1, or global batches of <= 99 tokens",
    ):
        refuse_small_store(100, 2, 2399)
    with pytest.raises(RemoteError, match=r"Valid: stores of >= 1600 bytes, or global batches of <= 49 tokens"):
        refuse_small_store(100, 1, 799)


def test_only_the_loopback_interface_listens_and_others_join_by_the_address(address):
    assert address.startswith("127.0.0.1:")
    session = ray._private.worker._global_node
    assert session is not None
    pids = {info.process.pid for infos in session.all_processes.values() for info in infos}
    pids |= {int(line.split()[0]) for line in children(pids)}
    listening = [line for line in sockets() if line[0] in pids]
    assert len({pid for pid, _ in listening}) >= 3, "the processes of Ray were found"
    assert {host for _, host in listening} <= {"127.0.0.1"}
    joined = subprocess.run(
        [sys.executable, "-c", f"from hf_longctx.data.remote.cluster import connect; print(connect({address!r}))"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert joined.stdout.strip() == address


def test_the_process_that_started_ray_waits_for_the_others_to_leave():
    """Ray would end one that holds an object on the spot, with an error: here another rank that still saves."""
    connecting = "from hf_longctx.data.remote.cluster import connect; import ray, time; "
    programs = (
        connecting + "print(connect(store_bytes=2**27), flush=True); input()",
        connecting
        + "connect(input()); held = ray.put(b'1' * 10**6); print('joined', flush=True); time.sleep(3); print('saved')",
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    first, other = (subprocess.Popen([sys.executable, "-c", program], **pipes) for program in programs)
    other.stdin.write(first.stdout.readline())
    other.stdin.flush()
    assert other.stdout.readline() == "joined\n"
    first.communicate("go on\n", timeout=PATIENCE)
    assert (first.returncode, other.communicate(timeout=PATIENCE)[0], other.returncode) == (0, "saved\n", 0)


def test_a_ray_that_comes_up_late_is_started_again(monkeypatch):
    begun: list[Any] = []

    def init(**settings: Any) -> None:
        begun.append(settings)
        if len(begun) != 3:
            raise Exception("The current node timed out during startup. This could happen because ...")

    monkeypatch.setattr(cluster.ray, "init", init)
    cluster._start(2**27)
    assert len(begun) == 3
    with pytest.raises(
        RuntimeError, match=r"its processes timed out during startup in 5 tries\. Valid: loader='local'"
    ):
        cluster._start(2**27)
    assert len(begun) == 3 + 5


def test_an_address_where_no_ray_is_says_so(address):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
    program = "from hf_longctx.data.remote.cluster import connect; connect({!r})"
    for given, message in (
        (nobody, f"no Ray answers at {nobody}"),
        ("there", "is host:port, such as 10.0.0.1:6379, got 'there'"),
    ):
        command = [sys.executable, "-c", program.format(given)]
        run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        assert run.returncode == 1
        assert message in run.stderr.splitlines()[-1]
    assert connect(address) == connect() == address
    with pytest.raises(RemoteError, match=f"has joined the Ray at {address} already, and cannot join {nobody} as well"):
        connect(nobody)


@pytest.mark.parametrize(
    ("answer", "message"),
    [(b"HTTP/1.1 400 Bad Request\r\n", "no gRPC server, it says b'HTTP/1.1 '"), (None, "timed out")],
)
def test_another_server_at_the_address_is_told_at_once(answer: bytes | None, message: str, monkeypatch):
    """Ray knocks at it for minutes, and ends the process without a word that says why."""
    monkeypatch.setattr(cluster, "JOIN_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            if answer is not None:
                connection.sendall(answer)
            connection.recv(100)
            accepted.append(connection)

        accepted: list[socket.socket] = []
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(RemoteError, match=f"no Ray answers at .*{re.escape(message)}"):
            cluster._refuse_unreachable(f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()
        accepted[0].close()


def test_without_ray_the_error_says_what_to_install():
    program = "import sys; sys.modules['ray'] = None; import hf_longctx.data.remote.cluster"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert "ImportError: the remote loader needs Ray. Valid: pip install 'hf_longctx[ray]'" in run.stderr


def children(parents: set[int]) -> list[str]:
    """Lines of ps that begin with the id of a child of these processes."""
    lines = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [line for line in lines if int(line.split()[1]) in parents]


def sockets() -> list[tuple[int, str]]:
    """(process, host) of every socket of this machine that listens, from /proc."""
    hosts: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":  # listening
                raw = bytes.fromhex(fields[1].split(":")[0])
                words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]
                hosts[fields[9]] = socket.inet_ntoa(words[-1])
    addresses = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("socket:[") and target[8:-1] in hosts:
            addresses.append((int(link.parts[2]), hosts[target[8:-1]]))
    return addresses
