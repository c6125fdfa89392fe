"""Keys of TRL's `trl sft`, after SFTConfig, ModelConfig and ScriptArguments in release 1.16."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_longctx.migration import shared
from hf_longctx.migration.rules import Always, Migration, Needless, Rule, To, Without, as_list, keys, whole
from hf_longctx.migration.training_fields import same_fields

DEFAULTS: dict[str, Any] = {
    "learning_rate": 2e-5,
    "per_device_train_batch_size": 8,
    "max_length": 1024,
    "gradient_checkpointing": True,
    "logging_steps": 10,
    "assistant_only_loss": False,
}
"""TRL's values of keys that a file leaves out, where ours differ."""


def defaults(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of DEFAULTS that a file leaves out, and those that depend on it: of adapters, and of what is computed in."""
    own = DEFAULTS | ({"lora_dropout": 0.05} if given.get("use_peft") else {})
    own |= {} if given.get("fp16") else {"bf16": "auto"}
    return {key: value for key, value in own.items() if key not in given}


def _learned(migration: Migration, value: Any) -> None:
    by_completion = migration.given.get("completion_only_loss")
    if value or by_completion:
        return migration.note("needless", "what the assistant, or a completion, says is learned (data.train_on)")
    migration.set("data.train_on", "all")
    if by_completion is None:
        migration.note(
            "without", "rows of prompt and completion, where TRL learns completions: data.train_on: assistant"
        )
    return None


def _datasets(migration: Migration, value: Any) -> None:
    sources = []
    for given in value if isinstance(value, list) else [value]:
        source = {"path": given.get("data_files") or given.get("path"), "subset": given.get("name")}
        source["train_split"] = given["split"] if given.get("split", "train") != "train" else None
        sources.append({key: setting for key, setting in source.items() if setting})
        if given.get("columns"):
            migration.note("without", f"columns {given['columns']}: data.columns, and all other columns are not read")
    migration.put_sources(sources)


def _peft(migration: Migration, value: Any) -> None:
    migration.set("model.lora.r", migration.number("lora_r", 16))
    if not migration.given.get("lora_target_modules"):
        migration.note(
            "without",
            "lora_target_modules is left out, and PEFT takes what it does for a model's class, for instance q_proj and v_proj of "
            "Llama: model.lora.target_modules: [q_proj, v_proj]; here all-linear",
        )


def _template(migration: Migration, value: Any) -> None:
    if Path(str(value)).is_file():
        return migration.set("model.chat_template", str(value))
    return migration.note(
        "without",
        "a file with a jinja template, or a shipped one (chatml, llama3, gemma, qwen, alpaca): model.chat_template",
    )


TABLE: dict[str, Rule] = {
    **same_fields(),
    **shared.batch_fields(lambda given: bool(given.get("packing")), "max_length"),
    "model_name_or_path": To("model.path"),
    "trust_remote_code": To("model.trust_remote_code"),
    "dtype": To("model.dtype", lambda value: "float32" if value == "auto" else str(value)),
    "use_peft": _peft,
    "lora_r": Needless("read with use_peft: model.lora.r"),
    "lora_alpha": shared.of_lora("model.lora.alpha", float),
    "lora_dropout": shared.of_lora("model.lora.dropout", float),
    "lora_target_modules": shared.of_lora(
        "model.lora.target_modules", lambda value: value if value == "all-linear" else as_list(value)
    ),
    "lora_target_parameters": shared.of_lora("model.lora.target_parameters", as_list),
    "lora_modules_to_save": shared.of_lora("model.lora.modules_to_save", as_list),
    "use_rslora": shared.of_lora("model.lora.use_rslora", bool),
    "use_dora": shared.of_lora("model.lora.use_dora", bool),
    "lora_task_type": Needless(
        "a causal language model is trained", of=("CAUSAL_LM",), otherwise=shared.OTHER_OBJECTIVE
    ),
    "load_in_4bit": To("model.load_in_4bit"),
    "dataset_name": To("data.path"),
    "dataset_config": To("data.subset"),
    "dataset_train_split": To("data.train_split"),
    "dataset_test_split": Without("data.eval_split, where the data have such a split; else data.eval_fraction"),
    "test_split_size": To("data.eval_fraction", float),
    "datasets": _datasets,
    "dataset_text_field": To("data.text_column"),
    "max_length": lambda migration, value: shared.longest(migration, value, "truncate"),
    "assistant_only_loss": Always(_learned),
    "completion_only_loss": Needless("read with assistant_only_loss: data.train_on"),
    "eos_token": To("model.eos_token"),
    "chat_template_path": _template,
    "dataset_num_proc": To("data.workers", whole),
    "activation_offloading": To("longctx.activation_offload", lambda _: 1.0),
    "deepspeed": shared.deepspeed,
    "optim_args": shared.optim_args,
    **keys(To("longctx.sharding", lambda _: "zero3"), "fsdp fsdp_config"),
    "warmup_ratio": To("training.warmup_steps", float),
    "loss_type": Needless("next-token loss, in chunks", of=("nll", "chunked_nll"), otherwise=shared.OTHER_OBJECTIVE),
    "truncation_mode": Needless(
        "a document keeps its beginning (longctx.long_documents)",
        of=("keep_start",),
        otherwise=Without("a document that is cut keeps its beginning (longctx.long_documents: truncate)"),
    ),
    **keys(
        shared.OTHER_OBJECTIVE,
        "beta delta discopop_tau f_alpha_divergence_coef f_divergence_type label_smoothing ld_alpha loss_weights rpo_alpha "
        "precompute_ref_* ref_model_* sync_ref_model use_weighting desirable_weight undesirable_weight epsilon epsilon_high "
        "center_rewards_coefficient reward_* scale_rewards normalize_advantages max_prompt_length max_completion_length "
        "num_generations* num_iterations steps_per_generation generation_* importance_sampling_level entropy_* "
        "mask_truncated_completions off_policy_mask_threshold sapo_* vespo_* temperature top_p top_k min_p repetition_penalty "
        "vllm_* use_vllm disable_dropout",
    ),
    "attn_implementation": shared.ANY_KERNEL,
    **keys(shared.ANY_PACKING, "packing packing_strategy padding_free pad_to_multiple_of eval_packing pad_token"),
    **keys(
        Needless("found by the library or the launcher"),
        "dataset_streaming streaming ignore_bias_buffers shuffle_dataset",
    ),
    **keys(shared.QUANTISED_TRAINING, "load_in_8bit bnb_4bit_* use_bnb_nested_quant"),
    **keys(Without("a local copy of that revision: hf download --revision, and model.path names it"), "model_revision"),
    "router_aux_loss_coef": shared.balance,
    "model_init_kwargs": Without("keys of `model`, or of `model.config`"),
    **keys(Without("rows as data.kind reads them (docs/data.md)"), "dataset_kwargs"),
}
