"""A planned step of one rank: what makes the host wait for the device in it, and whether its streams are in order.

The step is planned, collated and pinned as in training, and run forward and backward with activation checkpointing. Documents of
many lengths make several micro-batches.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import torch
from torch.cuda import _sanitizer
from transformers import AutoModelForCausalLM, LlamaConfig

from acceptance.record import Bench, NotPossibleError
from hf_longctx import patch_model
from hf_longctx.data.collator import LengthAwareCollator, RankStep
from hf_longctx.planner import GPU, CostModel, Topology
from hf_longctx.training.execution import run_micro_batches
from hf_longctx.training.memory.activations import ActivationMemory

SANITIZED_OFFLOAD = 0.5
SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
TINY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
LAYERS = 4
"""The first and the last keep what they save; those between offload."""


def model_of(bench: Bench) -> Any:
    """A patched Llama on the device, in bfloat16, checkpointed."""
    config = LlamaConfig(**(TINY if bench.tiny else SIZES), num_hidden_layers=LAYERS, vocab_size=4096)
    torch.manual_seed(0)
    with bench.device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    patch_model(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def step_of(model: Any, longest: int) -> RankStep:
    """The step that training would plan for one rank: a document of `longest` tokens among shorter ones."""
    drawn = np.random.default_rng(0).lognormal(np.log(longest / 16), 1.0, 24).astype(np.int64) + 2
    lengths = np.minimum(np.r_[longest, drawn], longest)
    topology = Topology(world_size=1, capacity=longest)
    cost = CostModel.from_config(model.config, GPU, ranks_per_node=1, world_size=1)
    collator = LengthAwareCollator(topology, cost, 0)
    return collator.collate(lengths, lengths - 1, lambda doc: {"input_ids": np.ones(int(lengths[doc]), np.int64)})


def run(bench: Bench, model: Any, step: RankStep, memory: ActivationMemory, offload: float = 0.0) -> torch.Tensor:
    """Run it, forward and backward; returns its loss, which nobody has waited for."""
    model.zero_grad(set_to_none=True)
    backward = torch.Tensor.backward
    return run_micro_batches(model, step, None, bench.device, backward, memory=memory, offload=offload)


def _prepared(bench: Bench) -> tuple[Any, RankStep, ActivationMemory]:
    """Model, step and memory, after a first step: kernels are compiled and buffers are there."""
    model = model_of(bench)
    memory = ActivationMemory(model, device=bench.device)
    step = step_of(model, 256 if bench.tiny else 8192)
    step = step.pin_memory() if bench.cuda else step
    run(bench, model, step, memory)
    return model, step, memory


def count_waits(bench: Bench) -> None:
    """Count synchronisations of the host in one step, under torch.cuda.set_sync_debug_mode("warn"), and name the lines."""
    model, step, memory = _prepared(bench)
    if not bench.cuda:
        loss = run(bench, model, step, memory)
        bench.note(f"On a CPU nothing waits: the step ran, its loss is {float(loss):.3f}, and nothing was counted.")
        return
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run(bench, model, step, memory)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = Counter(place for warning in caught if (place := place_of(warning)) is not None)
    rows = [{"line": line, "times": str(times)} for line, times in waits.most_common()]
    bench.table(
        "Synchronisations",
        rows or [{"line": "none", "times": "0"}],
        {"syncs/in a planned step": sum(waits.values()), "syncs/micro-batches": len(step.micro_batches)},
    )


def place_of(warning: Any) -> str | None:
    """The line of a warning of the debug mode; None for another warning."""
    if "called a synchronizing" not in str(warning.message):  # others are about the mode itself
        return None
    return f"{'/'.join(warning.filename.split('/')[-3:])}:{warning.lineno}"


def sanitize(bench: Bench) -> None:
    """A step with half of what may wait in host memory there, under CUDA's sanitizer, which raises at an access out of order.

    Raises:
        NotPossibleError: the sanitizer is off.
    """
    if bench.cuda and not _sanitizer.cuda_sanitizer.enabled:
        raise NotPossibleError("TORCH_CUDA_SANITIZER was not set when torch was imported")
    model, step, memory = _prepared(bench)
    loss = run(bench, model, step, memory, SANITIZED_OFFLOAD)
    if bench.cuda:
        torch.cuda.synchronize()
    moved = memory.host.bytes_to_host
    row = {
        "micro-batches": str(len(step.micro_batches)),
        "MiB to host memory": f"{moved / 2**20:.2f}",
        "loss": f"{float(loss):.3f}",
        "accesses out of order": "0" if bench.cuda else "not looked for: this is a CPU",
    }
    bench.table("A step with offload", [row], {"sanitizer/steps without a fault": 1} if bench.cuda else {})
