"""An epoch of the planned loader, over all ranks, is every document once; and where documents come from."""

import json
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import skip_first_batches
from datasets import Dataset, concatenate_datasets

from hf_longctx import LengthAwareCollator
from hf_longctx.data.ahead import Ahead
from hf_longctx.data.length_index import LengthIndex
from hf_longctx.data.loader import AHEAD, NotWanted, PlannedDataLoader, PlannedSteps
from hf_longctx.data.long_documents import cut_documents
from hf_longctx.planner import CPU_CORE, CostModel, GlobalBatches, PlanError, Topology
from tests.builders.tiny_models import tiny_llama
from tests.builders.training_runs import Rows, assembled, documents, held_segments
from tests.worlds.patience import PATIENCE

ROOT = Path(__file__).parents[2]
COST = CostModel.from_config(tiny_llama().config, CPU_CORE)
LENGTHS = [3, 150, 17, 60, 2, 9, 33, 40, 8, 21, 5, 90, 12, 6, 28, 50, 100, 2, 14, 30]


class Reads:
    """A data set that notes which documents are read, and fails to read one of them."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.broken: int | None = None
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, doc: int) -> dict[str, list[int]]:
        self.read.append(doc)
        if doc == self.broken:
            raise OSError(f"document {doc} lies on a broken disk")
        return self.rows[doc]


def planned(dataset: Any, rank: int, world_size: int, capacity: int = 50, **batch: int) -> PlannedSteps:
    pieces = cut_documents(dataset, LengthIndex.from_dataset(dataset))
    batches = GlobalBatches(pieces.lengths, 3, **(batch or {"tokens": 250}))
    return PlannedSteps(dataset, pieces, batches, LengthAwareCollator(Topology(world_size, capacity), COST, rank))


def epochs(dataset: Any, world_size: int, count: int = 1, **loader: Any) -> list[list[list[list[int]]]]:
    """[epoch][step]: the documents of the step, put together from what all ranks hold."""
    loaders = [
        PlannedDataLoader(planned(dataset, rank, world_size, 200 // world_size), **loader) for rank in range(world_size)
    ]
    steps = []
    for epoch in range(count):
        for source in loaders:
            source.set_epoch(epoch)
        segments = [[held_segments(step, rank) for step in source] for rank, source in enumerate(loaders)]
        steps.append([assembled(step) for step in zip(*segments, strict=True)])
        assert [len(steps[-1])] * world_size == [len(source) for source in loaders]
    return steps


def sources() -> dict[str, Any]:
    rows = documents(LENGTHS, labels=True)
    table = Dataset.from_list(rows)
    return {
        "list of dicts": rows,
        "datasets": table,
        "two tables in torch format": concatenate_datasets(
            [Dataset.from_list(rows[:7]), Dataset.from_list(rows[7:])]
        ).with_format("torch"),
        "another column": Dataset.from_list([row | {"name": "x"} for row in rows]),
        "a selection of a shuffled table": table.shuffle(seed=1).select(range(len(rows))),
        "a transform": table.with_transform(lambda batch: {name: list(column) for name, column in batch.items()}),
        "any class": Reads(rows),
    }


@pytest.mark.filterwarnings("ignore:1 of 20 documents are dropped")
@pytest.mark.parametrize("name", sources())
@pytest.mark.parametrize("world_size", [1, 3])
def test_an_epoch_is_every_document_once(name, world_size):
    dataset = sources()[name]
    usable = [row["input_ids"] for row in documents(LENGTHS, labels=True) if set(row["labels"][1:]) != {-100}]
    [epoch] = epochs(dataset, world_size)
    assert sorted(document for step in epoch for document in step) == sorted(usable)


def test_any_number_of_ranks_sees_the_same_steps_and_each_epoch_others():
    dataset = documents(LENGTHS)
    one = epochs(dataset, 1, count=6)
    assert epochs(dataset, 4, count=6) == one
    assert len({json.dumps(epoch[0]) for epoch in one}) == 6
    assert len({len(epoch) for epoch in one}) > 1, "cut by tokens, epochs differ in their number of steps"
    for epoch in one:
        assert sorted(document for step in epoch for document in step) == sorted(row["input_ids"] for row in dataset)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:1 of 20 documents are dropped")
def test_a_worker_process_prepares_what_the_thread_prepares():
    dataset = Dataset.from_list(documents(LENGTHS, labels=True))
    settings = {"num_workers": 1, "persistent_workers": True, "prefetch_factor": 2, "multiprocessing_context": "spawn"}
    in_thread = list(PlannedDataLoader(planned(dataset, 1, 2, 100)))
    loader = PlannedDataLoader(planned(dataset, 1, 2, 100), **settings)
    for epoch in range(2):
        loader.set_epoch(epoch)
        steps = list(loader)
        if epoch == 0:
            assert [step.plan.digest() for step in steps] == [step.plan.digest() for step in in_thread]
            for step, expected in zip(steps, in_thread, strict=True):
                for ours, theirs in zip(step.micro_batches, expected.micro_batches, strict=True):
                    assert torch.equal(ours.input_ids, theirs.input_ids)
                    assert torch.equal(ours.shift_labels, theirs.shift_labels)
        else:
            assert [step.plan.digest() for step in steps] != [step.plan.digest() for step in in_thread]


def test_resuming_skips_steps_without_reading_them():
    dataset = Reads(documents(LENGTHS))
    steps = planned(dataset, 0, 1, 200, documents=3)
    loader = PlannedDataLoader(steps)
    dataset.read.clear()
    rest = list(skip_first_batches(loader, 4))
    expected = [doc for step in range(4, steps.steps(0)) for doc in steps.documents(0, step)]
    assert sorted(dataset.read) == sorted(expected)
    assert len(rest) == len(loader) - 4
    assert [step.plan.digest() for step in rest] == [steps.plan(0, step).digest() for step in range(4, len(loader))]


def test_only_documents_of_which_this_rank_holds_a_part_are_read():
    dataset = Reads(documents(LENGTHS))
    loader = PlannedDataLoader(planned(dataset, 2, 4))
    dataset.read.clear()
    segments = [segment for step in loader for segment in held_segments(step, 2)]
    assert 0 < len(dataset.read) == len(set(dataset.read)) < len(dataset)
    read = [dataset.rows[doc]["input_ids"] for doc in dataset.read]
    for _, start, tokens in segments:
        assert any(document[start : start + len(tokens)] == tokens for document in read)
    for document in read:
        assert any(document[start : start + len(tokens)] == tokens for _, start, tokens in segments)


def test_the_thread_reads_ahead_while_a_step_is_consumed():
    dataset = Reads(documents(LENGTHS))
    steps = planned(dataset, 0, 1, 200, documents=2)
    dataset.read.clear()
    iterator = iter(PlannedDataLoader(steps))
    next(iterator)
    ahead = {doc for step in range(1 + AHEAD) for doc in steps.documents(0, step).tolist()}
    arrived = threading.Event()
    for _ in range(1000):
        if set(dataset.read) == ahead:
            break
        arrived.wait(0.01)
    assert set(dataset.read) == ahead


class SlowReads(Reads):
    """A data set of which one document cannot be read before `released` is set."""

    slow: int | None = None

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows)
        self.reading, self.released = threading.Event(), threading.Event()

    def __getitem__(self, doc: int) -> dict[str, list[int]]:
        if doc == self.slow:
            self.reading.set()
            self.released.wait()
        return super().__getitem__(doc)


def test_a_step_that_nobody_wants_any_more_is_not_waited_for():
    dataset = SlowReads(documents(LENGTHS))
    steps = planned(dataset, 0, 1, 200, documents=2)
    steps.told_to_end = dataset.reading.is_set
    dataset.slow = int(steps.documents(0, 1)[0])
    iterator = iter(PlannedDataLoader(steps))
    next(iterator)
    try:
        with pytest.raises(NotWanted):
            next(iterator)
    finally:
        dataset.released.set()


@pytest.mark.processes
def test_a_thread_at_work_does_not_keep_the_program_from_ending():
    """It may compile the planner, for half a minute, when a launcher waits for the end."""
    program = """
