"""Runs with `bf16: auto`, and the rates that its products would be measured at."""

import json
from pathlib import Path
from typing import Any

import yaml

from hf_longctx.cli import main
from hf_longctx.precision import Rates
from tests.builders.tiny_models import TINY
from tests.builders.training_runs import documents, fresh_accelerator_state

FASTER, TIE, SLOWER = Rates(3e11, 1e11), Rates(1.14e11, 1e11), Rates(2e10, 1e11)
"""FLOP/s in bfloat16 and in float32 where bfloat16 is faster, about as fast, and slower."""


def file_of(folder: Path, **training: Any) -> Path:
    """Write a run of one step on tiny documents, with `bf16: auto` and these settings of `training`; return its file."""
    rows = [{"input_ids": row["input_ids"]} for row in documents([30, 7, 21, 12])]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sizes = {name: TINY[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    given = {"output_dir": str(folder / "out"), "use_cpu": True, "report_to": [], "bf16": "auto", "max_steps": 1}
    content = {
        "model": {"random_init": {"model_type": "llama"} | sizes | heads},
        "data": {"path": str(folder / "rows.jsonl")},
        "longctx": {"capacity": 64, "global_batch_documents": 2},
        "training": given | {"save_strategy": "steps", "save_steps": 1, "disable_tqdm": True} | training,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(content))
    return folder / "run.yaml"


def state_with(**fields: Any) -> str:
    """Return trainer_state.json of a run with these arguments."""
    return json.dumps({"stateful_callbacks": {"RunState": {"args": fields}}})


def said_by(capsys: Any, *arguments: str) -> str:
    """Return what a command prints."""
    fresh_accelerator_state()
    assert main(list(arguments)) == 0, capsys.readouterr()
    return capsys.readouterr().out
