"""Rules that tables of several stacks share: optimizers, reports, chat templates, how long documents are, other objectives."""

import json
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_longctx.migration.rules import Migration, Needless, NotTranslated, Refuse, Rule, Without, as_list, whole

PACKAGES = (
    ("bnb", "bitsandbytes"),
    ("8bit", "bitsandbytes"),
    ("paged", "bitsandbytes"),
    ("schedule_free", "schedulefree"),
    ("adamw_torch_8bit", "torchao"),
    ("adamw_torch_4bit", "torchao"),
    ("galore", "galore_torch"),
    ("apollo", "apollo_torch"),
    ("lomo", "lomo_optim"),
    ("grokadamw", "grokadamw"),
    ("stable_adamw", "torch_optimi"),
)
"""Part of an optimizer's name -> the package it is from."""
OTHER_OPTIMIZERS = {"adamw_hf": "adamw_torch", "adamw_torch_fused": "adamw_torch_fused"}
TEMPLATES = {
    **{name: name for name in ("chatml", "llama3", "gemma", "alpaca", "qwen")},
    **dict.fromkeys(("qwen_25", "qwen2", "qwen2_5", "qwen2.5"), "qwen"),
    **dict.fromkeys(("llama3_2", "llama-3"), "llama3"),
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text"), "gemma"),
}
"""Their names -> shipped templates of ours."""
STAGE = r"(?:zero|stage|(?<![a-z])z)[_-]?([0-3])(?!\d)"
"""DeepSpeed's stage in the name of a file: ds_z3_config.json, zero2.json."""

OTHER_OBJECTIVE = Refuse(
    "another objective than next-token loss (preferences, rewards, RL, distillation, classes), which is not "
    "trained here: stay with "
    "it where you are, or with TRL's trainers"
)
QUANTISED_TRAINING = Without(
    "trained in float32 or bfloat16 with autocast (training.bf16); weights of 4 bits under LoRA: load_in_4bit"
)
ADAPTER_STARTS = Without(
    "merge that adapter first (hf-longctx merge ADAPTER OUTPUT), and name the result in model.path"
)
MULTIMODAL = Without("text alone is trained on; images, sound and video are refused in rows")
SERVING = Without("for generation or serving, not for training; `hf-longctx generate`, and docs/how_to/serving.md")
REPORTED = Without(
    "read from the environment by the reporter itself (WANDB_PROJECT, MLFLOW_TRACKING_URI, ...): export it"
)
ANY_KERNEL = Needless(
    "the fastest exact attention kernel of the device is taken (longctx.kernel, `hf-longctx kernels`)"
)
ANY_PACKING = Needless(
    "documents are always packed, exactly and without padding: longctx.capacity is what a rank holds at a time"
)
LIGER = Needless("Liger's kernels run where the package is installed (longctx.liger_kernels)")
OWN_LOSS = Needless(
    "the cross-entropy is always computed in chunks: logits never exist at once (longctx.loss_chunk_tokens)"
)
CACHED = Needless("documents are tokenised once, and found again by their content")
PROFILED = Without("steps are measured all the time: report.html, live view; `hf-longctx profile` measures a machine")


def balance(migration: Migration, weight: Any) -> None:
    """Have the experts of a mixture balanced by transformers' loss with this weight."""
    keys = {"output_router_logits": True, "router_aux_loss_coef": float(weight)}
    migration.put("model.config", (migration.get("model.config") or {}) | keys)
    migration.note("translated", f"model.config: {keys}, of a mixture of experts: take it out for another model")


def overrides(migration: Migration, keys: Any) -> None:
    """Set keys of the model's configuration."""
    if not isinstance(keys, Mapping):
        raise NotTranslated(f"must be a mapping of keys of config.json, got {keys!r}")
    others = dict(keys)
    if (scaling := others.pop("rope_scaling", None)) is not None:
        migration.set("model.rope_scaling", scaling)
    if others:
        migration.set("model.config", (migration.get("model.config") or {}) | others)


def optimizer(migration: Migration, value: Any) -> None:
    """Set the optimizer; one whose package is not installed here is replaced by torch's AdamW, which is noted."""
    name = OTHER_OPTIMIZERS.get(str(value), str(value))
    package = next((package for part, package in PACKAGES if part in name), None)
    if package is not None and find_spec(package) is None:
        migration.put("training.optim", "adamw_torch")
        return migration.note(
            "without",
            f"training.optim: adamw_torch, for {package} is not installed here; with it, training.optim: {name}",
        )
    migration.set("training.optim", name)
    return None


