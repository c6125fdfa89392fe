"""`hf-longctx train --dry-run`: the plan of the first step, the memory of a rank against what its device has, and the command of
each machine. Nothing is started, no weight is read, and no GPU is needed.

Documents that lie on this machine are read, and tokenised as training would (it finds them in the cache then). Those of a hub
are not fetched: lengths like those of a published distribution are drawn instead, and the output says so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hf_longctx.commands.preflight.launching import command
from hf_longctx.commands.preflight.resumed_run import refuse_other_run, show_checkpoint
from hf_longctx.commands.preflight.run_memory import Planned, computes_on_cpu, planned_run
from hf_longctx.commands.preflight.trace_run import refuse_untraceable, show_trace
from hf_longctx.settings.data import names_a_hub

if TYPE_CHECKING:
    from rich.console import Console

    from hf_longctx.commands.shared.room import Room
    from hf_longctx.data.step_plans import StepPlans
    from hf_longctx.planner import Topology
    from hf_longctx.precision import Decision
    from hf_longctx.settings import Config

DRAWN = "github"
"""Lengths of documents that cannot be read here."""
ON_GPUS = "training.use_cpu=false"
"""Override of a configuration for processors, where a GPU or NPU is named."""


def dry_run(
    name: str,
    config: Config,
    overrides: Sequence[str],
    *,
    ranks: int,
    nodes: int,
    device: str | None,
    memory: float | None,
    lengths: str | None,
    trace: bool = False,
) -> None:
    """Prints it all. Exits with code 1 where a rank would hold more than its device has.

    Args:
        name: of the file, for the command.
        ranks: on all `nodes` together.
        device: a preset or a profile; None: this machine's GPU, or its processors where it has none.
        memory: GiB of one device; None: the device's.
        lengths: documents to plan with, as `hf-longctx plan` takes them; None: the configuration's.
        trace: run the fullest micro-batch on fake tensors too (trace_run.py).

    Raises:
        ValueError: what training would refuse.
    """
    from rich.text import Text

    from hf_longctx.checkpoint.choice import left_by_earlier_run
    from hf_longctx.commands.shared.screen import screen
    from hf_longctx.data.step_plans import UNADJUSTED
    from hf_longctx.hardware.devices import said_of_speeds
    from hf_longctx.models.documents import documents_of
    from hf_longctx.planner import Topology
    from hf_longctx.precision import with_precision
    from hf_longctx.training.preparation import too_short_for_warmup

    if ranks % nodes:
        raise ValueError(f"--ranks {ranks} must be a multiple of --nodes {nodes}: each node starts as many")
    on_cpu = computes_on_cpu(config, device)
    training, precision = with_precision(config.training, lambda: _precision(device, on_cpu).over(config.model.dtype))
    config = config.model_copy(update={"training": training})
    room = _room(device, memory, ranks // nodes, on_cpu)
    run = planned_run(config, ranks, device, room, precision)
    if trace:
        refuse_untraceable(run)
    console = screen()
    size = f"{ranks} process(es), called ranks, on {nodes} node(s), {room.name}"
    console.print(Text.assemble((name, "bold"), f": {size}. Nothing is started."))
    if config.training.get("use_cpu") and not on_cpu:
        console.print(f"device    {device}, which is no processor: shown as with {ON_GPUS}")
        overrides = [*overrides, ON_GPUS]
    _show_model(console, config, run, precision)
    share = round(1000 * run.plugin.activation_offload)
    capacity = run.plugin.capacity
    if not capacity:
        assert run.memory is not None  # or planned_run would have raised
        capacity = run.memory.capacity(room.device, room.reserve, share)
    console.print(
        f"capacity  {capacity:,} tokens on a rank at a time{'' if run.plugin.capacity else ': what memory holds'}"
    )
    world = run.world
    stages = world.stages
    if stages > 1:
        _show_stages(console, run, capacity)
    topology = Topology(
        world.ranks,
        capacity,
        ranks_per_node=run.plugin.ranks_per_node or (ranks // nodes if nodes > 1 else None),
        ulysses_degree=run.plugin.ulysses_degree,
        stages=stages,
        documents=documents_of(run.model),
    )
    _show_limits(console, run, topology)
    gpu = None if on_cpu else device or _gpu_here().name
    profile = run.plugin.profile or (device if device is not None and device.endswith(".json") else None)
    if profile is not None:
        console.print(f"speeds    as measured in {profile}", soft_wrap=True)
    elif gpu is not None:
        console.print(f"speeds    {said_of_speeds(gpu)}", soft_wrap=True)
    run = replace(run, plugin=run.plugin.changed(profile=profile))
    resumed = show_checkpoint(console, run)
    steps, documents = _steps(config, run, topology, lengths, gpu, resumed, precision_chosen=precision is None)
    of_epoch = len(steps.epoch(0))
    console.print(
        f"documents {documents}; {of_epoch:,} optimizer {'step' if of_epoch == 1 else 'steps'} an epoch. The first:"
    )
    began = time.monotonic()
    plan = steps.plan(0, 0, UNADJUSTED)
    seconds, summary = time.monotonic() - began, plan.summary()
    console.print(str(summary))
    if run.plugin.plan_offload:
        console.print("plan_offload: not counted here; plans may put documents on fewer ranks than this one")
    # In a pipeline a device takes in more micro-batches until they have as many tokens as full ones
    # (planner/stages/stage_order.py).
    tokens = summary.most_tokens_per_rank if stages == 1 else min(capacity, summary.tokens)
    fits = _show_memory(console, run, room, tokens, capacity, share)
    if trace:
        show_trace(console, config, run, room, plan, topology.node_size, seconds)
    asked, output = run.arguments.resume_from_checkpoint, run.arguments.output_dir
    epochs, most = run.arguments.num_train_epochs, run.arguments.max_steps
    short = too_short_for_warmup(run.arguments, most if most > 0 else math.ceil(epochs * of_epoch))
    for warning in filter(None, (short, left_by_earlier_run(asked, Path(output or ".")))):
        console.print(f"\n{warning}", soft_wrap=True)
    where = "on each node" if nodes > 1 else "with"
    console.print(f"\nStart it {where}:\n  {command(name, overrides, ranks, nodes)}")
    if nodes > 1:
        console.print("FIRST_NODE: a name of the first node that the others know")
    if not fits:
        raise typer.Exit(1)


def _show_model(console: Console, config: Config, run: Planned, precision: Decision | None) -> None:
    weights = [(weight.numel(), weight.requires_grad) for weight in run.model.parameters()]
    trained, total = (sum(count for count, learns in weights if learns or every) for every in (False, True))
    console.print(f"model     {run.model.config.model_type}, {total:,} weights, {trained:,} of them trained")
    if config.model.load_in_4bit:
        console.print("          frozen weights are counted in 2 bytes each; in 4 bits they take a quarter")
    if precision is not None:
        console.print(f"precision {precision.computes} (bf16: auto; {precision.reason})", soft_wrap=True)
    console.print(f"sharding  {run.world.sharding} ({run.why})")


def _show_stages(console: Console, run: Planned, capacity: int) -> None:
    from hf_longctx.planner.stages.stage_layers import describe_stages, stage_layers

    world, plugin = run.world, run.plugin
    layers = stage_layers(run.model.config, world.stages * plugin.virtual_stages, capacity)
    spread = describe_stages(run.model.config, layers, capacity)
    console.print(
        f"pipeline  {world.stages} stages of {world.processes_of_stage} rank(s), {plugin.pipeline_schedule}; {spread}"
    )


def _show_limits(console: Console, run: Planned, topology: Topology) -> None:
    """Show what the model does not let documents do: be split, or be longer than its positions."""
    from hf_longctx.models.documents import positions_of

    if topology.stay_whole:
        how, why = (
            "packed with others",
            "what the model's layers carry along a document does not pass from rank to rank",
        )
        if topology.documents == "alone":
            how, why = "alone in its micro-batch", "no layout reaches the model's attention, and the plain model runs"
        console.print(
            f"whole     each document lies on one rank, {how}, with at most {topology.longest_document:,} tokens: {why}",
            soft_wrap=True,
        )
    if (positions := positions_of(run.model)) is not None:
        console.print(f"positions documents of at most {positions}, where the model's positions end")


def _show_memory(console: Console, run: Planned, room: Room, tokens: int, capacity: int, share: int) -> bool:
    """The parts of the fullest rank, and whether they fit; True where they cannot be counted."""
    from rich.text import Text

    from hf_longctx.commands.shared.memory_table import Estimate, memory_table

    if run.memory is None:
        console.print(f"\nMemory is not shown. {run.uncounted}", soft_wrap=True)
        return True
    parts = run.memory.parts(tokens, share)
    peak, usable = sum(parts.values()), int(room.device * (1 - room.reserve))
    try:
        most = run.memory.capacity(room.device, room.reserve, share)
    except ValueError:
        most = 0
    moved = run.memory.offloadable_token_bytes * tokens * share // 1000
    row = Estimate(run.world.sharding, most, 1, 1, parts, run.memory.host + moved)
    staged, schedule = run.world.stages > 1, run.plugin.pipeline_schedule
    of = "a process of a stage, full" if staged else "the rank with most tokens"
    console.print(f"\nMemory of {of} ({tokens:,}), GiB predicted:")
    if staged and schedule == "gpipe":
        console.print("counted as 1f1b holds activations; gpipe holds those of all micro-batches of a step")
    console.print(memory_table([row], over_all=False))
    limit = f"{usable / 2**30:.1f} GiB that may be used ({room.name}: {room.device / 2**30:.1f} GiB)"
    arithmetic = f"{peak / 2**30:.1f} of the {limit}"
    if peak <= usable:
        console.print(Text.assemble(("fits", "green"), f": {arithmetic}; up to {most:,} tokens on a rank would"))
        return True
    less = "more pipeline_stages, sharding zero1" if staged else "more ranks with sharding zero3"
    way = f"longctx.capacity <= {most}" if most else f"{less}, or model.lora"
    advice = f"Valid: {way}; `hf-longctx estimate` shows every sharding"
    console.print(Text.assemble(("does not fit", "red"), f": {arithmetic}. {advice}"))
    return False


def _gpu_here() -> Any:
    """Properties of this machine's first GPU."""
    import torch

    return torch.cuda.get_device_properties(0)


