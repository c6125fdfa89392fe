"""Measures the memory of a micro-batch at the real widths of large models, on fake tensors of a CPU: what tensors take at their
fullest, by torch's MemTracker, beside what MemoryModel counts.

    python tests/worlds/fake_memory.py '{"model": "llama-8b", "ranks": 8, "tokens": 131072}'

Attention is torch's variable-length kernel for CUDA, through its meta functions: what it takes for itself while it runs is not
there, nor are communicators and the allocator's own. Peers are torch's "fake" process group.
"""

import json
import sys
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hf_longctx import Layout, Segment, patch_model, zigzag
from hf_longctx.planner.memory.memory_model import MemoryModel
from hf_longctx.training.traced import Traceable, kernel_on_any_device
from tests.worlds.fake_cuda.steps import RANK, configured


@dataclass(frozen=True)
class Case:
    """A micro-batch of one rank, with gradients of an earlier one."""

    model: str
    """one of fake_cuda.cases.MODELS"""
    ranks: int
    tokens: int
    """of one document over all ranks"""
    whole: bool = False
    """instead, of two documents on this rank alone"""
    sharding: str = "ddp"
    layers: int = 2
    checkpointing: bool = True
    keep_attention: bool = False
    keep_last_slice: bool = False
    ulysses: int = 1
    offload: float = 0.0


def measured(case: Case) -> dict[str, Any]:
    """The most bytes that tensors take at once, by kind, and the parts that MemoryModel counts."""
    config = configured(case.model, case.layers)
    sharding = {"sharding": case.sharding, "weight_bytes": 2 if case.sharding == "ddp" else 4}
    counted = MemoryModel.from_config(
        config,
        world_size=1 if case.whole else case.ranks,
        checkpointing=case.checkpointing,
        keep_attention=case.keep_attention,
        keep_last_slice=case.keep_last_slice,
        ulysses_degree=case.ulysses,
        **sharding,
    )
    split = zigzag(0, case.tokens, range(case.ranks))
    half = case.tokens // 2
    layout = Layout({RANK: (Segment(0, 0, half), Segment(1, 0, half))} if case.whole else split, ulysses=case.ulysses)
    tokens = layout.tokens(RANK)

    def model_of(layers: int) -> Any:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.bfloat16 if case.sharding == "ddp" else torch.float32
            )
        patch_model(model, kernel=kernel, liger_kernels=False, keep_last_slice=case.keep_last_slice)
        if case.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model

    with kernel_on_any_device() as kernel:
        traced = Traceable(
            model_of, layout, RANK, case.ranks, case.ranks, case.sharding, case.keep_attention, case.offload
        ).trace(case.layers)
    parts = counted.parts(tokens, int(1000 * case.offload))
    return {
        "peak": traced.peak,
        "kinds": traced.kinds,
        "counted": {name: count for name, count in parts.items() if name != "optimizer"},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    for text in sys.argv[1:]:
        print(json.dumps(measured(Case(**json.loads(text)))), flush=True)
