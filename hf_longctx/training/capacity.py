"""Which capacity a device's memory allows, where none is given.

Every rank counts what its memory holds beside weights, gradients and optimizer (planner/memory.py); the smallest of all
ranks is everybody's. One collective, before anything is planned.
"""

from typing import Any

import torch

from hf_longctx.planner.calibration import Profile
from hf_longctx.planner.memory import MemoryModel
from hf_longctx.training.plugin import LongContextPlugin
from hf_longctx.training.reduction import largest_over_ranks


def capacity_of_memory(plugin: LongContextPlugin, model: Any, args: Any) -> int:
    """Tokens per rank and micro-batch for training `model` in full; with adapters more would fit.

    Raises:
        ValueError: the memory is unknown (CPUs, without a profile), the model's sizes are, or not even weights fit.
    """
    if args.device.type == "cuda":
        device_bytes = torch.cuda.get_device_properties(args.device).total_memory
    elif plugin.profile is not None:
        device_bytes = Profile.load(plugin.profile).device_bytes
    else:
        raise ValueError(
            "capacity=0 takes what the device's memory holds, and a CPU's is shared with everything else: set capacity (or "
            "HF_LONGCTX_CAPACITY) to the tokens per rank and micro-batch, or give a profile, which knows device_bytes"
        )
    weight_bytes = next(model.parameters()).element_size()
    memory = MemoryModel.from_config(
        model.config,
        world_size=args.world_size,
        weight_bytes=max(weight_bytes, 2),
        activation_bytes=2 if args.bf16 or args.fp16 else max(weight_bytes, 2),
        checkpointing=args.gradient_checkpointing,
        loss_chunk_tokens=plugin.loss_chunk_tokens,
        keep_last_slice=plugin.keep_last_slice,
    )
    held = memory.capacity(device_bytes)
    return held if args.world_size == 1 else -int(largest_over_ranks(torch.tensor([-held], device=args.device)))
