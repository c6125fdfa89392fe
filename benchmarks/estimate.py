"""Memory that MemoryModel predicts, beside what training steps hold at most: the bytes that torch's CPU allocator gives out.

    python benchmarks/estimate.py --json benchmarks/results/estimate.json --check      # 16 minutes on two busy cores
    python benchmarks/estimate.py --models small --modes "ddp, 1 rank"                 # a quick look

Llamas of three sizes (float32) are trained for two steps by LongContextTrainer with AdamW: on one rank, and on two ranks
that hold half of each document (zigzag), with each sharding, with and without activation checkpointing; ranks have one
computing thread, and run one case after another. Each step has two micro-batches, so that gradients of the first are there
while the second is computed, and the optimizer's states are there in the second step. Everything is counted from before
the model is built (allocated.py): weights, gradients, optimizer, activations, DDP's buckets, what FSDP2 gathers, scratch of
kernels; not the resident set, in which freed memory stays.

The figure is |estimated / measured - 1| of the rank that holds most.
"""

import itertools
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from allocated import count_on_all_threads, most_allocated
from datasets import Dataset
from ranks import on_ranks
from report import conclude, parser
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from hf_longctx import LongContextPlugin, LongContextTrainer
from hf_longctx.planner.memory.memory_model import MemoryModel

TOKENS = 1024
"""Of each rank in each micro-batch."""
MICRO_BATCHES, STEPS = 2, 2
LOSS_CHUNK_TOKENS = 256
VOCABULARY = 4096


@dataclass(frozen=True)
class Size:
    """A Llama; heads are 64 wide, and two share keys and values."""

    layers: int
    hidden: int

    def config(self) -> LlamaConfig:
        return LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden,
            intermediate_size=8 * self.hidden // 3 // 32 * 32,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // 64,
            num_key_value_heads=self.hidden // 128,
            max_position_embeddings=2 * TOKENS,
        )


@dataclass(frozen=True)
class Case:
    """One run."""

    model: str
    mode: str
    checkpointing: bool
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.model}/{self.mode}/{'checkpointing' if self.checkpointing else 'all activations kept'}"


MODELS = {"small": Size(4, 256), "medium": Size(5, 384), "large": Size(6, 640)}
MODES = {
    "ddp, 1 rank": ("ddp", 1),
    "ddp, 2 ranks": ("ddp", 2),
    "zero1, 2 ranks": ("zero1", 2),
    "zero2, 2 ranks": ("zero2", 2),
    "zero3, 2 ranks": ("zero3", 2),
}
"""Name -> sharding, ranks."""


def measured(cases: Sequence[Case]) -> list[int]:
    """Return for each case, the most bytes that torch held at once on this rank, from building the model to the last step."""
    torch.set_num_threads(1)
    count_on_all_threads()
    return [most_allocated(partial(_train, case)) for case in cases]


def _in_one_process(cases: Sequence[Case]) -> list[list[int]]:
    """Run as a user starts one: without torch.distributed, which would wrap the model in DDP."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return [pool.submit(measured, cases).result()]


def _train(case: Case) -> None:
    AcceleratorState._reset_state(
        reset_partial_state=True
    )  # accelerate remembers the run before, and in the environment
    GradientState._reset_state()
    for name in [name for name in os.environ if name.startswith(("FSDP_", "ACCELERATE_USE_FSDP"))]:
        del os.environ[name]
    torch.manual_seed(0)
    sharding, ranks = MODES[case.mode]
    document = {"input_ids": torch.randint(VOCABULARY, (case.tokens * ranks,)).tolist()}
    with tempfile.TemporaryDirectory() as directory:
        LongContextTrainer(
            LlamaForCausalLM(MODELS[case.model].config()),
            TrainingArguments(
                directory,
                use_cpu=True,
                max_steps=STEPS,
                optim="adamw_torch",
                gradient_checkpointing=case.checkpointing,
                gradient_checkpointing_kwargs={"use_reentrant": False},
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list([document] * (MICRO_BATCHES * STEPS)),
            plugin=LongContextPlugin(
                capacity=case.tokens,
                global_batch_documents=MICRO_BATCHES,
                sharding=sharding,
                keep_attention="never",
                loss_chunk_tokens=LOSS_CHUNK_TOKENS,
                recalibrate_steps=0,
            ),
        ).train()


def estimated(case: Case) -> dict[str, int]:
    """Part -> bytes."""
    sharding, ranks = MODES[case.mode]
    return MemoryModel.from_config(
        MODELS[case.model].config(),
        sharding=sharding,
        world_size=ranks,
        weight_bytes=4,
        activation_bytes=4,
        checkpointing=case.checkpointing,
        loss_chunk_tokens=LOSS_CHUNK_TOKENS,
    ).parts(case.tokens)


def compare(cases: Sequence[Case]) -> tuple[list[dict[str, str]], dict[str, float], dict[str, Any]]:
    """Rows of the table, figures, and the parts of each estimate."""
    peaks: dict[Case, int] = {}
    for ranks in sorted({MODES[case.mode][1] for case in cases}):
        chosen = [case for case in cases if MODES[case.mode][1] == ranks]
        by_rank = on_ranks(measured, ranks, chosen) if ranks > 1 else _in_one_process(chosen)
        peaks |= {case: max(peaks_of_ranks) for case, peaks_of_ranks in zip(chosen, zip(*by_rank))}
    rows: list[dict[str, str]] = []
    figures: dict[str, float] = {}
    for case in cases:
        parts = estimated(case)
        total, peak, size = sum(parts.values()), peaks[case], MODELS[case.model]
        figures |= {
            f"{case.name}/error": abs(total / peak - 1),
            f"{case.name}/estimated bytes": total,
            f"{case.name}/measured bytes": peak,
        }
        cells = {
            "model": f"{case.model}: {size.layers} layers, {size.hidden} wide",
            "mode": case.mode,
            "layers keep": "inputs" if case.checkpointing else "everything",
            "estimated / measured": f"{total / peak:.3f}",
            "measured MiB": f"{peak / 2**20:.0f}",
        }
        rows.append(cells | {part: f"{count / 2**20:.0f}" for part, count in parts.items()})
    return rows, figures, {case.name: estimated(case) for case in cases}


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS), help="estimate these models (default: all)"
    )
    options.add_argument(
        "--modes", nargs="+", choices=MODES, default=list(MODES), help="estimate these modes (default: all)"
    )
    options.add_argument(
        "--tokens",
        type=int,
        default=TOKENS,
        help="put so many tokens of a micro-batch on a rank (default: %(default)s)",
    )
    arguments = options.parse_args()
    load = os.getloadavg()[0]
    chosen = itertools.product(arguments.models, arguments.modes, (False, True))
    rows, figures, parts = compare([Case(*fields, arguments.tokens) for fields in chosen])
    return conclude(arguments, rows, figures, load, section="model", parts=parts)


if __name__ == "__main__":
    sys.exit(main())
