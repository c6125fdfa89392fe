"""MemoryModel beside what tensors take on fake tensors (hf_longctx/training/traced.py), by family, sharding and recomputation.

    python benchmarks/traced_memory.py --json benchmarks/results/traced_memory.json --check        # 8 minutes of one core
    python benchmarks/traced_memory.py --only "gpt-oss 20B, zero3"

Real widths, few layers, one document over all ranks, and gradients of earlier micro-batches. Counted over traced is to be
between 1.00 and 1.08: below, a run ends for lack of memory; above, capacity is lost. Not compared is what no trace sees: the
kernel's own memory while it runs, and what is no tensor's.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from ranks import on_ranks
from report import conclude, parser
from transformers import AutoModelForCausalLM

from hf_longctx import Layout, patch_model, zigzag
from hf_longctx.commands.preflight.trace_run import with_layers
from hf_longctx.commands.shared.models import published_sizes, transformers_config
from hf_longctx.hardware.kernel_bytes import returned
from hf_longctx.models.adapters.peft_adapters import add_lora
from hf_longctx.planner.memory.memory_model import MemoryModel
from hf_longctx.training.traced import Traceable, kernel_on_any_device

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """A micro-batch of one rank."""

    model: str
    """one of hardware/published.py"""
    sharding: str = "zero3"
    ranks: int = 8
    tokens: int = 16384
    """of a rank"""
    layers: int = 4
    checkpointing: bool = True
    keep_attention: bool = False
    tile_tokens: int = 0
    lora_rank: int = 0
    """of adapters on all linear layers, which are float32"""

    @property
    def half(self) -> bool:
        """Whether weights are held in bfloat16: accelerate's FSDP2 holds all in float32, and gathers them in bfloat16."""
        return self.sharding == "ddp"


CASES = {
    "Llama 8B, zero3": Case("meta-llama/Llama-3.1-8B"),
    "Llama 8B, ddp, in tiles": Case("meta-llama/Llama-3.1-8B", "ddp", tokens=65536, tile_tokens=4096),
    "Mistral 7B, ddp": Case("mistralai/Mistral-7B-v0.3", "ddp", layers=2),
    "Mixtral 8x7B, zero3, 64 ranks": Case("mistralai/Mixtral-8x7B-v0.1", ranks=64, tokens=38656, keep_attention=True),
    "Qwen3 14B, zero3, 32 ranks": Case("Qwen/Qwen3-14B", ranks=32),
    "Qwen3 8B, zero3, attention kept": Case("Qwen/Qwen3-8B", tokens=32768, keep_attention=True),
    "Qwen3 8B, ddp, in tiles": Case("Qwen/Qwen3-8B", "ddp", tokens=65536, layers=2, tile_tokens=4096),
    "Qwen2.5 7B, zero1, all kept": Case("Qwen/Qwen2.5-7B", "zero1", layers=2, checkpointing=False),
    "Qwen3 30B-A3B, zero3": Case("Qwen/Qwen3-30B-A3B"),
    "gpt-oss 20B, ddp": Case("openai/gpt-oss-20b", "ddp", ranks=4, layers=2),
    "gpt-oss 20B, zero3": Case("openai/gpt-oss-20b"),
    "Gemma 2 9B, zero3": Case("google/gemma-2-9b", ranks=16),
    "Gemma 3 1B, one rank": Case("google/gemma-3-1b-pt", "ddp", ranks=1, tokens=32768, layers=6),
    "OLMo 2 7B, zero2": Case("allenai/OLMo-2-1124-7B", "zero2", layers=3),
    "Phi 4, zero3": Case("microsoft/phi-4", ranks=16, layers=3),
    "GLM 4 32B, zero3": Case("zai-org/GLM-4-32B-0414", ranks=32, layers=3),
    "Llama 8B, ddp, LoRA": Case("meta-llama/Llama-3.1-8B", "ddp", lora_rank=16),
    "Mistral 7B, ddp, LoRA": Case("mistralai/Mistral-7B-v0.3", "ddp", lora_rank=16),
    "Mixtral 8x7B, ddp, LoRA": Case("mistralai/Mixtral-8x7B-v0.1", "ddp", layers=3, lora_rank=16),
    "Qwen3 8B, ddp, LoRA": Case("Qwen/Qwen3-8B", "ddp", lora_rank=16),
}
RANK = 2
"""Whose micro-batch is traced, where there are as many."""


def compared(case: Case) -> dict[str, float]:
    """Bytes that are traced, and those that are counted, without states of the optimizer."""
    torch.set_num_threads(1)
    sizes = published_sizes(case.model)
    assert sizes is not None
    full = transformers_config(sizes)
    config = with_layers(full, range(case.layers))
    counted = MemoryModel.from_config(
        config,
        world_size=case.ranks,
        sharding=case.sharding,
        weight_bytes=2 if case.half else 4,
        lora_rank=case.lora_rank,
        checkpointing=case.checkpointing,
        keep_attention=case.keep_attention,
        mlp_tile_tokens=case.tile_tokens,
        workspace=returned,
    )
    rank = min(RANK, case.ranks - 1)
    layout = Layout(zigzag(0, case.tokens * case.ranks, range(case.ranks)))

    def model_of(layers: int) -> Any:
        with torch.device("meta"):
            made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if case.half else torch.float32)
            if case.lora_rank:
                made = add_lora(made, r=case.lora_rank, init_lora_weights=False)
        patch_model(made, kernel=kernel, liger_kernels=False, mlp_tile_tokens=case.tile_tokens)
        if case.checkpointing:
            made.gradient_checkpointing_enable({"use_reentrant": False})
        return made

    with kernel_on_any_device() as kernel:
        traced = Traceable(model_of, layout, rank, case.ranks, case.ranks, case.sharding, case.keep_attention).trace(
            case.layers
        )
    parts = counted.parts(layout.tokens(rank))
    return {
        "traced": traced.peak,
        "counted": sum(count for name, count in parts.items() if name not in ("optimizer", "outside")),
        "seconds": traced.seconds,
    }


def compare(names: list[str], run: Callable[[Case], dict[str, float]]) -> tuple[list[dict[str, str]], dict[str, float]]:
    """Rows of the table, and figures."""
    rows, figures = [], {}
    for name in names:
        case = run(CASES[name])
        ratio = case["counted"] / case["traced"]
        figures[f"{name}/counted over traced"] = ratio
        rows.append(
            {
                "case": name,
                "traced GiB": f"{case['traced'] / GIB:.2f}",
                "counted GiB": f"{case['counted'] / GIB:.2f}",
                "counted / traced": f"{ratio:.3f}",
                "tracing, s": f"{case['seconds']:.0f}",
            }
        )
        print("; ".join(rows[-1].values()), flush=True)
    return rows, figures


def in_a_process(case: Case) -> dict[str, float]:
    """Compare in a process of its own, which leaves nothing behind."""
    return on_ranks(compared, 1, case)[0]


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help="trace these cases (default: all)"
    )
    arguments = options.parse_args()
    load = os.getloadavg()[0]
    rows, figures = compare(arguments.only, in_a_process)
    return conclude(arguments, rows, figures, load)


if __name__ == "__main__":
    sys.exit(main())
