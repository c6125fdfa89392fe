"""Running one rank's part of a planned step: its micro-batches, one after another, in the plan's global order.

Communication happens inside the model (keys, values and their gradients, on the exchange's own process group) and
nowhere else here, but for what FSDP2 and expert parallelism do inside the model (parallel/sharding.py), and for plans that
nobody has compared yet. Every rank of a layout runs its forward and its backward, also where it holds no label: its peers need
what it sends.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_longctx.attention.exchange import Exchange
from hf_longctx.data.collator import RankStep, idle_micro_batch
from hf_longctx.models.loss.balance import has_field
from hf_longctx.parallel.reduction import agree_on_plan, agree_on_weights
from hf_longctx.parallel.sharding import ShardedModel
from hf_longctx.supervision.device_trail import Wait
from hf_longctx.supervision.progress import Progress
from hf_longctx.training.memory.activations import ActivationMemory
from hf_longctx.training.memory.out_of_memory import explained


def run_micro_batches(
    model: torch.nn.Module,
    step: RankStep,
    exchange: Exchange | None,
    device: torch.device,
    backward: Callable[[torch.Tensor], Any] | None = None,
    mark: Callable[[], None] | None = None,
    sharded: ShardedModel | None = None,
    memory: ActivationMemory | None = None,
    offload: float = 0.0,
    progress: Progress | None = None,
    result: Callable[[Any], torch.Tensor] = attrgetter("loss"),
    agreed: bool = False,
    **forward_arguments: Any,
) -> torch.Tensor:
    """Runs the step's micro-batches through a patched model, and `backward` on each loss where it is given.

    Args:
        step: what this rank runs.
        backward: called with each loss; None: the model is evaluated.
        mark: called before the first micro-batch of the plan and after each.
        sharded: the model under FSDP2, whose collectives this step times.
        memory: what is kept between a forward and its backward, and where.
        offload: share of it that waits in host memory at least, 0 to 1.
        progress: notes where this rank is; default: the exchange's.
        result: takes from the output of a forward what is summed up and differentiated, a scalar.
        agreed: whether ranks have compared their plans and weights already. Otherwise they do so first, where the exchange is of
            all ranks.

    Raises:
        ValueError: the plan was made for another number of ranks; or accelerate would divide losses.
        TypeError: the model is wrapped for data parallelism, sharded by somebody else, or not patched; the step is not planned.
        RuntimeError: ranks have different plans, or different weights.
        torch.OutOfMemoryError: a micro-batch does not fit into memory; says which, and what to change.

    Returns:
        float64 scalar: this rank's part of the loss of the step; the sum over ranks is the loss. Zero without a
        micro-batch.
    """
    ranks = exchange.world_size if exchange is not None else 1
    if not isinstance(step, RankStep):
        raise TypeError(
            f"the step is a {type(step).__name__}, and a planned one (RankStep) is needed. Valid: a DataLoader with "
            "collate_fn=LengthAwareCollator(...)"
        )
    if step.plan.world_size != ranks:
        raise ValueError(
            f"the plan was made for {step.plan.world_size} ranks, and there are {ranks}: plan the step again for {ranks} ranks"
        )
    if isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"model is a {type(model).__name__}, whose ranks meet in each forward and backward, and these run different numbers "
            "of them. Valid: the model inside it, or accelerator.prepare_model(model, evaluation_mode=True) in place of "
            "accelerator.prepare; sum_step sums gradients over ranks"
        )
    if sharded is None:
        _refuse_shards(model)
    accelerator: Any = getattr(backward, "__self__", None)  # where backward is accelerate's
    if (divisor := getattr(accelerator, "gradient_accumulation_steps", 1)) != 1:
        raise ValueError(
            f"backward is that of an accelerator with gradient_accumulation_steps={divisor}, which divides each loss by it: "
            "losses are parts of the step's already, whose micro-batches all run here. Valid: gradient_accumulation_steps=1, and "
            f"batches of {divisor} times as many documents"
        )
    if not agreed and ranks > 1 and dist.get_world_size() == ranks:
        agree_on_plan(step.fingerprint, device)
        agree_on_weights(model, device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    rank = exchange.rank if exchange is not None else 0
    micro_batches = list(step.micro_batches)
    if progress is None:
        progress = exchange.progress if exchange is not None else Progress()
    if sharded is not None:
        progress.begin("gathering weights", collective=True)
        sharded.gather()
        if backward is not None and sharded.sharding == "zero1":
            micro_batches.append(idle_micro_batch(rank))
    progress.begin("computing")
    if mark is not None:
        mark()
    for number, micro_batch in enumerate(micro_batches, 1):
        progress.begin_micro_batch(number, len(micro_batches))
        if sharded is not None and backward is not None:
            sharded.before_micro_batch(last=number == len(micro_batches))
        arguments = dict(forward_arguments)
        if micro_batch.idle and has_field(model.config):
            arguments["output_router_logits"] = False  # its tokens belong to no document
        kept: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        share = max(micro_batch.offload / 1000, offload)
        if memory is not None:
            kept = memory.micro_batch(micro_batch.layout, rank, share)
        with explained(model, micro_batch.layout, rank, step.plan.topology, progress, device, sharded, share), kept:
            micro_batch = micro_batch.to(device)
            output = model(
                input_ids=micro_batch.input_ids,
                shift_labels=micro_batch.shift_labels,
                label_rows=micro_batch.label_rows,
                layout=micro_batch.layout,
                exchange=exchange,
                num_items_in_batch=step.num_items,
                num_tokens_in_batch=step.num_tokens,
                **arguments,
            )
            loss = result(output)
            if loss is None:
                raise TypeError(
                    f"the {type(model).__name__} gave no loss: it does not run over layouts. Valid: "
                    "hf_longctx.patch_model(model) before its first step"
                )
            if backward is not None:
                progress.begin_backward()
                backward(loss)
        total += loss.detach()
        if mark is not None and not micro_batch.idle:
            mark()
    if sharded is not None and backward is None:
        sharded.release()
    if not micro_batches and (scaler := getattr(accelerator, "scaler", None)) is not None:
        scaler.scale(total.float())  # a rank that ran no backward must have the same scaler as the others
    return total


def _refuse_shards(model: torch.nn.Module) -> None:
    """Raise TypeError for a model in parts whose collectives nobody times."""
    part = next((part for part in model.modules() if isinstance(part, FSDPModule | FullyShardedDataParallel)), None)
    if part is not None:
        raise TypeError(
            f"model has a {type(part).__name__} of FSDP, whose ranks meet in each forward and backward, and average gradients: "
            "these run different numbers of them, and sum. Valid: a model that is whole on each rank, or LongContextTrainer with "
            "sharding='zero1', 'zero2' or 'zero3' in its plugin"
        )


def _gathered_from(layer: torch.nn.Module) -> list[int]:
    """List the global ranks that a layer's weights are gathered from; none without FSDP2."""
    if not isinstance(layer, FSDPModule):
        return []
    spread = next((weight for weight in layer.parameters() if isinstance(weight, DTensor)), None)
    if spread is None:
        return []
    with unset_fake_temporarily():  # ranks are numbers, also where weights are fake
        return spread.device_mesh.mesh.flatten().tolist()


