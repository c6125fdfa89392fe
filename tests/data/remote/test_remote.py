"""Steps that come through Ray are those of the local loader, bit by bit, whoever dies on the way.

One local Ray serves all tests of this file. Ranks are clients in threads of this process: each has its own RemoteSteps,
and they share nothing but the actors.
"""

import ast
import math
import os
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from datasets import Dataset, load_from_disk

from hf_longctx.data.collator import LengthAwareCollator, RankStep
from hf_longctx.data.length_index import LengthIndex
from hf_longctx.data.loader import PlannedDataLoader, PlannedSteps
from hf_longctx.data.long_documents import cut_documents
from hf_longctx.data.remote import client
from hf_longctx.data.remote.client import RemoteSteps
from hf_longctx.data.remote.cluster import FREE_MILLISECONDS, RemoteError, connect, disconnect
from hf_longctx.data.remote.wire import TOKEN_BYTES, PackedStep, narrowed, store_bytes
from hf_longctx.data.step_plans import PlannedStep
from hf_longctx.planner import GlobalBatches, PlanError, Topology
from hf_longctx.planner.cost.adjustment import Adjustment, Adjustments
from hf_longctx.planner.cost.selective_offload import Offload
from tests.builders.imported_names import imported_names
from tests.builders.training_runs import documents
from tests.data.remote.remote_steps import (
    COST,
    LENGTHS,
    Rows,
    assert_same,
    clients,
    epoch_of,
    every_document_once,
    local_epoch,
    processes,
    settings,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module", autouse=True)
def address(starts_processes: None) -> Iterator[str]:
    """Return the address of the Ray that all tests here use."""
    handler = signal.getsignal(signal.SIGTERM)
    address = connect(store_bytes=200 << 20)
    assert signal.getsignal(signal.SIGTERM) == handler, "a trainer's own handler stays"
    yield address
    disconnect()


@pytest.fixture(scope="module")
def four(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RemoteSteps]]:
    """Four ranks and two servers, on a stored data set."""
    folder = tmp_path_factory.mktemp("stored")
    Dataset.from_list(documents(LENGTHS)).save_to_disk(folder)
    with clients(load_from_disk(folder), 4, remote={"servers": 2, "name": "four"}) as ranks:
        yield ranks


def test_an_epoch_is_the_local_loader_s_and_each_step_is_planned_once(four):
    assert len(four[0]) == len(LENGTHS)
    epoch = epoch_of(four)
    report = four[0].planner_report()
    assert report.planned == len(epoch) == 6
    niceness = {os.getpriority(os.PRIO_PROCESS, process) for process in processes(four).values()}
    assert niceness == {os.getpriority(os.PRIO_PROCESS, 0)}, "or ranks that compute would starve them"
    for [step, *_] in epoch[-2:]:
        assert str(report.certificates[step.position]) == str(step.plan.summary())
    assert_same(epoch, local_epoch(four[0].dataset, 4))
    every_document_once(epoch, documents(LENGTHS))
    assert any(part.layout.split_documents for step in epoch for rank in step for part in rank.micro_batches)


@pytest.mark.filterwarnings("ignore:1 of 20 documents are dropped")
def test_lockstep_with_labels_in_a_data_set_of_any_class():
    rows = Rows(documents(LENGTHS[:20], labels=True, seed=4))
    with clients(rows, 4, mode="lockstep") as ranks:
        epoch = epoch_of(ranks)
    assert_same(epoch, local_epoch(rows, 4, mode="lockstep"))
    assert any(part.idle for step in epoch for rank in step for part in rank.micro_batches)


@pytest.mark.filterwarnings("ignore:.* documents are longer than")
def test_documents_cut_and_activations_offloaded():
    more: dict[str, Any] = {"capacity": 60, "policy": "split", "limit": 110}
    more["offload"] = Offload(share=900, transfer_ps=1, host_tokens=10**6)
    rows = documents(LENGTHS)
    with clients(rows, 2, **more) as ranks:
        assert len(ranks[0]) > len(rows)
        epoch = epoch_of(ranks)
    assert_same(epoch, local_epoch(rows, 2, **more))
    assert any(part.offload for step in epoch for rank in step for part in rank.micro_batches)


