"""Step times: predicted after `hf-longctx profile`, against measured on gloo ranks of this machine.

    python benchmarks/prediction.py --json benchmarks/results/prediction.json --check
    python benchmarks/prediction.py --steps 6 --profile-seconds 20          # a quick look

On 2 and on 4 ranks, one computing thread each: the ranks measure a profile together, then train with it through
LongContextTrainer; of each step after the first, the predicted time is compared with the measured one. Documents are
drawn from a lognormal distribution, tens to thousands of tokens, and the longest are split over ranks.

    wall    seconds on the clock from the first micro-batch to the end of the optimizer's step, against the plan's makespan
            plus what the profile says of summing gradients and of the optimizer
    CPU     seconds of CPU of each rank, all of its threads, against the time in which the plan has it busy, plus the same;
            where there are more ranks than cores, the clock says nothing about a rank

Profile and training do not run at the same time, so a machine whose load changes in between is mispredicted. To tell the
two apart, each run also says how well *one* factor on all predictions would do ("best factor", "error with it").
"""

import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from datasets import Dataset
from ranks import on_ranks
from report import conclude, parser
from transformers import AutoConfig, AutoModelForCausalLM, PrinterCallback, TrainingArguments

from hf_longctx import LongContextPlugin, LongContextTrainer
from hf_longctx.data.collator import RankStep
from hf_longctx.training.measuring.rank_profile import ProfileSettings, profile_model

WORLDS = {2: "wall", 4: "cpu"}
"""Ranks -> the clock that says something about them on two cores."""
MODEL = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Settings:
    """What is trained, and for how long profiles are measured."""

    steps: int
    documents_per_step: int
    capacity: int
    profile_seconds: float
    seed: int = 0

    def lengths(self) -> np.ndarray:
        """int64: tokens of all documents."""
        rng = np.random.default_rng(self.seed)
        drawn = np.exp(rng.normal(np.log(500), 1.1, self.steps * self.documents_per_step))
        return np.clip(drawn, 16, min(WORLDS) * self.capacity).astype(np.int64)


@dataclass(frozen=True)
class Step:
    """One optimizer step on one rank, seconds."""

    predicted: float
    measured: float
    documents: int
    split_documents: int


@dataclass(frozen=True)
class Run:
    """What one rank saw."""

    steps: list[Step]
    profile_errors: list[float]
    """of micro-batches, predicted / measured - 1"""


class TimedTrainer(LongContextTrainer):
    """Notes what was predicted of each step and what it took."""

    clock = "wall"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.timed: list[Step] = []
        super().__init__(*args, **kwargs)

    def training_step(self, model: Any, inputs: RankStep, *args: Any) -> torch.Tensor:
        dist.barrier()  # ranks begin together, as the plan has it
        self._began = time.process_time() if self.clock == "cpu" else time.perf_counter()
        self._inputs = inputs
        return super().training_step(model, inputs, *args)

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        ended = time.process_time() if self.clock == "cpu" else time.perf_counter()
        plan, rank = self._inputs.plan, self.args.process_index
        timeline, summary = plan.timeline(), plan.summary()
        planned = int(timeline.rank_busy[rank]) if self.clock == "cpu" else timeline.makespan
        step_ns = self.training_steps().collator.cost.step_ns
        predicted = (planned + step_ns) / 1e9
        self.timed.append(Step(predicted, ended - self._began, summary.documents, summary.split_documents))
        super()._maybe_log_save_evaluate(*args, **kwargs)


