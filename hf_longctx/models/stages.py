"""A model of which this process holds some stages: consecutive decoder layers, the embeddings with the first, the last norm and
the output head with the last.

    stage 0   embeddings, layers 0-8   |   stage 1   layers 9-17   |   stage 2   layers 18-25, norm, head

`cut_model` takes away what lies elsewhere. What stays keeps its name (model.layers.18...), so that checkpoints and
optimizers of all processes together are those of the whole model. Tied embeddings lie on the first stage and on the last,
where their gradients are added up.

One stage runs by `model(layout=..., stage=StageInput(...))`: the model object stays what is called, so that hooks (FSDP2,
autocast, adapters) run. Nothing is sent between ranks here. Shapes: T tokens of this rank, H hidden size, E experts.
"""

import contextlib
import copy
import functools
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import Parameter
from transformers.distributed import mixin
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

from hf_longctx.attention.exchange import Exchange, own_rank
from hf_longctx.attention.on_device import on_device
from hf_longctx.layouts.layout import Layout
from hf_longctx.models.families import FAMILIES
from hf_longctx.models.loss.head import install_forward, loss_of_hidden
from hf_longctx.models.loss.loss_by_length import LossByLength
from hf_longctx.models.loss.token_metrics import TokenMetrics
from hf_longctx.models.wrappers import language_model_of
from hf_longctx.planner.stages.stage_layers import TYPICAL_LENGTH, stage_layers

CUT_MODELS = tuple(family.cut_model for family in FAMILIES if family.cut_model is not None)


def _is_elsewhere(what: str) -> str:
    return (
        f"{what} lies on another stage of the pipeline: this process has a part of the model. Valid: training and evaluation "
        "through the trainer, or a whole model loaded from a checkpoint"
    )


class Elsewhere(torch.nn.Module):
    """Stands in for a module that another stage has; a call of it raises an error that says so."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(_is_elsewhere(self.name))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(_is_elsewhere(f"{self.__dict__.get('name')}.{name}")) from None


class StageLayers(torch.nn.ModuleList):
    """Some layers of a model, under the numbers that they have in the whole one. The whole model's own forward takes a slice of
    its layers, which is refused: where the last stage has tied embeddings too, it would run."""

    def __init__(self, layers: torch.nn.ModuleList, kept: Sequence[int]) -> None:
        super().__init__()
        for number in kept:
            self.add_module(str(number), layers[number])

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            raise RuntimeError(_is_elsewhere("a part of the layers"))
        if str(number) not in self._modules:
            raise IndexError(_is_elsewhere(f"layer {number}"))
        return self._modules[str(number)]


class SavedWhole:
    """Stands in for a model's save_pretrained, which would save a stage as if it were the model."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *args: Any, state_dict: Any = None, **kwargs: Any) -> Any:
        if state_dict is None:
            raise RuntimeError(
                "save_pretrained of one stage of a pipeline would save a part as if it were the model. Valid: "
                "trainer.save_model(folder), on all processes"
            )
        return type(self._model).save_pretrained(self._model, *args, state_dict=state_dict, **kwargs)


@dataclass(frozen=True)
class Cut:
    """The part of a model that this process holds, and what other processes hold."""

    stages: tuple[range, ...]
    """layers of every stage, this process's and the others'"""
    own: tuple[int, ...]
    """this process's stages, ascending"""
    elsewhere: dict[str, torch.Tensor]
    """names in the whole model -> tensors without memory (meta), of what other processes hold"""
    tied: tuple[str, ...]
    """names inside the embeddings of the parameters that the output head has too, which the first stage and the last both hold:
    the weight, or of adapters' the copies that are trained"""
    adapted: Any = None
    """with adapters, the whole model without memory (meta): PEFT saves what it finds in a model's modules"""


@dataclass(frozen=True)
class StageInput:
    """Inputs of a stage, beside the layout. One of the first two."""

    stage: int
    input_ids: torch.Tensor | None = None
    """int64 [1, T], in the first stage"""
    hidden: torch.Tensor | None = None
    """[1, T, H], in the others"""
    router: bool = False
    """whether the routers' logits are wanted"""
    waits: bool = False
    """whether other forwards of the last stage run before this one's backward (models/loss/cross_entropy.py)"""


@dataclass(frozen=True)
class StageOutput:
    """Outputs of a stage."""

    hidden: torch.Tensor | None
    """[1, T, H]; None in the last stage"""
    loss: torch.Tensor | None
    """scalar: in the last stage, the sum of the cross-entropies of this rank's labels over num_items_in_batch"""
    router_logits: tuple[torch.Tensor, ...] = ()
    """one [T, E] per layer"""


