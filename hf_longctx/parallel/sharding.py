"""Shares of weights, gradients and optimizer that each rank holds, and what these ask of a planned step.

    setting   weights                gradients                          optimizer   planned as
    ddp       all                    all, summed once a step            all         async
    zero1     all, gathered once     all, reduce-scattered once a step  a part      async
    zero2     all, gathered once     reduce-scattered in every round    a part      lockstep
    zero3     gathered layer by      reduce-scattered in every round    a part      lockstep
              layer, every round

The last three are FSDP2 (accelerate's, or transformers' where the model was sharded as it was loaded), told when to gather
and when to reduce. Gradients are SUMMED over ranks: losses are divided by the label tokens of the whole step already.

Async: ranks run different numbers of micro-batches, and no collective may fall between two exchanges of any rank, or ranks
wait for each other in a circle. So zero1 gathers all weights before the first micro-batch and defers reduction past the
last one, to a closing round of one idle micro-batch: two tokens and no loss on every rank, whose backward carries what has
been accumulated through FSDP2's own reduction, in the order of layers.

Lockstep: every rank runs one micro-batch in each round, idle ones included, so that collectives meet layer by layer; an
exchange inside a layer has the same place in that order on all ranks. Mixture-of-experts layers with expert parallelism
are collective in forward already: their steps are planned in lockstep whatever the setting.
"""

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.distributed.tensor import DTensor, Shard
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_longctx.models.partial_gradients import sum_over_ranks
from hf_longctx.models.stages import whole_parameters
from hf_longctx.parallel.unused_weights import reduce_unused
from hf_longctx.parallel.world import World, resolved_sharding
from hf_longctx.planner.memory.state_bytes import Sharding
from hf_longctx.settings.longctx import LongContextPlugin

MOST_PADDED = 1.25
"""Rows that ranks hold together over those that a weight has, up to which it is spread along them."""
USES_FSDP = "ACCELERATE_USE_FSDP"
"""Variable by which launchers ask for FSDP. Where a trainer asks, accelerate sets it too, for all later ones of its process."""
OF_FSDP_1 = "LongContextTrainer: FSDP1 hangs when ranks run different micro-batches. Valid: fsdp_version 2"


class ShardedModel:
    """A model under FSDP2, as planned steps run it.

    Args:
        model: FSDP2's root; its parts are sharded too.
        sharding: zero1, zero2 or zero3.
        varies: whether weights may have gradients on some ranks only, as those that a document of few tokens never reaches
            (DeepSeek V4 pools tokens in groups): FSDP2 would sum what each rank has, which are then other weights.
    """

    def __init__(self, model: torch.nn.Module, sharding: Sharding, varies: bool = True) -> None:
        self.sharding = sharding
        self.modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module in self.modules:
            sum_over_ranks(module)
            if sharding != "zero3":
                module.set_reshard_after_forward(False, recurse=False)
        self._used: set[int] = set()
        """ids of parts of weights that this rank's backwards of the step have had gradients for"""
        self._whole: dict[int, torch.nn.Parameter] = {}
        """weights put together that are followed, by id"""
        self._follows = varies
        for module in self.modules if varies else ():
            reduce_unused(module)
            module.register_forward_pre_hook(self._following(module))  # after FSDP2's, which puts weights together

    def _following(self, module: torch.nn.Module) -> Callable[..., None]:
        """Return a hook for before the forward of a part: notes which of its weights the backward has gradients for."""
        of_others = {
            id(inside)
            for part in module.modules()
            if part in self.modules and part is not module
            for inside in part.modules()
        }
        own = [
            (holder, name, id(weight))
            for holder in module.modules()
            if id(holder) not in of_others
            for name, weight in holder.named_parameters(recurse=False)
        ]

        def before_forward(*_: Any) -> None:
            for holder, name, part in own:
                weight = getattr(holder, name)
                if weight.requires_grad and id(weight) not in self._whole:
                    self._whole[id(weight)] = weight
                    weight.register_post_accumulate_grad_hook(lambda _, part=part: self._used.add(part))

        return before_forward

    def taken_uses(self, trained: Iterable[torch.nn.Parameter]) -> list[bool]:
        """Return for each of the weights whether a backward of this rank has had a gradient for it; begin anew. Empty where they
        are not followed."""
        used, self._used = self._used, set()
        return [id(weight) in used for weight in trained] if self._follows else []

    def gather(self) -> None:
        """Put weights together, before the first micro-batch. Collective."""
        if self.sharding == "zero1":
            for gathered in [module.unshard(async_op=True) for module in self.modules]:
                if gathered is not None:
                    gathered.wait()

    def before_micro_batch(self, last: bool) -> None:
        """Set when gradients are reduced and weights freed; `last`: whether this round's backward is the last of the step."""
        for module in self.modules:
            module.set_requires_gradient_sync(self.sharding != "zero1" or last, recurse=False)
            module.set_reshard_after_backward(self.sharding == "zero3" or last, recurse=False)

    def release(self) -> None:
        """Hold weights in parts again, after a step without backward."""
        for module in self.modules:
            module.reshard()


