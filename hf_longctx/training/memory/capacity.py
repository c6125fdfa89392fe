"""The capacity that a device's memory allows, where none is given, and what host memory adds to it.

Every rank counts what its memory holds beside weights, gradients and optimizer (planner/memory/memory_model.py); the smallest
of all ranks is everybody's. On a GPU the device is asked what is free, once ranks have met (attention/communicators.py): CUDA's
context, communicators and other programs have taken theirs by then. One collective, before anything is planned.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate.state import AcceleratorState
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers.utils import logging

from hf_longctx.attention.kernels import AttentionCall, Kernel, KernelError, select_kernel
from hf_longctx.attention.kernels.warming import warm
from hf_longctx.hardware.kernel_bytes import Workspace, float32_operands
from hf_longctx.hardware.model_sizes import ModelSizes
from hf_longctx.hardware.profile import Profile
from hf_longctx.hardware.speeds import product_scratch
from hf_longctx.models.stages import weights_dtype, whole_parameters
from hf_longctx.parallel.reduction import largest_over_ranks
from hf_longctx.parallel.sharding import tensor_parallel
from hf_longctx.parallel.world import World
from hf_longctx.planner.cost.selective_offload import FORWARD, Offload
from hf_longctx.planner.memory.device_bytes import reserve_of
from hf_longctx.planner.memory.memory_model import HOST_SHARE, MemoryModel
from hf_longctx.planner.memory.state_bytes import Trained
from hf_longctx.planner.stages.stage_layers import TYPICAL_LENGTH, fullest_share, most_in_flight
from hf_longctx.planner.topology import FULL
from hf_longctx.precision import cpu_kind
from hf_longctx.settings.longctx import LongContextPlugin
from hf_longctx.settings.training import MUON
from hf_longctx.training.memory.activations import may_keep_attention
from hf_longctx.training.muon import TOKEN_ROWS, hidden_matrices

logger = logging.get_logger(__name__)

UNKNOWN_MEMORY = (
    "0 takes what the device's memory holds, and a CPU's is shared with everything else: set capacity (or HF_LONGCTX_CAPACITY) "
    "to the tokens per rank and micro-batch, or give a profile, which knows device_bytes"
)
"""Why no capacity follows from a CPU's memory, of a setting of 0."""


LOSS_CHUNKS = (4096, 2048, 1024)
"""Tokens of a chunk of the cross-entropy; the last is that of CPUs."""


def usable_bytes(device: torch.device) -> tuple[int, int]:
    """Ask a GPU for what tensors may take, and for all that it has: free memory, and what torch's allocator holds already."""
    free, total = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device), total


def capacity_of_memory(
    plugin: LongContextPlugin,
    model: Any,
    args: Any,
    world: World,
    asked: Callable[[torch.device], tuple[int, int]] = usable_bytes,
) -> int:
    """Return the tokens per rank and micro-batch for training `model`: in full, or LoRA's adapters and what PEFT trains beside
    them. Where only some weights are frozen, more would fit. Collective.

    Args:
        asked: gives a GPU's bytes that tensors may take, and all of them. Ranks have met before.

    Raises:
        ValueError: the memory is unknown (CPUs, without a profile), the model's sizes are, or not even weights fit.
    """
    on_gpu = args.device.type == "cuda"
    if on_gpu:
        device_bytes, total = asked(args.device)
        logger.info(
            f"of {total / 2**30:.1f} GiB on {args.device}, tensors may take {device_bytes / 2**30:.1f}: the rest are CUDA's "
            f"context, communicators and other programs. {reserve_of(on_gpu):.0%} of them stay free"
        )
    elif plugin.profile is not None:
        device_bytes = Profile.load(plugin.profile).device_bytes
    else:
        raise ValueError(f"capacity={UNKNOWN_MEMORY}")
    memory = memory_model(plugin, model, args, world)
    capacity = memory.capacity(device_bytes, reserve_of(on_gpu), int(1000 * plugin.activation_offload))
    return capacity if args.world_size == 1 else -int(largest_over_ranks(torch.tensor([-capacity], device=args.device)))


