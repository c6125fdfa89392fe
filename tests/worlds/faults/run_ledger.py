"""What a disturbed run wrote down (faulty_run.py), and how that compares with a plain loop over documents in one process.

The history of a run is the steps that led to its final weights: those of its last start, before them those of the latest
start that reached the checkpoint which that one resumed from, and so on.
"""

import functools
import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from hf_longctx.planner import GlobalBatches
from tests.builders.training_runs import assembled, documents, reference
from tests.worlds.faults.faulty_run import DOCUMENTS, EPOCHS, FAULTS, LENGTHS, STEPS, TRAINING, ledger

LOSS_TOLERANCE = 1e-5
"""Relative, in float32."""
WEIGHT_TOLERANCE = 1e-5
"""Absolute; a gradient that is nothing but rounding moves a weight by less (tests/builders/training_runs.py, `arguments`)."""


@dataclass
class Start:
    """What the ranks of one start wrote down, once they began to train."""

    resumed: int
    """the step that it resumed from; 0: it began anew"""
    ranks: int
    steps: list[int]
    """that all ranks did, in the order in which they did"""
    losses: dict[int, float]
    documents: dict[int, list[list[int]]]
    """step -> its documents, sorted"""

    @property
    def last(self) -> int:
        """Return where it came to."""
        return self.steps[-1] if self.steps else self.resumed

    @classmethod
    def read(cls, books: Sequence[Path]) -> "Start":
        written = [[json.loads(line) for line in book.read_text().splitlines()] for book in books]
        first = written[0][0]
        assert all(entries[0] == first for entries in written), (
            f"ranks began differently: {[entries[0] for entries in written]}"
        )
        start = cls(first["resumed"], first["ranks"], [], {}, {})
        if len(written) == start.ranks:
            for lines in zip(*(entries[1:] for entries in written)):
                step, loss = lines[0]["step"], lines[0]["loss"]
                assert all(line["step"] == step and line["loss"] == loss for line in lines), "ranks are not in one step"
                start.steps.append(step)
                start.losses[step], start.documents[step] = loss, assembled([line["held"] for line in lines])
        return start


def starts(output_dir: Path) -> list[Start]:
    """All starts of a run that began to train, in order."""
    books = sorted(path for path in ledger(output_dir).glob("*-rank-*.jsonl") if path.stat().st_size)
    return [Start.read(list(group)) for _, group in itertools.groupby(books, key=lambda book: book.name.split("-")[0])]


def faults_met(output_dir: Path) -> list[dict[str, Any]]:
    """The faults of faulty_run.py that ranks met, with the `time` (monotonic) and the step in which they did."""
    path = ledger(output_dir) / FAULTS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wrong_steps(start: Start, nan_step: int = 0) -> list[str]:
    """Return where the steps of a start are not those of the plain loop, from the step that it resumed from on."""
    losses, _ = plain_loop(nan_step)
    problems = []
    if start.steps != list(range(start.resumed + 1, start.resumed + 1 + len(start.steps))):
        problems.append(f"resumed from step {start.resumed} and ran steps {start.steps}")
    for step in start.steps:
        if abs(start.losses[step] / losses[step - 1] - 1) > LOSS_TOLERANCE:
            problems.append(f"step {step} has loss {start.losses[step]}, undisturbed {losses[step - 1]}")
        if start.documents[step] != documents_of_steps()[step - 1]:
            problems.append(f"step {step} has other documents than undisturbed")
    return problems


def wrong_result(output_dir: Path, nan_step: int = 0) -> list[str]:
    """Return where what a complete run logged and saved is not what the plain loop comes to."""
    losses, weights = plain_loop(nan_step)
    logged = json.loads((ledger(output_dir) / "result.json").read_text())["losses"]
    problems = []
    if len(logged) != STEPS or not np.allclose(logged, losses, rtol=LOSS_TOLERANCE, atol=0):
        problems.append(f"the run logged losses {logged}, undisturbed {losses}")
    saved = load_file(output_dir / "model.safetensors")
    for name, expected in weights.items():
        difference = float((saved[name] - expected).abs().max()) if name in saved else float("nan")
        if not difference <= WEIGHT_TOLERANCE:
            problems.append(f"{name} differs by {difference} from undisturbed")
    return problems


def lost_or_repeated(run_starts: Sequence[Start]) -> int:
    """How many documents more or less than EPOCHS times each the history of a complete run has."""
    history: list[list[int]] = []
    wanted = STEPS
    for start in reversed(run_starts):
        if start.resumed < wanted <= start.last:
            for step in range(start.resumed + 1, wanted + 1):
                history += start.documents[step]
            wanted = start.resumed
    trained, once = Counter(map(str, history)), Counter(str(row["input_ids"]) for row in documents(LENGTHS))
    return sum(abs(trained[document] - EPOCHS * once[document]) for document in trained.keys() | once.keys())


@functools.lru_cache
def plain_loop(nan_step: int = 0) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final weights of a plain loop over documents in this process."""
    settings = TRAINING | {"output_dir": "unused"}
    losses, _, weights = reference("llama", documents(LENGTHS), _batches(), EPOCHS, settings, (nan_step,))
    return losses, weights


@functools.lru_cache
def documents_of_steps() -> list[list[list[int]]]:
    """[step]: the documents of the global batch, sorted."""
    rows = documents(LENGTHS)
    return [sorted(rows[i]["input_ids"] for i in batch) for epoch in range(EPOCHS) for batch in _batches().epoch(epoch)]


def _batches() -> GlobalBatches:
    return GlobalBatches(np.array(LENGTHS), 3, documents=DOCUMENTS)
