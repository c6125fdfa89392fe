"""A model of which this process holds some stages: consecutive decoder layers, the embeddings with the first, the last norm and
the output head with the last.

    stage 0   embeddings, layers 0-8   |   stage 1   layers 9-17   |   stage 2   layers 18-25, norm, head

`cut_model` takes away what lies elsewhere. What stays keeps its name (model.layers.18...), so that checkpoints and
optimizers of all processes together are those of the whole model. Tied embeddings lie on the first stage and on the last,
where their gradients are added up.

One stage runs by `model(layout=..., stage=StageInput(...))`: the model object stays what is called, so that hooks (FSDP2,
autocast, adapters) run. Nothing is sent between ranks here. Shapes: T tokens of this rank, H hidden size, E experts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Parameter
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.mistral.modeling_mistral import MistralModel
from transformers.models.mixtral.modeling_mixtral import MixtralModel, MixtralTopKRouter

from hf_longctx.attention.exchange import Exchange, own_rank
from hf_longctx.layout import Layout
from hf_longctx.models.head import install_forward
from hf_longctx.models.loss_by_length import LossByLength

CUT_MODELS = (LlamaModel, MistralModel, MixtralModel)


class Elsewhere(torch.nn.Module):
    """In place of a module that another stage has, and what a call of the whole model meets."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{self.name} lies on another stage of the pipeline: this process has a part of the model. Valid: training and "
            "evaluation through the trainer, or a whole model loaded from a checkpoint"
        )


class StageLayers(torch.nn.ModuleList):
    """Some layers of a model, under the numbers that they have in the whole one."""

    def __init__(self, layers: torch.nn.ModuleList, kept: Sequence[int]) -> None:
        super().__init__()
        for number in kept:
            self.add_module(str(number), layers[number])


@dataclass(frozen=True)
class Cut:
    """What this process holds of a model, and what there is besides."""

    stages: tuple[range, ...]
    """layers of every stage, this process's and the others'"""
    own: tuple[int, ...]
    """this process's stages, ascending"""
    elsewhere: dict[str, torch.Tensor]
    """names in the whole model -> tensors without memory (meta), of what other processes hold"""
    tied: bool
    """whether the output head is the embeddings' weight, which the first stage and the last both hold"""


@dataclass(frozen=True)
class StageInput:
    """What a stage computes with, beside the layout. One of the first two."""

    stage: int
    input_ids: torch.Tensor | None = None
    """int64 [1, T], in the first stage"""
    hidden: torch.Tensor | None = None
    """[1, T, H], in the others"""
    router: bool = False
    """whether the routers' logits are wanted"""


@dataclass(frozen=True)
class StageOutput:
    """What comes out."""

    hidden: torch.Tensor | None
    """[1, T, H]; None in the last stage"""
    loss: torch.Tensor | None
    """scalar: in the last stage, the sum of the cross-entropies of this rank's labels over num_items_in_batch"""
    router_logits: tuple[torch.Tensor, ...] = ()
    """one [T, E] per layer"""


def cut_of(model: Any) -> Cut | None:
    """None for a whole model. PEFT wrappers are looked through."""
    return getattr(_bare(model), "longctx_cut", None)


def cut_model(model: Any, stages: Sequence[range], own: Sequence[int]) -> None:
    """Takes away all but some stages of a patched model, in place.

    Args:
        model: a patched Llama, Mistral or Mixtral, or a PEFT wrapper around one; whole.
        stages: layers of every stage, in order.
        own: stages to keep, ascending.

    Raises:
        ValueError: another family of models, or a wrapper that looks inside the embeddings or the output head.
    """
    bare = _bare(model)
    base: Any = bare.base_model
    last = len(stages) - 1
    if not isinstance(base, CUT_MODELS):
        known = ", ".join(each.__name__.removesuffix("Model") for each in CUT_MODELS)
        raise ValueError(
            f"pipeline_stages={len(stages)} of a {type(base).__name__}: stages are known of {known}. Valid: pipeline_stages=1"
        )
    whole = dict(model.state_dict(keep_vars=True))
    trained = {id(parameter) for parameter in model.parameters()}
    tied = bare.get_output_embeddings().weight is bare.get_input_embeddings().weight
    kept = [number for stage in own for number in stages[stage]]
    base.layers = StageLayers(base.layers, kept)
    if not (0 in own or (tied and last in own)):
        base.embed_tokens = Elsewhere("embed_tokens")
    if last not in own:
        base.norm = Elsewhere("norm")
        bare.lm_head = Elsewhere("lm_head")
    held = model.state_dict(keep_vars=True).keys()
    elsewhere = {
        name: _without_memory(tensor, id(tensor) in trained) for name, tensor in whole.items() if name not in held
    }
    if tied and "lm_head.weight" not in held:  # the same tensor as the embeddings, under a second name
        elsewhere = {name: each for name, each in elsewhere.items() if not name.endswith("lm_head.weight")}
    bare.longctx_cut = Cut(tuple(stages), tuple(own), elsewhere, tied)
    install_forward(bare, stage_forward)


def _without_memory(tensor: torch.Tensor, parameter: bool) -> torch.Tensor:
    meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return Parameter(meta, tensor.requires_grad) if parameter else meta


def _bare(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def stage_forward(
    model: Any,
    *,
    stage: StageInput,
    layout: Layout,
    exchange: Exchange | None = None,
    shift_labels: torch.Tensor | None = None,
    num_items_in_batch: int | None = None,
    doc_lengths: Mapping[int, int] | None = None,
    loss_by_length: LossByLength | None = None,
    **kwargs: Any,
) -> StageOutput:
    """One stage of a cut model over a layout; other keywords reach the attention layers.

    Args:
        stage: which one, and what it computes with.
        shift_labels: int64 [1, T], in the last stage.
        num_items_in_batch: label tokens of the whole optimizer step, over all ranks and micro-batches.
        doc_lengths: document -> tokens, where the layout is a chunk of it.
        loss_by_length: takes in every label token's loss.
    """
    base, cut = model.base_model, model.longctx_cut
    rank = own_rank(layout, exchange)
    hidden = base.embed_tokens(stage.input_ids) if stage.hidden is None else stage.hidden
    position_ids = torch.from_numpy(layout.positions(rank)).to(hidden.device).unsqueeze(0)
    rotation = base.rotary_emb(hidden, position_ids=position_ids)
    held = dict(base.layers.named_children())
    layers = [held[str(number)] for number in cut.stages[stage.stage]]
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
    cross_entropy = model.get_output_embeddings()(
        base.norm(hidden), labels=shift_labels, chunk_tokens=model.longctx_loss_chunk_tokens, observe=observe
    )
    return StageOutput(None, cross_entropy / num_items_in_batch, tuple(router_logits))
