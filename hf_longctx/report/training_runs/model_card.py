"""The directory of a trained run -> README.md: a model card as the Hugging Face hub reads it.

Its metadata says what is known and nothing else: base model and data sets by their hub ids (never by a path of this
machine), the licence where the base model's is known, library and tags, and results as a model index. Its text has
what a reader asks of a model for long documents: what it was trained on, how long that was, how well it predicts.

A card that a user wrote stays. One that this module, Trainer or PEFT generated is written anew. Nothing is sent.
"""

import html
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from hf_longctx.report.training_runs.run_files import perplexity
from hf_longctx.report.training_runs.run_log import RunLog, duration
from hf_longctx.report.training_runs.run_record import sources_of
from hf_longctx.whole_files import written_whole

CARD = "README.md"
MARK = "<!-- Written by hf_longctx after training, and again by `hf-longctx report`. Remove this line to keep your changes. -->"
OF_TRAINER = "This model card has been generated automatically according to the information the Trainer had access to"
OF_PEFT, GAP, GAPS = "# Model Card for Model ID", "[More Information Needed]", 10
"""The template that PEFT saves beside adapters, as long as more gaps than this are left in it."""
Rows = list[tuple[str, ...]]


def write_model_card(directory: str | Path) -> Path | None:
    """Writes the card into the directory of a run. Returns its path; None where a user's card is left as it is.

    Raises:
        ValueError: no run was trained there, or one of its files cannot be read.
    """
    directory = Path(directory)
    path = directory / CARD
    if path.is_file() and not _generated(path.read_text(encoding="utf-8", errors="replace")):
        return None
    text = card(RunLog.read(directory))
    with written_whole(path) as partial:
        text.save(partial)
    return path


def card(run: RunLog) -> ModelCard:
    """The card of a run."""
    data = _metadata(run)
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{MARK}\n\n{_text(run, data)}\n")


def _generated(text: str) -> bool:
    """Whether nobody has worked on a card."""
    return MARK in text or OF_TRAINER in text or (OF_PEFT in text and text.count(GAP) > GAPS)


def hub_id(name: str | None) -> str | None:
    """A name as the hub would take it, org/name; None for a path, or nothing."""
    if not name or "/" not in name or Path(name).exists():
        return None
    try:
        validate_repo_id(name)
    except HFValidationError:
        return None
    return name


def _metadata(run: RunLog) -> ModelCardData:
    record, model = run.record, run.record["model"]
    adapter, base = model.get("adapter"), hub_id(model.get("base"))
    relation: dict[str, Any] = {"base_model_relation": "adapter" if adapter else "finetune"} if base else {}
    results = _results(run)
    return ModelCardData(
        model_name=record["name"] if results else None,
        base_model=base,
        license=model.get("licence"),
        datasets=[name for name in map(hub_id, record["data"].get("datasets", [])) if name] or None,
        pipeline_tag="text-generation",
        library_name="peft" if adapter else "transformers",
        tags=["hf_longctx", "long-context", *(["lora"] if adapter and adapter.get("kind") == "LORA" else [])],
        eval_results=results or None,
        **relation,
    )


def _results(run: RunLog) -> list[EvalResult]:
    """List results for the model index: what was measured on held-out documents, and what was found in long texts."""
    named = sources_of(run.record["data"])
    name = f"{named}, held out" if named else "held-out documents"

    def result(metric: str, value: float, of: str = name) -> EvalResult:
        return EvalResult(
            task_type="text-generation",
            task_name="Text generation",
            dataset_type=re.sub(r"[^\w.-]+", "-", of).strip("-").lower(),
            dataset_name=of,
            metric_type=metric,
            metric_value=round(value, 4),
        )

    results = []
    if losses := run.held_out_losses:
        results += [result("loss", losses[-1]), result("perplexity", perplexity(losses[-1]))]
    if (loss := run.evaluation.get("loss")) is not None:
        of = "documents of hf-longctx evaluate"
        results += [result("loss", loss, of), result("perplexity", perplexity(loss), of)]
    for (task, length), (hits, trials) in _retrieval(run.evaluation).items():
        results.append(result("accuracy", hits / trials, f"{task} at {length:,} tokens"))
    return [entry for entry in results if math.isfinite(entry.metric_value)]