def _room(device: str | None, memory: float | None, ranks_here: int, on_cpu: bool) -> Room:
    """Memory of one rank's device: as asked, of the device that is named, or as this machine has it."""
    from hf_longctx.commands.shared.room import Room, read_room

    if device is None and memory is None and not on_cpu:
        here = _gpu_here()
        return Room(here.name, here.total_memory, None, ranks_here)
    room = read_room(device or "cpu", memory, ranks_here)
    return room if room.gpus_per_node is None else replace(room, gpus_per_node=ranks_here)


def _precision(device: str | None, on_cpu: bool) -> Decision:
    """Decide `bf16: auto` for the device that is asked for, by its name, or for this machine's. Nothing is timed."""
    from hf_longctx.precision import decide_for, decide_here

    if device is None and not on_cpu:
        import torch

        return decide_here(torch.device("cuda", 0))
    return decide_for(device or "cpu")


def _steps(
    config: Config,
    run: Planned,
    topology: Topology,
    lengths: str | None,
    gpu: str | None,
    resumed: str | None,
    *,
    precision_chosen: bool,
) -> tuple[StepPlans, str]:
    """Plan the steps of an epoch, and say which documents they are of.

    Args:
        gpu: name of the device, where it is no processor.
        resumed: folder of the checkpoint that training would go on from.
        precision_chosen: `bf16` was no `auto`.

    Raises:
        ValueError: what training would refuse.
    """
    import torch

    from hf_longctx.data.length_index import LengthIndex, refuse_tokens_outside
    from hf_longctx.data.long_documents import Pieces, cut_documents
    from hf_longctx.data.step_plans import OF_EVALUATION, Planning, StepPlans, refuse_too_long
    from hf_longctx.models.documents import longest_of
    from hf_longctx.planner import GlobalBatches
    from hf_longctx.training.arguments import fold_accumulation
    from hf_longctx.training.measuring.step_costs import cost_model
    from hf_longctx.training.run_data import (
        mixture_of,
        new_state,
        refuse_pieces_beyond_positions,
        seed_of_documents,
    )

    plugin, arguments = run.plugin, run.arguments
    documents, tokens = plugin.global_batch_documents, plugin.global_batch_tokens
    if documents is None and tokens is None:
        documents = fold_accumulation(arguments, plugin, topology.world_size)
    seed, positions = seed_of_documents(arguments), longest_of(run.model)
    longest_allowed = min(topology.longest_document, positions or topology.longest_document)
    settled = plugin.model_copy(update={"capacity": topology.capacity})
    longest = settled.first_longest_document(topology.world_size, topology.documents, positions)
    dataset, index, description, held_out = _documents(
        config, run, lengths, documents, tokens, seed, min(longest or longest_allowed, longest_allowed)
    )
    state = new_state(plugin, arguments, run.model, dataset, index, (documents, tokens), longest)
    if resumed is not None:
        refuse_other_run(
            resumed,
            run,
            state,
            documents_known=lengths is None and not _on_a_hub(config),
            precision_chosen=precision_chosen,
            frozen_known=not config.model.load_in_4bit,
        )

    def cut(dataset: Any, index: LengthIndex) -> Pieces:
        refuse_tokens_outside(dataset, run.model.config.get_text_config().vocab_size)
        pieces = cut_documents(dataset, index, state.long_documents, state.longest_document, state.overlap_tokens)
        refuse_pieces_beyond_positions(run.model, pieces)
        return pieces

    pieces = cut(dataset, index)
    if held_out is not None:
        try:
            refuse_too_long(cut(held_out, LengthIndex.from_dataset(held_out)), topology)
        except ValueError as error:
            raise ValueError(f"{OF_EVALUATION}{error}") from error
    mixture = mixture_of(dataset, state.weights, pieces)
    documents, tokens = state.global_batch_documents, state.global_batch_tokens
    batches = GlobalBatches(pieces.lengths, state.seed, documents=documents, tokens=tokens, mixture=mixture)
    device = torch.device("cpu" if run.on_cpu else "cuda")
    cost = cost_model(
        plugin, run.model, topology, device, autocast=arguments.bf16 or arguments.fp16, cpu=run.cpu, gpu=gpu
    )
    planning = Planning(topology, cost, plugin.planner, run.world.mode)
    return StepPlans(pieces, batches, planning), description


