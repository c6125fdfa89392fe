"""Damaged files of every kind: no error but our own, and nothing lost silently (damaged_sources.py says how that is known)."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_longctx.data.reading import Refused
from tests.data.reading.damaged_sources import DAMAGES, KINDS, check, compare, damage, trial, written


@settings(max_examples=400)
@given(kind=st.sampled_from(KINDS), rng=st.randoms(use_true_random=False))
def test_damaged_files_are_read_or_refused(kind, rng, tmp_path_factory):
    case, problems, *_ = trial(kind, rng, tmp_path_factory.getbasetemp() / "fuzz")
    assert problems == [], case


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_damage_to_every_kind_of_file(kind, tmp_path):
    for number, name in enumerate(DAMAGES):
        rng = random.Random(number)
        case = written(kind, rng, tmp_path / str(number))
        damage(case, [name], rng)
        problems, _ = check(case)
        assert problems == [], case


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_lost_silently_would_be_noticed(kind, tmp_path):
    case = written(kind, random.Random(3), tmp_path)
    problems, read = check(case)
    units = case.source.units()
    assert problems == []
    assert not any(isinstance(row, Refused) for row in read)
    for lost in range(len(read)):
        assert compare(case, read[:lost] + read[lost + 1 :], units) != []
