"""Training steps: ours against plain transformers Trainer under DDP, on two gloo ranks of this machine.

    python benchmarks/training.py --json benchmarks/results/training.json --check
    python benchmarks/training.py --steps 2 --repeats 1               # a quick look
    python benchmarks/training.py --real-model --only ours single     # SmolLM2-135M itself

The documents are the quickstart's (source files, tens to 5K tokens). Every way of training takes the same documents in
the same optimizer steps, starting from the same weights, with the same optimizer:

    ours        LongContextTrainer: documents whole or split, as the plan says
    single      Trainer, one document at a time per rank, gradients accumulated
    padded      Trainer, all documents of a rank in one batch, padded to the longest
    flattened   Trainer, all documents of a rank in one row, DataCollatorWithFlattening (padding-free)

Each run is a fresh pair of processes with one computing thread each; rounds are interleaved, and medians reported. The
first step of a run warms up and is not timed. By default the model is a Llama of random weights with 4 layers of 256, and
token ids are folded into a small vocabulary: padded logits of the real one would not fit into this machine's memory.
"""

import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset, load_from_disk
from ranks import on_ranks
from report import conclude, parser
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from hf_longctx import LongContextPlugin, LongContextTrainer
from hf_longctx.data.cache import default_cache_dir
from hf_longctx.data.embedded_corpus import prepare_corpus
from hf_longctx.data.embedded_model import prepare_model
from hf_longctx.planner import GlobalBatches

RANKS = 2
WAYS = ("ours", "single", "padded", "flattened")
REFERENCE = "single"
"""What losses are compared with: one document per call, no padding, no packing."""


@dataclass(frozen=True)
class Settings:
    """What all ways of training share."""

    model: str
    """directory of the embedded model and its tokenizer"""
    real_model: bool
    vocabulary: int
    steps: int
    documents_per_step: int
    capacity: int
    """tokens that a rank holds at once, ours only"""
    seed: int = 0


@dataclass(frozen=True)
class Run:
    """One rank's part of one run."""

    seconds: float
    """of the steps after the first"""
    cpu_seconds: float
    losses: list[float]
    peak_bytes: int


class StepClock(TrainerCallback):
    """Reads the clocks after every optimizer step."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.wall.append(time.perf_counter())
        self.cpu.append(time.process_time())


def train(way: str, documents: list[list[int]], order: list[int], settings: Settings) -> Run:
    """On each rank: trains one way; `order` names the documents of all steps, one after the other."""
    per_rank = settings.documents_per_step // RANKS
    batch = (1, per_rank) if way == "single" else (per_rank, 1)
    clock = StepClock()
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output,
            per_device_train_batch_size=batch[0],
            gradient_accumulation_steps=batch[1],
            max_steps=settings.steps,
            learning_rate=1e-4 if settings.real_model else 1e-3,
            lr_scheduler_type="constant",
            bf16=settings.real_model,
            use_cpu=True,
            seed=settings.seed,
            train_sampling_strategy="sequential" if way != "ours" else "random",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            ddp_find_unused_parameters=False,
        )
        chosen = documents if way == "ours" else [documents[index] for index in order]
        given: dict[str, Any] = {
            "model": _model(settings),
            "args": arguments,
            "train_dataset": Dataset.from_dict({"input_ids": chosen, "labels": chosen}),
            "callbacks": [clock],
        }
        if way == "ours":
            trainer: Trainer = LongContextTrainer(**given, plugin=LongContextPlugin(capacity=settings.capacity))
        else:
            trainer = Trainer(**given, data_collator=_collator(way, settings))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Run(clock.wall[-1] - clock.wall[0], clock.cpu[-1] - clock.cpu[0], losses, _peak_bytes())


def _model(settings: Settings) -> Any:
    if settings.real_model:
        model = AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32, attn_implementation="sdpa")
    else:
        torch.manual_seed(settings.seed)
        config = AutoConfig.for_model(
            "llama",
            vocab_size=settings.vocabulary,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=8192,
        )
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.config.use_cache = False  # with a cache, flattened documents silently attend to each other
    return model


def _collator(way: str, settings: Settings) -> Any:
    if way == "flattened":
        return DataCollatorWithFlattening()
    return DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(settings.model), padding=True)


def _peak_bytes() -> int:
    """Largest resident memory of this process so far."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def padding_share(way: str, lengths: np.ndarray, per_rank: int) -> float:
    """Share of the computed tokens that are padding; `lengths` [documents] in the order of training."""
    if way != "padded":
        return 0.0
    batches = lengths.reshape(-1, per_rank)
    return 1 - float(lengths.sum()) / float((batches.max(1) * per_rank).sum())


