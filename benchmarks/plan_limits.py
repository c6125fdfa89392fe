"""What a plan of any lengths must reach, and how long planning may take: the limits that a random search holds plans to.

Makespan, `async` (`lockstep` in brackets):

- where there are 8 documents a rank or more, and one rank more costs the median document less than 0.5 % of the lower bound:
  at most 1.01 (1.03) times the greater of the lower bound of planner/bound.py and that of planner_bound.py, which counts
  documents that find no room side by side, in nodes too, and whom slow ranks keep waiting;
- elsewhere: at most 1.01 (1.10) times the greater of these and what the best of the other plans reaches;
- where plans for slightly different costs were searched through (planner_replanned.py): so many times the shortest of them;
- everywhere: at most 1.002 times the best of the other plans. These are all of planner.PLANNERS, and for `async` the plan
  made for `lockstep`, which is a plan without its rounds too.

CPU time, compiled: 50 ms (500 in `lockstep`) up to 16,384 ranks, 100,000 documents and a million members, where a member is a
rank's part in a micro-batch; 10 (100) up to 256 ranks, 5,000 documents and 20,000 members; unlimited beyond.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from drawn_steps import DrawnStep
from planner_bound import reachable_bound
from planner_replanned import found

from hf_longctx.planner import PLANNERS, Mode, PlanError, StepPlan, lower_bound, plan_step
from hf_longctx.planner.baselines.static_cp import context_degree
from hf_longctx.planner.compiled import planning
from hf_longctx.planner.cost.selective_offload import SLOWEST_PS, Offload
from hf_longctx.planner.machine_code import compiled_here, read_here

FROM_BOUND: dict[Mode, float] = {"async": 1.01, "lockstep": 1.03}
"""Most makespan over the lower bound where balance is easy."""
FROM_REACHED: dict[Mode, float] = {"async": 1.01, "lockstep": 1.10}
"""Most makespan elsewhere, over what is known to be in reach."""
FROM_OTHERS = 1.002
EASY_DOCUMENTS = 8
"""For each rank."""
EASY_SPLIT = 0.005
"""Of the lower bound: what one rank more costs the median document."""
SIZES = (
    (256, 5_000, 20_000, {"async": 0.010, "lockstep": 0.100}),
    (16_384, 100_000, 1_000_000, {"async": 0.050, "lockstep": 0.500}),
)
"""Ranks, documents and members up to which planning may take so many seconds of CPU."""
REPEATS = 3
CERTAINLY = 3.0
"""Times what is allowed: planning that takes longer is not timed again."""
QUICK_DOCUMENTS, QUICK_MEMBERS = 5_000, 500_000
"""Up to which each of the other planners takes less than a second."""


MOST_MEMBERS = {"static_cp_unpacked": 10_000_000, "static_cp": 100_000_000}
"""Planner -> ranks of all documents' groups up to which it is compared with: 900 million took 20 GB of memory."""


@dataclass
class Judged:
    """A plan in one mode, and the limits that it breaks."""

    step: DrawnStep
    mode: Mode
    plan: StepPlan
    bound: int
    """Nanoseconds, of planner/bound.py."""
    seconds: float
    """of CPU, to plan"""
    best_other: tuple[str, int] | None = None
    """The best of the other plans: its planner, nanoseconds. None: not needed, none can be better by as much."""
    limit: float = math.nan
    """Most nanoseconds that the plan may take, of all limits on makespan."""
    kind: str = "easy"
    """Which limit that is: "easy" (of the lower bound), "reached", "found" or "others"."""
    violations: list[str] = field(default_factory=list)

    @property
    def makespan(self) -> int:
        return self.plan.timeline().makespan

    @property
    def members(self) -> int:
        return len(self.plan.rank)

    @property
    def over_bound(self) -> float:
        return self.makespan / self.bound

    @property
    def over_limit(self) -> float:
        return self.makespan / self.limit

    @property
    def time_over_limit(self) -> float:
        """CPU time over what is allowed; 0 where nothing limits it."""
        return self.seconds / seconds_allowed(self)


def judge(step: DrawnStep, *, slow_too: bool = True, found_too: bool = True) -> dict[Mode, Judged]:
    """Plan a step in both modes, check the plans and their limits.

    Args:
        slow_too: whether to compare with planners that may take more than a second.
        found_too: whether what a search found before is a limit too.

    Raises:
        PlanError: the step cannot be planned, or a plan breaks an invariant.
    """
    with planning(math.inf):  # compiled, as in a long run
        rounds = _plan(step, "lockstep")
        judged: dict[Mode, Judged] = {"async": _plan(step, "async"), "lockstep": rounds}
        for judgement in judged.values():
            _judge(judgement, rounds.plan, slow_too, found_too)
    return judged


def _plan(step: DrawnStep, mode: Mode) -> Judged:
    """Plan a step. CPU time is the least of three calls where one may have taken too long by chance; of a call that compiled
    anything, or read it from disk, the next counts."""
    offload = step.offload if mode == "async" else None
    judged = None
    for _ in range(REPEATS):
        plan, seconds = _timed(lambda: plan_step(step.lengths, step.topology, step.cost, mode, offload))
        if judged is None:
            plan.check(step.lengths)
            bound = plan.lower_bound if offload else lower_bound(step.ordered, step.topology, step.cost, mode)
            judged = Judged(step, mode, plan, bound, seconds)
        judged.seconds = min(judged.seconds, seconds)
        if not 1 < judged.time_over_limit < CERTAINLY:
            break
    assert judged is not None
    return judged


