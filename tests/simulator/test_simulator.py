"""The simulator against independent references: schedules of the runtime for bytes, plans' own timelines on links that cost
nothing, hand-computed cases for shared network cards, pipelines and sums, and bounds that nothing may beat.
"""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hf_longctx.hardware.devices import CLUSTERS
from hf_longctx.hardware.model_sizes import model_flops
from hf_longctx.hardware.profile import Profile
from hf_longctx.hardware.published import ARCHITECTURES
from hf_longctx.layouts.exchange_schedule import schedule
from hf_longctx.layouts.layout import Layout
from hf_longctx.planner import PLANNERS, PlanError, RankSpeed, StepPlan, Topology, plan_step
from hf_longctx.planner.memory.memory_model import MemoryModel, exposed_seconds
from hf_longctx.simulator.events import Tasks, play_events
from hf_longctx.simulator.lengths import draw
from hf_longctx.simulator.machine import Loader, Machine, busiest_share
from hf_longctx.simulator.play import play, predicted_step_seconds
from hf_longctx.simulator.workload import workload
from tests.builders.plans.random_plans import lengths_for, topologies
from tests.simulator.simulated_step import H100, LLAMA_7B, seconds_of_a_step

ENDLESS = 1e30
"""Bytes/s that nothing ever waits for."""


def with_nodes_of(machine: Machine, plan: StepPlan, **changes: object) -> Machine:
    return replace(machine, ranks_per_node=plan.topology.node_size, **changes)


@st.composite
def plans(draw: st.DrawFn, modes: tuple[str, ...] = ("async", "lockstep", "pipeline")) -> StepPlan:
    """Draw plans of any planner, with direct exchange or ring, for a 7B model; lengths of thousands of tokens."""
    equal = draw(st.booleans())
    topology = draw(topologies(equal=equal))
    lengths = draw(lengths_for(topology)) * 1000
    topology = replace(topology, capacity=topology.capacity * 1000)
    name = draw(st.sampled_from([name for name in PLANNERS if equal or name == "hdp"]))
    cost = replace(H100, ranks_per_node=topology.node_size).cost(LLAMA_7B, topology.world_size)
    try:
        plan = PLANNERS[name](lengths, topology, cost, draw(st.sampled_from(modes)))
    except PlanError:
        assume(False)
    return replace(plan, exchange=draw(st.sampled_from(["direct", "ring"])))


@settings(max_examples=50, deadline=None)
@given(plans())
def test_bytes_are_those_of_the_runtimes_schedules(plan: StepPlan):
    work = workload(replace(plan, exchange="direct"), LLAMA_7B, H100.speed)
    per_token = 2 * 32 * 4096 * (2 * 2 + 4)
    node = plan.topology.node_size
    layouts: dict[int, list[Layout]] = {}
    for micro_batch, first in enumerate(plan.first_member[:-1]):
        layouts[micro_batch] = [layout for i, layout in plan.layouts(int(plan.rank[first])) if i == micro_batch]
    for unit, layout in enumerate(layout for micro_batch in sorted(layouts) for layout in layouts[micro_batch]):
        inside = between = 0
        for rank in layout.ranks:
            for round in schedule(layout, rank, ranks_per_node=node).rounds:
                for receive in round.receives:
                    if receive.rank // node == rank // node:
                        inside += receive.tokens
                    else:
                        between += receive.tokens
        # Shares and chunks are whole tokens there; each message may differ by two.
        slack = 2 * len(layout.ranks) ** 2 * max(1, len(layout.split_documents), int(plan.chunks.max()))
        assert work.inside_bytes[unit] / per_token == pytest.approx(inside, abs=slack)
        assert work.between_bytes[unit] / per_token == pytest.approx(between, abs=slack)


@settings(max_examples=100, deadline=None)
@given(plans())
def test_a_ring_passes_everything_but_a_ranks_own_share(plan: StepPlan):
    work = workload(replace(plan, exchange="ring"), LLAMA_7B, H100.speed)
    per_token = 2 * 32 * 4096 * (2 * 2 + 4)
    units = work.units
    ranks = np.diff(units.first_member)
    unit = np.repeat(np.arange(len(ranks)), np.diff(units.first_document))
    split = units.holder < 0
    expected = np.bincount(unit[split], (units.length * (ranks - 1)[unit])[split], len(ranks))
    expected += units.context * (ranks - 1)
    assert (work.inside_bytes + work.between_bytes) / per_token == pytest.approx(expected)


