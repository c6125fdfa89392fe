"""Pipelines on this machine: bubbles as simulated and as measured, and what chunks save of one giant document.

    python benchmarks/pipeline.py --json benchmarks/results/pipeline.json --check
    python benchmarks/pipeline.py --steps 4 --profile-seconds 20          # a quick look

Two stages on two processes, one computing thread each. The processes first measure a profile; then each schedule trains on
the same documents (lognormal, tens to thousands of tokens), steps in turn with the others' in one run.

    bubble      1 - time in which the two stages compute / (2 * time from the first task to the end of the last)
                simulated: of the order that the plan's predicted costs give (planner/stages/stage_order.py)
                measured: of the clocks of both processes, which begin a step together
    giant       a step of one document, in as many chunks as the planner chooses, and whole
    exact       losses and gradient norms of all steps beside those of one process

Simulated shares are of the planner's costs from the profile; nothing is fitted to the steps that are measured. What a
cluster of thousands of devices would do is in benchmarks/simulator.py.
"""

import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from os import getloadavg
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
from hf_longctx.data.step_plans import Planning
from hf_longctx.planner import StepPlan
from hf_longctx.planner.stages.stage_order import Schedule, stage_order
from hf_longctx.training.measuring.rank_profile import ProfileSettings, profile_model
from hf_longctx.training.steps.staged import StagedSteps

STAGES = 2
SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved": 2}
"""Schedule -> stages on each process."""
MODEL = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class Settings:
    steps: int
    documents_per_step: int
    capacity: int
    profile_seconds: float
    seed: int = 0

    def lengths(self) -> np.ndarray:
        """int64: tokens of all documents."""
        rng = np.random.default_rng(self.seed)
        drawn = np.exp(rng.normal(np.log(500), 1.0, self.steps * self.documents_per_step))
        return np.clip(drawn, 16, self.capacity).astype(np.int64)


@dataclass(frozen=True)
class Run:
    """What one process saw."""

    losses: list[float]
    norms: list[float]
    seconds: list[tuple[float, float]]
    """of each step: waiting, computing"""
    simulated: list[float]
    """of each step: the bubble's share"""
    chunks: list[int]
    """of each step: the most of a document"""


