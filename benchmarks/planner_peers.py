"""The schedulers of Megatron-Core and verl, unmodified, and what their decisions are worth on equal terms.

    Megatron-Core    BalancedCPScheduler (hybrid context parallelism): groups of 2^k ranks, the fewest that hold a document;
                     all ranks meet whenever it begins a new phase of groups
    verl             Karmarkar-Karp over its data-parallel ranks (get_seqlen_balanced_partitions, calculate_workload), each of
                     which is a Ulysses group of one degree for all documents, the least that holds the longest

Both packages are looked for in .cache/peers (scripts/setup_bench.sh). verl's module is loaded alone: the package imports
ray and others that the partitioning does not use; empty modules stand in for them while it loads.

Replay. Who runs which document, and in which order, is the scheduler's; everything else is as if it ran on our engine,
with our predicted costs: documents that lie whole on a rank between two meetings are packed to its capacity, a split
document exchanges what it needs and not more; those that a group splits together cost what they cost static_cp. So what
differs is the schedule alone.
"""

import importlib.util
import signal
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hf_longctx.planner import CostModel, StepPlan, Topology
from hf_longctx.planner.baselines.static_cp import pack_times
from hf_longctx.planner.placing.micro_batches import Step
from hf_longctx.planner.placing.packing import first_fit

INSTALLED = Path(__file__).parents[1] / ".cache" / "peers"
MOST_SETS = 10**7
"""Python objects that Karmarkar-Karp of so many documents and partitions may hold: about 3 GB."""


@dataclass(frozen=True)
class Task:
    """Documents that run in one micro-batch, and the ranks that share them."""

    documents: Sequence[int]
    ranks: Sequence[int]


@dataclass(frozen=True)
class Replayed:
    makespan: int
    """Nanoseconds."""
    idle_share: float


@dataclass(frozen=True)
class Peer:
    name: str
    schedule: Callable[[list[int], Topology], Any]
    """The call into the package: lengths -> what it returns."""
    phases: Callable[[Any, np.ndarray, Topology], list[list[Task]]]
    """What it returned, as tasks in the order of their ranks; all ranks meet after each phase."""


def installed_peers() -> list[Peer]:
    """Raises ImportError, saying what to run, where one is not installed."""
    if not (INSTALLED / "megatron").is_dir() or not (INSTALLED / "verl").is_dir():
        raise ImportError(f"megatron-core and verl are not in {INSTALLED}; run scripts/setup_bench.sh, or --no-peers")
    return [Peer("Megatron-Core BalancedCPScheduler", _megatron(), megatron_phases), Peer("verl", _verl(), verl_phases)]


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block once this process has computed for so many seconds in it."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _megatron() -> Callable[[list[int], Topology], Any]:
    sys.path.append(str(INSTALLED))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that neither Transformer Engine nor Apex is there
            from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler
    finally:
        sys.path.remove(str(INSTALLED))

    def schedule(lengths: list[int], topology: Topology) -> Any:
        group = types.SimpleNamespace(size=lambda: topology.world_size)
        scheduler = BalancedCPScheduler(max_seq_len_per_rank=topology.capacity, dp_cp_group=group)
        return scheduler.get_groups_and_subsamples(list(enumerate(lengths)), None)[1]

    return schedule


def megatron_phases(returned: list[list[list[int]]], lengths: np.ndarray, topology: Topology) -> list[list[Task]]:
    """`returned`: documents of each rank, in each phase. Ranks that share a document list the same ones."""
    phases = []
    for of_rank in returned:
        ranks: dict[int, list[int]] = {}
        for rank, documents in enumerate(of_rank):
            for document in documents:
                ranks.setdefault(document, []).append(rank)
        whole: dict[int, list[int]] = {}
        tasks = []
        for document, sharing in ranks.items():
            if len(sharing) == 1:
                whole.setdefault(sharing[0], []).append(document)
            else:
                tasks.append(Task([document], sharing))
        phases.append(tasks + [task for rank in whole for task in _packed(whole[rank], [rank], lengths, topology)])
    return phases