@settings(max_examples=150, deadline=None)
@given(plans())
def test_on_endless_links_a_plan_takes_what_its_timeline_says(plan: StepPlan):
    """Costs here are the simulator's own, rounded to nanoseconds: what is compared is when micro-batches run."""
    machine = with_nodes_of(
        H100, plan, card_bytes=ENDLESS, speed=replace(H100.speed, inside_bytes=ENDLESS, message_seconds=0.0)
    )
    stages = plan.topology.stages if plan.mode == "pipeline" else 1
    work = workload(plan, LLAMA_7B, machine.speed)
    compute = np.bincount(work.units.micro_batch, work.slowest_compute) / stages
    plan = replace(plan, cost=np.maximum(1, np.round(compute * 1e9)))
    played, timeline = play(plan, LLAMA_7B, machine), plan.timeline()
    if plan.mode == "pipeline":
        # The timeline lets groups run through all stages at once and counts the longest for every stage.
        assert (
            played.parts["micro-batches"] * 1e9 >= max(plan.cost) * (1 + (stages - 1) / plan.chunks.max()) - 1 - stages
        )
    else:
        assert played.start * 1e9 == pytest.approx(timeline.start, abs=len(plan.cost))
        assert played.parts["micro-batches"] * 1e9 == pytest.approx(timeline.makespan, abs=len(plan.cost))
        assert played.exposed == pytest.approx(0, abs=1e-9)


@settings(max_examples=150, deadline=None)
@given(plans(("async", "lockstep")), st.sampled_from([1e6, 1e9, 1e11]), st.sampled_from([1.0, 2.0, 8.0]))
def test_work_and_bytes_are_conserved_and_no_resource_is_beaten(plan: StepPlan, card_bytes: float, cards: float):
    machine = with_nodes_of(H100, plan, card_bytes=card_bytes, cards_per_node=cards)
    work = workload(plan, LLAMA_7B, machine.speed)
    inside = work.inside_link / machine.speed.inside_bytes
    messages = work.messages * machine.speed.message_seconds
    ring = plan.exchange == "ring"
    start, stop, moved, end, _ = play_events(
        Tasks(plan.first_member, plan.rank, plan.round, work.slowest_compute, work.slowest_linear, messages, inside),
        work.first_pair,
        work.node,
        work.node_link,
        work.node_cards,
        world_size=plan.world_size,
        ranks_per_node=plan.topology.node_size,
        ring=ring,
        card_bytes=card_bytes,
        cards_per_node=cards,
    )
    assert moved == pytest.approx(work.node_link)
    played = play(plan, LLAMA_7B, machine)
    assert (played.start == start).all()
    assert (played.stop == stop).all()
    total = played.computing + played.exposed + played.idle
    assert total == pytest.approx(np.full(plan.world_size, end))
    seconds = work.linear_seconds + work.attention_seconds
    assert played.computing.sum() == pytest.approx(seconds.sum())

    close = 1 + 1e-9
    assert ((stop - start) * close >= work.slowest_compute).all()
    assert ((stop - start) * close >= inside).all()
    assert end * close >= played.computing.max()
    over_cards = np.bincount(work.node, work.node_link) if len(work.node) else np.zeros(1)
    assert end * close >= over_cards.max() / (card_bytes * cards)
    pair = np.repeat(np.arange(len(start)), np.diff(work.first_pair))
    assert ((stop - start)[pair] * close >= work.node_link / (work.node_cards * card_bytes)).all()

    for rank in range(plan.world_size):  # one at a time, in order; in mode async without a gap that nobody caused
        mine = np.repeat(np.arange(len(start)), plan.members)[plan.rank == rank]
        assert (start[mine[1:]] >= stop[mine[:-1]]).all()
    if plan.mode == "lockstep":
        for round in range(1, plan.rounds):
            assert start[plan.round == round].min() >= stop[plan.round < round].max()
    else:
        free = np.zeros(plan.world_size)
        for i in range(len(start)):
            ranks = plan.rank[plan.first_member[i] : plan.first_member[i + 1]]
            assert start[i] == free[ranks].max()
            free[ranks] = stop[i]


