"""Which tests start processes: those marked `processes`, and no others (`pytest -m "not processes"` is the quick lane)."""

import sys
from multiprocessing.popen_spawn_posix import Popen as Spawned
from typing import Any

STARTS = frozenset({"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn"})
"""Audit events of a process that starts. What multiprocessing spawns raises none, nor does the fork server."""
ASKED_ONCE = ("uname",)
"""By the standard library's `platform`, for a processor's name."""

_unmarked: str | None = None
_refused: list[str] = []


def begin(test: str, marked: bool) -> None:
    """From now on processes belong to this test."""
    global _unmarked
    _unmarked = None if marked else test
    _refused.clear()


def end() -> list[str]:
    """What the test has tried to start although it is not marked, also where the error was caught."""
    global _unmarked
    _unmarked = None
    refused = list(_refused)
    _refused.clear()
    return refused


def refuse_unmarked(what: str) -> None:
    """Raises RuntimeError in a test that is not marked."""
    if _unmarked is not None:
        _refused.append(what)
        raise RuntimeError(f"{_unmarked} starts a process ({what}): mark it with @pytest.mark.processes")


def _audited(event: str, arguments: tuple[Any, ...]) -> None:
    if event in STARTS and _unmarked is not None and arguments[:1] not in [(each,) for each in ASKED_ONCE]:
        refuse_unmarked(f"{event} {arguments[0] if arguments else ''}".strip())


def watch() -> None:
    """Looks at every process that this one starts; cannot be undone."""
    sys.addaudithook(_audited)
    launch = Spawned._launch  # type: ignore[attr-defined]

    def spawn(self: Any, process: Any) -> None:
        refuse_unmarked("multiprocessing, spawn")
        launch(self, process)

    Spawned._launch = spawn  # type: ignore[attr-defined]
