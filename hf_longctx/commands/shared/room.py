"""The memory that one rank has: of a preset, of a profile, of this machine, or as a user says."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hf_longctx.hardware.devices import CPU_DEVICES, KNOWN_DEVICES
from hf_longctx.hardware.kernel_bytes import Workspace, flash_2, float32_operands

if TYPE_CHECKING:
    from hf_longctx.planner.memory.memory_model import MemoryModel


@dataclass(frozen=True)
class Room:
    """Memory of one rank, bytes."""

    name: str
    device: int
    host: int | None
    """None: unknown"""
    gpus_per_node: int | None = None
    """None: ranks compute on processors"""

    @property
    def reserve(self) -> float:
        """Share that stays free."""
        from hf_longctx.planner.memory.device_bytes import reserve_of

        return reserve_of(self.gpus_per_node is not None)

    @property
    def workspace(self) -> Workspace:
        """Kernel memory that is counted: of a GPU, that of torch's kernel; flash-attention's packages take as much or less."""
        return float32_operands if self.gpus_per_node is None else flash_2

    def with_outside(
        self, memory: MemoryModel, ranks: int, *, tensor_parallel: int = 1, stages: int = 1
    ) -> MemoryModel:
        """Add what is no tensor's where ranks compute on GPUs: CUDA's context and communicators.

        Args:
            ranks: of each stage.
        """
        from hf_longctx.planner.memory.device_bytes import bytes_outside

        if self.gpus_per_node is None:
            return memory
        outside = bytes_outside(ranks, self.gpus_per_node, tensor_parallel=tensor_parallel, stages=stages)
        return replace(memory, outside=outside)


def read_room(device: str, memory: float | None, ranks_here: int = 1, option: str = "--memory") -> Room:
    """Memory of a preset or a profile, or as much as is said (GiB). Raises ValueError for another device.

    Args:
        ranks_here: that share this machine's memory, on processors.
        option: of the verb, that `memory` comes from.
    """
    from hf_longctx.hardware.devices import read_cluster
    from hf_longctx.hardware.profile import Profile

    if memory is not None and not 0 < memory < math.inf:
        raise ValueError(f"{option} {memory:g} must be positive and finite, in GiB")
    if device in CPU_DEVICES and memory is None:
        if device != "cpu":
            raise ValueError(
                f"--device {device} is a kind of processor, of any memory: give {option}, in GiB of one process"
            )
        return room_here(ranks_here)
    if device not in KNOWN_DEVICES and not device.endswith(".json"):
        raise ValueError(
            f"--device {device!r} is unknown; valid: {', '.join(KNOWN_DEVICES)}, or a .json file that `hf-longctx profile` "
            f"wrote; for any other, give {option} in GiB with one of these"
        )
    per_node = None
    if device not in CPU_DEVICES:
        cluster = read_cluster(device)
        gpus = device in KNOWN_DEVICES or Profile.load(device).backend == "nccl"
        per_node = cluster.ranks_per_node if gpus else None
    if memory is not None:
        return Room(f"{memory:g} GiB", int(memory * 2**30), None, per_node)
    return Room(cluster.name, cluster.device_bytes, cluster.host_bytes_per_rank, per_node)


def room_here(ranks: int) -> Room:
    """Find the memory that one of so many ranks has on this machine's processors."""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Room(f"a share of this machine's memory, 1/{ranks}", host // ranks, None)