def tasks_of(groups: list[list[int]], compute: list[float]) -> Tasks:
    """Micro-batches of these ranks, all of whose compute an exchange hides behind."""
    first = np.concatenate([[0], np.cumsum([len(group) for group in groups])])
    zeros = np.zeros(len(groups))
    return Tasks(first, np.concatenate(groups), zeros.astype(np.int64), np.array(compute), zeros, zeros, zeros)


def test_micro_batches_share_the_cards_of_a_node():
    """Ranks 0-3 on node 0, 4-7 on node 1; A on 2 and 4, B on 3 and 5: both send 10 bytes from each node, at most 1 byte/s
    for each of their cards. One card a node: while A and B both run, each has half of it. B starts 4 s late, behind C."""
    tasks = tasks_of([[3], [2, 4], [3, 5]], [4.0, 1.0, 1.0])
    pairs = np.array([0, 0, 2, 4]), np.array([0, 1, 0, 1]), np.full(4, 10.0), np.ones(4, np.int64)
    common = {"world_size": 8, "ranks_per_node": 4, "ring": False, "card_bytes": 1.0}
    start, stop, _, _, _ = play_events(tasks, *pairs, cards_per_node=2.0, **common)
    assert (start.tolist(), stop.tolist()) == ([0, 0, 4], [4, 10, 14])
    # A: 4 s alone, then half: 4 + 12. B: 6 bytes by then, 4 more alone.
    start, stop, moved, _, _ = play_events(tasks, *pairs, cards_per_node=1.0, **common)
    assert start.tolist() == [0, 0, 4]
    assert stop == pytest.approx([4, 16, 20])
    assert moved == pytest.approx(np.full(4, 10.0))


def test_what_one_does_not_want_others_get():
    """A hides its 10 bytes behind 40 s of compute, so it wants 0.25 bytes/s; B has nothing to hide behind and gets the rest."""
    tasks = tasks_of([[2, 4], [3, 5]], [40.0, 1.0])
    pairs = np.array([0, 2, 4]), np.array([0, 1, 0, 1]), np.full(4, 10.0), np.ones(4, np.int64)
    _, stop, _, _, _ = play_events(
        tasks, *pairs, world_size=8, ranks_per_node=4, ring=False, card_bytes=1.0, cards_per_node=1.0
    )
    assert stop == pytest.approx([40, 10 / 0.75])


def test_a_rank_alone_on_its_node_brings_in_everything_over_one_card():
    """17 ranks on nodes of 8: the last one needs half of all keys, which nobody on its node shares with it."""
    length, topology = 17 * 8192, Topology(17, 8192, ranks_per_node=8)
    slow = replace(H100, card_bytes=1e9)
    plan = replace(plan_step(np.array([length]), topology, H100.cost(LLAMA_7B, 17)), exchange="direct")
    assert plan.members.tolist() == [17]
    work = workload(plan, LLAMA_7B, slow.speed)
    assert work.node.tolist() == [0, 1, 2]
    assert work.node_cards.tolist() == [8, 8, 1]
    element = 2 * 32 * 4096
    received, sent = length * 16 / 17 / 2, length / 17 * 2
    # Forward: 2 bytes each way. Backward: 2 bytes in again, and its float32 gradients out; or the other way around.
    busiest = 2 * received + max(2 * received + 4 * sent, 2 * sent + 4 * received)
    assert work.node_link[2] == pytest.approx(element * busiest)
    assert play(plan, LLAMA_7B, slow).parts["micro-batches"] >= element * busiest / 1e9


@settings(max_examples=150, deadline=None)
@given(plans(("pipeline",)))
def test_pipelines_end_and_no_stage_is_beaten(plan: StepPlan):
    machine = with_nodes_of(H100, plan)
    played = play(plan, LLAMA_7B, machine)
    stages = plan.topology.stages
    end = (
        played.parts["micro-batches"] + plan.topology.stages * len(plan.cost) * 1e-6
    )  # in a pipeline, whole nanoseconds
    assert end >= (played.computing + played.exposed).max()
    assert np.isfinite(played.stop).all()
    longest = workload(plan, LLAMA_7B, machine.speed).slowest_compute.max()
    assert end >= longest  # all stages of the longest chunk, forward and backward
    assert played.devices == plan.world_size * stages


