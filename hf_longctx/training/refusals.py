"""Settings that a run cannot have: one list of checks for `hf-longctx config`, `train --dry-run` and the trainer itself.

A check looks at a Request and yields a problem for each setting that cannot be honoured: the setting, and the rule, which
begins with the value and says what would be valid. What is not known yet is None (a file names no processes and has no
model), and checks that need it pass until it is:

    config     arguments as the file states them
    dry run    and the number of processes, the model without weights, its sharding
    trainer    and the device, the model itself

Documents are not looked at here: what makes a row unfit is checked where rows are read (data/), and of saved ones the names
of columns with the configuration. Nothing is loaded, and nothing is sent between ranks.
"""

import math
from collections.abc import Callable, Iterator
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedModel, TrainingArguments
from transformers.integrations import integration_utils
from transformers.trainer_utils import HubStrategy

from hf_longctx.attention.kernels import KERNELS, AttentionCall
from hf_longctx.counting.config_fields import field_values
from hf_longctx.models.general import layers_drawn
from hf_longctx.models.stages import loaded_stages
from hf_longctx.parallel.sharding import expert_parallel, is_sharded, tensor_parallel
from hf_longctx.parallel.world import broken_rules
from hf_longctx.settings.fields import Problem
from hf_longctx.settings.longctx import LongContextPlugin
from hf_longctx.training.memory.capacity import UNKNOWN_MEMORY
from hf_longctx.training.refused_adapters import OF_ADAPTERS
from hf_longctx.training.refused_optimizers import optimizer_of_arguments, optimizer_of_plugin
from hf_longctx.training.request import Request
from hf_longctx.training.run_state import HALF

UNSUPPORTED = {
    "label_smoothing_factor": "is not supported by the chunked loss; set it to 0",
    "torch_compile": "recompiles for every layout (measured: one graph per micro-batch); set it to False, or "
    "use longctx.compile_layers (LongContextPlugin's), which compiles what does not depend on the layout",
    "torch_compile_backend": "turns torch_compile on, which recompiles for every layout; leave it out",
    "torch_compile_mode": "turns torch_compile on, which recompiles for every layout; leave it out",
    "deepspeed": "shards and reduces gradients in its own order; remove it, and use longctx.sharding (LongContextPlugin's)",
    "auto_find_batch_size": "has no batch size to find: the tokens per rank are the plugin's capacity; set it to False and "
    "lower capacity",
    "dataloader_drop_last": "would lose documents; the last batch is always kept: set it to False",
    "bf16_full_eval": "casts weights that training still needs; use bf16=True (autocast)",
    "fp16_full_eval": "casts weights that training still needs; use bf16=True or fp16=True (autocast)",
    "parallelism_config": "is not supported: accelerate's own cp_size and sp_size replace this plugin; remove it",
    "predict_with_generate": "generates text in evaluation, which gives losses here; set it to False, and generate with a plain "
    "model over the checkpoint, or with `hf-longctx evaluate`",
    "enable_jit_checkpoint": "saves on each rank by itself, as soon as SIGTERM has reached that one; leave it out: all ranks "
    "save together at the next step, and leave",
    "use_liger_kernel": "replaces the forward of the patched model, and its loss, by Liger's; set it to False: "
    "longctx.liger_kernels (LongContextPlugin's, on by default) uses the package's kernels for norms, rotation and MLP",
}
"""Arguments that are refused unless they are false, zero or None."""


def problems(request: Request) -> list[Problem]:
    """All that cannot be honoured, as far as it is known."""
    refusals = [problem for check in OF_ARGUMENTS for problem in check(request)]
    if request.plugin is not None:
        refusals += [problem for check in OF_PLUGIN for problem in check(request, request.plugin)]
    return refusals


def _unsupported(request: Request) -> Iterator[Problem]:
    for name, rule in UNSUPPORTED.items():
        if value := getattr(request.args, name, None):
            yield name, f"{value!r} {rule}"


