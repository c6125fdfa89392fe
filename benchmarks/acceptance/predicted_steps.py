"""Seconds of steps of mixed lengths, as planned with a profile of this device, beside what they took.

A random Llama in bfloat16 is profiled as `hf-longctx profile` does, then trained with that profile: documents from a lognormal
distribution, most of them short, up to the capacity of a rank. The planner balances by these predictions. The same steps once
more with the preset of the device show what planning without a profile believes.
"""

from __future__ import annotations

import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoConfig, AutoModelForCausalLM, PrinterCallback, TrainingArguments

from acceptance.record import Bench
from hf_longctx import LongContextPlugin, LongContextTrainer
from hf_longctx.training.measuring.rank_profile import ProfileSettings, profile_model

SIZES: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 32768,
}
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
PROFILE_SHARE = 0.4
"""Of the part's time."""
WARM_UP = 2
"""Steps that nobody counts: kernels are chosen, and memory is asked for."""
SIGMA = 1.4
"""Of the lengths' logarithm."""


def measure(bench: Bench) -> None:
    """Profile, train with the profile, and with the preset."""
    longest, documents, steps = (512, 12, 5) if bench.tiny else (32768, 20, 10)
    config = AutoConfig.for_model(
        "llama", **(TINY if bench.tiny else SIZES), max_position_embeddings=longest, use_cache=False
    )
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "profile.json"
        settings = ProfileSettings("bfloat16", True, longest, max(1.0, PROFILE_SHARE * bench.left()))
        profile = profile_model(config, bench.device, settings)
        profile.save(path)
        errors = [abs(error) for error, point in zip(profile.errors, profile.points) if point.part == "micro_batch"]
        row = {"points": str(len(profile.points)), "median error of micro-batches": f"{statistics.median(errors):.1%}"}
        speed = {field: f"{value:.3g}" for field, value in asdict(profile.speed).items() if isinstance(value, float)}
        bench.table("Profile", [row | speed], {"prediction/profile, median error": statistics.median(errors)})
        for planned_with, file in (("its profile", str(path)), ("the preset of its name", None)):
            if bench.left() < 0:
                bench.note(f"The time was used up before: {planned_with}.")
                continue
            trained = train(bench, config, file, longest, documents, steps)
            _tell(bench, planned_with, trained[WARM_UP:])


def lengths(longest: int, count: int) -> list[int]:
    """Tokens of documents, the same in every run."""
    drawn = np.random.default_rng(0).lognormal(np.log(longest / 16), SIGMA, count)
    return [int(tokens) for tokens in np.clip(drawn, 16, longest)]


def train(
    bench: Bench, config: Any, profile: str | None, longest: int, documents: int, steps: int
) -> list[tuple[float, float]]:
    """Seconds of each step, as planned and as measured."""
    rng = np.random.default_rng(1)
    rows = [
        {"input_ids": rng.integers(config.vocab_size, size=n).tolist()} for n in lengths(longest, documents * steps)
    ]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as output:
        trainer = LongContextTrainer(
            model=AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16),
            args=TrainingArguments(
                output_dir=output,
                max_steps=steps,
                gradient_checkpointing=True,
                use_cpu=not bench.cuda,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(rows),
            plugin=LongContextPlugin(
                capacity=longest, global_batch_documents=documents, profile=profile, recalibrate_steps=0
            ),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        names = ("predicted_step_seconds", "measured_step_seconds")
        return [
            (entry[names[0]], entry[names[1]])
            for entry in trainer.state.log_history
            if all(name in entry for name in names)
        ]


def _tell(bench: Bench, planned_with: str, steps: list[tuple[float, float]]) -> None:
    predicted, measured = np.array(steps).T
    ratio = measured / predicted
    factor = float(np.median(ratio))
    errors = np.abs(ratio - 1)
    row = {
        "planned with": planned_with,
        "steps": str(len(steps)),
        "seconds of a step": f"{np.median(measured):.4g}",
        "measured / planned": f"{measured.sum() / predicted.sum():.3f}",
        "median error": f"{np.median(errors):.1%}",
        "worst": f"{errors.max():.1%}",
        "median error but for one factor": f"{np.median(np.abs(ratio / factor - 1)):.1%}",
    }
    name = f"prediction/{planned_with}"
    figures = {
        f"{name}, measured over planned": float(measured.sum() / predicted.sum()),
        f"{name}, median error": float(np.median(errors)),
        f"{name}, median error but for one factor": float(np.median(np.abs(ratio / factor - 1))),
    }
    bench.table("Steps", [row], figures)
