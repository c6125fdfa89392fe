"""A trained run in one JSON file, `run.json`: all that the report and the model card say beside Trainer's own log.

    model         architecture, sizes, what it was trained from, its certificate
    data          how many documents and tokens, how long, from where
    parallelism   ranks, capacity, sharding, planner
    training      Trainer's settings that a reader asks for
    slowest       plans of the slowest steps, as columns of integers
    environment   versions, device
    configuration as the user wrote it, without secrets (hf_longctx/redaction.py)

It is written where training ended, in the process of rank 0, and read again by `hf-longctx report`. Nothing is sent.
"""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from hf_longctx.counting.config_fields import field_values
from hf_longctx.planner.plan import COLUMNS, SCALARS, StepPlan
from hf_longctx.planner.topology import Topology
from hf_longctx.redaction import redacted, without_named_secrets
from hf_longctx.report.pictures.certificates import length_buckets
from hf_longctx.report.training_runs.run_files import Anything, Record, read_file, refuse_other
from hf_longctx.whole_files import written_whole

RUN = "run.json"
LATER: dict[str, Any] = {"chunks": [1], "linear_tokens": 0, "labels": []}
"""Values for fields that plans of earlier records did not have."""
FORMAT = "hf_longctx run 1"
PACKAGES = (
    "hf_longctx torch transformers accelerate datasets peft huggingface_hub numpy flash-attn liger-kernel bitsandbytes"
)
"""Distributions whose versions are kept, where they are installed."""


def write_record(
    trainer: Any,
    *,
    configuration: Mapping[str, Any] | None = None,
    base_model: str | None = None,
    licence: str | None = None,
    datasets: Sequence[str] = (),
    sources: Sequence[str] = (),
) -> None:
    """Writes the record of a trainer that has trained into its output directory.

    Args:
        trainer: a LongContextTrainer.
        configuration: what the user set.
        base_model: hub id, or anything else that names what was trained; default: what the model says.
        licence: of the base model, where it is known.
        datasets: hub ids.
        sources: what the documents are from, in words; default: what a prepared data set says.
    """
    model, args = trainer.accelerator.unwrap_model(trainer.model), trainer.args
    record = {
        "format": FORMAT,
        "name": args.hub_model_id or Path(args.output_dir).resolve().name,
        "model": _model(model, trainer.whole_parameters(), base_model)
        | {"licence": licence, "certificate": redacted(trainer.certificate)},
        "data": _data(trainer, datasets, sources),
        "parallelism": _parallelism(trainer),
        "training": _training(args, trainer.state)
        | {"precision": _precision(trainer.precision), "seconds": trainer.run_state.seconds},
        "slowest": [_slow_step(trainer.training_steps(), slow_step) for slow_step in trainer.measurements.slowest],
        "mfu_left_out": trainer.measurements.no_mfu,
        "environment": _environment(trainer.measurements.device_name),
        "configuration": _configuration(configuration) if configuration else None,
    }
    with written_whole(Path(args.output_dir) / RUN) as partial:
        partial.write_text(json.dumps(record) + "\n")


