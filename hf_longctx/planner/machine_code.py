"""Keeps what numba compiles: machine code that notices a change in any file, and that ranks of one machine compile once.

numba keeps machine code beside each file, or in NUMBA_CACHE_DIR, and compiles anew when that file's time or size changes. A
function that calls one of another file keeps the old one inside, though: after an update that touches placing/rank_shares.py
alone, ranks with and without such a cache would plan differently. So all files of planner/ count for each function.

Ranks that start together would all compile the same. A file lock beside the machine code lets one compile all that its plan
needs; the others wait, and read what it has written. The system frees the lock when its holder ends, however it ends. Where no
folder can be written to, or a file system has no locks, each rank compiles for itself. The threads of a process hold the lock
together: the last one that plans releases it.

Nothing is sent.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import pickle
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache, NullCache
from numba.core.types import unliteral

from hf_longctx.planner.by_address import take_as_address
from hf_longctx.planner.compiled import passed_by_address

SETTINGS = {"OPT": 1, "LOOP_VECTORIZE": 0}
"""numba's settings where no variable NUMBA_... names others: LLVM's level of optimization, and vectors for loops. Compiling all
took 72 to 82 s of an EPYC's core at level 1, and 113 at numba's own, 3; without vectors, it takes 7 % less. Plans take as long
with either, and many times as long at level 0. They count for all that the process compiles."""
for _name, _value in SETTINGS.items():
    if f"NUMBA_{_name}" not in os.environ:
        setattr(numba.config, _name, type(getattr(numba.config, _name))(_value))

LOCK = "hf_longctx.lock"
"""Holds the stamp of the sources that the machine code of a whole plan was made of."""
UNREADABLE = (AttributeError, ImportError, EOFError, pickle.UnpicklingError)
"""Errors of reading machine code of other sources, which name classes that are gone, or of a file that was cut short."""
WORTH_A_LINE = 3.0
"""Seconds of compiling below which nothing is announced."""

compiled_here: Counter[str] = Counter()
"""How often this process has compiled each function."""
read_here: Counter[str] = Counter()
"""How often this process has read the machine code of each function from disk."""
_expected: ContextVar[float] = ContextVar("expected", default=0.0)
"""Seconds that compiling is expected to take for what this thread plans."""


def dispatcher(
    function: Callable[..., Any], inlined: bool = False, borrows: bool = False, from_python: bool = True
) -> Any:
    """The compiled form of a function, which is read from disk, or compiled, when it is first called. `from_python`: whether
    Python calls it, not compiled functions alone: what takes its arguments from Python is machine code too."""
    for columns in passed_by_address:
        take_as_address(columns)
    # Without numba's run time (nrt), which counts references, where the function borrows; said of others too, or they would do as
    # the function does that calls them.
    options: dict[str, Any] = {"nogil": True, "inline": "always" if inlined else "never", "_nrt": not borrows}
    options |= {"no_cpython_wrapper": not from_python, "no_cfunc_wrapper": True}
    compiled_form: Any = numba.njit(**options)(function)
    template = compiled_form.get_call_template

    def template_of_kinds(args: tuple[Any, ...], kws: dict[str, Any]) -> Any:
        """Take a constant for its type: numba would compile a function once more for each constant that it is called with."""
        return template(tuple(map(unliteral, args)), {name: unliteral(kind) for name, kind in kws.items()})

    compiled_form.get_call_template = template_of_kinds
    try:
        compiled_form._cache = _OnDisk(function, from_python)
    except RuntimeError:  # numba knows no folder that it can write to
        compiled_form._cache = _Nowhere(function, from_python)
    return compiled_form


class _OnDisk(FunctionCache):
    """Machine code of one function on disk, whose readers wait for the process that compiles it."""

    def __init__(self, function: Any, from_python: bool = True) -> None:
        super().__init__(function)
        self._from_python = from_python
        self._cache_file._source_stamp = _sources(Path(function.__code__.co_filename).parent)

    def load_overload(self, signature: Any, target: Any) -> Any:
        overload = self._read(signature, target)
        if overload is None and _lock.take():  # compiled by another process while this one waited?
            overload = self._read(signature, target)
        if overload is None:
            _compiles(self._py_func)
        return overload

    def _index_key(self, signature: Any, codegen: Any) -> Any:
        return *super()._index_key(signature, codegen), self._from_python

    def _read(self, signature: Any, target: Any) -> Any:
        try:
            overload = super().load_overload(signature, target)
        except OSError:
            return None
        except UNREADABLE:  # numba reads all of an index before it looks which sources it is of
            with contextlib.suppress(OSError):
                self._cache_file.flush()
            return None
        if overload is not None:
            read_here[_full_name(self._py_func)] += 1
        return overload

    def save_overload(self, signature: Any, result: Any) -> None:
        with contextlib.suppress(OSError, *UNREADABLE):  # a full disk: the next process compiles it again
            # numba writes its index before the code: who is ended in between must leave no old code under a new index.
            if not self._cache_file._load_index():
                for path in Path(self.cache_path).glob(f"{glob.escape(Path(self._cache_file._index_name).stem)}.*.nbc"):
                    path.unlink()
            super().save_overload(signature, result)


class _Nowhere(NullCache):
    """Stands where no machine code can be kept."""

    def __init__(self, function: Any, from_python: bool = True) -> None:
        self._function = function

    def load_overload(self, signature: Any, target: Any) -> None:
        _compiles(self._function)


class _Lock:
    """The file lock of this machine's processes."""

    def __init__(self) -> None:
        self._file: int | None = None

    def take(self) -> bool:
        """Wait until no other process holds the lock. Returns whether it has been taken now; not if this process holds it
        already, or if there can be no lock."""
        if self._file is not None or (path := _lock_path()) is None:
            return False
        try:
            import fcntl

            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except (ImportError, OSError):
            self._close()
            return False
        return True

    def release(self, stamp: bool = False) -> None:
        """Let others go on; `stamp`: they find that there is machine code of these sources."""
        if self._file is not None and stamp:
            with contextlib.suppress(OSError):
                os.pwrite(self._file, _stamp(), 0)
        self._close()

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None


