"""Plays a StepPlan on a cluster that need not exist: one optimizer step, from the first document to the new weights.

    workload.py   what each member of each micro-batch computes and sends, counted anew: this makes it a check of the plan
    events.py     when micro-batches run, with the network cards of a node shared among all that use them at the same time
    planner/stages/stage_order.py    the same in a pipeline (mode "pipeline"), where each micro-batch or chunk travels as if alone
    machine.py    speeds and links of the ranks, sums over all ranks, the loader

A step is then, in this order and in every rank's time:

    micro-batches   until the last rank ends; in mode "lockstep" a round also waits for its own sums and gathers, which
                    travel while it computes: gradients reduced (zero2, zero3), weights gathered twice (zero3)
    gradients       summed over all ranks: all-reduce (ddp), reduce-scatter and all-gather of new weights (zero1), the
                    latter alone (zero2)
    optimizer       of all parameters (ddp), or of a rank's share
    loading         where the loader is slower than all this

MFU counts the model's FLOPs forward and backward, 6 per weight and token and half of each document's square of attention,
no recomputation, over what the devices could do in these seconds. Not played: Ulysses (its groups exchange directly
here), jitter, failures.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hf_longctx.hardware.model_sizes import model_flops
from hf_longctx.planner.memory.memory_model import FORWARD_SHARE, SHARDING, MemoryModel, exposed_seconds
from hf_longctx.planner.memory.state_bytes import IN_ROUNDS
from hf_longctx.planner.plan import StepPlan
from hf_longctx.planner.stages.stage_events import FORWARD, Units
from hf_longctx.planner.stages.stage_order import Schedule, play_stages
from hf_longctx.simulator.events import Tasks, play_events
from hf_longctx.simulator.machine import Loader, Machine
from hf_longctx.simulator.workload import Workload, workload

WEIGHT_BYTES, GRADIENT_BYTES = 2, 4
"""Bytes of a weight on its way to other ranks, and of a gradient that is summed (float32)."""


@dataclass(frozen=True, eq=False, slots=True)
class Simulation:
    """One step of m micro-batches. Seconds, unless said otherwise."""

    start: np.ndarray
    """[m]; in a pipeline, in the first stage."""
    stop: np.ndarray
    """[m]; in a pipeline, of backward in the first stage."""
    computing: np.ndarray
    """[world_size]: in a pipeline, mean of the stages."""
    exposed: np.ndarray
    """[world_size]: its micro-batches exchange, and no computation hides it; rounds' own sums too."""
    idle: np.ndarray
    """[world_size]: waiting for other ranks until the last micro-batch ends."""
    parts: dict[str, float]
    """Name -> seconds: micro-batches, gradients, optimizer, loading. They add up to the step."""
    tokens: int
    """Tokens of the step, on all ranks."""
    model_flops: float
    peak_flops: float
    """FLOP/s of all devices."""
    devices: int
    inside_bytes: float
    """Received from the same node, all ranks, keys, values and their gradients."""
    between_bytes: float
    """Received from other nodes."""
    memory: np.ndarray | None
    """int64 [world_size]: bytes at the worst moment, on each device of a rank; None if no MemoryModel was given."""

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float:
        """0 to 1; see the module docstring."""
        return self.model_flops / (self.seconds * self.peak_flops)

    @property
    def idle_share(self) -> float:
        """Share of all ranks' time in the step that is spent waiting for other ranks, 0 to 1."""
        return float(self.idle.mean()) / self.seconds

    @property
    def exposed_share(self) -> float:
        """Share of all ranks' time in which nothing but communication goes on, sums of gradients included."""
        return (float(self.exposed.mean()) + self.parts["gradients"]) / self.seconds