@settings(max_examples=50, deadline=None)
@given(plans())
def test_a_simulation_repeats_bit_by_bit(plan: StepPlan):
    machine = with_nodes_of(H100, plan, cards_per_node=1.0)
    first, again = play(plan, LLAMA_7B, machine), play(plan, LLAMA_7B, machine)
    assert first.parts == again.parts
    assert (first.stop == again.stop).all()


def test_a_document_on_one_rank_is_hand_computed():
    plan = plan_step(np.array([4096]), Topology(1, 8192), H100.cost(LLAMA_7B, 1))
    played = play(plan, LLAMA_7B, H100, sharding="ddp")
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    linear, attention = 6 * (weights + 4096 * 32000) * 4096, 6 * 32 * 4096 * 4096**2
    assert played.model_flops == linear + attention
    speed = H100.speed
    seconds = linear / speed.linear_flops + attention / speed.attention_flops * (1 + 256 / 4096) + 32 * 3.1e-4
    assert played.parts["micro-batches"] == pytest.approx(seconds)
    assert played.parts["gradients"] == 0
    assert played.parts["optimizer"] == pytest.approx((weights + 2 * 4096 * 32000) / speed.optimizer_parameters)
    assert played.mfu == pytest.approx((linear + attention) / played.seconds / 989e12)
    assert played.tokens_per_second == 4096 / played.seconds
    recomputed = play(plan, LLAMA_7B, H100, sharding="ddp", recompute=True)
    head = 6 * 4096 * 32000 * 4096 / speed.linear_flops  # behind the layers, which alone run again, their launches too
    assert recomputed.computing[0] == pytest.approx((seconds - head) * 4 / 3 + head)
    assert recomputed.model_flops == played.model_flops
    cost = H100.cost(LLAMA_7B, 1, capacity=8192, recompute=True)
    planned = plan_step(np.array([4096]), Topology(1, 8192), cost).timeline().makespan / 1e9
    assert recomputed.parts["micro-batches"] == pytest.approx(planned, rel=1e-3)


def test_sums_by_sharding_are_hand_computed():
    """16 ranks on 2 nodes: inside, 7/8 of the bytes over each rank's links; between, 1/2 over the node's 8 cards."""
    lengths, parameters = np.full(64, 4096), 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 2 * 4096 * 32000
    topology = Topology(16, 8192, ranks_per_node=8)
    cost = H100.cost(LLAMA_7B, 16)
    inside, between = 450e9 * 0.8, 8 * 50e9 * 0.88
    one_byte = parameters * max(7 / 8 / inside, 1 / 2 / between)
    plan = plan_step(lengths, topology, cost)
    assert play(plan, LLAMA_7B, H100, sharding="ddp").parts["gradients"] == pytest.approx(8 * one_byte)
    assert play(plan, LLAMA_7B, H100, sharding="zero1").parts["gradients"] == pytest.approx(6 * one_byte)
    zero1, ddp = (play(plan, LLAMA_7B, H100, sharding=name).parts["optimizer"] for name in ("zero1", "ddp"))
    assert zero1 == pytest.approx(ddp / 16)

    rounds = plan_step(lengths, topology, cost, "lockstep")
    zero2 = play(rounds, LLAMA_7B, H100, sharding="zero2")
    assert zero2.parts["gradients"] == pytest.approx(2 * one_byte)
    busy = play(rounds, LLAMA_7B, H100).parts["micro-batches"]
    assert zero2.parts["micro-batches"] == pytest.approx(busy)  # hidden behind compute
    slow = replace(H100, sum_bytes=1e8)
    for sharding, moved in (("zero2", 4), ("zero3", 8)):  # hides nothing: each round takes what its collectives take
        played = play(rounds, LLAMA_7B, slow, sharding=sharding)
        assert played.parts["micro-batches"] == pytest.approx(rounds.rounds * moved * parameters * 7 / 8 / 1e8)
        assert played.exposed.min() > 0.9 * (played.parts["micro-batches"] - busy)


