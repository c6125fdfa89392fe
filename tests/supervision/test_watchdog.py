"""A rank that stands still is named on every other rank's standard error, with the place where it does; a run in which none
does says nothing; what stands still too long ends. Times are those of a fake clock (tests/worlds/watched_world.py), but for one
job of true processes of each kind, which wait for what they expect and may take as long as they like."""

import math
import re
import sys
import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest

from hf_longctx.supervision.leader import Reports
from hf_longctx.supervision.progress import Progress
from hf_longctx.supervision.verdict import Sign, verdict
from hf_longctx.supervision.watchdog import EXIT_CODE, Watchdog, _other_threads
from tests.worlds.faults.stalled_runs import STALL_SECONDS, STORES, Stall, stalled_run
from tests.worlds.launched import run
from tests.worlds.patience import PATIENCE
from tests.worlds.rank_pool import RankPool
from tests.worlds.watched_world import WatchedWorld

FORWARD, BACKWARD = (
    f"micro-batch [0-9] of [0-9], {direction}, layer {layer}, computing"
    for direction, layer in (("forward", 1), ("backward", 0))
)
STALLS = (
    Stall(3, 2, "callback", "optimizer step and callbacks", until="stack"),
    Stall(1, 2, "forward", FORWARD, 1),
    Stall(2, 3, "backward", BACKWARD, 0),
    Stall(0, 4, "loader"),
    Stall(2, 5, "stopped"),
    Stall(0, 6, "stopped"),
)


def test_who_stands_still_is_named_on_every_living_rank(ranks4: RankPool, tmp_path):
    ended = ranks4.run(stalled_run, STALLS, tmp_path)
    for rank, (text, threads) in enumerate(ended):
        assert threads == []
        for stall in STALLS:
            assert re.search(stall.said, text) or (stall.where == "stopped" and stall.rank == rank), (rank, stall, text)
        shown = re.findall(rf"this is rank {rank}, which is waited for, .* What its main thread is doing:", text)
        assert ("in stand_still" in text) == (rank == 3)
        # On a busy machine a rank that only computes may be waited for as well: then it is named, and shows itself too.
        assert f"everyone waits for rank {rank} " in text if shown else rank < 3


def test_inside_the_collectives_of_sharded_layers_the_rank_that_does_not_come_is_named(ranks2: RankPool, tmp_path):
    stalls = (Stall(1, 2, "forward", FORWARD, 1), Stall(0, 3, "backward", BACKWARD, 0))
    for rank, (text, _) in enumerate(ranks2.run(stalled_run, stalls, tmp_path, {"sharding": "zero3"})):
        for stall in stalls:
            assert re.search(rf"{stall.said}\. Rank {1 - stall.rank}: ", text), (rank, stall, text)


def test_a_run_that_moves_says_nothing(ranks2: RankPool, tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2}
    for text, threads in ranks2.run(stalled_run, (), tmp_path, None, settings, report_after=600.0):
        assert "watchdog" not in text
        assert threads == []


def test_alone_nobody_watches(tmp_path):
    text, threads = stalled_run((), tmp_path, None, {"max_steps": 1}, report_after=0.01)
    assert "watchdog" not in text
    assert threads == []


@pytest.mark.processes
def test_what_stands_still_too_long_ends_although_the_store_does_not_answer(tmp_path):
    """Rank 0, which may keep the store, is stopped for good: rank 1 says so, and leaves with a code of its own."""
    ended = run("tests/worlds/faults/stalled_runs.py", tmp_path)
    assert ended.output.split() == [str(EXIT_CODE)] * 2 == ["75"] * 2
    for store in STORES:
        text = (tmp_path / f"{store}, rank 1.log").read_text()
        assert re.search(Stall(0, 2, "stopped").said, text), text
        assert re.search(r"rank 1 is at step 2, agreeing on the plan and leaves: it has not moved for \d+ s", text), (
            text
        )
        assert f"stall_timeout_seconds={STALL_SECONDS:g}" in text
        assert "in agree_on_plan" in text  # the stack of the main thread