@contextlib.contextmanager
def follow_layers(model: torch.nn.Module, progress: Progress) -> Iterator[None]:
    """Notes in `progress` which decoder layer of a model is computed, forward and backward, as long as the context lasts.

    Opened after FSDP2 has wrapped the model, so that a layer is noted before its weights are gathered. Where the host runs ahead
    of a GPU, events lie around that gathering too (supervision/device_trail.py): hooks that were there before FSDP2's, and hooks
    that come after them.
    """
    handles = []
    gathering: list[Wait] = []
    layers = [
        (name, module) for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)
    ]
    for name, layer in layers:
        last = name.rpartition(".")[2]  # a number in the whole model, of which this may be a stage
        if not last.isdecimal():  # a part of a layer that is checkpointed by itself
            continue
        number = int(last)

        peers = _gathered_from(layer)

        def at_layer(*_: Any, number: int = number, peers: Sequence[int] = peers) -> None:
            progress.at_layer(number)
            if peers and progress.trail is not None:
                gathering.append(progress.trail.begin(peers, number, progress.backward, "weights"))

        def gathered(*_: Any) -> None:
            if gathering and progress.trail is not None:
                progress.trail.end(gathering.pop())

        def before_backward(output: Any, hook: Any) -> None:
            # The gradient of its output is there when its backward begins.
            tensor = output[0] if isinstance(output, tuple) else output
            if tensor.requires_grad:
                tensor.register_hook(hook)

        def after_forward(_module: Any, _inputs: Any, output: Any, at_layer: Any = at_layer) -> None:
            before_backward(output, at_layer)

        def after_fsdp(
            _module: Any, _inputs: Any, output: Any, before: Any = before_backward, hook: Any = gathered
        ) -> None:
            before(output, hook)

        handles.append(layer.register_forward_pre_hook(at_layer, prepend=True))
        handles.append(layer.register_forward_hook(after_forward, prepend=True))
        if peers:
            handles.append(layer.register_forward_pre_hook(gathered))
            handles.append(layer.register_forward_hook(after_fsdp))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
