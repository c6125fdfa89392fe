"""Planning's inner functions: interpreted and compiled they compute the same integers, also where these wrap around; ranks that
start together compile once; machine code kept on disk is never older than any of the files it was made from."""

import ast
import fcntl
import importlib.util
import itertools
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numba
import numpy as np
import pytest

from hf_longctx.planner import PLANNERS, CostModel, StepPlan, Topology, bound, compiled, machine_code
from hf_longctx.planner.cost.cost_model import COEFFICIENTS, _works, work_of
from hf_longctx.planner.cost.selective_offload import Offload
from hf_longctx.planner.placing import packing
from hf_longctx.planner.plan import COLUMNS
from hf_longctx.planner.stages.causal_chunks import chunked_work
from hf_longctx.planner.stages.stage_order import Schedule, stage_order

ROOT = Path(__file__).parents[2]
COST = CostModel(
    attention_ps=1200,
    linear_ps=60_000_000,
    inside_ps=90_000,
    between_ps=360_000,
    message_ns=8000,
    document_ns=30_000,
    micro_batch_ns=400_000,
    attention_half_tokens=900,
    ranks_per_node=4,
)
LENGTHS = np.random.default_rng(0).permutation(np.geomspace(1, 8 * 512, 40).astype(np.int64))
CALLER = """
from hf_longctx.planner.compiled import compiled
from callee import inner


@compiled
def outer(x):
    return 10 * inner(x)


for form in (outer.dispatcher, inner.dispatcher):
    print(form(1), sum(form.stats.cache_hits.values()))
"""
CALLEE = """
from hf_longctx.planner.compiled import compiled


@compiled
def inner(x):
    return x + {added}
"""
BESIDE_OTHERS = """
import json, math, sys
from hf_longctx.planner import compiled, machine_code
from callee import inner

sys.stdin.readline()
with compiled.planning(math.inf, compiling=17):
    result = inner(1)
print(json.dumps([result, dict(machine_code.compiled_here)]))
"""