def profile_and_train(clock: str, settings: Settings, recalibrate_steps: int) -> Run:
    """On each rank."""
    config = AutoConfig.for_model(**MODEL)
    measured = profile_model(
        config, torch.device("cpu"), ProfileSettings(longest=8192, seconds=settings.profile_seconds, clock=clock)
    )
    torch.manual_seed(settings.seed)
    rows = [{"input_ids": torch.randint(config.vocab_size, (n,)).tolist()} for n in settings.lengths().tolist()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        measured.save(path)  # each rank its own copy of the same profile
        trainer = TimedTrainer(
            model=AutoModelForCausalLM.from_config(config),
            args=TrainingArguments(
                output_dir=folder,
                max_steps=settings.steps,
                use_cpu=True,
                seed=settings.seed,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(rows),
            plugin=LongContextPlugin(
                capacity=settings.capacity,
                global_batch_documents=settings.documents_per_step,
                profile=str(path),
                recalibrate_steps=recalibrate_steps,
            ),
        )
        trainer.clock = clock
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    errors = [float(e) for e, point in zip(measured.errors, measured.points) if point.part == "micro_batch"]
    return Run(trainer.timed, errors)


def summarise(runs: list[Run], clock: str) -> dict[str, float]:
    """Figures of the ranks' runs. On the clock all ranks have one time, the slowest's; of CPU, each its own."""
    steps = list(zip(*(run.steps[1:] for run in runs), strict=True))
    if clock == "wall":
        pairs = [(ranks[0].predicted, max(step.measured for step in ranks)) for ranks in steps]
    else:
        pairs = [(step.predicted, step.measured) for ranks in steps for step in ranks]
    predicted, measured = np.array(pairs).T
    ratio = predicted / measured
    factor = float(1 / np.median(ratio))
    return {
        "median error": float(np.median(np.abs(ratio - 1))),
        "9 of 10 errors below": float(np.quantile(np.abs(ratio - 1), 0.9)),
        "all predicted over all measured": float(predicted.sum() / measured.sum()),
        "best factor": factor,
        "median error with it": float(np.median(np.abs(ratio * factor - 1))),
        "median error of the profile's micro-batches": statistics.median(map(abs, runs[0].profile_errors)),
        "share of documents split": sum(s.split_documents for s in runs[0].steps)
        / sum(s.documents for s in runs[0].steps),
        "seconds of a step": float(np.median(measured)),
    }


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=21, help="run so many optimizer steps (default: %(default)s)")
    options.add_argument(
        "--documents", type=int, default=9, help="put so many documents into a step (default: %(default)s)"
    )
    options.add_argument(
        "--capacity", type=int, default=2048, help="hold so many tokens on a rank (default: %(default)s)"
    )
    options.add_argument(
        "--profile-seconds",
        type=float,
        default=90.0,
        help="measure each profile for so many seconds (default: %(default)s)",
    )
    options.add_argument("--ranks", type=int, nargs="+", choices=list(WORLDS), default=list(WORLDS))
    options.add_argument(
        "--recalibrate-steps",
        type=int,
        default=0,
        help="let the trainer recalibrate after so many steps, too (default: %(default)s, never)",
    )
    options.add_argument(
        "--clock", choices=("wall", "cpu"), help="count time by this clock (default: wall on 2 ranks, cpu on 4)"
    )
    given = options.parse_args()
    load = os.getloadavg()[0]
    settings = Settings(given.steps, given.documents, given.capacity, given.profile_seconds)
    rows, figures, steps = [], {}, {}
    for ranks in given.ranks:
        clock = given.clock or WORLDS[ranks]
        runs = on_ranks(profile_and_train, ranks, clock, settings, given.recalibrate_steps)
        name = f"{ranks} ranks, {'CPU' if clock == 'cpu' else clock}"
        summary = summarise(runs, clock)
        figures |= {f"{name}/{figure}": value for figure, value in summary.items()}
        steps[name] = [[vars(step) for step in run.steps] for run in runs]
        shares = ("median error", "9 of 10 errors below", "median error with it", "share of documents split")
        rows.append(
            {"what": name}
            | {column: f"{value:.1%}" if column in shares else f"{value:.3f}" for column, value in summary.items()}
        )
    return conclude(given, rows, figures, load, steps=steps, settings=vars(settings) | {"model": MODEL})


if __name__ == "__main__":
    sys.exit(main())
