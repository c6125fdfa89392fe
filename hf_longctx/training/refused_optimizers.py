"""Optimizers that a run cannot have, and what Muon and LoRA+ need: a part of the list of checks in refusals.py.

Nothing is loaded, and nothing is sent between ranks.
"""

import os
from collections.abc import Iterator

from transformers import Trainer
from transformers.trainer_utils import SaveStrategy
from transformers.training_args import OptimizerNames

from hf_longctx.parallel.sharding import expert_parallel, is_sharded
from hf_longctx.settings.fields import Problem
from hf_longctx.settings.longctx import LongContextPlugin
from hf_longctx.settings.training import MUON
from hf_longctx.training.muon import muon_settings
from hf_longctx.training.request import Request

UPDATING_IN_BACKWARD = tuple(name for name in OptimizerNames if name.endswith("_layerwise") or name.endswith("lomo"))

QUANTISED = (OptimizerNames.ADAMW_TORCH_4BIT, OptimizerNames.ADAMW_TORCH_8BIT)
"""Optimizers of torchao, with their own classes of tensors."""


def optimizer_of_arguments(request: Request) -> Iterator[Problem]:
    """Check the optimizer by itself: its name, its package, and whether it steps whole weights."""
    args = request.args
    name = args.optim
    if name in UPDATING_IN_BACKWARD:
        yield (
            "optim",
            f"{name.value!r} changes weights during backward, before other micro-batches and ranks have added their gradients; "
            "use another one, for instance 'adamw_torch'",
        )
        return
    if name == OptimizerNames.ADAFACTOR and _shards(request):
        yield (
            "optim",
            "'adafactor' takes means of whole rows, and sharding leaves each rank a part of a weight: use 'adamw_torch', or "
            "sharding='ddp' without FSDP",
        )
    if name == OptimizerNames.ADAGRAD and _shards(request):
        yield (
            "optim",
            "'adagrad' makes the state of whole weights before they are sharded, and finds none of the parts: use 'adamw_torch', "
            "or sharding='ddp' without FSDP",
        )
    if name == MUON:
        try:
            muon_settings(args.optim_args)
        except ValueError as error:
            yield "optim_args", str(error)
        return
    if name in QUANTISED and args.save_strategy != SaveStrategy.NO and not args.save_only_model:
        yield (
            "optim",
            f"{name.value!r} keeps its state in quantised tensors of a class of its own, which checkpoints do not hold; valid: "
            "save_only_model=True, save_strategy='no', or for instance 'adamw_torch'",
        )
        return
    if args.optim_args and (wrong := [pair for pair in args.optim_args.split(",") if pair.count("=") != 1]):
        yield "optim_args", f"{args.optim_args!r} holds {wrong[0]!r}: it must be pairs, as in 'alpha=0.9,momentum=0.5'"
        return
    try:
        Trainer.get_optimizer_cls_and_kwargs(args)  # without the model: some walk through all its modules
    except (ImportError, ValueError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, ImportError) or "install" in reason or "import" in reason:
            yield "optim", f"{name.value!r} is not installed here ({reason}); valid without: for instance 'adamw_torch'"


def _shards(request: Request) -> bool:
    """Tell whether ranks will hold parts of weights, by our setting, Trainer's, accelerate's, or as the model was loaded."""
    launched = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    setting = request.plugin.sharding if request.plugin is not None else "auto"
    asked = setting in ("zero1", "zero2", "zero3") or bool(request.args.fsdp) or launched
    asked = asked or getattr(request.args, "fsdp_plugin_args", None) is not None
    return is_sharded(request.model) or ((request.processes or 1) > 1 and asked)


def optimizer_of_plugin(request: Request, plugin: LongContextPlugin) -> Iterator[Problem]:
    """Check what Muon and LoRA+ need."""
    args, model, ratio = request.args, request.model, plugin.loraplus_lr_ratio
    if args.optim == MUON and plugin.host_offload and not request.on_cpu:
        yield (
            "host_offload",
            "True with optim='muon', which gathers matrices on devices, and they would wait in host memory; valid: False, or "
            "another optim",
        )
    half = args.fp16 or getattr(args, "mixed_precision", None) == "fp16"  # the second also by `accelerate launch`
    if half and plugin.host_offload and not request.on_cpu:
        yield (
            "host_offload",
            "True with fp16=True, whose scaler asks all GPUs for gradients that are not finite, and they lie in host memory; "
            "valid: bf16=True",
        )
    if ratio is None:
        return
    if model is not None and not any(
        adapter.peft_type == "LORA" for adapter in getattr(model, "peft_config", {}).values()
    ):
        yield "loraplus_lr_ratio", f"{ratio:g} needs LoRA adapters, and the model has none: add_lora, or leave it out"
    if expert_parallel(model) > 1:
        yield (
            "loraplus_lr_ratio",
            f"{ratio:g} with {expert_parallel(model)} expert-parallel ranks, whose weights lie on several meshes, which PEFT's "
            "groups mix; leave it out",
        )
    if any(part in args.optim for part in ("galore", "apollo")):
        yield (
            "loraplus_lr_ratio",
            f"{ratio:g} with optim={str(args.optim)!r}, which groups weights itself; valid: for instance 'adamw_torch'",
        )