def _data_parallel(request: Request) -> Iterator[Problem]:
    if (devices := getattr(request.args, "n_gpu", 1)) > 1:
        yield (
            "n_gpu",
            f"{devices} GPUs in one process would use DataParallel: start one process per GPU with `accelerate launch`",
        )


def _precision(request: Request) -> Iterator[Problem]:
    bf16 = request.args.bf16
    if isinstance(request.args, TrainingArguments) and not isinstance(bf16, bool):
        yield "bf16", f"{bf16!r} is for YAML files, where `hf-longctx train` decides; valid: True or False"
    mixed = getattr(request.args, "mixed_precision", None)
    for name in HALF:
        if isinstance(request.args, TrainingArguments) and getattr(request.args, name) is True and mixed != name:
            yield (
                name,
                f"True was set after these arguments were made, which computes in mixed_precision={mixed!r} all the same; valid: "
                f"TrainingArguments({name}=True)",
            )
    double = isinstance(request.model, torch.nn.Module) and torch.float64 in {
        w.dtype for w in request.model.parameters()
    }
    if mixed in HALF and double:
        yield (
            mixed,
            "True, here or by the launcher: autocast leaves float64 weights as they are, and not what meets them; valid: weights "
            "in float32, or no autocast",
        )
    launched = mixed == "fp16"  # by its arguments, or by `accelerate launch`
    # In a pipeline it is refused whatever the device is.
    staged = request.plugin is not None and request.plugin.pipeline_stages > 1
    if request.on_cpu and not staged and (request.args.fp16 or launched):
        asked = "True" if request.args.fp16 else "False, and accelerate's mixed_precision='fp16'"
        yield (
            "fp16",
            f"{asked}: ranks compute on CPUs, where accelerate scales no gradients, and computes in float32 without a word; "
            "valid: bf16, or neither",
        )


def _clipping(request: Request) -> Iterator[Problem]:
    if request.args.max_grad_norm is None:
        yield "max_grad_norm", "None would end the first step in an error of Trainer's; valid: 0, which clips nothing"


def _fsdp(request: Request) -> Iterator[Problem]:
    args = request.args
    if args.fsdp and getattr(request.model, "is_distributed_loading_by_transformers", False):
        yield "fsdp", f"{args.fsdp!r} would shard the model again, which was sharded when it was loaded: remove it"
    settings = args.fsdp_config if args.fsdp and isinstance(args.fsdp_config, dict) else {}
    chosen = {name.removeprefix("fsdp_"): value for name, value in settings.items()}
    fsdp_version = (getattr(args, "fsdp_plugin_args", None) or {}).get("fsdp_version", chosen.get("version"))
    if str(fsdp_version) == "1":
        yield "fsdp_config.version", "1: FSDP1 hangs when ranks run different micro-batches; set it to 2 (the default)"
    if chosen.get("activation_checkpointing"):
        yield (
            "fsdp_config.activation_checkpointing",
            "True wraps layers, so that keep_attention would be ignored, and offload would undo it; take "
            "it out, and set gradient_checkpointing=True",
        )


CHECKPOINTING = ("gradient_checkpointing", "activation_checkpointing")
"""Names of one field of TrainingArguments: the newer, and the older."""


def _checkpoints(args: Any) -> bool:
    return any(getattr(args, name, None) for name in CHECKPOINTING)


def _keeps_attention(request: Request, plugin: LongContextPlugin) -> Iterator[Problem]:
    if plugin.keep_attention != "always" or _checkpoints(request.args):
        return
    modules = request.model.modules() if isinstance(request.model, torch.nn.Module) else ()
    if not any(getattr(module, "gradient_checkpointing", False) for module in modules):
        yield (
            "keep_attention",
            "'always' without activation checkpointing, which alone would compute attention again: all is kept anyway; valid: "
            "gradient_checkpointing=True, or keep_attention='auto'",
        )