def _retrieval(evaluation: Mapping[str, Any]) -> dict[tuple[str, int], tuple[int, int]]:
    """(task, tokens) -> found and trials, at all depths."""
    sums: dict[tuple[str, int], tuple[int, int]] = {}
    for cell in evaluation.get("retrieval", []):
        if cell["trials"]:
            hits, trials = sums.get((cell["task"], cell["length"]), (0, 0))
            sums[cell["task"], cell["length"]] = (hits + cell["found"], trials + cell["trials"])
    return dict(sorted(sums.items()))


def _text(run: RunLog, metadata: ModelCardData) -> str:
    record, model = run.record, run.record["model"]
    sections = [
        f"# {_plain(record['name'])}",
        _summary(run, metadata),
        f"## Use\n\n```python\n{_snippet(run, metadata)}\n```",
    ]
    for title, rows in (
        ("Training data", _data_rows(record)),
        ("Context length", _context_rows(record)),
        ("Training", _training_rows(run)),
    ):
        if rows:
            sections.append(f"## {title}\n\n{_table(rows)}")
    if evaluation := _evaluation(run):
        sections.append(f"## Evaluation\n\n{evaluation}")
    if versions := record["environment"]:
        listing = ", ".join(f"{name} {number}" for name, number in versions.items() if name not in ("device", "system"))
        sections.append(f"## Versions\n\n{listing}")
    sections.append(
        "## Limits\n\nEverything that holds for the base model. Nothing was measured but what stands above."
        if model.get("base")
        else "## Limits\n\nNothing was measured but what stands above."
    )
    return "\n\n".join(sections)


def _summary(run: RunLog, metadata: ModelCardData) -> str:
    model, data = run.record["model"], run.record["data"]
    what = "An adapter" if model.get("adapter") else "A model"
    base = metadata.base_model
    origin = f" for [{base}](https://huggingface.co/{base})" if model.get("adapter") and base else ""
    origin = f", fine-tuned from [{base}](https://huggingface.co/{base})" if base and not origin else origin
    longest = f" on documents of up to {data['longest']:,} tokens" if data else ""
    return (
        f"{what}{origin}, trained{longest} with hf_longctx: full attention inside each document, and none between documents. "
        "`report.html` beside this card has the curves."
    )


def _snippet(run: RunLog, metadata: ModelCardData) -> str:
    """Return the code that loads the model with the positions and tokens that it was trained with."""
    name = json.dumps(run.record["name"], ensure_ascii=False)
    load = "from transformers import AutoModelForCausalLM\n\nmodel = AutoModelForCausalLM.from_pretrained"
    if not run.record["model"].get("adapter"):
        return f"{load}({name})"
    if ((run.record["configuration"] or {}).get("model") or {}).get("added_tokens"):
        return f'# `hf-longctx merge` adds rows for new tokens to the base, and puts this adapter into it.\n{load}("merged")'
    base = json.dumps(metadata.base_model or "the base model")
    if run.own_config:
        return (
            "from peft import PeftModel\nfrom transformers import AutoConfig, AutoModelForCausalLM\n\n"
            f"config = AutoConfig.from_pretrained({name})\n"
            f"model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base}, config=config), {name})"
        )
    return (
        "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
        f"model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base}), {name})"
    )


def _data_rows(record: Mapping[str, Any]) -> Rows:
    data = record["data"]
    if not data:
        return []
    held_out = data.get("held_out_documents")
    rows = [
        ("Sources", sources_of(data)),
        ("Documents", f"{data['documents']:,}"),
        ("Tokens", f"{data['tokens']:,}"),
        ("Length, p50 / p90 / p99", " / ".join(f"{data[percentile]:,}" for percentile in ("p50", "p90", "p99"))),
        ("Longest document", f"{data['longest']:,} tokens"),
        ("Held-out documents", "" if held_out is None else f"{held_out:,}"),
    ]
    return [row for row in rows if row[1]]


def _context_rows(record: Mapping[str, Any]) -> Rows:
    model, data, parallelism = record["model"], record["data"], record["parallelism"]
    rope = model.get("rope") or {}
    scaled = rope.get("rope_type", "default") != "default"
    rows = [
        ("Longest document trained on", f"{data['longest']:,} tokens" if data else ""),
        (
            "Positions of the model",
            f"{model['max_position_embeddings']:,}" if model.get("max_position_embeddings") else "",
        ),
        ("Rotary positions", f"{rope['rope_type']}, stretched {rope.get('factor')} times" if scaled else ""),
        ("Longer documents", parallelism.get("long_documents", "").replace("error", "refused")),
    ]
    return [row for row in rows if row[1]]


