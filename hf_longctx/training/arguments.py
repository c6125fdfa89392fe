"""TrainingArguments and Trainer settings that Hybrid Data Parallelism changes, folds in, or refuses."""

import copy
import os
from typing import Any

from datasets import Dataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import HubStrategy
from transformers.training_args import OptimizerNames
from transformers.utils import logging

from hf_longctx.data.collator import LengthAwareCollator
from hf_longctx.models.stages import loaded_stages
from hf_longctx.training.plugin import LongContextPlugin
from hf_longctx.training.sharding import Sharding, fsdp_settings, is_sharded, planned_mode, tensor_parallel

logger = logging.get_logger(__name__)

UPDATING_IN_BACKWARD = tuple(each for each in OptimizerNames if each.endswith("_layerwise") or each.endswith("lomo"))


def adapted(args: TrainingArguments, model: Any, sharding: str) -> TrainingArguments:
    """A copy of `args` for one planned optimizer step per batch.

    Raises:
        ValueError: everything in `args` and `model` that cannot be honoured, at once, with the reason and what would
            be valid.
    """
    problems = []
    if args.n_gpu > 1:
        problems.append(
            f"{args.n_gpu} GPUs in one process would use DataParallel: start one process per GPU with `accelerate launch`"
        )
    if args.label_smoothing_factor:
        problems.append(
            f"label_smoothing_factor={args.label_smoothing_factor} is not supported by the chunked loss; set it to 0"
        )
    if args.torch_compile:
        problems.append(
            "torch_compile=True recompiles for every layout (measured: one graph per micro-batch); set it to False"
        )
    if args.deepspeed:
        problems.append("deepspeed shards and reduces gradients in its own order; remove it")
    if args.fsdp and getattr(model, "is_distributed_loading_by_transformers", False):
        problems.append(
            f"fsdp={args.fsdp} would shard the model again, which was sharded when it was loaded: remove it"
        )
    if (args.fsdp_plugin_args or {}).get("fsdp_version") == 1:
        problems.append(
            "fsdp_config's version=1: FSDP1 hangs when ranks run different micro-batches; set it to 2 (the default)"
        )
    config = getattr(model, "config", None)  # there is no model yet where there is a model_init
    degree, kv_heads = tensor_parallel(model), getattr(config, "num_key_value_heads", None)
    if kv_heads is not None and kv_heads % degree:
        problems.append(
            f"tensor parallelism of {degree} splits {kv_heads} key-value heads unevenly ({kv_heads} = {kv_heads // degree} * "
            f"{degree} + {kv_heads % degree}): tp_size must divide them"
        )
    if args.gradient_checkpointing and _is_reentrant(args.gradient_checkpointing_kwargs or {}):
        problems.append(
            f"gradient_checkpointing_kwargs={args.gradient_checkpointing_kwargs} means use_reentrant=True, which runs backward "
            "inside backward; add 'use_reentrant': False"
        )
    if args.optim in UPDATING_IN_BACKWARD:
        problems.append(
            f"optim={OptimizerNames(args.optim).value!r} changes weights during backward, before other micro-batches and ranks "
            "have added their gradients; use another one, for instance 'adamw_torch'"
        )
    if args.optim == OptimizerNames.ADAFACTOR and _shards(args, model, sharding):
        problems.append(
            "optim='adafactor' takes means of whole rows, and sharding leaves each rank a part of a weight: use "
            "'adamw_torch', or sharding='ddp' without FSDP"
        )
    if args.auto_find_batch_size:
        problems.append(
            "auto_find_batch_size=True: the tokens per rank are the plugin's capacity; set it to False and lower capacity"
        )
    if args.dataloader_drop_last:
        problems.append(
            "dataloader_drop_last=True would lose documents; the last batch is always kept: set it to False"
        )
    if not isinstance(args.bf16, bool):
        problems.append(f"bf16={args.bf16!r} is for YAML files, where `hf-longctx train` decides; valid: True or False")
    if args.bf16_full_eval or args.fp16_full_eval:
        problems.append(
            "bf16_full_eval and fp16_full_eval cast weights that training still needs; use bf16=True (autocast)"
        )
    if getattr(args, "train_sampling_strategy", "random") != "random":
        problems.append(
            f"train_sampling_strategy={args.train_sampling_strategy!r}: steps are runs of a random permutation, and lengths are "
            "balanced inside a step; leave it at 'random'"
        )
    if (getattr(args.accelerator_config, "gradient_accumulation_kwargs", None) or {}).get("num_steps", 1) != 1:
        problems.append(
            "accelerator_config's gradient_accumulation_kwargs.num_steps: use gradient_accumulation_steps instead"
        )
    if args.push_to_hub and args.hub_token and args.hub_strategy != HubStrategy.END:
        problems.append(
            f"hub_token with hub_strategy={HubStrategy(args.hub_strategy).value!r}: Trainer uploads its arguments as a pickle "
            "with every checkpoint, the token in it readable by all who read the model. Log in with `hf auth login` or set "
            "HF_TOKEN, and leave hub_token out"
        )
    if args.parallelism_config is not None:
        problems.append("parallelism_config: accelerate's own cp_size and sp_size replace this plugin; remove it")
    problems += sft_problems(args)
    if problems:
        raise ValueError("LongContextTrainer: " + "; ".join(problems))
    args = copy.copy(args)
    args.remove_unused_columns = False
    if not getattr(model, "is_distributed_loading_by_transformers", False) and args.world_size > 1:
        args.fsdp_plugin_args = fsdp_settings(args, sharding)
    return args