def _configuration(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the user set without secrets. Documents are found by it again: names of files stay whole, and all of them."""
    documents = {"data": without_named_secrets(given["data"])} if "data" in given else {}
    return {**redacted(given), **documents}


def read_record(directory: Path) -> dict[str, Any]:
    """The record in a directory; with empty sections if there is none.

    Raises:
        ValueError: it cannot be read.
    """
    path = directory / RUN
    empty: dict[str, Any] = {name: {} for name in ("model", "data", "parallelism", "training", "environment")}
    empty |= {"name": directory.resolve().name, "slowest": [], "mfu_left_out": None, "configuration": None}
    record = read_file(path, Anything)
    if not record:
        return empty
    if record.get("format") != FORMAT:
        raise ValueError(f"{path} is no record of a run: its format is {record.get('format')!r}, not {FORMAT!r}")
    refuse_other(path, empty | record, Record)
    return empty | record


def sources_of(data: Mapping[str, Any]) -> str:
    """Name what the documents are from: all of it, on a hub or not; "": it is not known."""
    return redacted(", ".join(data.get("sources") or data.get("datasets") or []))


def plan_of(stored: Mapping[str, Any]) -> StepPlan:
    """A plan from what `write_record` stored. Raises ValueError if it is none."""
    try:
        stored = LATER | dict(stored)
        topology = stored["topology"]
        factors = {name: topology[name] and tuple(topology[name]) for name in ("speed", "memory")}
        columns: dict[str, Any] = {name: np.array(stored[name], np.int64) for name in COLUMNS}
        return StepPlan(
            topology=Topology(**topology | factors),
            **columns,
            **{name: stored[name] for name in SCALARS},
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{RUN} holds a plan that cannot be read: {error!r}") from error


def _stored(plan: StepPlan) -> dict[str, Any]:
    columns = {name: getattr(plan, name).tolist() for name in COLUMNS}
    scalars = {name: getattr(plan, name) for name in SCALARS}
    return {"topology": asdict(plan.topology)} | columns | {"lower_bound": int(plan.lower_bound)} | scalars


def _slow_step(steps: Any, slow: Any) -> dict[str, Any]:
    """Step, seconds, plan, the rows of its documents in the data set, and the document that took longest: its row, tokens and
    ranks."""
    plan = slow.plan
    longest = int(np.argmax(plan.document_times(steps.collator.cost)))
    rows = steps.documents(*slow.position)
    return {
        "step": slow.step,
        "seconds": round(slow.seconds, 6),
        "longest": {
            "row": int(rows[plan.doc[longest]]),
            "tokens": int(plan.length[longest]),
            "ranks": int(plan.ranks_of_document[longest]),
        },
        "rows": np.asarray(rows).tolist(),
        "plan": _stored(plan),
    }


def _model(model: Any, parameters: Mapping[str, Any], base_model: str | None) -> dict[str, Any]:
    bare = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = bare.config
    text = config.get_text_config()
    sizes = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    weights = [(weight.numel(), weight.requires_grad) for weight in parameters.values()]
    values_of = {name: field_values(text, name) for name in (*sizes, "max_position_embeddings")}
    dimensions = {name: values[0] if len(values) == 1 else values for name, values in values_of.items() if values}
    adapters = getattr(model, "peft_config", None)
    return dimensions | {
        "architecture": type(bare).__name__.removeprefix("FSDP"),
        "base": _whole_path(base_model or getattr(config, "_name_or_path", "") or None),
        "parameters": sum(count for count, _ in weights),
        "trained_parameters": sum(count for count, learns in weights if learns),
        "dtype": str(bare.dtype).removeprefix("torch."),
        "rope": redacted(getattr(text, "rope_parameters", None)),
        "adapter": {
            "kind": str(getattr(adapter.peft_type, "value", adapter.peft_type)),
            "r": getattr(adapter, "r", None),
            "alpha": getattr(adapter, "lora_alpha", None),
        }
        if adapters and (adapter := next(iter(adapters.values())))
        else None,
        "kv_elements_per_token": _kv_elements(text),
    }


def _whole_path(name: str | None) -> str | None:
    """Return the absolute path of a folder that is here: read elsewhere, a relative one would look like a name of the hub."""
    return str(Path(name).resolve()) if name and Path(name).exists() else name


def _kv_elements(config: Any) -> int | None:
    """Count the elements of keys and values of a token, in layers with most heads; None where no field says how many heads."""
    heads, kv_heads, head_dim = (
        max(field_values(config, name), default=0)
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    if not heads:
        return None
    return 2 * config.num_hidden_layers * (kv_heads or heads) * (head_dim or config.hidden_size // heads)


def _data(trainer: Any, datasets: Sequence[str], sources: Sequence[str]) -> dict[str, Any]:
    lengths = trainer.training_steps().pieces.lengths
    p50, p90, p99 = (int(np.percentile(lengths, percent, method="higher")) for percent in (50, 90, 99))
    manifest = getattr(trainer.train_dataset, "manifest", None)
    names = sources or [source.name for source in getattr(manifest, "sources", ())]
    held_out = trainer.eval_dataset
    return {
        "sources": [_public_name(name) for name in names],
        "datasets": list(datasets),
        "rows": len(trainer.train_dataset),
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "longest": int(lengths.max()),
        "by_length": length_buckets(lengths),
        "held_out_documents": len(held_out)
        if hasattr(held_out, "__len__") and not isinstance(held_out, dict)
        else None,
    }


def _public_name(name: str) -> str:
    """A source as a card may name it: no directory of this machine."""
    return ", ".join(Path(part).name if "/" in part and Path(part).is_absolute() else part for part in name.split(", "))


def _parallelism(trainer: Any) -> dict[str, Any]:
    plugin, run = trainer.plugin, trainer.run_state
    topology = trainer.training_steps().collator.topology
    return {
        "devices": trainer.args.world_size,
        "ranks": trainer.world.ranks,
        "tensor_parallel": trainer.world.tensor_parallel,
        "pipeline_stages": topology.stages,
        "ranks_per_node": topology.ranks_per_node,
        "sharding": trainer.world.sharding,
        "mode": trainer.world.mode,
        "planner": plugin.planner,
        "capacity": plugin.capacity,
        "ulysses_degree": plugin.ulysses_degree,
        "kernel": plugin.kernel,
        "global_batch_documents": run.global_batch_documents,
        "global_batch_tokens": run.global_batch_tokens,
        "long_documents": run.long_documents,
        "longest_document": run.longest_document,
    }


def _training(args: Any, state: Any) -> dict[str, Any]:
    chosen = ("learning_rate", "warmup_steps", "weight_decay", "max_grad_norm", "seed", "gradient_checkpointing")
    names = {
        name: str(getattr(getattr(args, name), "value", getattr(args, name))) for name in ("optim", "lr_scheduler_type")
    }
    half = "bfloat16" if args.bf16 else "float16" if args.fp16 else None
    return (
        {name: getattr(args, name) for name in chosen}
        | names
        | {
            "steps": state.global_step,
            "epochs": state.epoch,
            "autocast": half,
        }
    )


def _precision(decision: Any) -> str | None:
    """Return what `bf16: auto` came to, and why; None: somebody chose it."""
    return None if decision is None else str(decision)


def _environment(device: str) -> dict[str, str]:
    versions = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": device,
    }
    for package in PACKAGES.split():
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
