"""axolotl's keys, after its schemas in release 0.19 (axolotl/utils/schemas), and those that its examples still hold."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_longctx.migration import shared
from hf_longctx.migration.axolotl_data import datasets
from hf_longctx.migration.rules import (
    Migration,
    Needless,
    NotTranslated,
    Rule,
    To,
    Without,
    as_list,
    keys,
    whole,
)

DEFAULTS: dict[str, Any] = {
    **{"sequence_len": 512, "micro_batch_size": 1, "num_epochs": 1.0, "lr_scheduler": "cosine"},
    **{"warmup_ratio": 0.03, "bf16": "auto", "logging_steps": 0.005, "save_strategy": "epoch", "save_total_limit": 4},
}
"""Values that axolotl takes where a file leaves them out (utils/schemas/training.py and config.py,
core/builders/base.py), and we do otherwise. Its warm-up is of at most 100 steps, and it logs every tenth step or more
often: shares of the steps know no such bounds."""
INSTEAD = {
    "warmup_ratio": ("warmup_steps",),
    "bf16": ("bfloat16", "fp16", "float16", "float32"),
    "save_strategy": ("save_steps", "saves_per_epoch"),
}
"""Default -> keys that say something else in its place."""


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of DEFAULTS whose key a file leaves out or empty (an empty bf16 is off)."""
    return {
        key: value
        for key, value in DEFAULTS.items()
        if given.get(key) is None
        and not (key == "bf16" and key in given)
        and not any(given.get(name) is not None for name in INSTEAD.get(key, ()))
    }


def _adapter(migration: Migration, value: Any) -> None:
    if value not in ("lora", "qlora"):
        raise NotTranslated("adapters here are LoRA: model.lora")
    ours = {"lora_r": "r 16", "lora_alpha": "alpha 32"}
    if missing := [key for key in ours if not migration.given.get(key)]:
        written = ", ".join(ours[key] for key in missing)
        migration.note("without", f"{', '.join(missing)}: axolotl has no default; here model.lora: {written}")
    if not any(migration.given.get(key) for key in TARGETS):
        migration.note(
            "without", "no targets, of which axolotl has no default; here model.lora.target_modules: all-linear"
        )
    migration.set("model.lora.r", migration.number("lora_r", 16))


def _sequence(migration: Migration, value: Any) -> None:
    policy = {"truncate": "truncate", "raise": "error"}.get(str(migration.given.get("excess_length_strategy")), "drop")
    shared.longest(migration, value, policy, migration.number("micro_batch_size", 1))


def _micro_batch(migration: Migration, value: Any) -> None:
    given = migration.given
    rows = whole(value) * migration.number("gradient_accumulation_steps", 1) * migration.gpus
    if given.get("sample_packing") and given.get("sequence_len"):
        migration.set("longctx.global_batch_tokens", rows * migration.number("sequence_len", 1))
    else:
        migration.set("longctx.global_batch_documents", rows)


def _held_out(migration: Migration, value: Any) -> None:
    if 0 < float(value) < 1:
        migration.set("data.eval_fraction", float(value))
    elif value:
        migration.note("without", f"data.eval_fraction: a share, not {value} rows")
    else:
        migration.note("needless", "nothing is held out")


def _per_epoch(name: str) -> Any:
    def rule(migration: Migration, value: Any) -> None:
        if name == "eval" and not migration.get("data.eval_fraction"):
            return migration.note("needless", "nothing is held out (val_set_size)")
        if float(value) == 1:
            return migration.set(f"training.{name}_strategy", "epoch")
        share = 1 / (float(value) * migration.number("num_epochs", 1, float))
        migration.put(f"training.{name}_strategy", "steps")
        return migration.set(f"training.{name}_steps", min(share, 0.999))

    return rule


def _special_tokens(migration: Migration, value: Any) -> None:
    for name, token in value.items():
        if name == "eos_token":
            migration.set("model.eos_token", token)
        elif name == "additional_special_tokens":
            shared.added_tokens(migration, token)
        elif name == "pad_token":
            migration.note("needless", "pad_token: nothing is padded")
        elif token is not None:
            migration.note("without", f"{name}: as the tokenizer says; a tokenizer of your own beside the model")