def _checkpointing(request: Request) -> Iterator[Problem]:
    args = request.args
    checkpoints = _checkpoints(args)
    settings: Any = next(filter(None, (getattr(args, f"{name}_kwargs", None) for name in CHECKPOINTING)), {})
    if checkpoints and getattr(request.model, "supports_gradient_checkpointing", None) is False:
        yield (
            "gradient_checkpointing",
            f"True: {type(request.model).__name__} has no layers that transformers can compute again; valid: False",
        )
    if checkpoints and _is_reentrant(settings):
        yield (
            "gradient_checkpointing_kwargs",
            f"{settings} means use_reentrant=True, which runs backward inside backward; add 'use_reentrant': False",
        )
    if checkpoints and request.on_cpu and settings.get("offload"):
        yield (
            "gradient_checkpointing_kwargs",
            f"'offload': {settings['offload']} moves what layers keep from a GPU to pinned host memory, and "
            "ranks compute on CPUs; take it out",
        )


def _is_reentrant(checkpointing: Any) -> bool:
    """Tell whether these keywords make torch's checkpointing reentrant: transformers says no where nothing is left for torch,
    whose own default is yes."""
    for_torch = {name: value for name, value in checkpointing.items() if name not in ("every_n_layers", "offload")}
    return bool(for_torch and for_torch.get("use_reentrant", True) is not False)


def _sampling(request: Request) -> Iterator[Problem]:
    if (strategy := getattr(request.args, "train_sampling_strategy", "random")) != "random":
        yield (
            "train_sampling_strategy",
            f"{strategy!r}: steps are runs of a random permutation, and lengths are balanced inside a step; leave it at 'random'",
        )


def _accelerator(request: Request) -> Iterator[Problem]:
    chosen = request.args.accelerator_config

    def get(name: str) -> Any:
        return chosen.get(name) if isinstance(chosen, dict) else getattr(chosen, name, None)

    if (steps := (get("gradient_accumulation_kwargs") or {}).get("num_steps", 1)) != 1:
        yield (
            "accelerator_config.gradient_accumulation_kwargs.num_steps",
            f"{steps}: use gradient_accumulation_steps instead",
        )
    for name in ("split_batches", "dispatch_batches"):
        if get(name):
            yield (
                f"accelerator_config.{name}",
                "True: accelerate does not hand out documents here, steps are planned by their tokens; leave it out",
            )


def _hub_token(request: Request) -> Iterator[Problem]:
    args = request.args
    strategy = HubStrategy(args.hub_strategy)
    if args.push_to_hub and args.hub_token and strategy != HubStrategy.END:
        yield (
            "hub_token",
            f"(hidden) with hub_strategy={strategy.value!r}: Trainer uploads its arguments as a pickle with every "
            "checkpoint, the token in it readable by all who read the model. Log in with `hf auth login` or set HF_TOKEN, and "
            "leave hub_token out",
        )


def _reports(request: Request) -> Iterator[Problem]:
    asked = request.args.report_to
    for name in asked if isinstance(asked, list) else [asked]:
        called = {"azure_ml": "azureml", "comet_ml": "comet", "flyte": "flytekit"}.get(name, name)
        available = getattr(integration_utils, f"is_{called}_available", None)
        if available is not None and not available():
            yield "report_to", f"{name!r} is not installed here (package {called}); install it, or take it out: 'none'"


def _noise(request: Request) -> Iterator[Problem]:
    alpha = getattr(request.args, "neftune_noise_alpha", None)
    if alpha is not None and not 0 <= alpha < math.inf:
        yield "neftune_noise_alpha", f"{alpha} must be a finite size of noise, 0 or more"
    if alpha is not None and tensor_parallel(request.model) > 1:
        yield (
            "neftune_noise_alpha",
            f"{alpha} with tensor parallelism of {tensor_parallel(request.model)}: embeddings are in parts when noise would be "
            "added; leave it out, or load the model without tp_size",
        )


def _heads(request: Request) -> Iterator[Problem]:
    degree, kv_heads = tensor_parallel(request.model), _size(request.model, "num_key_value_heads")
    if kv_heads is not None and kv_heads % degree:
        yield (
            "tp_size",
            f"{degree}: tensor parallelism of {degree} splits {kv_heads} key-value heads unevenly ({kv_heads} = "
            f"{kv_heads // degree} * {degree} + {kv_heads % degree}): it must divide them",
        )


