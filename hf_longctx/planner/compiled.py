"""Functions of integers and arrays with one source and two ways to run: interpreted at once, or compiled by numba.

Compiling all that a plan needs takes half a minute of a core, three times as long of an old one; reading it back from disk takes
half a second, importing numba a quarter of one. Interpreted code needs none of that, and is 30 to 100 times as slow. So whoever
plans says how long the work takes when it is interpreted, and that decides:

    with planning(seconds):          few seconds: interpreted; many, or many in all plans of this process: compiled
        place_in_blocks(...)         called from ordinary Python: runs as was decided
            smallest_group(...)      called from a compiled function: runs the same way, and pays nothing for the choice

    9 documents on 2 ranks       0.02 s of a core interpreted      40 s to compile, then under 0.001 s
    1,000 on 64                  0.06 (async) to 0.5 (lockstep)    40 s, then 0.01
    100,000 on 16,384            minutes                           40 s, then 0.03

`compiled(f)` stands for functions with the code of f. They see the globals of f's module, but in the place of other compiled
functions stand their interpreted forms, or their compiled ones.

Both compute the same integers. Compiled ones have 64 bits and wrap around, Python's never do: so interpreted code works on
numpy's 64-bit integers, which wrap around too, unless whoever plans knows that all numbers are so small that nothing can reach
2^63 (SMALL); then it works on Python's, which are five times as fast (`listed`). Dividing by zero raises ZeroDivisionError
either way.

Nothing is sent.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cached_property
from types import FunctionType
from typing import Any, TypeVar

import numpy as np

LONGEST_INTERPRETED = 4.0
"""Seconds of a core up to which a plan is interpreted, estimated before and counted meanwhile: what then turns out to take longer
begins again, compiled. A tenth of what compiling takes, or less."""
PATIENCE = 20.0
"""Seconds of a process's interpreted plans after which further ones are compiled, which takes twice as long, or more: at worst, a
run pays half as much again as if it had known how many plans it was going to make."""
PATIENCE_ON_DISK = 3.0
"""The same where the machine code lies on disk: importing numba and reading it take 0.7 s, and memory that is not given back."""
SMALL = 2**50
"""Nanoseconds of all work together below which Python's integers are used. The planner multiplies times by a thousand (speeds in
per mille), or by 16 (the largest target), or by 32 (chunks), and not by two of them: 2^60 at most."""
PER_ENTRY = 1e-6
"""Seconds of a core, interpreted, for each entry of the arrays of a call outside `planning`: for the work of 20,000 documents,
each with its ranks, 0.7e-6 were measured on a Xeon."""
MANY_CALLS = 64
"""Calls of remembered functions after which an interpreted plan looks at the time: a look takes as long as a call whose result is
known, 0.7e-6 s on a Xeon, and the slowest of those that compute, on thousands of ranks, tens of milliseconds."""

T = TypeVar("T")

passed_by_address: list[type] = []
"""Classes of `by_address`."""
_lock = threading.RLock()
_forms: dict[tuple[str, str], dict[str, Any]] = {}
"""(form, module) -> the globals that functions of this form see."""
_interprets: ContextVar[bool | None] = ContextVar("interprets", default=None)
_small: ContextVar[bool] = ContextVar("small", default=False)
_deadline: ContextVar[float] = ContextVar("deadline", default=math.inf)
"""Value of time.thread_time() at which what can begin again gives up."""
_results: ContextVar[_Results | None] = ContextVar("results", default=None)
_spent = 0.0
"""Seconds of interpreted plans so far."""
_compiles = False
"""Whether this process has spent so long that all further plans are compiled."""


class _TakesTooLong(BaseException):
    """Ends an interpreted plan that begins again, compiled. No error: nothing on the way should handle it."""


class Compiled:
    """A function that runs interpreted or compiled; see the module's docstring."""

    def __init__(self, function: Callable[..., Any], interpreted: Callable[..., Any] | None = None) -> None:
        self.function = function
        self._interpreted = interpreted
        self._remembers = False
        self._inlined = self._borrows = False
        self.__name__, self.__qualname__ = function.__name__, function.__qualname__
        self.__module__, self.__doc__ = function.__module__, function.__doc__

    @cached_property
    def interpreted(self) -> Callable[..., Any]:
        """The form that calls interpreted forms."""
        form = self._interpreted or _form(self.function, "interpreted")
        return _remembering(form) if self._remembers else form

    @cached_property
    def dispatcher(self) -> Any:
        """The form that calls inner forms: a dispatcher of numba's, which compiles it for each new kind of arguments."""
        return self._dispatcher(from_python=True)

    @cached_property
    def inner(self) -> Any:
        """The same for calls of compiled forms, which needs no code that takes arguments from Python: without that, compiling all
        takes a tenth less."""
        return self._dispatcher(from_python=False)

    def _dispatcher(self, from_python: bool) -> Any:
        from hf_longctx.planner.machine_code import dispatcher

        return dispatcher(_form(self.function, "inner"), self._inlined, self._borrows, from_python)

    def __call__(self, *arguments: Any) -> Any:
        interprets = _interprets.get()
        if interprets is None:
            with planning(math.inf if self._has_machine_code() else PER_ENTRY * sum(map(_entries, arguments))):
                return self(*arguments)
        if not interprets:
            return self.dispatcher(*arguments)
        _end_if_too_long()
        argument = _plain if _small.get() else _wrapping
        with np.errstate(all="ignore", divide="raise"):
            try:
                return _result(self.interpreted(*map(argument, arguments)))
            except FloatingPointError as error:
                raise ZeroDivisionError("division by zero") from error

    def _has_machine_code(self) -> bool:
        """Whether this process has compiled this function, or read it from disk."""
        dispatcher = vars(self).get("dispatcher")
        return dispatcher is not None and bool(dispatcher.signatures)


