"""Memory and processor time of a process and all its descendants, sampled from /proc while they run.

Memory is the sum of PSS (proportional set size): a page that n processes share counts 1/n in each, so that the sum is what the
tree takes of the machine. Processor time of a process counts once its parent has waited for it.
"""

import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SAMPLE_SECONDS = 0.25
"""A sample reads smaps_rollup of each process: 2 to 10 ms for one that holds 2 GiB. Steps of training take seconds."""
MOST_SHARE = 0.02
"""The share of a core's time that sampling may take: one sample of the sixty processes of the tests lasts a third of a second."""


@dataclass
class Measured:
    """What a command took."""

    code: int
    lines: list[str]
    """each line that it printed, stdout and stderr together"""
    wall_seconds: float
    cpu_seconds: float
    """user and system, of all processes"""
    peak_pss_bytes: int
    peak_processes: Mapping[str, int]
    """what was running at the peak: command -> PSS in bytes"""


def measure(command: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> Measured:
    """Runs a command to its end, sampling its tree."""
    before, began = _children_cpu(), time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    sampler = _Sampler(process.pid)
    sampler.start()
    assert process.stdout is not None
    lines = process.stdout.read().splitlines()
    code = process.wait()
    wall = time.monotonic() - began
    sampler.stop()
    return Measured(code, lines, wall, _children_cpu() - before, sampler.peak, sampler.processes)


def descendants(root: int) -> list[int]:
    """A process and all that come from it, as far as their parents live."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                # The name in parentheses may hold spaces: what follows the last one is state, parent, ...
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended
                continue
            children.setdefault(parent, []).append(int(folder.name))
    processes = [root]
    for process in processes:
        processes += children.get(process, [])
    return processes


def pss_bytes(process: int) -> int:
    """Proportional set size; 0 of a process that has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def _command(process: int) -> str:
    try:
        words = Path(f"/proc/{process}/cmdline").read_text().split("\0")
    except OSError:
        words = []
    return f"{process} {' '.join(words)[:100]}"


def _children_cpu() -> float:
    times = os.times()
    return times.children_user + times.children_system


class _Sampler(threading.Thread):
    """Keeps the largest sum of PSS over a tree."""

    def __init__(self, root: int) -> None:
        super().__init__(daemon=True)
        self._root = root
        self._ended = threading.Event()
        self.peak = 0
        self.processes: dict[str, int] = {}

    def run(self) -> None:
        pause = SAMPLE_SECONDS
        while not self._ended.wait(pause):
            begin = time.monotonic()
            pss = {process: pss_bytes(process) for process in descendants(self._root)}
            if sum(pss.values()) > self.peak:
                self.peak = sum(pss.values())
                self.processes = {_command(process): size for process, size in pss.items()}
            pause = max(SAMPLE_SECONDS, (time.monotonic() - begin) / MOST_SHARE)

    def stop(self) -> None:
        """Waits for the last sample."""
        self._ended.set()
        self.join()
