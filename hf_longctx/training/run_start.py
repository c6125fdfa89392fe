"""The start of a run: anew, at a checkpoint, or at its own end; and what rank 0 says of that before training.

Rank 0 looks at the output directory, and all ranks go by what it found. Sent: the folder of a checkpoint, its step, and what a
results.json beside it says.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers import TrainerCallback
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import logging

from hf_longctx.checkpoint.choice import begins_from, left_by_earlier_run, seems_fit
from hf_longctx.checkpoint.folder import checkpoints
from hf_longctx.data.loader import PlannedSteps
from hf_longctx.training.run_data import position_of, training_values
from hf_longctx.training.trainer import LongContextTrainer
from hf_longctx.whole_files import written_whole

logger = logging.get_logger(__name__)

RESULTS = "results.json"
FINISHED = "finished_at_step"
"""Field of results.json that is written last of all: the step to which model, page and card belong."""
BEFORE = "eval_loss_before"


@dataclass(frozen=True)
class Start:
    """The checkpoint that a run begins from, and results that are there already; the same on all ranks."""

    folder: str | None = None
    """of a checkpoint; None: training begins anew, or is refused when it begins"""
    step: int = 0
    """the last one that is trained"""
    ranks: int = 0
    """processes that saved it"""
    anew: bool = True
    """nothing is resumed, and nothing was to be"""
    results: dict[str, Any] = field(default_factory=dict)
    """results.json of the run that is resumed"""
    finished: int | None = None
    """step to which the results in the output directory belong, where they are complete"""

    @property
    def kept_results(self) -> dict[str, Any]:
        """Results that are found once, before the first step."""
        return {BEFORE: self.results[BEFORE]} if BEFORE in self.results else {}

    def is_done(self, last: int) -> bool:
        """Tell whether a run of so many steps has nothing left to do."""
        return self.folder is not None and self.step >= last and self.finished == self.step


def start_of(trainer: LongContextTrainer) -> Start:
    """Find what a run begins from, and let the trainer plan from there. Collective."""
    asked: Any = trainer.args.resume_from_checkpoint
    output, ranks = Path(trainer.args.output_dir), trainer.checkpoints.ranks
    start = Start()
    if ranks.rank == 0:
        anew = not asked or (asked == "auto" and not checkpoints(output))
        chosen = begins_from(asked, output)
        start = Start(anew=anew)
        if chosen is not None:
            folder, manifest = chosen
            before, finished = _results(folder.parent), _results(output).get(FINISHED)
            start = Start(str(folder), manifest.step, manifest.world_size, anew, before, finished)
    start = ranks.agreed(start)
    if start.folder is not None and not all(ranks.gathered(seems_fit(Path(start.folder)))):
        return Start(anew=False)  # train() says on all ranks what is wrong with it
    trainer.run_data.begin(start.folder)
    return start


def last_step(trainer: LongContextTrainer) -> int:
    """Count the optimizer steps of the whole run."""
    return training_values(trainer.training_steps(), trainer.args)[-1]


def next_plan(trainer: LongContextTrainer, start: Start, last: int) -> str:
    """Say which step is trained next, and what its plan does; "": none is."""
    if start.step >= last:
        return ""
    steps = trainer.training_steps()
    which = "first" if start.folder is None else "next"
    return f"The {which} step:\n{steps.plan(*position_of(steps, start.step)).summary()}"


def announce(trainer: LongContextTrainer, start: Start, last: int, plan: str) -> None:
    """Say what is trained, from where, and what `plan` says of the step that comes next."""
    steps = trainer.training_steps()
    console = Console(highlight=False, soft_wrap=True, markup=False)
    if warning := left_by_earlier_run(trainer.args.resume_from_checkpoint, Path(trainer.args.output_dir)):
        logger.warning(warning)
    weights = [(weight.numel(), weight.requires_grad) for weight in trainer.whole_parameters().values()]
    trained, total = (sum(count for count, learns in weights if learns or every) for every in (False, True))
    if trained < total:
        console.print(f"{trained:,} of {total:,} weights are trained.")
    console.print(f"Sharding: {trainer.world.sharding}{' (chosen: auto)' if trainer.plugin.sharding == 'auto' else ''}")
    console.print(f"Certificate: {trainer.certificate}")
    if trainer.precision is not None:
        console.print(f"Precision (bf16: auto): {trainer.precision}")
    if trainer.world.stages > 1:
        console.print(f"Pipeline: {trainer.steps}")
    if start.folder is not None:
        console.print(
            f"Resuming from {start.folder}: step {start.step:,} of {last:,}, "
            f"saved on {_ranks(start.ranks)}; now {_ranks(trainer.args.world_size)}"
        )
    rest = f", {steps.steps(0)} optimizer steps an epoch. {plan}".rstrip()
    console.print(Text.assemble((f"{len(steps)} documents", "bold"), rest))
    if start.step >= last:
        console.print("No step is left to train: the results of this run are missing, and are made now")


def say_done(trainer: LongContextTrainer, start: Start, last: int) -> None:
    """Say that a run has nothing left to do, and how there would be something."""
    Console(highlight=False, soft_wrap=True).print(
        f"{trainer.args.output_dir} is already trained to step {start.step:,} of {last:,}: nothing to do, and its files stay as "
        "they are. More training.max_steps or training.num_train_epochs go on; a new run takes another training.output_dir",
        markup=False,
    )


def write_results(output_dir: str, results: dict[str, Any]) -> None:
    """Write what is known of a run so far. What was known before stays where that fails, as on a full disk."""
    with written_whole(Path(output_dir) / RESULTS) as partial:
        partial.write_text(json.dumps(results, indent=2) + "\n")


class FirstResults(TrainerCallback):
    """Writes what is known of a run before its first step: one that is interrupted keeps it, and results of an earlier run, which
    it overwrites, are not taken for its own. Not before training begins: until then a run may be refused."""

    def __init__(self, results: dict[str, Any]) -> None:
        self._results = dict(results)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            Path(args.output_dir).mkdir(parents=True, exist_ok=True)
            write_results(args.output_dir, self._results)


def data_summary(trainer: LongContextTrainer) -> dict[str, int]:
    """Count what is trained on, before the first step: rows of the data set, and the documents that they are in training. A row
    that is left out is none (`drop`, or nothing to learn in it), one that is cut is one for each of its pieces."""
    pieces = trainer.training_steps().pieces
    return {
        "rows": len(pieces.index.lengths),
        "documents": len(pieces),
        "ranks": trainer.args.world_size,
    }


def documents_trained(steps: PlannedSteps, done: int) -> int:
    """Count the documents of the first `done` optimizer steps: one that comes in two epochs counts twice."""
    epoch, count = 0, 0
    while done > 0:
        batches = steps.plans.epoch(epoch)
        count += sum(len(batches[step]) for step in range(min(done, len(batches))))
        epoch, done = epoch + 1, done - len(batches)
    return count


def training_summary(trainer: LongContextTrainer) -> dict[str, float]:
    """Return how many documents all steps have trained on, `documents_trained`, and their mean loss, `train_loss`, once training
    has ended. Where no step was left to train, the loss is what the run had said when it trained the last one, and joins the log
    again; it is left out where it is not known."""
    trained: dict[str, float] = {
        "documents_trained": documents_trained(trainer.training_steps(), trainer.state.global_step)
    }
    log = trainer.state.log_history
    summary = next((entry for entry in reversed(log) if "train_loss" in entry), None)
    if summary is None:
        before = _json(Path(trainer.args.output_dir) / TRAINER_STATE_NAME).get("log_history", [])
        told = [entry for entry in before if "train_loss" in entry and entry.get("step") == trainer.state.global_step]
        if not told or before[: len(log)] != log:  # of another run, which this one has overwritten in part
            return trained
        summary = told[-1]
        log.append(summary)
    return trained | {"train_loss": summary["train_loss"]}


def _ranks(count: int) -> str:
    return f"{count:,} rank{'' if count == 1 else 's'}"


def _results(folder: Path) -> dict[str, Any]:
    return _json(folder / RESULTS)


def _json(path: Path) -> dict[str, Any]:
    """Read what an earlier run may have left; empty where it left nothing that can be read."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