def test_wrong_combinations_are_refused():
    topology = Topology(16, 8192, ranks_per_node=4)
    plan = plan_step(np.full(64, 4096), topology, H100.cost(LLAMA_7B, 16))
    with pytest.raises(ValueError, match=r"has 4 ranks on a node .* the machine 8; plan with ranks_per_node=8"):
        play(plan, LLAMA_7B, H100)
    with pytest.raises(ValueError, match=r"'zero3' reduces .* mode is 'async'; valid: mode 'lockstep'"):
        play(plan, LLAMA_7B, replace(H100, ranks_per_node=4), sharding="zero3")
    with pytest.raises(ValueError, match=r"sharding='zero4' is unknown; valid: ddp, zero1, zero2, zero3"):
        play(plan, LLAMA_7B, replace(H100, ranks_per_node=4), sharding="zero4")
    with pytest.raises(
        ValueError, match=r"tensor_parallel=3 must divide 8 devices of a node and 32 .*valid: 1, 2, 4, 8"
    ):
        Machine.of(CLUSTERS["h100"], LLAMA_7B, tensor_parallel=3)


def test_tensor_parallel_ranks_are_faster_by_less_than_their_devices():
    """2 devices: every token's hidden states cross NVLink 4 times a layer, 2 bytes an element, half to the other."""
    two = Machine.of(CLUSTERS["h100"], LLAMA_7B, tensor_parallel=2)
    flops = 6 * (32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000)
    alone, summed = flops / (2 * H100.speed.linear_flops), 32 * 4 * 4096 * 2 / H100.speed.inside_bytes
    assert flops / two.speed.linear_flops == pytest.approx(alone + summed)
    assert two.speed.attention_flops == 2 * H100.speed.attention_flops
    assert (two.ranks_per_node, two.devices_per_rank) == (4, 2)
    assert two.node_bytes == pytest.approx(H100.node_bytes)
    assert two.peak_flops == 2 * H100.peak_flops


def test_tokens_travel_to_experts_on_other_ranks():
    """Mixtral 8x7B, 8 experts on 8 ranks of 2 nodes: 2 copies of every token's 4096 elements of 2 bytes, 4 times a layer; 3 of
    8 ranks are on the same node, 4 on the other."""
    mixtral, four_a_node = ARCHITECTURES["mistral-8x7b"], replace(H100, ranks_per_node=4)
    flops, copies = model_flops(mixtral).linear, 32 * 4 * 2 * 4096 * 2
    spread = four_a_node.with_experts_on(8, mixtral)
    between = copies * 4 / 8 / H100.card_bytes
    assert flops / spread.speed.linear_flops == pytest.approx(flops / H100.speed.linear_flops + between)
    assert spread.planned_speed == spread.speed
    inside = copies * 7 / 8 / H100.speed.inside_bytes
    at_home = H100.with_experts_on(8, mixtral)
    assert flops / at_home.speed.linear_flops == pytest.approx(flops / H100.speed.linear_flops + inside)
    assert H100.with_experts_on(1, mixtral).speed.linear_flops == pytest.approx(H100.speed.linear_flops)
    with pytest.raises(ValueError, match=r"3 ranks for the 8 experts of each layer; valid: 1, 2, 4, 8"):
        H100.with_experts_on(3, mixtral)
    with pytest.raises(ValueError, match=r"2 ranks for the 0 experts .*valid: none, it has no experts"):
        H100.with_experts_on(2, LLAMA_7B)


