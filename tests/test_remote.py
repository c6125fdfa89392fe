"""Steps that come through Ray are those of the local loader, bit by bit, whoever dies on the way.

One local Ray serves all tests of this file. Ranks are clients in threads of this process: each has its own RemoteSteps,
and they share nothing but the actors.
"""

import ast
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from datasets import Dataset, load_from_disk

from hf_longctx.data.collator import LengthAwareCollator, RankStep
from hf_longctx.data.length_index import LengthIndex
from hf_longctx.data.loader import PlannedDataLoader, PlannedSteps
from hf_longctx.data.long_documents import cut_documents
from hf_longctx.data.remote.client import ALIVE_SECONDS, RemoteSteps, refuse_small_store
from hf_longctx.data.remote.cluster import FREE_MILLISECONDS, RemoteError, connect, disconnect, total_store_bytes
from hf_longctx.data.remote.wire import TOKEN_BYTES, PackedStep, narrowed, store_bytes
from hf_longctx.data.step_plans import PlannedStep
from hf_longctx.planner import CPU_CORE, CostModel, GlobalBatches, PlanError, Topology
from hf_longctx.planner.adjustment import Adjustment, Adjustments
from hf_longctx.planner.offload import Offload
from tests.test_imports import imported_names
from tests.tiny_models import tiny_llama
from tests.training_runs import assembled, documents, held_segments

COST = CostModel.from_config(tiny_llama().config, CPU_CORE)
ROOT = Path(__file__).parent.parent
STORE_BYTES = 200 << 20
NAMES = count()
LENGTHS = [3, 150, 17, 60, 2, 9, 33, 40, 8, 21, 5, 90, 12, 6, 28, 50, 100, 2, 14, 30] * 2


@pytest.fixture(scope="module", autouse=True)
def address() -> Iterator[str]:
    """Of the Ray that all tests here use."""
    handler = signal.getsignal(signal.SIGTERM)
    address = connect(store_bytes=STORE_BYTES)
    assert signal.getsignal(signal.SIGTERM) == handler, "a trainer's own handler stays"
    yield address
    disconnect()