def sft_problems(args: Any) -> list[str]:
    """What `trl.SFTConfig` sets beside TrainingArguments and `class X(LongContextMixin, SFTTrainer)` would do otherwise, or
    not at all. What is left prepares documents, and is taken as it is: columns, templates, which tokens have labels."""
    problems = [
        f"{name}=True joins documents into rows of max_length before they are planned; set it to False: every micro-batch is "
        "packed here, and no document sees another"
        for name in ("packing", "eval_packing")
        if getattr(args, name, None)
    ]
    if (length := getattr(args, "max_length", None)) is not None:
        problems.append(
            f"max_length={length} cuts documents before they are planned, uncounted (1024 is SFTConfig's default); set it to "
            f"None. To cut: LongContextPlugin(long_documents='truncate', longest_document={length})"
        )
    if getattr(args, "loss_type", None) == "dft":
        problems.append("loss_type='dft' is another loss than the token-level cross-entropy of the step; valid: 'nll'")
    if getattr(args, "activation_offloading", False):
        problems.append(
            "activation_offloading=True wraps a training step that is not run; LongContextPlugin(activation_offload=1.0) does it"
        )
    return problems


def _is_reentrant(checkpointing: Any) -> bool:
    """Whether these keywords make torch's checkpointing reentrant: transformers says no where nothing is left for torch, whose
    own default is yes."""
    for_torch = {name: value for name, value in checkpointing.items() if name not in ("every_n_layers", "offload")}
    return bool(for_torch and for_torch.get("use_reentrant", True) is not False)


def _shards(args: TrainingArguments, model: Any, sharding: str) -> bool:
    """Whether ranks will hold parts of weights, by our setting, Trainer's, accelerate's, or as the model was loaded."""
    launched = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    asked = sharding in ("zero1", "zero2", "zero3") or args.fsdp_plugin_args is not None or launched
    return is_sharded(model) or (args.world_size > 1 and asked)


def refuse_arguments(arguments: dict[str, Any]) -> None:
    """Raises ValueError for arguments of Trainer that need what never exists here, or would silently be ignored."""
    collator = arguments.get("data_collator")
    if collator is not None and not isinstance(collator, LengthAwareCollator):
        raise ValueError(
            f"data_collator={type(collator).__name__} would not be used: steps are collated by LengthAwareCollator, from "
            "the columns input_ids and labels. Put what it does into these columns, and leave data_collator out"
        )
    for name in ("compute_metrics", "preprocess_logits_for_metrics"):
        if arguments.get(name) is not None:
            raise ValueError(
                f"{name} needs the logits of all documents on every rank: [tokens, vocabulary] is what long documents cannot "
                "afford, and they are never materialised. Valid: eval_loss, which is exact, or a plain model over the checkpoint"
            )
    if arguments.get("compute_loss_func") is not None:
        raise ValueError(
            "compute_loss_func is given logits, which are never materialised. Valid: the token-level cross-entropy (default)"
        )