def test_ranks_of_a_mesh_use_all_their_links_at_once():
    """MI300X: 7 links of 64 GB/s, 80 % of which is achieved; a sum over 8 devices uses all, a message one."""
    llama, mi300x = ARCHITECTURES["llama-70b"], CLUSTERS["mi300x"]
    one, eight = Machine.of(mi300x, llama), Machine.of(mi300x, llama, tensor_parallel=8)
    assert one.speed.inside_bytes == pytest.approx(0.8 * 64e9)
    flops, copies = model_flops(llama), 2 * 7 / 8 * 80 * 4 * 8192 * 2
    alone = flops.linear / (8 * one.speed.linear_flops)
    assert flops.linear / eight.speed.linear_flops == pytest.approx(alone + copies / (0.8 * 448e9))
    mixtral = ARCHITECTURES["mistral-8x7b"]
    at_home = Machine.of(mi300x, mixtral)
    linear, exchange = model_flops(mixtral).linear, 32 * 4 * 2 * 4096 * 2 * 7 / 8 / (0.8 * 448e9)
    spread = at_home.with_experts_on(8, mixtral)
    assert linear / spread.speed.linear_flops == pytest.approx(linear / at_home.speed.linear_flops + exchange)


def test_ranks_of_a_node_share_its_cards():
    """8 RTX 4090 have one card of 100 Gb/s."""
    mixtral = replace(ARCHITECTURES["mistral-8x7b"], num_local_experts=64)
    machine = Machine.of(CLUSTERS["rtx-4090"], mixtral)
    linear, exchange = model_flops(mixtral).linear, 32 * 4 * 2 * 4096 * 2 * 56 / 64 / (0.88 * 12.5e9 / 8)
    spread = machine.with_experts_on(64, mixtral)
    assert linear / spread.speed.linear_flops == pytest.approx(linear / machine.speed.linear_flops + exchange)
    together = Machine.of(CLUSTERS["rtx-4090"], mixtral, tensor_parallel=8)
    assert together.card_bytes == together.node_bytes == pytest.approx(0.88 * 12.5e9)


def test_channels_between_two_ranks_limit_no_sum_over_all():
    limited = H100.under_nccl(256, (2, 28, 0), by_node=False)
    assert limited.card_bytes < H100.card_bytes
    assert limited.sum_seconds(1e9, 256) == pytest.approx(H100.sum_seconds(1e9, 256))


def test_devices_of_a_measured_cluster_add_up():
    h100 = CLUSTERS["h100"]
    measured = replace(h100, measured=h100.speed())
    machine = Machine.of(measured, LLAMA_7B, tensor_parallel=4)
    assert machine.peak_flops == 4 * h100.matmul_flops
    assert machine.host_bandwidth == 4 * h100.host_bandwidth


def test_stages_in_one_node_have_one_loader_and_its_links():
    plan = plan_step(
        np.full(8, 4096), Topology(2, 8192, ranks_per_node=8, stages=4), H100.cost(LLAMA_7B, 2), "pipeline"
    )
    loader = Loader(node_tokens=1e4, prefetch=False)
    played = play(plan, LLAMA_7B, H100, loader=loader)
    assert played.parts["loading"] == pytest.approx(8 * 4096 / 1e4)
    apart = play(plan, LLAMA_7B, replace(H100, card_bytes=1e9), loader=loader)
    assert apart.parts["micro-batches"] == played.parts["micro-batches"]


def test_memory_is_that_of_each_ranks_fullest_micro_batch():
    memory = MemoryModel.from_config(LLAMA_7B, sharding="zero1", world_size=3)
    plan = plan_step(np.array([8000, 500]), Topology(3, 8192, ranks_per_node=8), H100.cost(LLAMA_7B, 3))
    idle = memory.weights + memory.gradients + memory.optimizer
    expected = [memory.peak(tokens) if tokens else idle for tokens in plan.peak_tokens.tolist()]
    assert play(plan, LLAMA_7B, H100, memory=memory).memory.tolist() == expected
    assert play(plan, LLAMA_7B, H100).memory is None


def test_transfers_to_host_memory_that_compute_does_not_hide_take_time():
    memory = MemoryModel.from_config(LLAMA_7B)
    plan = plan_step(np.array([8192]), Topology(1, 8192), H100.cost(LLAMA_7B, 1))
    plan = replace(plan, offload=np.array([800]))
    slow = replace(H100, host_bandwidth=1e10)
    before = play(plan, LLAMA_7B, slow).parts["micro-batches"]
    moved = memory.offloadable_token_bytes * 8192 * 800 // 1000
    after = play(plan, LLAMA_7B, slow, memory=memory).parts["micro-batches"]
    assert after == pytest.approx(before + exposed_seconds(moved, before, 1e10))
    assert after > 1.5 * before