def test_killed_actors_come_back_and_every_document_is_seen_once(four):
    before = processes(four)

    def kill(step: int) -> None:
        victim = {0: "planner", 1: "server 0", 3: "server 1", 4: "planner"}.get(step)
        if victim is not None:
            os.kill(processes(four)[victim], signal.SIGKILL)

    epoch = epoch_of(four, kill)
    after = processes(four)
    assert_same(epoch, local_epoch(four[0].dataset, 4))
    every_document_once(epoch, documents(LENGTHS))
    assert all(before[role] != after[role] for role in ("planner", "server 0", "server 1"))


def test_an_adjustment_in_mid_epoch_holds_from_the_same_step_on(four):
    slow = (1000, 300, 1000, 1000)

    def adjusting(steps: Sequence[PlannedSteps]) -> list[list[RankStep]]:
        def agree(step: int) -> None:
            if step == 1:
                for source in steps:
                    source.adjustments = Adjustments([(0, step + source.ahead + 1, Adjustment(speed=slow))])

        return epoch_of(steps, agree)

    epoch = adjusting(four)
    for source in four:
        source.adjustments = Adjustments()
    assert_same(epoch, adjusting([PlannedSteps(*settings(four[0].dataset, 4, rank)) for rank in range(4)]))
    speeds = [step[0].plan.topology.speed for step in epoch]
    assert speeds[:4] == [None] * 4
    assert set(speeds[4:]) == {slow}


def test_ranks_that_disagree_are_told(four):
    rows = four[0].dataset
    names: dict[str, Any] = {"job": "tests", "name": "four", "servers": 2}
    with pytest.raises(RemoteError, match="rank 1 would plan 'four' of 'tests' from other documents or settings"):
        RemoteSteps(*settings(rows, 4, 1, capacity=60), **names)
    with pytest.raises(RemoteError, match=r"rank 0 has not created the planner of 'other' of 'tests' within 0\.5 s"):
        RemoteSteps(*settings(rows, 4, 1), job="tests", name="other", timeout_seconds=0.5)
    with pytest.raises(ValueError, match="num_workers is 2, but document servers prepare the steps"):
        PlannedDataLoader(four[0], num_workers=2)
    for wrong in ({"servers": 0}, {"ahead": -1}):
        with pytest.raises(ValueError, match="it must be >="):
            RemoteSteps(*settings(rows, 4, 0), **(names | wrong))
    with pytest.raises(PlanError, match="document 1 has 150 tokens"):
        RemoteSteps(*settings(rows, 2, 0), **names)
    unpicklable = Rows(rows)
    unpicklable.rows = (row for row in rows)
    with pytest.raises(TypeError, match=r"Rows cannot be sent to document servers: cannot pickle 'generator'"):
        RemoteSteps(unpicklable, *settings(rows, 4, 0)[1:], job="tests", name="unpicklable")


def test_the_object_store_holds_no_more_than_was_computed(tmp_path):
    """Memory that objects have taken stays with the store for the next ones, so its size is the most that was ever held."""
    documents, length, together = 60, 100_000, 6
    tokens = np.random.default_rng(0).integers(0, 99, (documents, length), dtype=np.int32)
    Dataset.from_dict({"input_ids": list(tokens)}).save_to_disk(tmp_path)
    rows = load_from_disk(tmp_path)
    pieces = cut_documents(rows, LengthIndex.from_dataset(rows))
    batches = GlobalBatches(pieces.lengths, 0, documents=together)
    collators = [LengthAwareCollator(Topology(2, together * length), COST, rank) for rank in range(2)]
    ranks = [RemoteSteps(rows, pieces, batches, collator, job="tests", name="bound", ahead=1) for collator in collators]
    before = store_size()
    epoch = epoch_of(ranks, lambda step: time.sleep(4 * FREE_MILLISECONDS / 1000))
    grown = store_size() - before
    bound = ranks[0].store_bytes(plan_bytes=4096)
    step_tokens = together * length
    assert bound == store_bytes(step_tokens, 1, 4096, 1, 2) == 2 * (step_tokens * TOKEN_BYTES + 2 * 4096) + 3 * 4096 * 2
    assert bound < documents * length * TOKEN_BYTES / 4, "all parts together are much more"
    assert step_tokens * TOKEN_BYTES / 2 < grown <= bound
    digests = [[of_rank.plan.digest() for of_rank in step] for step in epoch]
    for source in ranks:
        source.close()
    assert digests == [[of_rank.plan.digest() for of_rank in step] for step in epoch], "steps outlive the actors"


