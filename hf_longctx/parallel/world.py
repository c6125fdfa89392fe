"""How processes are arranged: stages x HDP ranks x tensor parallelism, and what each holds of the model.

    process  0 1 2 3 | 4 5 6 7        8 processes, 2 stages, tensor parallelism of 2
    stage    0 0 0 0 | 1 1 1 1        a stage: neighbours, which hold the same layers
    rank     0 0 1 1 | 0 0 1 1        an HDP rank: the neighbours that share the heads of its layers
    pipelines        0-4, 1-5, 2-6, 3-7
    exchanges        0-2, 1-3, 4-6, 5-7      the same layers and the same heads: whose keys and values belong together

Documents are spread over the ranks of each stage; a plan (planner/) knows ranks and no processes. A World needs none of its
processes, so that a dry run decides with the same object as training. No torch, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hf_longctx.planner.memory.state_bytes import IN_ROUNDS, Sharding
from hf_longctx.planner.plan import Mode


@dataclass(frozen=True, slots=True)
class World:
    """How so many processes are arranged.

    Raises:
        ValueError: they cannot be arranged so; with the rule, the arithmetic, and what would be valid.
    """

    processes: int
    sharding: Sharding = "ddp"
    """of weights, gradients and optimizer over the processes of a stage"""
    stages: int = 1
    """processes of a pipeline"""
    tensor_parallel: int = 1
    """processes that share the heads of each layer, and the tokens of each of their shards"""
    expert_parallel: int = 1
    """processes over which the experts of a layer are spread"""

    def __post_init__(self) -> None:
        arrangement = (self.processes, self.sharding, self.stages, self.tensor_parallel, self.expert_parallel)
        if problems := [f"{setting}={value}: {rule}" for setting, value, rule in broken_rules(*arrangement)]:
            raise ValueError("; ".join(problems))

    @property
    def processes_of_stage(self) -> int:
        """Count the processes that hold the same layers."""
        return self.processes // self.stages

    @property
    def ranks(self) -> int:
        """Count the HDP ranks, which documents are spread over."""
        return self.processes_of_stage // self.tensor_parallel

    @property
    def mode(self) -> Mode:
        """Say where the ranks of a planned step meet."""
        if self.stages > 1:
            return "pipeline"
        return "lockstep" if meets_in_rounds(self.sharding, self.expert_parallel) else "async"

    def rank_of(self, process: int) -> int:
        """Return a process's HDP rank."""
        return process % self.processes_of_stage // self.tensor_parallel

    def stage_of(self, process: int) -> int:
        """Return a process's place in its pipeline, from 0."""
        return process // self.processes_of_stage

    @property
    def stage_groups(self) -> list[list[int]]:
        """List the processes of each stage."""
        size = self.processes_of_stage
        return [list(range(first, first + size)) for first in range(0, self.processes, size)]

    @property
    def pipelines(self) -> list[tuple[int, ...]]:
        """List the processes of each pipeline, from the first stage to the last."""
        return list(zip(*self.stage_groups))

    @property
    def exchange_groups(self) -> list[list[int]]:
        """List the processes of each exchange of keys and values: those with the same layers and heads, which also hold replicas
        of the same weights where these are not sharded."""
        degree = self.tensor_parallel
        return [stage[first::degree] for stage in self.stage_groups for first in range(degree)]


def meets_in_rounds(sharding: str, expert_parallel: int) -> bool:
    """Tell whether ranks meet in every micro-batch: to reduce gradients, or to send tokens to experts."""
    return sharding in IN_ROUNDS or expert_parallel > 1


def broken_rules(
    processes: int | None, sharding: str, stages: int, tensor_parallel: int, expert_parallel: int
) -> Iterator[tuple[str, int, str]]:
    """Yield the setting, its value and the rule of all that is wrong with an arrangement.

    Args:
        processes: None where it is not known how many there will be.
        sharding: what is known of it, "auto" included.
    """
    if processes is not None and processes % stages:
        valid = [number for number in range(1, processes + 1) if processes % number == 0]
        yield (
            "pipeline_stages",
            stages,
            f"it must divide the {processes} processes ({processes} = {processes // stages} * {stages} + {processes % stages}); "
            f"valid: {valid}, or a multiple of {stages} processes",
        )
    elif processes is not None and processes // stages % tensor_parallel:
        share = processes // stages
        of_stage = f" of a stage ({processes} in {stages} stages)" if stages > 1 else ""
        yield (
            "tp_size",
            tensor_parallel,
            f"it must divide the {share} processes{of_stage} ({share} = {share // tensor_parallel} * {tensor_parallel} + "
            f"{share % tensor_parallel}); valid: {[number for number in range(1, share + 1) if share % number == 0]}",
        )
    if stages > 1 and meets_in_rounds(sharding, expert_parallel):
        yield (
            "pipeline_stages",
            stages,
            "ranks of zero2, zero3 and expert parallelism meet in every micro-batch, and stages run them at different times; "
            "valid: sharding ddp or zero1, without expert parallelism",
        )


def resolved_sharding(setting: str, processes: int, *, reshards: bool | None, loaded: bool, launched: str) -> Sharding:
    """Return what the setting `sharding` comes to.

    Args:
        setting: LongContextPlugin's.
        reshards: whether accelerate's FSDP2 settings free gathered weights after forward; None: there are no such settings.
        loaded: whether the model was sharded when it was loaded.
        launched: what accelerate runs on, for the error.

    Raises:
        ValueError: the setting contradicts accelerate's, or how the model was loaded.
    """
    if reshards is None and not loaded:
        if setting in ("auto", "ddp") or processes == 1:
            return "ddp"  # one process holds everything anyway
        raise ValueError(
            f"LongContextTrainer: sharding={setting!r} needs FSDP2, and accelerate uses {launched}. "
            "Valid: sharding='ddp', or a launch on GPUs or CPUs without DeepSpeed and Megatron-LM; for a model that tensor "
            "parallelism spread as it was loaded, fsdp_size of its DistributedConfig"
        )
    if setting == "ddp":
        by = "the model was sharded when it was loaded" if reshards is None else "accelerate's configuration sets FSDP"
        raise ValueError(
            f"LongContextTrainer: sharding='ddp' keeps everything on every rank, but {by}. Valid: zero1, zero2, zero3, or auto"
        )
    if setting == "auto":
        return "zero2" if reshards is False else "zero3"
    return setting  # type: ignore[return-value]
