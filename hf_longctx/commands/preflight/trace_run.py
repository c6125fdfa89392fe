"""`hf-longctx train --dry-run --trace`: the fullest micro-batch of the first step, run on fake tensors at the model's real widths
(training/traced.py), beside what the memory model counts for it. It takes no weights, no GPU and no other rank."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from rich.console import Console

    from hf_longctx.certificate.tiny_layers import Kinds
    from hf_longctx.commands.preflight.run_memory import Planned
    from hf_longctx.commands.shared.room import Room
    from hf_longctx.planner.plan import StepPlan
    from hf_longctx.settings import Config
    from hf_longctx.training.traced import Choice, Trace

NEARLY = 0.9
"""Tokens of a micro-batch that exchanges over those of the fullest, from which it is traced instead: buffers and messages are
what a memory model is most often wrong about."""
PEERS = 3
"""Ranks to which most is sent that are named."""


def show_trace(
    console: Console,
    config: Config,
    run: Planned,
    room: Room,
    plan: StepPlan,
    ranks_per_node: int,
    seconds: float,
) -> None:
    """Print what was traced.

    Args:
        run: one that `refuse_untraceable` lets pass.
        seconds: that planning the step took.

    Raises:
        ValueError: too many layers would be run.
    """
    from rich.table import Table

    from hf_longctx.training.traced import counted_on

    kinds, choice = kinds_of_layers(run.model)
    layers = len(kinds.of_layers)
    rank, layout = fullest(plan)
    console.print(
        f"\nTracing rank {rank}'s fullest micro-batch, {layout.tokens(rank):,} tokens, with {len(choice.few)} of {layers} "
        f"layers, of {len(set(kinds.of_layers))} kind(s), with one more of each, and with {len(choice.check)}"
    )
    few, more, check = traces(config, run, layout, rank, ranks_per_node, kinds, choice)
    whole = counted_on(few, [(longer, further) for longer, (_, further) in zip(more, choice.more)])
    beyond = (len(choice.check) - len(choice.few)) // len(more)
    checked = counted_on(few, [(longer, beyond) for longer in more])
    table = Table(box=None, pad_edge=False)
    columns = (f"{len(choice.few)} layers", *["one more"] * len(more), f"all {layers}, counted on")
    for name in ("tensors, GiB", *columns):
        table.add_column(name, justify="left" if name.startswith("tensors") else "right")
    for kind in (*sorted(few.kinds, key=lambda kind: -whole.kinds[kind]), "peak"):
        values = [trace.peak if kind == "peak" else trace.kinds.get(kind, 0) for trace in (few, *more, whole)]
        if any(values):
            table.add_row(kind, *(f"{value / 2**30:.2f}" for value in values))
    console.print(table)
    off = checked.peak / check.peak - 1
    console.print(f"checked   {len(choice.check)} layers were traced too: counted on, they are {off:+.1%} of that")
    if run.memory is not None:
        console.print(beside_memory(config, run, room, layout, rank, whole.peak), soft_wrap=True)
    console.print(messages(whole, rank, ranks_per_node), soft_wrap=True)
    console.print("host      reads no value inside the micro-batch: fake tensors have none")
    took = sum(trace.seconds for trace in (few, *more, check))
    console.print(f"times     planning {seconds:.2f} s, tracing {took:.0f} s of one core, here")


def beside_memory(config: Config, run: Planned, room: Room, layout: Any, rank: int, peak: int) -> str:
    """Say what the memory model counts of the same, for what was traced: with attention kept or not as in this micro-batch, and
    without what a trace does not see."""
    from hf_longctx.commands.preflight.run_memory import memory_of
    from hf_longctx.hardware.kernel_bytes import returned

    keeps = keeps_attention(run, layout)
    plugin = run.plugin.changed(keep_attention="always" if keeps else "never")
    share, tokens = round(1000 * plugin.activation_offload), layout.tokens(rank)
    counted = []
    for workspace in (returned, None):
        memory = memory_of(config, plugin, run.arguments, run.model, run.world, run.cpu, room, workspace)
        parts = memory.parts(tokens, share)
        counted.append(sum(count for name, count in parts.items() if name not in ("optimizer", "outside")))
    assert run.memory is not None
    planned = run.memory.parts(tokens, share)
    whole = sum(planned.values())
    kept = "attention is kept" if keeps else "attention is computed again"
    return (
        f"counted   {counted[0] / 2**30:.2f} GiB by the memory model ({counted[0] / peak - 1:+.1%}) for the same tensors, where "
        f"{kept}. Of {whole / 2**30:.2f} GiB that are planned with, the rest are states of the optimizer "
        f"({planned['optimizer'] / 2**30:.2f}), what is no tensor's ({planned['outside'] / 2**30:.2f}), the kernel's own "
        f"({(counted[1] - counted[0]) / 2**30:.2f}) and what other micro-batches of as many tokens may keep"
    )


def keeps_attention(run: Planned, layout: Any) -> bool:
    """Tell whether attention of this micro-batch is kept for backward, as training would (training/memory/activations.py)."""
    from hf_longctx.training.memory.activations import KEPT_FROM_SHARE, attention_share, may_keep_attention

    plugin, config = run.plugin, run.model.config
    if not may_keep_attention(plugin.keep_attention, config, plugin.longest_document):
        return False
    return plugin.keep_attention == "always" or attention_share(config, layout) >= KEPT_FROM_SHARE


def refuse_untraceable(run: Planned) -> None:
    """Raise ValueError, with the reason, where the run is none of equal ranks of one stage on GPUs."""
    world = run.world
    wrong = [
        (run.on_cpu, "processes on processors: name a GPU with --device, whose kernel is traced"),
        (world.stages > 1, f"{world.stages} stages of a pipeline: a stage's layers would need those before them"),
        (
            world.tensor_parallel > 1,
            f"tensor parallelism over {world.tensor_parallel} ranks: transformers' hooks need them",
        ),
        (
            world.expert_parallel > 1,
            f"expert parallelism over {world.expert_parallel} ranks: routers decide what is sent",
        ),
    ]
    for refused, reason in wrong:
        if refused:
            raise ValueError(f"--trace runs one process alone, and cannot with {reason}")


def fullest(plan: StepPlan) -> tuple[int, Any]:
    """Return the rank that holds most tokens in a micro-batch, and the layout of that micro-batch: one that exchanges, where such
    a one holds nearly as many."""
    several = np.repeat(plan.members > 1, plan.members)
    member = int((plan.member_tokens * np.where(several, 1.0, NEARLY)).argmax())
    micro_batch = int((plan.first_member[1:] <= member).sum())
    rank = int(plan.rank[member])
    return rank, dict(plan.layouts(rank))[micro_batch]


def kinds_of_layers(model: Any) -> tuple[Kinds, Choice]:
    """Return the kinds of a model's layers, and which layers are run.

    Raises:
        ValueError: too many would be.
    """
    from hf_longctx.certificate.tiny_layers import Kinds
    from hf_longctx.training.traced import Choice

    text = model.config.get_text_config()
    kinds = Kinds.of(model, text.to_dict(), text.num_hidden_layers)
    return kinds, Choice.of(kinds.of_layers)


def traces(
    config: Config, run: Planned, layout: Any, rank: int, ranks_per_node: int, kinds: Kinds, choice: Choice
) -> tuple[Trace, list[Trace], Trace]:
    """Trace the few layers, them and one more of each kind, and those that check.

    Raises:
        ValueError: no model has these layers alone.
    """
    import torch

    from hf_longctx.certificate import tiny_layers
    from hf_longctx.certified_patch import patch_model
    from hf_longctx.training.memory.capacity import LOSS_CHUNKS
    from hf_longctx.training.traced import Traceable, kernel_on_any_device

    plugin, arguments, world = run.plugin, run.arguments, run.world
    half = arguments.bf16 or arguments.fp16
    sharded = world.sharding != "ddp" and world.ranks > 1

    def model_of(kept: tuple[int, ...]) -> Any:
        from hf_longctx.commands.preflight.run_memory import empty_model

        shorter = with_layers(run.model.config, kept)
        model = empty_model(config.model, shorter)
        chosen = tiny_layers.Choice(len(kinds.of_layers), kept)
        if not kinds.are_kept(chosen, model, shorter.get_text_config().to_dict()):
            raise ValueError(
                f"--trace runs few layers, and a {shorter.model_type} model of the layers {list(kept)} alone would have others. "
                "Valid: a model whose configuration says of each layer what it is"
            )
        if sharded and half:  # as accelerate's FSDP2 holds weights that are trained where it computes in half precision
            for weight in model.parameters():
                weight.data = weight.data.float() if weight.requires_grad else weight.data
        patch_model(
            model,
            kernel=kernel,
            loss_chunk_tokens=plugin.loss_chunk_tokens or LOSS_CHUNKS[-1],
            keep_last_slice=plugin.keep_last_slice,
            mlp_tile_tokens=plugin.mlp_tile_tokens,
            liger_kernels=False,
            uncertified=config.model.uncertified,
        )
        if arguments.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    with kernel_on_any_device() as kernel, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traceable = Traceable(
            model_of,
            layout,
            rank,
            world.ranks,
            ranks_per_node,
            world.sharding,
            keep_attention=keeps_attention(run, layout),
            offload=plugin.activation_offload,
            autocast=not sharded and half and run.model.dtype == torch.float32,
        )
        few, check = traceable.trace(choice.few), traceable.trace(choice.check)
        return few, [traceable.trace(kept) for kept, _ in choice.more], check


def with_layers(config: Any, kept: Sequence[int]) -> Any:
    """Return the configuration with the layers of these numbers alone; what it says of each layer follows."""
    from hf_longctx.certificate.tiny_layers import keep_layers

    shorter = copy.deepcopy(config)
    text = shorter.get_text_config()
    for name, value in keep_layers(text.to_dict(), text.num_hidden_layers, list(kept)).items():
        setattr(text, name, value)
    return shorter


def messages(trace: Trace, rank: int, ranks_per_node: int) -> str:
    """Say how much goes to other ranks of the node, and to others, and to whom most."""
    if not trace.sent:
        return "messages  none: its documents lie on this rank alone"
    near, far = (
        {
            peer: count
            for peer, count in trace.sent.items()
            if (peer // ranks_per_node == rank // ranks_per_node) is here
        }
        for here in (True, False)
    )
    most = sorted(trace.sent.items(), key=lambda item: -item[1])[:PEERS]
    named = ", ".join(f"{count / 2**30:.2f} to rank {peer}" for peer, count in most)
    return (
        f"messages  {trace.messages:,} to {len(trace.sent)} ranks: {sum(near.values()) / 2**30:.2f} GiB inside the node, "
        f"{sum(far.values()) / 2**30:.2f} between nodes (GiB: {named})"
    )
