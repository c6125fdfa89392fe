"""Twenty of the randomised trials of faults (benchmarks/faults.py runs hundreds), each kind of fault at least once."""

import pytest

from tests.drawn_faults import KINDS
from tests.fault_trials import trial

TRIALS = 20


@pytest.mark.parametrize("seed", range(TRIALS))
def test_a_disturbed_run_comes_to_the_result_of_an_undisturbed_one(seed, tmp_path):
    outcome = trial(seed, tmp_path)
    assert outcome.problems == [], "\n".join(outcome.story)


def test_every_kind_of_fault_is_tried():
    assert {KINDS[seed % len(KINDS)] for seed in range(TRIALS)} == set(KINDS)