def summarise(runs: dict[str, list[list[Run]]], lengths: np.ndarray, settings: Settings) -> dict[str, dict[str, float]]:
    """Way -> figures. `runs`: way -> repetitions -> ranks."""
    per_rank = settings.documents_per_step // RANKS
    timed_tokens = int(lengths[settings.documents_per_step :].sum())
    found: dict[str, dict[str, float]] = {}
    for way, repeats in runs.items():
        seconds = statistics.median(max(run.seconds for run in ranks) for ranks in repeats)
        cpu = statistics.median(sum(run.cpu_seconds for run in ranks) for ranks in repeats)
        found[way] = {
            "tokens per second": timed_tokens / seconds,
            "CPU seconds of all ranks": cpu,
            "share of the time that ranks compute": cpu / seconds / RANKS,
            "padding share": padding_share(way, lengths, per_rank),
            "peak bytes of the larger rank": statistics.median(
                max(run.peak_bytes for run in ranks) for ranks in repeats
            ),
        }
    for way, figures in found.items():
        if "ours" in found:
            ours = found["ours"]
            figures["speed of ours over this"] = ours["tokens per second"] / figures["tokens per second"]
            figures["CPU over ours"] = figures["CPU seconds of all ranks"] / ours["CPU seconds of all ranks"]
            peak = "peak bytes of the larger rank"
            figures["memory over ours"] = figures[peak] / ours[peak]
        if REFERENCE in found:
            expected = np.array(runs[REFERENCE][0][0].losses)
            difference = np.abs(np.array(runs[way][0][0].losses) / expected - 1)
            figures["difference of loss from plain Trainer's"] = float(difference.max())
    return found


COLUMNS = {
    "ours is faster by": ("speed of ours over this", "{:.2f}"),
    "CPU / ours": ("CPU over ours", "{:.2f}"),
    "peak memory / ours": ("memory over ours", "{:.2f}"),
    "padding": ("padding share", "{:.0%}"),
    "ranks compute": ("share of the time that ranks compute", "{:.0%}"),
    "loss / single - 1": ("difference of loss from plain Trainer's", "{:.0e}"),
    "tokens/s": ("tokens per second", "{:.0f}"),
}


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "--only", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=f"of {', '.join(WAYS)}"
    )
    options.add_argument("--steps", type=int, default=5, help="optimizer steps, at least 2 (default: %(default)s)")
    options.add_argument("--documents", type=int, default=8, help="per step (default: %(default)s)")
    options.add_argument("--capacity", type=int, default=4096, help="tokens of a rank, ours (default: %(default)s)")
    options.add_argument("--vocabulary", type=int, default=4096, help="of the random model (default: %(default)s)")
    options.add_argument("--repeats", type=int, default=3, help="medians of so many runs (default: %(default)s)")
    options.add_argument("--real-model", action="store_true", help="SmolLM2-135M in bf16 autocast")
    given = options.parse_args()
    if given.steps < 2 or given.documents % RANKS:
        options.error(f"--steps {given.steps} must be at least 2, --documents {given.documents} a multiple of {RANKS}")
    load = os.getloadavg()[0]
    cache = default_cache_dir()
    model = prepare_model(cache)
    settings = Settings(str(model), given.real_model, given.vocabulary, given.steps, given.documents, given.capacity)
    vocabulary = AutoConfig.from_pretrained(model).vocab_size if given.real_model else given.vocabulary
    texts = load_from_disk(str(prepare_corpus(cache, model)))["train"]["input_ids"]
    documents = [[token % vocabulary for token in text] for text in texts]
    lengths = np.array([len(document) for document in documents])
    epoch = GlobalBatches(lengths, settings.seed, documents=settings.documents_per_step).epoch(0)
    if given.steps * given.documents > len(lengths):
        options.error(
            f"--steps {given.steps} of --documents {given.documents} need more than the {len(lengths)} there are"
        )
    order = [int(document) for step in range(settings.steps) for document in epoch[step]]
    runs: dict[str, list[list[Run]]] = {way: [] for way in given.only}
    for _ in range(given.repeats):
        for way in given.only:
            runs[way].append(on_ranks(train, RANKS, way, documents, order, settings))
    found = summarise(runs, lengths[order], settings)
    rows = []
    for way, each in found.items():
        cells = {name: form.format(each[figure]) for name, (figure, form) in COLUMNS.items() if figure in each}
        rows.append({"way": way} | dict.fromkeys(COLUMNS, "-") | cells)
    figures = {f"{way}/{name}": value for way, each in found.items() for name, value in each.items()}
    losses = {way: repeats[0][0].losses for way, repeats in runs.items()}
    return conclude(given, rows, figures, load, losses=losses, settings=vars(settings) | {"model": model.name})


if __name__ == "__main__":
    sys.exit(main())
