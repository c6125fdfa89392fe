"""Training steps on one GPU beside plain Trainer's, with the same kernel on the same documents in the same steps.

    ours             LongContextTrainer
    one at a time    plain Trainer, a document in a micro-batch
    padded           plain Trainer, batches padded to their longest document, which is computed
    packed           plain Trainer, packs by best fit decreasing, flattened; attention stays inside documents

Plain Trainer's attention is registered here: it calls the kernel that ours chooses, once for a batch, so that what differs is all
but the kernel. Weights and optimizer states are in bfloat16 (AdamW); steps after the first WARM_UP count.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import Any

import torch
from gpu_contenders import Attention, ours
from training_cases import Case, mixture
from training_peers import Settings, Way, data_parallel
from training_peers.ours import ours as prepare_ours
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    LlamaConfig,
    PrinterCallback,
    TrainerCallback,
    TrainingArguments,
)

from acceptance.record import Bench

NAME = "the_kernel_of_ours"
WARM_UP = 2
SIZES: dict[str, Any] = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
}
TINY: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}


class KernelOfOurs:
    """An attention function of transformers that calls the kernel of ours.

    Every row of a batch is a document, or documents begin at cu_seq_lens_q; boundaries are looked up once for all layers.
    """

    def __init__(self) -> None:
        self._boundaries: Any = None
        self._attend: Attention | None = None

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **more: Any
    ) -> tuple[torch.Tensor, None]:
        """query [B, Hq, T, D], key and value [B, Hkv, T, D] -> [B, T, Hq, D]"""
        batch, _, tokens, _ = query.shape
        starts = more.get("cu_seq_lens_q")
        boundaries = (batch, tokens) if starts is None else starts
        known = self._boundaries
        if known is not boundaries and not (starts is None and isinstance(known, tuple) and known == boundaries):
            lengths = (tokens,) * batch if starts is None else tuple(starts.diff().tolist())
            self._boundaries, self._attend = boundaries, ours(lengths, query.device)
        assert self._attend is not None
        out = self._attend(*(x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)))
        return out.unflatten(0, (batch, tokens)), None


class _Clock(TrainerCallback):
    """Reads the clock after every optimizer step, when the device is done."""

    def __init__(self, cuda: bool) -> None:
        self._cuda, self.times = cuda, list[float]()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())


def ways(case: Case, longest: int) -> dict[str, Way]:
    """Name -> how it trains."""
    settings = Settings(capacity=longest, pack_length=longest)
    return {
        "ours": prepare_ours(case, settings),
        "one at a time": data_parallel.single(case, settings, 1, attention=NAME),
        "padded": data_parallel.padded(case, settings, 1, attention=NAME),
        "packed": data_parallel.packed(case, settings, NAME, 1),
    }


def measure(bench: Bench) -> None:
    """Train each way while there is time; ours first."""
    AttentionInterface.register(NAME, KernelOfOurs())
    steps, longest, vocabulary = (3, 512, 256) if bench.tiny else (8, 16384, 32768)
    case = mixture(steps, longest, vocabulary)
    trained: dict[str, tuple[float, float, list[float]]] = {}
    for name, way in ways(case, longest).items():
        if bench.left() < 0:
            bench.note(f"The time was used up before: {name}.")
            continue
        trained[name] = seconds, _, losses = train(bench, case, way)
        speed = _tokens(case) / seconds
        row = {
            "way": name,
            "tokens/s": f"{speed:.4g}",
            "ours is faster by": f"{seconds / trained['ours'][0]:.2f}",
            "peak GiB": f"{trained[name][1] / 2**30:.2f}" if bench.cuda else "-",
            "loss of the last step": f"{losses[-1]:.4f}",
        }
        figures = {f"training/{name}/tokens per second": speed}
        figures[f"training/{name}/speed of ours over this"] = seconds / trained["ours"][0]
        figures[f"training/{name}/loss over that of ours"] = losses[-1] / trained["ours"][2][-1]
        bench.table(f"Steps of {_tokens(case) // (steps - WARM_UP)} tokens", [row], figures)


def _tokens(case: Case) -> int:
    """Tokens of the steps that are timed."""
    return sum(case.lengths[document] for step in case.steps[WARM_UP:] for document in step)


def train(bench: Bench, case: Case, way: Way) -> tuple[float, float, list[float]]:
    """Seconds of all timed steps by their median, the peak in bytes, and the loss of each step."""
    config = LlamaConfig(
        **(TINY if bench.tiny else SIZES),
        num_key_value_heads=2 if bench.tiny else 4,
        vocab_size=case.vocabulary,
        max_position_embeddings=max(case.lengths),
        use_cache=False,  # with a cache, flattened documents silently attend to each other
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=way.attention, dtype=torch.bfloat16)
    clock = _Clock(bench.cuda)
    if bench.cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as output:
        shared: dict[str, Any] = {
            "output_dir": output,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": way.accumulation,
            "gradient_checkpointing": True,
            "max_steps": len(case.steps),
            "learning_rate": 1e-4,
            "lr_scheduler_type": "constant",
            "use_cpu": not bench.cuda,
            "train_sampling_strategy": "sequential",
            "remove_unused_columns": False,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
        }
        arguments = TrainingArguments(**shared | way.arguments)
        trainer = way.trainer(model=model, args=arguments, train_dataset=way.dataset, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    losses = [float(entry["loss"]) for entry in trainer.state.log_history if "loss" in entry]
    between = [end - begin for begin, end in zip(clock.times, clock.times[1:])][WARM_UP - 1 :]
    peak = float(torch.cuda.max_memory_allocated()) if bench.cuda else 0.0
    return statistics.median(between) * len(between), peak, losses
