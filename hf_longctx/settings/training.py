"""The section `training`: fields of transformers.TrainingArguments, in their types and ranges, and what goes together.

transformers checks little of this, and late: on every rank, when the model is about to be made, and without a line. What this
package's trainer refuses beside it is in training/refusals.py. transformers is imported when a section is checked.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, Literal, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from hf_longctx.settings.fields import as_names, did_you_mean, shown

SEEDS = 2**32
"""Random generators take seeds from 0 up to here."""
RENAMED = {
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}
"""Names that newer releases of transformers call deprecated: both are taken, and the one that is installed is used."""

MUON = "muon"
"""An optimizer of this package's trainer (training/muon.py), beside the names that transformers has."""

NOT_NEGATIVE = (
    *("learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "dataloader_num_workers", "eval_delay"),
    *("logging_steps", "eval_steps", "save_steps"),
)
POSITIVE = (
    *("num_train_epochs", "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
    *("save_total_limit", "adam_epsilon", "ddp_timeout", "dataloader_prefetch_factor"),
)
BETAS = ("adam_beta1", "adam_beta2")


def field_types() -> dict[str, Any]:
    """Field of TrainingArguments -> its type, as this package takes it."""
    from transformers import TrainingArguments
    from transformers.training_args import OptimizerNames

    types = get_type_hints(TrainingArguments)
    # Trainer's own type is text, and what people write is `true`: the newest checkpoint.
    types["resume_from_checkpoint"] = bool | str | None
    types["bf16"] = bool | Literal["auto"]  # auto: hf_longctx/precision.py makes true or false of it
    types["optim"] = OptimizerNames | Literal["muon"]
    types["fsdp"] = bool | str | list[str] | None  # it says text alone, and takes all of these
    names = {field.name for field in dataclasses.fields(TrainingArguments) if field.init}
    return {name: types[name] for name in sorted(names)} | {
        name: types[old] for old, name in RENAMED.items() if name not in names
    }


def default_of(name: str) -> Any:
    """Return what a field of TrainingArguments is where it is left out; None for a field that there is not."""
    from transformers import TrainingArguments

    defaults = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    return defaults.get(name)


def check_training(
    values: dict[str, Any], problem: Callable[[str, str], None], unknown: Callable[[str, Any], str]
) -> dict[str, Any]:
    """`values` in the types of the fields: YAML reads 2e-4 as text and `no` as false. `problem` is called with the key and the
    rule of each that is not right; `unknown` words what is said of a key that there is not, with the keys that there are."""
    types, checked = field_types(), {}
    for key, value in values.items():
        if key not in types:
            problem(key, unknown(key, types))
            continue
        try:
            checked[key] = _typed(types[key], value)
            _refuse_outside(key, checked[key])
        except ValueError as error:
            problem(key, str(error))
            checked.pop(key, None)
    for key, rule in _conflicts(checked):
        problem(key, rule)
    return _as_installed(checked)


def _typed(kind: Any, value: Any) -> Any:
    if isinstance(value, str) and "," in value and list[str] in get_args(kind):
        value = as_names(value)
    names = choices_of(kind)
    if names:
        named = "no" if value is False and "no" in names else value
        if named not in names:
            listed = f"one of {', '.join(names)}"
            raise ValueError(f"must be {listed}, got {shown(value)}{did_you_mean(value, names)}")
        return named
    try:
        result = TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        rules = dict.fromkeys(detail["msg"].replace("Input should", "must", 1) for detail in error.errors())
        raise ValueError(f"{' or '.join(rules)}, got {shown(value)}") from None
    if isinstance(value, bool) and not isinstance(result, bool):
        raise ValueError(f"must be a number, got {value!r}")
    return result


def choices_of(kind: Any) -> list[str]:
    """Return the names that a type takes: an enumeration's, and further ones beside it; none where it takes other values."""
    kinds = (kind, *get_args(kind))
    enumeration = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Enum)), None)
    further = [name for kind in kinds if get_origin(kind) is Literal for name in get_args(kind)]
    return [] if enumeration is None else [*(choice.value for choice in enumeration), *further]


