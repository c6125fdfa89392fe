"""Adapters of PEFT that parts of weights, or stages, cannot hold: a part of the list of checks in refusals.py.

Nothing is loaded, and nothing is sent between ranks.
"""

from collections.abc import Callable, Iterator

from hf_longctx.models.adapters.peft_adapters import (
    adapters_of_two,
    copies_of_tied,
    on_whole_weights,
    shared_among_layers,
)
from hf_longctx.parallel.sharding import tensor_parallel
from hf_longctx.settings.fields import Problem
from hf_longctx.settings.longctx import LongContextPlugin
from hf_longctx.training.request import Request


def _tied_copies(request: Request, plugin: LongContextPlugin) -> Iterator[Problem]:
    sharding = request.sharding or plugin.sharding
    if sharding in ("auto", "ddp"):
        return
    if copied := copies_of_tied(request.model):
        yield (
            "sharding",
            f"{sharding!r} with modules_to_save={copied}: embeddings and output head share a weight, which FSDP2 cannot hold "
            "where a copy of it that is trained is not shared alike. "
            "Valid: LoraConfig(..., ensure_weight_tying=True), or sharding='ddp'",
        )


def _shared_adapters(request: Request, plugin: LongContextPlugin) -> Iterator[Problem]:
    sharding, stages = request.sharding or plugin.sharding, plugin.pipeline_stages
    in_parts = sharding not in ("auto", "ddp") and (request.processes or 1) > 1
    if not (in_parts or stages > 1) or not (shared := shared_among_layers(request.model)):
        return
    if in_parts:
        yield (
            "sharding",
            f"{sharding!r} with an adapter of which layers share {shared[0]}: FSDP2 holds each layer's weights by themselves. "
            "Valid: ddp, or methods whose layers have weights of their own, for instance LoRA",
        )
    if stages > 1:
        yield (
            "pipeline_stages",
            f"{stages} with an adapter of which layers share {shared[0]}: each stage would train a copy of its own. Valid: 1, or "
            "methods whose layers have weights of their own, for instance LoRA",
        )


def _adapters_of_two(request: Request, plugin: LongContextPlugin) -> Iterator[Problem]:
    sharding, stages = request.sharding or plugin.sharding, plugin.pipeline_stages
    if (sharding in ("auto", "ddp") and stages == 1) or not (shared := adapters_of_two(request.model)):
        return
    setting, value = ("pipeline_stages", f"{stages}") if stages > 1 else ("sharding", f"{sharding!r}")
    yield (
        setting,
        f"{value} with LoRA on embeddings and ensure_weight_tying: {shared[0]} is a second parameter of the memory of another, "
        "which neither FSDP2 nor a stage can hold. Valid: sharding='ddp' in one stage, ensure_weight_tying=False, or embeddings "
        "left out of target_modules",
    )


def _split_heads(request: Request, plugin: LongContextPlugin) -> Iterator[Problem]:
    degree = tensor_parallel(request.model)
    if degree > 1 and getattr(request.model, "peft_config", None):
        yield (
            "tp_size",
            f"{degree} with adapters: PEFT spreads some of an adapter's weights over the ranks that share heads, and the others "
            "would get gradients of each rank's heads alone. Valid: DistributedConfig(fsdp_size=...) without tp_size, or a "
            "whole model, which longctx.sharding='zero3' (LongContextPlugin's) spreads",
        )


def _whole_weights(request: Request, plugin: LongContextPlugin) -> Iterator[Problem]:
    for config in (getattr(request.model, "peft_config", None) or {}).values():
        for reason in on_whole_weights(request.model, vars(config)):
            yield "fsdp_size", reason


OF_ADAPTERS: tuple[Callable[[Request, LongContextPlugin], Iterator[Problem]], ...] = (
    _tied_copies,
    _shared_adapters,
    _adapters_of_two,
    _split_heads,
    _whole_weights,
)