def compiled(function: Callable[..., Any]) -> Any:
    """Let a function of integers and arrays run interpreted or compiled. Compiled, it runs without Python's lock: a thread that
    plans ahead does not keep the one that trains waiting. With NUMBA_DISABLE_JIT=1 all are always interpreted."""
    return Compiled(function)


def inlined(function: Compiled) -> Compiled:
    """Let a compiled function be copied to where it is called: a call that passes many arrays counts their references, which may
    take longer than what it does."""
    function._inlined = True
    return function


def borrowing(function: Compiled) -> Compiled:
    """Let a compiled function count no references to arrays. It makes none, neither returns one nor is returned one, and calls no
    methods of theirs and no functions of numpy for them; compiled functions that it calls may make their own. Counting took three
    quarters of the time of rounds, whose functions pass a dozen arrays."""
    function._borrows = True
    return function


def by_address(columns: type[T]) -> type[T]:
    """Let compiled functions pass named tuples of this class on as one address; see by_address.py. They read fields only."""
    passed_by_address.append(columns)
    return columns


def remembered(function: Compiled) -> Compiled:
    """Let a compiled function, when it runs interpreted, keep its results until the end of `planning`. It depends on nothing but
    its arguments; all but the last are numbers, and the last is one object for the whole plan."""
    function._remembers = True
    return function


class _Results(dict[Any, Any]):
    """(function, arguments) -> result, of one plan."""

    calls = 0
    """How often remembered functions were called."""


def _remembering(function: Callable[..., Any]) -> Callable[..., Any]:
    def remembering(*arguments: Any) -> Any:
        results = _results.get()
        assert results is not None, "interpreted functions run inside `planning`"
        results.calls = calls = results.calls + 1
        if calls % MANY_CALLS == 0:  # one call from Python may be all of the plan
            _end_if_too_long()
        key = (function, arguments[:-1], id(arguments[-1]))
        result = results.get(key)
        if result is None:
            result = results[key] = function(*arguments)
            results[key[-1]] = arguments[-1]  # nothing else gets its id meanwhile
        return result

    return remembering


def _end_if_too_long() -> None:
    """Raises _TakesTooLong after the deadline of an interpreted plan."""
    if time.thread_time() > _deadline.get():
        raise _TakesTooLong