import sys, threading
from hf_longctx.data.ahead import Ahead
began, stop = threading.Event(), threading.Event()
working, done = Ahead(1, "works"), Ahead(2, "has nothing to do")
working.submit(lambda: (began.set(), stop.wait()))
waiting = working.submit(print, "never")
began.wait()
sys.exit(143)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (143, "", "")


def test_threads_end_with_what_they_work_for_and_keep_nothing_of_it():
    ahead, kept = Ahead(2, "hf_longctx-test"), Reads([])
    gone = weakref.ref(kept)
    assert ahead.submit(len, kept).result() == 0
    with pytest.raises(ZeroDivisionError):
        ahead.submit(divmod, 1, 0).result()
    threads = ahead.threads
    del kept, ahead
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    assert gone() is None


def test_an_error_of_reading_reaches_the_consumer_at_its_step():
    dataset = Reads(documents(LENGTHS))
    steps = planned(dataset, 0, 1, 200, documents=4)
    dataset.broken = int(steps.documents(0, 2)[1])
    iterator = iter(PlannedDataLoader(steps))
    assert [next(iterator).num_tokens for _ in range(2)] == [steps.plan(0, step).summary().tokens for step in range(2)]
    with pytest.raises(OSError, match="lies on a broken disk"):
        next(iterator)


def test_a_document_longer_than_all_ranks_hold_is_refused_before_anything_is_read():
    dataset = Dataset.from_list(documents([5, 401, 20]))
    with pytest.raises(
        PlanError,
        match=r"document 1 has 401 tokens, but .* 4 ranks \* 100 tokens .* = 400. Valid: capacity >= 101, or >= 5 ranks",
    ):
        planned(dataset, 0, 4, 100)
    assert len(planned(dataset, 0, 5, 100)) == 3


def test_plans_are_looked_at_without_reading():
    dataset = Reads(documents(LENGTHS))
    steps = planned(dataset, 0, 2, 100)
    dataset.read.clear()
    summaries = [steps.plan(0, step).summary() for step in range(steps.steps(0))]
    assert dataset.read == []
    assert sum(summary.documents for summary in summaries) == len(LENGTHS)
    assert sum(summary.tokens for summary in summaries) == int(np.sum(LENGTHS))