def _training_rows(run: RunLog) -> Rows:
    record = run.record
    training, parallelism, model = record["training"], record["parallelism"], record["model"]
    if not training:
        return []
    adapter = model.get("adapter")
    batch = [(parallelism.get(f"global_batch_{unit}"), unit) for unit in ("documents", "tokens")]
    speed, mfu = run.usual("tokens_per_second"), run.usual("mfu")
    precision = f"{model['dtype']} weights" + (f", {training['autocast']} autocast" if training["autocast"] else "")
    precision += f" (auto: {training['precision']})" if training.get("precision") else ""
    rows = [
        ("Weights", f"{model['parameters']:,}, of these trained {model['trained_parameters']:,}"),
        ("Adapter", f"{adapter['kind']}, r {adapter['r']}, alpha {adapter['alpha']}" if adapter else ""),
        ("Optimizer steps", f"{training['steps']:,} ({training['epochs']:.4g} epochs)"),
        ("Global batch", " ".join(f"{size:,} {unit}" for size, unit in batch if size)),
        (
            "Optimizer",
            f"{training['optim']}, learning rate {training['learning_rate']:g}, {training['lr_scheduler_type']}",
        ),
        ("Precision", precision),
        ("Exactness", model.get("certificate") or ""),
        ("Devices", f"{parallelism['devices']:,} x {record['environment'].get('device', '')}"),
        (
            "Parallelism",
            f"Hybrid Data Parallelism ({parallelism['planner']}, {parallelism['sharding']}), {parallelism['capacity']:,} tokens "
            f"on a rank at a time{_stages(parallelism)}",
        ),
        ("Time", duration(run.seconds) if run.seconds is not None else ""),
        ("Throughput", "" if speed is None else f"{speed:,.0f} tokens/s" + ("" if mfu is None else f", MFU {mfu:.1%}")),
        ("Seed", str(training["seed"])),
    ]
    return [row for row in rows if row[1]]


def _stages(parallelism: Mapping[str, Any]) -> str:
    stages = parallelism.get("pipeline_stages", 1)
    return f", {stages} pipeline stages" if stages > 1 else ""


def _evaluation(run: RunLog) -> str:
    """Tables in Markdown; empty where nothing was evaluated."""
    parts, losses, evaluation = [], run.held_out_losses, run.evaluation
    rows: Rows
    if losses:
        at_first = (
            [("Before training" if run.log[0].get("step") == 0 else "At first", losses[0])] if len(losses) > 1 else []
        )
        rows = [("Held-out documents", "loss per token", "perplexity")]
        rows += [
            (name, f"{loss:.4f}", f"{perplexity(loss):,.4g}")
            for name, loss in [*at_first, ("After training", losses[-1])]
        ]
        parts.append(_table(rows, header=True))
    for key, title in (("by_position", "Position in the document"), ("by_length", "Length of the document")):
        if evaluation.get(key):
            rows = [(f"{title}, tokens", "label tokens", "loss per token", "perplexity")]
            rows += [
                (
                    f"{bucket['from']:,} to {bucket['to']:,}",
                    f"{bucket['tokens']:,}",
                    f"{bucket['loss']:.4f}",
                    f"{perplexity(bucket['loss']):,.4g}",
                )
                for bucket in evaluation[key]
            ]
            parts.append(_table(rows, header=True))
    if retrieval := _retrieval(evaluation):
        rows = [("Retrieval", "tokens", "found")]
        rows += [(task, f"{length:,}", f"{hits} of {trials}") for (task, length), (hits, trials) in retrieval.items()]
        parts.append(_table(rows, header=True))
    return "\n\n".join(parts)


def _table(rows: Rows, header: bool = False) -> str:
    """Markdown; without a header of its own, an empty one."""
    first, *rest = rows if header else [("",) * len(rows[0]), *rows]
    lines = [first, ("---",) * len(first), *rest]
    return "\n".join(f"| {' | '.join(_plain(cell) for cell in line)} |" for line in lines)


def _plain(text: str) -> str:
    """Text that is shown as it is: no Markdown, no HTML, one line."""
    return re.sub(r"([\\`\[\]|])", r"\\\1", html.escape(" ".join(text.split()), quote=False))
