"""The order of stages against independent references: programs of devices that block until their partners have come, the
rules of each schedule read from these programs, textbook bubbles, and pictures in docstrings.
"""

import os
import subprocess
import sys
from collections import deque
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hf_longctx.planner import CostModel, PlanError, StepPlan, Topology, plan_step
from hf_longctx.planner.stages.causal_chunks import _chunk_stop, chunk_stops, chunked_work
from hf_longctx.planner.stages.stage_events import BACKWARD, FORWARD, Units
from hf_longctx.planner.stages.stage_order import SCHEDULES, Played, Schedule, play_stages, predicted_units, stage_order
from tests.builders.plans.random_plans import CPU_COST, chunked_plans, costs

Task = tuple[int, int, int, int]
"""Kind, micro-batch, chunk, stage."""
Programs = dict[tuple[int, int], list[Task]]
"""By rank and device."""


@st.composite
def schedules(draw: st.DrawFn, devices: int) -> Schedule:
    name = draw(st.sampled_from(SCHEDULES))
    virtual = draw(st.integers(2, 4)) if name == "interleaved" else 1
    weight = st.integers(1, 3000)
    stages = devices * virtual
    weights = draw(st.one_of(st.none(), st.lists(weight, min_size=stages, max_size=stages).map(tuple)))
    return Schedule(name, virtual, weights)


def programs_of(plan: StepPlan, schedule: Schedule) -> Programs:
    order = stage_order(plan, schedule)
    return {
        (rank, device): [tuple(task) for task in order.tasks(rank, device).tolist()]
        for rank in range(plan.world_size)
        for device in range(plan.topology.stages)
    }


def members_of(plan: StepPlan, micro_batch: int) -> list[int]:
    return plan.rank[plan.first_member[micro_batch] : plan.first_member[micro_batch + 1]].tolist()


def run_blocking(plan: StepPlan, programs: Programs, stages: int) -> None:
    """Every device runs its program task by task, and waits for what a task needs and for its ranks."""
    waiting = {where: deque(program) for where, program in programs.items()}
    done: set[tuple[int, Task]] = set()  # with the rank
    devices = plan.topology.stages

    def needs(task: Task) -> list[Task]:
        kind, micro_batch, chunk, stage = task
        if kind == FORWARD:
            earlier = [(FORWARD, micro_batch, chunk - 1, stage)] if chunk else []
            return earlier + ([(FORWARD, micro_batch, chunk, stage - 1)] if stage else [])
        last_chunk, last_stage = chunk + 1 == plan.chunks[micro_batch], stage + 1 == stages
        later = [] if last_chunk else [(BACKWARD, micro_batch, chunk + 1, stage)]
        behind = (FORWARD if last_stage else BACKWARD, micro_batch, chunk, stage if last_stage else stage + 1)
        return [*later, behind, (FORWARD, micro_batch, chunk, stage)]

    while any(waiting.values()):
        moved = False
        for (_, device), program in waiting.items():
            if not program:
                continue
            task = program[0]
            _, micro_batch, _, stage = task
            assert stage % devices == device
            ranks = members_of(plan, micro_batch)
            if all(waiting[r, device] and waiting[r, device][0] == task for r in ranks) and all(
                (r, need) in done for r in ranks for need in needs(task)
            ):
                for r in ranks:
                    done.add((r, waiting[r, device].popleft()))
                moved = True
        assert moved, "deadlock"
    units = int((plan.chunks * plan.members).sum())
    assert len(done) == 2 * units * stages, "every stage of every chunk runs once in each direction"


def messages(program: list[Task], kind: int, step: int, stages: int, devices: int, other: int) -> list[Task]:
    """Tasks of this kind whose neighbour, `step` stages on, lies on another device `other`; named by the lower stage."""
    neighbours = [(task, task[3] + step) for task in program if task[0] == kind]
    return [
        (kind, micro_batch, chunk, min(stage, neighbour))
        for (_, micro_batch, chunk, stage), neighbour in neighbours
        if 0 <= neighbour < stages and neighbour % devices == other
    ]