def _refuse_outside(key: str, value: Any) -> None:
    if key == "output_dir" and value == "":
        raise ValueError("must name a directory, got ''")
    if key == "report_to":
        _refuse_reports(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    rules = {
        "must be finite": not math.isfinite(value),
        "must be at least 0": key in NOT_NEGATIVE and value < 0,
        "must be more than 0": key in POSITIVE and value <= 0,
        "must be at least 0 and less than 1": key in BETAS and not 0 <= value < 1,
        "must be more than 0, or -1 for as many as num_train_epochs makes": (
            key == "max_steps" and value <= 0 and value != -1
        ),
        f"must be from 0 to {SEEDS - 1}": key in ("seed", "data_seed") and not 0 <= value < SEEDS,
    }
    for rule, broken in rules.items():
        if broken:
            raise ValueError(f"{rule}, got {value}")


def _refuse_reports(value: Any) -> None:
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    valid = ["none", "all", *INTEGRATION_TO_CALLBACK]
    for name in value if isinstance(value, list) else [value]:
        if name is not None and name not in valid:
            raise ValueError(f"must be of {', '.join(sorted(valid))}, got {shown(name)}{did_you_mean(name, valid)}")


def _conflicts(checked: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Key and rule of what TrainingArguments would refuse together."""
    evaluates, saves = checked.get("eval_strategy", "no"), checked.get("save_strategy", "steps")
    if checked.get("bf16") and checked.get("fp16"):
        yield "fp16", f"true beside bf16: {str(checked['bf16']).lower()}; keep one of them"
    if checked.get("load_best_model_at_end") and saves != "best" and evaluates != saves:
        yield (
            "load_best_model_at_end",
            f"true needs eval_strategy ({evaluates}) and save_strategy ({saves}) to be the same",
        )
    named = checked.get("metric_for_best_model") is not None or checked.get("load_best_model_at_end")  # loss then
    if saves == "best" and not named and checked.get("lr_scheduler_type") not in ("reduce_lr_on_plateau", "greedy"):
        yield "save_strategy", "'best' needs metric_for_best_model, for instance eval_loss"
    if checked.get("logging_strategy", "steps") == "steps" and checked.get("logging_steps") == 0:
        yield "logging_steps", "0 with logging_strategy: steps; give 1 or more, or logging_strategy: no"
    for name, strategy, default in (("eval", evaluates, "no"), ("save", saves, "steps"), ("logging", "steps", "steps")):
        steps = checked.get(f"{name}_steps")
        chosen = checked.get(f"{name}_strategy", default) if name == "logging" else strategy
        if chosen == "steps" and steps is not None and steps > 1 and steps != int(steps):
            yield (
                f"{name}_steps",
                f"{steps} must be an integer where it is more than 1 (up to 1 it is a share of the run)",
            )
    if checked.get("lr_scheduler_type") in ("reduce_lr_on_plateau", "greedy") and evaluates == "no":
        yield "lr_scheduler_type", f"{checked['lr_scheduler_type']!r} needs evaluations: set eval_strategy"
    if checked.get("dataloader_prefetch_factor") and not checked.get("dataloader_num_workers"):
        yield (
            "dataloader_prefetch_factor",
            f"{checked['dataloader_prefetch_factor']} needs dataloader_num_workers of 1 or more, got 0",
        )
    for old, new in RENAMED.items():
        if checked.get(old) is not None and checked.get(new) is not None:
            yield old, f"{shown(checked[old])} and {new} ({shown(checked[new])}) are the same setting: keep {new}"


def _as_installed(checked: dict[str, Any]) -> dict[str, Any]:
    """Fields that were renamed, under the name that the installed transformers has."""
    from transformers import TrainingArguments

    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    to = {old if new not in names else new: (old, new) for old, new in RENAMED.items()}
    either = {name: installed for installed, pair in to.items() for name in pair}
    return {either.get(key, key): value for key, value in checked.items()}


def checkpoints_activations(training: dict[str, Any]) -> bool:
    """Whether a checked section turns activation checkpointing on, whatever its name is."""
    return any(bool(training.get(name)) for name in ("gradient_checkpointing", "activation_checkpointing"))
