"""TrainingArguments and Trainer settings that Hybrid Data Parallelism changes, folds in, or refuses."""

import copy
import os
from collections.abc import Collection
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.utils import logging

from hf_longctx.certified_patch import refuse_no_model
from hf_longctx.data.collator import LengthAwareCollator, RankStep
from hf_longctx.data.length_index import refuse_stream
from hf_longctx.models.adapters.peft_adapters import merged_adapters
from hf_longctx.models.loss.head import is_unpatched
from hf_longctx.models.loss.token_metrics import NAMES as TOKEN_METRICS
from hf_longctx.models.stages import cut_of
from hf_longctx.models.wrappers import language_model_of
from hf_longctx.parallel.reduction import refuse_uncounted_ranks
from hf_longctx.parallel.sharding import forget_trainers, fsdp_settings
from hf_longctx.settings.longctx import LongContextPlugin
from hf_longctx.training.refusals import problems
from hf_longctx.training.request import Request

logger = logging.get_logger(__name__)


PACKAGE = __name__.split(".")[0]
SAME_OBJECTIVE = (
    *("transformers.Trainer", "transformers.Seq2SeqTrainer"),
    *("trl.SFTTrainer", "trl._BaseTrainer", "trl.BaseTrainer"),
)
"""Trainer classes whose loss is the token-level cross-entropy that planned steps compute; what they override may be skipped.
TRL 1.16: all other ones (DPO, KTO, Reward, GRPO, RLOO, Distillation, experimental ones) define compute_loss or training_step."""
OBJECTIVE = (
    "planned steps compute the token-level cross-entropy of the whole step, and evaluate its mean",
    *("compute_loss", "prediction_step", "compute_loss_context_manager", "autocast_smart_context_manager"),
)
ORDER = (
    "the documents of a step are runs of a random permutation, which a checkpoint can go on with",
    *("_get_train_sampler", "_get_eval_sampler", "_get_dataloader", "get_total_train_batch_size"),
)
INPUTS = (
    "a rank's part of a planned step is put together by the collator, from the columns that it knows",
    *("_prepare_inputs", "_prepare_input", "_remove_unused_columns"),
)
PICKLES = (
    "checkpoints hold tensors and JSON, and no pickle",
    *("_save_optimizer_and_scheduler", "_save_rng_state", "_save_scaler"),
)
SAVING = ("save_model", "_save")
"""Ways of Trainer to save a model, by which it saves those of checkpoints too."""
NEVER_CALLED = {name: reason for reason, *names in (OBJECTIVE, ORDER, INPUTS, PICKLES) for name in names}
"""Hooks of Trainer without a place in planned steps, and why."""
ON_LOGITS = ("compute_loss_func", "compute_metrics", "preprocess_logits_for_metrics")
"""Arguments of Trainer that are called with logits."""
MEASURED = ("loss", "runtime", "samples_per_second", "steps_per_second")
"""Metrics that each evaluation gives."""
BATCH_SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps")
"""Arguments that set the global batch where the plugin does not."""
KNOWN_EVALUATIONS = ("transformers", "trl", PACKAGE)
"""Packages whose callbacks and `evaluate` add no metrics."""
HIDDEN = (
    *(
        "train",
        "_inner_training_loop",
        "_run_epoch",
        "training_step",
        "get_batch_samples",
        "evaluation_loop",
        "predict",
    ),
    *("get_train_dataloader", "get_eval_dataloader"),
)
"""Hooks that a class behind ours would have in vain, or that would run a loop of its own."""