def of_lora(path: str, convert: Callable[[Any], Any] = lambda value: value) -> Rule:
    """Return a rule that sets a key of ours where adapters are trained, of which the rank has been set then."""

    def rule(migration: Migration, value: Any) -> None:
        if migration.get("model.lora.r") is None:
            return migration.note("needless", "no adapter is asked for, and all weights are trained")
        return migration.set(path, convert(value))

    return rule


LORAPLUS = {name: of_lora(f"longctx.{name}", float) for name in ("loraplus_lr_ratio", "loraplus_lr_embedding")}


def chat_template(migration: Migration, value: Any) -> None:
    """Set a shipped template, or leave the tokenizer's own."""
    name = str(value)
    if name in TEMPLATES:
        migration.set("model.chat_template", TEMPLATES[name])
    elif name in ("tokenizer_default", "default") or name.startswith("tokenizer_default"):
        migration.note("needless", "the tokenizer's own template is taken where model.chat_template is not set")
    elif name.endswith((".jinja", ".j2", ".jinja2")):
        migration.set("model.chat_template", name)
    else:
        migration.note(
            "without",
            f"the tokenizer's own template, which instruction-tuned models have; else a file: model.chat_template: {name}.jinja",
        )


def longest(migration: Migration, tokens: Any, policy: str, micro_batch: int = 1) -> None:
    """Set how long documents are, what becomes of longer ones, and what a rank holds."""
    migration.put("longctx.long_documents", policy)
    migration.put("longctx.capacity", whole(tokens) * micro_batch)
    migration.set("longctx.longest_document", whole(tokens))


def batch_fields(packs: Callable[[Mapping[str, Any]], bool], length: str) -> dict[str, Rule]:
    """Return the rules of Trainer's batch size and accumulation: packed rows are counted in tokens, others are documents.

    Args:
        packs: tell whether their file packs documents into rows.
        length: their key of a row's tokens.
    """

    def counts_tokens(migration: Migration) -> bool:
        return bool(packs(migration.given) and migration.given.get(length))

    def rows(migration: Migration, value: Any) -> None:
        if not counts_tokens(migration):
            return migration.set(f"training.{migration.key}", value)
        count = whole(value) * migration.number("gradient_accumulation_steps", 1) * migration.gpus
        return migration.set("longctx.global_batch_tokens", count * migration.number(length, 1))

    def accumulation(migration: Migration, value: Any) -> None:
        if counts_tokens(migration):
            return migration.note("needless", "read with per_device_train_batch_size: longctx.global_batch_tokens")
        return migration.set(f"training.{migration.key}", value)

    return {"per_device_train_batch_size": rows, "gradient_accumulation_steps": accumulation}


def added_tokens(migration: Migration, value: Any) -> None:
    """Add tokens to those that another key has added."""
    migration.set("model.added_tokens", [*(migration.get("model.added_tokens") or []), *as_list(value)])


def optim_args(migration: Migration, value: Any) -> None:
    """Set an optimizer's arguments, as a text of key=value; values of several numbers are left out."""
    if isinstance(value, dict):
        several = {key: setting for key, setting in value.items() if isinstance(setting, (list, dict))}
        for key, setting in several.items():
            migration.note("without", f"{key}: {setting}: fields of training, as adam_beta1 and adam_beta2 are")
        value = ",".join(f"{key}={setting}" for key, setting in value.items() if key not in several)
    if value:
        migration.set("training.optim_args", str(value))


def deepspeed(migration: Migration, value: Any) -> None:
    """Set the sharding of DeepSpeed's stage: of its configuration, if that is there, or of its file's name."""
    given, path = value, Path(str(value))
    if not isinstance(value, dict) and path.is_file():
        given = json.loads(path.read_text(encoding="utf-8"))
    if isinstance(given, dict):
        stage = whole((given.get("zero_optimization") or {}).get("stage") or 0)
    elif marked := re.search(STAGE, path.name.lower()):
        stage = int(marked[1])
    else:
        return migration.note(
            "without",
            f"its stage is not in its name, and {path} is not here: longctx.sharding (ddp, zero1, zero2, zero3)",
        )
    return migration.set("longctx.sharding", f"zero{stage}" if stage else "ddp")


def reports_to(name: str) -> Any:
    """Return a rule that turns a reporter on."""

    def rule(migration: Migration, value: Any) -> None:
        if find_spec(name) is None:
            return migration.note("without", f"training.report_to: [{name}] once the package {name} is installed")
        before = migration.get("training.report_to") or []
        migration.put("training.report_to", [*before, *([] if name in before else [name])])
        return migration.note(
            "translated", f"training.report_to: [{name}], and the environment says the rest: {migration.key}={value}"
        )

    return rule
