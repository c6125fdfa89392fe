"""A rank that is stopped while a run is set up is named on every other rank, with what it was doing, and nobody waits for it
for long; one that fails there is named with its error."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faulty_run import SETTING_UP, Fault, Settings
from tests.rank_launcher import Launched, launch

pytestmark = pytest.mark.processes

STALL_SECONDS, JOIN_SECONDS = 12.0, 20.0
CASES = (
    *((2, phase) for phase in ("start-up", *SETTING_UP, "before training")),
    *((4, phase) for phase in ("making process groups", "preparing the model and its optimizer")),
)
"""(ranks, what the last of them is doing when it is stopped)"""
PLACES = {
    "start-up": "setting up, joining the other ranks",  # there is no process group yet
    "before training": "setting up, running code outside the trainer",
}
AT_ONCE = 5
"""Cases side by side: ranks that wait leave the cores to others. With all ten, 24 processes begin at once, and a rank may not be
heard for as long as the test's watchdogs wait, whoever is stopped (seen once)."""


def run(folder: Path, ranks: int, phase: str, action: str) -> Launched:
    settings = Settings(
        str(folder / "run"),
        (Fault(action, ranks - 1, phase),),
        stall_timeout_seconds=STALL_SECONDS,
        join_seconds=JOIN_SECONDS,
    )
    return launch(settings, ranks, folder / "logs", patient=True)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> dict[tuple[int, str], Launched]:
    """What became of each case."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        cases = {case: pool.submit(run, tmp_path_factory.mktemp("case"), *case, "stop") for case in CASES}
        return {case: future.result() for case, future in cases.items()}


@pytest.mark.parametrize(("ranks", "phase"), CASES)
def test_a_rank_that_is_stopped_is_named_with_what_it_was_doing(ranks: int, phase: str, stopped):
    launched = stopped[ranks, phase]
    assert launched.hung == []
    place = PLACES.get(phase, f"setting up, {phase}")
    for ending in launched.endings[:-1]:
        assert ending.code not in (0, -9)
        assert re.search(
            rf"no sign of life for \d+ s [^.]*of rank {ranks - 1} \(host \S+, pid \d+\), last seen at {place}",
            ending.output,
        ), ending.output


def test_a_rank_that_fails_is_named_with_its_error_where_the_others_wait(tmp_path):
    launched = run(tmp_path, 2, "starting", "raise")
    assert [ending.code for ending in launched.endings] == [1, 1]
    assert "watchdog:" not in launched.endings[1].output
    said = launched.endings[0].output
    assert "hf_longctx: watchdog: collectives fail because of rank 1 (host" in said, said
    assert "setting up, failed with LookupError: the dictionary of rank 1 at step 0 (starting) is torn" in said
