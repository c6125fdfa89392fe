"""Which tests start processes: those marked `processes`, and no others (`pytest -m "not processes"` is the quick lane)."""

import os
import subprocess
from collections.abc import Callable
from multiprocessing.forkserver import ForkServer
from multiprocessing.popen_forkserver import Popen as Forked
from multiprocessing.popen_spawn_posix import Popen as Spawned
from typing import Any

STARTS: tuple[tuple[Any, str], ...] = (
    (subprocess.Popen, "__init__"),
    (Spawned, "_launch"),
    (Forked, "_launch"),
    (ForkServer, "ensure_running"),
    *((os, name) for name in ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system")),
)
"""What starts a process, and where it is looked up. An audit hook would hear of all of them, and of everything else that Python
does: 2 % of the time of tests."""
ASKED_ONCE = ("uname", "fc-list")
"""By the standard library's `platform`, for a processor's name, and by matplotlib, which keeps what fonts a machine has."""

_unmarked: str | None = None
_refused: list[str] = []


def begin(test: str, marked: bool) -> None:
    """From now on processes belong to this test."""
    global _unmarked
    _unmarked = None if marked else test
    _refused.clear()


def end() -> list[str]:
    """Return what the test has tried to start although it is not marked, also where the error was caught."""
    global _unmarked
    _unmarked = None
    refused = list(_refused)
    _refused.clear()
    return refused


def watch() -> None:
    """Looks at every process that this one starts; cannot be undone."""
    for owner, name in STARTS:
        setattr(owner, name, _watched(getattr(owner, name), f"{getattr(owner, '__qualname__', owner.__name__)}.{name}"))


def _watched(start: Callable[..., Any], what: str) -> Callable[..., Any]:
    def watched(*arguments: Any, **named: Any) -> Any:
        command = named.get("args", arguments[1] if len(arguments) > 1 else "")
        program = command[0] if isinstance(command, list | tuple) else command
        if _unmarked is not None and program not in ASKED_ONCE:
            attempt = f"{what} {command}".strip()
            _refused.append(attempt)
            raise RuntimeError(f"{_unmarked} starts a process ({attempt}): mark it with @pytest.mark.processes")
        return start(*arguments, **named)

    return watched