def cut_of(model: Any) -> Cut | None:
    """Return how a model was cut into stages, also inside PEFT's wrappers; None for a whole model."""
    return getattr(language_model_of(model), "longctx_cut", None)


def whole_parameters(model: Any) -> dict[str, torch.Tensor]:
    """Name -> parameter of the whole model: this process's, and without memory (meta) those of other stages. Of a cut model in
    the same order on all stages."""
    own, cut = dict(model.named_parameters()), cut_of(model)
    if cut is None:
        return own
    return dict(
        sorted(
            (own | {name: tensor for name, tensor in cut.elsewhere.items() if isinstance(tensor, Parameter)}).items()
        )
    )


def weights_dtype(weights: Iterable[torch.Tensor]) -> torch.dtype:
    """Return the dtype in which a model of these weights computes without autocast: that of the first which is not packed, as
    those of 4 bits and of 8 are."""
    first: torch.dtype | None = None
    for weight in weights:
        first = first or weight.dtype
        if weight.is_floating_point() and weight.element_size() > 1:
            return weight.dtype
    assert first is not None, "a model without weights"
    return first


def residual_dtype(model: Any) -> torch.dtype:
    """Return the dtype of hidden states between layers, the same on all stages: what the embeddings give, and layers add to
    it."""
    added = [
        parameter.dtype
        for name, parameter in whole_parameters(model).items()
        if re.search(r"\.(embed_tokens|o_proj)\.", name) and ".lora_" not in name and parameter.is_floating_point()
    ]
    return functools.reduce(torch.promote_types, added)


def cut_model(model: Any, stages: Sequence[range], own: Sequence[int]) -> None:
    """Takes away all but some stages of a patched model, in place.

    Args:
        model: a patched Llama, Mistral or Mixtral, or a PEFT wrapper around one; whole.
        stages: layers of every stage, in order.
        own: stages to keep, ascending.

    Raises:
        ValueError: another family of models.
    """
    bare, last = language_model_of(model), len(stages) - 1
    base = _known(bare)
    whole = dict(model.state_dict(keep_vars=True))
    adapted = _copy_without_memory(model) if model is not bare else None
    of_head = {id(parameter) for parameter in bare.get_output_embeddings().parameters()}
    embeddings = dict(bare.get_input_embeddings().named_parameters())
    tied = tuple(name for name, parameter in embeddings.items() if id(parameter) in of_head)
    unused = [] if 0 in own else [parameter for name, parameter in embeddings.items() if name not in tied]
    base.layers = StageLayers(base.layers, [number for stage in own for number in stages[stage]])
    if not (0 in own or (tied and last in own)):
        base.embed_tokens = Elsewhere("embed_tokens")
    if last not in own:
        base.norm, bare.lm_head = Elsewhere("norm"), Elsewhere("lm_head")
    elsewhere = _elsewhere(model, whole, unused)
    for parameter in unused:  # of adapters on tied embeddings, which the first stage trains
        parameter.requires_grad_(False)
    _become(model, Cut(tuple(stages), tuple(own), elsewhere, tied, adapted))


def loaded_stages(model: Any) -> int:
    """Count the pipeline stages that transformers has cut a model into as it was loaded (DistributedConfig's pp_size)."""
    return getattr(getattr(getattr(model, "config", None), "distributed_config", None), "pp_size", None) or 1


def loads_stages() -> bool:
    """Tell whether this version of transformers loads stages of any number of ranks, as 5.19 and later do."""
    return "tp_plan" in inspect.signature(mixin.apply_tensor_parallelism).parameters


def refuse_loading_stages(settings: Any) -> None:
    """Raise ValueError for a DistributedConfig, or its fields, with stages that this version of transformers cannot load."""
    stages = (settings.get("pp_size") if isinstance(settings, Mapping) else getattr(settings, "pp_size", None)) or 1
    if stages > 1 and not loads_stages():
        raise ValueError(
            f"distributed_config: pp_size={stages} with transformers {version('transformers')}, which loads stages of one "
            "process alone, and whose Trainer does not know of them; valid: transformers>=5.19, or a whole model with "
            f"pipeline_stages={stages}, which is cut when training begins"
        )


