"""Bytes of a GPU that no tensor of ours has: CUDA's context, and NCCL's communicators; and what stays free beside all that is
counted.

    estimates, dry runs     the device's memory - context - communicators - margin
    a run                   what is free once ranks have met - margin        (training/memory/capacity.py)

A margin is for what nobody counts: libraries' own workspaces, and memory that is free in pieces too small to use.
"""

from __future__ import annotations

from hf_longctx.hardware.nccl import NCCL_OF_TORCH, Communicator, Version, exchange_bytes

CONTEXT = 512 * 2**20
"""CUDA's context with the modules of torch's kernels on a device of Hopper: about half a GB, engineering judgement."""
MARGIN = 0.05
"""Share of a GPU's memory that stays free. Engineering judgement: with segments that expand
(settings/gpu_environment.py) little is lost in pieces."""
UNNAMED = 0.1
"""The same where kernels' own memory is not counted: on CPUs."""


def reserve_of(on_gpu: bool) -> float:
    """Return the share of a device's memory that stays free."""
    return MARGIN if on_gpu else UNNAMED


def bytes_outside(
    ranks: int,
    ranks_per_node: int,
    *,
    tensor_parallel: int = 1,
    stages: int = 1,
    version: Version = NCCL_OF_TORCH,
) -> int:
    """Count what is no tensor's on one GPU of a run: CUDA's context, the exchange's communicators, and those of collectives: all
    processes', and those that share heads.

    Args:
        ranks: that documents are spread over, in each stage.
        ranks_per_node: GPUs of a node.
        tensor_parallel: GPUs that share heads; they are neighbours.
        stages: of a pipeline.
        version: NCCL's.
    """
    processes = ranks * tensor_parallel * stages
    if processes == 1:
        return CONTEXT
    here = max(1, min(ranks, ranks_per_node // tensor_parallel))
    total = CONTEXT + exchange_bytes(ranks, here, version)
    total += Communicator(processes, min(processes, ranks_per_node)).collective_bytes()
    if tensor_parallel > 1:
        shared = min(tensor_parallel, ranks_per_node)
        total += Communicator(tensor_parallel, shared).collective_bytes()
    return total
