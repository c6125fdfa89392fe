"""The pool runs functions on every rank, shows what went wrong, recovers, and leaves no process behind."""

import os
import signal
import subprocess
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.suite.rank_answers import never_answer_on, own_rank
from tests.worlds import rank_pool
from tests.worlds.fake_clock import FakeClock
from tests.worlds.patience import PATIENCE, wait_until
from tests.worlds.rank_pool import RankFailure, RankPool


class UnpicklableError(Exception):
    def __init__(self, name: str, value: int):
        super().__init__(f"{name} is {value}")


def rank_and_sum(value: torch.Tensor, power: int = 1) -> tuple[int, torch.Tensor, np.ndarray]:
    total = (value * (dist.get_rank() + 1)) ** power
    dist.all_reduce(total)
    return dist.get_rank(), total, total.numpy()


def draw() -> tuple[float, float]:
    return torch.rand(()).item(), np.random.rand()


def remember(value: int) -> int | None:
    previous = rank_pool.worker_state.get("value")
    rank_pool.worker_state["value"] = value
    return previous


def fail_on(failing: int) -> None:
    print(f"rank {dist.get_rank()} was here")
    if dist.get_rank() == failing:
        raise KeyError("the cause")
    dist.barrier()


def fail_unpicklably() -> None:
    raise UnpicklableError("the cause", 7)


def die_on(dying: int) -> None:
    if dist.get_rank() == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


def is_running(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.processes
@pytest.mark.parametrize("world_size", [2, 4])
def test_results_come_in_rank_order_and_collectives_span_the_world(world_size: int, request: pytest.FixtureRequest):
    pool = request.getfixturevalue(f"ranks{world_size}")
    results = pool.run(rank_and_sum, torch.tensor([1.0, 2.0]), power=2)
    squares = sum((rank + 1) ** 2 for rank in range(world_size))
    assert [rank for rank, _, _ in results] == list(range(world_size))
    for _, total, array in results:
        torch.testing.assert_close(total, torch.tensor([1.0, 4.0]) * squares)
        np.testing.assert_array_equal(array, total.numpy())


def test_a_world_of_one(ranks1: RankPool):
    assert ranks1.run(own_rank) == [0]


def test_only_the_named_ranks_run(ranks4: RankPool):
    assert ranks4.run(own_rank, ranks=[3, 1]) == [3, 1]
    with pytest.raises(ValueError, match=r"ranks \[4\] are not in a world of 4"):
        ranks4.run(own_rank, ranks=[0, 4])


def test_every_run_starts_from_the_same_seed(ranks2: RankPool):
    first, second = ranks2.run(draw), ranks2.run(draw)
    assert first == second
    assert first[0] == first[1]


def test_state_lives_as_long_as_the_world(ranks2: RankPool):
    ranks2.close()
    assert ranks2.run(remember, 1) == [None, None]
    assert ranks2.run(remember, 2) == [1, 1]
    ranks2.close()
    assert ranks2.run(remember, 3) == [None, None]


def test_an_error_is_raised_with_the_remote_traceback_and_output_and_the_pool_recovers(ranks2: RankPool):
    with pytest.raises(KeyError, match="the cause") as failure:
        ranks2.run(fail_on, 1)
    assert "in fail_on" in notes(failure.value)
    assert "rank 1 was here" in notes(failure.value)
    assert ranks2.run(own_rank) == [0, 1]


def test_an_error_that_cannot_be_unpickled_is_shown_all_the_same(ranks2: RankPool):
    with pytest.raises(RankFailure, match="cannot be pickled") as failure:
        ranks2.run(fail_unpicklably)
    assert "UnpicklableError: the cause is 7" in notes(failure.value)


def test_a_death_is_noticed_at_once(ranks2: RankPool):
    assert ranks2.run(own_rank) == [0, 1]
    with pytest.raises(RankFailure, match=r"rank 1 \(exit code -9\) of 2 died"):  # and not: did not answer in time
        ranks2.run(die_on, 1)
    assert ranks2.run(own_rank) == [0, 1]


def test_a_timeout_names_the_silent_ranks_and_shows_their_stacks(
    ranks2: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """By a clock that stands still until the silent rank waits and the other has answered."""
    clock, here = FakeClock(), tmp_path / "here"

    def ready(answers: list[Any], lives: list[int], seconds: float) -> list[Any]:
        if len(answers) == 1 and wait_until(here.exists):
            clock.sleep(seconds)
        return wait([*answers, *lives], 0 if clock.now() else PATIENCE)

    assert ranks2.run(own_rank) == [0, 1]
    with monkeypatch.context() as patch:
        patch.setattr(ranks2, "clock", clock)
        patch.setattr(ranks2, "_ready", ready)
        with pytest.raises(RankFailure, match=r"ranks \[1\] of 2 did not answer within 3600 s") as failure:
            ranks2.run(never_answer_on, 1, here, timeout=3600)
    assert "in wait_for_what_never_comes" in str(failure.value)
    assert ranks2.run(own_rank) == [0, 1]


def test_a_timeout_ends_a_run_by_the_true_clock_too(ranks2: RankPool):
    with pytest.raises(RankFailure, match=r"ranks \[1\] of 2 did not answer within 0\.1 s"):
        ranks2.run(never_answer_on, 1, ranks=[1], timeout=0.1)


@pytest.mark.processes
@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_no_process_outlives_its_parent(end: signal.Signals):
    program = (
        "from tests.worlds.rank_pool import RankPool\n"
        "from tests.suite.rank_answers import own_rank, never_answer_on\n"
        "pool = RankPool(2)\n"
        "pool.run(own_rank)\n"
        "print(*pool.processes(), flush=True)\n"
        "pool.run(never_answer_on, 1)\n"
    )
    command = [sys.executable, "-c", program]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        ranks = [int(process) for process in parent.stdout.readline().split()]
        assert len(ranks) == 2
        assert all(map(is_running, ranks))
        parent.send_signal(end)
    assert wait_until(lambda: not any(map(is_running, ranks)))