@contextlib.contextmanager
def planning(seconds: float, compiling: float = 0.0, largest: float = math.inf, whole: bool = False) -> Iterator[None]:
    """Run all compiled functions that this thread calls inside in one way. Inside another `planning`, that one's choice stays.

    Args:
        seconds: of a core that they take when they are interpreted, estimated: this decides.
        compiling: seconds of a core that compiling them takes, for the line that announces it.
        largest: no time that they compute with exceeds so many nanoseconds; see SMALL.
        whole: they make a whole plan, after which other processes find machine code of all that plans need.
    """
    global _spent
    if _interprets.get() is not None:
        yield
        return
    interprets = _disabled() or (seconds <= LONGEST_INTERPRETED and _patient())
    choice, small, results = _interprets.set(interprets), _small.set(largest < SMALL), _results.set(_Results())
    begin = time.thread_time()
    try:
        with contextlib.nullcontext() if interprets else _compiling(compiling, whole):
            yield
    finally:
        _interprets.reset(choice)
        _small.reset(small)
        _results.reset(results)
        if interprets:
            _spent += time.thread_time() - begin


def planned(work: Callable[[], T], seconds: float, compiling: float, largest: float) -> T:
    """The result of `work`, which has no effects, run inside `planning`; begun again if it takes too long interpreted."""
    if _interprets.get() is not None:
        return work()
    try:
        with planning(seconds, compiling, largest, whole=True):
            deadline = _deadline.set(math.inf if _disabled() else time.thread_time() + LONGEST_INTERPRETED)
            try:
                return work()
            finally:
                _deadline.reset(deadline)
    except _TakesTooLong:
        with planning(math.inf, compiling, largest, whole=True):
            return work()


def _compiling(seconds: float, whole: bool) -> contextlib.AbstractContextManager[None]:
    from hf_longctx.planner.machine_code import compiling

    return compiling(seconds, whole)


def _patient() -> bool:
    """Whether this process has not yet spent so long interpreting that compiling is worth its while."""
    global _compiles
    if _spent <= PATIENCE_ON_DISK:
        return True
    if not _compiles:
        from hf_longctx.planner.machine_code import on_disk

        _compiles = _spent > PATIENCE or on_disk()
    return not _compiles


def uses_machine_code() -> bool:
    """Whether this process has compiled anything, or read it from disk."""
    return "hf_longctx.planner.machine_code" in sys.modules


def _disabled() -> bool:
    """Whether numba is told to compile nothing."""
    return os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0")


def _form(function: Callable[..., Any], form: str) -> Any:
    """A function with the same code, in whose globals `form` of each compiled function stands for it."""
    assert isinstance(function, FunctionType)
    assert function.__closure__ is None, "compiled functions stand in a module"
    copy = FunctionType(
        function.__code__, _globals(function.__globals__, form), function.__name__, function.__defaults__
    )
    copy.__qualname__, copy.__kwdefaults__ = function.__qualname__, function.__kwdefaults__
    return copy


def _globals(module: dict[str, Any], form: str) -> dict[str, Any]:
    """Globals of a module's functions in this form: made when the first of them is called, so that all are defined."""
    with _lock:
        key = (form, module["__name__"])
        if key not in _forms:
            _forms[key] = {}
            _forms[key] |= {
                name: getattr(value, form) if isinstance(value, Compiled) else value for name, value in module.items()
            }
        return _forms[key]


def _entries(argument: Any) -> int:
    """Entries of an argument's arrays."""
    if isinstance(argument, tuple):
        return sum(map(_entries, argument))
    return argument.size if isinstance(argument, np.ndarray) else 1


def _wrapping(argument: Any) -> Any:
    """Numbers as numpy's integers, which wrap around as compiled ones do."""
    if isinstance(argument, tuple):
        entries = map(_wrapping, argument)
        return type(argument)(*entries) if hasattr(argument, "_fields") else tuple(entries)
    return np.int64(argument) if isinstance(argument, int) and not isinstance(argument, bool) else argument


def _plain(argument: Any) -> Any:
    """Numbers as Python's."""
    return argument.item() if isinstance(argument, np.generic) else argument


def _result(result: Any) -> Any:
    return tuple(map(_plain, result)) if isinstance(result, tuple) else _plain(result)


def _as_list(array: Any) -> Any:
    return array.tolist() if _small.get() and isinstance(array, np.ndarray) else array


def _same(array: np.ndarray) -> np.ndarray:
    return array


listed = inlined(Compiled(_same, interpreted=_as_list))
"""The array itself; interpreted, where numbers are small, a list of Python's. For arrays that are read or written one entry at a
time: what is written into a list does not reach the array, its slices are copies, and it has no arithmetic."""