@settings(max_examples=3 * settings().max_examples, deadline=None)
@given(chunked_plans(), st.data())
def test_devices_that_block_never_wait_for_each_other(plan: StepPlan, data: st.DataObject):
    devices = plan.topology.stages
    schedule = data.draw(schedules(devices))
    stages = devices * schedule.virtual
    programs = programs_of(plan, schedule)
    members = np.repeat(np.arange(len(plan.cost)), plan.members).tolist()
    tokens = dict(zip(zip(plan.rank.tolist(), members), plan.member_tokens.tolist()))
    run_blocking(plan, programs, stages)
    for rank in range(plan.world_size):
        for device in range(devices):
            program, behind = programs[rank, device], (device + 1) % devices
            if devices > 1:  # what is sent first is received first, in both directions
                next_program = programs[rank, behind]
                assert messages(program, FORWARD, 1, stages, devices, behind) == messages(
                    next_program, FORWARD, -1, stages, devices, device
                )
                assert messages(next_program, BACKWARD, -1, stages, devices, device) == messages(
                    program, BACKWARD, 1, stages, devices, behind
                )
            open_chunks: dict[tuple[int, int], set[int]] = {}
            most, capacity = 0, plan.topology.capacities[rank]
            for kind, micro_batch, chunk, stage in program:
                if kind == FORWARD:
                    open_chunks.setdefault((micro_batch, stage), set()).add(chunk)
                else:
                    open_chunks[micro_batch, stage].remove(chunk)
                    if not open_chunks[micro_batch, stage]:
                        del open_chunks[micro_batch, stage]
                most = max(most, sum(min(tokens[rank, i], capacity) for i, _ in open_chunks))
            assert most <= schedule.most_in_flight(devices)[device] * capacity
            if schedule.name == "gpipe":
                kinds = [kind for kind, *_ in program]
                assert kinds == sorted(kinds)


@settings(deadline=None)
@given(chunked_plans(), st.data())
def test_what_is_played_respects_time(plan: StepPlan, data: st.DataObject):
    """A device runs one task at a time, and none before what it needs has come, travel included."""
    devices = plan.topology.stages
    schedule = data.draw(schedules(devices))
    units = predicted_units(plan)
    travel = data.draw(st.sampled_from([0, 1, 10**6]))
    units = units._replace(travel=np.full(len(units.travel), travel))
    played = play_stages(units, plan.world_size, devices, schedule)
    weights = schedule.stage_weights(devices)
    lasts = units.costs[:, :, None] // schedule.virtual * weights // 1000
    forward, backward = played.start
    assert (forward[:, 1:] >= (forward + lasts[FORWARD])[:, :-1] + travel).all()
    assert (backward[:, :-1] >= (backward + lasts[BACKWARD])[:, 1:] + travel).all()
    assert (backward[:, -1] >= (forward + lasts[FORWARD])[:, -1]).all()
    order = stage_order(plan, schedule)
    order = replace(order, units=units, played=played)
    busy = 0
    for rank in range(plan.world_size):
        for device in range(devices):
            spans = []
            for kind, micro_batch, chunk, stage in order.tasks(rank, device).tolist():
                unit = units.first_unit[micro_batch] + chunk
                begin = played.start[kind, unit, stage]
                spans.append((int(begin), int(begin + lasts[kind, unit, stage])))
            assert all(after[0] >= before[1] for before, after in pairwise(spans))
            busy = max(busy, sum(stop - start for start, stop in spans))
            assert played.end >= max((stop for _, stop in spans), default=0)
    assert played.end >= busy


def one_rank(devices: int, schedule: Schedule, chunks: list[int], cost: int = 3000) -> Played:
    """Equal micro-batches of one rank, each of so many equal chunks; `cost` is that of a micro-batch in one stage."""
    first = np.concatenate([[0], np.cumsum(chunks)])
    micro_batch = np.repeat(np.arange(len(chunks)), chunks)
    chunk_cost = cost // np.array(chunks)[micro_batch]
    costs = np.stack([chunk_cost // 3, chunk_cost - chunk_cost // 3])
    ranks = np.zeros(len(chunks), np.int64)
    ones = np.ones(len(chunks), np.int64)  # every micro-batch is full
    no_travel = np.zeros(len(chunk_cost), np.int64)
    units = Units(np.arange(len(chunks) + 1), ranks, ones, ones[:1], first, micro_batch, costs, no_travel)
    return play_stages(units, 1, devices, schedule)


@given(st.integers(1, 12), st.integers(1, 6), st.sampled_from(["1f1b", "gpipe"]))
def test_equal_micro_batches_have_one_bubble_of_p_minus_1(count: int, devices: int, name: str):
    assert one_rank(devices, Schedule(name), [1] * count).end == (count + devices - 1) * 3000


@given(st.sampled_from([1, 2, 4, 5, 10, 20]), st.integers(1, 6), st.sampled_from(["1f1b", "gpipe"]))
def test_a_document_in_k_chunks_has_a_kth_of_the_bubble(chunks: int, devices: int, name: str):
    assert one_rank(devices, Schedule(name), [chunks]).end == 3000 + 3000 * (devices - 1) // chunks


@pytest.mark.parametrize(("devices", "count", "virtual"), [(2, 4, 2), (4, 8, 2), (4, 8, 3), (3, 9, 2)])
def test_stages_that_interleave_have_a_smaller_bubble(devices: int, count: int, virtual: int):
    # As many micro-batches as a multiple of the devices: the way through all devices is a v-th as long.
    end = one_rank(devices, Schedule("interleaved", virtual), [1] * count, 3600).end
    assert end == count * 3600 + (devices - 1) * 3600 // virtual


def letters(plan: StepPlan, schedule: Schedule, device: int) -> str:
    names = {FORWARD: "F", BACKWARD: "B"}
    return " ".join(
        f"{names[kind]}{micro_batch}" for kind, micro_batch, *_ in stage_order(plan, schedule).tasks(0, device).tolist()
    )


def test_the_order_of_the_docstring():
    plan = plan_step(np.full(3, 100), Topology(1, 100, stages=2), CPU_COST, "pipeline")
    plan = replace(plan, chunks=np.ones(3))
    assert letters(plan, Schedule(), 0) == "F0 F1 B0 F2 B1 B2"
    assert letters(plan, Schedule(), 1) == "F0 B0 F1 B1 F2 B2"
    assert letters(plan, Schedule("gpipe"), 1) == "F0 F1 F2 B0 B1 B2"


def test_a_heavier_last_stage_counts():
    plain, heavy = (one_rank(2, Schedule(weights=weights), [1] * 10).end for weights in (None, (1000, 1500)))
    assert (plain, heavy) == (11 * 3000, 10 * 4500 + 3000)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "2f2b"}, "schedule is '2f2b'; valid: gpipe, 1f1b, interleaved"),
        ({"virtual": 2}, "schedule '1f1b' with virtual=2 stages on a device; valid: 2 or more with 'interleaved'"),
        ({"name": "interleaved"}, "with virtual=1 stages on a device"),
        ({"weights": (1000, 0)}, r"weights of stages are \(1000, 0\); each must be >= 1 per mille"),
    ],
)
def test_schedules_that_cannot_be_are_refused(settings, message):
    with pytest.raises(PlanError, match=message):
        Schedule(**settings)


