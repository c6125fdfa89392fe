"""A rank that stands still is named on every other rank's standard error, with the place where it does; a run in which none
does says nothing; what stands still too long ends."""

import math
import re
import time
from contextlib import nullcontext

import pytest

from hf_longctx.attention.progress import Progress
from hf_longctx.training.verdict import Sign, verdict
from hf_longctx.training.watchdog import EXIT_CODE, Watchdog, _Reports
from tests.launched import run
from tests.rank_pool import RankPool
from tests.stalled_runs import STORES, Stall, stalled_run

STALLS = {
    Stall(3, 1, "callback"): "optimizer step and callbacks",
    Stall(1, 2, "forward", 1): "micro-batch . of ., forward, layer 1, computing",
    Stall(2, 3, "backward", 0): "micro-batch . of ., backward, layer 0, computing",
    Stall(0, 4, "loader"): "loading data",
    Stall(2, 5, "stopped"): "loading data",
    Stall(0, 6, "stopped"): "loading data",
}
"""A stall -> where its rank is said to be."""


def expected(stall: Stall, where: str) -> str:
    """What every rank that lives says of it: a pattern."""
    who = rf"rank {stall.rank} \(host \S+, pid \d+\)"
    if stall.where == "stopped":
        return rf"no sign of life for \d+ s \(its process is stopped, [^)]*\) of {who}, last seen at step {stall.step}, {where}"
    return rf"step {stall.step} has not moved for \d+ s: everyone waits for {who}: step {stall.step}, {where} for \d+ s"


def test_who_stands_still_is_named_on_every_living_rank(ranks4: RankPool, tmp_path):
    ended = ranks4.run(stalled_run, tuple(STALLS), tmp_path)
    for rank, (said, threads) in enumerate(ended):
        assert threads == []
        for stall, where in STALLS.items():
            if stall.where == "stopped" and stall.rank == rank:
                continue
            assert re.search(f"hf_longctx: watchdog: {expected(stall, where)}", said), (rank, stall, said)
        assert f"this is rank {rank}, which is waited for. What its main thread is doing:" in said
        assert "in stand_still" in said


def test_inside_the_collectives_of_sharded_layers_the_rank_that_does_not_come_is_named(ranks2: RankPool, tmp_path):
    stalls = (Stall(1, 2, "forward", 1), Stall(0, 3, "backward", 0))
    for rank, (said, _) in enumerate(ranks2.run(stalled_run, stalls, tmp_path, {"sharding": "zero3"})):
        for stall in stalls:
            where = f"micro-batch . of ., {stall.where}, layer {stall.layer}, computing"
            assert re.search(rf"{expected(stall, where)}\. Rank {1 - stall.rank}: ", said), (rank, stall, said)


def test_a_run_that_moves_says_nothing(ranks2: RankPool, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2}
    for said, threads in ranks2.run(stalled_run, (), tmp_path, None, settings, report_after=10.0):
        assert "watchdog" not in said
        assert threads == []


def test_alone_nobody_watches(tmp_path):
    said, threads = stalled_run((Stall(0, 1, "callback", seconds=1.2),), tmp_path, None, {"max_steps": 1})
    assert "watchdog" not in said
    assert threads == []


@pytest.mark.processes
def test_what_stands_still_too_long_ends_although_the_store_does_not_answer(tmp_path):
    """Rank 0, which may keep the store, is stopped for good: rank 1 says so, and leaves with a code of its own."""
    ended = run("tests/stalled_runs.py", tmp_path, timeout=100.0)
    assert ended.output.split() == [str(EXIT_CODE)] * 2 == ["75"] * 2
    for store in STORES:
        said = (tmp_path / f"{store}, rank 1.log").read_text()
        assert re.search(expected(Stall(0, 2, "stopped"), "loading data"), said), said
        assert re.search(r"rank 1 is at step 2, agreeing on the plan and leaves: it has not moved for \d+ s", said), (
            said
        )
        assert "stall_timeout_seconds=5" in said
        assert "in agree_on_plan" in said  # the stack of the main thread