def store_size() -> int:
    """Bytes of memory that the object store has taken: a file that its raylet holds open."""
    node: Any = ray._private.worker._global_node
    [raylet] = node.all_processes["raylet"]
    files = list(Path(f"/proc/{raylet.process.pid}/fd").iterdir())
    [store] = {os.stat(file).st_ino: file for file in files if "/plasma" in os.readlink(file)}.values()
    return os.stat(store).st_blocks * 512


def test_whatever_fails_is_named_within_a_bounded_time(monkeypatch):
    """Bounded by the seconds that Ray is told to wait: once for the answer, then once for each actor's sign of life."""
    patience: list[float] = []
    get, alive = ray.get, 5.0

    def counted(reference: Any, *, timeout: float | None = None) -> Any:
        patience.append(math.inf if timeout is None else timeout)
        return get(reference, timeout=timeout)

    monkeypatch.setattr(client, "ALIVE_SECONDS", alive)
    monkeypatch.setattr(client.ray, "get", counted)
    rows = Rows(documents(LENGTHS))
    others = settings(rows, 1, 0, capacity=200)[1:]
    rows.broken = int(PlannedSteps(rows, *others).documents(0, 1)[0])
    steps = RemoteSteps(rows, *others, job="tests", name="failing", ahead=0)

    def fails(step: int) -> str:
        patience.clear()
        with pytest.raises((RemoteError, OSError)) as error:
            steps[steps.order(0, step)]
        asked = [steps.timeout_seconds] if isinstance(error.value, OSError) else [steps.timeout_seconds, alive, alive]
        assert patience == asked
        return str(error.value)

    assert steps[steps.order(0, 0)].num_tokens > 0
    assert fails(1) == f"document {rows.broken} lies on a broken disk"
    server = processes([steps])["server 0"]
    os.kill(server, signal.SIGSTOP)
    steps.timeout_seconds = 2.0
    assert "step 2 of epoch 0 did not come within 2 s; without an answer: server 0 (GetTimeoutError)" in fails(2)
    os.kill(server, signal.SIGCONT)
    steps.timeout_seconds = client.TIMEOUT_SECONDS
    assert steps[steps.order(0, 2)].position == (0, 2)
    ray.kill(steps._actors["planner"])
    assert "step 3 of epoch 0 cannot come; without an answer: planner (ActorDiedError)" in fails(3)
    ray.kill(steps._actors["server 0"])
    assert "without an answer: planner (ActorDiedError), server 0 (ActorDiedError)" in fails(3)
    steps.close()


def test_columns_travel_in_32_bits_where_they_fit():
    limits = np.array([-(2**31), 2**31 - 1])
    assert narrowed(limits).dtype == np.int32
    assert narrowed(limits + 1).dtype == narrowed(limits - 1).dtype == np.int64
    assert narrowed(np.zeros(0, np.int64)).dtype == np.int32
    plan = LengthAwareCollator(Topology(4, 100), COST).plan(np.array([300, 20, 50]))
    plan.summary()
    again = PackedStep.pack(PlannedStep(plan, 7, 370, -5)).unpack()
    assert again.plan.digest() == plan.digest()
    assert again.plan.summary() == plan.summary()
    assert (again.num_items, again.num_tokens, again.fingerprint) == (7, 370, -5)


def test_only_the_remote_loader_imports_ray_and_its_actors_do_without_torch(four):
    for file in (ROOT / "hf_longctx").rglob("*.py"):
        names = {name.split(".")[0] for _, name in imported_names(ast.parse(file.read_text()), "hf_longctx")}
        assert "ray" not in names or file.parent.name == "remote", file
    for role, pid in processes(four).items():
        loaded = Path(f"/proc/{pid}/maps").read_text()
        assert "libarrow" in loaded or role == "planner"
        assert "libtorch" not in loaded, role
