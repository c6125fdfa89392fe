"""Trains one way on this rank, from the same weights with the same optimizer as every other way, and reads the clocks."""

import importlib
import logging
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch.distributed.tensor import DTensor
from training_cases import Case
from training_peers import CannotRun, Settings
from transformers import AutoConfig, AutoModelForCausalLM, PrinterCallback, TrainerCallback, TrainingArguments

from hf_longctx.training.measuring.rank_profile import ProfileSettings, profile_model

PEERS = Path(__file__).resolve().parents[1] / ".cache" / "peers"
"""What scripts/setup_bench.sh keeps out of .venv, because accelerate imports DeepSpeed wherever it finds it."""

Clock = Literal["wall", "cpu"]
RANKS = 2
ONE_PROCESS = "one process"
WAYS = {
    "ours": "ours",
    ONE_PROCESS: "data_parallel",
    "single": "data_parallel",
    "padded": "data_parallel",
    "packed": "data_parallel",
    "packed, dense mask": "data_parallel",
    "accelerate cp=2": "torch_cp",
    "accelerate cp=2, ring": "torch_cp",
    "DeepSpeed Ulysses sp=2": "deepspeed_ulysses",
    "accelerate cp=2, packed": "torch_cp",
    "DeepSpeed Ulysses sp=2, packed": "deepspeed_ulysses",
}
"""Each way of training, and its module in training_peers."""


@dataclass(frozen=True)
class Run:
    """One rank's part of one run."""

    seconds: list[float]
    """of each step after the first"""
    cpu_seconds: float
    """of those steps"""
    losses: list[float]
    gradient_norms: list[float]
    peak_bytes: int
    computed: int | None
    """see Way"""


class StepClock(TrainerCallback):
    """Reads the clocks after every optimizer step."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())


class GradientWriter(TrainerCallback):
    """Writes the gradient of all parameters, in the order of their names, to a file for each step on rank 0."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        gradients = [parameter.grad for _, parameter in sorted(model.named_parameters())]
        whole = [gradient.full_tensor() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        if args.process_index == 0:
            np.save(
                self._folder / f"{state.global_step}.npy", torch.cat([gradient.flatten() for gradient in whole]).numpy()
            )


def run(name: str, case: Case, settings: Settings, ranks: int = RANKS) -> list[Run] | str:
    """One way on fresh ranks, of which one process has one; or why that cannot be. Ways but ours know RANKS ranks."""
    folders = list(sys.path)
    if WAYS[name] == "deepspeed_ulysses":
        sys.path.append(str(PEERS))  # ranks begin with this path: transformers looks for DeepSpeed as it is imported
    try:
        runs = on_ranks(_train, 1 if name == ONE_PROCESS else ranks, name, case, settings)
    finally:
        sys.path[:] = folders
    reasons = [run for run in runs if isinstance(run, str)]
    return reasons[0] if reasons else runs


def profile(case: Case, seconds: float, path: str, ranks: int = RANKS, clock: Clock = "wall") -> None:
    """Measures this machine on the model for about so many seconds, as `hf-longctx profile` does, for the planner."""
    on_ranks(_profile, ranks, case, seconds, path, clock)


def _profile(case: Case, seconds: float, path: str, clock: Clock) -> None:
    settings = ProfileSettings(longest=max(case.lengths), seconds=seconds, clock=clock)
    measured = profile_model(model_of(case, "sdpa").config, torch.device("cpu"), settings)
    if dist.get_rank() == 0:
        measured.save(path)


def _train(name: str, case: Case, settings: Settings) -> Run | str:
    """On each rank: all steps of a case in one way; or why that cannot be."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        way = importlib.import_module(f"training_peers.{WAYS[name]}").WAYS[name](case, settings)
    except ImportError as error:
        return f"not installed ({error}): bash scripts/setup_bench.sh"
    except CannotRun as reason:
        return str(reason)
    clock = StepClock()
    callbacks = [clock] + ([GradientWriter(settings.gradients)] if settings.gradients else [])
    with tempfile.TemporaryDirectory() as output:
        shared = {
            "output_dir": output,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": way.accumulation,
            "max_steps": len(case.steps),
            "learning_rate": settings.learning_rate,
            "lr_scheduler_type": "constant",
            "use_cpu": True,
            "seed": case.seed,
            "train_sampling_strategy": "sequential",
            "remove_unused_columns": False,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
        }
        arguments = TrainingArguments(**shared | way.arguments)
        trainer = way.trainer(
            model=model_of(case, way.attention), args=arguments, train_dataset=way.dataset, callbacks=callbacks
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    if dist.is_initialized():
        dist.barrier()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Run(
        [end - start for start, end in zip(clock.wall, clock.wall[1:])],
        clock.cpu[-1] - clock.cpu[0],
        [float(entry["loss"]) for entry in logged],
        [float(entry["grad_norm"]) for entry in logged],
        _peak_bytes(),
        way.computed,
    )


def model_of(case: Case, attention: str) -> Any:
    """A Llama of random weights, 4 layers of 256, float32."""
    torch.manual_seed(case.seed)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=case.vocabulary,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=max(case.lengths),
        use_cache=False,  # with a cache, flattened documents silently attend to each other
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def _peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
