"""LLaMA-Factory's keys, after its arguments in release 0.9.5 (llamafactory/hparams), and those that its examples still hold."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_longctx.migration import shared
from hf_longctx.migration.rules import (
    Always,
    Migration,
    Needless,
    NotTranslated,
    Refuse,
    Rule,
    To,
    Without,
    as_list,
    keys,
    whole,
)
from hf_longctx.migration.training_fields import same_fields
from hf_longctx.settings.training import MUON

DEFAULTS = {"finetuning_type": "lora", "cutoff_len": 2048, "disable_gradient_checkpointing": False}
"""Values of keys that a file leaves out (hparams/*_args.py), where they decide about other keys or differ from ours.

All else is as TrainingArguments of transformers have it, here too, or as ours: lora_rank 8 with lora_alpha twice that,
lora_target all."""
INFO = "dataset_info.json"
"""File in `dataset_dir` that says what data sets are."""
TAGS = {"role_tag": "role", "content_tag": "content"}
ROLES = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool", "system_tag": "system"}
COLUMNS = {"prompt": "instruction", "query": "input", "response": "output", "history": "history", "system": "system"}
"""Their columns of the format alpaca -> ours."""


def packs(given: Mapping[str, Any]) -> bool:
    """Tell whether documents are packed, as texts are where nothing else is said."""
    packing = given.get("packing")
    return bool(given.get("neat_packing") or (given.get("stage") == "pt" if packing is None else packing))


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of DEFAULTS that a file leaves out, and the rows of a step where they are counted in tokens."""
    own = DEFAULTS | ({"per_device_train_batch_size": 8} if packs(given) else {})
    return {key: value for key, value in own.items() if key not in given}


def _stage(migration: Migration, value: Any) -> None:
    if value not in ("sft", "pt"):
        raise NotTranslated(shared.OTHER_OBJECTIVE.why)
    if value == "pt":
        migration.put("data.kind", "text")
    migration.note("translated", "next-token loss, on answers (sft) or on texts (pt)")


def _finetuning(migration: Migration, value: Any) -> None:
    if value == "lora":
        migration.set("model.lora.r", migration.number("lora_rank", 8))
        migration.put("model.lora.alpha", migration.number("lora_alpha", 2 * migration.get("model.lora.r"), float))
    elif value == "full":
        migration.note("translated", "all weights are trained where model.lora is not set")
    elif value == "freeze":
        migration.note("without", "model.freeze names what stays (model.layers.[0-9].*), and all else is trained")
    else:
        raise NotTranslated("adapters here are LoRA: model.lora")


def _targets(value: Any) -> Any:
    names = as_list(value)
    return "all-linear" if names == ["all"] else names


def _datasets(migration: Migration, value: Any) -> None:
    folder = Path(str(migration.given.get("dataset_dir") or "data"))
    try:
        known = json.loads((folder / INFO).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {}
    sources = []
    for name in as_list(value):
        if name in known:
            sources.append(_source(migration, name, known[name], folder))
        else:
            sources.append({"path": name})
            migration.note(
                "without", f"{name} is not in {folder / INFO}: say in data.path where its rows are, with data.kind"
            )
    migration.put_sources(sources)


def _source(migration: Migration, name: str, info: dict[str, Any], folder: Path) -> dict[str, Any]:
    if info.get("ranking"):
        raise NotTranslated(f"{name} holds preferences: {shared.OTHER_OBJECTIVE.why}")
    path = (
        str(folder / info["file_name"])
        if info.get("file_name")
        else info.get("hf_hub_url") or info.get("ms_hub_url") or name
    )
    source: dict[str, Any] = {"path": path}
    columns, tags = info.get("columns") or {}, info.get("tags") or {}
    if media := [kind for kind in ("images", "videos", "audios") if kind in columns]:
        raise NotTranslated(f"{name} has {', '.join(media)}: text alone is trained on")
    if info.get("formatting", "alpaca") == "sharegpt":
        source["kind"] = "messages" if tags else "sharegpt"
        named = {"messages": columns.get("messages", "conversations")} if tags else {}
        named |= {ours: tags[theirs] for theirs, ours in TAGS.items() if tags.get(theirs)}
        if roles := {tags[theirs]: ours for theirs, ours in ROLES.items() if tags.get(theirs)}:
            source["roles"] = {theirs: ours for theirs, ours in roles.items() if theirs != ours}
    elif columns.keys() == {"prompt"}:
        return source | {"kind": "text", "text_column": columns["prompt"]}
    else:
        source["kind"] = "alpaca"
        named = {ours: columns[theirs] for theirs, ours in COLUMNS.items() if columns.get(theirs)}
    named = {ours: theirs for ours, theirs in named.items() if ours != theirs}
    if info.get("subset"):
        source["subset"] = info["subset"]
    if info.get("split", "train") != "train":
        source["train_split"] = info["split"]
    if info.get("num_samples"):
        source["max_documents"] = info["num_samples"]
    return {key: value for key, value in (source | {"columns": named}).items() if value}


def _held_out(migration: Migration, value: Any) -> None:
    if 0 < float(value) < 1:
        migration.set("data.eval_fraction", float(value))
    else:
        migration.note("without", f"data.eval_fraction: a share, not {value} rows")


def _template(migration: Migration, value: Any) -> None:
    shared.chat_template(migration, "default" if value in ("qwen3", "qwen3_nothink", "empty") else value)


def _bits(migration: Migration, value: Any) -> None:
    migration.note("without", f"{value} bits: model.load_in_4bit with LoRA, on GPUs with bitsandbytes")


OF_V1 = Refuse(
    "a key of LLaMA-Factory's v1, whose files have another schema; valid: one of 0.9 (model_name_or_path, dataset)"
)
TABLE: dict[str, Rule] = {
    **same_fields(),
    **shared.batch_fields(packs, "cutoff_len"),
    **dict.fromkeys(("model_class", "train_dataset", "dist_config", "kernel_config", "peft_config"), OF_V1),
    "model_name_or_path": To("model.path"),
    "trust_remote_code": To("model.trust_remote_code"),
    "stage": _stage,
    "finetuning_type": _finetuning,
    "lora_target": shared.of_lora("model.lora.target_modules", _targets),
    **keys(Needless("read with finetuning_type: model.lora"), "lora_rank lora_alpha"),
    "lora_dropout": shared.of_lora("model.lora.dropout", float),
    "compute_accuracy": To("longctx.token_metrics", bool),
    "additional_target": shared.of_lora("model.lora.modules_to_save", as_list),
    "use_rslora": shared.of_lora("model.lora.use_rslora"),
    "use_dora": shared.of_lora("model.lora.use_dora"),
    "pissa_init": shared.of_lora("model.lora.init_lora_weights", lambda _: "pissa"),
    "pissa_iter": Needless(
        "the whole decomposition is taken, which is the same on all ranks and when it is loaded again"
    ),
    "pissa_convert": Needless("loading again decomposes again"),
    "template": _template,
    **keys(shared.added_tokens, "add_tokens add_special_tokens"),
    "dataset": _datasets,
    "dataset_dir": Needless("read with dataset"),
    "eval_dataset": Without("data.eval_split: a split of the same sources, data.path: {train: ..., test: ...}"),
    "val_size": _held_out,
    "max_samples": To("data.max_documents", whole),
    "cutoff_len": lambda migration, value: shared.longest(migration, value, "truncate"),
    "preprocessing_num_workers": To("data.workers", whole),
    "train_on_prompt": To("data.train_on", lambda _: "all"),
    "tokenized_path": Needless("`hf-longctx prepare --output` makes such a folder, which data.path names"),
    "optim": shared.optimizer,
    "use_muon": To("training.optim", lambda _: MUON),
    "warmup_ratio": To("training.warmup_steps", float),
    "deepspeed": shared.deepspeed,
    "optim_args": shared.optim_args,
    **keys(To("longctx.sharding", lambda _: "zero3"), "fsdp fsdp_config"),
    "disable_gradient_checkpointing": Always(
        lambda migration, value: migration.set("training.gradient_checkpointing", not value)
    ),
    "pure_bf16": To("model.dtype", lambda _: "bfloat16"),
    "rope_scaling": Without("model.rope_scaling: {rope_type: yarn, factor: ...}"),
    "quantization_bit": _bits,
    "flash_attn": shared.ANY_KERNEL,
    **shared.LORAPLUS,
    **keys(shared.LIGER, "enable_liger_kernel use_unsloth use_unsloth_gc use_v1_kernels"),
    **keys(shared.ANY_PACKING, "packing neat_packing block_diag_attn"),
    **keys(shared.CACHED, "overwrite_cache streaming buffer_size preprocessing_batch_size data_shared_file_system"),
    **keys(
        Needless("`hf-longctx train` trains, and draws the loss into loss.png and report.html"),
        "do_train do_eval plot_loss overwrite_output_dir include_effective_tokens_per_second print_param_status",
    ),
    **keys(
        Needless("found by the library, the launcher or the model's configuration"),
        "use_fast_tokenizer split_special_tokens low_cpu_mem_usage device_map model_max_length compute_dtype "
        "resize_vocab init_special_tokens "
        "use_reentrant_gc ddp_timeout ddp_find_unused_parameters cache_dir hf_hub_token ms_hub_token om_hub_token "
        "ignore_pad_token_for_loss "
        "quantization_device_map adapter_folder fsdp_transformer_layer_cls_to_wrap use_kv_cache offload_folder "
        "upcast_lmhead_output",
    ),
    **keys(shared.reports_to("swanlab"), "use_swanlab swanlab_project"),
    **keys(shared.REPORTED, "swanlab_*"),
    **keys(
        shared.OTHER_OBJECTIVE,
        "pref_* kto_* simpo_gamma ppo_* ref_model* reward_model* dpo_label_smoothing ld_alpha use_dft_loss "
        "use_asft_loss asft_alpha "
        "use_eaft_loss eaft_alpha mixture_of_depths",
    ),
    **keys(
        Without("optimizers are transformers': training.optim with optim_args"),
        "use_galore galore_* use_apollo apollo_* use_badam badam_* use_adam_mini",
    ),
    **keys(shared.ADAPTER_STARTS, "adapter_name_or_path create_new_adapter"),
    **keys(
        shared.MULTIMODAL, "media_dir image_* video_* crop_to_patches use_audio_in_video audio_* freeze_vision_tower"
    ),
    **keys(shared.MULTIMODAL, "freeze_multi_modal_projector freeze_language_model"),
    **keys(shared.QUANTISED_TRAINING, "fp8* quantization_* double_quantization use_kt kt_* upcast_layernorm"),
    **keys(
        shared.SERVING,
        "vllm_* sglang_* infer_* do_sample temperature top_p top_k num_beams max_length max_new_tokens "
        "repetition_penalty length_penalty "
        "skip_special_tokens predict_with_generate do_predict eval_num_beams default_system enable_thinking "
        "preserve_thinking tool_format",
    ),
    **keys(Without("`hf-longctx merge` and `hf-longctx export` write a plain checkpoint"), "export_*"),
    **keys(
        Without(
            "lm-evaluation-harness on the checkpoint: docs/how_to/serving.md; `hf-longctx evaluate` measures losses and retrieval"
        ),
        "task task_dir batch_size lang n_shot save_dir download_mode eval_on_each_dataset",
    ),
    **keys(Without("model.freeze names what stays, and all else is trained"), "freeze_* use_llama_pro"),
    **keys(Without("adapters here are LoRA: model.lora"), "oft_* module_dropout"),
    **keys(Without("data.sources, each with its own weight"), "mix_strategy interleave_probs"),
    **keys(Without("prompt and completion, both messages: the completion's answers alone are learned"), "mask_history"),
    **keys(Without("loader: ray (longctx.loader), or a Ray job: docs/how_to/ray.md"), "ray_* master_addr master_port"),
    **keys(shared.PROFILED, "enable_torch_profiler profiler_* profile_modules"),
    **keys(Without("documents are drawn anew each epoch, by training.seed"), "disable_shuffling"),
    **keys(
        Without("transformers' early stopping is a callback: LongContextTrainer(callbacks=[...]) in Python"),
        "early_stopping_steps",
    ),
    **keys(Without("model.random_init, a new model"), "train_from_scratch"),
    **keys(Without("a local copy of that revision: hf download --revision, and model.path names it"), "model_revision"),
    **keys(Without("model.added_tokens lists them"), "new_special_tokens_config"),
    "moe_aux_loss_coef": shared.balance,
    **keys(
        Without(
            "Megatron's and other engines' way is another stack; here longctx.sharding and longctx.pipeline_stages"
        ),
        "use_mca use_hyper_parallel hyper_parallel_args shift_attn *_model_parallel_size context_parallel_size sequence_parallel "
        "use_distributed_optimizer overlap_* *_fusion moe_* recompute_granularity mixed_precision",
    ),
}