def adapted(
    args: TrainingArguments,
    model: Any,
    plugin: LongContextPlugin,
    *,
    processes: int | None = None,
    on_cpu: bool | None = None,
) -> TrainingArguments:
    """A copy of `args` for one planned optimizer step per batch.

    Args:
        processes: of the run; None: as many as `args` say that there are.
        on_cpu: whether ranks compute on CPUs; None: as `args` say.

    Raises:
        ValueError: everything in `args`, `plugin` and `model` that cannot be honoured, at once, with the reason and what would
            be valid.
    """
    on_cpu = args.device.type == "cpu" if on_cpu is None else on_cpu
    refuse_uncounted_ranks()
    processes = args.world_size if processes is None else processes
    refuse(Request(args, plugin, model, processes, on_cpu=on_cpu))
    args = copy.copy(args)
    args.remove_unused_columns = False
    # `accelerate launch --mixed_precision` says it in its environment, which transformers reads into this field alone.
    args.bf16, args.fp16 = (args.mixed_precision == half for half in ("bf16", "fp16"))
    if getattr(model, "is_distributed_loading_by_transformers", False):
        forget_trainers()
    elif args.world_size > 1:
        args.fsdp_plugin_args = fsdp_settings(args, plugin.sharding, plugin.host_offload)
    return args


def refuse(request: Request) -> None:
    """Raises ValueError for all that a request cannot have (refusals.py)."""
    if refusals := problems(request):
        raise ValueError("LongContextTrainer: " + "; ".join(f"{key}={rule}" for key, rule in refusals))


def refuse_arguments(arguments: dict[str, Any]) -> None:
    """Raises ValueError for arguments of Trainer that need what never exists here, or would silently be ignored; TypeError for a
    model or a plugin that is none."""
    if (model := arguments.get("model")) is not None:
        refuse_no_model(model)
    plugin = arguments.get("plugin")
    if plugin is not None and not isinstance(plugin, LongContextPlugin):
        shown = f"**{plugin!r}" if isinstance(plugin, dict) else "capacity=..."
        raise TypeError(f"plugin={plugin!r} is a {type(plugin).__name__}. Valid: hf_longctx.LongContextPlugin({shown})")
    dataset = arguments.get("train_dataset")
    if dataset is not None and getattr(arguments.get("args"), "max_steps", -1) <= 0:
        refuse_stream(dataset)  # Trainer would ask for max_steps, which does not help
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
                "afford, and they are never materialised. Valid: eval_loss, which is exact; token_metrics of the "
                "plugin, for token accuracy and entropy; or a plain model over the checkpoint"
            )
    if arguments.get("compute_loss_func") is not None:
        raise ValueError(
            "compute_loss_func is given logits, which are never materialised. Valid: the token-level cross-entropy (default)"
        )


def as_if_weights_alone_were_saved(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool | None]:
    """Return Trainer's arguments with `save_only_model`, where the model was spread over ranks as it was loaded, and what they
    said before; None: nothing is changed. Trainer refuses to save the optimizer of such models, because it could not resume;
    this package can."""
    given = dict(zip(("model", "args"), args)) | kwargs
    arguments = given.get("args")
    if arguments is None or not getattr(given.get("model"), "is_distributed_loading_by_transformers", False):
        return args, kwargs, None
    changed = copy.copy(arguments)
    changed.save_only_model = True
    if len(args) > 1:
        return (args[0], changed, *args[2:]), kwargs, arguments.save_only_model
    return args, kwargs | {"args": changed}, arguments.save_only_model


def refuse_launched_parallelism(accelerator: Any) -> None:
    """Raises ValueError for what `accelerate launch` or its configuration file chose and this trainer cannot honour."""
    state = accelerator.state
    chosen = ["deepspeed_plugin"] if getattr(state, "deepspeed_plugin", None) is not None else []
    if getattr(accelerator, "parallelism_config", None) is not None:
        chosen.append("parallelism_config")
    if state.dynamo_plugin.backend.value not in (None, "NO"):
        chosen.append("dynamo_backend")
    if state.mixed_precision == "fp8":
        chosen.append("mixed_precision=fp8 (layers are left as they are)")
    if chosen:
        raise ValueError(
            f"LongContextTrainer: accelerate's configuration sets {', '.join(chosen)}, which is not supported. "
            "Choose multi-GPU or multi-CPU without DeepSpeed, parallelism and torch.compile (`accelerate config`)"
        )