@pytest.fixture
def run_as(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have all that is called from now on run "interpreted" or "compiled"."""

    def choose(form: str) -> None:
        monkeypatch.setattr(compiled, "_spent", 0.0)
        monkeypatch.setattr(compiled, "LONGEST_INTERPRETED", 1e9 if form == "interpreted" else -1.0)
        monkeypatch.setattr(compiled.Compiled, "_has_machine_code", lambda _: form == "compiled")

    return choose


def everything(plan: StepPlan) -> dict[str, Any]:
    """All that a step asks of its plan."""
    timeline = plan.timeline()
    values = {name: getattr(plan, name).tolist() for name in COLUMNS}
    values |= {
        "digest": plan.digest(),
        "summary": plan.summary(),
        "layouts": plan.layouts(0),
        "start": timeline.start.tolist(),
    }
    if plan.mode == "pipeline":
        for schedule in (Schedule(), Schedule("interleaved", 2)):
            values[schedule.name] = stage_order(plan, schedule).tasks(0, 0).tolist()
    return values


@pytest.mark.parametrize("mode", ["async", "lockstep", "pipeline"])
@pytest.mark.parametrize("ranks", ["equal", "unequal", "offload"])
def test_plans_are_equal(mode: Any, ranks: str, run_as: Callable[[str], None]):
    topology = Topology(
        8,
        512,
        ranks_per_node=4,
        ulysses_degree=2,
        stages=4 if mode == "pipeline" else 1,
        speed=(1000, 700, 1300, 1000, 400, 1000, 900, 1000) if ranks == "unequal" else None,
        memory=(1000, 1000, 1000, 1100, 1000, 1000, 1000, 1000) if ranks == "unequal" else None,
    )
    offload = (Offload(600, 40_000, 2048),) if ranks == "offload" and mode != "lockstep" else ()
    names = ["hdp"] if ranks != "equal" else list(PLANNERS)
    plans: dict[str, list[Any]] = {"interpreted": [], "compiled": []}
    for form, results in plans.items():
        run_as(form)
        for name in names:
            lengths = np.minimum(LENGTHS, 512) if name == "dp_packing" else LENGTHS
            results.append(everything(PLANNERS[name](lengths, topology, COST, mode, *offload)))
    assert plans["interpreted"] == plans["compiled"]


def test_work_in_units_is_equal(run_as: Callable[[str], None]):
    lengths, ranks = np.repeat(LENGTHS, 3) * 1000, np.tile([1, 5, 64], len(LENGTHS))
    works = []
    for form in ("interpreted", "compiled"):
        run_as(form)
        cost = replace(COST, attention_ps=2**40, inside_ps=2**50).in_units(21)
        works.append([_works(lengths, ranks, cost.coefficients).tolist()])
        works[-1].append([int(chunked_work(10**6, 8, chunks, 50_000, 3, cost.coefficients)) for chunks in (1, 4, 32)])
    assert works[0] == works[1]
    assert min(works[0][0]) >= 1


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["async", "lockstep", "pipeline"])
def test_plans_in_units_are_equal(mode: Any, run_as: Callable[[str], None]):
    # Of documents that take months, for which machine code is made anew.
    times = set(COEFFICIENTS) - {"attention_half_tokens", "step_ns"}
    cost = replace(COST, **{name: getattr(COST, name) * 2**26 for name in times})
    equal = Topology(8, 512, ranks_per_node=4, ulysses_degree=2, stages=4 if mode == "pipeline" else 1)
    unequal = replace(equal, speed=(1000, 700, 1300, 1000, 400, 1000, 900, 1000))
    assert min(bound.unit_bits(LENGTHS, ranks, cost) for ranks in (equal, unequal)) > 0
    plans: dict[str, list[Any]] = {"interpreted": [], "compiled": []}
    for form, results in plans.items():
        run_as(form)
        for name in PLANNERS:
            lengths = np.minimum(LENGTHS, 512) if name == "dp_packing" else LENGTHS
            results.append(everything(PLANNERS[name](lengths, equal, cost, mode)))
        results.append(everything(PLANNERS["hdp"](LENGTHS, unequal, cost, mode)))
    assert plans["interpreted"] == plans["compiled"]


@pytest.mark.parametrize("memory", [None, (1000,) * 128 + (700,) * 128])
def test_plans_by_bisection_are_equal(memory: tuple[int, ...] | None, run_as: Callable[[str], None]):
    """Documents of which a rank holds half, on so many ranks that no others are tried."""
    lengths = np.random.default_rng(3).lognormal(np.log(1200), 0.4, 300).astype(np.int64)
    plans = []
    for form in ("interpreted", "compiled"):
        run_as(form)
        plan = PLANNERS["hdp"](lengths, Topology(256, 512, 8, memory=memory), COST, "async")
        plans.append(everything(plan))
    assert plans[0] == plans[1]


@pytest.mark.parametrize("mode", ["async", "lockstep", "pipeline"])
def test_plans_of_the_most_work_there_may_be_are_equal(mode: Any, run_as: Callable[[str], None]):
    """Just below the 2^62 ns from which on the planner counts in units: far beyond what Python's integers are used for."""
    lengths = np.random.default_rng(1).integers(1, 512, 1500)
    topology, cost = Topology(1, 4096), CostModel(attention_ps=0, linear_ps=8 * 10**15, inside_ps=0)
    assert max(2**61, compiled.SMALL) < bound.largest_work(lengths, topology, cost)[0] < bound.LARGEST_WORK
    plans = []
    for form in ("interpreted", "compiled"):
        run_as(form)
        plan = PLANNERS["hdp"](lengths, topology, cost, mode)
        plans.append((plan.digest(), plan.timeline().makespan))
    assert plans[0] == plans[1]


@pytest.mark.parametrize("scale", [1, 2**40, 2**55, 2**61])
def test_functions_wrap_around_alike(scale: int, run_as: Callable[[str], None]):
    times = np.arange(1, 200)[::-1] * (scale // 100 + 1)
    coefficients = (scale, 3, 7, 5, 11, 13, 17, 2, 2**40, 0, 0)
    answers = []
    for form in ("interpreted", "compiled"):
        run_as(form)
        loads = np.arange(8) * (scale // 8)
        with np.errstate(over="raise"):  # wrapping around is no news
            chosen = packing.spread_whole(times, loads, np.array([1000] * 4 + [300] * 4))
            answers.append((chosen.tolist(), loads.tolist(), work_of(scale, 5, coefficients)))
    assert answers[0] == answers[1]


def test_division_by_zero_and_empty_arrays_are_alike(run_as: Callable[[str], None]):
    none = np.empty(0, np.int64)
    for form in ("interpreted", "compiled"):
        run_as(form)
        with pytest.raises(ZeroDivisionError):
            work_of(5, 1, (1, 1, 1, 1, 1, 1, 1, 0, 9, 0, 0))
        assert packing.sums(none, none, 2).tolist() == [0, 0]
        assert packing.spread_whole(none, np.zeros(2, np.int64), np.ones(2, np.int64)).tolist() == []


@pytest.mark.processes
def test_a_plan_of_a_thousand_documents_needs_no_numba():
    """Nor all that a step asks of it, in one round or in many, nor reports, which ask for predicted times of more documents.

    No time passes for these plans: what is asserted is what estimates decide, on machines of any speed."""
    program = (
        "import sys, types, numpy as np\n"
        "from hf_longctx.planner import compiled\n"
        "compiled.time = types.SimpleNamespace(thread_time=lambda: 0.0)\n"
        "from hf_longctx.planner import CostModel, Topology, plan_step\n"
        "from hf_longctx.planner.stages.stage_order import stage_order\n"
        f"cost = {COST}\n"
        "many = np.random.default_rng(0).lognormal(6, 1.5, 1000).astype(int) + 1\n"
        "steady = np.arange(1000) * 8 + 1\n"
        "for mode in ('async', 'lockstep', 'pipeline'):\n"
        "    for lengths, ranks, tokens in ((np.arange(1, 60), 4, 32), (many, 64, 8192), (steady, 2, 4096)):\n"
        "        plan = plan_step(lengths, Topology(ranks, tokens, stages=1 + (mode == 'pipeline')), cost, mode)\n"
        "        plan.summary(), plan.timeline(), plan.layouts(0)\n"
        "        cost.time(plan.length, plan.ranks_of_document)\n"
        "stage_order(plan)\n"
        "cost.time(np.arange(1, 50_001), 1)\n"
        "assert 'numba' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})


class Dispatcher:
    """Stands for that of `_works`: machine code of so many signatures."""

    def __init__(self, signatures: int) -> None:
        self.signatures, self.called = [()] * signatures, 0

    def __call__(self, lengths: np.ndarray, *_: Any) -> np.ndarray:
        self.called += 1
        return np.ones_like(lengths)


@pytest.mark.parametrize(
    ("documents", "loaded", "compiles"),
    [(10_000, False, False), (10_000, True, True), (3_000_000, False, True)],
)
def test_a_call_outside_of_planning_is_compiled_where_that_pays(
    documents: int, loaded: bool, compiles: bool, monkeypatch: pytest.MonkeyPatch
):
    """Interpreted, six million numbers would take longer than LONGEST_INTERPRETED; twenty thousand take less, and machine code
    that is at hand still less."""
    monkeypatch.setattr(compiled, "_spent", 0.0)
    monkeypatch.setitem(vars(_works), "dispatcher", dispatcher := Dispatcher(int(loaded)))
    works = COST.work(np.full(documents, 7), 1)
    assert dispatcher.called == compiles
    assert (works == (1 if compiles else work_of(7, 1, COST.coefficients))).all()


@pytest.mark.usefixtures("lock")
def test_what_takes_too_long_begins_again_compiled(monkeypatch: pytest.MonkeyPatch):
    forms = []

    def work() -> int:
        forms.append("interpreted" if compiled._interprets.get() else "compiled")
        return work_of(5, 1, (1, 1, 1, 1, 1, 1, 1, 1, 9, 0, 0))

    monkeypatch.setattr(compiled, "_spent", 0.0)
    expected = compiled.planned(work, seconds=0.0, compiling=0.0, largest=0.0)
    monkeypatch.setattr(compiled, "LONGEST_INTERPRETED", 0.0)
    assert compiled.planned(work, seconds=0.0, compiling=0.0, largest=0.0) == expected
    assert forms == ["interpreted", "interpreted", "compiled"]


@compiled.remembered
@compiled.compiled
def double(number: int, factors: tuple[int, ...]) -> int:
    return number * factors[0]


@compiled.compiled
def doubled(numbers: int, factors: tuple[int, ...]) -> int:
    total = 0
    for number in range(numbers):
        total += double(number % 7, factors)
    return total


@pytest.mark.usefixtures("lock")
def test_one_call_that_takes_too_long_ends_in_the_middle(monkeypatch: pytest.MonkeyPatch):
    """By a clock that goes on by a second whenever it is looked at; most results are known from an earlier call."""
    clock, forms = itertools.count(), []

    def work() -> int:
        forms.append("interpreted" if compiled._interprets.get() else "compiled")
        return doubled(100_000, (2, 3))

    monkeypatch.setattr(compiled, "_spent", 0.0)
    monkeypatch.setattr(compiled, "time", SimpleNamespace(thread_time=lambda: next(clock)))
    monkeypatch.setitem(vars(doubled), "dispatcher", lambda *_: -1)
    assert compiled.planned(work, seconds=0.0, compiling=0.0, largest=0.0) == -1
    assert forms == ["interpreted", "compiled"]
    monkeypatch.setattr(compiled, "LONGEST_INTERPRETED", 1e9)
    monkeypatch.setattr(compiled, "_spent", 0.0)  # patience ends sooner where machine code lies on disk
    assert compiled.planned(work, seconds=0.0, compiling=0.0, largest=0.0) == 2 * sum(
        number % 7 for number in range(100_000)
    )


@pytest.mark.parametrize("on_disk", [False, True])
def test_many_small_plans_are_compiled_in_the_end(on_disk: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine_code, "on_disk", lambda: on_disk)
    patience = compiled.PATIENCE_ON_DISK if on_disk else compiled.PATIENCE
    for spent, expected in ((patience - 0.1, True), (patience + 0.1, False)):
        monkeypatch.setattr(compiled, "_compiles", False)
        monkeypatch.setattr(compiled, "_spent", spent)
        with compiled.planning(0.001):
            assert compiled._interprets.get() is expected


def test_what_borrows_makes_no_array_and_is_returned_none():
    """Machine code that counts no references would keep an array that it makes for ever, or lose one that is still used."""
    functions = {
        function.name: function
        for path in (ROOT / "hf_longctx").rglob("*.py")
        for function in ast.parse(path.read_text()).body
        if isinstance(function, ast.FunctionDef)
        and any(isinstance(d, ast.Name) and d.id == "compiled" for d in function.decorator_list)
    }
    returns_arrays = {n for n, f in functions.items() if f.returns and not _plain_numbers(ast.unparse(f.returns))}
    borrowing = {
        name
        for name, function in functions.items()
        if any(isinstance(d, ast.Name) and d.id == "borrowing" for d in function.decorator_list)
    }
    assert len(borrowing) > 30
    assert not borrowing & returns_arrays
    for name in borrowing:
        for call in (node for node in ast.walk(functions[name]) if isinstance(node, ast.Call)):
            called = ast.unparse(call.func)
            assert "." not in called or called in {"np.ceil", "np.sqrt", "math.ldexp"}, (name, called)
            assert called not in returns_arrays, (name, called)


def _plain_numbers(annotation: str) -> bool:
    return set(re.findall(r"\w+", annotation)) <= {"tuple", "int", "float", "bool", "None"}


@compiled.by_address
class Columns(NamedTuple):
    """A named tuple that compiled functions pass by address."""

    numbers: np.ndarray
    factor: int
    pair: tuple[int, int]


@compiled.borrowing
@compiled.compiled
def _weighted(columns: Columns, i: int) -> int:
    return columns.numbers[i] * columns.factor + columns.pair[1]


@compiled.compiled
def _all_weighted(columns: Columns) -> tuple[int, np.ndarray]:
    total = 0
    for i in range(len(columns.numbers)):
        total += _weighted(columns, i)
    return total, columns.numbers


def test_a_named_tuple_is_passed_by_address(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine_code, "_OnDisk", machine_code._Nowhere)
    numbers = np.arange(5)
    before = sys.getrefcount(numbers)
    with compiled.planning(math.inf):
        for length in (3, 5):
            total, same = _all_weighted(Columns(numbers[:length], 10, (1, 2)))
            assert (total, same.tolist()) == (10 * length * (length - 1) // 2 + 2 * length, list(range(length)))
            for i in range(100):
                assert _weighted(Columns(numbers, 10, (1, 2)), i % 5) == i % 5 * 10 + 2
    del same
    assert sys.getrefcount(numbers) == before
    (signature,) = _weighted.dispatcher.signatures
    assert str(signature[0]).startswith("Address(Columns")


def test_a_constant_compiles_nothing_anew(monkeypatch: pytest.MonkeyPatch):
    def nowhere(*_: Any) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(machine_code._OnDisk, "__init__", nowhere)
    inner = machine_code.dispatcher(lambda number, keep: 2 * number if keep else number)
    outer = machine_code.dispatcher(lambda number: inner(number, number > 1) + inner(3, True) + inner(4, False))
    assert outer(5) == 10 + 6 + 4
    assert len(inner.signatures) == 1


@pytest.mark.processes
def test_a_function_is_compiled_anew_when_one_that_it_calls_changes(tmp_path: Path):
    """numba alone would take the old one of the caller, and print 20 again. What Python calls is kept beside what compiled code
    calls, which takes nothing from Python."""

    def run() -> list[str]:
        command = [sys.executable, str(tmp_path / "caller.py")]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout.split()

    (tmp_path / "caller.py").write_text(CALLER)
    (tmp_path / "callee.py").write_text(CALLEE.format(added=1))
    assert run() == ["20", "0", "2", "0"]
    assert run() == ["20", "1", "2", "1"], "taken from the disk"
    (tmp_path / "callee.py").write_text(CALLEE.format(added=200))
    assert run() == ["2010", "0", "201", "0"]


def test_an_end_while_machine_code_is_kept_leaves_none_of_other_sources(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """numba writes an index of the new sources before the data that it names: there must be no old data of that name."""

    def result() -> int:
        machine_code._sources.cache_clear()
        specification = importlib.util.spec_from_file_location("callee", tmp_path / "callee.py")
        assert specification is not None
        assert specification.loader is not None
        callee = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(callee)
        compiled._forms.clear()
        return callee.inner.dispatcher(1)

    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compiled, "_forms", {})
    (tmp_path / "callee.py").write_text(CALLEE.format(added=1))
    assert result() == 2
    (tmp_path / "callee.py").write_text(CALLEE.format(added=200))
    with monkeypatch.context() as ending:
        ending.setattr(numba.core.caching.IndexDataCacheFile, "_save_data", end)
        with pytest.raises(KeyboardInterrupt):
            result()
    assert result() == 201
    machine_code._sources.cache_clear()


@pytest.mark.processes
def test_processes_side_by_side_compile_once_and_say_so_once(tmp_path: Path):
    (tmp_path / "beside.py").write_text(BESIDE_OTHERS)
    (tmp_path / "callee.py").write_text(CALLEE.format(added=1))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    started = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "beside.py")],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    outputs = [process.communicate("\n") for process in started]
    results = [json.loads(output) for output, _ in outputs]
    assert [result for result, _ in results] == [2, 2, 2]
    assert [counts for _, counts in results if counts] == [{"callee.inner": 1}]
    lines = [line for _, errors in outputs for line in errors.splitlines()]
    assert len(lines) == 1
    assert "about 17 s of a new core" in lines[0]


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> machine_code._Lock:
    monkeypatch.setattr(machine_code, "_lock_path", lambda: tmp_path / machine_code.LOCK)
    return machine_code._Lock()


def is_free(lock: Path) -> bool:
    """Whether another process could take it."""
    with lock.open() as other:
        try:
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_threads_of_a_process_hold_the_lock_together_and_announce_once(
    lock: machine_code._Lock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """One compiles; another, whose plan is at hand, looks something up; a third compiles as well and is done last."""
    monkeypatch.setattr(machine_code, "_lock", lock)
    monkeypatch.setattr(machine_code, "_planners", machine_code._Planners())
    monkeypatch.setattr(machine_code, "compiled_here", Counter())
    going_on, may_end = threading.Event(), threading.Event()

    def look_up() -> None:
        with machine_code.compiling(0.0):
            machine_code._compiles(packing.sums.function)

    def compile_too() -> None:
        with machine_code.compiling(35.0):
            machine_code._compiles(work_of.function)
            going_on.set()
            may_end.wait()

    threads = [threading.Thread(target=function) for function in (look_up, compile_too)]
    with machine_code.compiling(36.0):
        assert lock.take()
        threads[0].start()
        threads[0].join()
        assert not is_free(tmp_path / machine_code.LOCK)
        assert capsys.readouterr().err == "", "what another thread expects"
        machine_code._compiles(work_of.function)
        threads[1].start()
        going_on.wait()
    assert not is_free(tmp_path / machine_code.LOCK)
    may_end.set()
    threads[1].join()
    assert is_free(tmp_path / machine_code.LOCK)
    with machine_code.compiling(37.0):  # the plan after it
        machine_code._compiles(work_of.function)
    assert [line.split("about ")[1] for line in capsys.readouterr().err.splitlines()] == [
        "36 s of a new core, up to three times as long on an old one"
    ]


def test_machine_code_of_a_whole_plan_is_told_of_and_no_other(
    lock: machine_code._Lock, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(machine_code, "_lock", lock)
    monkeypatch.setattr(machine_code, "compiled_here", Counter(some=1))

    def fail() -> None:
        lock.take()
        raise ValueError("no rank holds so much")

    with compiled.planning(math.inf):
        lock.take()  # as the first function does that is compiled
    assert not machine_code.on_disk()
    with pytest.raises(ValueError, match="no rank"):
        compiled.planned(fail, seconds=math.inf, compiling=0.0, largest=0.0)
    assert not machine_code.on_disk()
    compiled.planned(lock.take, seconds=math.inf, compiling=0.0, largest=0.0)
    assert machine_code.on_disk()


@pytest.mark.processes
def test_a_killed_process_frees_the_lock(lock: machine_code._Lock, tmp_path: Path):
    program = (
        "import sys, time, pathlib\n"
        "from hf_longctx.planner import machine_code\n"
        "machine_code._lock_path = lambda: pathlib.Path(sys.argv[1])\n"
        "print(machine_code._lock.take(), flush=True)\n"
        "time.sleep(600)\n"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / machine_code.LOCK)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    assert not is_free(tmp_path / machine_code.LOCK)
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    assert lock.take()
    assert not lock.take(), "held already"
    lock.release()


def test_without_locks_and_without_a_folder_functions_are_compiled_all_the_same(
    lock: machine_code._Lock, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: Any) -> None:
        raise OSError("No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    assert not lock.take()
    assert lock._file is None

    def nowhere(*_: Any) -> None:
        raise RuntimeError("cannot cache function: no locator available")

    monkeypatch.setattr(machine_code._OnDisk, "__init__", nowhere)
    monkeypatch.setattr(machine_code, "_lock_path", lambda: None)
    function = machine_code.dispatcher(work_of.function)
    before = machine_code.compiled_here["hf_longctx.planner.cost.cost_model.work_of"]
    assert function(5, 1, (1, 1, 1, 1, 1, 1, 1, 1, 9, 0, 0)) == work_of(5, 1, (1, 1, 1, 1, 1, 1, 1, 1, 9, 0, 0))
    assert machine_code.compiled_here["hf_longctx.planner.cost.cost_model.work_of"] == before + 1


class Forgotten(NamedTuple):
    """A class that a later version of the package lacks."""

    x: int


def test_machine_code_that_names_a_class_which_is_gone_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """numba reads what is on disk before it looks whether that is of the same sources."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(machine_code, "_lock_path", lambda: None)
    coefficients = (1, 1, 1, 1, 1, 1, 1, 1, 9, 0, 0)
    first = machine_code.dispatcher(work_of.function)
    expected = first(5, 1, coefficients)
    index = first._cache._cache_file._index_path
    content = pickle.dumps(Forgotten(1)).replace(b"Forgotten", b"Mistaken!")
    Path(index).write_bytes(pickle.dumps(first._cache._cache_file._version) + content)
    for hits in (0, 1):
        again = machine_code.dispatcher(work_of.function)
        assert again(5, 1, coefficients) == expected
        assert sum(again.stats.cache_hits.values()) == hits