def test_a_loader_slower_than_the_step_is_waited_for():
    local = Loader(node_tokens=1e6, remote=False)
    assert local.exposed_seconds(3_000_000, 4, 1.0) == 2.0
    assert Loader(node_tokens=1e6).exposed_seconds(3_000_000, 4, 0.5) == 0.25
    assert Loader(node_tokens=1e6).exposed_seconds(3_000_000, 4, 1.0) == 0.0
    assert replace(local, prefetch=False).exposed_seconds(3_000_000, 4, 1.0) == 3.0
    plan = plan_step(np.full(64, 4096), Topology(16, 8192, ranks_per_node=8), H100.cost(LLAMA_7B, 16))
    played = play(plan, LLAMA_7B, H100, loader=Loader(node_tokens=1e4))
    assert played.seconds == pytest.approx(64 * 4096 / 1e4 / 2)
    assert played.parts["loading"] > 0


def test_a_profiles_predictions_are_those_of_the_cost_model():
    # What `profile` fits is CostModel's formula: on one node, playing a plan must not disagree with it.
    speed = RankSpeed(5e10, 2e11, 1e8, 1e8, 1e-4, 1e-4, 1e-4, 64.0, 5e8, 1e8, 4)
    profile = Profile(speed, (), (), "wall", "cpu", "gloo", 4, 4, 1, "float32", 2**33, 2**34, {}, {})
    machine = Machine.from_profile(profile)
    config = replace(LLAMA_7B, num_hidden_layers=2)
    plan = plan_step(np.array([4000, 300, 200]), Topology(4, 1024, ranks_per_node=4), machine.cost(config, 4))
    played = play(plan, config, machine)
    assert played.parts["micro-batches"] * 1e9 == pytest.approx(plan.timeline().makespan, rel=0.02)
    assert machine.speed.inside_bytes == busiest_share(4) * 1e8
    assert predicted_step_seconds(plan, config, machine) == play(plan, config, machine, sharding="ddp").seconds


@pytest.mark.parametrize("recompute", [False, True])
def test_no_micro_batch_is_done_before_its_host_has_started_its_kernels(recompute: bool):
    plan = plan_step(np.array([1000, 10]), Topology(2, 1024), H100.cost(LLAMA_7B, 2))

    def lasted(launch_seconds: float) -> list[float]:
        machine = replace(H100, speed=replace(H100.speed, launch_seconds=launch_seconds))
        played = play(plan, LLAMA_7B, machine, recompute=recompute)
        return (played.stop - played.start).tolist()

    long, short = sorted(lasted(0.0), reverse=True)
    launch = (long + short) / 2 / LLAMA_7B.num_hidden_layers / (4 / 3 if recompute else 1)
    assert sorted(lasted(launch)) == pytest.approx([(long + short) / 2, long])


def test_what_is_exchanged_while_a_host_starts_kernels_takes_no_time():
    plan = plan_step(np.array([2000]), Topology(2, 1024, ranks_per_node=2), H100.cost(LLAMA_7B, 2))

    def lasted(launch_seconds: float) -> float:
        played = play(plan, LLAMA_7B, replace(H100, speed=replace(H100.speed, launch_seconds=launch_seconds)))
        return float((played.stop - played.start).max())

    before = lasted(0.0)
    assert plan.members.tolist() == [2]
    assert lasted(2 * before / LLAMA_7B.num_hidden_layers) == pytest.approx(2 * before)


def test_the_largest_step_is_played():
    """How quickly, benchmarks/simulator.py says."""
    lengths = draw("github", 100_000, 0)
    plan = plan_step(lengths, Topology(16384, 8192, ranks_per_node=8), H100.cost(LLAMA_7B, 16384))
    played = play(plan, LLAMA_7B, H100)
    assert played.tokens_per_second == lengths.sum() / played.seconds
    assert 0 < played.mfu < 1


@pytest.mark.processes
def test_simulator_is_deterministic_across_processes():
    program = "from tests.simulator.simulated_step import seconds_of_a_step; print(seconds_of_a_step())"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == seconds_of_a_step()