def _layers_drawn(request: Request, plugin: LongContextPlugin) -> Iterator[Problem]:
    """Check models that run documents alone; others are refused whatever the sharding is (models/general.py)."""
    sharding = request.sharding or plugin.sharding
    if (request.processes or 1) == 1 or sharding in ("auto", "ddp") or not hasattr(request.model, "config"):
        return
    for name, value in layers_drawn(request.model.config.get_text_config(decoder=True)):
        yield (
            "sharding",
            f"{sharding!r} and {name}={value}: each rank would draw the layers that it skips, and others would wait for its part "
            f"of their weights. Valid: ddp, or config.{name} = 0.0",
        )


def _size(model: Any, name: str) -> int | None:
    """A number of the language model's configuration, or the largest that divides those of all its layers; None: not known, or
    not one that it has."""
    config = getattr(model, "config", None)
    values = [] if config is None else field_values(config.get_text_config(), name)
    return math.gcd(*values) if values else None


def _ulysses(request: Request, plugin: LongContextPlugin) -> Iterator[Problem]:
    degree, ulysses = tensor_parallel(request.model), plugin.ulysses_degree
    heads = _size(request.model, "num_attention_heads")
    if heads is not None and heads // degree % ulysses:
        own = heads // degree
        valid = [number for number in range(1, own + 1) if own % number == 0]
        yield (
            "ulysses_degree",
            f"{ulysses} times tensor parallelism of {degree} must divide the {heads} attention heads: each rank has {own}, and "
            f"{own} = {own // ulysses} * {ulysses} + {own % ulysses}. Valid degrees: {valid}",
        )


def _on_cpus(request: Request, plugin: LongContextPlugin) -> Iterator[Problem]:
    if not request.on_cpu:
        return
    if plugin.capacity == 0 and plugin.profile is None:
        yield "capacity", UNKNOWN_MEMORY
    call = AttentionCall.of_heads(1, 1, 8, torch.float32, "cpu")
    on_cpus = ["auto", *(name for name, kernel in KERNELS.items() if kernel.unsupported(call) is None)]
    if plugin.kernel not in on_cpus:
        yield "kernel", f"{plugin.kernel!r} needs a GPU, and ranks compute on CPUs; valid: {', '.join(on_cpus)}"


def _loader(request: Request, plugin: LongContextPlugin) -> Iterator[Problem]:
    if plugin.loader == "ray" and find_spec("ray") is None:
        yield "loader", "'ray' needs the package ray: pip install 'hf_longctx[ray]'; valid without: 'local'"


def _plan_offload(request: Request, plugin: LongContextPlugin) -> Iterator[Problem]:
    if plugin.plan_offload and request.meets_in_rounds:
        yield (
            "plan_offload",
            f"True with sharding={request.sharding or plugin.sharding!r} and {expert_parallel(request.model)} "
            "expert-parallel ranks: steps that are planned in rounds leave what waits in host memory to activation_offload; "
            "valid: sharding ddp or zero1, without expert parallelism",
        )


def _arrangement(request: Request, plugin: LongContextPlugin) -> Iterator[Problem]:
    model, sharding = request.model, request.sharding or plugin.sharding
    degrees = plugin.pipeline_stages, tensor_parallel(model), expert_parallel(model)
    for setting, value, rule in broken_rules(request.processes, sharding, *degrees):
        yield setting, f"{value}: {rule}"
    shards = getattr(getattr(getattr(model, "config", None), "distributed_config", None), "fsdp_size", None) or 1
    if shards > 1 and not hasattr(PreTrainedModel, "is_distributed_loading_by_transformers"):
        yield (
            "sharding",
            f"{sharding}: the model was sharded when it was loaded (fsdp_size={shards}), which the Trainer of transformers "
            f"{version('transformers')} does not know of, and would do again; valid: transformers>=5.19, or a whole model",
        )


