"""Runs parts one after another, each in a process of its own, and writes the page after each.

    records/NAME.json    what a part measured (record.py)
    logs/NAME.log        what it printed
    setting.json         what the folder's records were measured on: a run goes on only with the same
    acceptance.html      the page

A part may take its share of the time that is left, by the weights of the parts that are left: what one does not use goes to
those after it. Parts that have ended, or that are not possible, are not run again; those that failed or ran out of time are,
after those that were never begun. A part that fails or outlasts its time keeps what it has measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from acceptance.catalogue import Part
from acceptance.record import DONE, FAILED, LAST_LINES, NOT_POSSIBLE, OUT_OF_TIME, RUNNING, Record

GRACE = 1.25
"""A part is told its share, and ended after this many times as long."""
START_SECONDS = 30.0
"""Time for a process to import torch and transformers, beside its share: from a cold disk that takes as long."""
LEAST_SECONDS = 20.0
"""A part is not begun with less than this."""

Start = Callable[[Part, float, Path, Path], "Ended"]
"""part, its seconds, its record, its log -> how its process ended"""


@dataclass(frozen=True)
class Ended:
    """How a part's process ended."""

    code: int
    timed_out: bool = False


@dataclass(frozen=True)
class Folder:
    """The folder of an acceptance run."""

    path: Path

    @property
    def page(self) -> Path:
        """The page."""
        return self.path / "acceptance.html"

    def record_path(self, part: Part) -> Path:
        """Path of a part's record."""
        return self.path / "records" / f"{part.name}.json"

    def log_path(self, part: Part) -> Path:
        """Path of what a part printed."""
        return self.path / "logs" / f"{part.name}.log"

    def record(self, part: Part) -> Record | None:
        """A part's record; None if it was not begun."""
        return Record.read(self.record_path(part))

    def claim(self, setting: dict[str, Any]) -> None:
        """Take the folder for a setting, or go on with what it holds.

        Raises:
            ValueError: it holds records of another device or size.
        """
        path = self.path / "setting.json"
        self.path.mkdir(parents=True, exist_ok=True)
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if before != setting:
                raise ValueError(
                    f"{self.path} holds records of {before}, and this run is of {setting}: take another --output"
                )
        path.write_text(json.dumps(setting) + "\n", encoding="utf-8")


def waiting(parts: Sequence[Part], folder: Folder) -> list[Part]:
    """Parts that are to be run: those never begun or interrupted, then those that failed or ran out of time."""
    records = {part.name: folder.record(part) for part in parts}
    status = {name: record.status if record else RUNNING for name, record in records.items()}
    again = [part for part in parts if status[part.name] in (FAILED, OUT_OF_TIME)]
    return [part for part in parts if status[part.name] == RUNNING] + again


def run_parts(
    parts: Sequence[Part],
    folder: Folder,
    device: str,
    seconds: float,
    start: Start,
    write_page: Callable[[], None],
) -> bool:
    """Run what is waiting, until it is done or the time is used up.

    Args:
        seconds: that all of it may take.
        start: runs one part's process (`in_process_of_its_own`).
        write_page: called once before and after each part.

    Returns:
        Whether nothing is left that has not been tried.
    """
    end = time.monotonic() + seconds
    left = waiting(parts, folder)
    write_page()
    while left:
        remaining = end - time.monotonic()
        share = remaining * left[0].weight / sum(part.weight for part in left)
        if remaining < LEAST_SECONDS:
            print(f"the time is used up before {', '.join(part.name for part in left)}: the same command goes on")
            return False
        part = left.pop(0)
        print(f"{part.name}: {part.title}, up to {max(share, LEAST_SECONDS):.0f} s", flush=True)
        record = run_part(part, folder, device, max(share, LEAST_SECONDS), start)
        print(
            f"{part.name}: {record.status}{f', {record.why}' if record.why else ''} ({record.seconds:.0f} s)",
            flush=True,
        )
        write_page()
    return True


def run_part(part: Part, folder: Folder, device: str, seconds: float, start: Start) -> Record:
    """Run one part and keep its record, however it ends."""
    path, log = folder.record_path(part), folder.log_path(part)
    log.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    Record(part.name, device).write(path)
    ended = start(part, seconds, path, log)
    record = Record.read(path) or Record(part.name, device)
    record.seconds = time.monotonic() - begun
    if record.status not in (DONE, NOT_POSSIBLE):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        record.last_lines = lines[-LAST_LINES:]
        record.status = OUT_OF_TIME if ended.timed_out else FAILED
        last_line = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
        record.why = (
            f"ended after {seconds:.0f} s" if ended.timed_out else f"exit status {ended.code}: {last_line.strip()}"
        )
    record.write(path)
    return record


def in_process_of_its_own(command: Callable[[Part, float, Path], Sequence[str]], cuda: bool) -> Start:
    """Give the function that starts a part's command, waits for it as long as it may take, and ends what it started.

    Args:
        command: part, seconds, path of the record -> program and arguments.
        cuda: whether it gets the part's variables, which are of CUDA: a torch built for CPUs refuses to be imported with them.
    """

    def start(part: Part, seconds: float, path: Path, log: Path) -> Ended:
        with log.open("wb") as output:
            process = subprocess.Popen(
                command(part, seconds, path),
                env=os.environ | (part.environment if cuda else {}),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                return Ended(process.wait(GRACE * seconds + START_SECONDS))
            except subprocess.TimeoutExpired:
                return Ended(-signal.SIGKILL, timed_out=True)
            finally:  # also what it started itself, and when this process is told to end
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    return start
