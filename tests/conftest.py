"""What all tests share: one thread, hypothesis profiles, and worlds of gloo ranks that live as long as the session.

Under xdist the process that hands tests out imports neither torch nor transformers, and starts the fork server, of which its
workers are forked (tests/worlds/forked_worker.py), and their ranks.

Hypothesis draws the same examples in every run. `HYPOTHESIS_PROFILE=nightly` draws many more, and new ones each time.
`--ranks=8` runs the tests of any number of ranks on 8 (scripts/nightly.sh does both).
"""

from __future__ import annotations

import gc
import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

from tests.worlds import fork_server, forked_worker, garbage, process_lane

if TYPE_CHECKING:
    from tests.builders.training_runs import Run
    from tests.worlds.rank_pool import RankPool

# Distributed examples are slow to draw and to run beside a busy sibling: neither says anything about the code.
settings.register_profile(
    "quick", max_examples=25, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", parent=settings.get_profile("quick"), max_examples=1000, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


SIZES = (1, 2, 3, 4, 8)
"""Ranks that a world of the tests can have."""
FEW_AND_LONG = (
    "compiled",
    "restarts",
    "run_page",
    "cli_verbs",
    "remote_training",
    "watchdog",
    "packaging",
    "docs",
    "compiled_layers",
)
"""Files whose few tests take long, in this order. They come first, so that at the end no process works on one of them alone;
and the one that compiles the planner before all others, who would wait for it."""
PROCESSES_WEIGH = 8
"""How many tests that start no process one that does takes as long as, roughly: files are sorted by it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--ranks",
        type=int,
        action="append",
        choices=SIZES,
        help="how many ranks tests of any number run on; may be given several times (default: 1, 2 and 4)",
    )
    parser.addoption(
        "--matrix",
        action="store_true",
        help="every combination of tests/parallel/test_sharding.py, and tests marked `nightly`",
    )


ON_A_GPU = "HF_LONGCTX_TEST_CUDA"
"""Variable that lets tests see a GPU: those of CUDA kernels, which scripts/test.sh runs by themselves. Ranks of all others
compute on CPUs, more of them than there are GPUs."""


def pytest_configure(config: pytest.Config) -> None:
    if not os.environ.get(ON_A_GPU):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    server = getattr(config, "workerinput", {}).get("fork_server")
    if server is not None:
        fork_server.join(server)
    if _hands_out(config):
        os.environ[forked_worker.ADDRESS] = fork_server.start()
        python = f"{shlex.quote(sys.executable)} {shlex.quote(forked_worker.__file__)}"
        config.option.tx = [f"popen//python={python}"] * len(config.option.tx)
    else:
        gc.disable()  # until all is imported, and nothing of it is garbage
        import torch

        torch.set_num_threads(1)
        os.environ["OMP_NUM_THREADS"] = "1"  # of commands that tests run here, and of programs that they start
        process_lane.watch()


def _hands_out(config: pytest.Config) -> bool:
    """Whether this process runs no test, but gives them to others."""
    return bool(getattr(config.option, "numprocesses", 0)) and not hasattr(config, "workerinput")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Follow xdist's hook for each process that will run tests."""
    node.workerinput["fork_server"] = fork_server.start()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A browser is a process too. Tests that take long and differ little from others run by night."""
    for item in items:
        if "starts_processes" in getattr(item, "fixturenames", ()) or item.get_closest_marker("browser"):
            item.add_marker("processes")
    if not config.getoption("--matrix"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("nightly")])
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    weight: Counter[str] = Counter()
    for item in items:
        weight[item.path.stem] += PROCESSES_WEIGH if item.get_closest_marker("processes") else 1
    first = {f"test_{name}": place for place, name in enumerate(FEW_AND_LONG)}
    items.sort(key=lambda item: (first.get(item.path.stem, len(first)), -weight[item.path.stem], item.path.stem))


def pytest_collection_finish() -> None:
    garbage.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    process_lane.begin(item.nodeid, item.get_closest_marker("processes") is not None)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    refused = process_lane.end()
    if refused:
        pytest.fail(f"not marked `processes`, and it tried to start some: {refused}")


def _sizes(config: pytest.Config) -> list[int]:
    return config.getoption("--ranks") or [1, 2, 4]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "any_ranks" in metafunc.fixturenames:
        metafunc.parametrize("any_ranks", _sizes(metafunc.config), indirect=True, scope="session")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """A command that a test runs in this process may choose another number, and kernels take scratch for each."""
    import torch

    yield
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def starts_processes() -> None:
    """Do nothing. Fixtures that start processes use it: tests that use these are marked `processes`."""


@pytest.fixture(scope="session")
def _pools(starts_processes: None) -> Iterator[dict[int, RankPool]]:
    """A pool starts its ranks when it is first used."""
    from tests.worlds.rank_pool import RankPool

    with ExitStack() as stack:
        yield {size: stack.enter_context(closing(RankPool(size))) for size in SIZES}


@pytest.fixture(scope="session")
def ranks1(_pools: dict[int, RankPool]) -> RankPool:
    """One rank: what `torch.distributed` code does in a world of one."""
    return _pools[1]


@pytest.fixture(scope="session")
def ranks2(_pools: dict[int, RankPool]) -> RankPool:
    """Two gloo ranks, shared by all tests of the session."""
    return _pools[2]


@pytest.fixture(scope="session")
def ranks3(_pools: dict[int, RankPool]) -> RankPool:
    """Three gloo ranks: a number that divides nothing."""
    return _pools[3]


@pytest.fixture(scope="session")
def ranks4(_pools: dict[int, RankPool]) -> RankPool:
    """Four gloo ranks, shared by all tests of the session."""
    return _pools[4]


@pytest.fixture(scope="session")
def ranks8(_pools: dict[int, RankPool]) -> RankPool:
    """Eight gloo ranks: three dimensions of two."""
    return _pools[8]


@pytest.fixture(scope="session")
def any_ranks(_pools: dict[int, RankPool], request: pytest.FixtureRequest) -> RankPool:
    """Worlds of 1, 2 and 4 ranks in turn, or of those that `--ranks` names."""
    return _pools[request.param]


@pytest.fixture(scope="session")
def most_ranks(_pools: dict[int, RankPool], request: pytest.FixtureRequest) -> RankPool:
    """The largest of the worlds that `any_ranks` takes."""
    return _pools[max(_sizes(request.config))]


@pytest.fixture(scope="session")
def saved(ranks2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Run]]:
    """The folder of a run of two ranks with a checkpoint of each step, and what both saw."""
    from tests.builders.training.saved_runs import run

    folder = tmp_path_factory.mktemp("saved")
    return folder, ranks2.run(run, folder)


@pytest.fixture
def copied(saved: tuple[Path, list[Run]], tmp_path: Path) -> Path:
    """A copy of that folder, to be damaged."""
    return Path(shutil.copytree(saved[0], tmp_path / "copied"))


@pytest.fixture
def measures(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the rates that this process's products would be measured at."""
    return lambda rates: [
        monkeypatch.setattr(f"hf_longctx.{name}.product_rates", lambda shape: rates)
        for name in ("precision", "training.autocast")
    ]
