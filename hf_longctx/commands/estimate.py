"""`hf-longctx estimate`: what a rank holds while it trains a model, by part and by sharding, and the longest context that fits.

Counted from the model's configuration (planner/memory/memory_model.py); nothing is loaded, and nothing runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_longctx.commands.shared.memory_table import Estimate, memory_table
from hf_longctx.commands.shared.room import Room, read_room
from hf_longctx.commands.shared.tokens import size_of, token_count
from hf_longctx.commands.shared.training_bytes import DTYPE_HELP, TrainedDtype, training_bytes
from hf_longctx.counting.records import NotCountedError
from hf_longctx.hardware.devices import KNOWN_DEVICES
from hf_longctx.hardware.published import ARCHITECTURES

if TYPE_CHECKING:
    from hf_longctx.planner.memory.memory_model import MemoryModel

ADAPTER_OPTIMIZER_BYTES = 8
"""PEFT trains adapters in float32."""


def estimate(
    model: Annotated[
        str,
        typer.Argument(
            help=f"{', '.join(ARCHITECTURES)}; a directory with config.json; a hub id; qwen3-8b and the like.",
            show_default=False,
        ),
    ],
    context: Annotated[
        str, typer.Option(help="Fit a document of so many tokens: 32768, 512K, 2M.", show_default=False)
    ],
    gpus: Annotated[int, typer.Option(min=1, help="Use so many GPUs in all.", show_default=False)],
    device: Annotated[str, typer.Option(help=f"Use {', '.join(KNOWN_DEVICES)}; or a profile's file.")] = "h100",
    memory: Annotated[
        float | None, typer.Option(help="Give each GPU so many GiB. By default its own.", show_default=False)
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Split layers over so many GPUs, called a rank.")] = 1,
    ulysses_degree: Annotated[int, typer.Option(min=1, help="Share a document's heads among so many ranks.")] = 1,
    dtype: Annotated[TrainedDtype, typer.Option(help=DTYPE_HELP)] = "auto",
    lora: Annotated[int, typer.Option(min=0, help="Train LoRA adapters of rank N; 0: all weights.")] = 0,
    lora_targets: Annotated[
        str | None, typer.Option(help="Adapt these projections (a,b). By default all.", show_default=False)
    ] = None,
    checkpointing: Annotated[bool, typer.Option(help="Recompute activations in backward.")] = True,
    keep_attention: Annotated[bool, typer.Option(help="Keep attention's output when recomputing.")] = False,
    offload: Annotated[float, typer.Option(min=0, max=1, help="Keep this share of activations on the host.")] = 0.0,
    mlp_tile_tokens: Annotated[
        int, typer.Option(parser=token_count(0), help="Run MLPs in tiles of so many tokens; 0: whole.")
    ] = 0,
    loss_chunk_tokens: Annotated[
        int, typer.Option(parser=token_count(), help="Hold so many rows of logits at once.")
    ] = 1024,
    optimizer_on_host: Annotated[bool, typer.Option(help="Offload weights and states to the host.")] = False,
    optimizer_bytes: Annotated[
        int | None, typer.Option(min=0, help="Set bytes per trained weight. By default AdamW's.", show_default=False)
    ] = None,
    accumulating: Annotated[bool, typer.Option(help="Run several micro-batches in a step.")] = True,
    reserve: Annotated[
        float | None,
        typer.Option(
            help="Leave this share of memory free. By default 0.05 of a GPU and 0.1 elsewhere.", show_default=False
        ),
    ] = None,
) -> None:
    """Estimate the memory of a GPU by part, and the longest context.

    Example: hf-longctx estimate llama-7b --context 1M --gpus 64
    """
    from hf_longctx.commands.shared.costs import counting_notes, read_config
    from hf_longctx.commands.shared.screen import screen
    from hf_longctx.parallel.world import World
    from hf_longctx.planner.memory.memory_model import SHARDING, MemoryModel

    length = size_of(context, "--context")
    room, config = read_room(device, memory, gpus), read_config(model)
    reserve = room.reserve if reserve is None else reserve
    if gpus % tensor_parallel:
        valid = [n for n in range(1, gpus + 1) if gpus % n == 0]
        raise ValueError(f"--tensor-parallel {tensor_parallel} must divide --gpus {gpus}; valid: {valid}")
    if lora_targets is not None and not lora:
        raise ValueError(f"--lora-targets {lora_targets} needs --lora, the rank of the adapters")
    ranks = World(gpus, tensor_parallel=tensor_parallel).ranks
    trained_in = training_bytes(dtype, device, room)
    settings: dict[str, Any] = {
        **trained_in.settings,
        "world_size": ranks,
        "tensor_parallel": tensor_parallel,
        "ulysses_degree": ulysses_degree,
        "lora_rank": lora,
        "lora_targets": None if lora_targets is None else [name.strip() for name in lora_targets.split(",")],
        "checkpointing": checkpointing,
        "keep_attention": keep_attention,
        "mlp_tile_tokens": mlp_tile_tokens,
        "loss_chunk_tokens": loss_chunk_tokens,
        "optimizer_on_host": optimizer_on_host,
        "accumulating": accumulating,
    }
    if lora:
        settings["optimizer_bytes"] = ADAPTER_OPTIMIZER_BYTES
    if optimizer_bytes is not None:
        settings["optimizer_bytes"] = optimizer_bytes

    def counted(sharding: str) -> MemoryModel:
        counted_tensors = MemoryModel.from_config(config, sharding=sharding, **settings)
        return room.with_outside(counted_tensors, ranks, tensor_parallel=tensor_parallel)

    shardings = [kind for kind in SHARDING if not (optimizer_on_host and kind == "ddp")]  # there is no FSDP2 in ddp
    try:
        results = [_estimate(kind, counted(kind), room, length, ranks, offload, reserve) for kind in shardings]
    except NotCountedError as error:
        trained = None if lora or optimizer_on_host else 2 * trained_in.weight + settings["optimizer_bytes"]
        raise ValueError(f"{error}. {_without_activations(config, trained_in.weight, trained, ranks)}") from error
    console = screen()
    title = f"{model}, one document of {length:,} tokens on {gpus} x {room.name}"
    console.print(title, style="bold", soft_wrap=True)
    if trained_in.note:
        console.print(trained_in.note, soft_wrap=True)
    for note in counting_notes(config):
        console.print(f"{model}: {note}", soft_wrap=True)
    console.print(
        f"{room.device * (1 - reserve) / 2**30:.1f} of {room.device / 2**30:.1f} GiB on each GPU may be used "
        f"(--reserve {reserve:g})"
    )
    console.print(memory_table(results))
    for result in results:
        console.print(f"{result.sharding}: {_verdict(result, room, length, tensor_parallel)}", soft_wrap=True)


def _without_activations(config: Any, weight: int, states: int | None, ranks: int) -> str:
    """Say what is known of the memory of a model that cannot be counted.

    Args:
        weight: bytes of a weight.
        states: bytes of a weight, its gradient and its optimizer; None: not all weights are trained, or here.
    """
    from hf_longctx.counting.count import count_parameters

    parameters = count_parameters(config)
    what = "weights alone" if states is None else "weights, gradients and optimizer"
    whole = parameters * (weight if states is None else states) / 2**30
    return (
        f"What is known: {what} of its {parameters:,} parameters take {whole:.1f} GiB on each rank with ddp, and at least "
        f"{whole / ranks:.1f} with zero3 on {ranks}; activations come on top, and how long a document may be has to be tried"
    )


def _estimate(
    sharding: str, memory: MemoryModel, room: Room, context: int, ranks: int, offload: float, reserve: float
) -> Estimate:
    share = round(1000 * offload)
    try:
        capacity = memory.capacity(room.device, reserve, share)
    except ValueError:
        if not 0 <= reserve < 1:
            raise
        capacity = 0
    needed = -(-context // capacity) if capacity else ranks + 1
    rank_tokens = -(-context // min(needed, ranks))
    moved = memory.offloadable_token_bytes * rank_tokens * share // 1000
    return Estimate(
        sharding,
        capacity,
        ranks,
        needed if needed <= ranks else None,
        memory.parts(rank_tokens, share),
        memory.host + moved,
    )


def _verdict(result: Estimate, room: Room, context: int, tensor_parallel: int) -> str:
    """Return how many GPUs the document needs, or why it does not fit."""
    if not result.capacity:
        states = result.parts["weights"] + result.parts["gradients"] + result.parts["optimizer"]
        return f"does not fit: weights, gradients and optimizer alone take {states / 2**30:.1f} GiB"
    if result.ranks_needed is None:
        share = "each" if tensor_parallel == 1 else f"{tensor_parallel} of them"
        return (
            f"does not fit: {context:,} tokens need {-(-context // result.capacity) * tensor_parallel} GPUs, "
            f"{result.capacity:,} tokens on {share}, and there are {result.ranks * tensor_parallel}"
        )
    host = ""
    if room.host is not None and result.host > room.host:
        host = (
            f"; but {result.host / 2**30:.1f} GiB of host memory per GPU exceed the {room.host / 2**30:.1f} there are"
        )
    return f"the document needs {result.ranks_needed * tensor_parallel} of {result.ranks * tensor_parallel} GPUs{host}"