def lost_contact(evaluating: bool) -> list[str]:
    """Return what is noted of an error that a message of another rank ended with, in the middle of training."""
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


def test_where_a_rank_stands_is_seen_when_it_is_told():
    """Not when it was looked at last: it may have left a collective since."""
    watchdog = WatchedWorld(1).watchdogs[0]
    watchdog.progress.begin_step(2)
    somewhere: dict[str, Any] = {"__name__": "torch.distributed.somewhere"}
    exec("def wait(lock):\n    lock.acquire()", somewhere)
    lock, told, deadline = threading.Lock(), [], time.monotonic() + PATIENCE

    def look() -> None:
        try:
            while not watchdog._is_in_collective() and time.monotonic() < deadline:
                time.sleep(0.001)
            watchdog.judge()
            told.append(watchdog.record(1, "here", False))
        finally:
            lock.release()

    lock.acquire()
    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    somewhere["wait"](lock)
    looking.join()
    told.append(watchdog.record(2, "here", False))
    assert ["waiting in a collective" in report for report in told] == [True, False]


# Times


LAYERS = 4


def step_of(world: WatchedWorld, number: int, seconds: float, *, slow: int = 0) -> None:
    """One optimizer step of all ranks: `slow` computes for so many seconds in each layer, the others wait for it."""
    for rank, at in enumerate(world.progress):
        at.begin_step(number)
        for activity in ("loading data", "agreeing on the plan", "computing"):
            at.begin(activity, collective=activity.startswith("agreeing"))
        at.begin_micro_batch(1, 1)
        at.at_layer(0)
        if rank != slow:
            at.begin("summing gradients", collective=True)
    for layer in range(LAYERS):
        world.progress[slow].at_layer(layer)
        world.let_pass(seconds)
    for at in world.progress:
        if at is world.progress[slow]:
            at.begin("summing gradients", collective=True)
        at.begin("optimizer step and callbacks")
    world.let_pass(5.0)


def seconds_of(message: str) -> float:
    return float(re.findall(r"for (\d+) s", message)[-1])