def refuse_cpu_ranks_that_see_gpus(accelerator: Any) -> None:
    """Raises ValueError for a rank on a CPU that sees GPUs, but none of its number: accelerate's barrier takes one each."""
    gpus, local_rank = torch.cuda.device_count(), accelerator.local_process_index
    if accelerator.device.type == "cpu" and 0 < gpus <= local_rank:
        raise ValueError(
            f"LongContextTrainer: ranks compute on CPUs, but see {gpus} GPU{'s' * (gpus > 1)}, and accelerate's barrier takes "
            f"GPU {local_rank} for local rank {local_rank}. Valid: hide them from the launcher, CUDA_VISIBLE_DEVICES= accelerate "
            "launch ...; `hf-longctx train` does so where use_cpu is true"
        )


def refuse_whole_optimizer(trainer: Any) -> None:
    """Raises ValueError for an optimizer that was made before the model was cut: it would hold and save other stages' weights."""
    if trainer.world.stages > 1 and trainer.optimizer is not None:
        kind = type(trainer.optimizer).__name__
        raise ValueError(
            f"LongContextTrainer: pipeline_stages={trainer.plugin.pipeline_stages}: optimizers=({kind}, ...) was made of the "
            "whole model's weights, of which each process keeps its stages'. Valid: "
            "optimizer_cls_and_kwargs=(class, settings), or TrainingArguments' optim"
        )


def refuse_sharded_optimizer(trainer: Any, given: Any) -> None:
    """Raise ValueError for an optimizer that was made before the model is sharded: it would step weights that are gone."""
    optimizer = next(iter(given or ()), None)
    if optimizer is not None and trainer.is_fsdp_enabled:
        kind, sharding = type(optimizer).__name__, trainer.world.sharding
        raise ValueError(
            f"LongContextTrainer: sharding={sharding!r}: optimizers=({kind}, ...) was made of whole weights, of which each rank "
            f"keeps a part. Valid: optimizer_cls_and_kwargs=({kind}, settings), TrainingArguments' optim, a class of yours with "
            "create_optimizer, or sharding='ddp'"
        )


