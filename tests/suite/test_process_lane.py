"""A test that is not marked `processes` can start none, whichever way."""

import multiprocessing
import os
import subprocess
from collections.abc import Callable

import pytest

from hf_longctx.commands.shared.ranks import start_ranks
from tests.worlds import process_lane
from tests.worlds.fork_server import fork

WAYS: dict[str, Callable[[], object]] = {
    "subprocess": lambda: subprocess.run(["true"], check=True),
    "shell": lambda: os.system("true"),
    "fork": os.fork,
    "spawn": lambda: multiprocessing.get_context("spawn").Process(target=int).start(),
    "fork server": lambda: multiprocessing.get_context("forkserver").Process(target=int).start(),
    "the tests' fork server": lambda: fork(int, (), "a rank"),
    "ranks of a command": lambda: start_ranks(print, (), ranks=2),
}


@pytest.mark.parametrize("way", WAYS)
def test_without_the_marker_no_process_starts_and_the_test_fails_even_if_it_goes_on(way: str):
    with pytest.raises(RuntimeError, match=r"starts a process \(.*\): mark it with @pytest.mark.processes"):
        WAYS[way]()
    assert len(process_lane.end()) == 1, "what fails the test"


@pytest.mark.processes
def test_with_the_marker_it_does():
    assert subprocess.run(["true"], check=True).returncode == 0
    assert process_lane.end() == []