def lost_contact(evaluating: bool) -> list[str]:
    """What is noted of an error that a message of another rank ended with, in the middle of training."""
    watching = Watchdog(Progress(step=3, place="device 0 of 2 of the pipeline"), 60.0)
    watching.start()
    try:
        with watching.explaining(), watching.progress.evaluation() if evaluating else nullcontext():
            watching.progress.begin("computing")
            watching.progress.begin_micro_batch(1, 4)
            watching.progress.wait_for([1], "activations")
            raise RuntimeError("Connection closed by peer [127.0.0.1]:28069")
    except RuntimeError as error:
        return error.__notes__


@pytest.mark.parametrize("evaluating", [False, True])
def test_an_error_of_a_message_says_who_was_waited_for(ranks2: RankPool, evaluating: bool):
    where = "step 3, device 0 of 2 of the pipeline, " + "evaluation, " * evaluating
    where += "micro-batch 1 of 4, forward, waiting for activations of rank 1"
    for rank, noted in enumerate(ranks2.run(lost_contact, evaluating)):
        assert noted == [f"hf_longctx: watchdog: rank {rank} was at {where}."]


# The verdict


def sign(rank: int, step: int = 7, idle: float = 40.0, silent: float = 0.0, **place: object) -> Sign:
    progress = Progress(step=step, activity="computing", stage=3, micro_batch=1, micro_batches=2)
    for name, value in place.items():
        setattr(progress, name, value)
    return Sign(rank, "host a, pid 9", progress, idle, silent)


def named(*signs: Sign) -> list[int] | None:
    found = verdict(signs, 30.0)
    return None if found is None else found.named


def test_nobody_is_named_while_one_moves():
    assert named(sign(0, awaited=[1]), sign(1, idle=29.0)) is None


def test_a_rank_without_a_sign_of_life_is_named_although_others_move():
    assert named(sign(0), sign(1, silent=30.0), sign(2, idle=0.0)) == [1]


def test_of_waiting_ranks_none_is_named_while_one_does_not_wait():
    behind = sign(0, step=6, collective=True)
    assert named(behind, sign(1), sign(2, awaited=[1])) == [1]


def test_who_has_more_left_to_do_is_behind():
    assert named(sign(0, micro_batch=3, micro_batches=3), sign(1, micro_batch=4, micro_batches=6)) == [1]
    assert named(sign(0, layer=3), sign(1, layer=None), sign(2, layer=2)) == [1]
    assert named(sign(0, backward=True, layer=3), sign(1, backward=True, layer=2)) == [0]
    assert named(sign(0, backward=True, layer=3), sign(1, backward=True, layer=None)) == [1]
    assert named(sign(0, backward=True, layer=3), sign(1, layer=5)) == [1]
    assert named(sign(0, stage=4), sign(1, stage=3)) == [1]


def test_when_all_wait_those_furthest_behind_are_named_with_everybodys_place():
    found = verdict(
        [sign(0, awaited=[2], layer=1), sign(1, awaited=[0], layer=1), sign(2, collective=True, stage=5)], 30.0
    )
    assert found is not None
    assert found.named == [0, 1]
    assert (
        "all ranks wait, furthest behind rank 0 (host a, pid 9): step 7, micro-batch 1 of 2, forward, layer 1, "
        in found.message
    )
    assert "waiting for keys and values of rank 2 for 40 s; rank 1" in found.message


def test_a_rank_whose_training_has_ended_is_named_if_the_others_wait():
    left = Sign(1, "host a, pid 9", Progress(step=7), float("inf"), 100.0, left=True)
    assert named(sign(0, awaited=[1]), left) == [1]
    assert named(sign(0), left) == [0]


def test_of_thousands_of_ranks_groups_are_said():
    waiting = [sign(rank, awaited=[5000], layer=rank % 3) for rank in range(5000)]
    began = time.perf_counter()
    found = verdict([*waiting, sign(5000)], 30.0)
    assert time.perf_counter() - began < 1.0
    assert found is not None
    assert found.named == [5000]
    assert len(found.message) < 2000


def test_what_lasts_is_said_at_doubling_times_and_what_never_began_once():
    reports = _Reports(30.0)
    assert [seconds for seconds in range(0, 300, 10) if reports.due(seconds)] == [30, 60, 120, 240]
    assert [reports.due(seconds) for seconds in (0.0, 31.0, 59.0, 1000.0)] == [False, True, False, True]
    assert [reports.due(math.inf) for _ in range(3)] == [True, False, False]
    assert not reports.due(0.0)
    assert reports.due(30.0)