def refuse_idle_loraplus(trainer: Any, given: Any) -> None:
    """Raise ValueError for a ratio of learning rates beside an optimizer that was made without it."""
    optimizer, ratio = next(iter(given or ()), None), trainer.plugin.loraplus_lr_ratio
    if optimizer is not None and ratio is not None:
        kind = type(optimizer).__name__
        raise ValueError(
            f"LongContextTrainer: loraplus_lr_ratio={ratio} would change nothing: optimizers=({kind}, ...) has its groups and "
            "their learning rates already. Valid: TrainingArguments' optim, or no loraplus_lr_ratio"
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


def refuse_idle_search(plugin: LongContextPlugin, varied: Collection[str]) -> None:
    """Raise ValueError for a hyperparameter search over arguments that the plugin's global batch goes before; `varied`: names of
    those that its trials set."""
    sizes = {name: getattr(plugin, name) for name in ("global_batch_documents", "global_batch_tokens")}
    chosen = [name for name, value in sizes.items() if value is not None]
    idle = [name for name in BATCH_SIZES if name in varied]
    if chosen and idle:
        raise ValueError(
            f"the hyperparameter search varies {' and '.join(idle)}, which would change nothing: {chosen[0]}={sizes[chosen[0]]} "
            f"sets the global batch. Valid: a LongContextPlugin without {chosen[0]}, of whose global batch "
            f"{' * ranks * '.join(BATCH_SIZES)} is the number of documents, or a search over other arguments"
        )


def refuse_other_objective(cls: type) -> None:
    """Raises TypeError for a Trainer class that trains or evaluates in a way of its own, which planned steps would skip
    without a word."""
    own = [base for base in cls.__mro__ if base.__module__.split(".")[0] == PACKAGE]
    last = max(cls.__mro__.index(base) for base in own if base is not cls)
    for place, base in enumerate(cls.__mro__):
        if (base in own and base is not cls) or _name(base) in SAME_OBJECTIVE:
            continue
        for name in (*NEVER_CALLED, *(HIDDEN if place > last else ())):
            if name not in vars(base):
                continue
            where = "is not called" if name in NEVER_CALLED else f"is hidden by {own[-1].__name__}'s"
            reason = NEVER_CALLED.get(name, OBJECTIVE[0])
            instead = (
                "Put it into a class before LongContextMixin that calls super(), or leave it out"
                if name in HIDDEN
                else "Leave it out, or train without this package"
            )
            raise TypeError(
                f"{cls.__name__}: {base.__name__}.{name} {where}: {reason}. {instead}. LongContextMixin goes before "
                "transformers.Trainer, transformers.Seq2SeqTrainer, trl.SFTTrainer, and classes of them that keep this "
                "objective; not before DPO, KTO, reward, PPO, GRPO and other trainers with one of their own"
            )


def refuse_hooks_on_logits(trainer: Any) -> None:
    """Raise ValueError for functions over logits that a trainer has, given by position, or set since it was made."""
    refuse_arguments({name: getattr(trainer, name, None) for name in ON_LOGITS})


def say_unused_saves(trainer: Any) -> None:
    """Say on the first rank which ways of saving of a class of one's own checkpoints do not call: what they add is in the model
    that is saved at the end, and in no checkpoint."""
    args, classes = trainer.args, type(trainer).__mro__
    known = {base for base in classes if base.__module__.split(".")[0] == PACKAGE or _name(base) in SAME_OBJECTIVE}
    own = [f"{base.__name__}.{name}" for base in classes if base not in known for name in SAVING if name in vars(base)]
    if own and args.save_strategy != "no" and args.process_index == 0:
        logger.warning(
            f"not called for checkpoints, which are written beside training: {', '.join(own)}. Files of your own: a callback's "
            "on_save may add them to a checkpoint's folder, which is complete then with LongContextPlugin(async_save=False)"
        )


def _name(cls: type) -> str:
    """Return a class's package and name."""
    return f"{cls.__module__.split('.')[0]}.{cls.__name__}"


def refuse_changed_settings(trainer: Any, collator: Any) -> None:
    """Raise ValueError for what was set on a trainer since it was made, where it would no longer be used, or used twice.

    Args:
        collator: the one that the trainer had then.
    """
    if trainer.data_collator is not collator:
        refuse_arguments({"data_collator": trainer.data_collator})
    accumulation = trainer.args.gradient_accumulation_steps
    if accumulation != 1:
        raise ValueError(
            f"gradient_accumulation_steps={accumulation} was set since the trainer was made: each step is planned with all of "
            f"its documents, so that {accumulation} steps would be summed. Valid: set it in the TrainingArguments that the "
            "trainer is made with, or global_batch_documents of LongContextPlugin"
        )


def refuse_other_batch(batch: Any) -> None:
    """Raise TypeError for a batch that is no planned step, as those of a data loader of one's own are."""
    if not isinstance(batch, RankStep):
        raise TypeError(
            f"a batch is a {type(batch).__name__}: training and evaluation run planned steps (RankStep), of which each rank has "
            "its part. Valid: loaders of the trainer, get_train_dataloader(), get_eval_dataloader(data set) and "
            "get_test_dataloader(data set)"
        )


def refuse_frozen(trainer: Any) -> None:
    """Raise ValueError for a model of which nothing is trained: its backward would end in an error of torch."""
    weights = trainer.whole_parameters()
    if not any(weight.requires_grad for weight in weights.values()):
        adapters = getattr(trainer.model, "peft_config", None)
        valid = (
            "PeftModel.from_pretrained(..., is_trainable=True), or a configuration with inference_mode=False"
            if adapters
            else "requires_grad_(True) of what is to be trained"
        )
        raise ValueError(
            f"none of the model's {len(weights)} parameters is trained: requires_grad is False. Valid: {valid}"
        )


def refuse_changed_model(trainer: Any) -> None:
    """Raise ValueError for a model that was changed since the trainer was made, in ways that would end in an error of torch, or
    train nothing: another output head, merged adapters, other weights than those of the optimizer of an earlier training."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    language_model = language_model_of(model)
    if not hasattr(language_model, "longctx_own_logits"):
        raise ValueError(
            f"the trainer's model, {type(language_model).__name__}, is another than the one that the trainer was made with, and "
            "runs over no layout. Valid: a new trainer, or patch_model(model) before it becomes trainer.model"
        )
    head = language_model.get_output_embeddings()
    runs_head = cut_of(language_model) is None and not language_model.longctx_own_logits
    if runs_head and type(head) is torch.nn.Linear and is_unpatched(head):
        raise ValueError(
            "the model has got another output head since the trainer was made, which computes no loss over layouts. Valid: "
            "resize_token_embeddings(...) and the like before the trainer is made"
        )
    if merged := merged_adapters(model):
        raise ValueError(
            f"the adapters {', '.join(merged)} are merged into the weights that they stand on, where nothing trains them. Valid: "
            "model.unmerge_adapter() before training"
        )
    if trainer.optimizer is None:
        return
    trained = {id(weight): tuple(weight.shape) for weight in model.parameters() if weight.requires_grad}
    stepped = {
        id(weight): tuple(weight.shape) for group in trainer.optimizer.param_groups for weight in group["params"]
    }
    gone, new = (
        [shape for key, shape in of.items() if key not in other]
        for of, other in ((stepped, trained), (trained, stepped))
    )
    if gone and new:
        raise ValueError(
            f"the trainer's optimizer changes {len(gone)} weights that the model does not train, for instance one of shape "
            f"{gone[0]}, and lacks {len(new)} that it trains, for instance one of shape {new[0]}: the model was changed since "
            "the optimizer was made. Valid: a new trainer, or trainer.optimizer = trainer.lr_scheduler = None before train()"
        )


def refuse_unknown_metric(trainer: Any) -> None:
    """Raise ValueError for a metric_for_best_model that evaluation will not give, before there is a step that would be lost. Code
    of one's own may add metrics: a callback, or a class with its own evaluation."""
    asked, cls = trainer.args.metric_for_best_model, type(trainer)
    own_code = [cls.evaluate, *(type(callback).on_evaluate for callback in trainer.callback_handler.callbacks)]
    if asked is None or any(code.__module__.split(".")[0] not in KNOWN_EVALUATIONS for code in own_code):
        return
    if cls.evaluation_loop.__module__.split(".")[0] != PACKAGE:
        return
    sets = [f"{name}_" for name in trainer.eval_dataset] if isinstance(trainer.eval_dataset, dict) else [""]
    names = [*MEASURED, *(TOKEN_METRICS if trainer.plugin.token_metrics else ())]
    known = [f"eval_{of_set}{name}" for of_set in sets for name in names]
    name = asked if asked.startswith("eval_") else f"eval_{asked}"
    if name not in known:
        more = (
            ""
            if trainer.plugin.token_metrics
            else f"; with LongContextPlugin(token_metrics=True) also {', '.join(TOKEN_METRICS)}"
        )
        raise ValueError(
            f"metric_for_best_model={asked!r} is none of what evaluation gives here, and training would end with the first one. "
            f"Valid: {', '.join(known)}{more}"
        )


def refuse_replaced_loss(trainer: Any) -> None:
    """Raises TypeError for methods that were replaced on the trainer itself, which planned steps do not call."""
    for name, reason in NEVER_CALLED.items():
        if name in vars(trainer):
            raise TypeError(
                f"{name} was set on this {type(trainer).__name__}, and is not called: {reason}. Leave it out, or train without "
                "this package"
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
