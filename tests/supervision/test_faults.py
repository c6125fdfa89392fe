"""One randomised trial of each kind of fault, more by night; benchmarks/faults.py runs hundreds."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.worlds.faults.drawn_faults import KINDS
from tests.worlds.faults.fault_trials import Outcome, trial

pytestmark = pytest.mark.processes

TRIALS = 20
"""By night. Trial n is of the kind n, counted around."""
AT_ONCE = 3
"""Trials side by side: ranks of a trial that stalls wait, and leave the cores to the others."""


@pytest.fixture(scope="module")
def outcomes(request, tmp_path_factory) -> Iterator[dict[int, Future[Outcome]]]:
    """Return the outcomes of the trials that this session asks for, by seed; all of them are under way."""
    asked = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    seeds = [item.callspec.params["seed"] for item in asked]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {seed: pool.submit(trial, seed, tmp_path_factory.mktemp(f"trial-{seed}-")) for seed in seeds}


@pytest.mark.parametrize(
    "seed", [*range(len(KINDS)), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(len(KINDS), TRIALS))]
)
def test_a_disturbed_run_comes_to_the_result_of_an_undisturbed_one(seed, outcomes):
    outcome = outcomes[seed].result()
    assert outcome.problems == [], "\n".join(outcome.story)


def test_every_kind_of_fault_is_tried():
    assert {KINDS[seed % len(KINDS)] for seed in range(len(KINDS))} == set(KINDS)