def play(
    plan: StepPlan,
    config: Any,
    machine: Machine,
    *,
    sharding: str = "zero1",
    recompute: bool = False,
    memory: MemoryModel | None = None,
    loader: Loader | None = None,
    schedule: Schedule | None = None,
) -> Simulation:
    """Plays one step.

    Args:
        config: of the Hugging Face model, or of hardware/published.py.
        sharding: "ddp", "zero1", "zero2" or "zero3"; the last two meet in rounds, mode "lockstep".
        recompute: whether each layer runs forward again before its backward (activation checkpointing).
        memory: predicts bytes; with it, transfers of offloaded activations that compute does not hide count as well.
        loader: None: documents are always there.
        schedule: of the stages in mode "pipeline"; None: 1F1B.

    Raises:
        ValueError: the plan's nodes are not the machine's, or the mode does not suit the sharding.
    """
    _validate(plan, machine, sharding)
    work = workload(plan, config, machine.speed, recompute=recompute)
    if memory is not None and plan.offload.any() and machine.host_bandwidth > 0:
        work = _with_offload(work, plan, memory, machine.host_bandwidth, _forward_share(recompute))
    world_size, flops = plan.world_size, model_flops(config)
    stages = plan.topology.stages if plan.mode == "pipeline" else 1
    parameters = flops.parameters / stages
    tasks, units = _tasks(plan, work, machine, stages), work.units
    if plan.mode == "pipeline":
        lasted = _alone(tasks, work, plan, machine, stages)
        most_tokens = np.maximum.reduceat(units.member_tokens, units.first_member[:-1])
        # Stages that all lie in one node pass activations on inside.
        link = machine.speed.inside_bytes if world_size * stages <= machine.ranks_per_node else machine.card_bytes
        travel = most_tokens * (flops.hidden * machine.speed.activation_bytes / link)
        schedule = schedule or Schedule()
        seconds = _task_seconds(lasted, recompute)
        played = play_stages(
            Units(
                plan.first_member,
                plan.rank,
                np.minimum(plan.member_tokens, plan.topology.capacities[plan.rank]),
                plan.topology.capacities,
                units.first_unit,
                units.micro_batch,
                np.round(seconds * 1e9).astype(np.int64),
                np.round(travel * 1e9).astype(np.int64),
            ),
            world_size,
            stages,
            schedule,
        )
        start, stop, end = played.start[FORWARD, units.first_unit[:-1], 0] / 1e9, played.stop / 1e9, played.end / 1e9
        waited = 0.0
    else:
        in_rounds = {"zero2": GRADIENT_BYTES, "zero3": GRADIENT_BYTES + 2 * WEIGHT_BYTES}.get(sharding, 0)
        start, stop, _, end, waited = play_events(
            tasks,
            work.first_pair,
            work.node,
            work.node_link,
            work.node_cards,
            world_size=world_size,
            ranks_per_node=plan.topology.node_size,
            ring=plan.exchange == "ring",
            card_bytes=machine.card_bytes,
            cards_per_node=machine.cards_per_node,
            round_seconds=machine.sum_seconds(in_rounds * parameters, world_size),
        )
        lasted = stop - start
    members = np.repeat(np.arange(len(lasted)), np.diff(units.first_member))
    computing = np.bincount(units.rank, (work.linear_seconds + work.attention_seconds) / stages, world_size)
    exposed = np.bincount(units.rank, (lasted - tasks.compute)[members], world_size) + waited
    after = {
        "ddp": 2 * GRADIENT_BYTES,
        "zero1": GRADIENT_BYTES + WEIGHT_BYTES,
        "zero2": WEIGHT_BYTES,
        "zero3": 0,
    }[sharding]
    updated = parameters if sharding == "ddp" else parameters / world_size
    parts = {
        "micro-batches": end,
        "gradients": machine.sum_seconds(after * parameters, world_size),
        "optimizer": updated / machine.speed.optimizer_parameters,
    }
    tokens = int(plan.length.sum())
    nodes = -(-world_size * stages // machine.ranks_per_node)
    parts["loading"] = loader.exposed_seconds(tokens, nodes, sum(parts.values())) if loader is not None else 0.0
    return Simulation(
        start=start,
        stop=stop,
        computing=computing,
        exposed=exposed,
        idle=np.maximum(0.0, end - computing - exposed),
        parts=parts,
        tokens=tokens,
        model_flops=work.model_flops,
        peak_flops=machine.peak_flops * world_size * stages,
        devices=world_size * stages * machine.devices_per_rank,
        inside_bytes=float(work.inside_bytes.sum()),
        between_bytes=float(work.between_bytes.sum()),
        memory=_memory(plan, memory) if memory is not None else None,
    )


def predicted_step_seconds(plan: StepPlan, config: Any, machine: Machine, *, sharding: str = "ddp") -> float:
    """Seconds of one step, predicted; with Machine.from_profile, of the machine that was measured."""
    return play(plan, config, machine, sharding=sharding).seconds


def _validate(plan: StepPlan, machine: Machine, sharding: str) -> None:
    if sharding not in SHARDING:
        raise ValueError(f"sharding={sharding!r} is unknown; valid: {', '.join(SHARDING)}")
    if sharding in IN_ROUNDS and plan.mode != "lockstep":
        raise ValueError(
            f"sharding={sharding!r} reduces gradients after every round, and the plan's mode is {plan.mode!r}; valid: mode "
            "'lockstep', or sharding 'ddp' or 'zero1'"
        )
    ranks_per_node = min(machine.ranks_per_node, plan.world_size)
    if plan.topology.node_size != ranks_per_node:
        raise ValueError(
            f"the plan has {plan.topology.node_size} ranks on a node (ranks_per_node={plan.topology.ranks_per_node}, "
            f"{plan.world_size} ranks), the machine {machine.ranks_per_node}; plan with "
            f"ranks_per_node={machine.ranks_per_node}"
        )


def _tasks(plan: StepPlan, work: Workload, machine: Machine, stages: int) -> Tasks:
    """Seconds of units, in one stage of several."""
    return Tasks(
        first_member=work.units.first_member,
        rank=work.units.rank,
        round=plan.round[work.units.micro_batch],
        compute=work.slowest_compute / stages,
        linear=work.slowest_linear / stages,
        messages=work.messages * machine.speed.message_seconds / stages,
        inside=work.inside_link / machine.speed.inside_bytes / stages,
    )


def _alone(tasks: Tasks, work: Workload, plan: StepPlan, machine: Machine, stages: int) -> np.ndarray:
    """[u]: seconds of units in one stage, when no other uses the network cards of their nodes."""
    pair = np.repeat(np.arange(len(tasks.compute)), np.diff(work.first_pair))
    rate = np.minimum(work.node_cards * machine.card_bytes, machine.node_bytes)
    between = np.zeros(len(tasks.compute))
    np.maximum.at(between, pair, work.node_link / rate / stages)
    exchange = np.maximum(tasks.inside, between) if plan.exchange == "ring" else tasks.inside + between
    return np.maximum(tasks.compute, tasks.linear + tasks.messages + exchange)


def _task_seconds(lasted: np.ndarray, recompute: bool) -> np.ndarray:
    """[2, u]: seconds of forward and backward; recomputation is part of backward."""
    forward = _forward_share(recompute)
    return np.stack([forward * lasted, (1 - forward) * lasted])


def _forward_share(recompute: bool) -> float:
    """Forward's share of a micro-batch; recomputation is part of backward."""
    return FORWARD_SHARE / (1 + FORWARD_SHARE) if recompute else FORWARD_SHARE


def _with_offload(
    work: Workload, plan: StepPlan, memory: MemoryModel, host_bandwidth: float, forward_share: float
) -> Workload:
    """Add the seconds by which activations that go to host memory, and come back, outlast the compute that hides them."""
    late = np.zeros(len(work.slowest_compute))
    for i in np.flatnonzero(plan.offload).tolist():
        of = slice(plan.first_member[i], plan.first_member[i + 1])
        moved = memory.offloadable_token_bytes * int(plan.member_tokens[of].max()) * int(plan.offload[i]) // 1000
        units = slice(work.units.first_unit[i], work.units.first_unit[i + 1])
        compute = work.slowest_compute[units]
        late[units] = exposed_seconds(moved, float(compute.sum()), host_bandwidth, forward_share) / len(compute)
    return replace(work, slowest_compute=work.slowest_compute + late)


def _memory(plan: StepPlan, memory: MemoryModel) -> np.ndarray:
    """int64 [world_size]: bytes at the worst moment of each rank; without micro-batches, what it holds anyway."""
    offload = np.repeat(plan.offload, plan.members)
    kinds, kind = np.unique(np.stack([plan.member_tokens, offload]), axis=1, return_inverse=True)
    peaks = np.array([memory.peak(int(tokens), int(share)) for tokens, share in kinds.T], np.int64)
    peak = np.full(plan.world_size, memory.weights + memory.gradients + memory.optimizer)
    np.maximum.at(peak, plan.rank, peaks[kind.ravel()])
    return peak