def _tokens(migration: Migration, value: Any) -> None:
    if isinstance(value, dict):  # as special_tokens, before there were these
        return _special_tokens(migration, value)
    if all(isinstance(token, str) for token in value):
        return shared.added_tokens(migration, value)
    return migration.note("without", "model.added_tokens: a list of the tokens to add; others as the tokenizer says")


def _checkpointing(migration: Migration, value: Any) -> None:
    if str(value).startswith("offload"):
        migration.put("longctx.activation_offload", 1.0)
    migration.set("training.gradient_checkpointing", True)


def _quantised(migration: Migration, value: Any) -> None:
    import torch

    if torch.cuda.is_available() and find_bitsandbytes():
        return migration.set("model.load_in_4bit", True)
    return migration.note(
        "without", "model.load_in_4bit: true where there is a GPU and bitsandbytes; left out, for here is none"
    )


def find_bitsandbytes() -> bool:
    """Tell whether the package is installed."""
    from importlib.util import find_spec

    return find_spec("bitsandbytes") is not None


def _targets(migration: Migration, value: Any) -> None:
    if migration.get("model.lora.r") is None:
        return migration.note("needless", "no adapter is asked for, and all weights are trained")
    targets = "all-linear" if value in (True, "all-linear") else as_list(value) if isinstance(value, list) else None
    if targets is None:
        return migration.note(
            "without", "model.lora.target_modules: all-linear, or a list of names; a regular expression is not taken"
        )
    return migration.set("model.lora.target_modules", targets)


def _template_file(migration: Migration, value: Any) -> None:
    if Path(str(value)).is_file():
        return migration.set("model.chat_template", str(value))
    return migration.note("without", "put it into a file, and name that in model.chat_template")


def _unpaired(migration: Migration, value: Any) -> None:
    if value in (True, "auto"):
        migration.set("training.bf16", value)