def _pipeline(request: Request, plugin: LongContextPlugin) -> Iterator[Problem]:
    args, model = request.args, request.model
    stages = plugin.pipeline_stages
    rules: list[str] = []
    if stages == 1:
        return
    if tensor_parallel(model) > 1 and (request.sharding or plugin.sharding) == "zero1":
        rules.append("sharding='zero1' with tensor parallelism; valid: sharding='ddp'")
    if model is not None:
        rules += _loaded_otherwise(model, stages, plugin.virtual_stages)
    if getattr(args, "mixed_precision", None) == "fp16" or args.fp16:  # the first also by `accelerate launch`
        rules.append("fp16 scales gradients by what one process sees; valid: bf16")
    if plugin.capacity == 0 and plugin.pipeline_schedule == "gpipe":
        rules.append(
            "capacity=0 counts what 1f1b holds at a time, and pipeline_schedule='gpipe' holds all micro-batches of a step; set "
            "it to the tokens per rank and micro-batch"
        )
    if plugin.plan_offload:
        rules.append("plan_offload=True; valid: activation_offload, a share of every micro-batch's activations")
    for rule in rules:
        yield "pipeline_stages", f"{stages}: {rule}"


def _loaded_otherwise(model: Any, stages: int, virtual: int) -> Iterator[str]:
    """Find what does not go with how the model was loaded."""
    loaded, degree = loaded_stages(model), tensor_parallel(model)
    if loaded > 1 and (loaded, 1) != (stages, virtual):
        yield (
            f"the model was loaded in pp_size={loaded} stages, one for each process; valid: pipeline_stages={loaded} with "
            "virtual_stages=1, or a model that is whole"
        )
    if loaded == 1 and degree > 1:
        yield (
            f"the model was loaded with tp_size={degree} for one stage; valid: DistributedConfig(pp_size={stages}, "
            f"tp_size={degree})"
        )
    if loaded > 1 and getattr(model, "peft_config", None):
        yield (
            f"adapters were added to a model that was loaded in pp_size={loaded} stages, each process to its own alone; valid: "
            "adapters on a model that is whole, which is cut afterwards"
        )
    if is_sharded(model):
        yield "the model was sharded over all processes when it was loaded; valid: one that is whole"


def _sft(request: Request) -> Iterator[Problem]:
    """Find what `trl.SFTConfig` sets beside TrainingArguments and `class X(LongContextMixin, SFTTrainer)` would do otherwise, or
    not at all. What is left prepares documents, and is taken as it is: columns, templates, which tokens have labels."""
    args = request.args
    for name in ("packing", "eval_packing"):
        if getattr(args, name, None):
            yield (
                name,
                "True joins documents into rows of max_length before they are planned; set it to False: every micro-batch is "
                "packed here, and no document sees another",
            )
    if (length := getattr(args, "max_length", None)) is not None:
        yield (
            "max_length",
            f"{length} cuts documents before they are planned, uncounted (1024 is SFTConfig's default); set it to None. To "
            f"cut: LongContextPlugin(long_documents='truncate', longest_document={length})",
        )
    if getattr(args, "loss_type", None) == "dft":
        yield "loss_type", "'dft' is another loss than the token-level cross-entropy of the step; valid: 'nll'"
    if getattr(args, "activation_offloading", False):
        yield (
            "activation_offloading",
            "True wraps a training step that is not run; LongContextPlugin(activation_offload=1.0) does it",
        )


OF_ARGUMENTS: tuple[Callable[[Request], Iterator[Problem]], ...] = (
    _data_parallel,
    _unsupported,
    _precision,
    _clipping,
    _fsdp,
    _checkpointing,
    optimizer_of_arguments,
    _sampling,
    _accelerator,
    _hub_token,
    _reports,
    _noise,
    _heads,
    _sft,
)
OF_PLUGIN: tuple[Callable[[Request, LongContextPlugin], Iterator[Problem]], ...] = (
    _ulysses,
    _on_cpus,
    optimizer_of_plugin,
    _loader,
    _plan_offload,
    _keeps_attention,
    _arrangement,
    _layers_drawn,
    *OF_ADAPTERS,
    _pipeline,
)