def _documents(
    config: Config,
    run: Planned,
    lengths: str | None,
    documents: int | None,
    tokens: int | None,
    seed: int,
    longest: int,
) -> tuple[Any, Any, str, Any]:
    """Return the data set, its lengths, what to call them, and the documents that are held out, where they are looked at."""
    from hf_longctx.commands.shared.documents import Wanted, read_documents
    from hf_longctx.data.length_index import LengthIndex
    from hf_longctx.run import data_version
    from hf_longctx.run_documents import load_split, tokenizer_of

    why = ""
    if lengths is None and (hubs := _on_a_hub(config)):
        lengths, why = DRAWN, f" (drawn: a dry run does not fetch {', '.join(hubs)}; --lengths says what to plan with)"
    if lengths is not None:
        source = read_documents(lengths, Wanted(documents, tokens), seed=seed, longest=longest)
        return source.dataset, source.index, f"{len(source.index):,} of {source.name}{why}", None
    tokenizer = tokenizer_of(config.model)
    data, version = config.data, data_version(config, run.arguments)
    dataset = load_split(data, data.train_split, tokenizer, version=version)
    held_out = None if data.held_out is None else load_split(data, data.held_out, tokenizer, version=version)
    index = LengthIndex.from_dataset(dataset)
    return dataset, index, f"{len(index):,} of data.{data.train_split}", held_out


def _on_a_hub(config: Config) -> list[str]:
    """Sources that are not on this machine."""
    paths = [source.path for source in config.data.all_sources]
    return [path for path in paths if isinstance(path, str) and names_a_hub(path) and not Path(path).is_dir()]
