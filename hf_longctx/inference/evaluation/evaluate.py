"""One model, evaluated: losses of documents, and what it finds in long texts.

    documents = as_documents(dataset)
    found = evaluate_model(model, documents, exchange=trainer.exchange, capacity=65536)
    found.losses.loss, found.losses.by_position()

Every rank calls it with the same arguments, and gets the same result. It is what `hf-longctx evaluate` does, and may be called
during training: the model's modes are left as they were. What is sent is said in losses.py and greedy.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hf_longctx.attention.exchange import Exchange
from hf_longctx.inference.evaluation.comparison import Comparison, Difference, compare
from hf_longctx.inference.evaluation.greedy import greedy_answers
from hf_longctx.inference.evaluation.losses import (
    NEAR,
    Bucket,
    Document,
    DocumentLosses,
    document_losses,
    scored_tokens,
)
from hf_longctx.inference.evaluation.retrieval import Cell, Trial, cells_of

Progress = Callable[[int, int], None]
"""Called with the tokens that the model has read so far, and all that it will read."""


@dataclass(frozen=True, eq=False)
class Evaluation:
    """Results of the evaluation of a model."""

    losses: DocumentLosses | None
    """None: no documents were given"""
    retrieval: list[Cell]

    def to_json(self) -> dict[str, Any]:
        """Return all as in evaluation.json; docs/evaluation.md says what its keys mean. What was not measured is left out."""
        results: dict[str, Any] = {}
        if self.losses is not None:
            results |= {
                "tokens": int(self.losses.tokens.sum()),
                "documents": len(self.losses.lengths),
                "loss": self.losses.loss,
                "by_position": [_bucket(bucket) for bucket in self.losses.by_position()],
                "by_length": [_bucket(bucket) for bucket in self.losses.by_length()],
            }
        if self.retrieval:
            results["retrieval"] = [asdict(cell) for cell in self.retrieval]
        return results


def evaluate_model(
    model: torch.nn.Module,
    documents: Sequence[Document] = (),
    trials: Sequence[Trial] = (),
    *,
    exchange: Exchange | None = None,
    capacity: int | None = None,
    near: int = NEAR,
    on_progress: Progress = lambda done, total: None,
) -> Evaluation:
    """Evaluates a model on all ranks of an exchange.

    Args:
        model: patched by `patch_model`; every rank holds all of it.
        documents: as `as_documents` makes them of a data set; none: no losses.
        trials: as `make_trials` makes them; none: nothing is looked for.
        exchange: the ranks that share the work; None: this process does it all.
        capacity: most tokens of a micro-batch on one rank; None: 8192, or what the longest document needs.
        near: tokens of context that the near loss grants (losses.py); 0: it is not measured.
        on_progress: see Progress.

    Raises:
        ValueError: the model is not patched, a document is too long for all ranks together or holds what is no token of the
            model, or ranks passed different documents.
    """
    total = sum(len(trial.prompt) + len(trial.answer) - 1 for trial in trials)
    total += scored_tokens(documents, near) if documents else 0
    done = 0

    def advance(tokens: int) -> None:
        nonlocal done
        done += tokens
        on_progress(done, total)

    settings: dict[str, Any] = {"exchange": exchange, "capacity": capacity, "on_progress": advance}
    losses = document_losses(model, documents, near=near, **settings) if documents else None
    prompts, answers = [trial.prompt for trial in trials], [trial.answer for trial in trials]
    retrieval = cells_of(trials, greedy_answers(model, prompts, answers, **settings)) if trials else []
    return Evaluation(losses, retrieval)


def compared_json(first: Evaluation, second: Evaluation) -> dict[str, Any]:
    """The key `difference` of evaluation.json: the first's losses minus the second's, if both were measured."""
    if first.losses is None or second.losses is None:
        return {}
    comparison: Comparison = compare(first.losses, second.losses)
    return {
        "overall": _difference(comparison.overall),
        "by_position": [_difference(difference) for difference in comparison.by_position],
        "by_length": [_difference(difference) for difference in comparison.by_length],
    }


def _bucket(bucket: Bucket) -> dict[str, Any]:
    entry = asdict(bucket)
    entry = {"from": entry.pop("start"), "to": entry.pop("stop")} | entry
    return {key: value for key, value in entry.items() if value is not None}


def _difference(difference: Difference) -> dict[str, Any]:
    entry = asdict(difference)
    entry = {"from": entry.pop("start"), "to": entry.pop("stop")} | entry
    entry["interval"] = None if difference.interval is None else list(difference.interval)
    return entry