class TimedTrainer(LongContextTrainer):
    """Notes what each step took, whose processes begin together."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.seconds: list[tuple[float, float]] = []
        self.simulated: list[float] = []
        self.chunks: list[int] = []
        super().__init__(*args, **kwargs)

    def training_step(self, model: Any, inputs: RankStep, *args: Any) -> torch.Tensor:
        if self.args.world_size > 1:
            dist.barrier()
        loss = super().training_step(model, inputs, *args)
        if isinstance(self.steps, StagedSteps) and self.steps.schedule is not None:
            self.seconds.append(self.steps.seconds())
            self.simulated.append(simulated_bubble(inputs.plan, self.steps.schedule))
            self.chunks.append(int(inputs.plan.chunks.max()))
        return loss


def simulated_bubble(plan: StepPlan, schedule: Schedule) -> float:
    """Share of both stages' time in which they wait, by the plan's costs."""
    order = stage_order(plan, schedule)
    weights = schedule.stage_weights(STAGES)
    busy = (order.units.costs.sum(axis=0)[:, None] // schedule.virtual * weights // 1000).sum()
    return 1 - float(busy) / (STAGES * order.played.end)


def train(profile: str | None, rows: list[dict[str, list[int]]], settings: Settings, **plugin: Any) -> Run:
    config = AutoConfig.for_model(**MODEL)
    torch.manual_seed(settings.seed)
    steps = len(rows) // settings.documents_per_step
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(
            model=AutoModelForCausalLM.from_config(config),
            args=TrainingArguments(
                output_dir=folder,
                max_steps=steps,
                use_cpu=True,
                seed=settings.seed,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(rows),
            plugin=LongContextPlugin(
                capacity=settings.capacity,
                global_batch_documents=settings.documents_per_step,
                profile=profile,
                recalibrate_steps=0,
                **plugin,
            ),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
    return Run(
        [entry["loss"] for entry in log],
        [entry["grad_norm"] for entry in log],
        trainer.seconds,
        trainer.simulated,
        trainer.chunks,
    )


def documents(lengths: np.ndarray, seed: int) -> list[dict[str, list[int]]]:
    torch.manual_seed(seed)
    return [{"input_ids": torch.randint(MODEL["vocab_size"], (n,)).tolist()} for n in lengths.tolist()]


def in_stages(settings: Settings, rounds: int) -> dict[str, list[Run]]:
    """On each of the two processes: case -> its rounds."""
    config = AutoConfig.for_model(**MODEL)
    longest = settings.capacity
    measured = profile_model(
        config, torch.device("cpu"), ProfileSettings(longest=longest, seconds=settings.profile_seconds, clock="wall")
    )
    rows = documents(settings.lengths(), settings.seed)
    giant = replace(settings, documents_per_step=1)
    giants = documents(np.full(settings.steps, settings.capacity), settings.seed)
    runs: dict[str, list[Run]] = {}
    with tempfile.TemporaryDirectory() as folder:
        profile = str(Path(folder) / "profile.json")
        measured.save(Path(profile))  # each process its own copy of the same profile
        for _ in range(rounds):
            for name, virtual in SCHEDULES.items():
                options = {"pipeline_stages": STAGES, "pipeline_schedule": name, "virtual_stages": virtual}
                runs.setdefault(name, []).append(train(profile, rows, settings, **options))
            runs.setdefault("giant, in chunks", []).append(train(profile, giants, giant, pipeline_stages=STAGES))
            runs.setdefault("giant, whole", []).append(train_whole(profile, giants, giant))
    return runs


def train_whole(profile: str, rows: list[dict[str, list[int]]], settings: Settings) -> Run:
    """The same with plans in which no document is in chunks."""
    plan_of = Planning.plan

    def plan(self: Planning, *args: Any) -> StepPlan:
        planned = plan_of(self, *args)
        return replace(planned, chunks=np.ones_like(planned.chunks), lower_bound=1)

    Planning.plan = plan  # type: ignore[method-assign]
    try:
        return train(profile, rows, settings, pipeline_stages=STAGES)
    finally:
        Planning.plan = plan_of  # type: ignore[method-assign]


def alone(settings: Settings) -> Run:
    """One process, without a pipeline."""
    return train(None, documents(settings.lengths(), settings.seed), settings)


def spans(runs: list[Run]) -> list[float]:
    """Seconds of each step but the first, from the first task to the end of the last, of both processes."""
    return [max(sum(seconds) for seconds in step) for step in zip(*(run.seconds[1:] for run in runs))]


def measured_bubbles(runs: list[Run]) -> list[float]:
    """Return the bubbles of each step but the first."""
    computing = [sum(task[1] for task in step) for step in zip(*(run.seconds[1:] for run in runs))]
    return [1 - busy / (STAGES * span) for busy, span in zip(computing, spans(runs))]


def worst(measured: list[float], expected: list[float]) -> float:
    return max(abs(value / right - 1) for value, right in zip(measured, expected, strict=True))


def main() -> int:
    options = parser(__doc__)
    options.add_argument(
        "--steps", type=int, default=8, help="run so many optimizer steps of a case (default: %(default)s)"
    )
    options.add_argument(
        "--documents", type=int, default=8, help="put so many documents into a step (default: %(default)s)"
    )
    options.add_argument(
        "--capacity", type=int, default=4096, help="hold so many tokens on a rank (default: %(default)s)"
    )
    options.add_argument("--rounds", type=int, default=2, help="run all cases in turn, so often (default: %(default)s)")
    options.add_argument(
        "--profile-seconds",
        type=float,
        default=60.0,
        help="measure the profile for so many seconds (default: %(default)s)",
    )
    given = options.parse_args()
    load = getloadavg()[0]
    settings = Settings(given.steps, given.documents, given.capacity, given.profile_seconds)
    processes = on_ranks(in_stages, STAGES, settings, given.rounds)
    [plain] = on_ranks(alone, 1, settings)
    rows, figures, steps = [], {}, {}
    seconds: dict[str, float] = {}
    for case in processes[0]:
        rounds = list(zip(*(process[case] for process in processes)))
        bubbles = [share for runs in rounds for share in measured_bubbles(list(runs))]
        simulated = [share for runs in rounds for share in runs[0].simulated[1:]]
        seconds[case] = statistics.median(span for runs in rounds for span in spans(list(runs)))
        measured, expected = statistics.fmean(bubbles), statistics.fmean(simulated)
        figures |= {
            f"{case}/bubble, measured": measured,
            f"{case}/bubble, simulated": expected,
            f"{case}/difference of bubbles": abs(measured - expected),
            f"{case}/chunks": max(runs[0].chunks[0] for runs in rounds),
        }
        rows.append(
            {"case": case, "bubble, measured": f"{measured:.1%}", "simulated": f"{expected:.1%}"}
            | {
                "chunks": str(figures[f"{case}/chunks"]),
                "over 1f1b's seconds": f"{seconds[case] / seconds['1f1b']:.2f}",
            }
        )
        steps[case] = {"measured": bubbles, "simulated": simulated}
        if case in SCHEDULES:
            figures[f"{case}/difference of losses"] = worst(rounds[0][0].losses, plain.losses)
            figures[f"{case}/difference of gradient norms"] = worst(rounds[0][0].norms, plain.norms)
    figures["giant/seconds in chunks over whole"] = seconds["giant, in chunks"] / seconds["giant, whole"]
    return conclude(given, rows, figures, load, steps=steps, settings=vars(settings) | {"model": MODEL})


if __name__ == "__main__":
    sys.exit(main())