def fsdp_settings(args: Any, sharding: str, host_offload: bool = False) -> dict[str, Any] | None:
    """Arguments of accelerate's FSDP2 plugin: those that Trainer made of `args.fsdp_config`, else those of our settings.
    Gradients are reduced in float32, and what the model returns, its loss, keeps its dtype."""
    given = args.fsdp_plugin_args
    if given is None and sharding in ("zero1", "zero2", "zero3"):
        given = {
            "fsdp_version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "state_dict_type": "FULL_STATE_DICT",
            "cpu_ram_efficient_loading": False,
        }
    if given is None:
        forget_trainers()
        return None
    _asked_here.append(USES_FSDP not in os.environ)
    reshard = given.get("reshard_after_forward", True) if sharding == "auto" else sharding == "zero3"
    return given | {"reshard_after_forward": reshard} | ({"cpu_offload": True} if host_offload else {})


_asked_here: list[bool] = []
"""For each trainer of this process that sharded its model: whether nobody had asked for FSDP before."""


def forget_trainers() -> None:
    """Take back that earlier trainers of this process asked for FSDP."""
    if any(_asked_here):
        os.environ.pop(USES_FSDP, None)
    _asked_here.clear()


def enable_fsdp(accelerator: Any, settings: dict[str, Any] | None) -> None:
    """Makes accelerate shard the model where FSDP2 is asked for, by `settings` or by its own configuration.

    accelerate takes FSDP for accelerators only; it runs on CPUs (gloo) as well.

    Raises:
        ValueError: its configuration asks for FSDP1, or for parts that planned steps do not run.
    """
    state = accelerator.state
    configured = os.environ.get(USES_FSDP, "false").lower() == "true"
    if configured and os.environ.get("FSDP_VERSION", "1" if settings is None else "2") == "1":
        raise ValueError(OF_FSDP_1)
    if state.distributed_type == DistributedType.MULTI_CPU and (settings is not None or configured):
        state.fsdp_plugin = FullyShardedDataParallelPlugin(**settings or {})
        if isinstance(state.fsdp_plugin.cpu_offload, CPUOffloadPolicy):
            state.fsdp_plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False)  # there is no device to copy to
        # Every new AcceleratorState takes over what PartialState says.
        state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
    plugin = getattr(state, "fsdp_plugin", None)
    if plugin is not None and plugin.fsdp_version == 2:
        if plugin.auto_wrap_policy is size_based_auto_wrap_policy:
            raise ValueError(
                f"LongContextTrainer: FSDP's auto_wrap_policy SIZE_BASED_WRAP (parts of {plugin.min_num_params} weights) takes "
                "parts inside layers, whose weights are used beside them too. Valid: TRANSFORMER_BASED_WRAP, or NO_WRAP"
            )
        shard_evenly(accelerator)
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(state.mixed_precision)
        if half is not None:
            plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)