class Rows:
    """A data set of any class, which can fail to read a document."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self.broken: int | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, doc: int) -> Any:
        if doc == self.broken:
            raise OSError(f"document {doc} lies on a broken disk")
        return self.rows[doc]


def settings(
    dataset: Any,
    world_size: int,
    rank: int,
    *,
    capacity: int = 50,
    policy: str = "error",
    limit: int | None = None,
    **more: Any,
) -> tuple[Any, ...]:
    """What PlannedSteps and RemoteSteps are made from."""
    pieces = cut_documents(dataset, LengthIndex.from_dataset(dataset), policy, limit)
    collator = LengthAwareCollator(Topology(world_size, capacity), COST, rank, **more)
    return dataset, pieces, GlobalBatches(pieces.lengths, 3, tokens=250), collator


@contextmanager
def clients(
    dataset: Any, world_size: int, *, remote: dict[str, Any] | None = None, **more: Any
) -> Iterator[list[RemoteSteps]]:
    """[world_size]: what each rank uses, of one run."""
    made: list[RemoteSteps] = []
    names = {"job": "tests", "name": f"steps {next(NAMES)}"} | (remote or {})
    try:
        for rank in range(world_size):
            made.append(RemoteSteps(*settings(dataset, world_size, rank, **more), **names))
        yield made
    finally:
        for each in made:
            each.close()


def epoch_of(
    steps: Sequence[PlannedSteps], after_step: Callable[[int], None] = lambda step: None
) -> list[list[RankStep]]:
    """[step][rank] of epoch 0: all ranks take a step, each in a thread of its own, then the next."""
    iterators = [iter(PlannedDataLoader(each)) for each in steps]
    found = []
    with ThreadPoolExecutor(len(steps)) as threads:
        for step in range(steps[0].steps(0)):
            found.append(list(threads.map(next, iterators)))
            after_step(step)
    return found


def local_epoch(dataset: Any, world_size: int, **more: Any) -> list[list[RankStep]]:
    return epoch_of([PlannedSteps(*settings(dataset, world_size, rank, **more)) for rank in range(world_size)])


def assert_same(ours: list[list[RankStep]], theirs: list[list[RankStep]]) -> None:
    """Bit by bit."""
    for step, expected in zip(ours, theirs, strict=True):
        for a, b in zip(step, expected, strict=True):
            assert (a.fingerprint, a.position, a.num_items, a.num_tokens) == (
                b.fingerprint,
                b.position,
                b.num_items,
                b.num_tokens,
            )
            assert a.plan.digest() == b.plan.digest()
            assert str(a.plan.summary()) == str(b.plan.summary())
            for mine, other in zip(a.micro_batches, b.micro_batches, strict=True):
                assert (mine.layout, mine.offload, mine.idle) == (other.layout, other.offload, other.idle)
                for name in ("input_ids", "shift_labels"):
                    one, two = getattr(mine, name), getattr(other, name)
                    assert one.dtype == two.dtype == torch.int64
                    assert torch.equal(one, two)


def every_document_once(epoch: list[list[RankStep]], rows: Any) -> None:
    held = [[held_segments(each, rank) for rank, each in enumerate(step)] for step in epoch]
    assert sorted(doc for step in held for doc in assembled(step)) == sorted(row["input_ids"] for row in rows)


def processes(steps: Sequence[RemoteSteps]) -> dict[str, int]:
    """Of each actor."""
    servers = {f"server {each._served_by}": each.server_report().process for each in steps}
    return {"planner": steps[0].planner_report().process} | servers


@pytest.fixture(scope="module")
def four(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RemoteSteps]]:
    """Four ranks and two servers, on a stored data set."""
    folder = tmp_path_factory.mktemp("stored")
    Dataset.from_list(documents(LENGTHS)).save_to_disk(folder)
    with clients(load_from_disk(folder), 4, remote={"servers": 2, "name": "four"}) as ranks:
        yield ranks


def test_an_epoch_is_the_local_loader_s_and_each_step_is_planned_once(four):
    assert len(four[0]) == len(LENGTHS)
    found = epoch_of(four)
    report = four[0].planner_report()
    assert report.planned == len(found) == 6
    for [step, *_] in found[-2:]:
        assert str(report.certificates[step.position]) == str(step.plan.summary())
    assert_same(found, local_epoch(four[0].dataset, 4))
    every_document_once(found, documents(LENGTHS))
    assert any(each.layout.split_documents for step in found for rank in step for each in rank.micro_batches)


@pytest.mark.filterwarnings("ignore:1 of 20 documents are dropped")
def test_lockstep_with_labels_in_a_data_set_of_any_class():
    rows = Rows(documents(LENGTHS[:20], labels=True, seed=4))
    with clients(rows, 4, mode="lockstep") as ranks:
        found = epoch_of(ranks)
    assert_same(found, local_epoch(rows, 4, mode="lockstep"))
    assert any(each.idle for step in found for rank in step for each in rank.micro_batches)


@pytest.mark.filterwarnings("ignore:.* documents are longer than")
def test_documents_cut_and_activations_offloaded():
    more: dict[str, Any] = {"capacity": 60, "policy": "split", "limit": 110}
    more["offload"] = Offload(share=900, transfer_ps=1, host_tokens=10**6)
    rows = documents(LENGTHS)
    with clients(rows, 2, **more) as ranks:
        assert len(ranks[0]) > len(rows)
        found = epoch_of(ranks)
    assert_same(found, local_epoch(rows, 2, **more))
    assert any(each.offload for step in found for rank in step for each in rank.micro_batches)


def test_killed_actors_come_back_and_every_document_is_seen_once(four):
    before = processes(four)

    def kill(step: int) -> None:
        victim = {0: "planner", 1: "server 0", 3: "server 1", 4: "planner"}.get(step)
        if victim is not None:
            os.kill(processes(four)[victim], signal.SIGKILL)

    found = epoch_of(four, kill)
    after = processes(four)
    assert_same(found, local_epoch(four[0].dataset, 4))
    every_document_once(found, documents(LENGTHS))
    assert all(before[role] != after[role] for role in ("planner", "server 0", "server 1"))


def test_an_adjustment_in_mid_epoch_holds_from_the_same_step_on(four):
    slow = (1000, 300, 1000, 1000)

    def adjusting(steps: Sequence[PlannedSteps]) -> list[list[RankStep]]:
        def agree(step: int) -> None:
            if step == 1:
                for each in steps:
                    each.adjustments = Adjustments([(0, step + each.ahead + 1, Adjustment(speed=slow))])

        return epoch_of(steps, agree)

    found = adjusting(four)
    for each in four:
        each.adjustments = Adjustments()
    assert_same(found, adjusting([PlannedSteps(*settings(four[0].dataset, 4, rank)) for rank in range(4)]))
    speeds = [step[0].plan.topology.speed for step in found]
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
    ranks = [RemoteSteps(rows, pieces, batches, each, job="tests", name="bound", ahead=1) for each in collators]
    before = store_size()
    found = epoch_of(ranks, lambda step: time.sleep(4 * FREE_MILLISECONDS / 1000))
    grown = store_size() - before
    bound = ranks[0].store_bytes(plan_bytes=4096)
    step_tokens = together * length
    assert bound == store_bytes(step_tokens, 1, 4096, 1, 2) == 2 * (step_tokens * TOKEN_BYTES + 2 * 4096) + 3 * 4096 * 2
    assert bound < documents * length * TOKEN_BYTES / 4, "all parts together are much more"
    assert step_tokens * TOKEN_BYTES / 2 < grown <= bound
    digests = [[each.plan.digest() for each in step] for step in found]
    for each in ranks:
        each.close()
    assert digests == [[each.plan.digest() for each in step] for step in found], "steps outlive the actors"


def store_size() -> int:
    """Bytes of memory that the object store has taken: a file that its raylet holds open."""
    node: Any = ray._private.worker._global_node
    [raylet] = node.all_processes["raylet"]
    files = list(Path(f"/proc/{raylet.process.pid}/fd").iterdir())
    [store] = {os.stat(file).st_ino: file for file in files if "/plasma" in os.readlink(file)}.values()
    return os.stat(store).st_blocks * 512


def test_whatever_fails_is_named_within_a_bounded_time():
    rows = Rows(documents(LENGTHS))
    others = settings(rows, 1, 0, capacity=200)[1:]
    rows.broken = int(PlannedSteps(rows, *others).documents(0, 1)[0])
    steps = RemoteSteps(rows, *others, job="tests", name="failing", ahead=0)

    def fails(step: int) -> str:
        started = time.monotonic()
        with pytest.raises((RemoteError, OSError)) as error:
            steps[steps.order(0, step)]
        assert time.monotonic() - started < 2 + 2 * ALIVE_SECONDS + 2
        return str(error.value)

    assert steps[steps.order(0, 0)].num_tokens > 0
    steps.timeout_seconds = 2.0
    assert fails(1) == f"document {rows.broken} lies on a broken disk"
    server = processes([steps])["server 0"]
    os.kill(server, signal.SIGSTOP)
    assert "step 2 of epoch 0 did not come within 2 s; without an answer: server 0 (GetTimeoutError)" in fails(2)
    os.kill(server, signal.SIGCONT)
    assert steps[steps.order(0, 2)].position == (0, 2)
    ray.kill(steps._actors["planner"])
    assert "step 3 of epoch 0 cannot come; without an answer: planner (ActorDiedError)" in fails(3)
    ray.kill(steps._actors["server 0"])
    assert "without an answer: planner (ActorDiedError), server 0 (ActorDiedError)" in fails(3)
    steps.close()


def test_a_store_too_small_for_a_step_is_refused_with_the_arithmetic():
    assert total_store_bytes() == STORE_BYTES
    refuse_small_store(100, 2, 2400)
    with pytest.raises(
        RemoteError,
        match=r"hold 2399 bytes, but .* \(1 \+ 2\) \* 100 tokens \* 8 bytes = 2400\. Valid: stores of >= 2400 bytes, or "
        r"ahead <= 1, or global batches of <= 99 tokens",
    ):
        refuse_small_store(100, 2, 2399)
    with pytest.raises(RemoteError, match=r"Valid: stores of >= 1600 bytes, or global batches of <= 49 tokens"):
        refuse_small_store(100, 1, 799)


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


def test_only_the_loopback_interface_listens_and_others_join_by_the_address(address):
    assert address.startswith("127.0.0.1:")
    session = ray._private.worker._global_node
    assert session is not None
    pids = {info.process.pid for infos in session.all_processes.values() for info in infos}
    pids |= {int(line.split()[0]) for line in children(pids)}
    listening = [line for line in sockets() if line[0] in pids]
    assert len({pid for pid, _ in listening}) >= 3, "the processes of Ray were found"
    assert {host for _, host in listening} <= {"127.0.0.1"}
    joined = subprocess.run(
        [sys.executable, "-c", f"from hf_longctx.data.remote.cluster import connect; print(connect({address!r}))"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert joined.stdout.strip() == address


def test_the_process_that_started_ray_waits_for_the_others_to_leave():
    """Ray would end one that holds an object on the spot, with an error: here another rank that still saves."""
    connecting = "from hf_longctx.data.remote.cluster import connect; import ray, time; "
    programs = (
        connecting + "print(connect(store_bytes=2**27), flush=True); input()",
        connecting
        + "connect(input()); held = ray.put(b'1' * 10**6); print('joined', flush=True); time.sleep(3); print('saved')",
    )
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    first, other = (subprocess.Popen([sys.executable, "-c", program], **pipes) for program in programs)
    other.stdin.write(first.stdout.readline())
    other.stdin.flush()
    assert other.stdout.readline() == "joined\n"
    first.communicate("go on\n", timeout=60)
    assert (first.returncode, other.communicate(timeout=60)[0], other.returncode) == (0, "saved\n", 0)


def test_an_address_where_no_ray_is_says_so(address):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"
    program = "from hf_longctx.data.remote.cluster import connect; connect({!r})"
    for given, message in (
        (nobody, f"no Ray answers at {nobody}"),
        ("there", "is host:port, such as 10.0.0.1:6379, got 'there'"),
    ):
        command = [sys.executable, "-c", program.format(given)]
        run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        assert run.returncode == 1
        assert message in run.stderr.splitlines()[-1]
    assert connect(address) == connect() == address
    with pytest.raises(RemoteError, match=f"has joined the Ray at {address} already, and cannot join {nobody} as well"):
        connect(nobody)


def test_without_ray_the_error_says_what_to_install():
    program = "import sys; sys.modules['ray'] = None; import hf_longctx.data.remote.cluster"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert "ImportError: the remote loader needs Ray. Valid: pip install 'hf_longctx[ray]'" in run.stderr


def test_only_the_remote_loader_imports_ray_and_its_actors_do_without_torch(four):
    for file in (ROOT / "hf_longctx").rglob("*.py"):
        names = {name.split(".")[0] for _, name in imported_names(ast.parse(file.read_text()), "hf_longctx")}
        assert "ray" not in names or file.parent.name == "remote", file
    for role, pid in processes(four).items():
        loaded = Path(f"/proc/{pid}/maps").read_text()
        assert "libarrow" in loaded or role == "planner"
        assert "libtorch" not in loaded, role


def children(parents: set[int]) -> list[str]:
    """Lines of ps that begin with the id of a child of these processes."""
    lines = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [line for line in lines if int(line.split()[1]) in parents]


def sockets() -> list[tuple[int, str]]:
    """(process, host) of every socket of this machine that listens, from /proc."""
    hosts: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":  # listening
                raw = bytes.fromhex(fields[1].split(":")[0])
                words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]
                hosts[fields[9]] = socket.inet_ntoa(words[-1])
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            target = os.readlink(link)
        except OSError:
            continue
        if target.startswith("socket:[") and target[8:-1] in hosts:
            found.append((int(link.parts[2]), hosts[target[8:-1]]))
    return found