def _verl() -> Callable[[list[int], Topology], Any]:
    import torch

    names = ("verl", "verl.protocol", "verl.utils", "verl.utils.device", "verl.utils.tensordict_utils")
    empty: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    empty["verl.protocol"].DataProto = empty["verl.utils.device"].get_device_name = None
    empty["verl.utils"].tensordict_utils = empty["verl.utils.tensordict_utils"]
    file = INSTALLED / "verl" / "utils" / "seqlen_balancing.py"
    spec = importlib.util.spec_from_file_location("verl.utils.seqlen_balancing", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.update(empty)
    try:
        spec.loader.exec_module(module)
    finally:
        for name in names:
            del sys.modules[name]

    def schedule(lengths: list[int], topology: Topology) -> Any:
        groups = topology.world_size // ulysses_degree(max(lengths), topology)
        if groups * len(lengths) > MOST_SETS:
            raise MemoryError(f"{groups} partitions x {len(lengths)} documents are too many Python objects")
        workloads = module.calculate_workload(torch.tensor(lengths)).tolist()
        return module.get_seqlen_balanced_partitions(workloads, groups, equal_size=False)

    return schedule


def ulysses_degree(longest: int, topology: Topology) -> int:
    """The least number of ranks that divides them all and holds the longest document."""
    fewest = -(-longest // topology.capacity)
    return next(d for d in range(fewest, topology.world_size + 1) if topology.world_size % d == 0)


def verl_phases(returned: list[list[int]], lengths: np.ndarray, topology: Topology) -> list[list[Task]]:
    """`returned`: documents of each data-parallel rank, which packs them to what its Ulysses group holds."""
    degree = topology.world_size // len(returned)
    tasks = []
    for index, documents in enumerate(returned):
        tasks += _packed(documents, range(index * degree, (index + 1) * degree), lengths, topology)
    return [tasks]


def _packed(documents: Sequence[int], ranks: Sequence[int], lengths: np.ndarray, topology: Topology) -> list[Task]:
    """First fit, longest first. A pack of fewer tokens than ranks runs on as many ranks as it has tokens."""
    by_length = np.array(sorted(documents, key=lambda document: -lengths[document]))
    packs = first_fit(lengths[by_length], len(ranks) * topology.capacity)
    by_pack = [by_length[packs == pack] for pack in range(packs.max() + 1)]
    return [Task(pack.tolist(), ranks[: int(lengths[pack].sum())]) for pack in by_pack]


def replay(phases: Sequence[Sequence[Task]], lengths: np.ndarray, topology: Topology, cost: CostModel) -> Replayed:
    """Every phase as a plan of its own documents, checked like every plan of ours.

    Raises:
        PlanError: a rank holds more than its capacity.
        ValueError: a document is scheduled twice, or not at all.
    """
    times = np.bincount([i for phase in phases for task in phase for i in task.documents], minlength=len(lengths))
    if (times != 1).any():
        wrong = int((times != 1).argmax())
        raise ValueError(
            f"document {wrong} is scheduled {times[wrong]} times; every document is scheduled exactly once"
        )
    makespan = busy = 0
    for phase in phases:
        timeline = _plan(phase, lengths, topology, cost).timeline()
        makespan += timeline.makespan
        busy += int(timeline.rank_busy.sum())
    return Replayed(makespan, 1 - busy / (topology.world_size * makespan))


def _plan(tasks: Sequence[Task], lengths: np.ndarray, topology: Topology, cost: CostModel) -> StepPlan:
    in_phase = np.array([document for task in tasks for document in task.documents])
    step = Step.checked(lengths[in_phase], topology, cost, "async")
    costs = []
    for task in tasks:
        longest_first = np.sort(lengths[list(task.documents)])[::-1]
        one = len(longest_first) == 1
        alone = cost.micro_batch_ns + int(cost.time(int(longest_first[0]), len(task.ranks)))
        costs.append(
            alone if one else pack_times(longest_first, np.zeros(1, int), np.array([len(task.ranks)]), step)[0]
        )
    plan = step.plan(
        "replayed",
        np.repeat(np.arange(len(tasks)), [len(task.documents) for task in tasks]),
        np.array([len(task.ranks) for task in tasks]),
        np.concatenate([np.sort(task.ranks) for task in tasks]),
        np.array(costs, np.int64),
        "direct",
    )
    plan.check(step.lengths)
    return plan
