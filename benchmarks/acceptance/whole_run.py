"""`hf-longctx train` as its users run it: one run from end to end, and one that is killed and started again.

A random Llama in bfloat16 autocast on documents of many lengths, with a capacity that the device decides. The second run is
ended by SIGKILL once it has written a checkpoint; the same command then goes on. Both must tell the same losses, but for the
order in which a GPU adds up, and plain transformers must read what they leave behind.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from acceptance.programs import ROOT
from acceptance.record import Bench

STEPS, SAVED = 6, 3
"""Optimizer steps of a run, and how many there are between checkpoints."""
DOCUMENTS, A_STEP = 240, 40
SAME = 5e-3
"""Largest difference between losses of a step in both runs, relative: they add up in another order, in bfloat16."""
SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
}
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 512,
}
POLL = 0.2
"""Seconds between looks at whether there is a checkpoint."""


def measure(bench: Bench) -> None:
    """Run both, and compare.

    Raises:
        RuntimeError: a run failed, losses differ or do not fall, or the model cannot be read.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = TINY if bench.tiny else SIZES
        write_documents(folder / "documents.jsonl", sizes["vocab_size"], 256 if bench.tiny else 16384)
        whole, seconds = trained(bench, folder, "whole", sizes)
        killed_after = killed(bench, folder, "again", sizes)
        again, seconds_again = trained(bench, folder, "again", sizes)
        rows = [
            {"step": str(step), "loss": f"{whole[step]:.5f}", "killed and started again": f"{again[step]:.5f}"}
            for step in sorted(whole)
        ]
        worst = max(abs(again[step] / whole[step] - 1) for step in whole)
        bench.table("Losses", rows, {"run/largest difference of a step's losses": worst})
        row = {
            "whole, s": f"{seconds:.1f}",
            "killed after, s": f"{killed_after:.1f}",
            "then, s": f"{seconds_again:.1f}",
        }
        bench.table("Runs", [row], {"run/seconds of a whole one": seconds})
        if not worst <= SAME:
            raise RuntimeError(f"losses of both runs differ by up to {worst:.1e}; {SAME:g} may be")
        if not whole[STEPS] < whole[1]:
            raise RuntimeError(f"the loss does not fall: {whole[1]:.4f} in step 1, {whole[STEPS]:.4f} in step {STEPS}")
        plain = plain_loss(folder / "whole", folder / "documents.jsonl", bench.device)
        bench.table("Plain transformers reads it", [{"loss of one document": f"{plain:.4f}"}])
        if not plain < whole[1]:
            raise RuntimeError(f"plain transformers reads a model whose loss is {plain:.4f}; step 1 had {whole[1]:.4f}")


def write_documents(path: Path, vocabulary: int, longest: int) -> None:
    """Write documents of many lengths whose tokens are of few kinds, so that a loss can fall soon."""
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(np.log(longest / 16), 1.2, DOCUMENTS), 2, longest).astype(int)
    with path.open("w", encoding="utf-8") as lines:
        for length in lengths:
            ids = generator.zipf(1.5, length) % vocabulary
            lines.write(json.dumps({"input_ids": ids.tolist()}) + "\n")


def configured(bench: Bench, folder: Path, name: str, sizes: dict[str, Any]) -> Path:
    """Write the configuration of a run."""
    config = {
        "model": {"random_init": {"model_type": "llama", "max_position_embeddings": 32768} | sizes},
        "data": {"path": str(folder / "documents.jsonl")},
        "longctx": {"capacity": 512 if bench.tiny else 0, "global_batch_documents": A_STEP},
        "training": {
            "output_dir": str(folder / name),
            "max_steps": STEPS,
            "learning_rate": 1e-3,
            "bf16": True,
            "gradient_checkpointing": True,
            "use_cpu": not bench.cuda,
            "seed": 0,
            "logging_steps": 1,
            "save_steps": SAVED,
            "resume_from_checkpoint": "auto",
            "report_to": [],
        },
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def started(bench: Bench, folder: Path, name: str, sizes: dict[str, Any]) -> subprocess.Popen[str]:
    """Start a run."""
    return subprocess.Popen(
        [sys.executable, "-m", "hf_longctx", "train", str(configured(bench, folder, name, sizes))],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def trained(bench: Bench, folder: Path, name: str, sizes: dict[str, Any]) -> tuple[dict[int, float], float]:
    """Run to the end. Returns the loss of each step, and seconds."""
    begun = time.monotonic()
    process = started(bench, folder, name, sizes)
    output, _ = process.communicate(timeout=max(60.0, bench.left()))
    print(output)
    if process.returncode:
        raise RuntimeError(f"hf-longctx train ended with {process.returncode}: {output.strip().splitlines()[-1]}")
    state = json.loads((folder / name / f"checkpoint-{STEPS}" / "trainer_state.json").read_text(encoding="utf-8"))
    losses = {entry["step"]: entry["loss"] for entry in state["log_history"] if "loss" in entry}
    return losses, time.monotonic() - begun


def killed(bench: Bench, folder: Path, name: str, sizes: dict[str, Any]) -> float:
    """Run until there is a checkpoint, and kill it. Returns seconds."""
    begun = time.monotonic()
    process = started(bench, folder, name, sizes)
    state = folder / name / f"checkpoint-{SAVED}" / "trainer_state.json"
    while not state.exists() and process.poll() is None:
        time.sleep(POLL)
    process.send_signal(signal.SIGKILL)
    output, _ = process.communicate()
    print(output)
    if process.returncode != -signal.SIGKILL:
        raise RuntimeError(f"the run was over before it was killed, with {process.returncode}")
    return time.monotonic() - begun


def plain_loss(path: Path, documents: Path, device: torch.device) -> float:
    """Loss of the first document by plain transformers."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
    with documents.open(encoding="utf-8") as lines:
        ids = torch.tensor([json.loads(next(lines))["input_ids"]], device=device)
    with torch.no_grad():
        return float(model(input_ids=ids, labels=ids).loss)
