"""Limits what of a memory-mapped file comes from disk: the slices that a rank trains on, and not what lies around them.

A kernel that sees a page touched reads ahead, by up to megabytes: good where a file is read through, and most of a long document
where a rank touches a slice of it. So mappings are said to be read at random, which reads single pages, and a slice is
asked for as a whole before it is touched, which reads it in large pieces. It is advice: where the system knows none, reading is
as it was.

What is written into a mapped file is read from then on, so that a run may say which of its files were changed under it.

A mapped file is not kept open. Python's mmap keeps it so, and a data set has more shards than the 1024 files that a process
may have open by default.
"""

import ctypes
import mmap
import os
import weakref
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

_LIBC: Any = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_FAILED = ctypes.c_void_p(-1).value
_madvise: Any = getattr(_LIBC, "madvise", None) if hasattr(mmap, "MADV_WILLNEED") else None
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


LOOKED_AT_ONCE = 256
"""Files whose time is asked for at once: a file system on a network may take a millisecond for each."""


class MappedFiles:
    """The files that a data set is mapped from, as they are now. One that another takes the place of stays as it was for those
    who have mapped it; one that is written into changes for them.

    Args:
        dataset: a `datasets.Dataset`; of others nothing is known.
    """

    def __init__(self, dataset: Any) -> None:
        paths = dict.fromkeys(file["filename"] for file in getattr(dataset, "cache_files", ()))
        self._before = {path: _state_of(path) for path in paths}
        self._turns = cycle(self._before)

    def changed(self) -> list[str]:
        """Name files that were written into since then, among the next LOOKED_AT_ONCE; each once."""
        changed = []
        for path in islice(self._turns, min(len(self._before), LOOKED_AT_ONCE)):
            state, before = _state_of(path), self._before[path]
            if state is not None and before is not None and state[0] == before[0] and state != before:
                changed.append(path)
                self._before[path] = state
        return changed


def _state_of(path: str) -> tuple[int, int, int] | None:
    """Return which file there is, its bytes and when it was written; None: it cannot be asked."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


class _Mapping:
    """A file in memory, for as long as something refers to it."""

    def __init__(self, path: str | Path) -> None:
        with open(path, "rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            if not self.size:
                raise pa.ArrowInvalid(f"{path} is empty")
            self.address = _LIBC.mmap(None, self.size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        if self.address == _FAILED:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error), str(path))
        # The end of the process unmaps it anyway, after threads that may still read.
        weakref.finalize(self, _LIBC.munmap, self.address, self.size).atexit = False


def map_arrow_stream(path: str | Path) -> pa.Table:
    """The table of an Arrow stream, mapped into memory to be read at random. Nothing is read but where its batches lie.

    Raises:
        OSError, pa.ArrowInvalid: it cannot be read.
    """
    mapped = _Mapping(path)
    if _madvise is not None:
        _madvise(mapped.address, mapped.size, mmap.MADV_RANDOM)
    with pa.ipc.open_stream(pa.foreign_buffer(mapped.address, mapped.size, mapped)) as reader:
        return reader.read_all()


def will_read(part: np.ndarray) -> None:
    """Has the pages of a contiguous array read, without waiting. Of memory that is no file it does nothing."""
    if _madvise is not None and part.nbytes:
        before = part.ctypes.data % mmap.PAGESIZE
        _madvise(part.ctypes.data - before, before + part.nbytes, mmap.MADV_WILLNEED)
