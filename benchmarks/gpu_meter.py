"""Time and memory of a call on one device: CUDA events and the allocator's counters; on a CPU, where tests run the same
code, a clock and what torch's allocator gives out (allocated.py)."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from allocated import most_allocated

WARM_UPS = 2
"""Calls before any is timed: the first may compile or choose a kernel, the second runs with memory already reserved."""


class Meter:
    """Measures calls on `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._cuda = device.type == "cuda"

    def seconds(self, call: Callable[[], Any]) -> float:
        """Measure one call, until the device is done."""
        if not self._cuda:
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def medians(self, calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
        """Seconds of each call. Repetitions are interleaved: each round runs every call once, starting with another one
        each time."""
        for call in calls.values():
            for _ in range(WARM_UPS):
                self.seconds(call)
        names = list(calls)
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for repeat in range(repeats):
            first = repeat % len(names) if names else 0
            for name in names[first:] + names[:first]:
                seconds[name].append(self.seconds(calls[name]))
        return {name: statistics.median(times) for name, times in seconds.items()}

    def peak_bytes(self, call: Callable[[], Any]) -> int:
        """The most bytes that a call held at once beyond those held before it."""
        if not self._cuda:
            before = most_allocated(lambda: torch.empty(1))  # of other calls, whose memory was given back unseen
            return most_allocated(call) - before
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