_lock = _Lock()


class _Planners:
    """The threads of this process that plan with machine code. One that only looks something up must not release the lock under
    another that still compiles."""

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._threads = 0
        self._whole = self._announced = False

    def enter(self) -> None:
        with self._changing:
            self._threads += 1

    def leave(self, whole: bool) -> None:
        """Release the lock if this was the last thread; `whole`: it has compiled, or read, all that a plan needs."""
        with self._changing:
            self._threads -= 1
            self._whole |= whole
            if self._threads == 0:
                _lock.release(stamp=self._whole)
                self._whole = False

    def announce(self, seconds: float) -> None:
        """Say that compiling begins, once for all plans of this process."""
        with self._changing:
            announced, self._announced = self._announced, True
        if not announced:
            print(
                "hf_longctx: compiling the planner for a large step, once on this machine: "
                f"about {seconds:.0f} s of a new core, up to three times as long on an old one",
                file=sys.stderr,
                flush=True,
            )


_planners = _Planners()


@contextlib.contextmanager
def compiling(seconds: float, whole: bool = False) -> Iterator[None]:
    """Hold the lock from the first function that is compiled inside until the end; who compiles says so in one line.

    Args:
        seconds: of a core that compiling all of it is expected to take.
        whole: a plan is made inside: if it comes to its end, machine code of all that plans need lies on disk.
    """
    expected, complete = _expected.set(seconds), False
    _planners.enter()
    try:
        yield
        complete = whole
    finally:
        _planners.leave(complete)
        _expected.reset(expected)


def on_disk() -> bool:
    """Whether the machine code of whole plans, made of these sources, lies on this machine's disk."""
    path = _lock_path()
    try:
        return path is not None and path.read_bytes() == _stamp()
    except OSError:
        return False


def _full_name(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _compiles(function: Any) -> None:
    """Count a function that is about to be compiled; announce what takes long."""
    compiled_here[_full_name(function)] += 1
    if _expected.get() >= WORTH_A_LINE:
        _planners.announce(_expected.get())


@cache
def _lock_path() -> Path | None:
    """One file for all folders of sources: locks of several could wait for each other."""
    try:
        folder = Path(FunctionCache(dispatcher).cache_path)
        folder.mkdir(parents=True, exist_ok=True)
    except (RuntimeError, OSError):
        return None
    return folder / LOCK


@cache
def _stamp() -> bytes:
    return hashlib.sha256(repr((numba.__version__, _sources(Path(__file__).parent))).encode()).hexdigest().encode()


@cache
def _sources(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Path, time and size of each file of a folder and of this one, and of the folders in them."""
    files = sorted({path for root in (Path(__file__).parent, folder) for path in root.rglob("*.py")})
    status = ((str(path), path.stat()) for path in files)
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in status)