def test_what_no_plan_has_is_refused():
    plan = plan_step(np.full(3, 100), Topology(1, 100, stages=2), CPU_COST, "pipeline")
    with pytest.raises(PlanError, match="a plan of mode 'async' has no stages; valid: mode 'pipeline'"):
        stage_order(replace(plan, mode="async"))
    with pytest.raises(PlanError, match="weights has 3 entries; 2 devices of 1 stages need 2"):
        stage_order(plan, Schedule(weights=(1000, 1000, 1000)))
    for rank, device in ((1, 0), (0, 2), (-1, 0)):
        with pytest.raises(PlanError, match=f"rank {rank}, device {device}: this plan is for 1 ranks of 2 devices"):
            stage_order(plan).tasks(rank, device)


@pytest.mark.processes
def test_orders_are_the_same_in_another_process_and_without_compilation():
    code = """
import numpy as np
from dataclasses import replace
from itertools import pairwise
from hf_longctx.planner import CostModel, Topology, plan_step
from hf_longctx.planner.stages.stage_order import Schedule, stage_order

cost = CostModel(10**3, 10**7, 10**6, message_ns=10**3, micro_batch_ns=10**5)
plan = plan_step(np.arange(1, 30) * 7 % 613 + 1, Topology(5, 150, stages=3), cost, "pipeline")
chunks = np.where((plan.members > 1) & (np.diff(plan.first_document) == 1), 3, 1)
plan = replace(plan, chunks=chunks, linear_tokens=1000)
for schedule in (Schedule(), Schedule("gpipe"), Schedule("interleaved", 2), Schedule(weights=(900, 900, 1200))):
    order = stage_order(plan, schedule)
    print(order.played.end, [order.tasks(rank, device).tolist() for rank in range(5) for device in range(3)])
"""
    command = [sys.executable, "-c", code]
    printed = [
        subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | changes).stdout
        for changes in ({}, {"NUMBA_DISABLE_JIT": "1"})
    ]
    assert printed[0] == printed[1]
    assert len(printed[0].splitlines()) == 4


@given(st.integers(1, 4096), st.integers(2, 32), st.integers(0, 44))
@example(4, 2, 40)
def test_what_chunks_cost_is_counted_where_they_end(length, chunks, exponent):
    """However much of the cost is linear: 4 tokens ran in chunks of 3 and 1, and were counted in chunks of 2 and 2."""
    linear_tokens = 2**exponent
    stops = [_chunk_stop(length, chunk, chunks, linear_tokens) for chunk in range(1, chunks + 1)]
    exact = chunk_stops(length, chunks, linear_tokens)
    near = 2**27 <= linear_tokens < length * 2**20  # 64 bits do not hold its squares
    assert all(abs(stop - end) <= (1 if near else 0) for stop, end in zip(stops, exact))


@given(st.integers(2, 4096), st.integers(1, 8), st.integers(2, 32), st.integers(0, 20), costs())
@example(4, 1, 2, 0, CostModel(27, 1, 0, attention_half_tokens=42, windowed_ps=19, window=1).scaled(0.5, 0.5, 0.5))
def test_chunks_add_up_to_no_less_than_a_document_takes_whole(length, ranks, chunks, exponent, cost):
    """Terms of less than a nanosecond a token were rounded down in chunks, and a plan ended before the lower bound."""
    ranks, chunks = min(ranks, length), min(chunks, length)
    together = chunked_work(length, ranks, chunks, 2**exponent, 0, cost.coefficients)
    assert together >= cost.work(length, ranks)
