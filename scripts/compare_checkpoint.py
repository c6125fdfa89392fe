"""Held-out loss of two checkpoints with plain transformers: each document alone, stock attention, nothing of hf_longctx.

python scripts/compare_checkpoint.py BEFORE AFTER --documents DATASET_DIR --split test

A checkpoint may be an adapter of PEFT: it is loaded on the weights that it names, with the configuration beside it, if any. The
loss must have fallen by more than its paired standard error, and where AFTER holds the results.json of its run, both losses must
be those that the run reported.
"""

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

TOLERANCES = {"float32": 1e-3, "bfloat16": 2e-2}
"""How far a loss may be from the run's, by the dtype that either computes in. In float32 they differ by the order of sums, in
bfloat16 by roundings. A loss in the other dtype is another one: a few steps change weights by less than bfloat16 resolves
(four steps of the quickstart: 2.356 in bfloat16, 2.285 in float32)."""


@dataclass(frozen=True)
class Fall:
    """By how much the loss per predicted token fell."""

    before: float
    after: float
    standard_error: float
    """of before - after, paired: from the differences of the same documents; NaN for one document"""

    @property
    def difference(self) -> float:
        return self.before - self.after


def fall(before: Sequence[float], after: Sequence[float], predicted: Sequence[int]) -> Fall:
    """The fall of the mean over tokens, and its standard error over documents.

    With n_d predicted tokens and a fall of f_d per token in document d of D, the fall is f = sum(n_d f_d) / sum(n_d), a ratio
    of two sums over documents; its variance is D / (D - 1) * sum((n_d (f_d - f))^2) / sum(n_d)^2 (Cochran, Sampling Techniques,
    6.4).

    Args:
        before, after: mean loss per predicted token of each document, nats.
        predicted: predicted tokens of each document.
    """
    tokens, documents = sum(predicted), len(predicted)
    means = [sum(loss * count for loss, count in zip(losses, predicted)) / tokens for losses in (before, after)]
    difference = means[0] - means[1]
    squares = sum((count * (b - a - difference)) ** 2 for b, a, count in zip(before, after, predicted))
    error = math.sqrt(documents / (documents - 1) * squares) / tokens if documents > 1 else math.nan
    return Fall(means[0], means[1], error)


def load(checkpoint: str) -> Any:
    """A model in float32, with its adapter where the checkpoint is one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    if not (Path(checkpoint) / "adapter_config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    from peft import PeftConfig, PeftModel

    base = PeftConfig.from_pretrained(checkpoint).base_model_name_or_path
    config = AutoConfig.from_pretrained(checkpoint if (Path(checkpoint) / "config.json").is_file() else base)
    return PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, config=config, dtype=torch.float32), checkpoint
    )


def document_losses(model: Any, documents: list[list[int]], dtype: str, on_document: Callable[[], None]) -> list[float]:
    """Mean cross-entropy per predicted token of each document; float32 weights, under autocast if `dtype` is bfloat16."""
    import torch

    losses = []
    for document in documents:
        tokens = torch.tensor([document])
        with torch.no_grad(), torch.autocast(model.device.type, torch.bfloat16, enabled=dtype == "bfloat16"):
            losses.append(float(model(input_ids=tokens, labels=tokens, use_cache=False).loss))
        on_document()
    return losses


def compare(checkpoints: tuple[str, str], documents: list[list[int]], dtype: str, progress: Progress) -> Fall:
    """Both checkpoints side by side, each with half of the processors: short documents keep one thread busy, not several."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // len(checkpoints)))
    models = [load(checkpoint).eval() for checkpoint in checkpoints]
    bar = progress.add_task("plain transformers: held-out loss of both", total=len(checkpoints) * len(documents))
    with ThreadPoolExecutor(len(models)) as pool:
        before, after = pool.map(
            lambda model: document_losses(model, documents, dtype, lambda: progress.advance(bar)), models
        )
    return fall(before, after, [len(document) - 1 for document in documents])


def problem(drop: Fall, run: dict[str, float], tolerance: float) -> str | None:
    """Return what is wrong with a comparison, in one sentence; `run`: results.json of the run, or nothing."""
    for name, loss in (("eval_loss_before", drop.before), ("eval_loss_after", drop.after)):
        if name in run and not abs(run[name] - loss) <= tolerance:
            return (
                f"the run reported {name} {run[name]:.4f}, and plain transformers finds {loss:.4f}: they differ by "
                f"{abs(run[name] - loss):.4f}, and {tolerance:g} is allowed"
            )
    if not drop.difference > drop.standard_error:
        return (
            f"the held-out loss did not fall by more than its standard error: {drop.before:.4f} before, {drop.after:.4f} "
            f"after, a fall of {drop.difference:.4f} with a standard error of {drop.standard_error:.4f}"
        )
    return None


def half_precision(record: dict[str, Any]) -> str | None:
    """Return the half precision that a run computed in, by its run.json: autocast's, or that of its weights; None: float32."""
    dtypes = [record.get("training", {}).get("autocast"), record.get("model", {}).get("dtype")]
    return next((dtype for dtype in dtypes if dtype in ("bfloat16", "float16")), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="directory of the first checkpoint")
    parser.add_argument("after", help="directory of the checkpoint that is compared with it")
    parser.add_argument(
        "--documents",
        required=True,
        help="read documents from this directory, made by save_to_disk, with a column input_ids",
    )
    parser.add_argument("--split", default="test")
    parser.add_argument("--dtype", choices=list(TOLERANCES), help="compute products in this dtype (default: the run's)")
    parser.add_argument(
        "--tolerance",
        type=float,
        help="allow this difference between these losses and the run's (default: by the dtypes)",
    )
    args = parser.parse_args()

    os.environ.setdefault("TQDM_DISABLE", "1")
    began = time.monotonic()
    console = Console(highlight=False, soft_wrap=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    results, record = (Path(args.after) / name for name in ("results.json", "run.json"))
    run = json.loads(results.read_text()) if results.is_file() else {}
    half = half_precision(json.loads(record.read_text())) if record.is_file() else None
    dtype = args.dtype or ("bfloat16" if half == "bfloat16" else "float32")
    with Progress(*columns, console=console, transient=True) as progress:
        waiting = progress.add_task("plain transformers: loading", total=None)
        from datasets import load_from_disk

        documents = [list(row) for row in load_from_disk(args.documents)[args.split]["input_ids"] if len(row) > 1]
        progress.update(waiting, visible=False)
        drop = compare((args.before, args.after), documents, dtype, progress)
    tolerance = max(TOLERANCES[dtype], TOLERANCES["bfloat16" if half else "float32"])
    tolerance = tolerance if args.tolerance is None else args.tolerance
    console.print(
        f"held-out loss, plain transformers in {dtype}: {drop.before:.4f} before, {drop.after:.4f} after; a fall of "
        f"{drop.difference:.4f}, standard error {drop.standard_error:.4f} over {len(documents)} documents"
    )
    if wrong := problem(drop, run, tolerance):
        sys.exit(wrong)
    if run:
        console.print(f"the run reported the same losses, to {tolerance:g}")
    console.print(f"verified in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