def _timed(plan: Callable[[], StepPlan]) -> tuple[StepPlan, float]:
    """A plan, and the seconds of CPU that it took without compiling anything, or reading it from disk."""
    while True:
        functions = compiled_here.total() + read_here.total()
        begin = time.process_time()
        step_plan = plan()
        seconds = time.process_time() - begin
        if compiled_here.total() + read_here.total() == functions:
            return step_plan, seconds


def _judge(judged: Judged, rounds: StepPlan, slow_too: bool, found_too: bool) -> None:
    _judge_makespan(judged, rounds, slow_too, found_too)
    if judged.makespan > judged.limit:
        judged.violations.append(
            f"{judged.makespan / judged.bound:.4f} of the lower bound, at most {judged.limit / judged.bound:.4f} "
            f"({judged.kind}{_named(judged)})"
        )
    if judged.time_over_limit > 1:
        allowed = seconds_allowed(judged)
        judged.violations.append(
            f"{judged.seconds * 1e3:.0f} ms of CPU for {judged.members:,} members, at most {allowed * 1e3:.0f}"
        )


def is_easy(step: DrawnStep, bound: int) -> bool:
    """Whether there are enough documents, and splitting one is cheap enough, for a plan close to the lower bound."""
    if len(step.lengths) < EASY_DOCUMENTS * step.topology.world_size:
        return False
    median = int(np.median(step.lengths))
    fewest = int(step.topology.fewest_ranks(np.array([median]))[0])
    return step.cost.work(median, fewest + 1) - step.cost.work(median, fewest) < EASY_SPLIT * bound


def other_plans(step: DrawnStep, mode: Mode, rounds: StepPlan, *, slow_too: bool) -> Iterator[tuple[str, int]]:
    """Planner and makespan (nanoseconds) of every other plan of the step that there is; `rounds`: ours for "lockstep"."""
    if mode == "async":
        free = replace(rounds, mode="async", round=np.zeros_like(rounds.round))
        yield "rounds", free.timeline().makespan
    documents, longest = len(step.lengths), step.ordered[:1]
    members = documents * context_degree(int(longest[0]), step.topology)  # as static groups, unpacked
    slow = documents > QUICK_DOCUMENTS or documents * int(step.topology.fewest_ranks(longest)[0]) > QUICK_MEMBERS
    for name, planner in PLANNERS.items():
        if name == "hdp" or (slow and not slow_too) or members > MOST_MEMBERS.get(name, math.inf):
            continue
        try:
            yield name, planner(step.lengths, step.topology, step.cost, mode).timeline().makespan
        except PlanError:
            continue  # unequal ranks, or a document that no rank holds


def seconds_allowed(judged: Judged) -> float:
    """Seconds of CPU that planning may take."""
    step = judged.step
    for ranks, documents, members, seconds in SIZES:
        if step.topology.world_size <= ranks and len(step.lengths) <= documents and judged.members <= members:
            return seconds[judged.mode]
    return math.inf


def _judge_makespan(judged: Judged, rounds: StepPlan, slow_too: bool, found_too: bool) -> None:
    """Set `limit` and `kind`, and `best_other` where it can decide."""
    step, mode, makespan = judged.step, judged.mode, judged.makespan
    easy = is_easy(step, judged.bound)
    most = (FROM_BOUND if easy else FROM_REACHED)[mode]
    judged.limit = judged.bound * most
    judged.kind = "easy" if easy else "reached"
    if makespan <= FROM_OTHERS * judged.bound:
        return
    others = min(other_plans(step, mode, rounds, slow_too=slow_too), key=lambda other: other[1], default=None)
    judged.best_other = others
    if makespan > judged.limit:
        topology = step.topology
        if step.offload is not None:
            topology = replace(topology, capacity=_most_tokens(step.offload, topology.capacity))
        enough = makespan / most
        reachable = reachable_bound(step.ordered, topology, step.cost, in_nodes=True, enough=enough)
        judged.limit = max(judged.limit, makespan if reachable >= enough else reachable * most)
        if not easy and others is not None:
            judged.limit = max(judged.limit, others[1] * most)
    if found_too and makespan > judged.limit:
        shortest = found(step.name, mode, judged.bound)
        if shortest is not None:
            judged.limit, judged.kind = max(judged.limit, shortest * most), "found"
    if others is not None and FROM_OTHERS * others[1] < judged.limit:
        judged.limit, judged.kind = FROM_OTHERS * others[1], "others"


def _most_tokens(offload: Offload, capacity: int) -> int:
    """Tokens that a rank holds at most, of documents with all the time to move what may wait in host memory."""
    return int(offload.most_tokens(capacity, np.full(1, SLOWEST_PS))[0])


def _named(judged: Judged) -> str:
    return f": {judged.best_other[0]}" if judged.kind == "others" and judged.best_other else ""
