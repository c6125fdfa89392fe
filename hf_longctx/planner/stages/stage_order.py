"""A pipeline of p devices for every rank: which stage runs forward or backward of which chunk, in which order.

A unit is a chunk of a micro-batch; most micro-batches are one. Each stage of each unit runs forward, then backward; ranks
that share a micro-batch run the same stage of it at the same time. `play_stages` plays that event by event on integer costs,
so that every rank finds the same order, which the runtime then follows and the simulator times.

    forward of a unit       after its forward in the stage before, and that of its earlier chunks
    backward                after its backward in the stage behind, and that of its later chunks

A device runs a forward if it may hold one more micro-batch, else a backward. (Backwards first, which is the same
where all micro-batches are alike, ended 1.13 to 1.31 times the bound where forwards first ended 1.12 to 1.13: 100,000
documents of Byted on 2,048 ranks of 4 stages.)

What a device holds are tokens, counted in full micro-batches of the rank's capacity: smaller ones are more. A micro-batch
counts with all of its chunks, from its first forward to its last backward:

    1f1b          device d of p holds p - d
    interleaved   2(p-d-1) + (v-1)p + 1, of a v-th each
    gpipe         all, and backward begins after the last forward

    1f1b, p = 2, micro-batches 0, 1, 2 (F forward, B backward):
        device 0   F0 F1 .  .  B0 B0 F2 B1 B1 .  B2 B2
        device 1   .  F0 B0 B0 F1 B1 B1 F2 B2 B2 .  .

In `interleaved`, a device has v stages: stage s lies on device s mod p, so that the way through all devices is v times as
short. Micro-batches come in windows of at most p for each rank, and a device runs a window's forwards in its first stage,
then in its second ...

No deadlock. On all devices of all ranks, forwards follow one global order (window, stage on its device, micro-batch, chunk),
backwards another, so the first task that is left of either is next for all of its ranks. Of the first window that is not
done, the last device always has room for the first micro-batch's way to the last stage, whose backward can run at once. And
because each device sends in the order in which the next one receives, messages of one direction never wait for each other.

Interpreted or compiled (planner/compiled.py); integers only. Nothing is sent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_longctx.planner.compiled import planning
from hf_longctx.planner.plan import StepPlan
from hf_longctx.planner.stages.stage_events import BACKWARD, FORWARD, Queues, Units, play_tasks, queues_of
from hf_longctx.planner.topology import FULL, PlanError

SECONDS = 1e-5
"""A core's, interpreted, for forward and backward of a unit in a stage of one rank."""
COMPILING = 15.0
"""A core's seconds that compiling takes."""

SCHEDULES = ("gpipe", "1f1b", "interleaved")


@dataclass(frozen=True)
class Schedule:
    """How the devices of a pipeline share their time.

    Raises:
        PlanError: an unknown name, or stages that do not fit it.
    """

    name: str = "1f1b"
    virtual: int = 1
    """Stages on each device; more than 1 only for "interleaved"."""
    weights: tuple[int, ...] | None = None
    """[devices * virtual]: per mille of the mean stage's cost, first stage first. None: all 1000."""

    def __post_init__(self) -> None:
        if self.name not in SCHEDULES:
            raise PlanError(f"schedule is {self.name!r}; valid: {', '.join(SCHEDULES)}")
        if self.virtual < 1 or (self.virtual > 1) != (self.name == "interleaved"):
            raise PlanError(
                f"schedule {self.name!r} with virtual={self.virtual} stages on a device; valid: 2 or more with 'interleaved', 1 "
                "with the others"
            )
        if self.weights is not None and min(self.weights, default=0) < 1:
            raise PlanError(f"weights of stages are {self.weights}; each must be >= 1 per mille of the mean stage")

    def stage_weights(self, devices: int) -> np.ndarray:
        """int64 [stages], per mille. Raises PlanError if there are weights of another number of stages."""
        stages = devices * self.virtual
        if self.weights is not None and len(self.weights) != stages:
            raise PlanError(
                f"weights has {len(self.weights)} entries; {devices} devices of {self.virtual} stages need {stages}"
            )
        return np.full(stages, FULL) if self.weights is None else np.array(self.weights, np.int64)

    def most_in_flight(self, devices: int) -> np.ndarray:
        """int64 [devices]: most micro-batches between forward and backward, in full ones of a rank's capacity, each counted on
        every stage of the device."""
        behind = np.arange(devices)[::-1]
        if self.name == "gpipe":
            return np.full(devices, 2**20)
        return behind + 1 if self.virtual == 1 else 2 * behind + (self.virtual - 1) * devices + 1