DIRECT = (
    "learning_rate weight_decay max_steps seed logging_steps save_total_limit save_steps eval_steps save_strategy eval_strategy "
    "adam_beta1 "
    "adam_beta2 adam_epsilon max_grad_norm lr_scheduler_kwargs neftune_noise_alpha output_dir hub_model_id "
    "hub_strategy hub_revision "
    "dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor ddp_timeout optim_target_modules "
    "save_only_model load_best_model_at_end metric_for_best_model greater_is_better fp16 "
    "torch_empty_cache_steps"
)
TARGETS = ("lora_target_linear", "lora_target_modules", "lora_target_parameters")
TABLE: dict[str, Rule] = {
    "base_model": To("model.path"),
    "trust_remote_code": To("model.trust_remote_code"),
    "adapter": _adapter,
    "lora_alpha": shared.of_lora("model.lora.alpha", float),
    "lora_dropout": shared.of_lora("model.lora.dropout", float),
    **keys(_targets, " ".join(TARGETS[:2])),
    "lora_target_parameters": shared.of_lora("model.lora.target_parameters", as_list),
    "lora_modules_to_save": shared.of_lora("model.lora.modules_to_save", as_list),
    "lora_rank_pattern": shared.of_lora("model.lora.rank_pattern"),
    "lora_alpha_pattern": shared.of_lora("model.lora.alpha_pattern"),
    "lora_fan_in_fan_out": shared.of_lora("model.lora.fan_in_fan_out"),
    "peft_use_dora": shared.of_lora("model.lora.use_dora"),
    "peft_use_rslora": shared.of_lora("model.lora.use_rslora"),
    "peft_init_lora_weights": shared.of_lora("model.lora.init_lora_weights"),
    "peft_layers_to_transform": shared.of_lora("model.lora.layers_to_transform"),
    "peft_layers_pattern": shared.of_lora("model.lora.layers_pattern", as_list),
    "peft_trainable_token_indices": shared.of_lora("model.lora.trainable_token_indices"),
    "peft_ensure_weight_tying": shared.of_lora("model.lora.ensure_weight_tying"),
    "lora_r": Needless("read with adapter: model.lora.r"),
    "load_in_4bit": _quantised,
    "load_in_8bit": Without(
        "weights of 8 bits are not loaded: model.load_in_4bit with LoRA on GPUs, or model.dtype: bfloat16"
    ),
    "chat_template": shared.chat_template,
    "chat_template_jinja": _template_file,
    "special_tokens": _special_tokens,
    "tokens": _tokens,
    "gradient_checkpointing": _checkpointing,
    "added_tokens_overrides": Without("model.added_tokens adds tokens; reserved ones keep their names"),
    "eot_tokens": Needless(
        "what ends a turn is learned as the chat template writes it; model.eos_token says what ends answers"
    ),
    "datasets": datasets,
    "pretraining_dataset": datasets,
    "val_set_size": _held_out,
    "test_datasets": Without("data.eval_split: a split of the same sources, data.path: {train: ..., test: ...}"),
    "sequence_len": _sequence,
    "excess_length_strategy": Needless("read with sequence_len: longctx.long_documents"),
    "micro_batch_size": _micro_batch,
    **keys(
        Needless("read with micro_batch_size: the global batch of longctx"), "gradient_accumulation_steps batch_size"
    ),
    "num_epochs": To("training.num_train_epochs", float),
    "evals_per_epoch": _per_epoch("eval"),
    "saves_per_epoch": _per_epoch("save"),
    "evaluation_strategy": To("training.eval_strategy"),
    "optimizer": shared.optimizer,
    **shared.LORAPLUS,
    "lr_scheduler": To("training.lr_scheduler_type"),
    "warmup_ratio": To("training.warmup_steps", float),
    "warmup_steps": To("training.warmup_steps"),
    "adam_eps": To("training.adam_epsilon", float),
    "noisy_embedding_alpha": To("training.neftune_noise_alpha", float),
    "eval_batch_size": Needless("evaluation is planned like training"),
    "bf16": _unpaired,
    "bfloat16": To("model.dtype", lambda _: "bfloat16"),
    "float16": To("model.dtype", lambda _: "float16"),
    "torch_dtype": To("model.dtype", lambda value: str(value).removeprefix("torch.")),
    "float32": Needless("model.dtype is float32 by default"),
    "tf32": To("training.tf32"),
    "resume_from_checkpoint": To("training.resume_from_checkpoint"),
    "auto_resume_from_checkpoints": To("training.resume_from_checkpoint", lambda _: "auto"),
    "train_on_inputs": To("data.train_on", lambda _: "all"),
    "dataset_processes": To("data.workers", whole),
    "dataset_num_proc": To("data.workers", whole),
    "activation_offloading": To("longctx.activation_offload", lambda _: 1.0),
    "torch_compile": To("longctx.compile_layers", lambda _: True),
    "tiled_mlp": To("longctx.mlp_tile_tokens", lambda _: 8192),
    **keys(Needless("read with tiled_mlp: longctx.mlp_tile_tokens"), "tiled_mlp_num_shards tiled_mlp_use_original_mlp"),
    "deepspeed": shared.deepspeed,
    "optim_args": shared.optim_args,
    **keys(To("longctx.sharding", lambda _: "zero3"), "fsdp fsdp_config dp_shard_size"),
    **{name: To(f"training.{name}") for name in DIRECT.split()},
    **keys(shared.reports_to("wandb"), "wandb_project use_wandb"),
    **keys(shared.reports_to("tensorboard"), "use_tensorboard"),
    **keys(shared.reports_to("mlflow"), "use_mlflow mlflow_experiment_name"),
    **keys(shared.reports_to("comet_ml"), "use_comet comet_project_name"),
    **keys(shared.reports_to("trackio"), "use_trackio trackio_project_name"),
    **keys(shared.reports_to("swanlab"), "use_swanlab swanlab_project"),
    **keys(
        shared.REPORTED, "wandb_* mlflow_* comet_* trackio_* swanlab_* hf_mlflow_log_artifacts use_otel_metrics otel_*"
    ),
    **keys(
        shared.ANY_PACKING,
        "*sample_packing* pad_to_sequence_len pad_to_multiple_of max_packed_sequence_len pretrain_multipack* *multipack*",
    ),
    **keys(
        shared.ANY_PACKING,
        "batch_flattening pretraining_sample_concatenation group_by_length total_num_tokens total_supervised_tokens",
    ),
    **keys(
        shared.ANY_KERNEL,
        "attn_implementation flash_attention flash_attn_* flash_optimum xformers_attention sdp_attention "
        "flex_* eager_attention s2_attention "
        "sage_attention sdpa_varlen fused_attn_kernel gemma4_hybrid_attn_impl large_head_attention heads_k_stride ring_attn_func",
    ),
    **keys(shared.LIGER, "liger_* use_kernels"),
    **keys(shared.OWN_LOSS, "chunked_cross_entropy* cut_cross_entropy"),
    **keys(
        Needless("adapters are PEFT's, and exact"),
        "lora_mlp_kernel lora_qkv_kernel lora_o_kernel lora_embedding_kernel lora_on_cpu",
    ),
    **keys(
        shared.CACHED,
        "dataset_prepared_path skip_prepare_dataset dataset_keep_in_memory preprocess_iterable is_preprocess streaming",
    ),
    **keys(
        Needless("planned steps share rows out by themselves"),
        "dataset_shard_num dataset_shard_idx num_dataset_shards_to_save dataloader_drop_last",
    ),
    **keys(
        Needless("documents are drawn anew each epoch"),
        "shuffle_merged_datasets shuffle_before_merging_datasets curriculum_sampling",
    ),
    **keys(
        Needless("a document gets as many ranks as it needs, by itself"),
        "sequence_parallel_degree context_parallel_size context_parapllel_size dp_replicate_size",
    ),
    **keys(
        Needless("found by the library, the launcher or the model's configuration"),
        "model_type tokenizer_type base_model_config tokenizer_config tokenizer_use_fast tokenizer_legacy "
        "tokenizer_save_jinja_files "
        "type_of_model is_*_derived_model device device_map world_size local_rank ddp ddp_* strict base_model_ignore_patterns "
        "debug axolotl_config_path low_cpu_mem_usage save_safetensors remove_unused_columns accelerator_config fsdp_version "
        "fsdp_final_state_dict_type max_memory gpu_memory_limit gradient_checkpointing_kwargs hf_use_auth_token "
        "experimental_skip_move_to_device gc_steps gc_collect_steps sample_packing_eff_est torch_compile_* torchdistx_path "
        "qlora_sharded_model_loading full_finetune push_dataset_to_hub capabilities env_capabilities deepcompile",
    ),
    **keys(
        Needless("spikes and NaN are looked after: a step whose gradients are not finite is skipped on all ranks"),
        "loss_watchdog_threshold loss_watchdog_patience embeddings_skip_upcast fp32_norms fp32_norm_classes",
    ),
    **keys(
        Needless("tokens per second, and label tokens, are always measured and reported"),
        "include_tokens_per_second include_tkps",
    ),
    **keys(
        shared.OTHER_OBJECTIVE,
        "rl trl reward_model process_reward_model center_rewards_coefficient num_labels cls_model_config dpo_* "
        "kto_* orpo_alpha simpo_gamma "
        "cpo_alpha rl_beta rpo_alpha precompute_ref_log_probs ebft diffusion use_eaft eaft_*",
    ),
    **keys(
        shared.QUANTISED_TRAINING,
        "qat quantization fp8* gptq* quantize_moe_experts use_onebitllms nvfp4_* dsv4_* model_quantization_config*",
    ),
    **keys(shared.QUANTISED_TRAINING, "bnb_config_kwargs loftq_config peft llmcompressor use_dsv4_kernels"),
    **keys(shared.ADAPTER_STARTS, "lora_model_dir merge_lora merge_method"),
    **keys(shared.MULTIMODAL, "processor_type processor_kwargs freeze_mm_modules image_* role_boundaries"),
    **keys(shared.SERVING, "vllm gradio_* generate_samples num_generation_samples generation_* do_bench_eval bench_*"),
    **keys(
        shared.PROFILED, "profiler_steps* *causal_lm_eval eval_causal_lm_metrics eval_table_size eval_max_new_tokens"
    ),
    **keys(
        Without("learning rates are one for all: training.learning_rate"),
        "embedding_lr* lr_groups lr_quadratic_warmup",
    ),
    **keys(
        Without(
            "schedules are transformers': training.lr_scheduler_type and lr_scheduler_kwargs, for instance cosine_with_min_lr"
        ),
        "cosine_min_lr_ratio cosine_constant_lr_ratio lr_div_factor jagged_* eta_min",
    ),
    **keys(
        Without("optimizers are transformers': training.optim with optim_args"),
        "adam_epsilon2 adam_beta3 dion_* qgalore_* lisa_* relora* peft_layer_replication peft_autocast_adapter_dtype",
    ),
    **keys(Without("model.freeze names what stays, and all else is trained"), "unfrozen_parameters"),
    **keys(
        Without("transformers' early stopping is a callback: LongContextTrainer(callbacks=[...]) in Python"),
        "early_stopping_patience",
    ),
    **keys(
        Without("training.save_steps, and SIGTERM saves at any time"),
        "save_first_step dynamic_checkpoint auto_find_batch_size fix_untrained_tokens",
    ),
    **keys(
        Without("checkpointing is of whole layers; longctx.keep_attention keeps attention's output"),
        "selective_checkpointing layer_offloading",
    ),
    **keys(
        Without("longctx.sharding zero3 spreads weights; host memory holds activations (longctx.activation_offload)"),
        "ple_cpu_offload",
    ),
    **keys(
        Without("transformers' own, from Python: DistributedConfig(tp_size=..., ep_size=...), docs/sharding.md"),
        "tensor_parallel_size expert_parallel_* use_scattermoe use_sonicmoe experts_implementation llama4_linearized_experts "
        "use_glm_dsa_kernels",
    ),
    **keys(
        Without("loader: ray (longctx.loader), or a Ray job: docs/how_to/ray.md"), "use_ray ray_* resources_per_worker"
    ),
    **keys(
        Without("model.random_init is a new model; weights of a pretrained one stay"),
        "reinit_weights shrink_embeddings",
    ),
    **keys(
        Needless("embeddings get as many rows as there are tokens"),
        "resize_token_embeddings_to_32x mean_resizing_embeddings",
    ),
    **keys(shared.overrides, "overrides_of_model_config model_config"),
    **keys(Without("a checkpoint whose config.json says so"), "overrides_of_model_kwargs scaling_softmax*"),
    "rope_scaling": To("model.rope_scaling"),
    **keys(
        Without("a local copy of that revision: hf download --revision, and model.path names it"), "revision_of_model"
    ),
    **keys(
        Without("drop them before, or `data.bad_rows: skip` for rows that are none"),
        "dataset_exact_deduplication min_sample_len max_prompt_len",
    ),
    **keys(Without("the first message of each conversation"), "default_system_message chat_template_kwargs"),
    **keys(
        Without("long positions are trained on long documents; RoPE is stretched by model.rope_scaling"),
        "use_pose pose_*",
    ),
    **keys(Without("mistral-common is not used; the tokenizer in transformers' form"), "tokenizer_use_mistral_common"),
    **keys(Without("longctx.longest_document holds in evaluation too"), "eval_sequence_len"),
    **keys(Without("a trainer of your own: class Mine(LongContextMixin, Trainer)"), "trainer_cls"),
    "plugins": lambda migration, value: _plugins(migration, value),
}


def _plugins(migration: Migration, value: Any) -> None:
    for name in as_list(value):
        if any(word in name.lower() for word in ("liger", "cut_cross_entropy")):
            migration.note("needless", f"{name}: Liger's kernels and a chunked loss are used anyway")
        else:
            migration.note("without", f"{name}: axolotl's plugins do not run here")
