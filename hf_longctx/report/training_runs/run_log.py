"""Reads what a run has left in its output directory, for its page and its model card.

    trainer_state.json   Trainer's log; without it there is no report
    run.json             what the run was (run_record.py)
    results.json         held-out loss before training, among others
    evaluation.json      what `hf-longctx evaluate` found
    *.safetensors        whether that is of this run's weights (saved_weights.py)

Only JSON and the beginnings of weights are read. Nothing is sent.
"""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_longctx.report.training_runs.run_files import Evaluation, Results, State, read_file
from hf_longctx.report.training_runs.run_record import read_record
from hf_longctx.report.training_runs.saved_weights import weights_hash

STATE, RESULTS, EVALUATION = "trainer_state.json", "results.json", "evaluation.json"


@dataclass(frozen=True)
class RunLog:
    """A run that has ended."""

    log: list[dict[str, Any]]
    """Trainer's history, the evaluation before training included"""
    record: dict[str, Any]
    evaluation: dict[str, Any]
    """empty where there is none of this run's weights"""
    left_out: str = ""
    """why the evaluation that is there is left out"""
    own_config: bool = False
    """whether a configuration lies beside the weights: adapters have one where it is not their base's"""

    @classmethod
    def read(cls, directory: Path) -> "RunLog":
        """Raises ValueError: there is no trainer_state.json, or a file cannot be read."""
        if not (directory / STATE).is_file():
            raise ValueError(
                f"{directory} holds no {STATE}: a report is made of what a run leaves in its output_dir "
                "(trainer.save_state() writes the file, and scripts/train.py calls it)"
            )
        state, results = read_file(directory / STATE, State), read_file(directory / RESULTS, Results)
        evaluation, left_out = read_file(directory / EVALUATION, Evaluation), ""
        if evaluation and (problem := _of_others(directory, evaluation.get("weights"))):
            evaluation, left_out = {}, f"{EVALUATION} is left out: {problem}. `hf-longctx evaluate` writes another one"
        log = state.get("log_history", [])
        if "eval_loss_before" in results:  # training begins with an empty history
            log = [{"step": 0, "eval_loss": results["eval_loss_before"]}, *log]
        return cls(log, read_record(directory), evaluation, left_out, (directory / "config.json").is_file())

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return max((entry.get("step", 0) for entry in self.log), default=0)

    @property
    def held_out_losses(self) -> list[float]:
        """Return them in the order in which they were found: the first is the one before training, if there was one then."""
        return self.logged("eval_loss")

    @property
    def seconds(self) -> float | None:
        """Return the seconds of the whole run, over all its starts; None: not known. Records of earlier versions do not say, and
        Trainer's summary is of the last start."""
        if "seconds" in self.record["training"]:
            return self.record["training"]["seconds"]
        return next(iter(self.logged("train_runtime")[-1:]), None)

    def logged(self, key: str) -> list[float]:
        """All values of a key that are finite numbers."""
        values = [entry[key] for entry in self.log if isinstance(entry.get(key), (int, float))]
        return [value for value in values if math.isfinite(value)]

    def usual(self, key: str) -> float | None:
        """The median of what was logged; None: it never was."""
        values = self.logged(key)
        return statistics.median(values) if values else None


def _of_others(directory: Path, weights: str | None) -> str:
    """Say why an evaluation is not known to be of the weights in a run's directory; "": it is of these."""
    if weights is None:
        return "it does not say which weights it is of"
    own = weights_hash(directory)
    if own is None:
        return "no weights are beside it"
    return "" if weights == own else "it is of other weights than those beside it"


def duration(seconds: float) -> str:
    """Such as 7.3 ms, 42.1 s, 3 min 12 s, 5 h 7 min."""
    rounded = float(f"{seconds:.3g}")  # first: 0.9996 s are 1 s, and no 1e+03 ms
    if rounded < 1:
        return f"{1000 * rounded:.3g} ms"
    if rounded < 60:
        return f"{rounded:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60} min"
