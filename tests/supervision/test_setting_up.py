"""A rank that is stopped while a run is set up is named on every other rank, with what it was doing, and nobody waits for it
for long; one that fails there is named with its error. What ranks do meanwhile is told by a trainer, times are those of a fake
clock (tests/worlds/watched_world.py), but for one job of true processes, which is stopped before there is a process group."""

import re
import threading
from pathlib import Path

import pytest

from hf_longctx.supervision.progress import Progress
from hf_longctx.supervision.watchdog import Watchdog
from hf_longctx.training.trainer import OUTSIDE
from tests.builders.tiny_models import tiny_llama
from tests.builders.training_runs import RecordingTrainer, arguments, documents, fresh_accelerator_state, plugin_with
from tests.worlds.faults.faulty_run import SETTING_UP, Fault, Settings
from tests.worlds.rank_launcher import Launched, launch
from tests.worlds.rank_pool import RankPool
from tests.worlds.watched_world import HeardWatchdog, WatchedWorld

STALL_SECONDS, JOIN_SECONDS = 12.0, 20.0
"""Of true processes."""
JOINING = "joining the other ranks"
"""What a program does before there is a process group."""
Activity = tuple[str, bool, bool]
"""Its name, whether it is collective, and whether it may take any time."""


class ToldProgress(Progress):
    """Keeps what it is told before the first step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.told: list[Activity] = []

    def begin(self, activity: str, *, collective: bool = False, unbounded: bool = False) -> None:
        super().begin(activity, collective=collective, unbounded=unbounded)
        if self.step == 0:
            self.told.append((activity, collective, unbounded))


def told_before_training(output_dir: Path) -> list[Activity]:
    """Return what a run tells of this rank."""
    fresh_accelerator_state()
    progress = ToldProgress()
    progress.begin(JOINING, unbounded=True)
    trainer = RecordingTrainer(
        model=tiny_llama(),
        args=arguments(output_dir, max_steps=1),
        train_dataset=documents([3, 15, 17, 6]),
        plugin=plugin_with(capacity=32, global_batch_documents=4),
        watching=Watchdog(progress, 1800.0),
    )
    trainer.train()
    return progress.told


@pytest.fixture(scope="module")
def activities(ranks2: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[Activity]:
    """Return the activities of ranks that set up a run, in this order."""
    first, second = ranks2.run(told_before_training, tmp_path_factory.mktemp("told"))
    assert first == second
    return first


def named_in(message: str, rank: int, activity: str) -> bool:
    """Whether it names a rank that is stopped, and what that was doing."""
    who = rf"of rank {rank} \(host \S+, pid \d+\), last seen at setting up, {activity}"
    return re.search(rf"no sign of life for \d+ s [^.]*{who}", message) is not None


def error_of_a_collective(watchdog: HeardWatchdog) -> str:
    """Return what is added to it."""
    watchdog._threads = [threading.current_thread()]  # as if they had begun
    with pytest.raises(RuntimeError) as error, watchdog.explaining():
        raise RuntimeError("[gloo] Timed out waiting 1800000ms for recv operation to complete")
    return "\n".join(error.value.__notes__)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("activity", [JOINING, *SETTING_UP, OUTSIDE])
def test_a_rank_that_is_stopped_is_named_with_what_it_was_doing(ranks: int, activity: str, activities: list[Activity]):
    """The others wait for it where it is stopped, and if there are more, one activity later, and before the first step."""
    stopped = next(number for number, (name, *_) in enumerate(activities) if name == activity)
    waiting = [activities[stopped], activities[stopped + 1], activities[-1]][: ranks - 1]
    world = WatchedWorld(ranks, stall_timeout=300.0)
    for at, (name, collective, unbounded) in zip(world.progress, [*waiting, activities[stopped]]):
        at.begin(name, collective=collective, unbounded=unbounded)
    world.let_pass(10.0)
    world.stopped = {ranks - 1}
    world.let_pass(60.0)
    for watchdog in world.watchdogs[:-1]:
        assert named_in("\n".join(watchdog.said), ranks - 1, activity), watchdog.said
    world.let_pass(600.0)  # those that leave first may be rank 0, whose silence counts from then
    for watchdog, (_, _, unbounded) in zip(world.watchdogs, waiting):
        assert "it has not moved for" in watchdog.left
        # What may take any time ends nobody, but for a rank that is gone.
        assert ("a rank has given no sign of life for" in watchdog.left) == unbounded
        assert named_in(error_of_a_collective(watchdog), ranks - 1, activity)


# True processes


def run(folder: Path, phase: str, action: str) -> Launched:
    """Two ranks, of which the second meets a fault."""
    settings = Settings(
        str(folder / "run"),
        (Fault(action, 1, phase),),
        stall_timeout_seconds=STALL_SECONDS,
        join_seconds=JOIN_SECONDS,
    )
    return launch(settings, 2, folder / "logs", patient=True)


@pytest.mark.processes
def test_a_rank_that_is_stopped_before_there_is_a_process_group_is_named(tmp_path: Path):
    launched = run(tmp_path, "start-up", "stop")
    assert launched.hung == []
    ending = launched.endings[0]
    assert ending.code not in (0, -9)
    assert named_in(ending.output, 1, JOINING), ending.output


@pytest.mark.processes
def test_a_rank_that_fails_is_named_with_its_error_where_the_others_wait(tmp_path: Path):
    launched = run(tmp_path, "starting", "raise")
    assert [ending.code for ending in launched.endings] == [1, 1]
    assert "watchdog:" not in launched.endings[1].output
    output = launched.endings[0].output
    assert "hf_longctx: watchdog: collectives fail because of rank 1 (host" in output, output
    assert "setting up, failed with LookupError: the dictionary of rank 1 at step 0 (starting) is torn" in output
