"""Processes wait for work of others by the store, longer than any collective would."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from hf_longctx.training import waiting
from hf_longctx.training.waiting import first_of_machine_first, wait_for_all
from tests.worlds.rank_pool import RankPool


def waited(ranks_here: int) -> list[str]:
    """Return what this rank sees in order, and that no collective is begun."""
    told: list[str] = []
    store = dist.distributed_c10d._get_default_store()
    rank, local = dist.get_rank(), dist.get_rank() % ranks_here
    with first_of_machine_first("a test", local):
        done = f"test_waiting/{rank - local}"
        told.append("first" if local == 0 else "after" if store.check([done]) else "too early")
        if local == 0:
            time.sleep(0.3)
            store.set(done, "done")
    if rank == 3:
        time.sleep(0.3)
        store.set("test_waiting/last", "here")
    wait_for_all("a test")
    told.append("all" if store.check(["test_waiting/last"]) else "too early")
    return told


def test_the_first_of_each_machine_goes_first_and_all_are_waited_for(ranks4: RankPool):
    by_rank = ranks4.run(waited, 2)
    assert by_rank == [["first", "all"], ["after", "all"]] * 2


def failing(ranks_here: int) -> str:
    local = dist.get_rank() % ranks_here
    with (
        pytest.raises(ValueError, match="first" if local == 0 else "after"),
        first_of_machine_first("a failure", local),
    ):
        raise ValueError("first" if local == 0 else "after")
    wait_for_all("a failure")
    return "left"


def test_a_first_process_that_fails_does_not_keep_the_others(ranks2: RankPool):
    assert ranks2.run(failing, 2) == ["left", "left"]


def test_one_process_waits_for_nobody():
    assert timedelta(minutes=1).total_seconds() > waiting.EVERY
    wait_for_all("alone")
    with first_of_machine_first("alone", 0):
        pass