@dataclass(frozen=True, eq=False, slots=True)
class Played:
    """When everything runs; stages are counted from the model's first layers on."""

    queues: Queues
    start: np.ndarray
    """int64 [2, u, stages]: nanoseconds at which forward and backward begin."""
    begun: np.ndarray
    """int64 [2, u, stages]: how many tasks of all devices began before."""
    stop: np.ndarray
    """int64 [m]: when backward ends in the first stage."""
    end: int
    """When all has ended."""


def units_of(plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
    """int64 [m + 1] and [u]: first_unit and micro_batch of `Units`."""
    first = np.concatenate([[0], np.cumsum(plan.chunks)])
    return first, np.repeat(np.arange(len(plan.chunks)), plan.chunks)


def predicted_units(plan: StepPlan) -> Units:
    """The units of a plan, with the costs that it predicts. Chunks of a micro-batch cost the same, and backward twice as much
    as forward."""
    first_unit, micro_batch = units_of(plan)
    chunks, cost = plan.chunks[micro_batch], plan.cost[micro_batch]
    chunk = np.arange(len(micro_batch)) - first_unit[micro_batch]
    base, rest = np.divmod(cost, chunks)
    cost = base + rest * (chunk + 1) // chunks - rest * chunk // chunks
    forward = cost // 3
    costs = np.stack([forward, cost - forward])
    member_columns = (
        plan.rank,
        np.minimum(plan.member_tokens, plan.topology.capacities[plan.rank]),
        plan.topology.capacities,
    )
    return Units(plan.first_member, *member_columns, first_unit, micro_batch, costs, np.zeros(len(cost), np.int64))


@dataclass(frozen=True, eq=False)
class StageOrder:
    """Tasks that each device of each rank runs, in order."""

    plan: StepPlan
    schedule: Schedule
    units: Units
    played: Played

    @property
    def devices(self) -> int:
        return self.plan.topology.stages

    def tasks(self, rank: int, device: int) -> np.ndarray:
        """int64 [n, 4]: kind (FORWARD or BACKWARD), micro-batch, chunk and stage of each task, in order.

        Raises PlanError if the plan has no such rank or device.
        """
        plan, played, devices = self.plan, self.played, self.devices
        if not (0 <= rank < plan.world_size and 0 <= device < devices):
            raise PlanError(
                f"rank {rank}, device {device}: this plan is for {plan.world_size} ranks of {devices} devices"
            )
        queues = played.queues
        of = slice(queues.first_of_rank[rank], queues.first_of_rank[rank + 1])
        rows, began = [], []
        for kind in (FORWARD, BACKWARD):
            unit, stage = queues.unit[kind, of], queues.virtual[kind, of] * devices + device
            micro_batch = self.units.micro_batch[unit]
            chunk = unit - self.units.first_unit[micro_batch]
            rows.append(np.stack([np.full(len(unit), kind), micro_batch, chunk, stage], axis=1))
            began.append(played.begun[kind, unit, stage])
        return np.concatenate(rows)[np.argsort(np.concatenate(began))]


def stage_order(plan: StepPlan, schedule: Schedule | None = None) -> StageOrder:
    """The order in which all devices run a plan of mode "pipeline", from its predicted costs: the same on every machine.

    Raises:
        PlanError: another mode, or a schedule for another number of stages.
    """
    schedule = schedule or Schedule()
    if plan.mode != "pipeline":
        raise PlanError(f"a plan of mode {plan.mode!r} has no stages; valid: mode 'pipeline'")
    units = predicted_units(plan)
    return StageOrder(plan, schedule, units, play_stages(units, plan.world_size, plan.topology.stages, schedule))


def play_stages(units: Units, world_size: int, devices: int, schedule: Schedule) -> Played:
    """Plays all units on all devices."""
    virtual, stage_weights = schedule.virtual, schedule.stage_weights(devices)
    costs = units.costs // virtual
    members = np.diff(units.first_member)[units.micro_batch].sum() + len(units.rank)
    seconds = SECONDS * float(members) * len(stage_weights)
    latest = float(costs.sum(dtype=np.float64) + units.travel.sum(dtype=np.float64)) * len(stage_weights)
    with planning(seconds, COMPILING, latest * float(stage_weights.max()) / FULL):
        queues = queues_of(units, world_size, devices, virtual)
        start, begun, stop, left = play_tasks(
            units,
            queues,
            costs,
            stage_weights,
            schedule.most_in_flight(devices),
            world_size,
            devices,
            schedule.name == "gpipe",
        )
    assert not left, "tasks wait for each other: ranks do not run micro-batches in one global order"
    whole, rest = np.divmod(costs[BACKWARD][:, None], FULL)  # times a weight, they may exceed 64 bits
    ends = start[BACKWARD] + whole * stage_weights + rest * stage_weights // FULL
    return Played(queues, start, begun, stop, int(ends.max()))
