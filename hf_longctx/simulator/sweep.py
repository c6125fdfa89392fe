"""Every planner on the same documents of the same run, played on the same machine: what a user asks before renting it.

A run says how many devices there are, how the model is spread over them, and for which context. From that follow the
tokens that a rank holds (MemoryModel, unless given), the ranks, and what planners are told about their speed.

Whether activations are recomputed changes both: a third more compute, and several times the tokens on a rank, so fewer
ranks for a document and less exchange. Unless that is given too, each planner gets what suits it better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from hf_longctx.hardware.devices import Cluster
from hf_longctx.hardware.nccl import NCCL_OF_TORCH, Version
from hf_longctx.parallel.world import World
from hf_longctx.planner import CostModel, Mode, StepPlan, Topology, planners_for
from hf_longctx.planner.memory.device_bytes import bytes_outside
from hf_longctx.planner.memory.memory_model import MemoryModel
from hf_longctx.planner.memory.state_bytes import IN_ROUNDS, Sharding
from hf_longctx.planner.stages.stage_layers import fullest_share, most_in_flight
from hf_longctx.planner.stages.stage_order import Schedule
from hf_longctx.simulator.machine import Loader, Machine
from hf_longctx.simulator.play import Simulation, play

ROUND_TO = 256
"""Tokens that a rank holds are a multiple of this, where there are so many."""
BYTES_OF_PAPERS = {"weight_bytes": 2, "activation_bytes": 2, "optimizer_bytes": 12}
"""Arguments of MemoryModel.from_config for the precision of published runs: all in bfloat16, with float32 masters and moments
of Adam. `hf-longctx simulate` gives those of our trainer instead."""


@dataclass(frozen=True)
class Run:
    """A training run on a cluster.

    Raises:
        ValueError: devices, parallelism, memory and context do not go together.
    """

    config: Any
    """Configuration of the Hugging Face model, or of hardware/published.py."""
    cluster: Cluster
    devices: int
    context: int
    """Tokens of the longest document there may be."""
    sharding: Sharding = "zero1"
    tensor_parallel: int = 1
    stages: int = 1
    """Stages of a pipeline."""
    schedule: Schedule = field(default_factory=Schedule)
    """Order in which these stages run their tasks."""
    capacity: int | None = None
    """Most tokens on a rank in one micro-batch; None: what memory allows."""
    recompute: bool = False
    """Whether backward runs each layer's forward again."""
    reserve: float = 0.1
    """Share of memory that stays free."""
    counted: Mapping[str, Any] = field(default_factory=BYTES_OF_PAPERS.copy)
    """Further arguments of MemoryModel.from_config: the precision, and what kernels take."""
    outside: bool = False
    """Whether what is no tensor's takes memory too: CUDA's context, and communicators; with `nccl` it does."""
    nccl: Version | None = None
    """NCCL's version, whose channels limit messages and whose buffers take memory; None: links are as fast as they are."""

    def __post_init__(self) -> None:
        group = self.tensor_parallel * self.stages
        if self.devices < 1 or self.devices % group:
            below = self.devices // group
            raise ValueError(
                f"{self.devices} devices do not divide by tensor_parallel={self.tensor_parallel} * stages={self.stages} = "
                f"{group}; valid: {' or '.join(str(n * group) for n in dict.fromkeys((max(1, below), below + 1)))}"
            )
        if self.stages > 1 and self.sharding in IN_ROUNDS:
            raise ValueError(f"sharding={self.sharding!r} with stages={self.stages}; a pipeline takes ddp or zero1")
        if self.stages == 1 and self.schedule != Schedule():
            raise ValueError(f"schedule={self.schedule.name!r} with stages=1: there is no pipeline; valid: stages >= 2")
        if (tokens := self.topology.tokens) < self.context:
            raise ValueError(
                f"a context of {self.context} tokens does not fit {self.ranks} ranks x {self.tokens_per_rank} tokens = "
                f"{tokens}{' with recomputation' if self.recompute else ''}; it needs >= "
                f"{-(-self.context // self.tokens_per_rank) * group} devices, or a capacity >= "
                f"{-(-self.context // self.ranks)}"
            )

    @property
    def world(self) -> World:
        return World(self.devices, self.sharding, self.stages, self.tensor_parallel)

    @property
    def ranks(self) -> int:
        return self.world.ranks

    @property
    def mode(self) -> Mode:
        return self.world.mode

    @cached_property
    def machine(self) -> Machine:
        machine = Machine.of(self.cluster, self.config, tensor_parallel=self.tensor_parallel)
        return machine if self.nccl is None else machine.under_nccl(self.ranks, self.nccl)

    @cached_property
    def tokens_per_rank(self) -> int:
        """Raises ValueError where not a token fits."""
        if self.capacity is None:
            tokens = self.memory.capacity(self.cluster.device_bytes, self.reserve)
            return max(tokens // ROUND_TO * ROUND_TO, min(tokens, ROUND_TO))
        peak, device_bytes = self.memory.peak(self.capacity), self.cluster.device_bytes
        if peak > device_bytes:
            raise ValueError(
                f"a capacity of {self.capacity} tokens takes {peak / 2**30:.1f} of {device_bytes / 2**30:.1f} GiB"
                f"{'' if self.recompute else ' without recomputation'}; at most {self.memory.capacity(device_bytes, 0.0)} fit"
            )
        return self.capacity

    @cached_property
    def memory(self) -> MemoryModel:
        """Return the memory of one device."""
        stages = (self.config, self.stages, self.schedule.virtual)
        memory = MemoryModel.from_config(
            self.config,
            sharding=self.sharding,
            world_size=self.ranks,
            checkpointing=self.recompute,
            tensor_parallel=self.tensor_parallel,
            **self.counted,
        ).in_stages(fullest_share(*stages), *most_in_flight(*stages))
        if self.nccl is None and not self.outside:
            return memory
        outside = bytes_outside(
            self.ranks,
            self.cluster.ranks_per_node,
            tensor_parallel=self.tensor_parallel,
            stages=self.stages,
            version=self.nccl or NCCL_OF_TORCH,
        )
        return replace(memory, outside=outside)

    @cached_property
    def topology(self) -> Topology:
        return Topology(
            self.ranks, self.tokens_per_rank, ranks_per_node=self.machine.ranks_per_node, stages=self.stages
        )

    @cached_property
    def cost(self) -> CostModel:
        return self.machine.cost(self.config, self.ranks, capacity=self.topology.capacity, recompute=self.recompute)


@dataclass(frozen=True)
class Outcome:
    """Averages over some steps of a planner."""

    planner: str
    run: Run
    plans: Sequence[StepPlan]
    played: Sequence[Simulation]

    @property
    def seconds(self) -> float:
        return float(np.mean([step.seconds for step in self.played]))

    @property
    def tokens_per_second(self) -> float:
        return sum(step.tokens for step in self.played) / sum(step.seconds for step in self.played)

    @property
    def mfu(self) -> float:
        return sum(step.model_flops for step in self.played) / sum(
            step.seconds * step.peak_flops for step in self.played
        )

    @property
    def idle_share(self) -> float:
        return sum(step.idle_share * step.seconds for step in self.played) / sum(step.seconds for step in self.played)

    @property
    def exposed_share(self) -> float:
        return sum(step.exposed_share * step.seconds for step in self.played) / sum(
            step.seconds for step in self.played
        )

    @property
    def memory(self) -> int:
        """Bytes, of the fullest device."""
        return max(int(step.memory.max()) for step in self.played if step.memory is not None)

    def bytes_of(self, name: str) -> float:
        """Received in a step, all ranks: name is "inside" or "between"."""
        return float(np.mean([getattr(step, f"{name}_bytes") for step in self.played]))


def runs(*, recompute: bool | None = None, **settings: Any) -> list[Run]:
    """The run of these settings, with and without recomputation unless that is given: those that fit.

    Raises:
        ValueError: that of the last, where none does.
    """
    fitting_runs: list[Run] = []
    for choice in (False, True) if recompute is None else (recompute,):
        try:
            fitting_runs.append(Run(recompute=choice, **settings))
        except ValueError as error:
            refused = error
    if not fitting_runs:
        raise refused
    return fitting_runs


def simulate_planners(
    choices: Sequence[Run], batches: Sequence[np.ndarray], names: Sequence[str], loader: Loader | None = None
) -> tuple[list[Outcome], dict[str, ValueError]]:
    """Return what each planner reaches with these steps, in the run that suits it best, and why some could not plan them.

    Args:
        choices: runs of one context.
        batches: int64 [documents] each: the lengths of each step's documents.

    Raises:
        ValueError: that of the first planner, where none could.
    """
    outcomes: list[Outcome] = []
    refused: dict[str, ValueError] = {}
    for name in names:
        reached = []
        for run in choices:
            try:
                reached.append(_simulate(name, run, batches, loader))
            except ValueError as error:
                refused[name] = error
        if reached:
            outcomes.append(max(reached, key=lambda outcome: outcome.tokens_per_second))
            refused.pop(name, None)
    if not outcomes:
        raise refused[names[0]]
    return outcomes, refused


def _simulate(name: str, run: Run, batches: Sequence[np.ndarray], loader: Loader | None) -> Outcome:
    planner = planners_for(run.context)[name]
    plans = [planner(lengths, run.topology, run.cost, run.mode) for lengths in batches]
    played = [
        play(
            plan,
            run.config,
            run.machine,
            sharding=run.sharding,
            recompute=run.recompute,
            memory=run.memory,
            loader=loader,
            schedule=run.schedule,
        )
        for plan in plans
    ]
    return Outcome(name, run, plans, played)
