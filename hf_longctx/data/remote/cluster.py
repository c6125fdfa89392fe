"""The Ray that a run uses: one of its own on the loopback interface, or one that is joined by its address.

The first process of a run calls `connect(None)` and passes the address that it gets to all others, which call
`connect(address)`. Nothing but the loopback interface listens; there is no dashboard, and no usage statistics are sent.

A Ray that was started so ends with the process that started it, and a process that is still joined by then and holds an
object of Ray's is ended on the spot, with an error. So the first process, unless it fails, waits for the others to leave.

Ray takes the address that faces the network for its own, even where it is told to use 127.0.0.1, unless it is made to act
as on a laptop (its setting RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0). Where that has no effect, nothing is left running.
"""

import atexit
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import ray
from ray._private import ray_constants, state, worker
from ray.exceptions import RayError, RayTaskError

LOOPBACK = "127.0.0.1"
STORE_BYTES = 1 << 30
"""Object store of a Ray that is started here, if not set: 8 bytes per token, so three steps of 44 million tokens."""
FREE_MILLISECONDS = 50
"""After which memory of objects that nobody needs is free again. Ray's own 1000 keeps parts of steps that are trained."""
LEAVE_SECONDS = 120.0
"""How long the process that started Ray waits for others: they may still write a checkpoint."""
POLL_SECONDS = 0.1
JOIN_SECONDS = 5.0
"""How long the machine at an address may take to answer."""
SETTINGS_FRAME = b"\0\0\0\x04\0\0\0\0\0"
"""Length, type, flags and stream of a frame of HTTP/2: settings, none of them."""
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SETTINGS_FRAME


STARTS = 5
"""Times that a Ray is started whose processes do not come up in time."""
LATE = "timed out during startup"
"""Ray's words for that (2.60)."""


class RemoteError(RuntimeError):
    """Ray cannot be joined, or does not give what was asked for; says what died."""


def _start(store_bytes: int) -> None:
    """Starts a Ray on this machine alone. Its processes have 30 seconds to come up, too few on a busy machine. Actors are as
    nice as their trainers: with Ray's own 15 they would get a thirtieth of a core that a rank computes on, and come late.

    Raises:
        RuntimeError: they did not, STARTS times.
    """
    for _ in range(STARTS):
        try:
            ray.init(
                address="local",
                num_cpus=1,  # actors here reserve none
                num_gpus=0,
                include_dashboard=False,
                object_store_memory=store_bytes,
                _system_config={"free_objects_period_milliseconds": FREE_MILLISECONDS, "worker_niceness": 0},
                log_to_driver=False,
                logging_level=logging.WARNING,
            )
            return
        except Exception as error:  # Ray raises no type of its own here
            if LATE not in str(error):
                raise
    raise RuntimeError(f"its processes {LATE} in {STARTS} tries. Valid: loader='local'")


def connect(address: str | None = None, store_bytes: int = STORE_BYTES) -> str:
    """Starts a Ray, or joins one; returns the address by which other processes join it.

    Args:
        address: "host:port" of a running Ray; None: start one for this run, on this machine alone.
        store_bytes: size of the object store of a Ray that is started. Memory is taken when it is used.

    Raises:
        RemoteError: nothing answers at the address, or this process has joined another Ray already.
        ValueError: the address is not of the form host:port.
    """
    if ray.is_initialized():
        joined = _address()
        if address not in (None, joined):
            raise RemoteError(f"this process has joined the Ray at {joined} already, and cannot join {address} as well")
        return joined
    if address is not None:
        _refuse_unreachable(address)
    if address is None or _is_loopback(address):
        _stay_on_loopback()
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # read by what Ray starts
    try:
        with _own_signals():
            if address is None:
                _start(store_bytes)
            else:
                _bring_token()
                ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, RuntimeError, ValueError, RayError) as error:
        what = "no Ray could be started" if address is None else f"the Ray at {address} could not be joined"
        raise RemoteError(f"{what}: {error}") from error
    if address is None and not _is_loopback(_address()):
        listening = _address()
        disconnect()
        raise RemoteError(
            f"Ray {ray.__version__} listens at {listening}, not on the loopback interface alone. Valid: start Ray yourself, and "
            "give its address"
        )
    if address is None:
        atexit.register(disconnect)  # before Ray's own, which waits for nobody
    return _address()


def disconnect() -> None:
    """Leaves Ray; what `connect(None)` started in this process ends, once others have left it or LEAVE_SECONDS are over."""
    failed = getattr(sys, "last_value", None) is not None  # set where an exception ends the process
    deadline = time.monotonic() + LEAVE_SECONDS
    while not failed and _started_here() and _others() and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    ray.shutdown()


def _started_here() -> bool:
    return worker._global_node is not None and worker._global_node.is_head()


def _others() -> list[int]:
    """Processes that have joined, without this one."""
    return [job["DriverPid"] for job in state.jobs() if not job["IsDead"] and job["DriverPid"] != os.getpid()]


def total_store_bytes() -> int:
    """Sum up the object stores of all nodes together."""
    return int(ray.cluster_resources().get("object_store_memory", 0))


def cause_of(error: RayError) -> Exception:
    """Return what was raised in an actor or a task, however often it has been passed on; else Ray's own error."""
    cause: Exception = error
    while isinstance(cause, RayTaskError) and isinstance(cause.cause, Exception):
        cause = cause.cause
    return cause


def _address() -> str:
    return ray.get_runtime_context().gcs_address


def _is_loopback(address: str) -> bool:
    return address.rpartition(":")[0] in (LOOPBACK, "localhost")


def _stay_on_loopback() -> None:
    """Make Ray take 127.0.0.1 for this machine's address, in this process and in those that it starts."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray_constants.ENABLE_RAY_CLUSTER = False  # read from there when Ray was imported


def _bring_token() -> None:
    """Read the token that Ray asks for, which lies in the user's home.

    Processes bring it by themselves only where their parent has started Ray.
    """
    with suppress(ImportError):  # before Ray 2.5x there is none
        from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


@contextmanager
def _own_signals() -> Iterator[None]:
    """Restore this process's handler of SIGTERM, which saves a checkpoint first: Ray sets its own."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _refuse_unreachable(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"the address of a Ray is host:port, such as 10.0.0.1:6379, got {address!r}")
    try:
        with socket.create_connection((host, int(port)), timeout=JOIN_SECONDS) as connection:
            _greet(connection)
    except (OSError, OverflowError) as error:
        raise RemoteError(
            f"no Ray answers at {address}: {error}. Valid: the address that `ray start --head` prints, or none, to start a Ray "
            "for this run"
        ) from error


def _greet(connection: socket.socket) -> None:
    """Raise OSError unless a gRPC server is at the other end, as Ray's is: each side of HTTP/2 begins with a frame of settings.
    Ray itself knocks at any other server for minutes, without a word of why. Under TLS, nothing is asked."""
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return
    connection.settimeout(JOIN_SECONDS)
    connection.sendall(HTTP2_PREFACE)
    answer = b""
    while len(answer) < len(SETTINGS_FRAME):
        part = connection.recv(len(SETTINGS_FRAME) - len(answer))
        if not part:
            break
        answer += part
    if answer[3:4] != SETTINGS_FRAME[3:4] or len(answer) < len(SETTINGS_FRAME):
        raise ConnectionError(f"what listens there is no gRPC server, it says {answer!r}")
