"""`hf-longctx init`: writes a commented YAML file for a model, a number of GPUs and a length of documents.

The memory model of the planner is asked for one way after another, the fastest first, until documents of that length fit:

    all weights     ddp, zero1, zero3, each with none, half and all of the activations offloaded
    LoRA adapters   the same with ddp and zero3; only where all weights do not fit, or it is wished

and the capacity is what memory holds then. No weight is read; of well-known models not even a configuration is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_longctx.commands.shared.planners import MICRO_BATCHES

if TYPE_CHECKING:
    from hf_longctx.commands.preflight.init_defaults import Documents
    from hf_longctx.commands.shared.room import Room
    from hf_longctx.planner.memory.memory_model import MemoryModel

LEAST_CAPACITY = 8192
"""Tokens on a GPU below which a way is taken only where no other fits: short micro-batches leave a GPU idle."""
MOST_CAPACITY = 65536
"""Tokens on a GPU that are enough for speed; more only where documents on one GPU need it."""
ROUND = 1024
OFFLOADS = (0.0, 0.5, 1.0)
LORA_RANK = 16
PLACEHOLDER = "emozilla/pg19"
"""Books, on a hub: data to begin with where none are named."""
MOST_RANKS = 4096
HELD = {
    "ddp": "every GPU holds all of weights, gradients and optimizer",
    "zero1": "every GPU holds a part of the optimizer",
    "zero3": "every GPU holds a part of weights, gradients and optimizer",
}


@dataclass(frozen=True)
class Way:
    """How a model could be trained."""

    sharding: str
    offload: float
    lora: bool
    dtype: str
    memory: MemoryModel
    capacity: int
    """tokens on a device; 0: not one fits"""


def init(
    model: Annotated[str, typer.Argument(help="A hub id, a directory, or a preset of `estimate`.", show_default=False)],
    gpus: Annotated[
        int | None,
        typer.Option(min=1, help="Use so many devices in all. By default this machine's GPUs.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write this YAML file. By default named after the model.", show_default=False)
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(min=1, help="Put so many devices into a machine. By default 8.", show_default=False)
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="Use a device of `estimate`, or cpu. By default this machine's; with --gpus alone h100.",
            show_default=False,
        ),
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option(help="Give each GPU so many GiB. By default the device's.")
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="Fit documents of so many tokens: 128K, 1M. By default the model's context.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Train on a file, a directory, a hub id. By default books from a hub.")
    ] = None,
    lora: Annotated[
        bool | None, typer.Option("--lora/--full", help="Train adapters or all weights. By default what fits.")
    ] = None,
) -> None:
    """Write a commented configuration for a model and GPUs, with what fits into memory.

    Example: hf-longctx init meta-llama/Llama-3.1-8B --gpus 8 --output llama.yaml
    """
    from hf_longctx.commands.preflight.init_defaults import file_of, look_at, machine
    from hf_longctx.commands.preflight.launching import command
    from hf_longctx.commands.shared.costs import read_config
    from hf_longctx.commands.shared.outputs import refuse_no_file
    from hf_longctx.commands.shared.room import read_room
    from hf_longctx.commands.shared.tokens import size_of
    from hf_longctx.config import load_config
    from hf_longctx.precision import decide_for

    output = output or file_of(model)
    here = machine(device, gpus, gpus_per_node, gpu_memory)
    device, gpus, gpus_per_node, gpu_memory = here.device, here.gpus, here.per_node, here.memory
    if output.exists():
        raise ValueError(f"{output} exists: give another --output, or remove it")
    refuse_no_file(output, f"--output {output}")
    nodes = -(-gpus // gpus_per_node)
    if gpus % nodes:
        raise ValueError(
            f"--gpus {gpus} are no whole machines of --gpus-per-node {gpus_per_node}: {gpus} / {nodes} is no whole number. "
            f"Valid: --gpus {gpus - gpus % nodes} or {gpus + nodes - gpus % nodes}"
        )
    path, room = _weights(model), read_room(device, gpu_memory, gpus, "--gpu-memory")
    config = read_config(path)
    if hasattr(config, "get_text_config"):  # a model with a tower for images has its sizes there
        config = config.get_text_config()
    trained_on = getattr(config, "max_position_embeddings", None)
    if trained_on is None and context is None:
        raise ValueError(
            f"{model} has no longest context (ALiBi): say how long documents are, for instance --context 32K"
        )
    tokens = size_of(context or str(trained_on), "--context")
    precision = decide_for(device)
    way = chosen_way(config, room, gpus, tokens, lora, precision.bf16)
    if way is None:
        raise ValueError(_nothing_fits(config, room, gpus, tokens, lora, model, precision.bf16))
    start = command(str(output), [], gpus, nodes)
    documents = _looked_at(look_at, data, path)
    scaling = _scaling(config, tokens)
    text = _text(path, way, room, gpus, tokens, scaling, data, documents, start, output, device, gpu_memory)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    try:
        load_config(output)
    except ValueError:
        output.unlink()
        raise
    for line in filter(None, (here.note, documents.line)):
        print(line)
    print(f"{output}: {_in_words(way)}, {way.capacity:,} tokens on a {_holder(device)}, documents of up to {tokens:,}")
    print(f"look at its plan and memory:  {_dry(output, gpus, nodes, device, gpu_memory)}")
    print(f"train:  {start}")


def _looked_at(look_at: Callable[[str, str], Documents], data: str | None, model: str) -> Documents:
    """Return what documents lie here, or why they cannot be looked at."""
    from hf_longctx.commands.preflight.init_defaults import Documents

    if data is None:
        return Documents()
    try:
        return look_at(data, model)
    except ValueError as error:
        return Documents(line=f"{data} cannot be trained on as it is: {error}")


def chosen_way(config: Any, room: Room, ranks: int, context: int, lora: bool | None, bf16: bool = True) -> Way | None:
    """Return the first way in which the ranks can hold a document of `context` tokens, or None if there is none.

    Args:
        config: sizes of the model, as transformers names them.
        lora: whether to train adapters; None leaves the choice.
        bf16: whether the device computes in bfloat16.
    """
    needed = -(-context // ranks)
    for adapters in (False, True) if lora is None else (lora,):
        ways = [way for way in _ways(config, room, ranks, context, adapters, bf16) if way.capacity >= needed]
        enough = [way for way in ways if way.capacity >= min(LEAST_CAPACITY, context)]
        if ways:
            return (enough or ways)[0]
    return None


def _ways(config: Any, room: Room, ranks: int, context: int, lora: bool, bf16: bool) -> Iterator[Way]:
    """All ways in which ranks may hold a model, the fastest first."""
    for sharding in (("ddp", "zero3") if lora else HELD) if ranks > 1 else ("ddp",):
        # Adapters stand on weights in bfloat16; accelerate's FSDP2 makes float32 of them where it computes in half precision.
        dtype = "bfloat16" if bf16 and lora and sharding == "ddp" else "float32"
        memory = _memory(config, room, sharding, ranks, dtype, lora, bf16)
        for offload in OFFLOADS:
            yield Way(sharding, offload, lora, dtype, memory, _capacity(memory, room, offload, context))


def _memory(config: Any, room: Room, sharding: str, ranks: int, dtype: str, lora: bool, bf16: bool) -> MemoryModel:
    from hf_longctx.planner.memory.memory_model import MemoryModel

    weight = 4 if dtype == "float32" else 2
    memory = MemoryModel.from_config(
        config,
        sharding=sharding,
        world_size=ranks,
        weight_bytes=weight,
        activation_bytes=2 if bf16 else 4,
        optimizer_bytes=8 if lora else 2 * weight,
        lora_rank=LORA_RANK if lora else 0,
        checkpointing=True,
        keep_attention=True,
        workspace=room.workspace,
    )
    return room.with_outside(memory, ranks)


def _capacity(memory: MemoryModel, room: Room, offload: float, context: int) -> int:
    """Return the tokens that a rank holds at once, in whole thousands from a thousand on; 0 if the model does not fit."""
    from hf_longctx.planner.memory.memory_model import HOST_SHARE

    share = round(1000 * offload)
    try:
        tokens = memory.capacity(room.device, room.reserve, share)
    except ValueError:
        return 0
    moved = memory.offloadable_token_bytes * share // 1000
    if moved and room.host is not None:
        tokens = min(tokens, int(HOST_SHARE * room.host) // moved)
    tokens = min(tokens, max(MOST_CAPACITY, context))
    return tokens if tokens < ROUND else tokens // ROUND * ROUND


def _nothing_fits(config: Any, room: Room, ranks: int, context: int, lora: bool | None, model: str, bf16: bool) -> str:
    """Return what is missing, and what would be enough."""
    kinds = (False, True) if lora is None else (lora,)
    most = (
        max(way.capacity for adapters in kinds for way in _ways(config, room, ranks, context, adapters, bf16)) * ranks
    )
    more = ranks
    while more <= MOST_RANKS and chosen_way(config, room, more, context, lora, bf16) is None:
        more *= 2
    valid = [f"--context {most}"] if most else []
    valid += [f"--gpus {more}"] if more <= MOST_RANKS else []
    valid += ["--lora"] if lora is False and chosen_way(config, room, ranks, context, True, bf16) else []
    return (
        f"documents of {context:,} tokens do not fit: {ranks} x {room.name} hold at most {most:,} tokens of {model} at a time, "
        f"with every sharding and all activations offloaded. Valid: {', or '.join(valid) or 'GPUs with more memory'}"
    )


def _weights(model: str) -> str:
    """A preset's place on the hub; any other name is one already, or a published model's without its organisation. Raises
    ValueError for a preset that has none."""
    from hf_longctx.hardware.published import ARCHITECTURES, PUBLISHED, hub_id

    if model not in ARCHITECTURES:
        return model if Path(model).is_dir() else hub_id(model)
    places = [name for name, sizes in PUBLISHED.items() if sizes is ARCHITECTURES[model]]
    if not places:
        raise ValueError(f"{model!r} is a preset of sizes, and no hub has its weights: name a directory or hub id")
    return places[0]


def _in_words(way: Way) -> str:
    kind = "LoRA adapters" if way.lora else "all weights"
    return f"{kind}, {way.sharding}" + (f", {way.offload:.0%} of activations in host memory" if way.offload else "")


def _scaling(config: Any, context: int) -> list[str]:
    """Lines that stretch rotary positions where documents are longer than what the model was trained on. A scaling that it has
    is replaced, and counts from the context before it."""
    from hf_longctx.commands.shared.models import transformers_config
    from hf_longctx.hardware.published import Architecture

    before = getattr(
        transformers_config(config) if isinstance(config, Architecture) else config, "rope_parameters", None
    )
    trained_on = getattr(config, "max_position_embeddings", None)
    if not before or trained_on is None or context <= trained_on:
        return []
    if any(isinstance(kind, dict) for kind in before.values()):
        raise ValueError(
            f"documents of {context:,} tokens are longer than the {trained_on:,} that the model knows, and its layers have "
            f"several kinds of rotary positions ({', '.join(before)}), which no one scaling stretches. Valid: --context "
            f"{trained_on}"
        )
    original = before.get("original_max_position_embeddings") or trained_on
    return [
        f"  rope_scaling: # the model knows {trained_on:,} tokens",
        f"    {{ rope_type: yarn, factor: {-(-context // original)}, original_max_position_embeddings: {original} }}",
    ]


def _holder(device: str) -> str:
    """Name what holds a rank's tokens."""
    from hf_longctx.hardware.devices import CPU_DEVICES

    return "process" if device in CPU_DEVICES else "GPU"


