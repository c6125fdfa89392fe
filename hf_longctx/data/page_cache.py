"""What of a memory-mapped file comes from disk: the slices that a rank trains on, and not what lies around them.

A kernel that sees a page touched reads ahead, by up to megabytes: good where a file is read through, and most of a long document
where a rank touches a slice of it. So mappings are said to be read at random, which reads single pages, and a slice is
asked for as a whole before it is touched, which reads it in large pieces. It is advice: where the system knows none, reading is
as it was.
"""

import ctypes
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

_madvise: Any = getattr(ctypes.CDLL(None), "madvise", None) if hasattr(mmap, "MADV_WILLNEED") else None
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_arrow_stream(path: str | Path) -> pa.Table:
    """The table of an Arrow stream, mapped into memory to be read at random. Nothing is read but where its batches lie.

    Raises:
        OSError, pa.ArrowInvalid: it cannot be read.
    """
    with open(path, "rb") as file:
        try:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise pa.ArrowInvalid(f"{path} is empty") from error
    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)
    with pa.ipc.open_stream(pa.py_buffer(mapped)) as reader:
        return reader.read_all()


def will_read(part: np.ndarray) -> None:
    """Has the pages of a contiguous array read, without waiting. Of memory that is no file it does nothing."""
    if _madvise is not None and part.nbytes:
        before = part.ctypes.data % mmap.PAGESIZE
        _madvise(part.ctypes.data - before, before + part.nbytes, mmap.MADV_WILLNEED)