def refuse_launched_parallelism(accelerator: Any) -> None:
    """Raises ValueError for what `accelerate launch` or its configuration file chose and this trainer cannot honour."""
    state = accelerator.state
    chosen = ["deepspeed_plugin"] if getattr(state, "deepspeed_plugin", None) is not None else []
    if getattr(accelerator, "parallelism_config", None) is not None:
        chosen.append("parallelism_config")
    if state.dynamo_plugin.backend.value not in (None, "NO"):
        chosen.append("dynamo_backend")
    if chosen:
        raise ValueError(
            f"LongContextTrainer: accelerate's configuration sets {', '.join(chosen)}, which is not supported. "
            "Choose multi-GPU or multi-CPU without DeepSpeed, parallelism and torch.compile (`accelerate config`)"
        )


def refuse_pipeline(
    args: TrainingArguments, plugin: LongContextPlugin, sharding: Sharding, model: Any, processes: int
) -> None:
    """Raises ValueError for all that a pipeline cannot honour."""
    stages, problems = plugin.pipeline_stages, []
    if processes % stages:
        valid = [each for each in range(1, processes + 1) if processes % each == 0]
        problems.append(
            f"it must divide the {processes} processes ({processes} = {processes // stages} * {stages} + "
            f"{processes % stages}); valid: {valid}, or a multiple of {stages} processes"
        )
    if planned_mode(sharding, model) == "lockstep":
        problems.append(
            "ranks of zero2, zero3 and expert parallelism meet in every micro-batch, and stages run them at different times; "
            "valid: sharding ddp or zero1, without expert parallelism"
        )
    loaded = loaded_stages(model)
    if loaded > 1 and (loaded, 1) != (stages, plugin.virtual_stages):
        problems.append(
            f"the model was loaded in pp_size={loaded} stages, one for each process; valid: pipeline_stages={loaded} with "
            "virtual_stages=1, or a model that is whole"
        )
    if loaded == 1 and tensor_parallel(model) > 1:
        problems.append(
            f"the model was loaded with tp_size={tensor_parallel(model)} for one stage; valid: "
            f"DistributedConfig(pp_size={stages}, tp_size={tensor_parallel(model)})"
        )
    if loaded > 1 and getattr(model, "peft_config", None):
        problems.append(
            f"adapters were added to a model that was loaded in pp_size={loaded} stages, each process to its own alone; valid: "
            "adapters on a model that is whole, which is cut afterwards"
        )
    if tensor_parallel(model) > 1 and sharding == "zero1":
        problems.append("sharding='zero1' with tensor parallelism; valid: sharding='ddp'")
    if is_sharded(model):
        problems.append("the model was sharded over all processes when it was loaded; valid: one that is whole")
    if args.mixed_precision == "fp16":  # also by `accelerate launch`
        problems.append("fp16 scales gradients by what one process sees; valid: bf16")
    if plugin.capacity == 0 and plugin.pipeline_schedule != "1f1b":
        problems.append(
            f"capacity=0 counts what 1f1b holds at a time, and pipeline_schedule={plugin.pipeline_schedule!r} holds more; set it "
            "to the tokens per rank and micro-batch"
        )
    if plugin.plan_offload:
        problems.append("plan_offload=True; valid: activation_offload, a share of every micro-batch's activations")
    if problems:
        raise ValueError(f"LongContextTrainer: pipeline_stages={stages}: " + "; ".join(problems))