def shard_evenly(accelerator: Any) -> None:
    """Make accelerate's FSDP2 place weights as `even_placement` says, and each of them in one part: `apart_but_shared`."""
    prepare = accelerator._prepare_fsdp2

    def prepare_evenly(*prepared: Any, **options: Any) -> Any:
        mesh = getattr(accelerator, "torch_device_mesh", None)
        ranks = accelerator.num_processes
        if mesh is not None:
            ranks = mesh[tuple(accelerator.parallelism_config.fsdp_dim_names)].size(-1)
        models = [part for part in prepared if isinstance(part, torch.nn.Module)]
        evenly = apart_but_shared(models, partial(fully_shard, shard_placement_fn=even_placement(ranks)))
        with patch.object(torch.distributed.fsdp, "fully_shard", evenly):  # accelerate imports it where it calls it
            return prepare(*prepared, **options)

    accelerator._prepare_fsdp2 = prepare_evenly


def apart_but_shared(models: Iterable[torch.nn.Module], shard: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap FSDP2's `shard` so that it leaves a part of these models to what is around it if one of its weights also stands
    elsewhere: FSDP2 holds a weight in one part. Zamba's layers share a block; a BERT's embeddings are its head's weight, and the
    head's bias stands in two modules."""
    holders_of: dict[int, set[int]] = {}
    for module in (module for model in models for module in model.modules()):
        for weight in module.parameters(recurse=False):
            holders_of.setdefault(id(weight), set()).add(id(module))
    shared = [holders for holders in holders_of.values() if len(holders) > 1]

    def shard_apart(part: Any, **options: Any) -> Any:
        modules = part if isinstance(part, list) else [part]
        inside = {id(module) for member in modules for module in member.modules()}
        if any(holders & inside and holders - inside for holders in shared):
            return part
        return shard(part, **options)

    return shard_apart


def even_placement(ranks: int) -> Callable[[torch.nn.Parameter], Shard | None]:
    """Return how FSDP2 spreads each weight over so many ranks: along its rows (None), unless these are so few that ranks would
    hold rows of nothing. What is gathered and reduced has as many rows for all ranks: 8 experts on 64 ranks would take 8 times
    their memory. They are spread along the longest other dimension that divides evenly, if there is one."""

    def placement(weight: torch.nn.Parameter) -> Shard | None:
        if isinstance(weight, DTensor) or not weight.ndim:
            return None
        rows = weight.shape[0]
        if -(-rows // ranks) * ranks <= MOST_PADDED * rows:
            return None
        even = [dimension for dimension in range(1, weight.ndim) if weight.shape[dimension] % ranks == 0]
        return Shard(max(even, key=lambda dimension: weight.shape[dimension])) if even else None

    return placement


def shard_over(model: Any, group: dist.ProcessGroup, fsdp_plugin: Any) -> None:
    """FSDP2 over the ranks of a group, in place: accelerate would shard over all, and takes what is sharded as it is. Layers
    and the rest are parts of their own, with weights in float32 where they compute in half precision, as accelerate's."""
    policy = fsdp_plugin.mixed_precision_policy or MixedPrecisionPolicy()
    if policy.param_dtype is not None:
        for parameter in whole_parameters(model).values():  # what ranks write of each other's must have one size
            if parameter.requires_grad and parameter.dtype != torch.float32:
                parameter.data = parameter.data.float()
    device = "cpu" if dist.get_backend(group) == "gloo" else "cuda"
    settings: dict[str, Any] = {
        "mesh": DeviceMesh.from_group(group, device),
        "mp_policy": policy,
        "offload_policy": fsdp_plugin.cpu_offload,
        "reshard_after_forward": False,
        "shard_placement_fn": even_placement(dist.get_world_size(group)),
    }
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            fully_shard(module, **settings)
    fully_shard(model, **settings)
    fsdp_plugin.auto_wrap_policy = None  # accelerate would look for layers under the names that they had


def name_layers(model: Any, fsdp_plugin: Any) -> None:
    """Name the classes of layers that FSDP2 gathers one by one, where nobody has: those of the model's own list that it has
    modules of. accelerate takes all of the list for present, but a text model's names layers of towers that it comes without."""
    if fsdp_plugin.transformer_cls_names_to_wrap is None:
        listed = set(getattr(model, "_no_split_modules", None) or ())
        fsdp_plugin.transformer_cls_names_to_wrap = sorted(listed & {type(part).__name__ for part in model.modules()})


def refuse_mixed_dtypes(model: Any, fsdp_plugin: Any) -> None:
    """Raise ValueError where one part of FSDP2 would train weights of several dtypes, which it gathers as one; in half precision
    accelerate makes all of them float32 first."""
    policy, layers = fsdp_plugin.mixed_precision_policy, set(fsdp_plugin.transformer_cls_names_to_wrap or ())
    if policy is not None and policy.param_dtype is not None:
        return
    if fsdp_plugin.auto_wrap_policy is None:  # all of it is one part
        layers = set()
    parts = [part for part in model.modules() if type(part).__name__ in layers]
    inside = {id(weight) for part in parts for weight in part.parameters()}
    groups = [list(part.named_parameters()) for part in parts]
    groups.append([(name, weight) for name, weight in model.named_parameters() if id(weight) not in inside])
    for group in groups:
        example_of = {weight.dtype: name for name, weight in group if weight.requires_grad}
        if len(example_of) > 1:
            shown = ", ".join(f"{name} in {str(dtype).removeprefix('torch.')}" for dtype, name in example_of.items())
            raise ValueError(
                f"LongContextTrainer: a model whose trained weights have several dtypes ({shown}) was to be sharded, and FSDP2 "
                "gathers the weights of a layer as one. Valid: bf16=True, which keeps all of them in float32 and computes in "
                "bfloat16, a model in one dtype, or sharding='ddp'"
            )


def leave_unwrapped(accelerator: Any, begin: Callable[[Any], None]) -> None:
    """Have accelerate leave a model as it is where every rank holds whole weights: prepared without DDP, whose buckets would hold
    all gradients once more and never be used, because planned steps sum gradients themselves. `begin` gives all ranks the same
    weights."""
    prepare = accelerator.prepare_model

    def prepare_whole(model: Any, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        model = prepare(model, device_placement, evaluation_mode=True)
        begin(model)
        return model

    accelerator.prepare_model = prepare_whole


@torch.no_grad()
def begin_alike(
    tensors: Iterable[torch.Tensor], device: torch.device, source: int = 0, group: dist.ProcessGroup | None = None
) -> None:
    """Gives every rank of a group (default: all) the values of one global rank, in place; what is in parts (DTensor) stays.

    `device`: what ranks send from, one tensor after the other: a model that will be sharded may wait in host memory, from which
    NCCL sends nothing.
    """
    for tensor in tensors:
        if isinstance(tensor, DTensor):
            continue
        own = tensor.data  # packed weights have a `to` of their own, which packs
        sent = own.to(device).contiguous()
        dist.broadcast(sent, src=source, group=group)
        if sent is not own:
            own.copy_(sent)


def sharding_of(setting: str, processes: int, model: Any, state: Any) -> Sharding:
    """Return what the setting `sharding` comes to where accelerate has set up ranks.

    Args:
        state: accelerate's.

    Raises:
        ValueError: the setting contradicts accelerate's, or how the model was loaded.
    """
    fsdp = getattr(state, "fsdp_plugin", None)
    if fsdp is not None and fsdp.fsdp_version != 2:
        raise ValueError(OF_FSDP_1)
    reshards = None if fsdp is None else bool(fsdp.reshard_after_forward)
    launched = str(state.distributed_type)
    return resolved_sharding(setting, processes, reshards=reshards, loaded=is_sharded(model), launched=launched)


def arranged(processes: int, sharding: Sharding, plugin: LongContextPlugin, model: Any) -> World:
    """Arrange so many processes as the plugin asks and as the model was loaded.

    Raises:
        ValueError: they cannot be arranged so.
    """
    return World(processes, sharding, plugin.pipeline_stages, tensor_parallel(model), expert_parallel(model))


def is_sharded(model: Any) -> bool:
    """Whether FSDP2 has the model in parts: accelerate's when training begins, transformers' since it was loaded. A model that
    does not exist yet (model_init) has none."""
    return model is not None and any(isinstance(module, FSDPModule) for module in model.modules())


def tensor_parallel(model: Any) -> int:
    """Ranks that share the heads of each layer, and the tokens of each shard."""
    return getattr(model, "tp_size", None) or 1


def expert_parallel(model: Any) -> int:
    """Ranks over which the experts of a layer are spread."""
    config = getattr(model, "config", None)
    return getattr(getattr(config, "distributed_config", None), "ep_size", None) or 1
