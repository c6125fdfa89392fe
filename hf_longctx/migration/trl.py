"""Keys of TRL's `trl sft`, after SFTConfig, ModelConfig and ScriptArguments in release 1.16."""

from pathlib import Path
from typing import Any

from hf_longctx.migration import shared
from hf_longctx.migration.rules import Migration, Needless, Rule, To, Without, as_list, keys, sharding_of
from hf_longctx.migration.training_fields import same_fields


def _datasets(migration: Migration, value: Any) -> None:
    sources = []
    for given in value if isinstance(value, list) else [value]:
        source = {"path": given.get("data_files") or given.get("path"), "subset": given.get("name")}
        sources.append({key: setting for key, setting in source.items() if setting})
        if given.get("columns") or given.get("split", "train") != "train":
            migration.note(
                "without", f"columns {given.get('columns')}, split {given.get('split')}: data.columns, data.train_split"
            )
    migration.put_sources(sources)


def _peft(migration: Migration, value: Any) -> None:
    migration.set("model.lora.r", int(migration.given.get("lora_r") or 16))


def _template(migration: Migration, value: Any) -> None:
    if Path(str(value)).is_file():
        return migration.set("model.chat_template", str(value))
    return migration.note(
        "without",
        "a file with a jinja template, or a shipped one (chatml, llama3, gemma, qwen, alpaca): model.chat_template",
    )


TABLE: dict[str, Rule] = {
    **same_fields(),
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
    "lora_task_type": Needless("a causal language model is trained"),
    "load_in_4bit": To("model.load_in_4bit"),
    "dataset_name": To("data.path"),
    "dataset_config": To("data.subset"),
    "dataset_train_split": To("data.train_split"),
    "dataset_test_split": Without("data.eval_split, where the data have such a split; else data.eval_fraction"),
    "test_split_size": To("data.eval_fraction", float),
    "datasets": _datasets,
    "dataset_text_field": To("data.text_column"),
    "max_length": lambda migration, value: shared.longest(migration, value, "truncate"),
    "assistant_only_loss": Needless(
        "what the assistant writes is learned by default, with any template (data.train_on)"
    ),
    "completion_only_loss": Needless("the completion is learned by default (data.train_on)"),
    "eos_token": To("model.eos_token"),
    "chat_template_path": _template,
    "dataset_num_proc": To("data.workers", int),
    "activation_offloading": To("longctx.activation_offload", lambda _: 1.0),
    "deepspeed": To("longctx.sharding", sharding_of),
    **keys(To("longctx.sharding", lambda _: "zero3"), "fsdp fsdp_config"),
    "warmup_ratio": To("training.warmup_steps", float),
    "loss_type": Needless("next-token loss, in chunks; TRL's other losses of SFT (dft) are another objective"),
    "attn_implementation": shared.ANY_KERNEL,
    **keys(shared.ANY_PACKING, "packing packing_strategy padding_free pad_to_multiple_of eval_packing pad_token"),
    **keys(
        Needless("found by the library or the launcher"),
        "dataset_streaming streaming ignore_bias_buffers shuffle_dataset truncation_mode",
    ),
    **keys(shared.QUANTISED_TRAINING, "load_in_8bit bnb_4bit_* use_bnb_nested_quant"),
    **keys(Without("a local copy of that revision: hf download --revision, and model.path names it"), "model_revision"),
    **keys(
        Without("keys of `model`, or a checkpoint whose config.json says so"), "model_init_kwargs router_aux_loss_coef"
    ),
    **keys(Without("rows as data.kind reads them (docs/data.md)"), "dataset_kwargs"),
}