def loss_chunk_of_memory(plugin: LongContextPlugin, model: Any, args: Any, world: World) -> int:
    """Return the tokens whose logits exist at once: on a GPU the most of LOSS_CHUNKS with which a micro-batch of the plugin's
    capacity takes no more memory than with the fewest. Each chunk passes once over the gradient of the whole head."""
    fewest = LOSS_CHUNKS[-1]
    if args.device.type != "cuda":
        return fewest
    try:
        peaks = [
            memory_model(plugin.changed(loss_chunk_tokens=chunk), model, args, world).peak(
                plugin.capacity, int(1000 * plugin.activation_offload)
            )
            for chunk in LOSS_CHUNKS
        ]
    except ValueError:  # the model's sizes are unknown
        return fewest
    return next(chunk for chunk, peak in zip(LOSS_CHUNKS, peaks) if peak <= peaks[-1])


def offload_of_memory(plugin: LongContextPlugin, model: Any, args: Any, world: World) -> Offload | None:
    """Return what host memory is worth to a plan with the plugin's capacity, by its profile: the same on every rank. None where
    not a token more would fit.

    Raises:
        ValueError: the model's sizes are unknown.
    """
    assert plugin.profile is not None
    profile, memory = Profile.load(plugin.profile), memory_model(plugin, model, args, world)
    per_token = memory.offloadable_token_bytes
    if per_token == 0:
        return None
    # With all that can leave gone, the memory of `capacity` tokens holds so many; with a part of it, a part more.
    most = memory.capacity(memory.peak(plugin.capacity), reserve=0.0, offload=FULL)
    host_bytes = int(HOST_SHARE * profile.host_bytes / (plugin.ranks_per_node or profile.ranks_per_node)) - memory.host
    share = FULL - -(-FULL * plugin.capacity // most)
    if share < 1 or host_bytes < per_token:
        return None
    return Offload(
        share=share,
        transfer_ps=max(1, round(per_token / profile.host_bandwidth * 1e12)),
        host_tokens=host_bytes // per_token,
        forwards=FORWARD + memory.checkpointing,
    )


def memory_model(plugin: LongContextPlugin, model: Any, args: Any, world: World) -> MemoryModel:
    """Count the memory of one rank of this run. The optimizer's states are two of each trained weight, in its dtype, as
    AdamW's are; Muon's are one of each matrix.

    Raises:
        ValueError: the model's sizes are unknown.
    """
    fsdp = getattr(AcceleratorState(), "fsdp_plugin", None) if world.sharding != "ddp" else None
    adapters, weights = adapted_projections(model), weights_dtype(model.parameters())
    kind = cpu_kind() if args.device.type == "cpu" else None
    return counted_memory(
        model.config,
        plugin,
        args,
        world,
        weight_bytes=weights.itemsize,
        by_accelerate=fsdp is not None,
        optimizer_on_host=isinstance(getattr(fsdp, "cpu_offload", None), CPUOffloadPolicy),
        lora_rank=max(adapters.values(), default=0),
        lora_targets=tuple(adapters) or None,
        trained=trained_weights(model, args.optim),
        product_scratch=product_scratch(kind, args.bf16 or weights is torch.bfloat16),
        workspace=_workspace_here(plugin, model, args),
    )


def _workspace_here(plugin: LongContextPlugin, model: Any, args: Any) -> Workspace:
    """Return what this run's kernel states of its own memory, or where it is not known that of CPUs' kernels."""
    chosen = kernel_of_run(plugin, model, args)
    return float32_operands if chosen is None else chosen[0].workspace


def warm_kernel(plugin: LongContextPlugin, model: Any, args: Any, world: World) -> int:
    """Call the kernel of this run once in each way, where it is one that compiles. Returns the number of calls."""
    chosen = kernel_of_run(plugin, model, args)
    if chosen is None:
        return 0
    kernel, call = chosen
    heads, kv_heads = (max(1, x.shape[1] // world.tensor_parallel) for x in (call.q, call.k))
    return warm(kernel, heads, kv_heads, call.q.shape[2], call.q.dtype, call.q.device)


def kernel_of_run(plugin: LongContextPlugin, model: Any, args: Any) -> tuple[Kernel, AttentionCall] | None:
    """Choose the kernel that attention of this run gets on a GPU, and a call with the heads that it will see; None on other
    devices, and where no kernel takes the model's heads (it is refused when it runs) or they are unknown."""
    if args.device.type != "cuda":
        return None
    try:
        sizes = ModelSizes.of(model.config, 1)
    except ValueError:
        return None
    if not sizes.heads:
        return None
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else weights_dtype(model.parameters())
    kv_heads = max(1, sizes.kv_width // sizes.head_dim)
    call = AttentionCall.of_heads(sizes.heads, kv_heads, sizes.head_dim, dtype, args.device)
    try:
        return select_kernel(call, plugin.kernel), call
    except KernelError:
        return None


def counted_memory(
    config: Any,
    plugin: LongContextPlugin,
    args: Any,
    world: World,
    *,
    weight_bytes: int,
    by_accelerate: bool,
    lora_rank: int,
    trained: Trained,
    **parts: Any,
) -> MemoryModel:
    """Count the memory of one rank, also of a run that need not exist (commands/preflight/run_memory.py): what training's
    settings make of a model.

    Args:
        config: transformers' of the model.
        args: transformers.TrainingArguments.
        weight_bytes: of a weight as it was loaded.
        by_accelerate: whether accelerate's FSDP2 shards the model.
        lora_rank: of the adapters that alone are trained; 0: everything is.
        trained: what is trained, and how much.
        parts: further arguments of MemoryModel.from_config.

    Raises:
        ValueError: the model's sizes are unknown.
    """
    half = args.bf16 or args.fp16
    # accelerate's FSDP2 makes weights that are trained float32 where it computes in half precision.
    if by_accelerate and half and (not lora_rank or trained.copies):
        weight_bytes = 4
    # Some layers that are not checkpointed are counted as if none were.
    every: Any = (args.gradient_checkpointing_kwargs or {}).get("every_n_layers", 1)
    stages = (config, world.stages, plugin.virtual_stages, plugin.capacity or TYPICAL_LENGTH)
    return MemoryModel.from_config(
        config,
        sharding=world.sharding,
        world_size=world.ranks,
        tensor_parallel=world.tensor_parallel,
        weight_bytes=weight_bytes,
        activation_bytes=2 if half else weight_bytes,
        optimizer_bytes=2 * (4 if lora_rank else weight_bytes),
        lora_rank=lora_rank,
        trained=trained,
        checkpointing=args.gradient_checkpointing and every == 1,
        keep_attention=may_keep_attention(plugin.keep_attention, config, plugin.longest_document),
        mlp_tile_tokens=plugin.mlp_tile_tokens,
        loss_chunk_tokens=plugin.loss_chunk_tokens or LOSS_CHUNKS[-1],
        keep_last_slice=plugin.keep_last_slice,
        ulysses_degree=plugin.ulysses_degree,
        deterministic=bool(args.full_determinism),
        **parts,
    ).in_stages(fullest_share(*stages), *most_in_flight(*stages))


def adapted_projections(model: Any) -> dict[str, int]:
    """Name of an adapted projection -> its largest LoRA rank; none where all weights are trained."""
    ranks: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        module, _, rest = name.partition(".lora_A.")
        if rest and parameter.requires_grad:
            projection = module.rpartition(".")[2]
            ranks[projection] = max(ranks.get(projection, 0), parameter.shape[0])
    return ranks


def trained_weights(model: Any, optim: str) -> Trained:
    """Count what is trained of a model, which may be without memory (meta), for its memory.

    Args:
        optim: name of the optimizer.
    """
    alone = (
        sum(weight.numel() for weight in hidden_matrices(model))
        if optim == MUON and not tensor_parallel(model) > 1
        else 0
    )
    if not adapted_projections(model):
        return Trained(one_state=alone)
    learns = {name: weight for name, weight in whole_parameters(model).items() if weight.requires_grad}
    adapters = {name for name in learns if ".lora_" in name or TOKEN_ROWS in name}
    copies = [weight.numel() for name, weight in learns.items() if name not in adapters]
    head = model.get_output_embeddings()
    weights_of_head = head.named_parameters() if isinstance(head, torch.nn.Module) else ()  # other stages have none
    of_head = [name for name, weight in weights_of_head if weight.requires_grad and "lora_" not in name]
    text = model.config.get_text_config()
    rows = [text.vocab_size * text.hidden_size] if any(TOKEN_ROWS in name for name in learns) else []
    return Trained(
        adapters=sum(learns[name].numel() for name in adapters),
        copies=sum(copies),
        largest=max(copies + rows, default=0),
        head=bool(of_head),
        merged_head=any(TOKEN_ROWS in name for name in of_head),
        one_state=alone,
    )