def _dry(output: Path, gpus: int, nodes: int, device: str, memory: float | None) -> str:
    asked = f" --memory {memory:g}" if memory else ""
    return f"hf-longctx train {output} --dry-run --ranks {gpus} --nodes {nodes} --device {device}{asked}"


def _text(
    path: str,
    way: Way,
    room: Room,
    gpus: int,
    context: int,
    scaling: list[str],
    data: str | None,
    documents: Documents,
    start: str,
    output: Path,
    device: str,
    gpu_memory: float | None,
) -> str:
    """The file."""
    import yaml

    from hf_longctx.hardware.devices import CPU_DEVICES
    from hf_longctx.settings import EMBEDDED_DATA, EMBEDDED_MODEL

    def value(given: Any) -> str:
        line = yaml.safe_dump(given, default_flow_style=True, width=math.inf, allow_unicode=True)
        return line.removesuffix("\n").removesuffix("\n...")

    nodes = 1 if start.startswith("hf-longctx") else int(start.split("--nnodes ")[1].split()[0])
    share = round(1000 * way.offload)
    peak, usable = way.memory.peak(way.capacity, share), int(room.device * (1 - room.reserve))
    holder, predicted = _holder(device), f"{peak / 2**30:.1f} of {usable / 2**30:.1f} GiB are predicted"
    source = data or (EMBEDDED_DATA if path == EMBEDDED_MODEL else PLACEHOLDER)
    step = max(context, MICRO_BATCHES * gpus * way.capacity)
    if documents.step is not None:
        step = min(step, documents.step)
    lines = [
        f"# {start}",
        "#",
        f"# {path} on {gpus} x {room.name}: {_in_words(way)}.",
        "# Written by `hf-longctx init`; every value may be changed.",
        f"# Its plan and memory:  {_dry(output, gpus, nodes, device, gpu_memory)}",
        "# All keys:  hf-longctx config --reference",
        "",
        "model:",
        f"  path: {value(path)}",
        f"  dtype: {way.dtype} # of the weights; training.bf16 computes in bfloat16",
    ]
    lines += scaling
    if way.lora:
        lines += ["  lora: # adapters alone are trained and saved; `hf-longctx merge` makes a plain model of them"]
        lines += [f"    {{ r: {LORA_RANK}, alpha: {2 * LORA_RANK}, target_modules: all-linear }}"]
    lines += [
        "",
        "data:",
        f"  path: {value(source)} # files, a directory, or a hub's data set; see docs/data.md",
        *([f"  kind: {documents.kind} # as its columns say"] if documents.kind else []),
        "",
        "longctx:",
        f"  capacity: {way.capacity} # tokens on a {holder} at a time: {predicted}",
        f"  global_batch_tokens: {step} # of an optimizer step, all ranks together",
        f"  longest_document: {context} # tokens",
        "  long_documents: split # longer ones become several",
    ]
    if gpus > 1:
        lines += [f"  sharding: {way.sharding} # {HELD[way.sharding]}"]
    if way.offload:
        lines += [f"  activation_offload: {way.offload:g} # of what is kept for backward waits in host memory"]
    lines += [
        "",
        "training:",
        f"  output_dir: {value(f'runs/{output.stem}')}",
        "  num_train_epochs: 1",
        f"  learning_rate: {'1.0e-4' if way.lora else '1.0e-5'}",
        "  lr_scheduler_type: cosine",
        "  warmup_steps: 0.03 # of all steps",
        "  bf16: auto # computes in bfloat16 where that is the faster one, else in float32",
        *(["  use_cpu: true"] if device in CPU_DEVICES else []),
        "  gradient_checkpointing: true # layers keep their inputs, and are computed again in backward",
        "  logging_steps: 1",
        "  save_steps: 100",
        "  save_total_limit: 2",
        "  resume_from_checkpoint: auto # started again, it goes on",
        "  report_to: [] # tensorboard, wandb, trackio",
        "",
    ]
    return "\n".join(lines)
