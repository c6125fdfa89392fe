"""The most bytes that torch's CPU allocator has given out at once during a call, whichever thread frees them.

torch's profiler reports what is allocated and freed with the sum of both, but only threads that it follows count, and gloo's
threads free what they have sent. With the allocator's own flag `caffe2_report_cpu_memory_usage` it counts on all threads;
Python has no name for this flag, so it is set where it lies in libc10. Nothing that others allocate is seen: buffers of
gloo, numpy, the interpreter.
"""

import ctypes
import gc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_LIBRARY = Path(torch.__file__).parent / "lib" / "libc10.so"
_FLAG = "FLAGS_caffe2_report_cpu_memory_usage"


def count_on_all_threads() -> None:
    """From now on, for the rest of the process. What was allocated before never counts."""
    ctypes.c_bool.in_dll(ctypes.CDLL(str(_LIBRARY)), _FLAG).value = True


def most_allocated(call: Callable[[], Any]) -> int:
    """The most bytes given out at once while `call()` ran, of those since `count_on_all_threads`."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    return max(_totals(profiled.profiler.kineto_results.experimental_event_tree()))  # type: ignore[union-attr]


def _totals(events: Iterable[Any]) -> list[int]:
    totals, left = [], list(events)
    while left:
        event = left.pop()
        left += event.children
        if event.tag.name == "Allocation":
            totals.append(event.extra_fields.total_allocated)
    return totals
