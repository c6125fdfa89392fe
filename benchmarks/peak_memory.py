"""The most memory that a call holds at once, beyond what this process held before: largest resident set (Linux, glibc).

The kernel keeps the largest resident set of a process, and forgets it on request (writing 5 to /proc/self/clear_refs).
While a call is measured, every allocation of MAPPED bytes and more is a mapping of its own, given back when it is
freed: the resident set is then what is allocated. glibc would still take what fits from gaps of a heap that was left
over from before, and keep it: so all gaps of the main heap are reserved meanwhile, untouched. Tensors,
scratch of kernels, and buffers of gloo all count, whoever allocates them. Linux counts pages in batches for each core:
figures are good to half a MiB.
"""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

R = TypeVar("R")

MAPPED = 2**16
"""A tensor of fewer bytes comes from the heap, and counts where it makes the heap grow."""

_LARGEST_GAP = 2**30
"""Bytes of the largest part of the heap that is looked for."""
_IS_MAPPED = 2
"""The bit of glibc's word before an allocation that says that it is a mapping of its own."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_AFTERWARDS = {_MMAP_THRESHOLD: 2**25, _TRIM_THRESHOLD: 2**26}
"""What glibc itself arrives at in a process that frees large tensors: memory is kept for the next one."""


def peak_bytes_of(call: Callable[[], R]) -> tuple[int, R]:
    """The most bytes that `call()` held at once beyond those held before it, and what it returned."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_MMAP_THRESHOLD, MAPPED)
    gc.collect()
    gaps = _take_gaps(libc)
    try:
        libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident("VmRSS")
        returned = call()
        return _resident("VmHWM") - before, returned
    finally:
        for gap in gaps:
            libc.free(gap)
        for option, value in _AFTERWARDS.items():
            libc.mallopt(option, value)


def _take_gaps(libc: Any) -> list[ctypes.c_void_p]:
    """Take all free parts of the heap of MAPPED bytes and more: without them glibc maps what it is asked for."""
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    gaps, size = [], _LARGEST_GAP
    while size >= MAPPED:
        address = libc.malloc(size)
        if address is None:
            size //= 2
            continue
        word_before = ctypes.c_size_t.from_address(address - ctypes.sizeof(ctypes.c_size_t)).value
        if word_before & _IS_MAPPED:
            libc.free(address)
            size //= 2
        else:
            gaps.append(ctypes.c_void_p(address))
    return gaps


def _resident(field: str) -> int:
    """VmRSS, the bytes of this process in memory now, or VmHWM, the most there have been."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))