def test_a_stall_is_said_at_doubling_times_by_all_shows_its_stack_and_ends():
    world = WatchedWorld(3)
    for number in (1, 2):
        step_of(world, number, seconds=20.0, slow=1)
    assert [watchdog.said for watchdog in world.watchdogs] == [[], [], []]
    step_of(world, 3, seconds=1700.0 / LAYERS, slow=1)
    for rank, watchdog in enumerate(world.watchdogs):
        first = watchdog.notices[0]
        assert re.search(
            r"step 3 has not moved for \d+ s: everyone waits for rank 1 \(host \S+, pid \d+\): step 3, "
            r"micro-batch 1 of 1, forward, layer 0, computing for \d+ s. Ranks 0, 2: step 3, summing gradients\.",
            first,
        ), first
        assert 30 <= seconds_of(first.split(" Ranks")[0]) <= 45
        assert len(watchdog.stacks) == (rank == 1)  # the next layers take as long as this one, which is usual by then
        assert not watchdog.left
    times = [float(re.findall(r"not moved for (\d+) s", notice)[0]) for notice in world.watchdogs[0].notices]
    assert times[: len(times) // LAYERS] == pytest.approx([30, 60, 120, 240], abs=15)
    shown = world.watchdogs[1].stacks[0]
    assert "in step_of" in shown
    assert 200 <= seconds_of(shown.partition(";")[0]) <= 260


def test_what_never_moves_again_ends_with_the_others_that_wait():
    world = WatchedWorld(2, stall_timeout=1800.0)
    for number in (1, 2):
        step_of(world, number, seconds=1.0)
    world.progress[0].begin("computing")
    world.progress[1].begin("summing gradients", collective=True)
    world.let_pass(1750.0)
    assert [watchdog.left for watchdog in world.watchdogs] == ["", ""]
    assert [len(watchdog.stacks) for watchdog in world.watchdogs] == [1, 0]
    world.let_pass(60.0)
    for rank, watchdog in enumerate(world.watchdogs):
        assert re.search(
            rf"rank {rank} is at step 2, \w+( gradients)? and leaves: it has not moved for 18\d\d s "
            r"\(stall_timeout_seconds=1800\)",
            watchdog.left,
        ), watchdog.left


@pytest.mark.parametrize(("first", "layer"), [(0.4, 0.4), (45.0, 5.0), (400.0, 30.0), (60.0, 60.0)])
def test_a_healthy_run_on_a_slow_machine_shows_no_stack(first: float, layer: float):
    """Seconds from one move to the next in the first step, where compilers run, and in the others: layers of one step take up
    to 7 times as long as another's, as long documents do."""
    world = WatchedWorld(2)
    for at in world.progress:
        at.begin("loading the model", unbounded=True)
    world.let_pass(4000.0)
    for number in range(1, 5):
        step_of(world, number, seconds=first if number == 1 else layer * (7 if number == 4 else 1), slow=number % 2)
    world.progress[0].begin("saving a checkpoint")
    world.progress[1].begin("callbacks")
    world.progress[1].begin("agreeing on what callbacks asked for", collective=True)
    world.let_pass(600.0)
    for watchdog in world.watchdogs:
        assert watchdog.stacks == []
        assert watchdog.left == ""


def test_the_first_of_its_kind_shows_its_stack_when_half_of_the_time_is_over():
    world = WatchedWorld(2)
    world.progress[0].begin("preparing the model and its optimizer")
    world.progress[1].begin("preparing the model and its optimizer", collective=True)
    world.let_pass(890.0)
    assert world.watchdogs[0].stacks == []
    world.let_pass(30.0)
    assert [len(watchdog.stacks) for watchdog in world.watchdogs] == [1, 0]


def test_what_may_take_any_time_is_said_in_a_line_by_rank_0_and_ends_nobody():
    world = WatchedWorld(3)
    world.progress[1].begin("planning the first steps", unbounded=True)
    for rank in (0, 2):
        world.progress[rank].begin("starting")
        world.progress[rank].begin("agreeing on the plan", collective=True)
    world.let_pass(10_000.0)
    assert [watchdog.left for watchdog in world.watchdogs] == ["", "", ""]
    first, *_ = notices = world.watchdogs[0].said
    assert re.fullmatch(
        r"watchdog: rank 1 of 3 is planning the first steps, for 3\d s so far; the others wait\. "
        r"This may take long, and ends nobody",
        first,
    )
    assert [seconds_of(notice) for notice in notices] == pytest.approx([30 * 2**n for n in range(9)], abs=15)
    assert [watchdog.said for watchdog in world.watchdogs[1:]] == [[], []]
    world.progress[1].begin("computing")  # from here on it is as any other
    world.let_pass(1820.0)
    assert [bool(watchdog.left) for watchdog in world.watchdogs] == [True, True, True]


def test_a_process_that_is_stopped_is_named_and_not_waited_for():
    world = WatchedWorld(3)
    step_of(world, 1, seconds=1.0)
    world.progress[2].begin("loading the model", unbounded=True)
    for rank in (0, 1):
        world.progress[rank].begin("summing gradients", collective=True)
    world.let_pass(40.0)
    world.stopped = {2}
    world.let_pass(2000.0)
    for watchdog in world.watchdogs[:2]:
        assert re.search(
            r"no sign of life for \d+ s \(its process is stopped, .*\) of rank 2 \(host", watchdog.said[-1]
        )
        assert "it has not moved for" in watchdog.left
        assert watchdog.stacks == []
    world.stopped = set()
    for at in world.progress:
        at.begin("callbacks")
    world.let_pass(5.0)  # its own absence is nobody else's
    assert not any("This rank 2 is at" in message for message in world.watchdogs[2].said)


@pytest.mark.parametrize("leader", [True, False])
def test_who_does_not_hear_rank_0_says_so_and_leaves(leader: bool):
    world = WatchedWorld(2)
    step_of(world, 1, seconds=1.0)
    world.progress[1].begin("agreeing on the plan", collective=True)
    if leader:
        world.stopped = {0}
    else:
        world.store_answers = False
    world.let_pass(1820.0)
    watchdog = world.watchdogs[1]
    assert re.search(
        r"no sign of life for \d+ s \(its process is stopped, its machine gone, or the job's store does not answer\) of rank 0 "
        r"\(host \S+, pid \d+\), last seen at step 1, optimizer step and callbacks\. This rank 1 is at step 1, agreeing",
        watchdog.said[0],
    )
    assert "it has not moved for" in watchdog.left


def test_a_rank_whose_training_has_ended_is_named_and_is_no_silence():
    world = WatchedWorld(2)
    step_of(world, 1, seconds=1.0)
    world.end(0)
    world.progress[1].begin("agreeing on the plan", collective=True)
    world.let_pass(100.0)
    assert world.watchdogs[1].said == []  # rank 0 publishes nothing any more, and its end was no silence


@pytest.mark.parametrize("stall_timeout", [4.0, 40.0, 70.0, 300.0])
def test_whatever_the_limit_the_stack_comes_before_the_end(stall_timeout: float):
    world = WatchedWorld(2, stall_timeout)
    step_of(world, 1, seconds=0.1)
    step_of(world, 2, seconds=0.1)
    world.progress[0].begin("summing gradients", collective=True)
    world.progress[1].begin("computing")
    world.let_pass(2 * stall_timeout)
    stalled = world.watchdogs[1]
    assert stalled.left
    assert len(stalled.stacks) >= 1


# The verdict


def sign(rank: int, step: int = 7, idle: float = 40.0, silent: float = 0.0, **place: object) -> Sign:
    progress = Progress(step=step, activity="computing", stage=3, micro_batch=1, micro_batches=2)
    for name, value in place.items():
        setattr(progress, name, value)
    return Sign(rank, "host a, pid 9", progress, idle, silent)


def named(*signs: Sign) -> list[int] | None:
    judgement = verdict(signs, 30.0)
    return None if judgement is None else judgement.named


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
    judgement = verdict(
        [sign(0, awaited=[2], layer=1), sign(1, awaited=[0], layer=1), sign(2, collective=True, stage=5)], 30.0
    )
    assert judgement is not None
    assert judgement.named == [0, 1]
    assert (
        "all ranks wait, furthest behind rank 0 (host a, pid 9): step 7, micro-batch 1 of 2, forward, layer 1, "
        in judgement.message
    )
    assert "waiting for keys and values of rank 2 for 40 s; rank 1" in judgement.message


def test_a_rank_whose_training_has_ended_is_named_if_the_others_wait():
    left = Sign(1, "host a, pid 9", Progress(step=7), float("inf"), 100.0, left=True)
    assert named(sign(0, awaited=[1]), left) == [1]
    assert named(sign(0), left) == [0]


def test_of_thousands_of_ranks_groups_are_said():
    waiting = [sign(rank, awaited=[5000], layer=rank % 3) for rank in range(5000)]
    judgement = verdict([*waiting, sign(5000)], 30.0)
    assert judgement is not None
    assert judgement.named == [5000]
    assert len(judgement.message) < 2000


def test_what_lasts_is_said_at_doubling_times_and_what_never_began_once():
    reports = Reports(30.0)
    assert [seconds for seconds in range(0, 300, 10) if reports.due(seconds)] == [30, 60, 120, 240]
    assert [reports.due(seconds) for seconds in (0.0, 31.0, 59.0, 1000.0)] == [False, True, False, True]
    assert [reports.due(math.inf) for _ in range(3)] == [True, False, False]
    assert not reports.due(0.0)
    assert reports.due(30.0)


def test_stacks_of_other_threads_are_shown_with_their_names():
    """Backward on a GPU runs in another thread than the one that trains."""
    inside, leave = threading.Event(), threading.Event()

    def stand_still() -> None:
        inside.set()
        leave.wait()

    thread = threading.Thread(target=stand_still, name="backward of the device")
    thread.start()
    inside.wait()
    try:
        shown = _other_threads(sys._current_frames())
    finally:
        leave.set()
        thread.join()
    assert "Its thread backward of the device:" in shown
    assert "in stand_still" in shown
    assert "test_stacks_of_other_threads" not in shown, "this one looks"