@contextlib.contextmanager
def loading_stages() -> Iterator[bool]:
    """Mend three limits of transformers while it loads a model in stages (DistributedConfig's pp_size), each process its part:

    - stages may have more ranks than share heads: the mesh is [pp_size, HDP ranks, 1, tp_size] (before 5.23 without the 1).
      transformers has no name for ranks that hold the same and knows one of them only;
    - its stages have equally many layers, whatever the output head costs; here, as planner/stages/stage_layers.py spreads them;
    - its tensor-parallel plan names the layers of other stages too, which are gone by then (5.23: KeyError). Here it names
      those that are there.

    Yields whether this version of transformers loads stages. Inside, a model that cannot be cut into them, or processes that they
    do not divide, are a ValueError.
    """
    if not loads_stages():
        yield False
        return
    names = ("initialize_distributed_mesh", "apply_pipeline_parallelism", "apply_tensor_parallelism")
    make_mesh, cut, apply = (getattr(mixin, name) for name in names)

    def make_mesh_of_stages(settings: Any) -> Any:
        if settings.pp_size == 1:
            return make_mesh(settings)
        # transformers makes the process group where a launcher has started these processes and nobody has made one yet
        processes = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
        share = settings.pp_size * settings.tp_size
        if processes % share:
            valid = [divisor for divisor in range(1, processes + 1) if processes % divisor == 0]
            raise ValueError(
                f"{settings.pp_size} pipeline stages of {settings.tp_size} tensor-parallel ranks: stages * ranks must divide the "
                f"{processes} processes ({processes} = {processes // share} * {share} + {processes % share}); valid: {valid}"
            )
        # before 5.23 there is one name for all that are neither stages nor share heads
        replicas = "dp_replicate_size" if hasattr(settings, "dp_replicate_size") else "fsdp_size"
        own = getattr(settings, replicas)
        setattr(settings, replicas, processes // share)
        try:
            return make_mesh(settings)
        finally:
            setattr(settings, replicas, own)

    def cut_by_cost(model: Any, mesh: Any) -> torch.nn.Module:
        from transformers.distributed import pipeline_parallel

        _known(model)
        by: Any = pipeline_parallel.PipelineStage
        stages = stage_layers(model.config, mesh.size(), TYPICAL_LENGTH)

        def layers_of(_: Any, stage: int, layers: int) -> tuple[int, int]:
            return stages[stage].start, stages[stage].stop

        evenly, by.layer_range_for_rank = by.layer_range_for_rank, layers_of
        try:
            model = cut(model, mesh)
        finally:
            by.layer_range_for_rank = evenly
        model._pp_stage.layer_range_for_rank = functools.partial(layers_of, model._pp_stage)
        return model

    def apply_to_own(model: torch.nn.Module, mesh: Any, plan: Mapping[str, str]) -> torch.nn.Module:
        own_names = {name for name, module in model.named_modules() if list(module.parameters())}
        own_names |= {name for name, _ in model.named_parameters()}
        return apply(model, mesh, {name: how for name, how in plan.items() if name in own_names})

    for name, ours in zip(names, (make_mesh_of_stages, cut_by_cost, apply_to_own)):
        setattr(mixin, name, ours)
    try:
        yield True
    finally:
        for name, theirs in zip(names, (make_mesh, cut, apply)):
            setattr(mixin, name, theirs)


def adopt_stages(model: Any) -> None:
    """Makes a model that transformers has cut as it was loaded (DistributedConfig's pp_size: each process has read its own
    stage alone, in parts where tp_size says so) one of ours, in place. Again: does nothing.

    Raises:
        ValueError: another family of models.
    """
    if cut_of(model) is not None:
        return
    base = _known(model)
    by = model._pp_stage
    layers = len(base.layers)
    stages = [range(*by.layer_range_for_rank(stage, layers)) for stage in range(by.pp_size)]
    base.layers = StageLayers(base.layers, stages[by.pp_rank])
    for parent, name in ((base, "embed_tokens"), (base, "norm"), (model, "lm_head")):
        if not list(getattr(parent, name).parameters()):
            setattr(parent, name, Elsewhere(name))
    with torch.device("meta"):
        config = copy.deepcopy(model.config)
        config.distributed_config = None
        whole = type(model)(config).to(model.dtype).state_dict(keep_vars=True)
    tied = ("weight",) if model.config.tie_word_embeddings else ()
    _become(model, Cut(tuple(stages), (by.pp_rank,), _elsewhere(model, whole), tied))
    if (model.tp_size or 1) == 1:  # no weight is in parts: Trainer, which would not shard it, need not know
        model._is_distributed_loading_by_transformers = False


def _known(bare: Any) -> Any:
    """The base model of one that can be cut into stages. Raises ValueError for another family."""
    # Stages run layers themselves: a subclass with a forward of its own may scale embeddings, or do what they would not.
    if type(bare.base_model).forward not in [known.forward for known in CUT_MODELS]:
        known = ", ".join(family.__name__.removesuffix("Model") for family in CUT_MODELS)
        raise ValueError(
            f"pipeline_stages of a {type(bare.base_model).__name__}: stages are known of {known}. Valid: pipeline_stages=1"
        )
    return bare.base_model


def _become(model: Any, cut: Cut) -> None:
    language_model_of(model).longctx_cut = cut
    model.save_pretrained = SavedWhole(model)
    install_forward(language_model_of(model), stage_forward)


def _elsewhere(
    model: Any, whole: Mapping[str, torch.Tensor], unused: Sequence[torch.Tensor] = ()
) -> dict[str, torch.Tensor]:
    """Return, of the tensors of the whole model, those that this process has not, or does not use, without second names of tied
    ones."""
    without = {id(tensor) for tensor in unused}
    own_names = {name for name, tensor in model.state_dict(keep_vars=True).items() if id(tensor) not in without}
    first: dict[int, str] = {}
    return {
        name: _without_memory(tensor)
        for name, tensor in whole.items()
        if first.setdefault(id(tensor), name) == name and name not in own_names
    }


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return Parameter(meta, tensor.requires_grad) if isinstance(tensor, Parameter) else meta


def _copy_without_memory(model: Any) -> Any:
    memo = {id(tensor): _without_memory(tensor) for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, memo)


def stage_forward(
    model: Any,
    *,
    stage: StageInput,
    layout: Layout,
    exchange: Exchange | None = None,
    shift_labels: torch.Tensor | None = None,
    label_rows: torch.Tensor | None = None,
    num_items_in_batch: int | None = None,
    doc_lengths: Mapping[int, int] | None = None,
    loss_by_length: LossByLength | None = None,
    token_metrics: TokenMetrics | None = None,
    **kwargs: Any,
) -> StageOutput:
    """One stage of a cut model over a layout; other keywords reach the attention layers.

    Args:
        stage: which one, and what it computes with.
        shift_labels: int64 [1, T], in the last stage.
        label_rows: int64 [n]: the rows of them that count, where the caller knows them.
        num_items_in_batch: label tokens of the whole optimizer step, over all ranks and micro-batches.
        doc_lengths: document -> tokens, where the layout is a chunk of it.
        loss_by_length, token_metrics: take in every label token's loss, and its logits.
    """
    base, cut = model.base_model, model.longctx_cut
    kwargs = {name: value for name, value in kwargs.items() if value is not None}  # PEFT names what nobody gave
    rank = own_rank(layout, exchange)
    hidden = base.embed_tokens(stage.input_ids) if stage.hidden is None else stage.hidden
    position_ids = on_device(layout.positions(rank), hidden.device).unsqueeze(0)
    rotation = base.rotary_emb(hidden, position_ids=position_ids)
    own_layers = dict(base.layers.named_children())
    layers = [own_layers[str(number)] for number in cut.stages[stage.stage]]
    router_logits: list[torch.Tensor] = []
    routers = [part for layer in layers for part in layer.modules() if isinstance(part, MixtralTopKRouter)]
    hooks = [
        router.register_forward_hook(lambda _module, _inputs, output: router_logits.append(output[0]))
        for router in (routers if stage.router else ())
    ]
    try:
        for layer in layers:
            hidden = layer(
                hidden,
                attention_mask=None,
                position_ids=position_ids,
                position_embeddings=rotation,
                use_cache=False,
                layout=layout,
                exchange=exchange,
                **kwargs,
            )
    finally:
        for hook in hooks:
            hook.remove()
    if stage.stage < len(cut.stages) - 1:
        return StageOutput(hidden, None, tuple(router_logits))
    assert shift_labels is not None
    assert num_items_in_batch is not None
    observe = None if loss_by_length is None else loss_by_length.observer(layout, rank, doc_lengths)
    observe_logits = None if token_metrics is None else token_metrics.observe
    cross_entropy = loss_of_hidden(
        model,
        base.norm(hidden),
        shift_labels,
        label_rows=label_rows,
        observe=observe,
        observe_logits=observe_logits,
        waits=stage.waits,
    )
    return StageOutput(None, cross_entropy / num_items_in_batch, tuple(router_logits))


def refuse_other_cut(model: Any, stages: int, own: Sequence[int]) -> None:
    """Raise ValueError for a model of which this process holds other stages, of as many or another number."""
    cut = cut_of(model)
    if cut is not None and (len(cut.stages), list(cut.own)) != (stages, list(own)):
        raise ValueError(
            f"the model was cut into {len(cut.stages)} stages before, of which this process has {list(cut.own)}; this run has "
            f"{stages} and would have {list(own)} here. Valid: the stages that it was cut into, or a whole model loaded from a "
            "checkpoint"
        )
