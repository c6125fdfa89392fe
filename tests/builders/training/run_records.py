"""The log and the record of a run, and weights beside them."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hf_longctx.report.training_runs.saved_weights import weights_hash

LOG = [
    {"step": 2, "loss": 2.5, "tokens_per_second": 1234.0},
    {"step": 2, "eval_loss": 2.0},
    {"step": 2, "train_runtime": 75},
]
MODEL = {
    "architecture": "LlamaForCausalLM",
    "base": "org/base-7b",
    "licence": "apache-2.0",
    "parameters": 7_000_000,
    "trained_parameters": 7_000_000,
    "dtype": "float32",
    "adapter": None,
    "rope": {"rope_type": "yarn", "factor": 4.0},
    "max_position_embeddings": 131_072,
    "certificate": "exact over layouts: largest difference 1e-15",
}
RECORD: dict[str, Any] = {
    "format": "hf_longctx run 1",
    "name": "long-7b",
    "model": MODEL,
    "data": {
        "sources": ["org/books"],
        "datasets": ["org/books"],
        "documents": 20,
        "tokens": 500_000,
        "p50": 2000,
        "p90": 9000,
        "p99": 100_000,
        "longest": 120_000,
        "held_out_documents": 3,
    },
    "parallelism": {
        "devices": 8,
        "planner": "hdp",
        "sharding": "zero3",
        "capacity": 16_384,
        "long_documents": "split",
        "global_batch_tokens": 250_000,
        "global_batch_documents": None,
    },
    "training": {
        "steps": 2,
        "epochs": 1.0,
        "optim": "adamw_torch",
        "learning_rate": 1e-5,
        "lr_scheduler_type": "cosine",
        "autocast": "bfloat16",
        "seed": 7,
    },
    "environment": {"device": "NVIDIA H100", "torch": "2.13.0"},
}


def save_weights(folder: Path, value: float) -> dict[str, str | None]:
    """Save a model's weights; return what an evaluation says of them."""
    save_file({"weight": torch.full((3,), value)}, folder / "model.safetensors")
    return {"weights": weights_hash(folder)}