def refuse_whole_optimizer(trainer: Any) -> None:
    """Raises ValueError for an optimizer that was made before the model was cut: it would hold and save other stages' weights."""
    if trainer.pipeline is not None and trainer.optimizer is not None:
        kind = type(trainer.optimizer).__name__
        raise ValueError(
            f"LongContextTrainer: pipeline_stages={trainer.plugin.pipeline_stages}: optimizers=({kind}, ...) was made of the "
            "whole model's weights, of which each process keeps its stages'. Valid: "
            "optimizer_cls_and_kwargs=(class, settings), or TrainingArguments' optim"
        )


def fold_accumulation(args: TrainingArguments, plugin: LongContextPlugin, ranks: int) -> int:
    """Documents of a global batch as Trainer's users think of them; sets gradient_accumulation_steps to 1 and says so.

    Every micro-batch of an optimizer step is planned at once, so that accumulation only makes the global batch larger.
    """
    accumulation, per_process = args.gradient_accumulation_steps, args.per_device_train_batch_size
    documents = per_process * ranks * accumulation
    if accumulation > 1 and args.process_index == 0:
        sizes = {
            "global_batch_documents": plugin.global_batch_documents,
            "global_batch_tokens": plugin.global_batch_tokens,
        }
        chosen = [f"{name}={value}" for name, value in sizes.items() if value is not None]
        logger.warning(
            f"gradient_accumulation_steps={accumulation} is not used: {chosen[0]} sets the global batch"
            if chosen
            else f"gradient_accumulation_steps={accumulation} is part of the global batch: {per_process} documents * "
            f"{ranks} ranks * {accumulation} = {documents} documents per optimizer step"
        )
    args.gradient_accumulation_steps = 1
    return documents


def warn_of_unused_loss(trainer: Any) -> None:
    """Says so if a subclass overrides compute_loss, which planned steps do not call."""
    if type(trainer).compute_loss is not Trainer.compute_loss and trainer.args.process_index == 0:
        logger.warning(
            f"{type(trainer).__name__}.compute_loss is not called: the loss is the token-level cross-entropy of the whole step, "
            "computed by the patched model"
        )


def refuse_mask_columns(dataset: Any) -> None:
    """Raises ValueError if columns say which tokens count but no labels do: training on all tokens would be silently
    wrong."""
    columns = getattr(dataset, "column_names", None) or ()
    masks = [name for name in ("completion_mask", "assistant_masks") if name in columns]
    if masks and "labels" not in columns:
        raise ValueError(
            f"the data set has {', '.join(masks)} but no labels: masks are not read. Turn them into a column labels, "
            "-100 where nothing is learned"
        )
    if "attention_mask" in columns and "labels" not in columns and isinstance(dataset, Dataset):
        padding = sum(
            (chunk.flatten().to_numpy(zero_copy_only=False) == 0).sum()
            for chunk in dataset.data["attention_mask"].chunks
        )
        if padding:
            raise ValueError(
                f"attention_mask marks {padding} tokens as padding, and there are no labels: padding would be trained on. "
                "Tokenise without padding (documents may have any length), or give labels, -100 on padding"
            )


def refuse_ulysses_degree(degree: int, model: Any) -> None:
    """Raises ValueError unless the attention heads of a rank can be split evenly over `degree` ranks."""
    config, tensor_parallel = model.config, getattr(model, "tp_size", None) or 1
    heads = config.num_attention_heads // tensor_parallel
    if heads % degree:
        valid = [number for number in range(1, heads + 1) if heads % number == 0]
        raise ValueError(
            f"ulysses_degree={degree} times tensor parallelism of {tensor_parallel} must divide the "
            f"{config.num_attention_heads} attention heads: each rank has {heads}, and {heads} = {heads // degree} * {degree} + "
            f"{heads % degree}. Valid degrees: {valid}"
        )


def warn_of_kept_store() -> None:
    """Says so where a launcher would start ranks again with the store of those that are gone: they find dead addresses
    there and wait for them (torch 2.13: torchrun's default, and accelerate's static rendezvous)."""
    restarts = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0))
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        logger.warning(
            f"the launcher may start this job again ({restarts} times), but keeps one store for all starts, where new ranks find "
            "the addresses of dead ones and hang. Start it with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in its environment, and "
            "accelerate also with --rdzv_backend c10d"
        )
