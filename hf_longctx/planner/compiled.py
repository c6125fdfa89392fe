"""Compiled functions whose cache on disk notices a change in any of them.

numba keeps machine code beside each file and compiles anew when that file's time or size changes. A function that calls
one of another file keeps the old one inside, though: after an update that touches shares.py alone, ranks with and
without such a cache would plan differently. So all files of the folder count for each function.

Nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function of integers and arrays with numba, when it is first called. As it is with NUMBA_DISABLE_JIT=1.

    It runs without Python's lock: a thread that plans ahead does not keep the one that trains waiting.
    """
    found: Any = numba.njit(cache=True, nogil=True)(function)
    if found is not function:
        here, there = Path(__file__).parent, Path(function.__code__.co_filename).parent
        found._cache._cache_file._source_stamp = _sources(here) + (() if there == here else _sources(there))
    return found


@cache
def _sources(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, time and size of each file."""
    status = ((path.name, path.stat()) for path in sorted(folder.glob("*.py")))
    return tuple((name, found.st_mtime_ns, found.st_size) for name, found in status)
